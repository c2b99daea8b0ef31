"""A first run is interrupted at ten moments of its start; the next one in the same workspace succeeds."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from klear_command import FEW_PROBLEMS, Command, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # each starts two runs from nothing


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
    (is_there("prefect/prefect.db"), 0.0, signal.SIGKILL),
    (grows_to("prefect/prefect.db", 200_000), 0.0, signal.SIGKILL),
    (is_there("mlflow"), 0.0, signal.SIGINT),
    (grows_to("mlflow/mlflow.db", 0), 0.0, signal.SIGKILL),
    (grows_to("mlflow/mlflow.db", 100_000), 0.0, signal.SIGINT),
    (grows_to("mlflow/mlflow.db", 400_000), 0.4, signal.SIGKILL),
    (grows_to("mlflow/mlflow.db", 800_000), 1.0, signal.SIGINT),
    (is_there("mlflow/mlflow.db"), 0.0, signal.SIGKILL),
    (is_there("artifacts/benchmarks"), 0.0, signal.SIGKILL),
]
"""What has happened in the workspace, seconds after it, and how the run is ended then."""


@pytest.mark.parametrize(("has_happened", "later_s", "how"), MOMENTS)
def test_a_first_run_that_is_ended_at_its_start_leaves_a_workspace_that_works(
    tmp_path: Path, has_happened: Callable[[Path], bool], later_s: float, how: signal.Signals
):
    workspace = tmp_path / "ws"
    first = run(workspace, log=tmp_path / "first.log")
    second: Command | None = None
    try:
        first.until(lambda: has_happened(workspace))
        time.sleep(later_s)
        first.kill() if how == signal.SIGKILL else first.interrupt(how)
        assert "Traceback" not in first.output
        second = run(workspace, log=tmp_path / "second.log")
        assert second.wait() == 0, second.output
        assert "error" not in second.output
        assert "broken" not in second.output
    finally:
        for command in filter(None, (first, second)):
            command.end()


def run(workspace: Path, *, log: Path) -> Command:
    settings = [part for setting in (*FEW_PROBLEMS, f"workspace.root={workspace}") for part in ("--set", setting)]
    return start("run", "configs/smoke", *settings, "--until", "benchmarks", log=log)
