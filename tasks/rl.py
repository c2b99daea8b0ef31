"""The task that trains a model by reinforcement learning (GPPO) on Ray."""

from __future__ import annotations

from pathlib import Path

from klear_core.artifacts.ledger import StageSummary
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.jobs import RlJob
from klear_core.metrics import Telemetry
from tasks.resources import needs_of, ray_session
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task


@stage_task
def rl(info: RunInfo, job: RlJob, inputs: Inputs) -> ArtifactRef:
    """Train `model` on `problems`; learner and rollout workers are Ray actors."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.cluster.rl_workers import RayWorkers
        from klear_core.rl.loop import train_rl

        model, problems = inputs["model"].path, inputs["problems"].path
        with ray_session(needs_of(job.rl, model)):
            return train_rl(
                job.rl,
                job.verify,
                model=model,
                problems=problems,
                seed=job.seed,
                workdir=workdir,
                telemetry=telemetry,
                workers=RayWorkers(),
            )

    return run_stage(info, job, inputs, body)
