"""What engines that live on the event loop share: requests under way that a close turns into errors."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from klear_core.errors import ResourceError

T = TypeVar("T")


class OpenRequests:
    """Every request of an engine, so that `close` can fail those that still wait."""

    def __init__(self, engine_name: str) -> None:
        self._engine_name = engine_name
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; ResourceError if the engine is closed before it is there."""
        if self._is_closed:
            work.close()
            raise ResourceError(f"the {self._engine_name} was closed")
        task = asyncio.create_task(work)
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._is_closed and task.cancelled():
                raise ResourceError(f"the {self._engine_name} was closed before it answered") from None
            raise
        finally:
            self._tasks.discard(task)

    def close(self) -> None:
        """Fail all that wait, and all that come."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
