"""Find the number of concurrent requests at which an endpoint gives the most tokens per second."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_MIN_GAIN = 0.1
"""Gain in throughput that a changed limit must bring to be kept, as a share of the relative change."""
_STEP = 1 / 8
"""Growth of the limit when probing, once doubling has ended."""
_CUT = 0.7
"""Factor on the limit after a refusal, unless the endpoint demonstrably serves more."""
_FIRST_HOLD, _LONGEST_HOLD = 2, 32
"""Windows between two probes: twice as many after every probe that failed."""


class ConcurrencyLimit:
    """Grows the limit window by window while throughput grows with it, and cuts it when the server refuses.

    It doubles until the first refusal or the first window without a gain. Afterwards it tries an eighth more and an
    eighth less in turn, and keeps what gives more tokens per second. After a refusal the limit is the number of
    requests that the server was serving, which it has just shown that it can serve.
    """

    def __init__(self, *, minimum: int, maximum: int, window_s: float, now: float) -> None:
        self.value = minimum
        self._minimum, self._maximum, self._window_s = minimum, maximum, window_s
        self._is_doubling = True
        self._direction = 1
        """1 if the next probe is a higher limit, -1 if it is a lower one."""
        self._best: tuple[int, float] | None = None
        """Limit and tokens per second of the last window that is to be beaten."""
        self._is_new = False
        """Whether the limit was just changed: the first window after that counts a burst of first tokens."""
        self._hold, self._next_hold = 0, _FIRST_HOLD
        self._cut_at = float("-inf")
        self._start_window(now)

    def restart(self, now: float) -> None:
        """Begin again at the minimum: the server was away, and comes back with nothing to do."""
        self.value, self._is_doubling, self._direction, self._best = self._minimum, True, 1, None
        self._cut_at = now  # refusals of requests sent before say nothing about the server that is back
        self._start_window(now)

    def count_tokens(self, num_tokens: int) -> None:
        """Count tokens that arrived."""
        self._num_tokens += num_tokens

    def is_window_over(self, now: float) -> bool:
        """Return whether the current window has lasted long enough for `end_window`."""
        return now - self._started >= self._window_s

    def refuse(self, *, num_served: int, sent_at: float, now: float) -> None:
        """Cut the limit after a refusal, while the server serves `num_served` other requests.

        Requests sent before the last cut say nothing about the present limit.
        """
        if sent_at <= self._cut_at:
            return
        self._cut_at = now
        lower = max(num_served, int(self.value * _CUT))
        self._set(min(lower, self.value - 1))  # at least one less, whatever it serves
        self._give_up_probe()
        self._start_window(now)

    def end_window(self, now: float, *, is_full: bool, is_settled: bool) -> None:
        """Choose the limit of the next window.

        `is_full` says that requests waited for the limit, `is_settled` that nearly all have their first token. Windows
        of which either is false measure something else, and are not compared.
        """
        rate = self._num_tokens / (now - self._started)
        self._start_window(now)
        # Too few requests to reach the limit: this rate measures the demand, and the one to beat is of another demand.
        if not is_full:
            self._best = None
            return
        if not is_settled:
            return
        if self._is_new:
            self._is_new = False
            return
        if self._hold > 0:
            self._hold -= 1
            return
        if self._best is not None and self.value != self._best[0]:
            best_value, best_rate = self._best
            change = abs(self.value / best_value - 1)
            # The same bar for a lower limit: it is kept only if it gives more, not if it gives as much.
            if rate < best_rate * (1 + _MIN_GAIN * change):
                self._set(best_value)
                self._direction = -self._direction
                self._give_up_probe()
                return
            self._next_hold = _FIRST_HOLD  # a probe that succeeded: the next failure is followed by a short pause again
        self._best = (self.value, rate)
        step = self.value if self._is_doubling else max(1, round(self.value * _STEP))
        self._set(self.value + self._direction * step)
        if self.value == self._best[0]:
            # At a bound. The next probe is an eighth less, not the double step, which would fall to the minimum.
            self._direction, self._is_doubling = -self._direction, False

    def _give_up_probe(self) -> None:
        self._is_doubling, self._best = False, None
        self._hold = self._next_hold
        self._next_hold = min(2 * self._next_hold, _LONGEST_HOLD)

    def _set(self, value: int) -> None:
        before = self.value
        self.value = max(self._minimum, min(value, self._maximum))
        self._is_new = self.value != before

    def _start_window(self, now: float) -> None:
        self._started, self._num_tokens = now, 0


class AdaptiveSlots:
    """Slots for requests to one endpoint whose replies are not streamed; their number follows its throughput."""

    def __init__(
        self, *, minimum: int, maximum: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        # The user's maximum may be below the usual first limit.
        self._limit = ConcurrencyLimit(minimum=min(minimum, maximum), maximum=maximum, window_s=window_s, now=clock())
        self._num_open = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._replies_in_window = 0
        self._is_full = False
        """Whether all slots were taken when the last one was given back."""

    @property
    def limit(self) -> int:
        """Return the present number of slots."""
        return self._limit.value

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[float]:
        """Wait for a slot, first come, first served, and hold it during the block; yield the time it was taken."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was this request's turn when its caller was cancelled
                self._num_open -= 1
            self._admit()
            raise
        try:
            yield self._clock()
        finally:
            self._is_full = self._num_open >= self._limit.value
            self._num_open -= 1
            self._admit()

    def count(self, num_tokens: int) -> None:
        """Count a whole reply, and adapt the limit once a window is over that had a round of them."""
        self._limit.count_tokens(num_tokens)
        self._replies_in_window += 1
        now = self._clock()
        if self._limit.is_window_over(now) and self._replies_in_window >= self._limit.value:
            self._replies_in_window = 0
            # Above a limit that was lowered, the window measures the old one.
            is_within = self._num_open <= self._limit.value
            self._limit.end_window(now, is_full=self._is_full or bool(self._waiting), is_settled=is_within)
            self._admit()

    def refuse(self, *, sent_at: float) -> None:
        """Lower the limit: the endpoint has refused a request that took its slot at this time."""
        # Without a stream it is unknown how many of the open requests it has begun to serve.
        self._limit.refuse(num_served=0, sent_at=sent_at, now=self._clock())
        self._replies_in_window = 0

    def _admit(self) -> None:
        while self._waiting and self._num_open < self._limit.value:
            turn = self._waiting.popleft()
            if not turn.cancelled():  # else its caller was cancelled while it waited
                self._num_open += 1
                turn.set_result(None)
