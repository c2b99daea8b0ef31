"""A gang tells ranks that are slow from ranks that are stuck, by what they report; the ranks are fakes, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from klear_core.cluster.rank_actors import RankActor, Reports
from klear_core.config.train import TrainRuntime
from klear_core.errors import TrainingError
from klear_core.metrics import Heartbeat, NullTelemetry

pytest.importorskip("ray")
from klear_core.cluster.gang import Gang


class FakeRank:
    """Stands for an actor's handle that is asked `take_reports.options(...).remote()`."""

    def __init__(self, progress: Callable[[int], Heartbeat]) -> None:
        self.num_asked = 0
        self.progress = progress
        self.take_reports = self

    def options(self, **_options: str) -> FakeRank:
        return self

    async def remote(self) -> Reports:
        self.num_asked += 1
        return Reports(items=[], progress=self.progress(self.num_asked))


def gang_of(*ranks: FakeRank) -> Gang:
    runtime = TrainRuntime(device="cpu", num_workers=len(ranks))
    gang = Gang(RankActor, runtime, gpus_per_rank=0, telemetry=NullTelemetry())
    gang.ranks = list(ranks)
    return gang


def advances(num_asked: int) -> Heartbeat:
    return Heartbeat(count=num_asked, latest=f"micro-batch {num_asked}")


def stops(num_asked: int) -> Heartbeat:
    return Heartbeat(count=min(num_asked, 1), latest="micro-batch 1")


def test_a_call_may_last_longer_than_the_limit_as_long_as_a_rank_makes_progress() -> None:
    """2 s with a limit of 1 s; the other rank waits for the first."""

    async def drive() -> list[str]:
        gang = gang_of(FakeRank(advances), FakeRank(stops))
        return await gang.wait([asyncio.sleep(2, "done")], "do a step", stall_timeout_s=1)

    assert asyncio.run(drive()) == ["done"]


def test_ranks_without_progress_are_named_with_what_they_did_last() -> None:
    async def drive() -> None:
        gang = gang_of(FakeRank(lambda _n: Heartbeat(count=7, latest="micro-batch 7")), FakeRank(stops))
        await gang.wait([asyncio.sleep(3600)], "do a step", stall_timeout_s=0.6)

    told = (
        r"^stalled: no progress for 0\.6 s while the learner was to do a step; last done: "
        r"learner rank 1: micro-batch 1; learner rank 0: micro-batch 7$"
    )
    with pytest.raises(TrainingError, match=told):
        asyncio.run(drive())
