"""The task that tags problems with their difficulty."""

from __future__ import annotations

from pathlib import Path

from klear_core.artifacts.ledger import StageSummary
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.jobs import TagJob
from klear_core.metrics import Telemetry
from tasks.engines import open_compute
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task


@stage_task
def tag(info: RunInfo, job: TagJob, inputs: Inputs) -> ArtifactRef:
    """Tag `problems` by the pass rate of `model`."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.evaluate.tag import tag_problems

        model = inputs["model"].path
        with open_compute(job.tag.engine, job.tag.runtime, model, section="tag") as compute:
            return tag_problems(
                job.tag,
                job.verify,
                model=model,
                problems=inputs["problems"].path,
                seed=job.seed,
                workdir=workdir,
                telemetry=telemetry,
                compute=compute,
            )

    return run_stage(info, job, inputs, body)
