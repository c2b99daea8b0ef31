"""A killed run is told from one that still runs, and from one that ended by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest

from flows.outages import killed_runs, record_run

RUN = "5f2c0000-0000-0000-0000-000000000001"
HOLD = f"""
import sys
from uuid import UUID
from flows.outages import record_run

record_run(UUID("{RUN}"))
print("recorded", flush=True)
sys.stdin.read()
"""


def begin(home: Path) -> subprocess.Popen[str]:
    """A process with a run; it ends when its input does."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env={"PREFECT_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "recorded\n"
    return process


def test_a_run_is_killed_once_its_process_is_gone_and_not_before(tmp_path: Path):
    with begin(tmp_path) as process:
        folder = tmp_path / "klear-runs"
        assert [file.name for file in folder.iterdir()] == [RUN]
        assert killed_runs(folder) == []
        process.kill()
        process.wait()
        assert killed_runs(folder) == [(UUID(RUN), folder / RUN)]


def test_a_run_that_ended_by_itself_leaves_nothing(tmp_path: Path):
    with begin(tmp_path) as process:
        process.communicate()
        assert process.returncode == 0
    assert list((tmp_path / "klear-runs").iterdir()) == []


def test_a_process_that_runs_again_and_again_holds_the_record_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    folder, before = tmp_path / "klear-runs", len(os.listdir("/proc/self/fd"))
    for number in range(3):
        record_run(UUID(int=number))
        assert [file.name for file in folder.iterdir()] == [str(UUID(int=number))]
        assert killed_runs(folder) == []
        assert len(os.listdir("/proc/self/fd")) == before + 1


def test_a_record_that_is_just_being_made_is_no_killed_run(tmp_path: Path):
    (tmp_path / RUN).touch()
    assert killed_runs(tmp_path) == []


def test_what_nfs_leaves_of_a_removed_record_is_no_killed_run(tmp_path: Path):
    (tmp_path / ".nfs000000000001").write_text("process 1")
    assert killed_runs(tmp_path) == []


def test_where_nothing_has_run_nothing_was_killed(tmp_path: Path):
    assert killed_runs(tmp_path / "klear-runs") == []
