"""Serve requests with several engines as one: least loaded first; the requests of an engine that dies are asked again.

They go to the other engines first, so that one that keeps dying does not use up their tries. Samples depend on a
request's own seed and not on the engine, so that a repeated request gives what the first would have given. Engines that
wait for GPUs join when they are up, and those that the last requests leave idle are closed. The pool knows no
processes: those of Ray are in `klear_core.cluster`, endpoints and local engines in `factory.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from klear_core.errors import ResourceError
from klear_core.generate.engine import (
    EngineStats,
    InferenceEngine,
    Pace,
    PooledEngine,
    SamplingParams,
    combined,
    engine_stats,
)
from klear_core.types import Completion
from klear_core.waits import now, span

log = logging.getLogger(__name__)

MAX_TRIES = 3
"""Engines that may die while they run one request before it fails with an error of its own."""


class EnginePool:
    """Several engines as one `InferenceEngine`."""

    def __init__(
        self,
        engines: Sequence[PooledEngine],
        count_loss: CountLoss,
        *,
        max_tries: int = MAX_TRIES,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`sleep` waits before an engine that gave no answer is started again."""
        assert engines, "a pool needs an engine"
        self._slots = [Slot(engine=engine, pace=Pace()) for engine in engines]
        self._count_loss = count_loss
        self._max_tries = max_tries
        self._sleep = sleep
        self._num_to_come: int | None = None
        """Requests that have yet to come; None if nobody knows, which keeps all engines."""
        self._waiting: deque[Request] = deque()
        self._suspects: deque[Request] = deque()
        """Waiting requests that an engine had when it died: one of them may be the cause."""
        self._max_suspects: int | None = None
        """Suspects that one engine may have at a time; halved with each further death until one is alone."""
        self._failure: BaseException | None = None
        self._shares_until = 0.0  # time at which slow engines are looked for again

        self.cache_tokens = None

    @property
    def limit(self) -> int:
        """Return the number of requests that all engines together serve at a time."""
        return sum(slot.engine.limit for slot in self._slots)

    async def start(self, *, num_up: int | None = None) -> None:
        """Start all engines, and wait until so many are up; None: all. The others join later.

        Those that die meanwhile are replaced; any other error is raised.
        """
        starting = {self._begin_start(slot) for slot in self._slots}
        most_left = 0 if num_up is None else len(starting) - num_up
        while len(starting) > most_left and self._failure is None:
            _, starting = await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
        if self._failure is not None:
            raise self._failure

    def expect(self, num_requests: int) -> None:
        """Announce so many more requests, or fewer if negative. Idle engines close after the last, until more come."""
        self._num_to_come = max(0, (self._num_to_come or 0) + num_requests)
        self._dispatch()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Sample with the least busy engine; see `InferenceEngine.generate`.

        Raise ResourceError if several engines died while they ran this request, or if too many were lost in all.
        """
        if self._failure is not None:
            raise self._failure
        answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        request = Request(prompt_ids=tuple(prompt_ids), params=params, answer=answer)
        self._waiting.append(request)
        if self._num_to_come:
            self._num_to_come -= 1
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
        if slot.starting is not None:
            await asyncio.shield(slot.starting)  # the start serves all requests, not this caller alone
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Stop all engines; open requests fail with ResourceError."""
        self._fail(ResourceError("the engine pool was closed"))
        for slot in self._slots:
            if slot.closing is None or not slot.is_away:  # else it is closed, or closing, already
                slot.begin_close()
        await asyncio.gather(*(slot.closing for slot in self._slots if slot.closing is not None))

    async def stats(self) -> EngineStats | None:
        """Return the load of all engines that report theirs; see `MeasuredEngine`."""
        closing = [slot.closing for slot in self._slots if slot.closing is not None]
        if closing and self._num_to_come == 0:  # as idle: each reports its load first; a cancelled `wait` ends none
            await asyncio.wait(closing)
        loads = list(await asyncio.gather(*(engine_stats(slot.engine) for slot in self._slots)))
        for slot in self._slots:
            loads += slot.loads_at_close
            slot.loads_at_close.clear()
        found = combined(loads)
        rates = tuple(slot.pace.rate(now()) for slot in self._slots if slot.pace.since is not None)
        return None if found is None else replace(found, tokens_per_s=rates)

    def status(self) -> str:
        """Return the number of open requests of each engine, in words."""
        parts = [f"{slot.engine.name} ({len(slot.running)} requests)" for slot in self._slots]
        num_waiting = len(self._waiting) + len(self._suspects)
        return ", ".join([*parts, f"{num_waiting} more wait"] if num_waiting else parts)

    def _dispatch(self) -> None:
        """Send waiting requests to engines with room. Suspects go first, or new requests would keep them waiting."""
        suspects, self._suspects = self._suspects, deque()
        for request in suspects:
            slot = least_busy(self._slots_for_suspect(request))
            if slot is None:
                self._suspects.append(request)
            else:
                self._send(slot, request)
        most = self._most_each()
        while self._waiting:
            slot = least_busy(self._slots)
            if slot is None or len(slot.running) >= most:
                break
            self._send(slot, self._waiting.popleft())
        self._close_idle()

    def _move_newest(self, slow: Slot) -> None:
        """Ask all but the oldest requests of an engine that has become slow again, where others have room and no queue.

        The newest lose the least. The oldest would begin anew while a step of RL waits for them.
        """
        others = [slot for slot in self._slots if not slot.is_named_slow]
        for request in list(slow.running)[math.ceil(slow.engine.limit * _KEPT) :]:
            other = least_busy(others)
            if other is None or self._waiting or request.asking is None:
                return
            if request.is_moved or request.lost_on:  # once is enough, and a suspect stays where it is
                continue
            request.is_moved = True
            del slow.running[request]
            request.asking.cancel()
            self._send(other, request)

    def _most_each(self) -> float:
        """Return the most requests for one engine: while others load, its share of all that are left.

        If they are few, the first engine that is up would take them all.
        """
        num_coming = sum(slot.comes_soon for slot in self._slots)
        if self._num_to_come is None or num_coming == sum(slot.is_up for slot in self._slots):
            return math.inf
        num_sent = sum(len(slot.running) for slot in self._slots)
        num_left = self._num_to_come + len(self._waiting) + len(self._suspects) + num_sent
        return math.ceil(num_left / num_coming)

    def _close_idle(self) -> None:
        """Close engines that the last requests leave idle; start one again if all are closed and a request waits."""
        if self._num_to_come != 0 or self._failure is not None:
            return
        if self._waiting or self._suspects:
            if all(slot.is_away for slot in self._slots):
                self._begin_start(self._slots[0])
            return
        for slot in self._slots:
            if not slot.running and not slot.is_away:
                slot.begin_close(keeps_load=slot.is_up)

    def _send(self, slot: Slot, request: Request) -> None:
        if not slot.running:
            slot.busy_since = time.monotonic()
        slot.pace.begin(now())
        slot.running[request] = None
        request.asking = asyncio.create_task(self._ask(slot, request))

    def _slots_for_suspect(self, request: Request) -> list[Slot]:
        """Return the engines with room for a suspect: of those that did not die with it, if one runs; else of all."""
        allowed = [slot for slot in self._slots if slot not in request.lost_on and slot.comes_soon]
        # Its last try waits for an engine that did not have it yet: the request may be innocent, and the others broken.
        waits = len(request.lost_on) == self._max_tries - 1 and bool(allowed)
        if not waits and not any(slot.is_up for slot in allowed):
            allowed = self._slots
        return [slot for slot in allowed if slot.load < 1 and not self._has_enough_suspects(slot)]

    def _has_enough_suspects(self, slot: Slot) -> bool:
        if self._max_suspects is None:
            return False
        return sum(bool(request.lost_on) for request in slot.running) >= self._max_suspects

    async def _ask(self, slot: Slot, request: Request) -> None:
        sent_at = now()
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
            if not slot.running:
                span(slot.engine.name, "sample", slot.busy_since, time.monotonic())
            slot.pace.add(now() - sent_at, max((len(c.token_ids) for c in completions), default=0))
            if now() >= self._shares_until:  # not with each answer: hundreds of engines give a hundred a second
                self._shares_until = now() + _SHARES_S
                for slow in share_by_pace(self._slots):
                    self._move_newest(slow)
            if not request.answer.done():
                request.answer.set_result(completions)
        slot.num_in_vain = 0  # even a refusal shows that the engine works
        self._forget_suspicion()
        self._dispatch()

    def _on_loss(self, slot: Slot, error: BaseException, *, is_counted: bool = True) -> None:
        """Ask an engine's requests again elsewhere, and replace it."""
        if not slot.is_up or self._failure is not None:  # each request reports the loss: the first one counts
            return
        requests = list(slot.running)
        slot.running.clear()
        slot.is_up = False
        for request in requests:
            # All but the one whose task has found the loss, and runs this.
            if request.asking is not None and request.asking is not asyncio.current_task():
                request.asking.cancel()
        # If the engine is replaced because it did not get its weights, its requests are not the cause.
        self._ask_again(slot, requests, error) if is_counted else self._waiting.extendleft(reversed(requests))
        if is_counted and not self._is_loss_allowed(slot, error):
            return
        self._begin_start(slot)
        self._dispatch()

    def _ask_again(self, slot: Slot, requests: Sequence[Request], error: BaseException) -> None:
        """Put the requests of a dead engine back; fail the one that keeps crashing engines.

        Suspects are the requests that at least two engines had when they died. The one at fault is found by bisection:
        an engine gets fewer and fewer suspects at a time.
        """
        suspects = [request for request in requests if request.lost_on]
        for request in requests:
            request.lost_on.append(slot)
        if len(suspects) == 1 and len(suspects[0].lost_on) >= self._max_tries:
            (culprit,) = suspects  # the only one here that other engines died with
            culprit.answer.set_exception(poison_error(culprit, slot.engine.name, error))
            requests = [request for request in requests if request is not culprit]
        elif suspects:
            self._max_suspects = max(1, len(suspects) // 2)
        self._suspects.extendleft(reversed(requests))  # at the front, in the order in which they were sent

    def _forget_suspicion(self) -> None:
        """Lift the limit on suspects once none is left."""
        if self._max_suspects is None or self._suspects:
            return
        if not any(request.lost_on for slot in self._slots for request in slot.running):
            self._max_suspects = None

    def _begin_start(self, slot: Slot) -> asyncio.Task[None]:
        slot.starting = asyncio.create_task(self._start(slot, slot.closing))
        return slot.starting

    async def _start(self, slot: Slot, closing: asyncio.Task[None] | None) -> None:
        """Start engines until one lives. Whatever else goes wrong fails all requests: nothing awaits this task."""
        try:
            if closing is not None:
                await asyncio.shield(closing)  # a close is never cut short, even if this start is cancelled
            while not slot.is_up and self._failure is None:
                if slot.num_in_vain:
                    await self._sleep(pause_before_start(slot.num_in_vain))
                slot.num_in_vain += 1  # until an answer comes
                try:
                    await slot.engine.start()
                except EngineLost as error:
                    self._is_loss_allowed(slot, error)
                else:
                    slot.is_up = True
        except Exception as failure:  # noqa: BLE001  # every caller of `generate` gets it
            self._fail(failure)
        finally:
            if slot.starting is asyncio.current_task():  # else this start was cancelled, and another may run
                slot.starting = None
        self._dispatch()

    def _is_loss_allowed(self, slot: Slot, error: BaseException) -> bool:
        """Count the loss of an engine; fail all requests if it was one too many."""
        try:
            self._count_loss(slot.engine.name, error)
        except Exception as failure:  # noqa: BLE001  # as above
            self._fail(failure)
        return self._failure is None

    def _withdraw(self, request: Request) -> None:
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


def expect(engine: InferenceEngine, num_requests: int) -> None:
    """Tell a pool how many more requests will come; see `EnginePool.expect`. A single engine need not know."""
    if isinstance(engine, EnginePool):
        engine.expect(num_requests)


class EngineLost(ResourceError):  # noqa: N818  # it is an event to recover from before it is an error
    """An engine died. Its requests can be asked again elsewhere."""


_SHARES_S = 1.0  # between two looks for slow engines
_TOLD_BELOW = 0.5  # share of its requests below which an engine is named
_KEPT = 0.2  # of its limit, the requests that it keeps then: about what an engine of a third of the speed ends with
_SLOWER = 1.2  # times the seconds a token of the median engine, from which on an engine counts as slower


def share_by_pace(slots: Sequence[Slot]) -> list[Slot]:
    """Send slow engines fewer requests, and return those newly found: an answer there holds up all that wait for it.

    The third power lets the pace settle near that of the others, though an engine with fewer requests is faster: with
    most of a step's time in its cache, an engine of a third of the speed gets about a fifth of the requests.
    """
    known = [slot for slot in slots if slot.is_up and slot.pace.is_known]
    if len(known) < 3:  # of two nobody can tell which is the odd one
        return []
    found: list[Slot] = []
    usual = statistics.median(slot.pace.seconds_per_token for slot in known)
    for slot in known:
        slot.share = min(1.0, (_SLOWER * usual / max(1e-9, slot.pace.seconds_per_token)) ** 3)
        if slot.share == 1.0:
            slot.is_named_slow = False
        elif slot.share < _TOLD_BELOW and not slot.is_named_slow:  # once: its share goes up and down meanwhile
            slot.is_named_slow = True
            found.append(slot)
            log.warning(
                "%s is slow: %.1f times as long a token as the median of %d engines; it gets fewer requests until it "
                "is not. Look at the clocks, temperature and other processes of its node",
                slot.engine.name, slot.pace.seconds_per_token / max(1e-9, usual), len(known),
            )  # fmt: skip
    return found


# eq=False: requests and slots are compared and hashed by identity; equal requests may be open at once.
@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """A request to a pool."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    answer: asyncio.Future[list[Completion]]
    asking: asyncio.Task[None] | None = None
    lost_on: list[Slot] = field(default_factory=list)
    """Engines that died while they had this request; one that died twice is in it twice."""
    is_moved: bool = False
    """Whether a slow engine had it before."""


@dataclass(eq=False, slots=True, kw_only=True)
class Slot:
    """The place of an engine in a pool."""

    engine: PooledEngine
    running: dict[Request, None] = field(default_factory=dict)
    """Requests that the engine has, in the order in which they were sent."""
    is_up: bool = False
    starting: asyncio.Task[None] | None = None
    closing: asyncio.Task[None] | None = None
    """The last task that closed the engine; another start waits for it."""
    num_in_vain: int = 0
    """Starts since the last answer."""
    pace: Pace
    loads_at_close: list[EngineStats | None] = field(default_factory=list)
    """Load of its engines when they were closed as idle, until the pool reports it."""
    busy_since: float = 0.0
    """Time of the monotonic clock at which it got its first request after none."""
    share: float = 1.0
    """Part of its limit that the engine is sent, below 1 if it is slower than the others."""
    is_named_slow: bool = False

    @property
    def is_away(self) -> bool:
        """Return whether the engine neither runs nor starts."""
        return not self.is_up and self.starting is None

    @property
    def comes_soon(self) -> bool:
        """Return whether the engine is up or will be, without a wait for GPUs of others."""
        return self.is_up or (self.starting is not None and not self.engine.is_queued)

    @property
    def load(self) -> float:
        """Return the share of the engine's limit in use; infinite if it does not run."""
        # Above 1 if the limit, which may change, has fallen below the requests that it has.
        return len(self.running) / max(1.0, self.engine.limit * self.share) if self.is_up else math.inf

    def begin_close(self, *, keeps_load: bool = False) -> None:
        """Close the engine, or end its start; `keeps_load` asks it for its load before."""
        # `_close` waits for both, because a start and a close of one engine must not overlap.
        before = [task for task in (self.starting, self.closing) if task is not None]
        if self.starting is not None:
            self.starting.cancel()
        self.starting, self.is_up = None, False
        self.closing = asyncio.create_task(self._close(before, keeps_load=keeps_load))

    async def _close(self, before: Sequence[asyncio.Task[None]], *, keeps_load: bool) -> None:
        await asyncio.gather(*before, return_exceptions=True)  # a start that was cancelled raises
        try:
            if keeps_load:
                self.loads_at_close.append(await engine_stats(self.engine))
        finally:
            await self.engine.close()


def least_busy(slots: Sequence[Slot]) -> Slot | None:
    """Return the engine with the smallest share of its limit in use, the first of equals; None if none has room."""
    best: Slot | None = None
    best_load = 1.0  # at this load an engine is full
    for slot in slots:
        load = slot.load
        if load < best_load:
            best, best_load = slot, load
    return best


def poison_error(request: Request, name: str, error: BaseException) -> ResourceError:
    """Return the error of a request whose engines keep dying."""
    failure = ResourceError(
        f"the request with seed {request.params.seed} and a prompt of {len(request.prompt_ids)} tokens is given up: "
        f"{len(request.lost_on)} engines died while they had it; the last was {name}: {error}"
    )
    failure.__cause__ = error
    return failure


# ---- restarts ----
# Limit how fast lost engines are replaced.

_LONGEST_PAUSE_S = 60.0

CountLoss = Callable[[str, BaseException], None]
"""Counts the loss of a named engine with its error; raises once there were too many."""


def pause_before_start(num_in_vain: int) -> float:
    """Return the seconds to wait before the next start of an engine, after so many that gave no answer."""
    return min(2.0 ** min(num_in_vain - 1, 10), _LONGEST_PAUSE_S) if num_in_vain else 0.0
