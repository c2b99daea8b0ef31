"""Where ranks and engines of RL go on a Ray cluster with counted GPUs, also after a node has died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from two_nodes import two_nodes

from klear_core.cluster.placement import Node, Place, Placement
from klear_core.errors import ResourceError
from tasks.resources import Needs, ray_session

pytest.importorskip("ray")
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from klear_core.cluster.ray_calls import Reservation

pytestmark = pytest.mark.slow

NEEDS = Needs(num_cpus=1, object_store_bytes=80 << 20)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes with a GPU each; torch finds none. The second test takes one of them, and the last one all but the head."""
    with two_nodes(gpus_each=1) as found:
        found.add_node(num_cpus=2, num_gpus=1, object_store_memory=80 << 20)
        found.wait_for_nodes()
        with ray_session(NEEDS):
            yield found


def plan_on_two(*, shares: bool) -> Callable[[Sequence[Node]], Placement]:
    """Plan a rank on each of the first two nodes, and the engines beside the ranks or on the nodes left."""

    def plan(nodes: Sequence[Node]) -> Placement:
        if len(nodes) < 2:
            raise ResourceError("one node is too few")
        ranks = tuple(Place(node=node, gpus=(0,)) for node in nodes[:2])
        own = tuple(Place(node=node, gpus=(0,)) for node in nodes[2:])
        return Placement(ranks=ranks, engines=ranks if shares else own)

    return plan


async def node_of(options: dict[str, Any]) -> str:
    """Start an actor with these options, and return the node that it runs on."""

    @ray.remote(num_cpus=0, num_gpus=0.5)
    class Engine:
        def node_id(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    engine = Engine.options(**options).remote()
    found: str = await asyncio.wait_for(engine.node_id.remote(), 60)
    ray.kill(engine)
    return found


def kill_node(cluster: Cluster, node_id: str) -> None:
    (node,) = (node for node in cluster.worker_nodes if node.node_id == node_id)
    cluster.remove_node(node)


def test_an_engine_with_a_gpu_of_its_own_keeps_its_place(cluster: Cluster) -> None:
    async def body() -> None:
        held = Reservation(plan_on_two(shares=False), width=1, threads_per_rank=1)
        await held.hold()
        strategy = (await held.engine_options(0))["scheduling_strategy"]
        assert isinstance(strategy, NodeAffinitySchedulingStrategy)
        assert strategy.node_id == held.placement.engines[0].node.node_id
        held.release()

    asyncio.run(body())


def test_an_engine_that_shares_a_gpu_follows_its_rank_to_another_node(cluster: Cluster) -> None:
    async def body() -> None:
        held = Reservation(plan_on_two(shares=True), width=1, threads_per_rank=1)
        await held.hold()
        head = cluster.head_node.node_id
        before = [place.node.node_id for place in held.placement.ranks]
        assert [await node_of(await held.engine_options(i)) for i in (0, 1)] == before
        lost = next(node_id for node_id in before if node_id != head)
        await asyncio.to_thread(kill_node, cluster, lost)
        # both engines restart at once, and the ranks with them
        first, second, _ = await asyncio.gather(held.engine_options(0), held.engine_options(1), held.hold())
        after = [place.node.node_id for place in held.placement.ranks]
        assert lost not in after
        assert len(set(after)) == 2
        assert [await node_of(first), await node_of(second)] == after
        held.release()

    asyncio.run(body())


def test_an_engine_that_shares_a_gpu_fails_with_the_reason_if_the_ranks_have_no_place_left(cluster: Cluster) -> None:
    async def body() -> None:
        held = Reservation(plan_on_two(shares=True), width=1, threads_per_rank=1)
        await held.hold()
        for node in list(cluster.worker_nodes):
            await asyncio.to_thread(cluster.remove_node, node)
        with pytest.raises(ResourceError, match=r"^one node is too few$"):
            await held.engine_options(1)

    asyncio.run(body())
