"""The task that takes a model that exists."""

from __future__ import annotations

from pathlib import Path

from klear_core.artifacts.ledger import StageSummary
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.given_jobs import GivenModelJob
from klear_core.metrics import Telemetry
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task


@stage_task
def given_model(info: RunInfo, job: GivenModelJob, inputs: Inputs) -> ArtifactRef:
    """Make a pointer to a model in a folder or in the Hub's cache, which is downloaded first. Takes no inputs."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.train.base import take_model

        licence = job.given_facts().licence
        return take_model(job.model(), licence=licence, workdir=workdir, telemetry=telemetry)

    return run_stage(info, job, inputs, body)
