"""One flow per stage, on the artifacts that exist: to run a stage on a machine of its own, or to repeat one."""

from __future__ import annotations

from prefect import Flow, flow

from flows.execute import run_label, run_stages
from flows.result import PipelineResult
from flows.settings import resolve
from klear_core.config.pipeline import PipelineConfig

StageFlow = Flow[[str | None, PipelineConfig | None, list[str]], PipelineResult]


def _alone(stage: str, what: str) -> StageFlow:
    @flow(name=f"klear-{stage}", description=what, flow_run_name=run_label, persist_result=False)
    def stage_alone(
        profile: str | None = "laptop",
        settings: PipelineConfig | None = None,
        overrides: list[str] = [],  # noqa: B006  Prefect shows the default in its form
    ) -> PipelineResult:
        """Run one stage.

        Args:
            profile: A folder under configs/, or a path to one.
            settings: Settings that replace the profile's; those that are not given keep the profile's values.
            overrides: Single settings that replace both, such as sft.optim.lr=1e-4.
        """
        return run_stages(resolve(profile, overrides, settings), only=stage)

    return stage_alone


benchmarks = _alone("benchmarks", "Load the benchmarks.")
curate = _alone("curate", "Make the training problems; needs the benchmarks.")
curate_rl = _alone(
    "curate_rl", "Make the problems of RL, where they are not those of distillation; needs the benchmarks."
)
base = _alone("base", "Make or find the base model.")
distill = _alone("distill", "Collect teacher traces; needs the problems.")
sft = _alone("sft", "Fine-tune the base model on the traces.")
rl = _alone("rl", "Math RL from the fine-tuned model.")
rl_code = _alone("rl_code", "Code RL from the math RL model.")
evaluate = _alone("evaluate", "Score every model on the benchmarks.")
report = _alone("report", "Write the report; needs everything.")
