"""Places of learner ranks and engines on clusters that exist on paper only."""

from __future__ import annotations

import pytest

from klear_core.cluster.placement import (
    GpuPlan,
    Node,
    Place,
    Room,
    check_tensor_parallel,
    place_ranks,
    place_rl,
    plan_gpus,
)
from klear_core.config.evaluate import TorchEngineConfig, TorchEngineRuntime, VllmEngineConfig, VllmRuntime
from klear_core.config.rl import RlRuntime
from klear_core.config.train import TrainRuntime
from klear_core.errors import ResourceError

A, B = Node(name="a", node_id="1", num_cpus=8, num_gpus=8), Node(name="b", node_id="2", num_cpus=8, num_gpus=8)
TORCH = TorchEngineConfig()


def nodes(*num_gpus: int) -> list[Node]:
    return [Node(name="abcdef"[i], node_id=str(i), num_cpus=4, num_gpus=n) for i, n in enumerate(num_gpus)]


def vllm(tensor_parallel: int) -> VllmEngineConfig:
    return VllmEngineConfig(runtime=VllmRuntime(tensor_parallel=tensor_parallel))


def where(places: tuple[Place, ...] | list[Place]) -> list[tuple[str, tuple[int, ...]]]:
    return [(place.node.name, place.gpus) for place in places]


def ranks(cluster: list[Node], **runtime: int) -> list[tuple[str, tuple[int, ...]]]:
    return where(place_ranks(Room.of(cluster), TrainRuntime.model_validate(runtime), 1))


def test_ranks_fill_nodes_in_order() -> None:
    assert ranks(nodes(2, 2), num_workers=3) == [("a", (0,)), ("a", (1,)), ("b", (0,))]


def test_ranks_that_share_rows_are_never_on_two_nodes() -> None:
    """Three GPUs a node hold one pair each: the third GPU of the first is left."""
    placed = ranks(nodes(3, 3), num_workers=4, context_parallel=2)
    assert placed == [("a", (0,)), ("a", (1,)), ("b", (0,)), ("b", (1,))]


def test_as_many_gpus_as_ranks_may_be_too_few_for_contexts_and_the_refusal_says_why() -> None:
    told = r"6 GPUs in all, those of every 2 ranks \(context_parallel\) on one node, and there are 6 \(a 5, b 1\)"
    with pytest.raises(ResourceError, match=told + "; set num_workers = 4$"):
        ranks(nodes(5, 1), num_workers=6, context_parallel=2)


def test_a_context_larger_than_every_node_is_refused_with_one_that_fits() -> None:
    with pytest.raises(
        ResourceError, match=r"context_parallel = 8: .* the largest has 4 GPUs \(a 4, b 4\); set .* = 4$"
    ):
        ranks(nodes(4, 4), num_workers=8, context_parallel=8)
    with pytest.raises(ResourceError, match=r"the largest has 4 GPUs \(a 4, b 4\); set context_parallel = 3$"):
        ranks(nodes(4, 4), num_workers=6, context_parallel=6)


def test_more_ranks_than_gpus_are_refused_with_a_number_that_fits() -> None:
    with pytest.raises(ResourceError, match=r"16 GPUs in all, and there are 12 \(a 8, b 4\); set num_workers = 12$"):
        ranks(nodes(8, 4), num_workers=16)
    with pytest.raises(ResourceError, match=r"and there are 6 \(a 3, b 3\); set num_workers = 4$"):
        ranks(nodes(3, 3), num_workers=6, context_parallel=2)


def test_ranks_on_cpus_need_the_cpus_of_their_threads() -> None:
    runtime = TrainRuntime(num_workers=3, num_threads=2)
    assert [name for name, _ in where(place_ranks(Room.of(nodes(0, 0)), runtime, 0))] == ["a", "a", "b"]
    with pytest.raises(ResourceError, match=r"no node has 3 free CPUs for learner rank 1 \(CPUs: a 4\)"):
        place_ranks(Room.of(nodes(0)), TrainRuntime(num_workers=2, num_threads=3), 0)


def rl(cluster: list[Node], runtime: dict[str, object], gpus: tuple[float, float], engine: object = TORCH):
    learner, rollout = gpus
    plan = GpuPlan(learner=learner, rollout=rollout)
    return place_rl(RlRuntime.model_validate(runtime), engine, plan, cluster)  # type: ignore[arg-type]


def test_learner_and_engines_have_gpus_of_their_own() -> None:
    found = rl([A], {"num_workers": 4, "num_rollout_actors": 2}, (1, 2), vllm(2))
    assert where(found.ranks) == [("a", (0,)), ("a", (1,)), ("a", (2,)), ("a", (3,))]
    assert where(found.engines) == [("a", (4, 5)), ("a", (6, 7))]


def test_engines_are_placed_first_where_ranks_would_break_up_their_node() -> None:
    """Ranks first would take two GPUs of `a`, and no node would have four left."""
    found = rl(nodes(4, 2), {"num_workers": 2, "num_rollout_actors": 1}, (1, 4), vllm(4))
    assert where(found.engines) == [("a", (0, 1, 2, 3))]
    assert where(found.ranks) == [("b", (0,)), ("b", (1,))]


