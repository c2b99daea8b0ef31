"""How the number of concurrent requests follows an endpoint that sends whole replies, on a virtual clock."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable

from klear_core.generate.http_engine import AdaptiveSlots


class Clock:
    """Time that passes only while all wait for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._ids = itertools.count()

    async def sleep(self, seconds: float) -> None:
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._ids), wake))
        await wake

    async def run(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(5):
                await asyncio.sleep(0)
            if self._sleepers:
                self.now, _, wake = heapq.heappop(self._sleepers)
                wake.set_result(None)
        await task


def limits_seen(capacity: int, *, maximum: int = 256, refuses_above: int | None = None, num: int = 6000) -> list[int]:
    """Ask a server for answers of 100 tokens, 1 s each while at most `capacity` run, and slower in proportion above."""
    clock = Clock()
    slots = AdaptiveSlots(minimum=8, maximum=maximum, window_s=2, clock=lambda: clock.now)
    seen: list[int] = []
    running = 0

    async def ask() -> None:
        nonlocal running
        while True:
            async with slots.slot() as sent_at:
                is_refused = refuses_above is not None and running >= refuses_above
                if is_refused:
                    slots.refuse(sent_at=sent_at)
                else:
                    running += 1
                    assert running <= maximum
                    await clock.sleep(max(1.0, running / capacity))
                    running -= 1
            if not is_refused:
                break
            await clock.sleep(0.5)
        slots.count(100)
        seen.append(slots.limit)

    async def ask_all() -> None:
        await asyncio.gather(*(ask() for _ in range(num)))

    asyncio.run(clock.run(ask_all()))
    return seen


def test_the_limit_grows_to_what_the_server_can_do_at_a_time() -> None:
    seen = limits_seen(capacity=64)
    assert seen[0] == 8
    assert 48 <= seen[-200] <= 160


def test_the_limit_ends_at_its_maximum_if_the_server_can_do_more() -> None:
    seen = limits_seen(capacity=10_000, maximum=100)
    assert max(seen) == 100
    assert seen[-200] >= 80


def test_refusals_bring_the_limit_down_to_what_is_served() -> None:
    seen = limits_seen(capacity=10_000, refuses_above=40, num=4000)
    assert max(seen[1000:]) <= 64
    assert 20 <= seen[-200] <= 45


def test_few_requests_do_not_raise_the_limit() -> None:
    assert set(limits_seen(capacity=10_000, num=8)) == {8}


def test_a_cancelled_request_gives_its_slot_back() -> None:
    async def drive(cancel_at: Callable[[], Awaitable[None]]) -> None:
        slots = AdaptiveSlots(minimum=1, maximum=1, window_s=1)

        async def hold() -> None:
            async with slots.slot():
                await asyncio.Event().wait()

        first, second = (asyncio.create_task(hold()) for _ in range(2))
        await cancel_at()
        second.cancel()
        first.cancel()
        await asyncio.wait([first, second])
        async with asyncio.timeout(5), slots.slot():
            pass

    async def one_turn() -> None:
        await asyncio.sleep(0)

    async def never() -> None:
        pass

    for when in (one_turn, never):
        asyncio.run(drive(when))
