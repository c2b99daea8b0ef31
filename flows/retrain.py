"""The `klear-retrain` flow: run the pipeline on a schedule."""

from __future__ import annotations

from typing import Literal

from prefect import flow
from prefect.runtime import flow_run

from flows.execute import given_config, label_of, tracked_run
from flows.pipeline import run_stages
from flows.resolve import resolve
from flows.result import PipelineResult
from klear_core.config.pipeline import PipelineConfig
from klear_core.seeding import seed_for

Seed = Literal["fixed", "fresh"]


def retrain_label() -> str:
    """Return the run's name; see `label_of`. Its seed is the one that the run will use."""

    def config() -> PipelineConfig:
        return with_seed(given_config(), flow_run.parameters.get("seed", "fixed"), run_id=str(flow_run.id))

    return label_of(config, prefix="retrain")


@flow(name="klear-retrain", flow_run_name=retrain_label, persist_result=False)
def retrain(
    profile: str | None = "laptop",
    settings: PipelineConfig | None = None,
    overrides: list[str] = [],  # noqa: B006  Prefect shows the default in its form
    seed: Seed = "fixed",
) -> PipelineResult:
    """Run the pipeline again: with a fixed seed only stages with changed data or settings, with a fresh seed all.

    Args:
        profile: A folder under configs/, or a path to one.
        settings: Settings that replace the profile's; those that are not given keep the profile's values.
        overrides: Single settings that replace both, such as rl.num_steps=200.
        seed: `fixed` keeps the config's; `fresh` derives a new one for each flow run, the same if the run is retried.
    """
    config = with_seed(resolve(profile, overrides, settings), seed, run_id=str(flow_run.id))
    return tracked_run(config, run_stages)


def with_seed(config: PipelineConfig, seed: Seed, *, run_id: str) -> PipelineConfig:
    """Return the config unchanged, or with a fresh seed derived from its seed and the flow run's id."""
    if seed == "fixed":
        return config
    return config.model_copy(update={"seed": seed_for(config.seed, "retrain", run_id) % 2**31})
