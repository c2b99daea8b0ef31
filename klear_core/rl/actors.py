"""Learner and sampling engines as Ray actors, replaced when they die: the driver's side of `shells.py`, and the core's only door to Ray.

The driver never blocks in Ray: it awaits, so that signals and timeouts get through.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from klear_core.errors import ResourceError, TrainingError
from klear_core.generate.engine import SamplingParams, TrainableEngine, WeightOffer, WeightSource
from klear_core.rl.gpus import is_direct, plan_gpus
from klear_core.rl.shells import Answer, LearnerActor, Request, RolloutActor, to_arrays, to_tensors
from klear_core.rl.workers import Counters, LearnerHandle, LearnerLost, RlRun
from klear_core.types import Completion, TrainSample

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOST = (RayActorError, OutOfMemoryError)
"""What a call raises whose actor is gone; the second, which is not one of the first, where Ray killed it to save the node's memory."""
_CLOSE_S = 5.0
_START_S = 300.0  # starting a process and loading a model may always take this long, however short a stall is


class StoredWeights(Mapping[str, "Tensor"]):
    """Weights in Ray's object store, fetched only if somebody here looks at them."""

    def __init__(self, ref: ray.ObjectRef) -> None:
        self.ref = ref

    def __getitem__(self, name: str) -> Tensor:
        return to_tensors(ray.get(self.ref))[name]

    def __iter__(self) -> Iterator[str]:
        return iter(ray.get(self.ref))

    def __len__(self) -> int:
        return len(ray.get(self.ref))


class NotGiven(TrainingError):  # noqa: N818  # it is an event to recover from before it is an error
    """An engine got none or not all of the learner's weights."""


class Restarts:
    """How many more actors may be lost."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.used = 0

    def count(self, who: str, error: BaseException) -> None:
        """One more; TrainingError if it is one too many."""
        self.used += 1
        if self.used > self.allowed:
            raise TrainingError(f"{who} was lost; runtime.max_restarts = {self.allowed} allows no more") from error
        log.warning("%s was lost (%s); starting another", who, type(error).__name__)


async def within(awaitable: Awaitable[T], timeout_s: float, who: str, what: str) -> T:
    """The result of a remote call, with its own errors raised as themselves; TrainingError names who did not do what in time."""
    try:
        return await asyncio.wait_for(_awaited(awaitable), timeout_s)
    except RayTaskError as e:
        raise cause_of(e) from e
    except TimeoutError:
        raise TrainingError(f"stalled: waited {timeout_s:g} s for {who} to {what}") from None


def cause_of(error: BaseException) -> BaseException:
    """What was raised in the actor, where Ray wrapped it."""
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error


async def _failures(calls: Mapping[int, Awaitable[object]]) -> dict[int, BaseException]:
    outcomes = await asyncio.gather(*calls.values(), return_exceptions=True)
    return {i: outcome for i, outcome in zip(calls, outcomes, strict=True) if isinstance(outcome, BaseException)}


def _rollout(index: int) -> str:
    return f"rollout actor {index}"


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _meeting_place(_actor: LearnerActor) -> str:
    """An address on the actor's node where ranks can meet; runs in the actor."""
    with socket.socket() as s:
        s.bind(("", 0))
        return f"tcp://{ray.util.get_node_ip_address()}:{s.getsockname()[1]}"


