"""The task that collects teacher traces."""

from __future__ import annotations

from pathlib import Path

from klear_core.artifacts.ledger import StageSummary
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.jobs import DistillJob
from klear_core.metrics import Telemetry
from tasks.engines import open_judges
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task
from tasks.teacher_keys import read_keys


@stage_task
def distill(info: RunInfo, job: DistillJob, inputs: Inputs) -> ArtifactRef:
    """Make judged teacher traces for `problems`."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.distill.collect import distill as collect

        with open_judges() as build_judges:
            return collect(
                job.distill,
                job.verify,
                problems=inputs["problems"].path,
                seed=job.seed,
                workdir=workdir,
                telemetry=telemetry,
                keys=read_keys([job]),
                build_judges=build_judges,
            )

    return run_stage(info, job, inputs, body)
