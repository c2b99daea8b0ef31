"""The examples of docs/extending.md work on a copy of this checkout, section by section, and show what the page says."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
COPIED = ("klear_core", "tasks", "flows", "configs", "tests", "pyproject.toml", "prefect.yaml")
MOST_LINES = 30
OURS = ("KLEAR", "PREFECT", "MLFLOW", "RAY", "PYTHON")
BLOCK = re.compile(r"(?:^`(?P<file>[^`\n]+)`:\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A code block; `file` is the name in the line above it, empty without one."""

    example: str
    language: str
    file: str
    text: str

    @property
    def num_added(self) -> int:
        """Lines that a reader adds to the checkout; an unnamed block only shows that the others work."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        if self.language == "diff":
            return sum(line.startswith("+") and not line.startswith("+++") for line in lines)
        return len(lines) if self.file else 0

    @property
    def touched(self) -> list[str]:
        """Files that the block creates or changes."""
        return [self.file] if self.file else re.findall(r"^\+\+\+ b/(\S+)", self.text, re.MULTILINE)


def sections() -> dict[str, list[Block]]:
    """The code blocks of each section with a second-level heading, each with the heading just above it."""
    found: dict[str, list[Block]] = {}
    section = example = ""
    for part in re.split(r"^(?=##+ )", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        example = heading.lstrip("# ")
        section = section if heading.startswith("###") else example
        blocks = [Block(example=example, **groups_of(match)) for match in BLOCK.finditer(body)]
        found[section] = found.get(section, []) + blocks
    return found


def groups_of(match: re.Match[str]) -> dict[str, str]:
    return {name: text or "" for name, text in match.groupdict().items()}


SECTIONS = sections()
EXAMPLES = {
    f"{section}: {example}": sum(block.num_added for block in blocks)
    for section, all_blocks in SECTIONS.items()
    for example, blocks in groupby(all_blocks, key=lambda block: block.example)
}


def is_slow(blocks: list[Block]) -> bool:
    """Whether a section runs stages or a test suite."""
    return any("$ klear run" in block.text or "$ python -m pytest" in block.text for block in blocks)


def test_there_is_a_section_for_each_thing_that_design_names():
    assert list(SECTIONS) == [
        "A data source",
        "A reward rule",
        "A judge",
        "A loss",
        "An advantage",
        "A benchmark",
        "An engine",
        "A stage",
    ]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_adds_at_most_thirty_lines(example: str):
    assert EXAMPLES[example] <= MOST_LINES


def test_a_stage_touches_four_source_files():
    files = [path for block in SECTIONS["A stage"] for path in block.touched]
    assert sorted(files) == [
        "klear_core/config/stage.py",
        "klear_core/distill/measure.py",
        "klear_core/pipeline/graph.py",
        "tasks/stages.py",
    ]


def test_every_block_is_applied_run_or_compared():
    for section, blocks in SECTIONS.items():
        assert blocks, section
        for block in blocks:
            assert block.file or block.language in ("diff", "python", "text", "console"), (section, block.text)


def run_in(folder: Path, command: str, given: str = "", **own: str) -> str:
    """Run a shell command in `folder` and return what it prints; the environment names no Klear but its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    settings = {
        "GIT_CEILING_DIRECTORIES": str(folder.parent),  # inside another repository, git would change that one
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    ended = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=kept | settings | own,
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, f"$ {command}\n{given}\n{ended.stdout}"
    return ended.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A copy of the packages, and commands `klear` and `python` that import nothing of Klear from anywhere else."""

    folder: Path

    def shell(self, command: str, given: str = "") -> str:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return run_in(self.folder, command, given, PATH=path, PYTHONPATH=str(self.folder))

    def add_command(self, name: str, *command: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {" ".join(command)} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """One copy for all sections, with its bytecode: a module is compiled again only where a section changes it."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, folder)
    made = Checkout(folder=folder)
    made.add_command("python")
    made.add_command("klear", "-c", "'from flows.cli import main; main()'")
    (folder / ".gitignore").write_text("__pycache__/\n")
    made.shell("git init -q && git add -A && git -c user.name=t -c user.email=t@localhost commit -qm copy")
    imported = made.shell(
        "python -", "import flows, tasks, klear_core as k; print(flows.__path__, tasks.__path__, k.__path__)"
    )
    assert imported.count(str(folder)) == 3
    return made


@pytest.fixture
def checkout(copied: Checkout) -> Checkout:
    """The copy as it was before any section."""
    copied.shell("git reset -q --hard && git clean -fdq")
    return copied


def require_shown(stated: str, shown: str) -> None:
    """Each stated line occurs in the output, in this order; `…` stands for any text."""
    at = 0
    for line in stated.splitlines():
        pattern = ".*".join(re.escape(part) for part in line.strip().split("…"))
        match = re.compile(pattern).search(shown, at)
        assert match, f"the page says\n{line}\nbut the output is\n{shown}"
        at = match.end()


@pytest.mark.parametrize("section", SECTIONS)
def test_the_diffs_of_a_section_apply(section: str):
    """Also of those sections whose examples take too long for the default tests."""
    for block in SECTIONS[section]:
        if block.language == "diff":
            run_in(ROOT, "git apply --check -", block.text)


@pytest.mark.timeout(1800)  # a section may run the whole smoke profile, on a machine that may be busy
@pytest.mark.parametrize(
    "section",
    [pytest.param(name, marks=[pytest.mark.slow] if is_slow(blocks) else []) for name, blocks in SECTIONS.items()],
)
def test_the_examples_of_a_section_work_and_show_what_the_page_says(section: str, checkout: Checkout):
    shown = ""
    for block in SECTIONS[section]:
        match block.language:
            case _ if block.file:
                path = checkout.folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)
            case "diff":
                checkout.shell("git apply -", block.text)
            case "python":
                shown = checkout.shell("python -", block.text)
            case "text":
                require_shown(block.text, shown)
            case _:
                for command, stated in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
                    require_shown(stated, checkout.shell(command))
