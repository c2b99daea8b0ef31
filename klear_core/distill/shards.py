"""Write and read the shards of a distillation, resume them, and keep the replies of an unfinished one."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from klear_core.artifacts.records import Shard, read_shard, write_shard
from klear_core.config.distill import DistillConfig
from klear_core.distill.select import TraceCounts, failures_of, is_enough
from klear_core.distill.teachers.teacher import OVER_BUDGET, TeacherSample, Usage
from klear_core.types import Dropped, Problem, TeacherFinish, TeacherReply, TeacherTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedReply:
    """A reply that did not become a trace: truncated, refused, without reasoning, not judged, or not selected."""

    problem_id: str
    sample_idx: int
    step: str
    reason: str
    teacher: str
    reasoning: str
    answer: str
    finish_reason: TeacherFinish
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecords:
    """Everything that a finished shard holds."""

    traces: Sequence[TeacherTrace]
    dropped: Sequence[Dropped]
    unused: Sequence[UnusedReply] = ()
    usage: Usage = field(default_factory=Usage)


class ShardFiles:
    """The files of one shard. The traces are written last: their file marks the shard as done."""

    def __init__(self, shard: Shard[Problem]) -> None:
        root, name = shard.path.parents[1], shard.path.name
        self._traces = shard.path
        self._dropped, self._unused, self._usage = (root / folder / name for folder in ("dropped", "unused", "usage"))
        self.journal = root / JOURNAL_FOLDER / f"{shard.path.stem}.jsonl"

    def write(self, records: ShardRecords) -> None:
        """Write a finished shard."""
        write_shard(self._dropped, records.dropped)
        if records.unused:
            write_shard(self._unused, records.unused)
        else:
            self._unused.unlink(missing_ok=True)  # from before the shard was reopened
        if records.usage.attempts:
            write_shard(self._usage, [records.usage])
        write_shard(self._traces, records.traces)

    def read(self) -> ShardRecords:
        """Return the records of a finished shard, without the unused replies."""
        usage = read_shard(self._usage, Usage)[0] if self._usage.exists() else Usage()
        traces, dropped = read_shard(self._traces, TeacherTrace), read_shard(self._dropped, Dropped)
        return ShardRecords(traces=traces, dropped=dropped, usage=usage)

    def used_so_far(self) -> Usage:
        """Return what an unfinished shard has used."""
        return usage_in(self.journal) if self.journal.exists() else Usage()

    def reopen(self, *, keeps_incomplete: bool) -> None:
        """Make a finished shard unfinished. Replies are kept, incomplete ones if `keeps_incomplete`; those that are
        then missing are requested again."""
        records = self.read()
        if records.usage.attempts:
            unused = read_shard(self._unused, UnusedReply) if self._unused.exists() else []
            # Incomplete replies are what a repaired teacher is to replace; those of a spent budget are paid and stay.
            kept = [reply for reply in unused if keeps_incomplete or reply.step != "complete"]
            write_journal(self.journal, _replies_of([*records.traces, *kept]), records.usage)
        # Last: until then the shard is done, and a kill leaves only a journal that the next run deletes.
        self._traces.unlink()


JOURNAL_FOLDER = "journal"


def _replies_of(records: Iterable[TeacherTrace | UnusedReply]) -> Iterator[tuple[SampleId, TeacherReply]]:
    for one in records:
        reply = TeacherReply(
            reasoning=one.reasoning,
            answer=one.answer,
            finish_reason=one.finish_reason,
            num_tokens=one.num_tokens,
        )
        yield (one.problem_id, one.sample_idx), reply


# ---- journal ----
# Keep every paid reply of an unfinished shard in an append-only file, so that a kill loses only open requests.


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


# ---- finished ----
# Count the shards that earlier runs of the stage finished, and reopen those with too few traces.


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedShard:
    """The record of an earlier run's finished shard, without the texts."""

    counts: TraceCounts
    num_failed: int
    usage: Usage
    is_over_budget: bool
    """Whether samples are missing because the budget was spent."""

    @classmethod
    def of(cls, shard: Shard[Problem]) -> FinishedShard:
        """Read the shard's records, which may be hundreds of megabytes, and keep only their counts."""
        records = ShardFiles(shard).read()
        counts = TraceCounts()
        counts.add(records.traces, records.dropped)
        return cls(
            counts=counts,
            num_failed=len(failures_of([*records.traces, *records.dropped])),
            usage=records.usage,
            is_over_budget=any(drop.reason == OVER_BUDGET for drop in records.dropped),
        )


def reopen_poor_shards(
    shards: Sequence[Shard[Problem]], finished: Mapping[Path, FinishedShard], cfg: DistillConfig
) -> None:
    """Reopen finished shards below a floor if all finished ones together are below it.

    The teacher may have been repaired since, so their incomplete replies are requested again. Shards that lack samples
    because the budget was spent are always reopened, and keep all that was paid for.
    """
    total = TraceCounts()
    for earlier in finished.values():
        total.merge(earlier.counts)
    if not total.num_asked:
        return
    is_total_poor = not is_enough(total, cfg.runtime)
    reopened = []
    for shard in shards:
        if shard.path not in finished:
            continue
        earlier = finished[shard.path]
        is_poor = is_total_poor and not is_enough(earlier.counts, cfg.runtime)
        if earlier.is_over_budget or is_poor:
            reopened.append(shard)
    if reopened:
        log.info("distill: %d finished shards of an earlier run lack traces, which are requested again", len(reopened))
    for shard in reopened:
        ShardFiles(shard).reopen(keeps_incomplete=finished[shard.path].is_over_budget)
