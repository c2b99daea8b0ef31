"""Serve requests with several engines as one: least loaded first; the requests of an engine that dies are asked again.

They go to the other engines first, so that one that keeps dying does not use up their tries. Samples depend on a
request's own seed and not on the engine, so that a repeated request gives what the first would have given. The pool
knows no processes: those of Ray are in `klear_core.cluster`, endpoints and local engines in `members`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from klear_core.errors import ResourceError
from klear_core.generate.engine import SamplingParams
from klear_core.types import Completion

log = logging.getLogger(__name__)

MAX_TRIES = 3
"""Engines that may die of one request before it fails by name."""

CountLoss = Callable[[str, BaseException], None]
"""Counts the loss of a named engine with its error; raises once there were too many."""


class EngineLost(ResourceError):  # noqa: N818  # it is an event to recover from before it is an error
    """An engine died. Its requests can be asked again elsewhere."""


class PooledEngine(Protocol):
    """One engine of a pool."""

    name: str
    """Name for messages: `engine 3`."""

    @property
    def limit(self) -> int:
        """Return the number of requests to send it at a time; it may change."""
        ...

    async def start(self) -> None:
        """Start the engine, or another in place of one that died. Raise EngineLost if it dies meanwhile."""
        ...

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Sample; see `InferenceEngine.generate`. A ResourceError says that the engine can do nothing more."""
        ...

    async def close(self) -> None:
        """Stop the engine."""
        ...


