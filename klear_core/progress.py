"""Count what this process has done, so that a learner's driver can tell a slow rank from one that is stuck."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Count of what a rank has done since it started. The driver only looks whether it has changed."""

    count: int = 0
    latest: str = "nothing yet"
    """The last thing done, for messages."""


_count = 0
_latest = Progress().latest


def made_progress(what: str) -> None:
    """Count one more thing done: a micro-batch, a weight, a part of a file. Cheap; any thread may call it."""
    global _count, _latest  # noqa: PLW0603  # a process runs one rank
    _count += 1  # two threads at once may count one thing, which the driver sees as a change all the same
    _latest = what


def progress() -> Progress:
    """Return what this process has done so far."""
    return Progress(count=_count, latest=_latest)
