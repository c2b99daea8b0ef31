"""The learner as one Ray actor a rank."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from klear_core.cluster.actors import LearnerActor
from klear_core.cluster.calls import LOST, START_S, Restarts, StoredWeights, rollout_name, within
from klear_core.generate.engine import WeightOffer, WeightSource
from klear_core.rl.workers import Counters, LearnerLost, RlSetup
from klear_core.types import TrainSample


class RayLearner:
    """A `LearnerHandle` over one actor a rank. If one dies all are made anew, for a world does not survive the loss of a rank."""

    def __init__(self, setup: RlSetup, restarts: Restarts, num_gpus: float, *, is_direct: bool) -> None:
        """`is_direct`: weights leave it through `give`, not through the object store."""
        self.is_direct = is_direct
        self._setup = setup
        self._restarts = restarts
        self._turn = asyncio.Lock()
        """One call at a time: engines are given weights while the loop makes its own calls."""
        self._lost: LearnerLost | None = None
        """Until `restore`: whoever is told first, the loop must hear of it."""
        self._actor_type = ray.remote(num_cpus=0, num_gpus=num_gpus, max_restarts=0)(LearnerActor)
        self._ranks: list[Any] = []

    async def start(self) -> None:
        """Make all ranks, with the initial model."""
        while True:
            try:
                await self._make()
            except LOST as error:
                self._restarts.count("the learner", error)
                self.kill()
            else:
                return

    async def _make(self) -> None:
        self._ranks = [self._actor_type.remote() for _ in range(self._setup.cfg.runtime.num_workers)]
        timeout_s = max(START_S, self._setup.cfg.runtime.stall_timeout_s)
        place = await within(self._ranks[0].__ray_call__.remote(_meeting_place), timeout_s, "the learner", "start its process")
        starts = [actor.start.remote(self._setup, rank, place) for rank, actor in enumerate(self._ranks)]
        await within(asyncio.gather(*starts), timeout_s, "the learner", "load the model")

    async def restore(self) -> Counters | None:
        """As `LearnerHandle.restore`."""
        self._lost = None
        found: Counters | None = (await self._all("restore"))[0]
        return found

    async def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """As `LearnerHandle.step`."""
        metrics: dict[str, float] = (await self._all("step", ray.put(samples)))[0]
        return metrics

    async def weights(self) -> WeightSource:
        """As `LearnerHandle.weights`; they stay in the object store, or with the learner, who offers them."""
        if self.is_direct:
            offer: WeightOffer = (await self._all("offer_weights"))[0]
            return offer
        async with self._turn:
            self._check_present()
            pairs = [actor.weights.options(num_returns=2).remote() for actor in self._ranks]
            await self._or_lost(asyncio.gather(*(sign for sign, _ in pairs)), "gather the weights")
        return StoredWeights(pairs[0][1])

    async def give(self, engines: Mapping[int, Any]) -> dict[int, BaseException]:
        """Let these actors fetch the present weights; why, for each that did not get them. LearnerLost if the learner dies."""
        wait = partial(within, timeout_s=self._setup.cfg.runtime.stall_timeout_s)
        async with self._turn:
            failed = await _failures({i: wait(e.__ray_ready__.remote(), who=rollout_name(i), what="answer") for i, e in engines.items()})
            offer: WeightOffer = (await self._call("offer_weights"))[0]
            present = [i for i in engines if i not in failed]
            sending = asyncio.ensure_future(self._call("send_weights", offer, present))
            calls = {i: engines[i].fetch_weights.remote(replace(offer, engine=i)) for i in present}
            failed |= await _failures({i: wait(call, who=rollout_name(i), what="fetch its weights") for i, call in calls.items()})
            await sending
        return failed

    async def save(self, counters: Counters) -> None:
        """As `LearnerHandle.save`."""
        await self._all("save", counters)

    async def export(self, target: Path) -> None:
        """As `LearnerHandle.export`."""
        await self._all("export", target)

    def kill(self) -> None:
        """End all ranks."""
        for actor in self._ranks:
            ray.kill(actor, no_restart=True)

    async def _all(self, method: str, *args: object) -> list[Any]:
        async with self._turn:
            return await self._call(method, *args)

    async def _call(self, method: str, *args: object) -> list[Any]:
        self._check_present()
        calls = [getattr(actor, method).remote(*args) for actor in self._ranks]
        return await self._or_lost(asyncio.gather(*calls), method)

    def _limit(self, what: str) -> tuple[float, str, str]:
        """Seconds for a call, who makes it and what it is. An RL step is all of its updates, for which a stall's limit is no measure."""
        runtime = self._setup.cfg.runtime
        if what == "step":
            return runtime.step_timeout_s, "the learner", "do the updates of an RL step (runtime.step_timeout_s)"
        return runtime.stall_timeout_s, "the learner", what

    def _check_present(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def _or_lost(self, call: Awaitable[list[Any]], what: str) -> list[Any]:
        try:
            return await within(call, *self._limit(what))
        except LOST as error:
            self._restarts.count("the learner", error)
            self.kill()
            await self.start()
            self._lost = LearnerLost(f"the learner died while it was to {what}")
            raise self._lost from error


async def _failures(calls: Mapping[int, Awaitable[object]]) -> dict[int, BaseException]:
    outcomes = await asyncio.gather(*calls.values(), return_exceptions=True)
    return {i: outcome for i, outcome in zip(calls, outcomes, strict=True) if isinstance(outcome, BaseException)}


def _meeting_place(_actor: LearnerActor) -> str:
    """An address on the actor's node where ranks can meet; runs in the actor."""
    import klear_core.rl.learner  # noqa: F401  # takes seconds; the port is anybody's until the first rank listens there

    with socket.socket() as s:
        s.bind(("", 0))
        return f"tcp://{ray.util.get_node_ip_address()}:{s.getsockname()[1]}"
