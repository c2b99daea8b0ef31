"""Run sampling engines as Ray actors: the actor, its messages, and the engine that a pool sees."""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging.handlers import QueueHandler
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from klear_core.cluster.nodes import bind_to_node_address
from klear_core.cluster.rank_actors import LOGGER, Arrays, Outbox, Report, to_tensors
from klear_core.cluster.ray_calls import LOST, RemoteCall, awaited, cause_of, final_error, within
from klear_core.errors import ResourceError
from klear_core.generate.engine import (
    EngineStats,
    InferenceEngine,
    SamplingParams,
    SeparateEngine,
    SleepingEngine,
    TrainableEngine,
    WeightOffer,
    engine_stats,
    limit_of,
)
from klear_core.generate.factory import EngineSpec, build_spec, build_trainable_engine, limit_here
from klear_core.generate.pool import EngineLost
from klear_core.rl.interfaces import RlSetup
from klear_core.types import Completion

if TYPE_CHECKING:
    from torch import Tensor

# ---- engine actors ----
# Define the Ray actors that run sampling engines, and their messages; imports no Ray.


_POLL_S = 0.1  # longest wait of an engine's actor for a first reply before it returns none
_GATHER_S = 0.04  # longest wait for more replies to return with the first: each message costs a millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of `generate`, sent to an actor."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Result of a request: its completions, or the reason why there are none."""

    request_id: int
    completions: tuple[Completion, ...]
    error: str = ""
    """Message of the ValueError that `generate` raised; empty if there are completions."""


class RequestServer:
    """Answer requests with an engine, many at a time, in few messages."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._running: dict[asyncio.Task[Reply], int] = {}

    async def exchange(self, requests: Sequence[Request], cancelled: Sequence[int]) -> list[Reply]:
        """Start these requests, cancel others, and return finished replies after a short wait for the first."""
        for request in requests:
            # The dict also keeps the task alive: asyncio itself holds only a weak reference.
            self._running[asyncio.create_task(self._answer(request))] = request.request_id
        unwanted = [task for task, request_id in self._running.items() if request_id in cancelled]
        # Taken out, because `result` of a cancelled task raises, and nobody waits for its reply.
        for task in unwanted:
            task.cancel()
            del self._running[task]
        await self._wait(_POLL_S, asyncio.FIRST_COMPLETED)
        await self._wait(_GATHER_S, asyncio.ALL_COMPLETED)
        finished = [task for task in self._running if task.done()]
        for task in finished:
            del self._running[task]
        return [task.result() for task in finished]

    async def _wait(self, timeout_s: float, until: str) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s, return_when=until)

    async def _answer(self, request: Request) -> Reply:
        try:
            completions = await self._engine.generate(request.prompt_ids, request.params)
        except ValueError as e:  # an invalid request: the caller of `generate` gets the error
            return Reply(request_id=request.request_id, completions=(), error=str(e))
        return Reply(request_id=request.request_id, completions=tuple(completions))


@contextmanager
def kept_logs() -> Iterator[list[Report]]:
    """Keep what Klear logs in the block, for the driver: nobody sees what an actor prints."""
    logger, outbox, records = logging.getLogger(LOGGER), Outbox(), list[Report]()
    handler, before = QueueHandler(outbox), logger.level  # type: ignore[arg-type]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        records += outbox.take()


def relay_logs(records: Sequence[Report], name: str) -> None:
    """Log in this process what an actor of this name has kept."""
    for record in records:
        assert isinstance(record, logging.LogRecord), record
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            record.msg = f"{name}: {record.getMessage()}"  # no arguments: the actor has filled them in
            logger.handle(record)


class EngineActor:
    """Run one sampling engine with fixed weights."""

    async def start(self, spec: EngineSpec) -> tuple[int, list[Report]]:
        """Build the engine; return the number of requests that it has room for, and what was logged."""
        spec = spec.on_this_node()
        with kept_logs() as logged:
            self._engine = await build_spec(spec)
        self._server = RequestServer(self._engine)
        if spec.remote is not None and spec.is_sent:
            # The weights are loaded, and nobody else asks for this node's copy of the model.
            shutil.rmtree(spec.model_folder, ignore_errors=True)
        return limit_of(self._engine, limit_here(spec), spec.answer_tokens), logged

    async def stats(self) -> EngineStats | None:
        """Return the engine's load since the last call; see `MeasuredEngine`."""
        return await engine_stats(self._engine)

    async def exchange(self, requests: Sequence[Request], cancelled: Sequence[int]) -> list[Reply]:
        """Start and cancel requests and return finished ones; see `RequestServer.exchange`."""
        return await self._server.exchange(requests, cancelled)

    async def close(self) -> None:
        """Close the engine with everything that it started."""
        await self._engine.close()


