"""The task that takes problems that exist."""

from __future__ import annotations

from pathlib import Path

from klear_core.artifacts.ledger import StageSummary
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.given_jobs import GivenProblemsJob
from klear_core.metrics import Telemetry
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task


@stage_task
def given_problems(info: RunInfo, job: GivenProblemsJob, inputs: Inputs) -> ArtifactRef:
    """Make the training problems from given ones. Input `benchmarks`: problems that they must not resemble."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.data.curate import curate
        from klear_core.data.given_rows import describe_rows

        given = describe_rows(job.runtime.sources, origin=job.origin(), licence=job.given_facts().licence)
        benchmarks = inputs["benchmarks"].path
        summary = curate(job.curation(), benchmarks=benchmarks, seed=job.seed, workdir=workdir, telemetry=telemetry)
        return summary.model_copy(update={"given": given})

    return run_stage(info, job, inputs, body)
