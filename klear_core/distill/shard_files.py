"""Read and write the files of a shard: traces, drops and, of a paid teacher, unused replies, usage and the journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from klear_core.artifacts.records import read_shard, write_shard
from klear_core.artifacts.shards import Shard
from klear_core.distill.journal import SampleId, usage_in, write_journal
from klear_core.distill.teacher import OVER_BUDGET, Usage
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

    def clean(self) -> None:
        """Delete the journal of a finished shard, which a killed run may have left."""
        self.journal.unlink(missing_ok=True)

    def reopen(self, *, keeps_incomplete: bool) -> None:
        """Make a finished shard unfinished. Replies are kept, incomplete ones if `keeps_incomplete`; those that are
        then missing are requested again."""
        records = self.read()
        if records.usage.attempts:
            unused = read_shard(self._unused, UnusedReply) if self._unused.exists() else []
            # Incomplete replies are what a repaired teacher is to replace; those of a spent budget are paid and stay.
            kept = [reply for reply in unused if keeps_incomplete or reply.step != "complete"]
            write_journal(self.journal, _replies_of([*records.traces, *kept]), records.usage)
        # Last: until then the shard is done, and a kill leaves only a journal that `clean` deletes.
        self._traces.unlink()


JOURNAL_FOLDER = "journal"


def is_over_budget(dropped: Sequence[Dropped]) -> bool:
    """Return whether samples are missing because the budget was spent."""
    return any(drop.reason == OVER_BUDGET for drop in dropped)


def _replies_of(records: Iterable[TeacherTrace | UnusedReply]) -> Iterator[tuple[SampleId, TeacherReply]]:
    for one in records:
        reply = TeacherReply(
            reasoning=one.reasoning,
            answer=one.answer,
            finish_reason=one.finish_reason,
            num_tokens=one.num_tokens,
        )
        yield (one.problem_id, one.sample_idx), reply