def rollout_name(index: int) -> str:
    """Return a rollout actor's name for messages."""
    return f"rollout actor {index}"


class RolloutActor:
    """Run one sampling engine of an RL run, whose weights follow the learner's."""

    async def start(self, setup: RlSetup) -> list[Report]:
        """Build the engine with the initial weights (version 0); return what was logged."""
        from klear_core.train.base_model import model_folder, wanted_window

        with kept_logs() as logged:
            # before a process of the engine is started: weights may come directly from the learner
            bind_to_node_address()
            setup = setup.on_this_node()
            cfg, folder = setup.cfg, model_folder(setup.model)
            threads, window = cfg.runtime.rollout_threads, wanted_window(setup.model)
            self._engine: TrainableEngine = await build_trainable_engine(
                cfg.rollout.engine, folder, num_threads=threads, seed=setup.seed, window=window
            )
        self._server = RequestServer(self._engine)
        self._received: dict[str, Tensor] = {}
        """New weights, as far as they have come."""
        return logged

    async def receive_weights(self, arrays: Arrays) -> None:
        """Copy a part of new weights from the object store, for `load_received`."""
        # In a thread, so that replies do not wait.
        self._received |= await asyncio.to_thread(to_tensors, arrays)

    async def load_received(self, version: int) -> None:
        """Load the weights, once all parts were received; see `TrainableEngine.load_weights`."""
        weights, self._received = self._received, {}
        await self._engine.load_weights(weights, version=version)

    async def fetch_weights(self, offer: WeightOffer) -> None:
        """Load the weights that the learner offers. After an error old and new ones are mixed: discard the engine."""
        await self._engine.load_weights(offer, version=offer.version)

    async def digest_offered(self, offer: WeightOffer) -> list[str]:
        """Fetch offered tensors without loading them; return a digest of what each process of the engine received."""
        from klear_core.generate.weight_transfer import digest_of, fetch

        if isinstance(self._engine, SeparateEngine):
            return await self._engine.digest_offered(offer)
        return [await asyncio.to_thread(lambda: digest_of(fetch(offer, rank=1)))]  # the engine is in this process

    async def stats(self) -> EngineStats | None:
        """Return the engine's load since the last call; see `MeasuredEngine`."""
        return await engine_stats(self._engine)

    async def sleep(self) -> None:
        """Free the engine's GPU memory; see `SleepingEngine.sleep`."""
        await self._sleeper().sleep()

    async def wake(self) -> None:
        """Allocate the engine's GPU memory again; see `SleepingEngine.wake`."""
        await self._sleeper().wake()

    async def exchange(self, requests: Sequence[Request], cancelled: Sequence[int]) -> list[Reply]:
        """Start and cancel requests and return finished ones; see `RequestServer.exchange`."""
        return await self._server.exchange(requests, cancelled)

    async def close(self) -> None:
        """Close the engine with everything that it started."""
        await self._engine.close()

    def _sleeper(self) -> SleepingEngine:
        assert isinstance(self._engine, SleepingEngine), type(self._engine)
        return self._engine


# ---- ray engine ----


log = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""Longest wait for an engine to end what it started, once the run needs no engine: after an interrupt of all processes,
Ray answers no more."""
_REPLACE_S = 20.0
"""The same before another engine takes its GPUs. vLLM gives a process that hangs 5 s to end before it kills it."""
_STATS_S = 5.0
_ANSWER_S = 600.0
"""Longest wait for the answer to a message. An actor that works answers within a second, if only that nothing is done
yet; one that is frozen, or whose node cannot be reached, never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadActor:
    """An actor that died during a call, or whose engine did, with the error raised."""

    actor: Any
    error: BaseException


@dataclass(eq=False, slots=True, kw_only=True)
class _Link:
    """The requests of one actor; an actor that replaces it has its own."""

    actor: Any
    waiting: dict[int, asyncio.Future[list[Completion]]] = field(default_factory=dict)
    unsent: list[Request] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    has_work: asyncio.Event = field(default_factory=asyncio.Event)
    is_queued: bool = False
    """Whether the actor waits for GPUs that other work holds."""
    failure: BaseException | None = None
    """Error after which the actor is sent nothing more."""


class RayEngine:
    """A `PooledEngine` in an actor; `start` replaces an earlier actor."""

    def __init__(
        self,
        name: str,
        create: Callable[[], Awaitable[Any]],
        load: Callable[[Any], Awaitable[None]],
        *,
        limit: int,
        wait_for_gpus: Callable[[Any], Awaitable[None]] | None = None,
        answer_s: float = _ANSWER_S,
    ) -> None:
        """`create` makes an actor, and `load` builds the engine in it, with the current weights.

        With `wait_for_gpus`, which returns when the actor has its GPUs, the pool serves without this engine meanwhile.
        An actor that leaves a message unanswered for `answer_s` counts as lost.
        """
        self.name = name
        self.limit = limit
        self.cache_tokens = None
        self.lock = asyncio.Lock()
        """Held while the actor starts or loads weights, so that no request is sampled with old weights."""
        self._create, self._load, self._wait_for_gpus = create, load, wait_for_gpus
        self._answer_s = answer_s
        self._link: _Link | None = None
        self._serving: asyncio.Task[None] | None = None
        self._request_ids = itertools.count()

    @property
    def is_queued(self) -> bool:
        """Return whether the start waits for GPUs that other work holds; see `PooledEngine.is_queued`."""
        return self._link is not None and self._link.is_queued

    @property
    def is_there(self) -> bool:
        """Return whether there is an actor that has its GPUs."""
        return self._link is not None and not self._link.is_queued

    @property
    def actor(self) -> Any:
        """Return the handle of the present actor."""
        assert self._link is not None, "the engine has not been started"
        return self._link.actor

    async def start(self) -> None:
        """Start an actor with an engine, in place of an earlier one; see `PooledEngine.start`."""
        async with self.lock:
            if self._serving is not None:
                self._serving.cancel()
            if self._link is not None:
                # It may still run, with old and new weights mixed, or hold its GPUs.
                await _end(self._link, within_s=_REPLACE_S)
            link = self._link = _Link(actor=await self._create())
            try:
                if self._wait_for_gpus is not None:
                    link.is_queued = True
                    await self._wait_for_gpus(link.actor)
                    link.is_queued = False
                await self._load(link.actor)
            except LOST as lost:
                cause = await final_error(link.actor, lost)
                raise EngineLost(f"its actor died while it started ({type(cause).__name__})") from cause
            self._serving = asyncio.create_task(self._serve(link))

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Sample; see `PooledEngine.generate`."""
        link = self._link
        assert link is not None, "the engine has not been started"
        if link.failure is not None:
            raise link.failure
        request = Request(request_id=next(self._request_ids), prompt_ids=tuple(prompt_ids), params=params)
        answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        link.waiting[request.request_id] = answer
        link.unsent.append(request)
        link.has_work.set()
        try:
            return await answer
        finally:
            if link.waiting.pop(request.request_id, None) is not None:  # no reply yet: the caller was cancelled
                link.cancelled.append(request.request_id)
                link.unsent = [r for r in link.unsent if r.request_id != request.request_id]

    async def call(self, calls: Mapping[str, RemoteCall], *, timeout_s: float) -> DeadActor | None:
        """Make calls of the actor one after the other; return actor and error if it or its engine died, else None.

        Keys say what each is to do, for messages; `timeout_s` is that of one call. If the actor was replaced while this
        waited for the lock, the new one is not called: it starts awake, with the current weights.
        """
        actor = self.actor
        try:
            async with self.lock:
                if self.actor is actor:
                    for what, call in calls.items():
                        await within(call(actor), timeout_s, self.name, what)
        except (*LOST, ResourceError) as error:  # the latter: the actor lives, and the process of its engine does not
            return DeadActor(actor=actor, error=error)
        return None

    async def stats(self) -> EngineStats | None:
        """Return the engine's load since the last call; None if it does not say within seconds."""
        link = self._link
        if link is None or link.is_queued or link.failure is not None:
            return None
        try:
            found: EngineStats | None = await asyncio.wait_for(awaited(link.actor.stats.remote()), _STATS_S)
        except (TimeoutError, *LOST, RayTaskError):  # a report ends no run; the next request finds out
            return None
        return found

    async def close(self) -> None:
        """Stop the actor and its engine."""
        if self._serving is not None:
            self._serving.cancel()
        link, self._link = self._link, None
        if link is not None:
            await _end(link, within_s=_CLOSE_S)

    async def _serve(self, link: _Link) -> None:
        """Send requests to the actor and deliver the replies, until it dies or this is cancelled."""
        while True:
            await link.has_work.wait()
            async with self.lock:  # an actor that loads weights gets no requests
                requests, link.unsent = link.unsent, []
                cancelled, link.cancelled = link.cancelled, []
                exchange = link.actor.exchange.remote(requests, cancelled)
            # Await the replies without the lock, because new weights must not wait for answers.
            try:
                replies = await asyncio.wait_for(awaited(exchange), self._answer_s)
            except TimeoutError as error:
                _fail(link, EngineLost(f"its actor has not answered for {self._answer_s:g} s"), error)
                return
            except LOST as lost:
                cause = await final_error(link.actor, lost)
                _fail(link, EngineLost(f"its actor died ({type(cause).__name__})"), cause)
                return
            except RayTaskError as error:
                _fail(link, cause_of(error), error)
                return
            except RayError as error:  # such as ObjectLostError: the node died that held a large reply
                _fail(link, EngineLost(f"its answers were lost ({type(error).__name__})"), error)
                return
            for reply in replies:
                _deliver(link, reply)
            # While answers are due it stays set: the next exchange, perhaps with no request, asks for them.
            if not link.waiting and not link.cancelled:
                link.has_work.clear()


