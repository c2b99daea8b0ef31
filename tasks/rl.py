"""The task that trains a model by reinforcement learning (GPPO) on Ray."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from klear_core.artifacts.home import home_of
from klear_core.artifacts.ledger import StageSummary
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.jobs import RlJob
from klear_core.metrics import Telemetry
from tasks.resources import needs_of, ray_session, share_model
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task


@stage_task
def rl(info: RunInfo, job: RlJob, inputs: Inputs) -> ArtifactRef:
    """Train `model` on `problems`; learner and rollout workers are Ray actors."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.cluster.rl_workers import RayWorkers
        from klear_core.evaluate.checkpoints import open_exam
        from klear_core.rl.curve import no_exam
        from klear_core.rl.loop import train_rl
        from klear_core.rl.workers import RlSetup

        model, problems = inputs["model"].path, inputs["problems"].path
        workers, curve = RayWorkers(), job.runtime.curve
        with ray_session(needs_of(job.rl, model)):
            share_model(model)
            return train_rl(
                RlSetup(cfg=job.rl, model=model, seed=job.seed, workdir=workdir, home=home_of(workdir)),
                job.verify,
                problems=problems,
                telemetry=telemetry,
                workers=workers,
                open_exam=no_exam if curve is None else partial(open_exam, curve, workers.judges, seed=job.seed),
            )

    return run_stage(info, job, inputs, body)
