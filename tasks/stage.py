"""Run one stage: reuse or build its artifact, and report it to MLflow, Prefect and the console."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import Task, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.tasks import exponential_backoff
from pydantic import ValidationError

from klear_core.artifacts.files import says_disk_full
from klear_core.artifacts.manifest import ArtifactRef, InputRecord, Manifest, StageSummary
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.config.settings import result_settings
from klear_core.config.stage import Job
from klear_core.errors import EngineMemoryError, KlearError, is_interrupt, reporting
from klear_core.metrics import METRICS_FILE, MetricsFile, finite
from klear_core.pipeline.graph import artifact_id, input_records, open_store, workspace_root
from tasks import tracking
from tasks.progress import Attempt, PrefectProgress, ProgressLines, artifact_of_current_run, console, show_in_prefect
from tasks.tracking import RunInfo, code_commit, versions

if TYPE_CHECKING:
    from klear_core.artifacts.store import LocalSlot

log = logging.getLogger(__name__)


Inputs = Mapping[str, ArtifactRef]
StageTask = Task[[RunInfo, Any, Inputs], ArtifactRef]
StageBody = Callable[..., StageSummary]
"""Takes `workdir` and `telemetry`; writes the result there, continuing from what an earlier attempt left."""


def run_stage(info: RunInfo, job: Job, inputs: Inputs, body: StageBody) -> ArtifactRef:
    """Return the artifact of this job on these inputs: an existing one, or one that `body` builds.

    An artifact is published atomically. If two runs need the same one, one builds it and the other waits. A body that
    fails leaves its working folder for the next attempt; a full disk is a ResourceError.
    """
    artifact = artifact_id(job, inputs, info.workspace)
    started = time.monotonic()
    with open_store(info.workspace).create(artifact.kind, artifact.fingerprint) as slot:
        if slot.ref is not None:
            log.info("%s: reused %s", info.stage, slot.ref.path)
            console().stage_done(info.stage, slot.ref, was_reused=True, wall_s=time.monotonic() - started)
            return slot.ref
        console().stage_started(info.stage, attempt=slot.attempt)
        log.info("%s: attempt %d in %s", info.stage, slot.attempt, slot.workdir)
        try:
            ref = _build(info, job, inputs, body, slot)
        except BaseException as e:
            # With an artifact the stage itself is done: what failed is telling MLflow or Prefect about it.
            if slot.ref is None:
                console().stage_failed(info.stage, e, this_attempt(e))
            raise
        log.info("%s: made %s in %.1f s", info.stage, ref.path, time.monotonic() - started)
        console().stage_done(info.stage, ref, was_reused=False, wall_s=time.monotonic() - started)
        return ref


class StageTelemetry:
    """Writes a stage's metrics to its file, from which MLflow gets them, and shows progress, also a line a minute."""

    def __init__(self, stage: str, metrics_file: Path) -> None:
        self.stage = stage
        self._file = MetricsFile(metrics_file)
        self._prefect = PrefectProgress(stage, artifact_of_current_run(stage))
        self._lines = ProgressLines(stage, _say)
        self._last_step: int | None = None
        self._lock = threading.Lock()  # a stage may add numbers from a thread of its own

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log one row; it replaces rows of this and later steps, which a killed attempt or a lost learner left.

        MLflow cannot delete metrics: there such a step is in the history twice, and the later value counts. Values that
        are not finite are left out of both.
        """
        finite_metrics = finite(metrics)
        if len(finite_metrics) < len(metrics):
            left_out = ", ".join(metrics.keys() - finite_metrics.keys())
            log.warning(
                "%s: step %d: these metrics are left out because they are not finite: %s", self.stage, step, left_out
            )
        with self._lock:
            # None: the first row of this attempt, before which an earlier attempt may have logged later steps.
            if self._last_step is None or step <= self._last_step:
                self._file.rewind(step)
            self._last_step = step
            self._file.append(finite_metrics, step=step)

    def add(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log more numbers of a step in a row of their own; other rows stay. Only finite values are logged."""
        with self._lock:
            self._file.append(metrics, step=step)

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total` units on the console and in Prefect."""
        console().stage_progress(self.stage, done, total, note)
        with reporting(f"the progress of {self.stage} is not shown in Prefect", level=logging.DEBUG):
            self._prefect.update(done, total, note)
        self._lines.update(done, total, note)

    def close(self, *, is_done: bool) -> None:
        """Show in Prefect how the stage ended, and say no more lines."""
        self._lines.close()
        with reporting(f"the end of {self.stage} is not shown in Prefect"):
            self._prefect.close(is_done=is_done)


def _say(line: str) -> None:
    """Log a line about the running stage, and show it where there is no bar."""
    log.info("%s", line)
    console().stage_pace(line)


def _build(info: RunInfo, job: Job, inputs: Inputs, body: StageBody, slot: LocalSlot) -> ArtifactRef:
    started = time.monotonic()
    records = input_records(job, inputs, info.workspace)
    metrics_file = slot.workdir / METRICS_FILE  # part of the artifact, and of what a later attempt continues
    with tracking.stage_run(info, job, slot.fingerprint, records, metrics_file) as run:
        summary = _run_body(body, slot.workdir, StageTelemetry(info.stage, metrics_file))
        run.flush()  # before the manifest, so that its note names only what MLflow still lacks
        wall_s = round(time.monotonic() - started, 3)
        manifest = _manifest(info, job, slot, records, summary, run=run, wall_s=wall_s)
        ref = slot.publish(manifest)
        run.set_artifact(ref)
    with reporting(f"the summary of {info.stage} is not shown in Prefect"):
        show_in_prefect(info, manifest, ref)
    return ref


def _run_body(body: StageBody, workdir: Path, telemetry: StageTelemetry) -> StageSummary:
    is_done = False
    try:
        summary = body(workdir=workdir, telemetry=telemetry)
        is_done = True
    finally:
        telemetry.close(is_done=is_done)
        _return_memory()
    return summary


def _return_memory() -> None:
    """Give memory that this process has freed back to the system.

    glibc keeps what many threads have freed in small pieces: 6.7 GB after SFT of 135 million parameters, which the next
    stage's workers lacked. Other C libraries have no such call.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _manifest(
    info: RunInfo,
    job: Job,
    slot: LocalSlot,
    inputs: tuple[InputRecord, ...],
    summary: StageSummary,
    *,
    run: tracking.StageRun,
    wall_s: float,
) -> Manifest:
    commit = code_commit()
    notes = summary.notes
    if run.trouble:
        notes = (*notes, run.trouble)
    return Manifest(
        kind=slot.kind,
        fingerprint=slot.fingerprint,
        stage=info.stage,
        code_version=job.code_version,
        config=job.model_dump(mode="json"),
        result_config=result_settings(job),
        inputs=inputs,
        git_commit=commit.sha if commit else None,
        git_dirty=commit is not None and commit.is_dirty,
        versions=versions(),
        seeds=summary.seeds,
        counts=summary.counts,
        ledger=summary.ledger,
        notes=notes,
        given=summary.given,
        mlflow_run_id=run.run_id,
        created_at=datetime.now(UTC),
        attempts=slot.attempt,
        wall_s=wall_s,
    )


# ---- Prefect tasks: retries and cache ----


_FIRST_DELAY_S = 5.0
"""Seconds before the first retry; each later delay is twice the one before it."""
_OURS_OR_THE_USERS = (ValidationError, TypeError, AttributeError, NameError, AssertionError, ImportError)
"""Errors that a retry would repeat: wrong settings, or bugs."""


def stage(body: StageBody) -> StageTask:
    """Make the task of a stage that is built by `body(job, inputs, *, workdir, telemetry)`, under the body's name."""

    def run(info: RunInfo, job: Job, inputs: Inputs) -> ArtifactRef:
        return run_stage(info, job, inputs, partial(body, job, inputs))

    # Not `functools.wraps`: Prefect would take the body's parameters for those of the task.
    run.__name__ = run.__qualname__ = body.__name__
    run.__doc__ = body.__doc__
    return stage_task(run)


def stage_task(function: Callable[[RunInfo, Any, Inputs], ArtifactRef]) -> StageTask:
    """Make a task of `f(info: RunInfo, job: Job, inputs: Inputs) -> ArtifactRef`.

    The cache key is our fingerprint, so Prefect's UI shows Cached exactly where an artifact is reused, both after Retry
    in the same run and in other runs.
    """
    decorate = task(
        task_run_name="{info.stage}",
        retry_jitter_factor=0.5,
        retry_condition_fn=is_worth_a_retry,
        cache_key_fn=cache_key,
        persist_result=True,  # Prefect caches only persisted results
        result_serializer="json",
    )
    return decorate(function)


def in_workspace(stage: StageTask, workspace: WorkspaceConfig) -> StageTask:
    """Return the task with the workspace's retries, timeout and result storage, where other processes find results."""
    return stage.with_options(
        retries=workspace.retries,
        retry_delay_seconds=exponential_backoff(_FIRST_DELAY_S)(workspace.retries),
        timeout_seconds=workspace.timeout_s,
        result_storage=workspace_root(workspace) / "prefect-results",
    )


def is_worth_a_retry(
    task: Task[..., Any],  # noqa: ARG001  Prefect's signature
    task_run: TaskRun,  # noqa: ARG001
    state: State[Any],
) -> bool:
    """Return whether the error may be transient (disk, network, lost worker): not a wrong config, bad data or a bug."""
    return _may_pass(state.data)


def this_attempt(error: BaseException) -> Attempt:
    """Return the attempt of the current task run that `error` ended; outside a task run there is only one."""
    context = TaskRunContext.get()
    if context is None:
        return Attempt(number=1, of=1, next_in_s=None)
    tries = context.task.retries + 1
    number = (context.task_run.run_count - 1) % tries + 1  # Prefect keeps counting when the flow run is retried
    if number == tries or not _may_pass(error):
        return Attempt(number=number, of=number, next_in_s=None)
    delays = context.task.retry_delay_seconds
    assert isinstance(delays, list), type(delays)
    return Attempt(number=number, of=tries, next_in_s=delays[number - 1])


def _may_pass(error: object) -> bool:
    if isinstance(error, BaseException) and (is_interrupt(error) or says_disk_full(error)):
        return False
    if isinstance(error, KlearError):
        # An error of too many lost engines may pass, unless it is the same settings that cost the last one.
        return not (error.is_permanent or _is_permanent_cause(error.__cause__))
    return not isinstance(error, _OURS_OR_THE_USERS)


def _is_permanent_cause(error: BaseException | None) -> bool:
    if error is None:
        return False
    return isinstance(error, EngineMemoryError) or _is_permanent_cause(error.__cause__)


def cache_key(context: TaskRunContext, parameters: dict[str, Any]) -> str | None:  # noqa: ARG001  Prefect's signature
    """Return `kind-fingerprint`, which is also the name of the result file; None for a stage that runs every time."""
    if parameters["job"].asks_registry:
        return None
    own = artifact_id(parameters["job"], parameters["inputs"], parameters["info"].workspace)
    return f"{own.kind}-{own.fingerprint}"
