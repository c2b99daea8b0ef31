"""Limit how often and how fast lost engines are replaced."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from klear_core.errors import ResourceError

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 60.0

CountLoss = Callable[[str, BaseException], None]
"""Counts the loss of a named engine with its error; raises once there were too many."""


def pause_before_start(num_in_vain: int) -> float:
    """Return the seconds to wait before the next start of an engine, after so many that gave no answer."""
    # The exponent is bounded too, because 2.0 ** 1024 overflows.
    return min(2.0 ** min(num_in_vain - 1, 10), _LONGEST_PAUSE_S) if num_in_vain else 0.0


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
        while self._losses[0] < now - self._window_s:  # never empty: it holds this loss
            self._losses.popleft()
        if len(self._losses) > self._allowed:
            raise ResourceError(
                f"{len(self._losses)} engines were lost within {self._window_s / 60:g} minutes, and {self._key} = "
                f"{self._allowed} allows no more; the last was {name}: {error}"
            ) from error
        log.warning("%s was lost (%s); starting another", name, error)
