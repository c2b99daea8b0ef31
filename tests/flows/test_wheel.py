"""A klear that was installed from a wheel, away from any checkout, has all that it needs; what needs a checkout says so."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from klear_command import ROOT

from flows.settings import CONFIGS, grid_file

COMMAND = "import flows, sys; assert flows.__path__[0].startswith(sys.argv.pop(1)); from flows.cli import main; main()"
DATA = (".c", ".h", ".j2", ".css", ".typed")


def test_profiles_that_go_by_name_are_those_of_the_repository():
    assert CONFIGS == ROOT / "configs"
    assert grid_file("losses_hot") == ROOT / "configs" / "ablations" / "losses_hot.toml"
    assert grid_file("my/grid.toml") == Path("my/grid.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A folder of packages, and an empty one to work in."""

    site: Path
    work: Path

    def klear(self, *args: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KLEAR", "PREFECT", "MLFLOW", "RAY"))}
        command = [sys.executable, "-c", COMMAND, str(self.site), *args]
        environment = kept | {"PYTHONPATH": str(self.site), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, cwd=self.work, env=environment, capture_output=True, text=True, timeout=600, check=False
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip"]
    built = subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", str(ROOT), "-w", str(folder)], capture_output=True, text=True, check=False
    )
    if built.returncode and "setuptools" in built.stderr:
        pytest.skip(f"pip cannot have the build backend here: {built.stderr[-300:]}")
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    site = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)], check=True
    )
    return Installed(site=site, work=tmp_path_factory.mktemp("empty"))


@pytest.mark.slow
def test_a_wheel_has_every_profile_and_every_data_file_of_the_packages(wheel: Path):
    there = set(zipfile.ZipFile(wheel).namelist())
    profiles = {f"flows/profiles/{file.relative_to(ROOT / 'configs')}" for file in (ROOT / "configs").rglob("*.toml")}
    data = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "klear_core").rglob("*")
        if file.suffix in DATA or file.name == "py.typed"
    }
    assert len(data) > 5
    assert profiles | data <= there


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["laptop", "klear_8b", "smoke"])
def test_an_installed_klear_plans_its_profiles(installed: Installed, profile: str):
    planned = installed.klear("plan", profile)
    assert planned.returncode == 0, planned.stderr
    assert "tokens, at most" in planned.stdout


@pytest.mark.slow
def test_an_installed_klear_runs_and_reads_relative_paths_from_where_it_is(installed: Installed):
    (installed.work / "own.jsonl").write_text((ROOT / "tests" / "files" / "problems.jsonl").read_text())
    ran = installed.klear("run", "smoke", "--until", "curate", "--set", 'curate.sources=["own.jsonl"]')
    assert ran.returncode == 0, ran.stderr
    assert "✓ curate" in ran.stdout
    assert (installed.work / "runs" / "artifacts" / "curate").is_dir()


@pytest.mark.slow
def test_what_needs_a_checkout_says_so_in_one_line(installed: Installed):
    ended = installed.klear("bench", "sampler")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: klear bench needs a checkout of the repository")
    assert len(ended.stderr.splitlines()) == 1
    assert installed.klear("ablate", "losses_hot", "--dry-run").returncode == 0
