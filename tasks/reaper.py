"""No orphans: what a process has started ends with it, also if it is killed and can clean up nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_GRACE_S = 2.0
_watched: set[int] = set()
"""This process, while it is watched: one watcher is enough, and two would end each other before their work is done."""

_WATCH = """
import os, sys, time
import psutil

parent, grace_s = int(sys.argv[1]), float(sys.argv[2])
family = {}
while os.getppid() == parent:
    try:
        seen = psutil.Process(parent).children(recursive=True)
    except psutil.Error:
        break
    # Kept once seen: those whose own parent has died are nobody's children.
    family = {pid: p for pid, p in family.items() if p.is_running()} | {p.pid: p for p in seen if p.pid != os.getpid()}
    time.sleep(1)
for ask in (psutil.Process.terminate, psutil.Process.kill):
    for process in family.values():
        try:
            ask(process)  # psutil checks that the pid is still the same process
        except psutil.Error:
            pass
    psutil.wait_procs(family.values(), timeout=grace_s)
"""


@contextmanager
def no_orphans() -> Iterator[None]:
    """While the block runs, a watcher in a session of its own waits for this process to die and then ends all its descendants.

    Ray ends most of its processes itself, but two agents go on for over a minute; Prefect's in-process server goes on for ever.
    """
    own = os.getpid()
    if own in _watched:
        yield
        return
    watcher = subprocess.Popen(
        [sys.executable, "-c", _WATCH, str(own), str(_GRACE_S)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C and a killed process group are what it is there for
    )
    _watched.add(own)
    try:
        yield
    finally:
        _watched.discard(own)
        watcher.kill()
        watcher.wait()