async def _end(link: _Link, *, within_s: float) -> None:
    """Stop an actor with what its engine started; after `within_s` the actor alone."""
    if not link.is_queued:  # else there is no process yet
        # Close the engine first, because killing the actor would leave the engine's child processes running.
        closing = asyncio.wrap_future(link.actor.close.remote().future())
        await asyncio.wait([closing], timeout=within_s)
        if not closing.done():
            closing.cancel()
        elif not closing.cancelled():
            closing.exception()  # an actor that is dead already has no more to close
    ray.kill(link.actor, no_restart=True)


def _fail(link: _Link, failure: BaseException, error: BaseException) -> None:
    """Fail all requests of an actor. Its engine may be broken while it lives: then `failure` is a ResourceError."""
    link.failure = failure
    if isinstance(failure, ResourceError):
        failure.__cause__ = error
    for answer in link.waiting.values():
        if not answer.done():
            answer.set_exception(failure)


def _deliver(link: _Link, reply: Reply) -> None:
    """Set the result or the error of a reply's request; drop the reply if nobody waits for it any more."""
    answer = link.waiting.pop(reply.request_id, None)
    if answer is None or answer.done():
        return
    if reply.error:
        answer.set_exception(ValueError(reply.error))
    else:
        answer.set_result(list(reply.completions))
