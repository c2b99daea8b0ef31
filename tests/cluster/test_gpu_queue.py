"""How long engines wait for GPUs of a Ray cluster, on a virtual clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any

import pytest
from virtual_clock import run_virtually

from klear_core.cluster.placement import Node
from klear_core.errors import ResourceError

pytest.importorskip("ray")
from klear_core.cluster.engine_actors import RayEngine
from klear_core.cluster.pools import GpuQueue

HOUR = 3600.0


class Call:
    """A method of an actor that returns after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def remote(self) -> Awaitable[None]:
        return asyncio.sleep(self._seconds)


class Actor:
    """Has its GPUs after some seconds."""

    def __init__(self, seconds: float) -> None:
        self.__ray_ready__ = Call(seconds)


def start(*seconds: float, gpus: int = 1) -> tuple[list[float], Sequence[BaseException | None]]:
    """Start engines that get their GPUs after so many seconds; return the times at which they began to load."""
    times: list[float] = []

    async def create(seconds: float) -> Actor:
        return Actor(seconds)

    async def load(_actor: Any) -> None:
        times.append(asyncio.get_running_loop().time())

    async def body() -> Sequence[BaseException | None]:
        engines: list[RayEngine] = []
        queue = GpuQueue(engines, 1, key="evaluate", nodes=lambda: [Node(name="a", num_cpus=1, num_gpus=gpus)])
        engines += [
            RayEngine(f"engine {i}", partial(create, s), load, limit=1, wait_for_gpus=queue.wait)
            for i, s in enumerate(seconds)
        ]
        return await asyncio.gather(*(engine.start() for engine in engines), return_exceptions=True)

    errors = run_virtually(body())
    return times, errors


def test_an_engine_waits_for_days_while_another_works_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        times, errors = start(1, 100 * HOUR, 101 * HOUR)
    assert times == [1, 100 * HOUR, 101 * HOUR]
    assert errors == [None, None, None]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING  # a terminal shows warnings only
    assert record.getMessage().startswith("evaluate: 2 of 3 engines wait for GPUs that other work of the Ray cluster")


def test_a_pool_without_any_engine_waits_for_a_day() -> None:
    assert start(23 * HOUR) == ([23 * HOUR], [None])
    times, (error,) = start(25 * HOUR)
    assert times == []
    assert isinstance(error, ResourceError)
    assert "none of 1 engines got its 1 GPUs; the Ray cluster has 1 in all" in str(error)


def test_nobody_waits_for_gpus_of_nodes_that_are_lost() -> None:
    times, (error,) = start(HOUR, gpus=0)
    assert times == []
    assert "the Ray cluster has 0 in all: nodes were lost" in str(error)
