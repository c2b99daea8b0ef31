"""Run the learner as one Ray actor per rank."""

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
    """A `LearnerHandle` over one actor per rank. If one dies, all restart: a process group cannot replace a rank."""

    def __init__(self, setup: RlSetup, restarts: Restarts, num_gpus: float, *, is_direct: bool) -> None:
        """Send weights to engines through `give` if `is_direct`, else through the object store."""
        self.is_direct = is_direct
        self._setup = setup
        self._restarts = restarts
        self._turn = asyncio.Lock()
        """Held during a call: restarted engines ask for weights while the loop makes other calls."""
        self._lost: LearnerLost | None = None
        """Raised by every call until `restore`: an engine's call may get it first, and the loop must get it too."""
        self._actor_type = ray.remote(num_cpus=0, num_gpus=num_gpus, max_restarts=0)(LearnerActor)
        self._ranks: list[Any] = []

    async def start(self) -> None:
        """Start all ranks with the initial model; start over if one dies meanwhile."""
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
        place = await within(
            self._ranks[0].__ray_call__.remote(_meeting_place), timeout_s, "the learner", "start its process"
        )
        starts = [actor.start.remote(self._setup, rank, place) for rank, actor in enumerate(self._ranks)]
        await within(asyncio.gather(*starts), timeout_s, "the learner", "load the model")

    async def restore(self) -> Counters | None:
        """Restore the newest checkpoint on all ranks; see `LearnerHandle.restore`."""
        self._lost = None
        found: Counters | None = (await self._all("restore"))[0]
        return found

    async def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Do one RL step on all ranks; see `LearnerHandle.step`."""
        # Samples are stored once for all ranks. Metrics are global, so rank 0's are enough.
        metrics: dict[str, float] = (await self._all("step", ray.put(samples)))[0]
        return metrics

    async def weights(self) -> WeightSource:
        """Return weights in the object store or an offer to fetch them; see `LearnerHandle.weights`."""
        if self.is_direct:
            offer: WeightOffer = (await self._all("offer_weights"))[0]
            return offer
        async with self._turn:
            self._check_present()
            # Awaiting the flags alone reports a dead rank and leaves the weights in the object store.
            pairs = [actor.weights.options(num_returns=2).remote() for actor in self._ranks]
            await self._or_lost(asyncio.gather(*(sign for sign, _ in pairs)), "gather the weights")
        return StoredWeights(pairs[0][1])

    async def give(self, engines: Mapping[int, Any]) -> dict[int, BaseException]:
        """Send the present weights to these actors; return the error of each that did not get them.

        Raise LearnerLost if the learner dies.
        """
        wait = partial(within, timeout_s=self._setup.cfg.runtime.stall_timeout_s)
        async with self._turn:
            # Leave dead engines out beforehand: the learner would wait for each until its timeout.
            failed = await _failures(
                {i: wait(e.__ray_ready__.remote(), who=rollout_name(i), what="answer") for i, e in engines.items()}
            )
            offer: WeightOffer = (await self._call("offer_weights"))[0]
            present = [i for i in engines if i not in failed]
            # Both sides must run at the same time: sending and fetching are collective calls.
            sending = asyncio.ensure_future(self._call("send_weights", offer, present))
            calls = {i: engines[i].fetch_weights.remote(replace(offer, engine=i)) for i in present}
            failed |= await _failures(
                {i: wait(call, who=rollout_name(i), what="fetch its weights") for i, call in calls.items()}
            )
            await sending
        return failed

    async def save(self, counters: Counters) -> None:
        """Save a checkpoint; see `LearnerHandle.save`."""
        await self._all("save", counters)

    async def export(self, target: Path) -> None:
        """Write the model folder; see `LearnerHandle.export`."""
        await self._all("export", target)

    def kill(self) -> None:
        """Kill all ranks."""
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
        """Return a call's timeout, actor and action for `within`; an RL step has its limit for all its updates."""
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
            # The new ranks have the initial model, so no call may use them before `restore`.
            self._lost = LearnerLost(f"the learner died while it was to {what}")
            raise self._lost from error


async def _failures(calls: Mapping[int, Awaitable[object]]) -> dict[int, BaseException]:
    outcomes = await asyncio.gather(*calls.values(), return_exceptions=True)
    return {i: outcome for i, outcome in zip(calls, outcomes, strict=True) if isinstance(outcome, BaseException)}


def _meeting_place(_actor: LearnerActor) -> str:
    """Return an address on the actor's node for the process group to start from; runs in the actor."""
    import klear_core.rl.learner  # noqa: F401  # slow, so before a port is picked that others may take

    # Port 0 lets the system pick a free one. It is unprotected from here until rank 0 listens on it.
    with socket.socket() as s:
        s.bind(("", 0))
        return f"tcp://{ray.util.get_node_ip_address()}:{s.getsockname()[1]}"
