"""Hold the right to build an artifact among nodes that share only an object store.

A lease is a numbered term: an object that is created only if it does not exist. Its holder rewrites it as a heartbeat.
Whoever sees no heartbeat for the time of expiry creates the next term, which at most one node can. Time is measured by
the watcher's own clock between two changes of the object, so that clocks of nodes need not agree.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from klear_core.artifacts.bucket import Bucket
from klear_core.errors import KlearError

log = logging.getLogger(__name__)

_BEATS_PER_EXPIRY = 4
"""Heartbeats within the time of expiry, so that a single lost one does not end the lease."""
_RELEASED = b"released"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """Times of a lease, in seconds."""

    expiry_s: float = 60.0
    """A lease without a heartbeat for so long is taken over."""
    poll_s: float = 2.0
    """Wait between two looks at a lease that another node holds."""


@contextmanager
def lease(bucket: Bucket, key: str, times: LeaseTimes, *, node: str, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold the lease below `key` for the block; `on_wait` is called once with the holder if another node has it.

    The caller holds a lock that excludes all other processes of `node`, so that a lease of this node's is of a process
    that has ended.
    """
    term = _take(bucket, key, times, node, on_wait)
    stop = threading.Event()
    beat = threading.Thread(target=_keep, args=(bucket, term, times, node, stop), name=f"lease {key}", daemon=True)
    beat.start()
    try:
        yield
    finally:
        stop.set()
        beat.join()
        try:
            bucket.write(term, _RELEASED)
        except (KlearError, OSError) as e:
            # The artifact may be sealed by now, and an error of the block itself must not be lost.
            log.warning("the lease %s could not be given back, and ends after %g s: %s", term, times.expiry_s, e)


def _take(bucket: Bucket, key: str, times: LeaseTimes, node: str, on_wait: Callable[[str], None]) -> str:
    seen, seen_at, was_told = b"", time.monotonic(), False
    while True:
        terms = bucket.keys(f"{key}/")
        content = bucket.read(terms[-1]) if terms else _RELEASED
        if content is None:
            continue  # deleted by its successor between the two requests
        # Every heartbeat changes the content, because it has a random part.
        if content != seen:
            seen, seen_at = content, time.monotonic()
        is_over = seen == _RELEASED or _note(seen).get("node") == node
        if is_over or time.monotonic() - seen_at > times.expiry_s:
            taken = _next_term(bucket, key, terms, node)
            if taken:
                return taken
            continue
        if not was_told:
            on_wait(_holder(seen))
            was_told = True
        time.sleep(times.poll_s)


def _next_term(bucket: Bucket, key: str, terms: list[str], node: str) -> str:
    """Create the term after the last one; returns its key, empty if another node was faster."""
    number = int(terms[-1].rpartition("/")[2]) + 1 if terms else 1
    term = f"{key}/{number:09d}"  # with zeros, so that keys sort as their numbers do
    if not bucket.create(term, _beat(node)):
        return ""
    for old in terms[:-1]:  # the last one stays until the next takeover: a slow watcher may still compare with it
        bucket.delete(old)
    return term


def _keep(bucket: Bucket, term: str, times: LeaseTimes, node: str, stop: threading.Event) -> None:
    while not stop.wait(times.expiry_s / _BEATS_PER_EXPIRY):
        try:
            bucket.write(term, _beat(node))
        except (KlearError, OSError) as e:
            # Losing the lease costs a second build, never a second artifact: sealing is conditional.
            log.warning("the lease %s could not be renewed: %s", term, e)


def _beat(node: str) -> bytes:
    note = {
        "holder": f"process {os.getpid()} on {os.uname().nodename}",
        "node": node,
        "at": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "beat": uuid.uuid4().hex,
    }
    return json.dumps(note).encode()


def _note(content: bytes) -> dict[str, str]:
    try:
        note = json.loads(content)
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def _holder(content: bytes) -> str:
    note = _note(content)
    return f"{note['holder']} (last heartbeat {note['at']})" if {"holder", "at"} <= note.keys() else "another node"
