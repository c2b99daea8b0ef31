"""Clean up what a jail may leave behind: processes, which we adopt in order to kill them, and files of firejail."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

LIVE_GUARDS: set[int] = set()
"""Process ids of the jails in use. In a process without other children, any child not listed here is an orphan."""

_FIREJAIL_RUNS = Path("/run/firejail/sandbox")
_PR_SET_CHILD_SUBREAPER = 36
_KILL_S = 10.0
_may_reap = False


def adopt_orphans(*, has_other_children: bool) -> None:
    """Make this process the parent of all processes that a killed jail leaves behind.

    If it has other children, `reap_orphans` does nothing, and orphans stay until `end_orphans`. Without adoption they
    would go to the machine's init, which in many containers reaps nothing.
    """
    global _may_reap  # noqa: PLW0603  a property of the process
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _may_reap = not has_other_children


def reap_orphans() -> None:
    """Kill and reap all children except jails in use, if this process adopts orphans and has no other children."""
    if _may_reap:
        _reap_all_but(LIVE_GUARDS)


def _reap_all_but(kept: set[int]) -> None:
    for child in _children_of(os.getpid()):
        if child not in kept:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                # Waiting for a process that we may not kill could take for ever.
                os.waitpid(child, 0 if _kill(child) else os.WNOHANG)


def end_orphans() -> None:
    """Kill and reap all children, and their descendants, which then become our children.

    Processes that only root may kill end by themselves.
    """
    deadline = time.monotonic() + _KILL_S
    while _children_of(os.getpid()) and time.monotonic() < deadline:
        _reap_all_but(set())
        time.sleep(0.01)


def kill_tree(guard: subprocess.Popen[bytes]) -> None:
    """Kill what the guard started, then the guard. Killing firejail itself ends everything in its PID namespace."""
    for child in _children_of(guard.pid):
        with contextlib.suppress(ProcessLookupError):
            _kill(child)
    guard.terminate()
    try:
        guard.wait(3.0)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def forget_dead_jails() -> None:
    """Remove the files in /run/firejail that killed firejails left behind. Only root may; others leave them."""
    if os.geteuid() != 0 or not _FIREJAIL_RUNS.is_dir():
        return
    for file in _FIREJAIL_RUNS.iterdir():
        if file.name.isdigit() and not _is_alive(int(file.name)):
            file.unlink(missing_ok=True)


def _kill(pid: int) -> bool:
    """Kill a process. Return False if only root may: such a process is setuid, and it ends when its guard does."""
    try:
        os.kill(pid, signal.SIGKILL)
    except PermissionError:
        return False
    return True


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def _children_of(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as f:
            return [int(child) for child in f.read().split()]
    except OSError:
        return []
