"""The task that makes the base model."""

from __future__ import annotations

from pathlib import Path

from klear_core.artifacts.ledger import StageSummary
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.jobs import BaseJob
from klear_core.metrics import Telemetry
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task


@stage_task
def base(info: RunInfo, job: BaseJob, inputs: Inputs) -> ArtifactRef:
    """Make the base model's folder, or a pointer to one on disk. Takes no inputs."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.train.base import prepare_base

        return prepare_base(job.model, seed=job.seed, workdir=workdir, telemetry=telemetry)

    return run_stage(info, job, inputs, body)
