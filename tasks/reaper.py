"""End a process's descendants when it ends, even if it is killed and cannot clean up itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_GRACE_S = 2.0
_watched: set[int] = set()
"""This process's id while it is watched; two watchers would end each other before their work is done."""

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
    # Processes stay in `family` once seen: if their own parent dies, they are no longer listed as descendants.
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
    """Run a watcher in its own session while the block runs; if this process dies, the watcher ends its descendants.

    Ray ends most of its processes itself, but two agents run on for over a minute, Prefect's temporary server for ever.
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
        start_new_session=True,  # the watcher must survive Ctrl-C and a kill of the process group
    )
    _watched.add(own)
    try:
        yield
    finally:
        _watched.discard(own)
        watcher.kill()
        watcher.wait()
