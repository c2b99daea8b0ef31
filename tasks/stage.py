"""Run one stage: reuse or build its artifact, and report it to MLflow, Prefect and the console."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from klear_core.artifacts.ledger import StageSummary
from klear_core.artifacts.manifest import ArtifactRef, InputRecord, Manifest
from klear_core.config.settings import result_settings
from klear_core.config.stage import Job
from klear_core.metrics import METRICS_FILE, MetricsFile, Telemetry, finite
from klear_core.pipeline.fingerprints import artifact_id, input_records
from klear_core.pipeline.workspace import open_store
from tasks import tracking
from tasks.prefect_view import show_in_prefect
from tasks.progress import PrefectProgress, artifact_of_current_run, console
from tasks.provenance import code_commit, versions
from tasks.run_info import RunInfo
from tasks.task import this_attempt

if TYPE_CHECKING:
    from klear_core.artifacts.store import LocalSlot

log = logging.getLogger(__name__)


class StageBody(Protocol):
    """A core function with all arguments bound except its output folder and its telemetry."""

    def __call__(self, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
        """Write the result under `workdir`, continuing from what an earlier attempt left there."""
        ...


def run_stage(info: RunInfo, job: Job, inputs: Mapping[str, ArtifactRef], body: StageBody) -> ArtifactRef:
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
    """Sends a stage's metrics to its metrics file and to MLflow, and its progress to Prefect and the console."""

    def __init__(self, stage: str, metrics_file: Path, run: tracking.StageRun) -> None:
        self.stage = stage
        self._file = MetricsFile(metrics_file)
        self._run = run
        self._prefect = PrefectProgress(stage, artifact_of_current_run(stage))
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
            self._run.log(finite_metrics, step=step)

    def add(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log more numbers of a step in a row of their own; other rows stay. Only finite values are logged."""
        with self._lock:
            self._file.append(metrics, step=step)
            self._run.log(finite(metrics), step=step)

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total` units on the console and in Prefect."""
        console().stage_progress(self.stage, done, total, note)
        self._prefect.update(done, total, note)

    def close(self, *, is_done: bool) -> None:
        """Show in Prefect how the stage ended."""
        self._prefect.close(is_done=is_done)


def _build(info: RunInfo, job: Job, inputs: Mapping[str, ArtifactRef], body: StageBody, slot: LocalSlot) -> ArtifactRef:
    started = time.monotonic()
    records = input_records(job, inputs, info.workspace)
    metrics_file = slot.workdir / METRICS_FILE  # part of the artifact, and of what a later attempt continues
    with tracking.stage_run(info, job, slot.fingerprint, records, metrics_file) as run:
        summary = _run_body(body, slot.workdir, StageTelemetry(info.stage, metrics_file, run))
        run.flush()  # before the manifest, so that its note names only what MLflow still lacks
        wall_s = round(time.monotonic() - started, 3)
        manifest = _manifest(info, job, slot, records, summary, run=run, wall_s=wall_s)
        ref = slot.publish(manifest)
        run.set_artifact(ref)
    show_in_prefect(info, manifest, ref)
    return ref


def _run_body(body: StageBody, workdir: Path, telemetry: StageTelemetry) -> StageSummary:
    is_done = False
    try:
        summary = body(workdir=workdir, telemetry=telemetry)
        is_done = True
    finally:
        telemetry.close(is_done=is_done)
    return summary


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
