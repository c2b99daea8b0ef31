"""What costs a run its actors is counted once, and missing nodes are waited for; without Ray."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import torch.distributed as dist
from virtual_clock import run_virtually

from klear_core.cluster import nodes
from klear_core.cluster.nodes import EnginePlan, cannot_join, when_there
from klear_core.cluster.placement import Node, Place, Placement
from klear_core.config.evaluate import EnginesRuntime, VllmEngineConfig
from klear_core.config.train import TinyModelConfig
from klear_core.errors import ResourceError, TrainingError
from klear_core.generate.engine import SamplingParams
from klear_core.generate.factory import EngineSpec
from klear_core.generate.pool import EngineLost
from klear_core.metrics import NullTelemetry
from klear_core.train.base_model import model_folder, prepare_base

pytest.importorskip("ray")
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError

from klear_core.cluster import ray_calls
from klear_core.cluster.engine_actors import RayEngine
from klear_core.cluster.pools import plan_when_there
from klear_core.cluster.ray_calls import Reservation, Restarts, final_error


def died_with(node: str) -> Exception:
    return RuntimeError(f"The actor died because its node has died. Node Id: {node} the node was terminated")


def test_all_actors_of_a_dead_node_cost_one_restart() -> None:
    restarts = Restarts(allowed=1)
    for who in ("the learner", "rollout actor 0", "rollout actor 1"):
        restarts.count(who, died_with("aa11"))
    assert restarts.used == 1
    with pytest.raises(TrainingError, match="max_restarts = 1 allows no more"):
        restarts.count("rollout actor 2", died_with("bb22"))


def test_the_nodes_that_the_ranks_died_with_are_those_that_the_engines_died_with() -> None:
    restarts = Restarts(allowed=1)
    restarts.count("the learner", RuntimeError("Socket closed"), frozenset({"aa11"}))
    restarts.count("rollout actor 0", died_with("aa11"))
    assert restarts.used == 1


class Unavailable:
    """An actor that Ray cannot reach: asked whether it is ready, it gives these errors one after the other, then hangs."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.__ray_ready__ = self

    async def remote(self) -> None:
        if self._errors:
            raise self._errors.pop(0)
        await asyncio.Event().wait()


def test_an_actor_that_is_unavailable_has_failed_with_its_node_once_ray_knows() -> None:
    unavailable, dead = ActorUnavailableError("temporarily", None), RayActorError()
    assert run_virtually(final_error(Unavailable(unavailable, dead), unavailable)) is dead
    assert run_virtually(final_error(Unavailable(), dead)) is dead


def test_an_actor_that_neither_answers_nor_is_found_dead_is_given_up() -> None:
    unavailable = ActorUnavailableError("temporarily", None)

    async def seconds() -> float:
        started = asyncio.get_running_loop().time()
        assert await final_error(Unavailable(), unavailable) is unavailable
        return asyncio.get_running_loop().time() - started

    assert run_virtually(seconds()) == pytest.approx(120)


class LosesAnswers:
    """An actor whose reply was on a node that died before this process had fetched it."""

    def __init__(self) -> None:
        self.exchange = self

    async def remote(self, *_requests: object) -> None:
        raise ObjectLostError("aa11", None, "")


def test_requests_whose_answers_were_lost_with_a_node_can_be_asked_elsewhere() -> None:
    params = SamplingParams(
        num_samples=1, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=4, seed=0
    )

    async def create() -> LosesAnswers:
        return LosesAnswers()

    async def load(_actor: object) -> None:
        pass

    async def drive() -> None:
        engine = RayEngine("engine 0", create, load, limit=8)
        await engine.start()
        await asyncio.wait_for(engine.generate([1], params), 3600)

    with pytest.raises(EngineLost, match=r"^its answers were lost \(ObjectLostError\)$"):
        run_virtually(drive())


def test_processes_that_die_by_themselves_count_each() -> None:
    restarts = Restarts(allowed=2)
    for _ in range(2):
        restarts.count("the learner", RuntimeError("exit code 1"))
    with pytest.raises(TrainingError):
        restarts.count("the learner", RuntimeError("exit code 1"))


