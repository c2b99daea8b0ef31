"""Set up a command's process: Ctrl-C and SIGTERM end it with KeyboardInterrupt, and proxies leave loopback alone."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_AGAIN_AFTER_S = 0.05
"""Seconds before an interrupt that was lost is sent again."""


@contextmanager
def reliable_interrupts() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt while the block runs, and lose none; see `lost_interrupts_sent_again`."""
    signal.signal(signal.SIGTERM, _interrupt)
    with lost_interrupts_sent_again():
        yield


@contextmanager
def lost_interrupts_sent_again() -> Iterator[None]:
    """While the block runs, send SIGTERM again a moment after an interrupt that Python would discard.

    Python only reports an exception raised in `__del__` or in a weak reference's callback, so the run would continue.
    """
    before = sys.unraisablehook

    def send_again(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            # Later, when the code that discards exceptions has returned. To the main thread: the signal also has to end
            # a system call that it blocks in.
            timer = threading.Timer(
                _AGAIN_AFTER_S, signal.pthread_kill, (threading.main_thread().ident, signal.SIGTERM)
            )
            timer.daemon = True  # a process that ends meanwhile does not wait for it
            timer.start()
        else:
            before(lost)

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = before


def _interrupt(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


def make_terminations_interrupts() -> None:
    """Make the exception that Prefect raises for SIGTERM in a flow a KeyboardInterrupt, for the whole process.

    A KeyboardInterrupt ends an event loop wherever in it the signal arrives. asyncio only logs any other exception of a
    callback, and keeps that of a task for whoever awaits it, so a cancelled run would continue.
    """
    from prefect.exceptions import ExternalSignal, TerminationSignal

    TerminationSignal.__bases__ = (ExternalSignal, KeyboardInterrupt)


def exit_at_once_when_interrupted() -> None:
    """Let Ctrl-C and SIGTERM end the process at once from now on: its work is done, and only exit handlers are left.

    A KeyboardInterrupt in an exit handler would print a traceback, and the other handlers would still run. Processes
    that the handlers would stop exit by themselves: our Prefect server checks whether its caller is alive.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit_at_once)


def _exit_at_once(signum: int, _frame: object) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe or file must not keep the process from exiting
            stream.flush()
    os._exit(128 + signum)


# ---- proxies ----


def bypass_proxies_for_loopback() -> None:
    """Add loopback addresses to NO_PROXY: a proxy would look for these servers on its own machine."""
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = dict.fromkeys([*filter(None, listed.split(",")), "127.0.0.1", "localhost"])
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)  # programs read one or the other
