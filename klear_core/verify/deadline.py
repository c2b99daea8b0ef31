"""End this process at a deadline that Python code in it cannot move, by timers of the kernel that send no SIGALRM."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
from collections.abc import Iterator

RAN_OUT = signal.SIGRTMAX if sys.platform == "linux" else signal.SIGALRM
"""Signal that ends a process at its deadline. Libraries with timeouts use SIGALRM; nothing uses SIGRTMAX."""

_GRACE_S = 1.0
"""Seconds from RAN_OUT to SIGKILL, which ends a process that blocks or handles every signal that it can."""

_CLOCK_MONOTONIC = 1


class _SigEvent(ctypes.Structure):
    """C's `struct sigevent`, which has 64 bytes."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal_number", ctypes.c_int),
        ("notify", ctypes.c_int),  # 0 is SIGEV_SIGNAL: send the signal to the process
        ("rest", ctypes.c_char * 48),
    )


class _TimerSpec(ctypes.Structure):
    """C's `struct itimerspec`."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Have the kernel end this process if the block takes longer, whatever the block does with its signals.

    An alarm that the block leaves running is cancelled: it would end a later block. Other systems than Linux have only
    the alarm, which the block could cancel.
    """
    signal.signal(RAN_OUT, signal.SIG_DFL)
    if sys.platform != "linux":
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return
    libc, gentle, hard = _timers()
    _set(libc, gentle, seconds)
    _set(libc, hard, seconds + _GRACE_S)
    try:
        yield
    finally:
        _set(libc, gentle, 0)
        _set(libc, hard, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


@functools.cache
def _timers() -> tuple[ctypes.CDLL, ctypes.c_void_p, ctypes.c_void_p]:
    """Return the C library and this process's timers. A forked child has no timers: call this only in a worker."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "timer_create"):
        libc = ctypes.CDLL("librt.so.1", use_errno=True)  # before glibc 2.34
    return libc, _created(libc, RAN_OUT), _created(libc, signal.SIGKILL)


def _created(libc: ctypes.CDLL, signal_number: int) -> ctypes.c_void_p:
    timer = ctypes.c_void_p()
    event = _SigEvent(signal_number=signal_number)
    if libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) != 0:
        raise OSError(ctypes.get_errno(), f"timer_create: {os.strerror(ctypes.get_errno())}")
    return timer


def _set(libc: ctypes.CDLL, timer: ctypes.c_void_p, seconds: float) -> None:
    """Start a timer; 0 stops it."""
    whole = int(seconds)
    spec = _TimerSpec(value_s=whole, value_ns=int((seconds - whole) * 1e9))
    if libc.timer_settime(timer, 0, ctypes.byref(spec), None) != 0:
        raise OSError(ctypes.get_errno(), f"timer_settime: {os.strerror(ctypes.get_errno())}")
