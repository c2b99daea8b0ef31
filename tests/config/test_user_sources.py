"""Which files a user's function depends on, found without importing anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from klear_core.config.verify import source_digest, source_files
from klear_core.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**files: str) -> None:
    """Write files; `__` in a name is a folder: `mine__rewards` is `mine/rewards.py`."""
    for name, text in files.items():
        path = Path(f"{name.replace('__', '/')}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_module_alone_is_its_file_and_nothing_runs() -> None:
    write(alone="import math, json, numpy, klear_core.types\nraise SystemExit(3)")
    assert source_files("alone") == ("alone.py",)


def test_imports_from_the_working_directory_are_followed_from_module_to_module() -> None:
    write(rewards="import words", words="def f():\n    from lists import long", lists="long = 1", other="x = 1")
    assert source_files("rewards") == ("lists.py", "rewards.py", "words.py")


def test_the_modules_of_a_package_that_are_imported_count_with_the_packages_around_them() -> None:
    write(
        mine__a__rewards="from ..tools import count\nfrom . import near", mine__tools="", mine__a__near="", mine__far=""
    )
    for package in ("mine", "mine/a"):
        (Path(package) / "__init__.py").write_text("")
    found = source_files("mine.a.rewards")
    assert found == ("mine/__init__.py", "mine/a/__init__.py", "mine/a/near.py", "mine/a/rewards.py", "mine/tools.py")


def test_a_folder_without_init_is_a_package_too() -> None:
    write(configs__mine__rewards="from configs.mine import words", configs__mine__words="")
    assert source_files("configs.mine.rewards") == ("configs/mine/rewards.py", "configs/mine/words.py")


def test_modules_that_import_each_other_are_each_read_once() -> None:
    write(a="import b", b="import a")
    assert source_files("a") == ("a.py", "b.py")


def test_an_installed_module_is_found_and_a_folder_gives_way_to_it() -> None:
    Path("pebble").mkdir()
    found = source_files("pebble.common.types")
    assert any(path.endswith("site-packages/pebble/common/types.py") for path in found)


@pytest.mark.parametrize("edited", ["rewards", "words"])
def test_a_change_of_any_of_these_files_changes_the_digest(edited: str) -> None:
    write(rewards="import words", words="A = 1", other="B = 1")
    before = source_digest("rewards")
    write(other="B = 2")
    assert source_digest("rewards") == before
    write(**{edited: "A = 3"})
    assert source_digest("rewards") != before


@pytest.mark.parametrize("module", ["nowhere", "nowhere.inner", "here.nowhere", "sys", "empty"])
def test_a_module_without_a_file_is_refused_by_name(module: str) -> None:
    write(here="")
    Path("empty").mkdir()
    with pytest.raises(ConfigError, match=f"no Python file of module '{module}'"):
        source_files(module)


def test_a_file_that_is_not_python_is_refused_with_its_line() -> None:
    write(broken="x = 1\ndef f(:\n")
    with pytest.raises(ConfigError, match=r"broken.py is not valid Python: .*line 2"):
        source_files("broken")