def test_small_nodes_are_filled_first_where_the_given_order_leaves_no_room() -> None:
    """A context of three on `a` would leave one GPU there, and engines of two need both of its pairs."""
    found = rl(nodes(4, 3), {"num_workers": 3, "context_parallel": 3, "num_rollout_actors": 2}, (1, 2), vllm(2))
    assert where(found.ranks) == [("b", (0,)), ("b", (1,)), ("b", (2,))]
    assert where(found.engines) == [("a", (0, 1)), ("a", (2, 3))]


def test_an_engine_beside_shared_gpus_is_refused_with_settings_that_exist() -> None:
    with pytest.raises(ResourceError, match=r"engine 0 of 1 needs 1 GPU .* left: a 0 of 2; lower num_workers$"):
        rl(nodes(2), {"num_workers": 2, "num_rollout_actors": 1}, (0.5, 1))


def test_a_learner_that_asks_for_a_gpu_is_refused_where_there_is_none() -> None:
    with pytest.raises(ResourceError, match=r"device = 'cuda', and no node has a GPU"):
        plan_gpus(RlRuntime(device="cuda"), TORCH, 0)
    assert plan_gpus(RlRuntime(device="auto"), TORCH, 0) == GpuPlan(learner=0, rollout=0)


def test_what_runs_on_a_cpu_by_its_device_gets_no_share_of_a_gpu() -> None:
    """Else configs/qwen3_06b, where learner and engine share a GPU, is refused on a CPU for want of one."""
    torch_on_cpu = TorchEngineConfig(runtime=TorchEngineRuntime(device="cpu"))
    shares = RlRuntime(learner_gpus=0.5, rollout_gpus=0.5)
    on_cpu = shares.model_copy(update={"device": "cpu"})
    assert plan_gpus(on_cpu, torch_on_cpu, 0) == GpuPlan(learner=0, rollout=0)
    assert plan_gpus(on_cpu, TORCH, 1) == GpuPlan(learner=0, rollout=0.5)
    assert plan_gpus(shares, torch_on_cpu, 1) == GpuPlan(learner=0.5, rollout=0)
    assert plan_gpus(RlRuntime(), torch_on_cpu, 8) == GpuPlan(learner=1, rollout=0)


def test_shares_that_are_whole_but_for_rounding_are_placed() -> None:
    """7 * 0.07 + 7 * 0.93 is 7.000000000000001."""
    runtime = RlRuntime(num_workers=7, num_rollout_actors=7, learner_gpus=0.07, rollout_gpus=0.93)
    found = place_rl(runtime, TORCH, plan_gpus(runtime, TORCH, 7), nodes(7))
    assert where(found.ranks) == where(found.engines) == [("a", (i,)) for i in range(7)]


def test_a_learner_and_an_engine_share_each_gpu_in_pairs() -> None:
    """Ray alone would put both learners on one GPU, and both engines on the other."""
    found = rl(nodes(2), {"num_workers": 2, "num_rollout_actors": 2}, (0.5, 0.5))
    assert where(found.ranks) == where(found.engines) == [("a", (0,)), ("a", (1,))]
    spread = rl(nodes(1, 1), {"num_workers": 2, "num_rollout_actors": 4}, (0.5, 0.25))
    assert where(spread.engines) == [("a", (0,)), ("b", (0,)), ("a", (0,)), ("b", (0,))]


def test_two_ranks_that_would_share_a_gpu_are_refused() -> None:
    with pytest.raises(ResourceError, match=r"needs 1 GPU that no other rank uses, .* set num_workers = 1$"):
        rl(nodes(1), {"num_workers": 2, "num_rollout_actors": 1}, (0.5, 0.1))


def test_shares_that_fit_in_sum_but_on_no_gpu_are_refused() -> None:
    with pytest.raises(ResourceError, match=r"rollout_gpus = 0\.75: .* no GPU has more than 0\.5 left"):
        rl(nodes(2), {"num_workers": 2, "num_rollout_actors": 1}, (0.5, 0.75))


def test_a_part_of_the_gpus_of_a_tensor_parallel_engine_is_refused() -> None:
    with pytest.raises(ResourceError, match=r"tensor_parallel = 2: .* set rollout_gpus = 2, or tensor_parallel = 1"):
        rl(nodes(2), {"num_workers": 1, "num_rollout_actors": 1}, (0.5, 1), vllm(2))


def test_tensor_parallel_that_no_node_or_model_divides_is_refused() -> None:
    with pytest.raises(
        ResourceError, match=r"tensor_parallel = 8: .* the largest has 4 GPUs; set tensor_parallel = 4$"
    ):
        rl(nodes(4, 8)[:1], {"num_workers": 1, "num_rollout_actors": 1}, (0, 8), vllm(8))
    with pytest.raises(
        ResourceError, match=r"engine 4 of 5 needs 3 GPUs of one node, .* left: a 2 of 8, b 2 of 8; 3 does"
    ):
        rl([A, B], {"num_workers": 1, "num_rollout_actors": 5}, (0, 3), vllm(3))
    with pytest.raises(
        ResourceError, match=r"tensor_parallel = 3 does not divide the 8 attention heads .* 1, 2, 4, 8$"
    ):
        check_tensor_parallel(vllm(3), 8)
    check_tensor_parallel(vllm(4), 8)
    check_tensor_parallel(TORCH, 7)
