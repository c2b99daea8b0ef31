"""Turn prompt sources into training problems. Nothing is filtered by accuracy, and drops are counted by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from klear_core.artifacts.floors import Share, check_floor
from klear_core.artifacts.ledger import LedgerStep, StageSummary
from klear_core.artifacts.records import write_shards
from klear_core.artifacts.store import SCRATCH
from klear_core.config.data import CurateConfig, DecontaminateConfig, FileSource, ReadFloor, SelectConfig
from klear_core.data.benchmarks import read_benchmarks, read_contest_ids
from klear_core.data.candidates import Candidate, DroppedRow, SourceRow, dropped_row, problem_from, with_stored_tests
from klear_core.data.decontaminate import Decontaminator, Protected
from klear_core.data.dedup import Deduplicator, NearDrops, near_duplicates
from klear_core.data.leak_table import write_leaks
from klear_core.data.selection import SELECT, Pool, check_selection, left_out, select_problems, sources_to_read
from klear_core.data.sources import (
    READ,
    check_questions,
    check_sources,
    read_contest_questions,
    read_source,
    source_name,
)
from klear_core.errors import DataError
from klear_core.metrics import Telemetry
from klear_core.seeding import seed_for
from klear_core.types import Dropped, Problem

T = TypeVar("T")

Filter = Callable[[Candidate], Dropped | None]
"""Returns the drop record of a candidate, or None to keep it."""

_STEPS = (READ, "length", "dedup", "decontaminate")


def curate(cfg: CurateConfig, *, benchmarks: Path, seed: int, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Write `problems/*.parquet` and `dropped/*.parquet`: read, limit length, dedup, decontaminate, select, tag, shuffle.

    `rows/*.parquet` names the source row of each problem, in the same order. `leaks/*.parquet` and `leaks.html` show
    every prompt that any decontamination rule would drop.

    Sources are streamed; distinct problems must fit into memory, where near-duplicates are found and the rest is
    shuffled. Raise DataError if a source has too few usable rows or no problem is left.
    """
    check_curation(cfg)
    dedup = Deduplicator(cfg.dedup)
    decontaminator = Decontaminator(cfg.decontaminate, protected_questions(cfg.decontaminate, benchmarks))
    filters = (_length_limit(cfg.max_question_chars), dedup.repeat_of)
    distinct: list[Candidate] = []
    dropped: list[DroppedRow] = []
    num_rows: Counter[str] = Counter()
    warnings = left_out(cfg)
    sources = sources_to_read(cfg)
    for i, source in enumerate(sources):
        name = source_name(source)
        telemetry.progress(i, len(sources), name)
        read = with_stored_tests(read_source(source, seed=seed), workdir / SCRATCH / f"{i}.tests")
        for row in _checked_rows(read, name, cfg.runtime.read, warnings):
            num_rows[name] += 1
            drop = row if isinstance(row, Dropped) else _first_drop(row, filters)
            if drop is None:
                assert isinstance(row, Candidate)
                distinct.append(row)
            else:
                # a row that could not be read is known by its place alone
                place = row.row if isinstance(row, Candidate) else row.problem_id
                dropped.append(dropped_row(drop, source=name, row=place))
    near = near_duplicates(distinct, cfg.dedup.near)
    kept: list[Candidate] = []
    for index, candidate in enumerate(distinct):
        # A copy of a leak is dropped as a copy, so that rewording does not save it.
        drop = near.drops.get(index) or decontaminator.leak_in(candidate)
        if drop is None:
            kept.append(candidate)
        else:
            dropped.append(dropped_row(drop, source=candidate.source, row=candidate.row))
    if cfg.select.is_on:
        kept, notes = _selected(cfg.select, kept, dropped, seed=seed)
        warnings += notes
    if not kept:
        reasons = dict(Counter(drop.reason for drop in dropped))
        raise DataError(f"curation left no problem of {num_rows.total()} rows: {reasons}")
    # Sorting by a seeded hash of the id shuffles: a problem's sort key does not depend on the other problems.
    kept.sort(key=lambda candidate: seed_for(seed, "data/shuffle", candidate.problem_id))
    problems = [problem_from(candidate, cfg.difficulty) for candidate in kept]
    rows = [SourceRow(problem_id=c.problem_id, source=c.source, row=c.row) for c in kept]
    rows_per_shard = cfg.runtime.rows_per_shard
    write_shards(workdir / "problems", problems, rows_per_shard=rows_per_shard)
    write_shards(workdir / "rows", rows, rows_per_shard=rows_per_shard)
    write_shards(workdir / "dropped", dropped, rows_per_shard=rows_per_shard)
    write_leaks(workdir, decontaminator.leaks)
    telemetry.progress(len(sources), len(sources), "done")
    steps = (*_STEPS, SELECT) if cfg.select.is_on else _STEPS
    return _summary(problems, dropped, num_rows, dedup, near, decontaminator, steps=steps, warnings=warnings)


def check_curation(cfg: CurateConfig) -> None:
    """Raise ConfigError if a source or a protected question set is missing or unreadable; only first rows are read."""
    check_sources(cfg.sources)
    check_selection(cfg)
    for source in cfg.decontaminate.also:
        check_questions(source)


def protected_questions(cfg: DecontaminateConfig, benchmarks: Path) -> Iterator[Protected]:
    """Yield the questions to keep out of training: those of the benchmarks artifact, and the sets in `also`."""
    contest_ids = read_contest_ids(benchmarks)
    for name, problem in read_benchmarks(benchmarks):
        contest = contest_ids.get(problem.problem_id, "")
        yield Protected(benchmark=name, question_id=problem.problem_id, question=problem.question, contest_id=contest)
    for source in cfg.also:
        yield from _also_protected(source)


