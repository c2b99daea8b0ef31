"""The task that makes training problems from sources."""

from __future__ import annotations

from pathlib import Path

from klear_core.artifacts.ledger import StageSummary
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.data_jobs import CurateJob
from klear_core.metrics import Telemetry
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task


@stage_task
def curate(info: RunInfo, job: CurateJob, inputs: Inputs) -> ArtifactRef:
    """Make the training problems, and the dropped ones. Input `benchmarks`: problems that they must not resemble."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.data.curate import curate as curate_problems

        benchmarks = inputs["benchmarks"].path
        return curate_problems(job.curate, benchmarks=benchmarks, seed=job.seed, workdir=workdir, telemetry=telemetry)

    return run_stage(info, job, inputs, body)
