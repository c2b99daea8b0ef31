"""Scheduled retraining: the pipeline, by the clock."""

from __future__ import annotations

from typing import Literal

from prefect import flow
from prefect.runtime import flow_run

from flows.execute import given_config, label_of, run_stages
from flows.result import PipelineResult
from flows.settings import resolve
from klear_core.config.pipeline import PipelineConfig
from klear_core.seeding import seed_for

Seed = Literal["fixed", "fresh"]


def retrain_label() -> str:
    """Return a run's name as any flow's, with the seed that it will have."""

    def config() -> PipelineConfig:
        return with_seed(given_config(), flow_run.parameters.get("seed", "fixed"), run_id=str(flow_run.id))

    return label_of(config, flow=str(flow_run.flow_name))


@flow(name="klear-retrain", flow_run_name=retrain_label, persist_result=False)
def retrain(
    profile: str | None = "laptop",
    settings: PipelineConfig | None = None,
    overrides: list[str] = [],  # noqa: B006  Prefect shows the default in its form
    seed: Seed = "fixed",
) -> PipelineResult:
    """Run the pipeline again: with a fixed seed only what follows from changed data or settings, with a fresh one everything.

    Args:
        profile: A folder under configs/, or a path to one.
        settings: Settings that replace the profile's, only those that are given.
        overrides: Single settings that replace both, such as rl.num_steps=200.
        seed: `fixed` keeps the profile's; `fresh` takes one of the run's own, the same when the run is retried.
    """
    return run_stages(with_seed(resolve(profile, overrides, settings), seed, run_id=str(flow_run.id)))


def with_seed(config: PipelineConfig, seed: Seed, *, run_id: str) -> PipelineConfig:
    """The config with its own seed, or with a fresh one that follows from it and the flow run's id."""
    if seed == "fixed":
        return config
    return config.model_copy(update={"seed": seed_for(config.seed, "retrain", run_id) % 2**31})