class RestartLimit:
    """Counts lost engines within a window of time, and refuses to replace more than a number of them."""

    def __init__(self, allowed: int, *, window_s: float, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`key` is the setting that allows so many, for the message."""
        self._allowed, self._window_s, self._key, self._clock = allowed, window_s, key, clock
        self._losses: deque[float] = deque()

    def count(self, name: str, error: BaseException) -> None:
        """Count a loss. Raise ResourceError, with the last reason, if the window has too many."""
        now = self._clock()
        self._losses.append(now)
        while self._losses[0] < now - self._window_s:
            self._losses.popleft()
        if len(self._losses) > self._allowed:
            raise ResourceError(
                f"{len(self._losses)} engines were lost within {self._window_s / 60:g} minutes, and {self._key} = "
                f"{self._allowed} allows no more; the last was {name}: {error}"
            ) from error
        log.warning("%s was lost (%s); starting another", name, error)


@dataclass(eq=False, slots=True, kw_only=True)
class _Request:
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    answer: asyncio.Future[list[Completion]]
    asking: asyncio.Task[None] | None = None
    lost_on: list[_Slot] = field(default_factory=list)
    """Engines that died while they had this request; one that died twice is in it twice."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Slot:
    engine: PooledEngine
    running: dict[_Request, None] = field(default_factory=dict)
    """Requests that the engine has, in the order in which they were sent."""
    is_up: bool = False
    replacing: asyncio.Task[None] | None = None


class EnginePool:
    """Several engines as one `InferenceEngine`."""

    def __init__(self, engines: Sequence[PooledEngine], count_loss: CountLoss, *, max_tries: int = MAX_TRIES) -> None:
        assert engines, "a pool needs an engine"
        self._slots = [_Slot(engine=engine) for engine in engines]
        self._count_loss = count_loss
        self._max_tries = max_tries
        self._waiting: deque[_Request] = deque()
        self._suspects: deque[_Request] = deque()
        """Waiting requests that an engine had when it died: one of them may be why."""
        self._max_suspects: int | None = None
        """Suspects that one engine may have at a time; halved with each further death until one is alone."""
        self._failure: BaseException | None = None

    @property
    def limit(self) -> int:
        """Return the number of requests that all engines together serve at a time."""
        return sum(slot.engine.limit for slot in self._slots)

    async def start(self) -> None:
        """Start all engines. Those that die meanwhile are replaced; any other error is raised."""
        await asyncio.gather(*(self._start(slot) for slot in self._slots))

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Sample with the least busy engine; see `InferenceEngine.generate`.

        Raise ResourceError if several engines died of this request, or if too many died of anything.
        """
        if self._failure is not None:
            raise self._failure
        answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        request = _Request(prompt_ids=tuple(prompt_ids), params=params, answer=answer)
        self._waiting.append(request)
        self._dispatch()
        try:
            return await answer
        finally:
            if answer.cancelled():  # because the caller was
                self._withdraw(request)

    async def replace(self, engine: PooledEngine, error: BaseException, *, is_counted: bool = True) -> None:
        """Replace an engine that was found dead outside of `generate`, and wait until another is in its place."""
        (slot,) = (slot for slot in self._slots if slot.engine is engine)
        self._on_loss(slot, error, is_counted=is_counted)
        if slot.replacing is not None:
            await asyncio.shield(slot.replacing)
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Stop all engines; open requests fail with ResourceError."""
        self._fail(ResourceError("the engine pool was closed"))
        replacing = [slot.replacing for slot in self._slots if slot.replacing is not None]
        for task in replacing:
            task.cancel()
        await asyncio.gather(*replacing, return_exceptions=True)
        await asyncio.gather(*(slot.engine.close() for slot in self._slots))

    def status(self) -> str:
        """Return the number of open requests of each engine, in words."""
        parts = [f"{slot.engine.name} ({len(slot.running)} requests)" for slot in self._slots]
        num_waiting = len(self._waiting) + len(self._suspects)
        return ", ".join([*parts, f"{num_waiting} more wait"] if num_waiting else parts)

    def _dispatch(self) -> None:
        """Send waiting requests to engines with room. Suspects go first, or new requests would keep them waiting."""
        suspects, self._suspects = self._suspects, deque()
        for request in suspects:
            slot = _least_busy(self._slots_for_suspect(request))
            if slot is None:
                self._suspects.append(request)
            else:
                self._send(slot, request)
        while self._waiting:
            slot = _least_busy(self._slots)
            if slot is None:
                break
            self._send(slot, self._waiting.popleft())

    def _send(self, slot: _Slot, request: _Request) -> None:
        slot.running[request] = None
        request.asking = asyncio.create_task(self._ask(slot, request))

    def _slots_for_suspect(self, request: _Request) -> list[_Slot]:
        """Return the engines with room for a suspect: of those that did not die with it, if one runs; else of all."""
        allowed = [slot for slot in self._slots if slot not in request.lost_on]
        # Its last try waits for an engine that did not have it yet: the request may be innocent, and the others broken.
        waits = len(request.lost_on) == self._max_tries - 1 and bool(allowed)
        if not waits and not any(slot.is_up for slot in allowed):
            allowed = self._slots
        return [slot for slot in allowed if _load(slot) < 1 and not self._has_enough_suspects(slot)]

    def _has_enough_suspects(self, slot: _Slot) -> bool:
        if self._max_suspects is None:
            return False
        return sum(bool(request.lost_on) for request in slot.running) >= self._max_suspects

    async def _ask(self, slot: _Slot, request: _Request) -> None:
        try:
            completions = await slot.engine.generate(request.prompt_ids, request.params)
        except ResourceError as error:
            if request in slot.running:  # else the loss is known already, and the request asked again
                self._on_loss(slot, error)
            return
        except Exception as error:  # noqa: BLE001  # the caller of `generate` gets it
            slot.running.pop(request, None)
            if not request.answer.done():
                request.answer.set_exception(error)
        else:
            slot.running.pop(request, None)
            if not request.answer.done():
                request.answer.set_result(completions)
        self._forget_suspicion()
        self._dispatch()

    def _on_loss(self, slot: _Slot, error: BaseException, *, is_counted: bool = True) -> None:
        """Ask an engine's requests again elsewhere, and replace it."""
        if slot.replacing is not None or self._failure is not None:
            return
        requests = list(slot.running)
        slot.running.clear()
        slot.is_up = False
        for request in requests:
            if request.asking is not None and request.asking is not asyncio.current_task():
                request.asking.cancel()
        # If the engine is replaced because it did not get its weights, its requests are not the cause.
        self._ask_again(slot, requests, error) if is_counted else self._waiting.extendleft(reversed(requests))
        slot.replacing = asyncio.create_task(self._replace(slot, error, is_counted=is_counted))
        self._dispatch()

    def _ask_again(self, slot: _Slot, requests: Sequence[_Request], error: BaseException) -> None:
        """Put the requests of a dead engine back; fail the one that keeps crashing engines.

        Suspects are the requests that at least two engines had when they died. The one at fault is found by bisection:
        an engine gets fewer and fewer suspects at a time.
        """
        suspects = [request for request in requests if request.lost_on]
        for request in requests:
            request.lost_on.append(slot)
        if len(suspects) == 1 and len(suspects[0].lost_on) >= self._max_tries:
            (culprit,) = suspects
            culprit.answer.set_exception(_poison_error(culprit, slot.engine.name, error))
            requests = [request for request in requests if request is not culprit]
        elif suspects:
            self._max_suspects = max(1, len(suspects) // 2)
        self._suspects.extendleft(reversed(requests))

    def _forget_suspicion(self) -> None:
        """Lift the limit on suspects once none is left."""
        if self._max_suspects is None or self._suspects:
            return
        if not any(request.lost_on for slot in self._slots for request in slot.running):
            self._max_suspects = None

    async def _start(self, slot: _Slot) -> None:
        try:
            await slot.engine.start()
        except EngineLost as error:
            slot.replacing = asyncio.create_task(self._replace(slot, error, is_counted=True))
            await slot.replacing
            if self._failure is not None:
                raise self._failure from error
        slot.is_up = True
        self._dispatch()

    async def _replace(self, slot: _Slot, error: BaseException, *, is_counted: bool) -> None:
        """Start engines until one lives. Whatever else goes wrong fails all requests: nothing awaits this task."""
        try:
            while not slot.is_up:
                if is_counted:
                    self._count_loss(slot.engine.name, error)
                try:
                    await slot.engine.start()
                except EngineLost as another:
                    error, is_counted = another, True
                else:
                    slot.is_up = True
        except Exception as failure:  # noqa: BLE001  # every caller of `generate` gets it
            self._fail(failure)
        finally:
            slot.replacing = None
        self._dispatch()

    def _withdraw(self, request: _Request) -> None:
        """Drop a request whose caller no longer waits."""
        if request.asking is not None:
            request.asking.cancel()
        for slot in self._slots:
            slot.running.pop(request, None)
        for queue in (self._waiting, self._suspects):
            if request in queue:
                queue.remove(request)
        self._forget_suspicion()
        self._dispatch()

    def _fail(self, failure: BaseException) -> None:
        """Fail all open requests and all later ones."""
        self._failure = self._failure or failure
        running = [request for slot in self._slots for request in slot.running]
        for request in [*running, *self._waiting, *self._suspects]:
            if request.asking is not None:
                request.asking.cancel()
            if not request.answer.done():
                request.answer.set_exception(self._failure)
        self._waiting.clear()
        self._suspects.clear()
        for slot in self._slots:
            slot.running.clear()


def _least_busy(slots: Sequence[_Slot]) -> _Slot | None:
    """Return the engine with the smallest share of its limit in use, the first of equals; None if none has room."""
    best: _Slot | None = None
    best_load = 1.0
    for slot in slots:
        load = _load(slot)
        if load < best_load:
            best, best_load = slot, load
    return best


def _load(slot: _Slot) -> float:
    """Return the share of an engine's limit in use; infinite if it does not run."""
    return len(slot.running) / max(1, slot.engine.limit) if slot.is_up else math.inf


def _poison_error(request: _Request, name: str, error: BaseException) -> ResourceError:
    failure = ResourceError(
        f"the request with seed {request.params.seed} and a prompt of {len(request.prompt_ids)} tokens is given up: "
        f"{len(request.lost_on)} engines died while they had it; the last was {name}: {error}"
    )
    failure.__cause__ = error
    return failure