def too_few_until(call: int) -> Callable[[], str]:
    num_calls = 0

    def plan() -> str:
        nonlocal num_calls
        num_calls += 1
        if num_calls < call:
            raise ResourceError(f"needs 4 GPUs, and there are {num_calls}")
        return "placed"

    return plan


def test_a_cluster_with_too_few_nodes_is_waited_for_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(nodes, "_LOOK_S", 0.01)
    with caplog.at_level(logging.WARNING):
        assert when_there(too_few_until(4), wait_s=60) == "placed"
    assert [r.getMessage() for r in caplog.records] == [
        "waiting up to 60 s for nodes of the Ray cluster: needs 4 GPUs, and there are 1"
    ]


def test_the_wait_ends_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(nodes, "_LOOK_S", 0.01)
    with pytest.raises(ResourceError, match="needs 4 GPUs"):
        when_there(too_few_until(10**9), wait_s=0.1)


def test_engines_that_sample_wait_for_a_node_that_is_being_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(nodes, "_LOOK_S", 0.01)
    prepare_base(TinyModelConfig(num_layers=1), seed=0, workdir=tmp_path, telemetry=NullTelemetry())
    spec = EngineSpec(cfg=VllmEngineConfig(), model_folder=model_folder(tmp_path), num_threads=1, seed=0)
    looks = iter([[1], [1], [1, 1]])  # GPUs of the nodes

    def found() -> list[Node]:
        return [Node(name=str(i), num_cpus=1, num_gpus=gpus) for i, gpus in enumerate(next(looks))]

    plan = plan_when_there(spec, runtime=EnginesRuntime(num_engines=2), key="evaluate", nodes=found)
    assert plan == EnginePlan(num_engines=2, gpus_per_engine=1)
    assert "waiting up to 1800 s for nodes of the Ray cluster: evaluate.runtime.num_engines = 2" in caplog.text


class FreeGroup:
    """A placement group that Ray has reserved."""

    def wait(self, _timeout_s: float) -> bool:
        return True


def test_ranks_are_placed_on_a_node_that_was_missing_for_longer_than_their_places_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(name="replacement", node_id="aa11", num_cpus=8, num_gpus=1)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray_calls, "START_S", 0.5)  # below the 2 s between two looks at the cluster
    monkeypatch.setattr(ray_calls, "ray_nodes", lambda: (node,))
    monkeypatch.setattr(ray_calls, "placement_group", lambda *_bundles, **_options: FreeGroup())
    is_there = too_few_until(2)

    def plan(_nodes: Sequence[Node]) -> Placement:
        is_there()
        return Placement(ranks=(Place(node=node, gpus=(0,)),))

    held = Reservation(plan, width=1, threads_per_rank=1, wait_s=60)
    asyncio.run(held.hold())
    assert [place.node for place in held.placement.ranks] == [node]


def test_one_machine_alone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ResourceError, match="there are 1"):
        when_there(too_few_until(2), wait_s=600)


@pytest.mark.parametrize(("mode", "remedy"), [("", "set RAY_AUTH_MODE=token"), ("token", "is RAY_AUTH_TOKEN that of")])
def test_a_cluster_that_refuses_to_be_joined_is_asked_for_its_token(
    monkeypatch: pytest.MonkeyPatch, mode: str, remedy: str
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    assert remedy in str(cannot_join("10.0.0.1:6379", ConnectionError("Failed to connect to Ray cluster")))


def test_the_interface_of_an_address_is_found() -> None:
    found = {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    name, address = next((name, mine[0]) for name, mine in found.items() if mine)
    assert nodes._interface_of(address) == name
    assert nodes._interface_of("203.0.113.7") is None


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="there is no IPv6")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_process_group_starts_at_a_nodes_address(address: str) -> None:
    """As Ray has it: an IPv6 address without brackets."""
    where = nodes.rendezvous_at(address)
    assert urlsplit(where).hostname == address
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    dist.destroy_process_group()
