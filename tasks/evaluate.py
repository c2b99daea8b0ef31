"""The task that evaluates one model."""

from __future__ import annotations

from pathlib import Path

from klear_core.artifacts.ledger import StageSummary
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.jobs import EvaluateJob
from klear_core.metrics import Telemetry
from tasks.engines import open_compute
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task


@stage_task
def evaluate(info: RunInfo, job: EvaluateJob, inputs: Inputs) -> ArtifactRef:
    """Make judged answers of `model` to `benchmarks`, and scores with confidence intervals."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.evaluate.run import evaluate as evaluate_model
        from klear_core.evaluate.suite import read_suite

        model = inputs["model"].path
        with open_compute(job.evaluate.engine, job.evaluate.runtime, model, section="evaluate") as compute:
            return evaluate_model(
                job.evaluate,
                job.verify,
                read_suite(inputs["benchmarks"].path, job.benchmarks),
                model=model,
                seed=job.seed,
                workdir=workdir,
                telemetry=telemetry,
                compute=compute,
            )

    return run_stage(info, job, inputs, body)
