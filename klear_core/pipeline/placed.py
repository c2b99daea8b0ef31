"""Place the learners and engines of pending stages on the available nodes, or say why that is impossible."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from klear_core.cluster.engine_plan import plan_scorer
from klear_core.cluster.nodes import joins_a_cluster, known_nodes
from klear_core.cluster.placement import (
    GpuPlan,
    check_cpu_is_meant,
    cpu_refusal,
    is_direct,
    is_too_large_for_cpu,
    plan_gpus,
)
from klear_core.cluster.places import Node, Place, Placement, Room, check_tensor_parallel, place_ranks, place_rl
from klear_core.config.engine import HttpEngineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.sft import SftConfig
from klear_core.config.stage import Stage
from klear_core.errors import ResourceError
from klear_core.pipeline.ahead import PendingWork
from klear_core.pipeline.known_models import planned_size
from klear_core.pipeline.model_size import ModelSize


def placement_problems(work: PendingWork) -> Iterator[str]:
    """Yield why the learners and engines of a stage cannot be placed on this machine or the cluster at RAY_ADDRESS."""
    try:
        nodes = known_nodes()
    except ResourceError as e:
        yield str(e)
    else:
        yield from problems_on(nodes, work)


def problems_on(nodes: Sequence[Node], work: PendingWork) -> Iterator[str]:
    """Yield why the learners and engines of a stage cannot be placed on these nodes."""
    size = planned_size(work.config.start_model)
    has_no_device = not any(node.num_gpus for node in nodes) and not joins_a_cluster()
    for stage in work.stages:
        training = stage.job.training()
        if training is None:
            continue
        try:
            if size is not None:
                _check_device(training, size.num_params, nodes, section=stage.section)
        except ResourceError as e:
            yield str(e)
            continue
        if has_no_device and training.runtime.device == "cuda":
            continue  # a missing device of this machine is reported by itself
        try:
            place_training(training, size, nodes)
        except ResourceError as e:
            yield f"{stage.section}.runtime: {e}"
            continue
        yield from _scorer_problems(stage, training, size, nodes)


def _scorer_problems(
    stage: Stage, training: SftConfig | RlConfig, size: ModelSize | None, nodes: Sequence[Node]
) -> Iterator[str]:
    """Yield a problem if the engine that scores models while a stage trains finds no GPU beside the learner's."""
    use = stage.job.scorer()
    if use is None:
        return
    assert not isinstance(use.engine, HttpEngineConfig), "evaluation has engines of its own"
    num_params = None if size is None else size.num_params
    try:
        plan_scorer(use.engine, training.runtime, nodes, num_params, key=stage.section)
    except ResourceError as e:
        yield str(e)


def _check_device(training: SftConfig | RlConfig, num_params: int, nodes: Sequence[Node], *, section: str) -> None:
    """Raise ResourceError if `device = "auto"` would be a CPU for a model that is too large for one."""
    num_gpus = sum(node.num_gpus for node in nodes)
    if isinstance(training, SftConfig):
        if training.runtime.device == "auto" and num_gpus == 0 and is_too_large_for_cpu(num_params):
            raise ResourceError(cpu_refusal(f"{section}.runtime", num_params))
        return
    runtime, engine = training.runtime, training.rollout.engine
    # Too few GPUs are no concern of this check.
    gpus = plan_gpus(runtime, engine, num_gpus) if num_gpus else GpuPlan(learner=0, rollout=0)
    check_cpu_is_meant(runtime, engine, gpus, num_params, stage=section)


def place_training(training: SftConfig | RlConfig, size: ModelSize | None, nodes: Sequence[Node]) -> Placement:
    """Return where ranks and engines will run. Raise ResourceError, with the setting to change, if they cannot.

    `size` is that of the model, without which its attention heads are not checked.
    """
    num_gpus = sum(node.num_gpus for node in nodes)
    if isinstance(training, SftConfig):
        runs_on_gpus = training.runtime.device == "cuda" or (training.runtime.device == "auto" and num_gpus > 0)
        # The last argument is the GPUs of a rank: a whole one, or none.
        return Placement(ranks=tuple(place_ranks(Room.of(nodes), training.runtime, float(runs_on_gpus))))
    runtime, engine = training.runtime, training.rollout.engine
    gpus = plan_gpus(runtime, engine, num_gpus)
    is_direct(runtime, engine, gpus)  # for the error that it raises
    if size is not None:
        check_tensor_parallel(engine, size.num_heads)
    return place_rl(runtime, engine, gpus, nodes)


def placement_lines(stages: Collection[Stage], size: ModelSize | None) -> Iterator[str]:
    """Yield where the processes of each training run, one line per node in use; nothing if they cannot be placed."""
    try:
        nodes = known_nodes()
    except ResourceError:
        return  # a problem of the run, which is shown as such
    for stage in stages:
        yield from stage_lines(stage, size, nodes)


def stage_lines(stage: Stage, size: ModelSize | None, nodes: Sequence[Node]) -> Iterator[str]:
    """Yield where the processes of a training run on these nodes; nothing for other stages."""
    training = stage.job.training()
    if training is None:
        return
    try:
        if size is not None:
            _check_device(training, size.num_params, nodes, section=stage.section)
        placement = place_training(training, size, nodes)
    except ResourceError:
        return  # a problem of the run, too
    for node in nodes:
        parts = [*_parts("learner rank", placement.ranks, node), *_parts("engine", placement.engines, node)]
        if parts:
            yield f"{stage.section} on {node.name}: {', '.join(parts)}{_idle(placement, node)}"
    if isinstance(training, RlConfig) and not placement.engines:
        yield f"{stage.section}: {training.runtime.num_rollout_actors} engines on CPUs of any node"


def _idle(placement: Placement, node: Node) -> str:
    used = {gpu for place in (*placement.ranks, *placement.engines) if place.node == node for gpu in place.gpus}
    unused = node.num_gpus - len(used)
    return f"; {unused} of {node.num_gpus} GPUs unused" if used and unused else ""


def _parts(role: str, places: Sequence[Place], node: Node) -> Iterator[str]:
    """Yield `learner ranks 0-3 on GPUs 0-3` for ranks with neighbouring numbers on this node."""
    here = [(index, place) for index, place in enumerate(places) if place.node == node]
    # Numbers that count up together with their position are a run without a gap.
    runs = [list(run) for _, run in groupby(enumerate(here), key=lambda pair: pair[1][0] - pair[0])]
    for run in runs:
        members = [member for _, member in run]
        indices = [index for index, _ in members]
        gpus = sorted({gpu for _, place in members for gpu in place.gpus})
        share = members[0][1].share
        of_each = f", {share:g} of each" if gpus and share < 1 else ""
        where = f"{_numbers('GPU', gpus)}{of_each}" if gpus else "CPUs"
        yield f"{_numbers(role, indices)} on {where}"


def _numbers(noun: str, numbers: Sequence[int]) -> str:
    """Return `GPU 0`, `GPUs 0-3` or `GPUs 0, 2`."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    is_run = list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    shown = f"{numbers[0]}-{numbers[-1]}" if is_run else ", ".join(map(str, numbers))
    return f"{noun}s {shown}"
