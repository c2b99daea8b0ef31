"""`klear plan`: print what a run would do and what it costs: tokens, memory, GPU-hours and money by stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from klear_core.cluster.placement import is_too_large_for_cpu
from klear_core.config.evaluate import VllmEngineConfig
from klear_core.config.opd_jobs import OpdJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.stage import Stage
from klear_core.errors import ConfigError
from klear_core.generate.model_size import ModelSize, planned_size
from klear_core.pipeline.costs.estimate import StageEstimate, estimate
from klear_core.pipeline.costs.memory import with_margin_gb
from klear_core.pipeline.costs.throughput import (
    ENOUGH,
    MEDIAN_SHARE,
    SIGMA,
    BusyEstimate,
    Split,
    estimate_busy,
    estimate_split,
)
from klear_core.pipeline.downloads import download_lines, downloads_of, pending_jobs
from klear_core.pipeline.graph import stages_of
from klear_core.pipeline.preflight.capacity import known_hardware, most_kept_layers, smallest_context
from klear_core.pipeline.preflight.model_checks import placement_lines
from klear_core.scores import duration

if TYPE_CHECKING:
    from klear_core.artifacts.store import CheckedBy
    from klear_core.cluster.placement import Node
    from klear_core.pipeline.plan import Rerun, StagePlan


def show_plan(
    config: PipelineConfig,
    chosen: Collection[str] | None = None,
    *,
    again: Collection[str] = (),
    checked_by: CheckedBy = "size",
    with_config: bool = False,
    is_exact: bool = False,
    nodes: Sequence[Node] | None = None,
) -> list[str]:
    """Print which of the chosen stages (None: all) would run or be reused and why, their cost, and what is missing.

    `checked_by` says how artifacts are compared with their manifests; `with_config` adds all settings, with defaults;
    `is_exact` measures the memory of trainings on fake tensors. `nodes` are those of a run elsewhere. Return what is
    missing.
    """
    from klear_core.config.settings import config_digest
    from klear_core.pipeline.plan import detectable_lines, gate_lines, plan_stages, reruns_of_upgrade
    from klear_core.pipeline.preflight.checks import problems_on_nodes, problems_with, warnings_with
    from klear_core.pipeline.preflight.exposure import given_contamination
    from klear_core.report.run.warnings import teacher_notes

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{config.name}[/] seed {config.seed}, config {config_digest(config)}, valid")
    here = nodes is None
    missing = problems_with(config, chosen, again=again) if here else problems_on_nodes(config, nodes or (), chosen)
    try:
        plans = plan_stages(config, chosen, again=again, checked_by=checked_by)
    except ConfigError as e:
        if not missing:
            raise  # else the reason is one of those shown below
        console.print(f"[yellow]which stages would run cannot be told yet:[/] {escape(str(e))}")
        plans = []
    if plans:
        console.print(_plan_table(plans))
        _show_upgrade(console, reruns_of_upgrade(config, chosen), price=config.hardware.price_per_gpu_hour)
    show_costs(console, config, chosen, is_exact=is_exact, nodes=nodes)
    for line in detectable_lines(config):
        console.print(f"[dim]scores:[/] {escape(line)}")
    for line in gate_lines(config):
        console.print(f"[dim]scores:[/] {escape(line)}")
    for line in download_lines(downloads_of(pending_jobs(config, chosen, again))):
        console.print(f"[dim]to download:[/] {escape(line)}")
    for exposure in given_contamination(config):
        console.print(f"[yellow]scores:[/] {escape(exposure.warning)}")
    warnings = {
        "teacher": teacher_notes(config),
        "rewards": _loophole_lines(config, chosen),
        "stale samples": _stale_lines(config, chosen),
        "this machine": warnings_with(config, chosen, again=again) if here else (),
    }
    for about, lines in warnings.items():
        for line in lines:
            console.print(f"[yellow]{about}:[/] {escape(line)}")
    for problem in missing:
        console.print(f"[yellow]before you run:[/] {escape(problem)}")
    if with_config:
        console.print_json(config.model_dump_json())
    return missing


def _loophole_lines(config: PipelineConfig, chosen: Collection[str] | None) -> Iterator[str]:
    """Yield a line for each reward of the chosen stages that pays for malformed answers."""
    for section, rl in _rl_settings(config, chosen):
        for loophole in rl.reward.loopholes:
            yield f"{section}.{loophole}"


def _stale_lines(config: PipelineConfig, chosen: Collection[str] | None) -> Iterator[str]:
    """Yield a line for each of the chosen stages whose loss collapsed on samples as old as it may meet."""
    for section, rl in _rl_settings(config, chosen):
        if risk := rl.stale_risk(rl.max_staleness):
            yield f"{section}.max_staleness = {rl.max_staleness} and {risk}"
    for stage in stages_of(config):
        if isinstance(stage.job, OpdJob) and (chosen is None or stage.name in chosen):
            assert config.opd is not None
            if risk := config.opd.stale_risk:
                yield f"opd.teacher.top_k = 0, opd.train.num_steps = {config.opd.train.num_steps} and {risk}"


def _rl_settings(config: PipelineConfig, chosen: Collection[str] | None) -> Iterator[tuple[str, RlConfig]]:
    """Yield section and settings of each of the chosen RL stages."""
    for stage in stages_of(config):
        training = stage.job.training()
        if isinstance(training, RlConfig) and (chosen is None or stage.name in chosen):
            yield stage.section, training


def _plan_table(plans: Sequence[StagePlan]) -> Table:
    table = Table("stage", "does", "artifact", "why", box=None)
    for plan in plans:
        does = f"[red]{plan.action}[/]" if plan.action == "damaged" else plan.action
        table.add_row(plan.stage, does, plan.fingerprint[:8], escape(plan.why))
    return table


# ---- upgrade ----


_AMOUNTS = {
    "paid_tokens": "paid tokens",
    "sampled_tokens": "sampled tokens",
    "trained_tokens": "trained tokens",
    "tokens": "tokens",
    "answers": "answers",
    "rows": "rows",
}
"""Counts of an artifact that tell how much work it was, and their names."""


def _show_upgrade(console: Console, reruns: Sequence[Rerun], *, price: float | None) -> None:
    """Print the finished stages that run again only because the code is newer, with what they took before."""
    if not reruns:
        return
    total = sum(rerun.earlier.wall_s for rerun in reruns)
    console.print(
        f"[yellow]upgrade:[/] {len(reruns)} finished stages run again only because the code is newer than their "
        f"artifacts; they took {duration(total)}{_upgrade_cost(reruns, price)}. The earlier version of Klear still "
        "reuses them"
    )
    has_hours = any(rerun.gpu_hours is not None for rerun in reruns)
    table = Table("stage", "took", *_if(has_hours, "GPU-hours"), "work", "runs again because", box=None)
    for rerun in reruns:
        hours = "" if rerun.gpu_hours is None else _hours(rerun.gpu_hours, price)
        bound = "" if rerun.is_measured or not hours else "at most "
        took = duration(rerun.earlier.wall_s)
        if not rerun.is_measured:
            took += f", the last of {rerun.earlier.attempts} attempts"
        table.add_row(rerun.stage, took, *_if(has_hours, bound + hours), _work(rerun), escape(rerun.why))
    console.print(table)


def _upgrade_cost(reruns: Sequence[Rerun], price: float | None) -> str:
    """Return the GPU-hours and money of all stages as the end of a sentence part; empty if they cost neither."""
    gpu_hours = [rerun.gpu_hours for rerun in reruns if rerun.gpu_hours is not None]
    costs = []
    if gpu_hours:
        costs.append(f"GPU-hours: {_hours(sum(gpu_hours), price)}")
    paid = sum(rerun.earlier.counts.get("cost", 0) for rerun in reruns)
    if paid:
        costs.append(f"{paid:,.2f} paid to teachers")
    return "".join(f", {cost}" for cost in costs)


def _work(rerun: Rerun) -> str:
    counts = rerun.earlier.counts
    amounts = [f"{counts[key]:,} {name}" for key, name in _AMOUNTS.items() if key in counts]
    if "cost" in counts:
        amounts.append(f"{counts['cost']:,.2f} paid")
    if not amounts and rerun.max_tokens is not None:
        return f"at most {rerun.max_tokens:,} tokens"
    return ", ".join(amounts)


# ---- costs ----


def show_costs(
    console: Console,
    config: PipelineConfig,
    chosen: Collection[str] | None = None,
    *,
    is_exact: bool = False,
    nodes: Sequence[Node] | None = None,
) -> None:
    """Print the estimates of the chosen stages (None: all); `is_exact` also measures trainings on fake tensors."""
    rows = estimate(config, chosen)
    console.print(_table(rows, price=config.hardware.price_per_gpu_hour))
    stages = [stage for stage in stages_of(config) if chosen is None or stage.name in chosen]
    placed = placement_lines(stages, planned_size(config.start_model), nodes)
    about_trainings = (
        *_spare_memory_lines(config, stages),
        *_busy_lines(config, stages),
        *_split_lines(config, stages),
    )
    for line in (*_engine_lines(config, stages), *placed, *about_trainings):
        console.print(line)
    if any(row.gpu_hours is not None for row in rows):
        console.print(_assumptions(config))
    if is_exact:
        for line in _measurements(config, stages):
            console.print(line)


def _table(rows: Collection[StageEstimate], *, price: float | None) -> Table:
    has_hours = any(row.gpu_hours is not None for row in rows)
    table = Table("stage", "tokens, at most", "memory", *_if(has_hours, "GPU-hours"), "what", box=None)
    for row in rows:
        tokens = "not known yet" if row.max_tokens is None else f"{row.max_tokens:,}"
        hours = _if(has_hours, _hours(row.gpu_hours, price))
        table.add_row(row.stage, tokens, _memory(row), *hours, escape(row.note))
    return table


def _if(is_shown: bool, cell: str) -> tuple[str, ...]:
    return (cell,) if is_shown else ()


def _memory(row: StageEstimate) -> str:
    if row.memory_gb is None:
        return ""
    if row.peak is None or row.gpu_hours is None:
        return f"{row.memory_gb:.2g} GB"
    return f"{row.memory_gb:.1f} GB, {with_margin_gb(row.peak.num_bytes):.1f} with margin"


def _hours(gpu_hours: float | None, price: float | None) -> str:
    if gpu_hours is None:
        return ""
    shown = f"{gpu_hours:,.1f}" if gpu_hours < 10 else f"{gpu_hours:,.0f}"
    return shown if price is None else f"{shown}, costing {gpu_hours * price:,.0f}"


def _engine_lines(config: PipelineConfig, stages: Collection[Stage]) -> Iterator[str]:
    """Yield a line for each vLLM engine: what fits into its GPUs beside the weights. One line for all evaluations."""
    from klear_core.generate.model_size import engine_fit
    from klear_core.pipeline.costs.estimate import longest_sequence

    hardware = known_hardware(config.hardware)
    uses = {use.key: use for stage in stages if (use := stage.engine()) is not None}
    for key, use in uses.items():
        size = planned_size(use.model or config.start_model)
        if size is None or hardware.gpu_memory_gb is None or not isinstance(use.engine, VllmEngineConfig):
            continue
        fit = engine_fit(size, use.engine, hardware, longest=longest_sequence(use))
        ranks, gpu_gb = use.engine.runtime.tensor_parallel, f"{hardware.gpu_memory_gb:.0f} GB"
        gpus = f"one GPU of {gpu_gb}" if ranks == 1 else f"{ranks} GPUs of {gpu_gb}"
        yield (
            f"{key}: an engine on {gpus} holds {fit.weights_gb:.1f} GB of weights on each and {fit.cache_tokens:,} "
            f"tokens of cache, {fit.sequences} answers of {fit.longest:,}; about {fit.tokens_per_s:,.0f} tokens/s "
            "when it is full"
        )


def _spare_memory_lines(config: PipelineConfig, stages: Collection[Stage]) -> Iterator[str]:
    """Yield a line for each training that has room for activations which it would compute again, or for whole rows."""
    size, gpu_gb = planned_size(config.start_model), known_hardware(config.hardware).gpu_memory_gb
    if size is None:
        return
    for stage in stages:
        training = stage.job.training()
        if training is None or training.dtype != "bfloat16":
            continue
        if gpu_gb is None:
            if is_too_large_for_cpu(size.num_params):
                yield "no GPU is known here: --set hardware.gpu_memory_gb=80 adds what fits, and the caches of engines"
            return
        most = most_kept_layers(training, size, gpu_gb)
        if most > training.runtime.keep_layers:
            # The second forward pass is a quarter of an update's work.
            saved = most / size.num_layers / 4
            yield (
                f"{stage.section}.runtime: keep_layers = {most} fits, of {size.num_layers} layers, and saves up to "
                f"{saved:.0%} of an update (computed; not run on a GPU)"
            )
        context = smallest_context(training, size, gpu_gb)
        if context < training.runtime.context_parallel:
            smaller = training.runtime.model_copy(update={"context_parallel": context})
            busy = estimate_busy(training.model_copy(update={"runtime": smaller}), size)
            yield (
                f"{stage.section}.runtime: context_parallel = {context} fits, and sends less between GPUs; "
                f"{busy.num_ranks} data ranks are then busy {busy.share:.2f} of an update (computed; not run on a GPU)"
            )


def _busy_lines(config: PipelineConfig, stages: Collection[Stage]) -> Iterator[str]:
    """Yield a line for each training on several data ranks: how long they wait for one another, and what would help."""
    size = planned_size(config.start_model)
    if size is None:
        return
    is_any = False
    for stage in stages:
        training = stage.job.training()
        # Ranks of one context-parallel group share their rows, so only several groups can wait for one another.
        if training is not None and training.runtime.num_workers > training.runtime.context_parallel:
            is_any = True
            yield f"{stage.section}.runtime: {_busy_line(estimate_busy(training, size))}"
    if is_any:
        yield (
            f"Busy shares are simulated, without communication: row lengths are log-normal, with a median of "
            f"{MEDIAN_SHARE:.2f} of the longest and a sigma of {SIGMA:g}"
        )


def _busy_line(busy: BusyEstimate) -> str:
    line = f"{busy.num_ranks} data ranks are busy {busy.share:.2f} of an update of {busy.num_rows} rows"
    if busy.share >= ENOUGH:
        return line
    line += f": too few rows, with which no packing reaches more than {busy.bound:.2f}"
    if busy.better is None:
        return line
    settings = (
        f"context_parallel = {busy.better.context_parallel}, "
        f"tokens_per_microbatch = {busy.better.tokens_per_microbatch}"
    )
    return f"{line}. {settings} reaches {busy.better_share:.2f}"


def _split_lines(config: PipelineConfig, stages: Collection[Stage]) -> Iterator[str]:
    """Yield a line for each RL stage with separate GPUs for engines and learner: the slower side, and what balances."""
    size = planned_size(config.start_model)
    for stage in stages:
        training = stage.job.training()
        if size is None or not isinstance(training, RlConfig):
            continue
        found = estimate_split(training, size, config.hardware)
        if found is None:
            continue
        line = f"{stage.section}.runtime: without waiting, a step takes {_split(found.now)}"
        if found.best != found.now:
            line += f". As many GPUs are balanced by {_split(found.best)}"
        if training.rollout.mode == "continuous":
            line += f". About {found.requests_per_engine} requests fill an engine's cache (requests_per_actor)"
        yield line


def _split(split: Split) -> str:
    return (
        f"{split.num_engines} engines {split.sampling_s:,.0f} s of sampling and {split.num_workers} learner ranks "
        f"{split.learning_s:,.0f} s"
    )


def _assumptions(config: PipelineConfig) -> str:
    h = config.hardware
    mfu = "a share that follows from kernel and row length" if h.mfu is None else f"{100 * h.mfu:.0f} %"
    return (
        f"GPU-hours are upper bounds, of answers of full length, and estimated: training at {mfu} of "
        f"{h.peak_tflops:g} TFLOP/s, decoding at {100 * h.decoding_efficiency:.0f} % of {h.memory_tb_per_s:g} TB/s "
        "(hardware.*)"
    )


def _measurements(config: PipelineConfig, stages: Collection[Stage]) -> Iterator[str]:
    from klear_core.pipeline.costs.fake_run import measure_training

    size: ModelSize | None = planned_size(config.start_model)
    if size is None:
        yield "exact: the model is not here, and its size is not known"
        return
    for stage in stages:
        training = stage.job.training()
        if training is None:
            continue
        found = measure_training(size, training)
        if found is None:
            yield f"exact {stage.name}: only bfloat16 with AdamW on the device is measured"
            continue
        # Less than 10 MB would be shown as 0.00.
        parts = sorted(found.measured.by_kind.items(), key=lambda part: -part[1])
        shown = ", ".join(f"{kind} {num_bytes / 1e9:.2f}" for kind, num_bytes in parts if num_bytes > 1e7)
        measured_gb = found.measured.num_bytes / 1e9
        yield (
            f"exact {stage.name}: {measured_gb:.2f} GB per rank on fake tensors, in {found.measured.moment} ({shown}); "
            f"the table's closed form is {100 * found.difference:+.2f} % off"
        )
