"""Take published traces in place of distillation: read, compare with the benchmarks, and write them as our own."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from klear_core.artifacts.manifest import LedgerStep, StageSummary, check_yield
from klear_core.artifacts.records import write_shard
from klear_core.config.curate import CurateConfig, DecontaminateConfig
from klear_core.config.data import StoredSource
from klear_core.config.settings import YieldLimits
from klear_core.data.candidates import Candidate
from klear_core.data.curation.curate import protected_questions
from klear_core.data.curation.decontaminate import Decontaminator, Leak, drop_of
from klear_core.data.curation.normalise import tokens_of
from klear_core.data.curation.write import write_leaks
from klear_core.data.formats.fields import READ
from klear_core.data.formats.traces import PublishedTrace, Reply, read_traces
from klear_core.data.sources import source_name
from klear_core.distill.select import defect_of, dropped
from klear_core.errors import DataError
from klear_core.metrics import SILENT, Telemetry
from klear_core.types import Difficulty, Dropped, Outcome, TeacherTrace, UnverifiableReference, Verdict

_DECONTAMINATE, _COMPLETE = "decontaminate", "complete"
_DEFAULTS = CurateConfig()
_TRACES_PER_SHARD = 2048
_LEAKS_PER_SHARD = 4096
_PROMPT_VERSION = "given"
_KEPT_DEFECTS = ("", "no_reasoning")
"""Rows without thinking are taken as they are: some published sets are short answers on purpose."""


def take_traces(
    sources: Sequence[StoredSource],
    decontaminate: DecontaminateConfig = _DEFAULTS.decontaminate,
    *,
    workdir: Path,
    keep_truncated: bool = False,
    floors: tuple[YieldLimits, YieldLimits] = (_DEFAULTS.runtime.read, YieldLimits()),
    benchmarks: Path | None = None,
    telemetry: Telemetry = SILENT,
) -> StageSummary:
    """Write `workdir/traces` and `workdir/dropped`, as distillation does, from files of published traces.

    Questions that resemble a benchmark's are dropped by the rules of curation. Nothing is judged. `floors` are the
    least shares of usable rows and of whole replies; DataError below one of them, or if no trace is left.
    """
    decontaminator = Decontaminator(decontaminate, protected_questions(decontaminate, benchmarks))
    shutil.rmtree(workdir / "traces", ignore_errors=True)  # of a killed attempt
    taken = _Taken()
    shard: list[TeacherTrace] = []
    num_shards = 0
    for index, source in enumerate(sources):
        telemetry.progress(index, len(sources), source_name(source))
        for trace in _traces_of(source, decontaminator, taken, keep_truncated=keep_truncated):
            shard.append(trace)
            if len(shard) == _TRACES_PER_SHARD:
                write_shard(workdir / "traces" / f"{num_shards:05d}.parquet", shard)
                shard, num_shards = [], num_shards + 1
    if shard or not num_shards:
        write_shard(workdir / "traces" / f"{num_shards:05d}.parquet", shard)
    write_shard(workdir / "dropped" / "00000.parquet", taken.dropped)
    write_leaks(workdir, taken.leaks, rows_per_shard=_LEAKS_PER_SHARD)
    telemetry.progress(len(sources), len(sources), "done")
    return taken.summary(floors, num_protected=decontaminator.num_protected)


@dataclass(slots=True)
class _Taken:
    """Counts of what was read, dropped and kept so far."""

    rows_of: Counter[str] = field(default_factory=Counter)
    samples_of: Counter[str] = field(default_factory=Counter)
    """Replies seen of each problem, for the index of the next one."""
    noted: Counter[str] = field(default_factory=Counter)
    dropped: list[Dropped] = field(default_factory=list)
    leaks: list[Leak] = field(default_factory=list)
    num_replies: int = 0
    num_traces: int = 0
    num_words: int = 0

    def summary(self, floors: tuple[YieldLimits, YieldLimits], *, num_protected: int) -> StageSummary:
        """Return counts, ledger and warnings; raise DataError if too little is usable."""
        read, clean, whole = map(self._reasons_at, _STEPS)
        num_rows = self.rows_of.total()
        rows = {f"rows_of_{name}": n for name, n in self.rows_of.items()}
        reading = LedgerStep.of(READ, "row", num_in=num_rows, dropped=read, noted=rows)
        cleaning = LedgerStep.of(_DECONTAMINATE, "row", num_in=reading.num_out, dropped=clean)
        # Both numbers were counted, so this step checks the counts of drops.
        completing = LedgerStep(
            step=_COMPLETE,
            unit="trace",
            num_in=self.num_replies,
            num_out=self.num_traces,
            dropped=dict(whole),
            noted=dict(self.noted),
        )
        warnings = (
            *self._checked(reading, "rows of the given traces can be used", floors[0]),
            *self._checked(completing, "given traces are whole", floors[1]),
        )
        if not self.num_traces:
            raise DataError(f"no trace is left of {num_rows} rows: {dict(read + clean + whole)}")
        counts = {"problems": len(self.samples_of), "traces": self.num_traces, "words": self.num_words}
        return StageSummary(
            counts=counts | {"protected_questions": num_protected},
            ledger=(reading, cleaning, completing),
            notes=(*warnings, *self._notes()),
        )

    def _reasons_at(self, step: str) -> Counter[str]:
        return Counter(drop.reason for drop in self.dropped if drop.step == step)

    def _checked(self, step: LedgerStep, what: str, floor: YieldLimits) -> tuple[str, ...]:
        if not step.num_in:
            return ()
        example = next((drop.detail for drop in self.dropped if drop.step == step.step), "")
        key = "curate.runtime.read" if step.step == READ else "distill.runtime.complete"
        remedy = "Repair the files, or name others in given.distill"
        return check_yield(step, what, floor, key=key, remedy=remedy, example=example)

    def _notes(self) -> list[str]:
        num_plain = self.noted["without_reasoning"]
        if not num_plain:
            return []
        return [f"{num_plain:,} of {self.num_traces:,} given traces have no thinking: they teach to answer at once"]


_STEPS = (READ, _DECONTAMINATE, _COMPLETE)


def _traces_of(
    source: StoredSource, decontaminator: Decontaminator, taken: _Taken, *, keep_truncated: bool
) -> Iterator[TeacherTrace]:
    """Yield the traces of a source, and count its dropped rows and replies in `taken`."""
    name = source_name(source)
    for row in read_traces(source):
        taken.rows_of[name] += 1
        drop = row if isinstance(row, Dropped) else _leak_in(row, name, decontaminator, taken)
        if drop is not None:
            taken.dropped.append(drop)
            continue
        assert isinstance(row, PublishedTrace)
        for reply in row.replies:
            taken.num_replies += 1
            # Counted over all rows and sources: a problem that comes twice gets no sample index twice.
            index = taken.samples_of[row.problem_id]
            taken.samples_of[row.problem_id] += 1
            trace = _as_trace(row, reply, source=name, sample_idx=index)
            defect = defect_of(trace)
            if defect in _KEPT_DEFECTS or (defect == "truncated" and keep_truncated and trace.reasoning):
                taken.num_traces += 1
                taken.num_words += trace.num_tokens
                taken.noted.update(_noted(trace, reply))
                yield trace
            else:
                detail = f"{row.row}, finish_reason {reply.finish_reason}"
                taken.dropped.append(dropped(row.problem_id, index, step=_COMPLETE, reason=defect, detail=detail))


def _leak_in(row: PublishedTrace, source: str, decontaminator: Decontaminator, taken: _Taken) -> Dropped | None:
    """Return the drop record of a trace whose question is a benchmark's; note all that any rule would drop."""
    candidate = Candidate(
        source=source,
        domain=row.domain,
        question=row.question,
        reference=UnverifiableReference(domain=row.domain, why="traces are no references"),
        rating=None,
        row=row.row,
        contest_id=row.contest_id,
    )
    leak = decontaminator.leak_of(candidate, tokens_of(row.question))
    if leak is None:
        return None
    taken.leaks.append(leak)
    return drop_of(leak) if leak.is_dropped else None


def _noted(trace: TeacherTrace, reply: Reply) -> list[str]:
    noted = [] if trace.reasoning else ["without_reasoning"]
    return [*noted, f"published_as_{reply.published_verdict}"] if reply.published_verdict else noted


def _as_trace(row: PublishedTrace, reply: Reply, *, source: str, sample_idx: int) -> TeacherTrace:
    published = f", published as {reply.published_verdict}" if reply.published_verdict else ""
    return TeacherTrace(
        problem_id=row.problem_id,
        question=row.question,
        difficulty=Difficulty.UNKNOWN,
        source=source,
        teacher=source,
        sample_idx=sample_idx,
        reasoning=reply.reasoning,
        answer=reply.answer,
        finish_reason=reply.finish_reason,
        # Words, as the stage's count is named: no tokenizer is at hand here.
        num_tokens=len(reply.reasoning.split()) + len(reply.answer.split()),
        verdict=Verdict(outcome=Outcome.UNVERIFIABLE, score=0.0, detail=f"given, not judged{published}"),
        prompt_version=_PROMPT_VERSION,
    )
