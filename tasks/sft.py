"""The task that fine-tunes a model on long chains of thought."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from klear_core.artifacts.ledger import StageSummary
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.jobs import SftJob
from klear_core.metrics import Telemetry
from tasks.engines import scorer_beside
from tasks.resources import learner_ranks
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task


@stage_task
def sft(info: RunInfo, job: SftJob, inputs: Inputs) -> ArtifactRef:
    """Fine-tune `model` on `traces`; several learner ranks, or one on a GPU, are Ray actors."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.sft.loop import train_sft
        from klear_core.train.curve import no_scorer
        from klear_core.train.ranks import run_here

        model, traces, curve = inputs["model"].path, inputs["traces"].path, job.runtime.curve
        with learner_ranks(job.sft.runtime, model) as run_ranks:
            open_scorer = partial(scorer_beside, is_on_ray=run_ranks is not run_here, seed=job.seed, workdir=workdir)
            return train_sft(
                job.sft,
                model=model,
                traces=traces,
                seed=job.seed,
                workdir=workdir,
                telemetry=telemetry,
                run_ranks=run_ranks,
                open_scorer=partial(open_scorer, curve, job.sft.runtime) if curve else no_scorer,
            )

    return run_stage(info, job, inputs, body)