class RayLearner:
    """A `LearnerHandle` over one actor a rank. If one dies all are made anew, for a world does not survive the loss of a rank."""

    def __init__(self, job: RlRun, restarts: Restarts, num_gpus: float, *, is_direct: bool) -> None:
        """`is_direct`: weights leave it through `give`, not through the object store."""
        self.is_direct = is_direct
        self._job = job
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
            except _LOST as error:
                self._restarts.count("the learner", error)
                self.kill()
            else:
                return

    async def _make(self) -> None:
        self._ranks = [self._actor_type.remote() for _ in range(self._job.cfg.runtime.num_workers)]
        timeout_s = max(_START_S, self._job.cfg.runtime.stall_timeout_s)
        place = await within(self._ranks[0].__ray_call__.remote(_meeting_place), timeout_s, "the learner", "start its process")
        starts = [actor.start.remote(self._job, rank, place) for rank, actor in enumerate(self._ranks)]
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
        wait = partial(within, timeout_s=self._job.cfg.runtime.stall_timeout_s)
        async with self._turn:
            failed = await _failures({i: wait(e.__ray_ready__.remote(), who=_rollout(i), what="answer") for i, e in engines.items()})
            offer: WeightOffer = (await self._call("offer_weights"))[0]
            present = [i for i in engines if i not in failed]
            sending = asyncio.ensure_future(self._call("send_weights", offer, present))
            calls = {i: engines[i].fetch_weights.remote(replace(offer, engine=i)) for i in present}
            failed |= await _failures({i: wait(call, who=_rollout(i), what="fetch its weights") for i, call in calls.items()})
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

    def _check_present(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def _or_lost(self, call: Awaitable[list[Any]], what: str) -> list[Any]:
        try:
            return await within(call, self._job.cfg.runtime.stall_timeout_s, "the learner", what)
        except _LOST as error:
            self._restarts.count("the learner", error)
            self.kill()
            await self.start()
            self._lost = LearnerLost(f"the learner died while it was to {what}")
            raise self._lost from error


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
            except _LOST as error:
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
        except _LOST as error:
            await self._replace(seat, actor, error)

    async def _tell(self, seat: Seat, method: str, *args: object, what: str) -> tuple[Any, BaseException] | None:
        """The actor that was lost over it, and how. Its successor is not told: it is awake and has the present weights."""
        actor = seat.actor
        try:
            async with seat.changing:
                if seat.actor is actor:
                    call = getattr(actor, method).remote(*args)
                    await within(call, self._job.cfg.runtime.stall_timeout_s, _rollout(seat.index), what)
        except _LOST as error:
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
                    self._restarts.count(_rollout(seat.index), error)
                ray.kill(dead, no_restart=True)  # it may live, with some old weights and some new ones
                seat.actor = self._actor_type.remote()
                try:
                    await self._equip(seat)
                except (*_LOST, NotGiven) as another:
                    dead, error = seat.actor, another
            seat.unsent = [request for request, _ in seat.waiting.values()]

    async def _equip(self, seat: Seat) -> None:
        start = seat.actor.start.remote(self._job, self._weights, self.version)
        await within(start, max(_START_S, self._job.cfg.runtime.stall_timeout_s), _rollout(seat.index), "start its engine")
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


class RayWorkers:
    """`Workers` on the Ray that this process is connected to."""

    def __init__(self) -> None:
        self._learner: RayLearner | None = None
        self._policy: RayPolicy | None = None

    async def start(self, job: RlRun) -> tuple[LearnerHandle, TrainableEngine]:
        """Learner ranks and rollout actors, started side by side. ResourceError if Ray is not there or has too few GPUs."""
        if not ray.is_initialized():
            raise ResourceError("Ray is not running in this process: call ray.init first")
        gpus = plan_gpus(job.cfg, ray.cluster_resources().get("GPU", 0.0))
        restarts = Restarts(job.cfg.runtime.max_restarts)
        self._learner = RayLearner(job, restarts, gpus.learner, is_direct=is_direct(job.cfg, gpus))
        self._policy = RayPolicy(job, restarts, gpus.rollout, self._learner)
        await asyncio.gather(self._learner.start(), self._policy.start())
        return self._learner, self._policy

    def status(self) -> str:
        """The rollout actors and their requests."""
        return self._policy.status() if self._policy else "no rollout actor"

    async def close(self) -> None:
        """End all actors."""
        if self._policy is not None:
            await self._policy.close()
        if self._learner is not None:
            self._learner.kill()
