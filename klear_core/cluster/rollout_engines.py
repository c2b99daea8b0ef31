"""Sampling engines as Ray actors, replaced when they die."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from klear_core.cluster.actors import Answer, Request, RolloutActor, to_arrays
from klear_core.cluster.calls import LOST, START_S, NotGiven, Restarts, StoredWeights, cause_of, rollout_name, within
from klear_core.cluster.rl_learner import RayLearner
from klear_core.generate.engine import SamplingParams, WeightOffer, WeightSource
from klear_core.rl.workers import LearnerLost, RlRun
from klear_core.types import Completion

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

_CLOSE_S = 5.0


@dataclass(eq=False, slots=True)
class Seat:
    """A place for a rollout actor: the actor may be another one tomorrow, the requests stay."""

    index: int
    actor: Any
    waiting: dict[int, tuple[Request, asyncio.Future[list[Completion]]]] = field(default_factory=dict)
    """By id: all requests without an answer."""
    unsent: list[Request] = field(default_factory=list)
    unwanted: list[int] = field(default_factory=list)
    has_work: asyncio.Event = field(default_factory=asyncio.Event)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the actor is replaced or given weights, so that none serves with old ones."""
    trouble: BaseException | None = None
    """Why nobody serves here any more."""


class RayPolicy:
    """A `TrainableEngine` over several rollout actors: requests go to the least busy, and survive the death of their actor."""

    def __init__(self, job: RlRun, restarts: Restarts, num_gpus: float, learner: RayLearner) -> None:
        self.version = 0
        self._job = job
        self._learner = learner
        self._restarts = restarts
        self._actor_type = ray.remote(num_cpus=0, num_gpus=num_gpus, max_restarts=0)(RolloutActor)
        self._weights: ray.ObjectRef | None = None
        self._is_given = False
        """New actors get the learner's present weights from itself."""
        self._seats: list[Seat] = []
        self._conversations: list[asyncio.Task[None]] = []
        self._num_requests = 0

    async def start(self) -> None:
        """Make all actors, with the initial model."""
        self._seats = [Seat(index=i, actor=self._actor_type.remote()) for i in range(self._job.cfg.runtime.num_rollout_actors)]
        await asyncio.gather(*(self._settle(seat) for seat in self._seats))
        for seat in self._seats:
            conversation = asyncio.create_task(self._converse(seat))
            conversation.add_done_callback(partial(_tell_waiting, seat))
            self._conversations.append(conversation)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """As `InferenceEngine.generate`."""
        self._num_requests += 1
        request = Request(request_id=self._num_requests, prompt_ids=tuple(prompt_ids), params=params)
        reply: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        seat = min(self._seats, key=lambda s: (len(s.waiting), s.index))
        if seat.trouble is not None:
            raise seat.trouble
        seat.waiting[request.request_id] = (request, reply)
        seat.unsent.append(request)
        seat.has_work.set()
        try:
            return await reply
        finally:
            if seat.waiting.pop(request.request_id, None) is not None:  # given up by the caller
                seat.unwanted.append(request.request_id)
                seat.unsent = [r for r in seat.unsent if r.request_id != request.request_id]

    async def load_weights(self, weights: WeightSource, *, version: int) -> None:
        """As `TrainableEngine.load_weights`; the weights travel through the object store once for all actors, or straight to them."""
        self.version = version
        if isinstance(weights, WeightOffer):
            await self._give_all()
            return
        self._weights = weights.ref if isinstance(weights, StoredWeights) else ray.put(to_arrays(_tensors(weights)))
        await self._tell_all("load_weights", self._weights, version, what=f"take the weights of version {version}")

    async def sleep(self) -> None:
        """As `SleepingEngine.sleep`. A dead actor has no memory left to give: it is replaced when the others wake."""
        lost = await asyncio.gather(*(self._tell(seat, "sleep", what="give its memory away") for seat in self._seats))
        for seat, found in zip(self._seats, lost, strict=True):
            if found is not None:
                log.warning("rollout actor %d died before it slept (%s)", seat.index, type(found[1]).__name__)

    async def wake(self) -> None:
        """As `SleepingEngine.wake`. Who died asleep is replaced now, when the learner has left room for a new engine."""
        await self._tell_all("wake", what="take its memory back")

    async def close(self) -> None:
        """End all actors; waiting requests are cancelled."""
        for task in self._conversations:
            task.cancel()
        for seat in self._seats:
            for _, reply in seat.waiting.values():
                reply.cancel()
        closing = [asyncio.wrap_future(seat.actor.close.remote().future()) for seat in self._seats]
        if closing:
            await asyncio.wait(closing, timeout=_CLOSE_S)
        for seat in self._seats:
            ray.kill(seat.actor, no_restart=True)

    def status(self) -> str:
        """Who has how many requests."""
        return ", ".join(f"rollout actor {s.index} ({len(s.waiting)} requests)" for s in self._seats)

    async def _converse(self, seat: Seat) -> None:
        """Carry requests to the seat's actor and answers back, for ever."""
        while True:
            await seat.has_work.wait()
            async with seat.changing:  # an actor that is not ready yet must not be asked
                actor = seat.actor
                requests, seat.unsent = seat.unsent, []
                unwanted, seat.unwanted = seat.unwanted, []
                exchange = actor.exchange.remote(requests, unwanted)
            try:
                answers = await exchange
            except LOST as error:
                await self._replace(seat, actor, error)
                continue
            for answer in answers:
                _deliver(seat, answer)
            if not seat.waiting and not seat.unwanted:
                seat.has_work.clear()

    async def _settle(self, seat: Seat) -> None:
        actor = seat.actor
        try:
            await self._equip(seat)
        except LOST as error:
            await self._replace(seat, actor, error)

    async def _tell(self, seat: Seat, method: str, *args: object, what: str) -> tuple[Any, BaseException] | None:
        """The actor that was lost over it, and how. Its successor is not told: it is awake and has the present weights."""
        actor = seat.actor
        try:
            async with seat.changing:
                if seat.actor is actor:
                    call = getattr(actor, method).remote(*args)
                    await within(call, self._job.cfg.runtime.stall_timeout_s, rollout_name(seat.index), what)
        except LOST as error:
            return actor, error
        return None

    async def _tell_all(self, method: str, *args: object, what: str) -> None:
        """All seats at once; lost actors are replaced."""

        async def tell(seat: Seat) -> None:
            lost = await self._tell(seat, method, *args, what=what)
            if lost is not None:
                await self._replace(seat, *lost)

        await asyncio.gather(*(tell(seat) for seat in self._seats))

    async def _give_all(self) -> None:
        """Straight from the learner. Who did not get everything is replaced."""
        self._is_given = True
        async with AsyncExitStack() as held:
            for seat in self._seats:
                await held.enter_async_context(seat.changing)
            actors = {seat.index: seat.actor for seat in self._seats}
            try:
                failed = await self._learner.give(actors)
            except LearnerLost as lost:
                failed = dict.fromkeys(actors, lost)
        await asyncio.gather(*(self._replace(self._seats[i], actors[i], error) for i, error in failed.items()))
        for error in failed.values():
            if isinstance(error, LearnerLost):
                raise error

    async def _replace(self, seat: Seat, dead: Any, error: BaseException) -> None:
        """A new actor with the present weights, which is then asked all that the dead one had not answered."""
        async with seat.changing:
            if seat.actor is not dead:
                return  # whoever noticed first has replaced it, and it may be at work already
            while seat.actor is dead:
                if not isinstance(error, LearnerLost):  # which was counted
                    self._restarts.count(rollout_name(seat.index), error)
                ray.kill(dead, no_restart=True)  # it may live, with some old weights and some new ones
                seat.actor = self._actor_type.remote()
                try:
                    await self._equip(seat)
                except (*LOST, NotGiven) as another:
                    dead, error = seat.actor, another
            seat.unsent = [request for request, _ in seat.waiting.values()]

    async def _equip(self, seat: Seat) -> None:
        start = seat.actor.start.remote(self._job, self._weights, self.version)
        await within(start, max(START_S, self._job.cfg.runtime.stall_timeout_s), rollout_name(seat.index), "start its engine")
        if not self._is_given:
            return
        try:
            failed = await self._learner.give({seat.index: seat.actor})
        except LearnerLost as lost:  # the loop is told as well: it restores the learner, and gives its weights to all
            log.warning("rollout actor %d has the initial weights for now: %s", seat.index, lost)
        else:
            if failed:
                raise NotGiven(f"rollout actor {seat.index} did not get its weights") from failed[seat.index]


def _tell_waiting(seat: Seat, conversation: asyncio.Task[None]) -> None:
    """Nobody awaits a conversation: if it fails, those who wait for its answers must hear of it."""
    if conversation.cancelled():
        return
    seat.trouble = cause_of(conversation.exception() or AssertionError("a conversation has no end"))
    for _, reply in seat.waiting.values():
        if not reply.done():
            reply.set_exception(seat.trouble)


def _deliver(seat: Seat, answer: Answer) -> None:
    """Settle the request once; an answer that nobody waits for any more is dropped."""
    _, reply = seat.waiting.pop(answer.request_id, (None, None))
    if reply is None or reply.done():
        return
    if answer.refusal:
        reply.set_exception(ValueError(answer.refusal))
    else:
        reply.set_result(list(answer.completions))


def _tensors(weights: Path | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(weights, Path):
        from safetensors.torch import load_file

        return {name: w for file in sorted(weights.glob("*.safetensors")) for name, w in load_file(file).items()}
    return weights
