"""End a run by a signal: at once, or, while a model trains, after the step that runs, with a checkpoint.

SIGTERM ends a run, and SIGUSR1 asks it to be started again: the command then ends with status 75. A run that reaches a
limit of its own ends itself. Child processes can be made to end with their parent.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

REQUEUE_STATUS = 75
"""Exit status of a run that SIGUSR1 has ended; EX_TEMPFAIL of sysexits.h: try again."""
LIMIT_STATUS = 3
"""Exit status of a run that its deadline or `idle_kill` has ended; it is not to be started again."""
_GRACE_S = 20.0
"""Longest time from SIGTERM to the end. Ours: containers and schedulers often kill 30 s after it."""
_NUMBERS = (signal.SIGTERM, signal.SIGUSR1)

Handler = Callable[[int, FrameType | None], object]

_is_asked = False
_at_once: tuple[signal.Signals, ...] = ()


class Requeued(KeyboardInterrupt):
    """SIGUSR1 has ended the run, which is to be started again."""


class LimitReached(KeyboardInterrupt):
    """A limit of the run has ended it: its deadline, or `idle_kill`. The message says which."""


class StoppedEarly(Exception):  # noqa: N818  # no error: `checkpoint_first` ends the run as the signal would have
    """Training has stopped, or has lost its workers, after it was asked to stop."""


def ask() -> None:
    """Ask the training loop of this process to stop after its step."""
    global _is_asked  # noqa: PLW0603  # a process runs one stage
    _is_asked = True


def is_asked() -> bool:
    """Return whether the training loop of this process is to save a checkpoint and stop."""
    return _is_asked


@contextmanager
def requeued_by_signal() -> Iterator[None]:
    """Raise Requeued at SIGUSR1 while the block runs; in the main thread, which alone can set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGUSR1, _requeue)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _requeue(_number: int, _frame: FrameType | None) -> None:
    raise Requeued


@contextmanager
def at_once(*numbers: signal.Signals) -> Iterator[None]:
    """Let these signals end also training at once while the block runs, without a checkpoint."""
    global _at_once  # noqa: PLW0603  # as above
    before, _at_once = _at_once, numbers
    try:
        yield
    finally:
        _at_once = before


@contextmanager
def sigterm_handler_kept() -> Iterator[None]:
    """Restore the SIGTERM handler after the block: `ray.init` installs one that exits, `ray.shutdown` the system's.

    Prefect's and ours must stay, because they end a run in order. Only the main thread can set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler: Handler | int | None = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def signal_mask(how: int, *numbers: signal.Signals) -> Iterator[None]:
    """Block or unblock signals in this thread and in what it starts in the block; `how` as `pthread_sigmask` has it."""
    before = signal.pthread_sigmask(how, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_kept_from_ray() -> Iterator[None]:
    """Start Ray in the block: its processes then get neither SIGTERM nor SIGUSR1, and our handler of SIGTERM stays.

    Schedulers send both to all processes of a job. The run answers them, and saves a checkpoint with Ray's processes.
    If the raylet has gone, Ray ends the driver with status 1 and not a word, or waits for a minute.
    """
    with sigterm_handler_kept(), signal_mask(signal.SIG_BLOCK, *_NUMBERS):
        yield


@contextmanager
def signals_held() -> Iterator[None]:
    """Let a first signal take effect only after the block, which is short and must not end halfway; a second at once.

    Only the main thread runs handlers of signals; in another one nothing has to be held.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    numbers = (signal.SIGINT, *_NUMBERS)
    handlers = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            handlers[signal.Signals(number)](number, frame)
        held.append(number)

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


@contextmanager
def checkpoint_first(grace_s: float = _GRACE_S) -> Iterator[None]:
    """Let the training loop of the block save a checkpoint before a signal ends the run.

    The first SIGTERM or SIGUSR1 only asks it to stop, for which SIGTERM leaves it `grace_s`. A second signal ends the
    run at once. Whatever the block raises after the first one, or if it returns, the run ends as by that signal:
    workers may have got it as well, and their deaths are its consequence. A signal that nobody handles keeps its
    effect.
    """
    global _is_asked  # noqa: PLW0603  # as above
    handlers = {number: handler for number in _NUMBERS if callable(handler := _handler_of(number))}
    if not handlers:
        yield
        return
    received: list[int] = []
    is_limited, is_over = threading.Event(), threading.Event()

    def receive(number: int, frame: FrameType | None) -> None:
        # No log line here: the signal may have come within one.
        if received:
            handlers[signal.Signals(number)](number, frame)
        received.append(number)
        ask()
        if number == signal.SIGTERM:
            is_limited.set()

    def limit() -> None:
        is_limited.wait()
        if not is_over.wait(grace_s):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    threading.Thread(target=limit, name="klear-stop", daemon=True).start()
    for number in handlers:
        signal.signal(number, receive)
    try:
        try:
            yield
        finally:
            is_over.set()
            is_limited.set()  # its thread ends
            for number, handler in handlers.items():
                signal.signal(number, handler)
            _is_asked = False
    except Exception:
        if received:
            handlers[signal.Signals(received[0])](received[0], None)
        raise
    if received:
        handlers[signal.Signals(received[0])](received[0], None)


def _handler_of(number: signal.Signals) -> Handler | int | None:
    is_main = threading.current_thread() is threading.main_thread()
    return signal.getsignal(number) if is_main and number not in _at_once else None


# ---- child processes ----


IS_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even if that was killed. Only Linux can."""
    if IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
