"""Each step that only reports is broken in turn while a stage fails or ends well; the stage ends as without it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from klear_core.artifacts.bucket import Bucket, LeaseTimes, lease
from klear_core.artifacts.manifest import ArtifactRef, StageSummary
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.config.stage import BaseJob
from klear_core.config.train import TinyModelConfig
from klear_core.errors import DataError, DiskFullError, ResourceError, reporting
from klear_core.metrics import Telemetry
from klear_core.pipeline.graph import open_store, workspace_root
from tasks import tracking
from tasks.progress import Attempt, Console, console, shown_on
from tasks.stage import is_worth_a_retry, run_stage
from tasks.tracking import RunInfo


class Terminal(Console):
    """Once `is_broken`, as of `klear run | head`."""

    is_broken = False

    def stage_started(self, stage: str, *, attempt: int) -> None:
        self._write()

    def stage_progress(self, stage: str, done: int, total: int, note: str) -> None:
        self._write()

    def stage_done(self, stage: str, ref: ArtifactRef, *, was_reused: bool, wall_s: float) -> None:
        self._write()

    def stage_failed(self, stage: str, error: BaseException, attempt: Attempt) -> None:
        self._write()

    def _write(self) -> None:
        if self.is_broken:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")


TERMINAL = Terminal()


def no_records(workspace: WorkspaceConfig) -> None:
    """A file is in the place of the folder of records."""
    folder = workspace_root(workspace) / "mlflow" / "undelivered"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("")


def no_mlflow(workspace: WorkspaceConfig) -> None:
    """MLflow's database and its lock go while the stage runs."""
    shutil.rmtree(workspace_root(workspace) / "mlflow")
    (workspace_root(workspace) / "mlflow").write_text("")


def no_terminal(_workspace: WorkspaceConfig) -> None:
    TERMINAL.is_broken = True


STEPS = [no_records, no_mlflow, no_terminal]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracked: Path) -> Iterator[WorkspaceConfig]:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    TERMINAL.is_broken = False
    with shown_on(TERMINAL):
        yield WorkspaceConfig(root=str(tracked), store=(tmp_path / "store").as_uri())


def run(workspace: WorkspaceConfig, end: Callable[[], None]) -> ArtifactRef:
    """Run a stage that calls `end` at its end, then close the pipeline's run."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        telemetry.log({"base/loss/train": 1.0}, step=1)
        telemetry.progress(1, 1)
        end()
        (workdir / "weights").write_text("w")
        return StageSummary(counts={"steps": 1})

    info = RunInfo(workspace=workspace, run_id="a", run_name="test", stage="base", started_at=datetime.now(UTC))
    try:
        return run_stage(info, BaseJob(seed=0, model=TinyModelConfig()), {}, body)
    finally:
        tracking.end_pipeline(info, "FAILED")


@pytest.mark.parametrize("broken", STEPS)
@pytest.mark.parametrize("is_before", [False, True])
def test_a_broken_report_never_replaces_the_error_of_a_stage(
    workspace: WorkspaceConfig, broken: Callable[[WorkspaceConfig], None], is_before: bool
) -> None:
    if is_before and broken is no_mlflow:
        pytest.skip("is refused before a run begins")
    failure = DataError("rows.jsonl, row 3: no answer")

    def fail() -> None:
        broken(workspace)
        raise failure

    if is_before:
        broken(workspace)
    with pytest.raises(DataError) as raised:
        run(workspace, fail)
    assert raised.value is failure
    assert raised.value.__context__ is None


@pytest.mark.parametrize("broken", STEPS)
def test_a_broken_report_ends_no_stage(workspace: WorkspaceConfig, broken: Callable[[WorkspaceConfig], None]) -> None:
    ref = run(workspace, lambda: broken(workspace))
    assert open_store(workspace).find(ref.kind, ref.fingerprint) == ref


@pytest.mark.parametrize("broken", STEPS)
def test_an_interrupt_stays_one(workspace: WorkspaceConfig, broken: Callable[[WorkspaceConfig], None]) -> None:
    def interrupt() -> None:
        broken(workspace)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(workspace, interrupt)


def test_a_lease_that_cannot_be_given_back_hides_no_error(tmp_path: Path) -> None:
    bucket = Bucket((tmp_path / "store").as_uri())

    def fail() -> None:
        with lease(bucket, "leases/a", LeaseTimes(), node="n", on_wait=print):
            shutil.rmtree(tmp_path / "store")
            (tmp_path / "store").write_text("")
            raise DataError("row 3")

    with pytest.raises(DataError):
        fail()


def test_ctrl_c_in_a_report_gets_through() -> None:
    with pytest.raises(KeyboardInterrupt), reporting("x"):
        raise KeyboardInterrupt
    with pytest.raises(SystemError), reporting("x"):
        raise SystemError from KeyboardInterrupt()


FULL = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
    RuntimeError("(sqlite3.OperationalError) database or disk is full"),
    ResourceError("checkpoint step-1 could not be written: rank 0: OSError(28, 'No space left on device')"),
]


@pytest.mark.parametrize("error", FULL)
@pytest.mark.parametrize("broken", [no_records, no_terminal])
def test_a_full_disk_is_named_with_its_remedy_and_is_not_tried_again(
    workspace: WorkspaceConfig, error: Exception, broken: Callable[[WorkspaceConfig], None]
) -> None:
    def fill() -> None:
        broken(workspace)
        raise error

    with pytest.raises(DiskFullError, match=r"no space left.*MB free.*run the same command again") as raised:
        run(workspace, fill)
    for each in (error, raised.value):
        assert not is_worth_a_retry(None, None, _State(each))


def test_a_full_disk_is_not_an_outage_of_mlflow(workspace: WorkspaceConfig, caplog: pytest.LogCaptureFixture) -> None:
    """The disk is full where MLflow's records go, and nowhere else."""
    lock = workspace_root(workspace) / "mlflow" / ".lock"

    def fill() -> None:
        lock.unlink(missing_ok=True)
        lock.symlink_to("/dev/full")

    ref = run(workspace, fill)
    assert ref.path.is_dir()
    assert "does not answer" not in caplog.text


class _State:
    def __init__(self, data: object) -> None:
        self.data = data


def test_the_line_a_minute_reaches_every_console() -> None:
    lines: list[str] = []

    class Lines(Console):
        def stage_pace(self, line: str) -> None:
            lines.append(line)

    with shown_on(Lines()), shown_on(Lines()):
        console().stage_pace("rl: 3 of 8")
    assert lines == ["rl: 3 of 8"] * 2
