"""Scheduled retraining: the pipeline, by the clock."""

from __future__ import annotations

from typing import Literal

from prefect import flow
from prefect.runtime import flow_run

from flows.execute import PipelineResult, run_label, run_stages
from flows.settings import resolve
from klear_core.config.pipeline import PipelineConfig
from klear_core.seeding import seed_for


@flow(name="klear-retrain", flow_run_name=run_label, persist_result=False)
def retrain(
    profile: str | None = "laptop",
    settings: PipelineConfig | None = None,
    overrides: list[str] = [],  # noqa: B006  Prefect shows the default in its form
    seed: Literal["fixed", "fresh"] = "fixed",
) -> PipelineResult:
    """Run the pipeline again: with a fixed seed only what follows from changed data or settings, with a fresh one everything.

    Args:
        profile: A folder under configs/, or a path to one.
        settings: Settings that replace the profile's, only those that are given.
        overrides: Single settings that replace both, such as rl.num_steps=200.
        seed: `fixed` keeps the profile's; `fresh` takes one of the run's own, the same when the run is retried.
    """
    config = resolve(profile, overrides, settings)
    if seed == "fresh":
        config = config.model_copy(update={"seed": seed_for(config.seed, "retrain", str(flow_run.id)) % 2**31})
    return run_stages(config)
