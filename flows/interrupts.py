"""Ctrl-C and SIGTERM: both end a command as KeyboardInterrupt, wherever in the code they find it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_AGAIN_AFTER_S = 0.05


@contextmanager
def heeded_interrupts() -> Iterator[None]:
    """In here SIGTERM is as Ctrl-C, and neither is lost to a finaliser.

    What is raised in `__del__` or in a callback of a weak reference Python reports and forgets, and a run would go on to its end. Such an
    interrupt is asked for again a moment later.
    """
    before = sys.unraisablehook

    def ask_again(lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is KeyboardInterrupt:
            asking = threading.Timer(_AGAIN_AFTER_S, signal.pthread_kill, (threading.main_thread().ident, signal.SIGTERM))
            asking.daemon = True
            asking.start()
        else:
            before(lost)

    signal.signal(signal.SIGTERM, _interrupt)
    sys.unraisablehook = ask_again
    try:
        yield
    finally:
        sys.unraisablehook = before


def _interrupt(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt
