"""The task that takes published traces."""

from __future__ import annotations

from pathlib import Path

from klear_core.artifacts.ledger import StageSummary
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.given_jobs import GivenTracesJob
from klear_core.metrics import Telemetry
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task


@stage_task
def given_traces(info: RunInfo, job: GivenTracesJob, inputs: Inputs) -> ArtifactRef:
    """Make traces to fine-tune on from published ones. Input `benchmarks`: problems that they must not resemble."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.data.given_rows import describe_rows
        from klear_core.distill.given import take_traces

        given = describe_rows(job.runtime.sources, origin=job.origin(), licence=job.given_facts().licence)
        summary = take_traces(
            job.runtime.sources,
            job.decontaminate,
            keep_truncated=job.keep_truncated,
            floors=(job.runtime.read, job.runtime.complete),
            benchmarks=inputs["benchmarks"].path,
            workdir=workdir,
            telemetry=telemetry,
        )
        return summary.model_copy(update={"given": given})

    return run_stage(info, job, inputs, body)
