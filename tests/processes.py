"""Processes that may end while a test looks at them."""

from collections.abc import Iterable

import psutil


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; one that only waits to be reaped has."""
    return [p for p in processes if _status(p) not in (None, psutil.STATUS_ZOMBIE)]


def title(process: psutil.Process) -> str:
    """Its command line, which Ray's actors write anew with what they do; empty once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _status(process: psutil.Process) -> str | None:
    try:
        return process.status() if process.is_running() else None
    except psutil.NoSuchProcess:
        return None
