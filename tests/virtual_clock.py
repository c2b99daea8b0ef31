"""An event loop whose time jumps to its next timer: hours of waiting take no time, and always the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Adds to the virtual time what the loop asks it to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None:
            self.now += max(0.0, timeout)
            return super().select(0)
        return super().select(None)  # no timer: only another thread can wake the loop


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """For code that waits by `asyncio.sleep` and timeouts, and reads the time from its loop."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._jump.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
