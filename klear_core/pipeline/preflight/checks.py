"""Find what would stop a run, in the first second instead of the third hour.

Only stages that would run are checked: an artifact that exists is reused, even if its teacher or sandbox is gone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from klear_core.cluster.nodes import joins_a_cluster, nodes_now, when_there
from klear_core.cluster.placement import Node, gpus_here
from klear_core.config.load import as_option
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import expanded, multiplies_bfloat16
from klear_core.config.stage import PromoteJob
from klear_core.config.submit import SubmitConfig, in_seconds
from klear_core.errors import ConfigError, ResourceError
from klear_core.evaluate.stats.intervals import least_half_width
from klear_core.native import BFLOAT16_MACRO, compiler_defines
from klear_core.pipeline.plan import PendingWork, num_problems
from klear_core.pipeline.preflight.capacity import (
    disk_problem,
    machine_problems,
    memory_problems,
    pool_problems,
    pool_problems_on,
)
from klear_core.pipeline.preflight.data_checks import (
    benchmark_problems,
    error_messages,
    file_problems,
    given_trace_problems,
    judge_problems,
    prompt_filter_problems,
    reference_problems,
    reward_problems,
    sandbox_problems,
    source_problems,
    unjudged_rl_problems,
    weight_problems,
)
from klear_core.pipeline.preflight.exposure import given_contamination
from klear_core.pipeline.preflight.model_checks import (
    context_problems,
    cuda_problems,
    engine_problems,
    length_problems,
    memory_warnings,
    model_problems,
    placement_problems,
    problems_on,
    slow_products,
    token_problems,
)

if TYPE_CHECKING:
    from klear_core.distill.teachers.fleet import BlockKeys

_LOOK_S = 20.0
"""Seconds between two looks at a cluster whose nodes are missing; each joins it."""


def require_ready(
    config: PipelineConfig,
    chosen: Collection[str] | None = None,
    *,
    again: Collection[str] = (),
    keys: BlockKeys | None = None,
) -> None:
    """Raise ConfigError with everything that would stop the run, before anything is spent.

    Wait first for nodes of the Ray cluster that are missing, if the run was submitted with `retry = ["no-capacity"]`.
    """
    _wait_for_nodes(config.workspace.submit)
    problems = problems_with(config, chosen, again=again, keys=keys)
    if problems:
        raise ConfigError("\n       ".join(["this profile cannot run here yet:", *problems]))


def _wait_for_nodes(submit: SubmitConfig) -> None:
    if "no-capacity" not in submit.retry or not joins_a_cluster():
        return
    wait_s = float(in_seconds(submit.retry_for))
    if submit.ends_at is not None:
        wait_s = min(wait_s, (submit.ends_at - datetime.now(UTC)).total_seconds())
    when_there(lambda: require_asked_nodes(submit, nodes_now()), wait_s=wait_s, look_s=_LOOK_S)


def require_asked_nodes(submit: SubmitConfig, nodes: Sequence[Node]) -> None:
    """Raise ResourceError unless these are at least the nodes that a run was submitted for."""
    num_cpus, num_gpus = submit.cpus_per_node or 1, submit.gpus_per_node
    found = [node for node in nodes if node.num_cpus >= num_cpus and node.num_gpus >= num_gpus]
    if len(found) < submit.nodes:
        raise ResourceError(
            f"workspace.submit asks for {submit.nodes} nodes of {num_cpus} CPUs and {num_gpus} GPUs; the Ray cluster"
            f" has {len(found)}"
        )


def problems_with(
    config: PipelineConfig,
    chosen: Collection[str] | None = None,
    *,
    again: Collection[str] = (),
    keys: BlockKeys | None = None,
) -> list[str]:
    """Return everything known to be missing or contradictory, each with its key, value and fix; empty if nothing is.

    `chosen` names the stages to run (None: all of them), `again` those to build even if they exist. `keys` are the
    teachers' API keys by Prefect block; None leaves those unchecked.
    """
    work = replace(PendingWork.of(config, chosen, again), keys=keys)
    # Several stages may lack the same thing, such as the base model: it is said once.
    return list(dict.fromkeys(problem for check in _CHECKS for problem in check(work)))


def warnings_with(
    config: PipelineConfig, chosen: Collection[str] | None = None, *, again: Collection[str] = ()
) -> list[str]:
    """Return what makes the run slow on this machine's CPU, or larger than its memory; it starts all the same."""
    import psutil

    if joins_a_cluster():
        return []  # other machines may run it
    work, has_gpus = PendingWork.of(config, chosen, again), gpus_here() > 0
    compiles_bfloat16 = not multiplies_bfloat16() or compiler_defines(BFLOAT16_MACRO)
    memory_gb = psutil.virtual_memory().total / 1e9
    return [
        *slow_products(work, has_gpus=has_gpus, compiles_bfloat16=compiles_bfloat16),
        *memory_warnings(work, has_gpus=has_gpus, memory_gb=memory_gb),
    ]


