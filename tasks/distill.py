"""The task that collects teacher traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from klear_core.artifacts.ledger import StageSummary
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.distill import LocalTeacherConfig
from klear_core.config.jobs import DistillJob
from klear_core.evaluate.compute import Compute
from klear_core.metrics import Telemetry
from tasks.engines import open_compute, open_judges
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task
from tasks.teacher_keys import read_keys


@stage_task
def distill(info: RunInfo, job: DistillJob, inputs: Inputs) -> ArtifactRef:
    """Make judged teacher traces for `problems`."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.distill.collect import TeacherAccess
        from klear_core.distill.collect import distill as collect

        teacher = inputs.get("teacher")
        with _open_compute(job, inputs) as compute:
            access = TeacherAccess(
                keys=read_keys([job]),  # here and not in the job, whose settings are recorded in the manifest
                model=teacher.path if teacher else None,
                model_name=job.runtime.name,
                compute=compute,
            )
            return collect(
                job.distill,
                job.verify,
                problems=inputs["problems"].path,
                seed=job.seed,
                workdir=workdir,
                telemetry=telemetry,
                access=access,
            )

    return run_stage(info, job, inputs, body)


@contextmanager
def _open_compute(job: DistillJob, inputs: Inputs) -> Iterator[Compute]:
    """Yield where the judges run, and the engines of a local teacher."""
    teacher = job.distill.teacher
    if isinstance(teacher, LocalTeacherConfig):
        model, section = inputs["teacher"].path, "distill.teacher"
        with open_compute(teacher.engine, teacher.runtime, model, section=section) as compute:
            yield compute
        return
    with open_judges() as build_judges:
        yield Compute(section="distill", build_judges=build_judges)
