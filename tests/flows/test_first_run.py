"""The start of a first run is interrupted and killed, at later and later moments; the next one in the same workspace goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from klear_command import FEW_PROBLEMS, Command, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # six starts, on a machine that may be busy


def grows_to(name: str, size: int) -> Callable[[Path], bool]:
    """Whether this file of the workspace has so many bytes, or is not there any more because it has been given its name."""
    beside = name.replace("/mlflow.db", "/.mlflow.db.new")

    def is_so(workspace: Path) -> bool:
        files = [workspace / beside, workspace / name]
        return any(f.exists() and f.stat().st_size >= size for f in files)

    return is_so


def is_there(pattern: str) -> Callable[[Path], bool]:
    return lambda workspace: any(workspace.glob(pattern))


MOMENTS = [
    (is_there("prefect"), 0.0, signal.SIGINT),
    (grows_to("prefect/prefect.db", 200_000), 0.0, signal.SIGKILL),
    (grows_to("mlflow/mlflow.db", 0), 0.0, signal.SIGKILL),
    (grows_to("mlflow/mlflow.db", 400_000), 0.4, signal.SIGKILL),
    (is_there("artifacts/benchmarks"), 0.0, signal.SIGKILL),
]
"""What has happened in the workspace, seconds after it, and how the run is ended then; in the order of a start."""


def test_a_workspace_whose_every_start_is_ended_at_a_later_moment_works_in_the_end(tmp_path: Path):
    """Each start must get over what the one before has left, to a later moment; the last one ends by itself."""
    workspace = tmp_path / "ws"
    commands: list[Command] = []
    try:
        for number, (has_happened, later_s, how) in enumerate(MOMENTS):
            if has_happened(workspace):  # a busy machine ended the start before too late
                continue
            command = run(workspace, log=tmp_path / f"{number}.log")
            commands.append(command)
            command.until(partial(has_happened, workspace))
            time.sleep(later_s)
            command.kill() if how == signal.SIGKILL else command.interrupt(how)
            assert "Traceback" not in command.output
            assert "error" not in command.output
        assert len(commands) > len(MOMENTS) // 2
        last = run(workspace, log=tmp_path / "last.log")
        commands.append(last)
        assert last.wait() == 0, last.output
        assert "error" not in last.output
        assert "broken" not in last.output
    finally:
        for command in commands:
            command.end()


def run(workspace: Path, *, log: Path) -> Command:
    settings = [part for setting in (*FEW_PROBLEMS, f"workspace.root={workspace}") for part in ("--set", setting)]
    return start("run", "configs/smoke", *settings, "--until", "benchmarks", log=log)
