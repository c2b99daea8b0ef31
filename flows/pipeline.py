"""The `klear` flow: every stage in order, each as a task on the artifacts of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import flow

from flows.execute import PipelineRun, StageSelection, run_label, tracked_run
from flows.resolve import resolve
from flows.result import PipelineResult
from klear_core.config.pipeline import PipelineConfig
from tasks.all import task_of
from tasks.reaper import no_orphans


@flow(name="klear", flow_run_name=run_label, persist_result=False)
def pipeline(
    profile: str | None = "laptop",
    settings: PipelineConfig | None = None,
    overrides: list[str] = [],  # noqa: B006  Prefect shows the default in its form
    only: str | None = None,
    from_: str | None = None,
    until: str | None = None,
    rerun_from: str | None = None,
    needed_by: list[str] | None = None,
) -> PipelineResult:
    """Make a reasoning model out of a base model, and reuse artifacts that exist.

    Args:
        profile: A folder under configs/, or a path to one.
        settings: Settings that replace the profile's; those that are not given keep the profile's values.
        overrides: Single settings that replace both, such as rl.loss.eps_high=0.28.
        only: Run this stage alone, on the artifacts that exist.
        from_: Start at this stage; the artifacts of earlier stages must exist.
        until: Stop after this stage.
        rerun_from: Make this stage and all that depend on it again, even if nothing has changed.
        needed_by: Run only these stages and what they depend on.
    """
    config = resolve(profile, overrides, settings)
    choice = StageSelection(
        only=only, from_=from_, until=until, rerun_from=rerun_from, needed_by=tuple(needed_by or ())
    )
    return tracked_run(config, run_stages, choice)


def run_stages(run: PipelineRun) -> None:
    """Make the chosen stages, or reuse their artifacts."""
    # stages_of(config): benchmarks, curate, base, distill, sft, rl, an evaluation of each model, report;
    # and as configured curate_rl, tag, tag_rl, rl_code
    for stage in run.stages:
        if stage.name in run.chosen:
            inputs = run.inputs_of(stage)
            run.artifacts[stage.name] = run.call(task_of(stage.kind), stage, inputs)


def run_pipeline(
    config: PipelineConfig,
    *,
    only: str | None = None,
    from_: str | None = None,
    until: str | None = None,
    rerun_from: str | None = None,
    needed_by: Sequence[str] = (),
) -> PipelineResult:
    """Run the pipeline in this process and raise the error of a stage that fails."""
    with no_orphans():
        return pipeline(
            profile=None,  # its default is a profile, over which the settings would be merged
            settings=config,
            only=only,
            from_=from_,
            until=until,
            rerun_from=rerun_from,
            needed_by=list(needed_by) or None,
        )
