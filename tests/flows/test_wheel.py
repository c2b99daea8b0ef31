"""A klear that was installed from a wheel, away from any checkout, has all that it needs; what needs a checkout says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from klear_command import FEW_PROBLEMS, ROOT

from flows.environment import CONFIGS, grid_file
from klear_core.artifacts.manifest import read_manifest

OURS = ("KLEAR", "PREFECT", "MLFLOW", "RAY")
PACKAGES = ("flows", "tasks", "klear_core")
A_FEW_STEPS = (
    *FEW_PROBLEMS,
    "sft.max_steps=20",
    "rl.num_steps=1",
    "rl.rollout.groups_per_step=4",
    "rl.group_filter.zero_advantage=off",
)
DATA = (".c", ".h", ".j2", ".css", ".typed")


def test_profiles_that_go_by_name_are_those_of_the_repository():
    assert CONFIGS == ROOT / "configs"
    assert grid_file("losses_hot") == ROOT / "configs" / "ablations" / "losses_hot.toml"
    assert grid_file("my/grid.toml") == Path("my/grid.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An environment that has klear from the wheel alone, and an empty folder to work in."""

    bin: Path
    work: Path

    def run(self, program: str, *args: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith((*OURS, "PYTHON", "VIRTUAL_ENV"))}
        environment = kept | {"OMP_NUM_THREADS": "1", "PATH": f"{self.bin}:{os.environ['PATH']}"}
        return subprocess.run(
            [self.bin / program, *args],
            cwd=self.work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1700,
            check=False,
        )

    def klear(self, *args: str) -> subprocess.CompletedProcess[str]:
        return self.run("klear", *args)


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
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, "install", "-q", "--no-deps", str(wheel)], check=True)
    # A path in a .pth file joins sys.path, but the .pth files there are not read: no editable klear comes with it.
    site = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(site, "libraries.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")))
    return Installed(bin=folder / "bin", work=tmp_path_factory.mktemp("empty"))


@pytest.mark.slow
def test_every_package_of_klear_comes_from_the_wheel(installed: Installed):
    code = f"import {', '.join(PACKAGES)}; print(*[p.__path__[0] for p in ({', '.join(PACKAGES)})], sep='\\n')"
    found = installed.run("python", "-c", code)
    assert found.returncode == 0, found.stderr
    folders = [Path(line) for line in found.stdout.splitlines()]
    assert [folder.name for folder in folders] == list(PACKAGES)
    assert all(folder.is_relative_to(installed.bin.parent) for folder in folders)


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
def test_an_installed_klear_reads_and_writes_relative_paths_from_where_it_is(installed: Installed):
    (installed.work / "own.jsonl").write_text((ROOT / "tests" / "files" / "problems.jsonl").read_text())
    ran = installed.klear("curate", "own.jsonl", "--out", "kept")
    assert ran.returncode == 0, ran.stderr
    assert (installed.work / "kept" / "kept.parquet").is_file()


@pytest.mark.slow
def test_what_needs_a_checkout_says_so_in_one_line(installed: Installed):
    ended = installed.klear("bench", "sampler")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: klear bench needs a checkout of the repository")
    assert len(ended.stderr.splitlines()) == 1
    assert installed.klear("ablate", "losses_hot", "--dry-run").returncode == 0


@pytest.mark.slow
def test_an_installed_klear_says_its_version(installed: Installed):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert installed.klear("--version").stdout == f"klear {declared}\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # all stages of the smoke profile, on a machine that may be busy
def test_an_installed_klear_makes_a_reasoning_model_reports_on_it_and_asks_it(installed: Installed):
    settings = [part for setting in (*A_FEW_STEPS, "workspace.root=demo") for part in ("--set", setting)]
    ran = installed.klear("run", "smoke", *settings)
    assert ran.returncode == 0, ran.stderr
    stages = re.findall(r"^  ✓ (\w+)", ran.stdout, re.MULTILINE)
    assert len(stages) == 10
    assert stages[-1] == "report"

    shown = installed.klear("show", "report", "--root", "demo")
    assert shown.returncode == 0, shown.stderr
    (report,) = installed.work.glob("demo/artifacts/report/*/report.html")
    assert report.stat().st_size > 50_000
    (leaks,) = re.findall(r'href="([^"]*leaks\.html)"', report.read_text())
    assert (report.parent / leaks).is_file()
    assert read_manifest(report.parent).git_commit is None

    asked = installed.klear("chat", "rl", "mod 6: 3,+4,*5=?", "--root", "demo")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip()