def problems_on_nodes(
    config: PipelineConfig, nodes: Sequence[Node], chosen: Collection[str] | None = None
) -> list[str]:
    """Return what would stop a run on these nodes. Devices, disk and sandbox of this machine do not count."""
    work = PendingWork.of(config, chosen, ())
    checks: list[Callable[[PendingWork], Iterator[str]]] = [check for check in _CHECKS if check not in _OF_THIS_MACHINE]
    checks += [partial(pool_problems_on, nodes, are_remote=True), partial(problems_on, nodes, are_remote=True)]
    return list(dict.fromkeys(problem for check in checks for problem in check(work)))


def _input_problems(work: PendingWork) -> Iterator[str]:
    for stage, missing in work.unmade_inputs:
        named = " and ".join(map(repr, missing))
        yield (
            f"stage {stage!r} needs {named}, not there or not whole for these settings: "
            f"run up to that first, with --until {missing[-1]}"
        )


def _margin_problems(work: PendingWork) -> Iterator[str]:
    """Yield the margins of the champion's rule that no equal model can pass: the interval is never so narrow."""
    rule, confidence = work.config.promote, work.config.evaluate.confidence
    if rule is None or not any(stage.kind == PromoteJob.kind for stage in work.stages):
        return
    for benchmark in work.config.benchmarks:
        num, margin = num_problems(benchmark), rule.margin_of(benchmark.name)
        least = 100 * least_half_width(num, confidence=confidence) if num else 0.0
        if margin <= least:
            yield (
                f"promote.margins.{benchmark.name} = {margin:g} is passed by no model of equal score: with {num} "
                f"problems the interval reaches {least:.1f} points below it; set a larger one, or leave out promote"
            )


def _exposure_problems(work: PendingWork) -> Iterator[str]:
    """Refuse scores on benchmarks that the lineage of a given model shows to be left out of decontamination."""
    if not work.evaluates:
        return
    despite = work.config.given.score_despite
    for exposure in given_contamination(work.config):
        refused = [name for name in exposure.missed if name not in despite]
        if refused:
            yield (
                f"{exposure.stage.section}: {exposure.warning}; to score it all the same: "
                f"{as_option('given.score_despite', [*despite, *refused])}"
            )


def _endpoint_problems(work: PendingWork) -> Iterator[str]:
    for stage in work.stages:
        chat = stage.job.chat_in(stage.section)
        if chat is None:
            continue
        key, endpoints = chat.key, chat.runtime.endpoints
        keys = [endpoint.api_key_env for endpoint in endpoints if endpoint.api_key_env]
        missing = [name for name in keys if not os.environ.get(name)]
        for name in missing:
            yield f"{key}.api_key_env = {name!r}: this environment variable is not set"
        blocks = [endpoint.api_key_block for endpoint in endpoints if endpoint.api_key_block]
        unmade = [name for name in blocks if work.keys is not None and name not in work.keys]
        from klear_core.distill.teachers.fleet import MAKE_BLOCK, NO_KEYS

        for name in unmade:
            yield f"{key}.api_key_block = {name!r}: Prefect has no such block; {MAKE_BLOCK}"
        # A request to an endpoint needs its key.
        if missing or unmade or (blocks and work.keys is None):
            continue
        from klear_core.distill.teachers.http_teacher import check_endpoints

        yield from error_messages(key, partial(check_endpoints, keys=work.keys or NO_KEYS), chat.runtime)


def _workspace_problems(work: PendingWork) -> Iterator[str]:
    where = work.config.workspace.root
    root = expanded(where).absolute()
    # The workspace is made by the run: until then the nearest folder above it tells disk and permissions.
    existing = next(p for p in (root, *root.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield f"workspace.root = {where!r}: {existing} is not a folder that can be written to"
        return
    free_gb = shutil.disk_usage(existing).free / 1e9
    problem = disk_problem(work, free_gb=free_gb)
    if problem is not None:
        yield problem


# In the order of the messages: inputs and data first, then models and settings, then this machine.
_CHECKS = (
    _input_problems,
    file_problems,
    source_problems,
    given_trace_problems,
    unjudged_rl_problems,
    benchmark_problems,
    reference_problems,
    model_problems,
    _exposure_problems,
    _margin_problems,
    token_problems,
    _endpoint_problems,
    length_problems,
    engine_problems,
    context_problems,
    weight_problems,
    prompt_filter_problems,
    reward_problems,
    judge_problems,
    cuda_problems,
    machine_problems,
    pool_problems,
    memory_problems,
    placement_problems,
    sandbox_problems,
    _workspace_problems,
)

_OF_THIS_MACHINE = (
    cuda_problems,
    machine_problems,
    pool_problems,
    placement_problems,
    sandbox_problems,
    _workspace_problems,
)