def _also_protected(source: FileSource) -> Iterator[Protected]:
    for number, question in enumerate(read_contest_questions(source), 1):
        if isinstance(question, Dropped):
            raise DataError(
                f"{source.path}: a question that is to be kept out of training cannot be read: {question.detail}"
            )
        text, contest = question
        yield Protected(benchmark=source_name(source), question_id=f"row {number}", question=text, contest_id=contest)


def _checked_rows(
    rows: Iterator[Candidate | Dropped], source: str, floor: ReadFloor, warnings: list[str]
) -> Iterator[Candidate | Dropped]:
    """Yield the rows unchanged; after the last one, append to `warnings` or raise DataError if too few were usable."""
    lost: Counter[str] = Counter()
    num_rows = 0
    first = ""
    for row in rows:
        num_rows += 1
        if isinstance(row, Dropped):
            lost[row.reason] += 1
            first = first or row.detail
        yield row
    share = Share(what=f"rows of source {source!r} can be used", num_in=num_rows, lost=lost, example=first)
    remedy = "Repair the file, or name its row_schema"
    warnings += check_floor(share, floor, key="curate.runtime.read", remedy=remedy)


def _length_limit(max_chars: int) -> Filter:
    def too_long(candidate: Candidate) -> Dropped | None:
        length = len(candidate.question)
        if length <= max_chars:
            return None
        detail = f"{candidate.source}: {length} characters, at most {max_chars} are allowed"
        return Dropped(problem_id=candidate.problem_id, step="length", reason="question_too_long", detail=detail)

    return too_long


def _selected(
    cfg: SelectConfig, candidates: Sequence[Candidate], dropped: list[DroppedRow], *, seed: int
) -> tuple[list[Candidate], Sequence[str]]:
    """Return the selected candidates and warnings, and append the others to `dropped`."""
    pool = Pool(
        problem_ids=[candidate.problem_id for candidate in candidates],
        sources=[candidate.source for candidate in candidates],
        questions=lambda: (candidate.question for candidate in candidates),
    )
    selection = select_problems(cfg, pool, seed=seed)
    selected: list[Candidate] = []
    for index, candidate in enumerate(candidates):
        drop = selection.drop_of(index)
        if drop is None:
            selected.append(candidate)
        else:
            dropped.append(dropped_row(drop, source=candidate.source, row=candidate.row))
    return selected, selection.notes


def _first_drop(candidate: Candidate, filters: Sequence[Filter]) -> Dropped | None:
    for drop_of in filters:
        drop = drop_of(candidate)
        if drop is not None:
            return drop
    return None


def _summary(
    problems: Sequence[Problem],
    dropped: Sequence[DroppedRow],
    num_rows: Counter[str],
    dedup: Deduplicator,
    near: NearDrops,
    decontaminator: Decontaminator,
    *,
    steps: Sequence[str],
    warnings: Sequence[str],
) -> StageSummary:
    kept = Counter(p.source for p in problems)
    clean = kept + Counter(d.source for d in dropped if d.step == SELECT)
    noted: dict[str, dict[str, int]] = {step: {} for step in (*_STEPS, SELECT)}
    for name, n in num_rows.items():
        noted[READ][f"rows_of_{name}"] = n
        noted["decontaminate"][f"kept_of_{name}"] = clean[name]
        noted[SELECT][f"kept_of_{name}"] = kept[name]
    for name, n in sorted(dedup.repeats.items()):
        noted["dedup"][f"repeats_in_{name}"] = n
    noted["dedup"]["repeats_with_another_answer"] = dedup.num_conflicting_answers
    noted["dedup"] |= near.kept
    noted["decontaminate"] |= decontaminator.counts_by_rule()
    ledger: list[LedgerStep] = []
    num_in = num_rows.total()
    for step in steps:
        reasons = Counter(d.reason for d in dropped if d.step == step)
        num_out = num_in - reasons.total()
        ledger.append(
            LedgerStep(
                step=step,
                unit="row" if step == READ else "problem",
                num_in=num_in,
                num_out=num_out,
                dropped=dict(sorted(reasons.items())),
                noted=noted[step],
            )
        )
        num_in = num_out
    assert num_in == len(problems), (num_in, len(problems))
    tags = dict(sorted(Counter(p.difficulty.value for p in problems).items()))
    ledger.append(LedgerStep(step="difficulty", unit="problem", num_in=num_in, num_out=num_in, noted=tags))
    return StageSummary(
        counts={
            "rows": num_rows.total(),
            "problems": len(problems),
            "protected_questions": decontaminator.num_protected,
        },
        ledger=tuple(ledger),
        notes=(*warnings, *_notes(num_rows, kept, decontaminator)),
    )


def _notes(num_rows: Counter[str], kept: Counter[str], decontaminator: Decontaminator) -> list[str]:
    notes = [f"source {name}: no row was left after curation" for name in num_rows if not kept[name]]
    if not decontaminator.num_protected:
        notes.append("there is no benchmark, so no prompt was compared with benchmark questions")
    if decontaminator.common_phrases:
        notes.append(
            f"{len(decontaminator.common_phrases)} word n-grams occur in so many benchmark questions "
            "that no prompt was dropped for them"
        )
    return notes
