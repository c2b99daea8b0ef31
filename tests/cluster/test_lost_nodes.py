"""What costs a run its actors is counted once, and missing nodes are waited for; without Ray."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

import psutil
import pytest

from klear_core.cluster import nodes
from klear_core.cluster.nodes import cannot_join, when_there
from klear_core.errors import ResourceError, TrainingError

pytest.importorskip("ray")
from klear_core.cluster.ray_calls import Restarts


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
