"""The task that loads the benchmarks."""

from __future__ import annotations

from pathlib import Path

from klear_core.artifacts.ledger import StageSummary
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.data_jobs import BenchmarksJob
from klear_core.metrics import Telemetry
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task


@stage_task
def benchmarks(info: RunInfo, job: BenchmarksJob, inputs: Inputs) -> ArtifactRef:
    """Make one folder of problems per benchmark; they are never trained on. Takes no inputs."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.data.benchmarks import prepare_benchmarks

        return prepare_benchmarks(
            job.benchmarks(), seed=job.seed, runtime=job.runtime, workdir=workdir, telemetry=telemetry
        )

    return run_stage(info, job, inputs, body)
