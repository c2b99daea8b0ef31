"""Track the open requests of an engine that runs on an event loop; fail them when it closes or falls silent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from klear_core.errors import ResourceError

T = TypeVar("T")

SILENCE_S = 600.0
"""Longest wait for the answer to a ping, as for an engine's actor in Ray. A working engine answers between two of its
steps, and the longest of them, a load of new weights, is given up after 300 s."""
_PAUSE = 0.1
"""Pause before each ping as a share of that wait: a minute, so that short requests cause no pings."""


class OpenRequests:
    """The open requests of an engine; `close` cancels them and refuses new ones."""

    def __init__(
        self,
        engine_name: str,
        *,
        ping: Callable[[], Awaitable[object]] | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`ping` returns once the engine's process answers; an engine without a process of its own needs none.

        If an answer takes longer than `silence_s`, open and later requests fail with ResourceError.
        """
        self._engine_name = engine_name
        self._ping, self._silence_s = ping, silence_s
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watch: asyncio.Task[None] | None = None
        """Runs only while requests are open. Between them the event loop may stand still, as in a chat while its user
        thinks, and a ping would then look unanswered."""
        self._end = ""
        """What ended the engine, in words; empty while it serves."""

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raise ResourceError if the engine is closed or falls silent before that."""
        if self._end:
            work.close()  # or Python warns that the coroutine was never awaited
            raise ResourceError(f"the {self._engine_name} {self._end}")
        task = asyncio.create_task(work)
        self._tasks.add(task)
        if self._ping is not None and self._watch is None:
            self._watch = asyncio.create_task(self._watch_pings(self._ping))
        try:
            return await task
        except asyncio.CancelledError:
            # a cancelled caller and an ended engine both arrive here; only the second is a ResourceError
            if self._end and task.cancelled():
                raise ResourceError(f"the {self._engine_name} {self._end}") from None
            raise
        finally:
            self._tasks.discard(task)
            if self._watch is not None and not self._tasks:
                self._watch.cancel()
                self._watch = None

    def close(self) -> None:
        """Fail all open requests and all later ones."""
        self._fail("was closed")

    async def _watch_pings(self, ping: Callable[[], Awaitable[object]]) -> None:
        try:
            while True:
                await asyncio.sleep(_PAUSE * self._silence_s)
                await asyncio.wait_for(ping(), self._silence_s)
        except TimeoutError:
            self._fail(f"gave no sign of life for {self._silence_s:g} s")

    def _fail(self, end: str) -> None:
        self._end = self._end or end
        for task in self._tasks:
            task.cancel()
