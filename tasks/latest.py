"""Deliver the newest value of a stream from a background thread, so that the producer never waits."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class Latest(Generic[T]):
    """A slot for one value: `put` replaces an undelivered value, and a daemon thread delivers the newest one."""

    def __init__(self, deliver: Callable[[T], None], *, every_s: float) -> None:
        """Deliver at most every `every_s`, in the caller's context; log an error and retry with the newest value."""
        self._deliver, self._every_s = deliver, every_s
        self._waiting: list[T] = []  # one value at most; not `T | None`, because None may be a value
        self._is_closed = False
        self._changed = threading.Condition()
        context = contextvars.copy_context()  # Prefect's settings are context variables
        self._thread = threading.Thread(target=context.run, args=(self._work,), name="latest", daemon=True)
        self._thread.start()

    def put(self, value: T) -> None:
        """Set the value to deliver, replacing an older one that still waits."""
        with self._changed:
            self._waiting = [value]
            self._changed.notify()

    def close(self, *, wait_s: float) -> None:
        """Deliver the waiting value; return when done, or after `wait_s` (the thread is a daemon)."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(wait_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                value = self._waiting.pop()
            self._try(value)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, timeout=self._every_s)

    def _try(self, value: T) -> None:
        try:
            self._deliver(value)
        except Exception as e:  # noqa: BLE001  failing to show the work must not stop the work
            log.debug("not delivered: %s: %s", type(e).__name__, e)
            with self._changed:
                if not self._waiting and not self._is_closed:
                    self._waiting = [value]
