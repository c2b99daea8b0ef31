"""Keep every paid reply of an unfinished shard in an append-only file, so that a kill loses only open requests."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from klear_core.distill.teacher import TeacherSample, Usage
from klear_core.types import TeacherReply

log = logging.getLogger(__name__)

SampleId = tuple[str, int]
"""Problem id and sample index."""

_REPLY = TypeAdapter(TeacherReply)
_USAGE = TypeAdapter(Usage)


class Journal:
    """The replies of one shard so far, on disk and in memory. Lines that a kill left half-written are skipped."""

    def __init__(self, path: Path, *, fsync_s: float) -> None:
        self.replies: dict[SampleId, TeacherReply] = {}
        self.usage = Usage()
        self._path, self._fsync_s = path, fsync_s
        self._synced_at = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Appending never rewrites a reply that is on disk, whatever a kill interrupts.
        self._file = path.open("ab+")
        self._read()

    async def append(self, sample_id: SampleId, sample: TeacherSample) -> None:
        """Write one sample. A failed one leaves only what it used: the next run requests it again."""
        self.usage += sample.usage
        reply = sample.result if isinstance(sample.result, TeacherReply) else None
        self._file.write(_line(sample_id, reply, sample.usage))
        self._file.flush()  # to the operating system, after which a killed process loses nothing
        now = time.monotonic()
        if now - self._synced_at >= self._fsync_s:
            self._synced_at = now
            # In a thread: while a slow disk syncs, the replies in flight must be read.
            await asyncio.to_thread(os.fsync, self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def delete(self) -> None:
        """Delete the file, once the shard's records are written."""
        self._file.close()
        self._path.unlink()

    def _read(self) -> None:
        self._file.seek(0)
        num_bad, line = 0, b"\n"
        for line in self._file:
            try:
                record = json.loads(line)
                usage = _USAGE.validate_python(record["usage"])
                reply = record["reply"] and _REPLY.validate_python(record["reply"])
                sample_id = (str(record["problem_id"]), int(record["sample_idx"]))
            except (ValueError, KeyError, TypeError, ValidationError):
                num_bad += 1
                continue
            self.usage += usage
            if reply:
                self.replies[sample_id] = reply
        if num_bad:
            log.warning("distill: %s: %d unreadable lines are skipped, and requested again", self._path, num_bad)
        if not line.endswith(b"\n"):
            self._file.write(b"\n")  # so that the next line is not appended to half of another


def usage_in(path: Path) -> Usage:
    """Return the usage of all samples in a journal, those from before its shard was reopened included."""
    journal = Journal(path, fsync_s=0)
    journal.close()
    return journal.usage


def write_journal(path: Path, replies: Iterable[tuple[SampleId, TeacherReply]], usage: Usage) -> None:
    """Write a new journal, atomically, with the replies to keep and the usage of all samples so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as f:
        # Usage is known for the shard and not by reply, so a line without a reply carries all of it.
        f.write(_line(("", 0), None, usage))
        for sample_id, reply in replies:
            f.write(_line(sample_id, reply, Usage()))
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)


def _line(sample_id: SampleId, reply: TeacherReply | None, usage: Usage) -> bytes:
    record = {
        "problem_id": sample_id[0],
        "sample_idx": sample_id[1],
        "reply": None if reply is None else asdict(reply),
        "usage": asdict(usage),
    }
    return json.dumps(record).encode() + b"\n"
