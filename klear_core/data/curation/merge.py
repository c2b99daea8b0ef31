"""Decide which candidates of all blocks stay: drop repeats, near-duplicates and leaks, then select.

Axis letters: N candidates, P pairs.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from klear_core.artifacts.records import read_shard, write_shard
from klear_core.config.curate import NearConfig
from klear_core.data.candidates import DroppedRow, dropped_row
from klear_core.data.curation.decontaminate import drop_of
from klear_core.data.curation.near_duplicates import Compared, NearDuplicates, Ranks, candidate_pairs, compare, decide
from klear_core.data.curation.read import LEAK_DROPPED
from klear_core.data.curation.segment import PlacedDrop, Segment, Segments, contradict, first_with_key, open_segments
from klear_core.data.curation.selection import Pool, select_problems
from klear_core.data.curation.sketch import Numbers
from klear_core.data.curation.work_plan import Plan, Tasks
from klear_core.types import Dropped

STAYS, REPEAT, NEAR, LEAK, NOT_SELECTED = range(5)
"""Codes of the outcomes of candidates."""

_PAIRS_PER_TASK = 50_000

RunTasks = Callable[[str, Any, int], None]
"""Runs the named tasks with the numbers 0 to n-1."""


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """The outcome of each candidate: it stays, or why it was dropped. Arrays are mapped into memory."""

    outcome_N: Numbers
    original_N: Numbers
    """For a repeat or a near-duplicate the candidate that stays in its place; else -1."""
    similarity_N: Numbers
    """For a near-duplicate its similarity to that candidate; else 0."""
    kept: Ranks
    """The candidates that stay, in the order of the shuffled result."""
    noted: dict[str, int]
    """Counts of the ledger's step `dedup`."""
    notes: list[str]
    """Warnings of the selection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePairs(Tasks):
    """The tasks that compare questions which share a MinHash band."""

    folder: Path
    cfg: NearConfig
    num_pairs: int

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks."""
        return -(-self.num_pairs // _PAIRS_PER_TASK)

    def is_done(self, task: int) -> bool:
        """Return whether the task's pairs were compared."""
        return self._result(task).exists()

    def do(self, task: int) -> None:
        """Compare some pairs."""
        segments = open_segments(self.folder / "blocks")
        pairs_P = np.load(self.folder / "pairs.npy", mmap_mode="r")
        part = np.array(pairs_P[task * _PAIRS_PER_TASK : (task + 1) * _PAIRS_PER_TASK])
        compared = compare(segments.near_tables(), part, self.cfg)
        temporary = self._result(task).with_suffix(".tmp.npz")
        temporary.parent.mkdir(exist_ok=True)
        np.savez(temporary, similarity=compared.similarity_P, code=compared.code_P)
        temporary.replace(self._result(task))

    def result(self) -> Compared:
        """Return the results of all tasks."""
        loaded = [np.load(self._result(task)) for task in range(self.num_tasks)]
        similarity_P = [part["similarity"] for part in loaded]
        code_P = [part["code"] for part in loaded]
        if not loaded:
            return Compared(np.empty(0), np.empty(0, dtype=np.uint8))
        return Compared(np.concatenate(similarity_P), np.concatenate(code_P))

    def _result(self, task: int) -> Path:
        return self.folder / "compared" / f"{task:05d}.npz"


def merge(plan: Plan, segments: Segments, folder: Path, run_tasks: RunTasks) -> Merged:
    """Return the outcomes of all candidates, and store them in `folder / "merged"`, from which a rerun reads them."""
    result = folder / "merged"
    if not result.is_dir():
        _write(_decide_candidates(plan, segments, folder, run_tasks), result)
    return load_merged(folder)


def load_merged(folder: Path) -> Merged:
    """Return the outcomes that `merge` has stored."""
    result = folder / "merged"
    arrays = {name: np.load(result / f"{name}.npy", mmap_mode="r") for name in ("fate", "of", "similarity", "kept")}
    counts = json.loads((result / "counts.json").read_text())
    return Merged(arrays["fate"], arrays["of"], arrays["similarity"], arrays["kept"], **counts)


def selection_drops(folder: Path, segment: int) -> list[PlacedDrop]:
    """Return the drop records of a segment's candidates that were not selected."""
    file = folder / "merged" / "select" / f"{segment:05d}.parquet"
    return read_shard(file, PlacedDrop) if file.exists() else []


@dataclass(slots=True, eq=False)
class _Outcomes:
    """The arrays of `Merged` while the steps fill them in."""

    outcome_N: npt.NDArray[np.uint8]
    original_N: Ranks
    similarity_N: npt.NDArray[np.float64]

    def left(self) -> Ranks:
        """Return the candidates that no step has dropped so far."""
        return np.flatnonzero(self.outcome_N == STAYS)


@dataclass(frozen=True, slots=True, eq=False)
class _Decisions:
    outcomes: _Outcomes
    kept: Ranks
    noted: dict[str, int]
    notes: tuple[str, ...]
    not_selected: Mapping[int, Sequence[PlacedDrop]]
    """Drop records by segment."""


def _decide_candidates(plan: Plan, segments: Segments, folder: Path, run_tasks: RunTasks) -> _Decisions:
    num = segments.num_candidates
    outcomes = _Outcomes(np.zeros(num, dtype=np.uint8), np.full(num, -1, dtype=np.int64), np.zeros(num))
    noted: dict[str, int] = {}
    notes: tuple[str, ...] = ()
    not_selected: Mapping[int, Sequence[PlacedDrop]] = {}
    if num:
        noted = _drop_repeats(plan, segments, outcomes)
        if plan.cfg.dedup.near.enabled:
            noted |= _drop_near(plan, segments, outcomes, folder, run_tasks)
        # After the search for copies, so that a reworded copy of a leak, which no rule may match, is dropped too.
        is_leak_N = segments.column("leak") == LEAK_DROPPED
        outcomes.outcome_N[(outcomes.outcome_N == STAYS) & is_leak_N] = LEAK
        if plan.cfg.select.is_on:
            not_selected, notes = _select(plan, segments, outcomes)
    left = outcomes.left()
    # Sorting by a seeded hash of the id shuffles: a problem's sort key does not depend on the other problems.
    order = segments.column("order")[left] if num else left
    return _Decisions(outcomes, left[np.argsort(order, kind="stable")], noted, notes, not_selected)


def _drop_repeats(plan: Plan, segments: Segments, outcomes: _Outcomes) -> dict[str, int]:
    first_N = first_with_key(segments.column("key"))
    repeats = np.flatnonzero(first_N != np.arange(len(first_N)))
    outcomes.outcome_N[repeats] = REPEAT
    outcomes.original_N[repeats] = first_N[repeats]
    num_repeats: Counter[str] = Counter()
    for segment, own in segments.each():
        num_repeats[plan.sources[segment.source].name] += int((outcomes.outcome_N[own] == REPEAT).sum())
    noted = {f"repeats_in_{name}": n for name, n in sorted(num_repeats.items()) if n}
    pairs = zip(repeats.tolist(), first_N[repeats].tolist(), strict=True)
    noted["repeats_with_another_answer"] = sum(has_another_answer(segments, *pair) for pair in pairs)
    return noted


def has_another_answer(segments: Segments, repeat: int, first: int) -> bool:
    """Return whether a repeat's answer, compared as text, differs from the first one's."""
    (segment, index), (other, other_index) = segments.place(repeat), segments.place(first)
    return contradict(segment.answers[index], other.answers[other_index])


def _drop_near(
    plan: Plan, segments: Segments, outcomes: _Outcomes, folder: Path, run_tasks: RunTasks
) -> dict[str, int]:
    cfg = plan.cfg.dedup.near
    pairs_P = candidate_pairs(segments.near_tables(), outcomes.left(), cfg)
    pairs_file = folder / "pairs.npy"
    temporary = folder / "pairs.tmp.npy"
    np.save(temporary, pairs_P)
    temporary.replace(pairs_file)
    tasks = ComparePairs(folder=folder, cfg=cfg, num_pairs=len(pairs_P))
    run_tasks("comparing", tasks, tasks.num_tasks)
    found: NearDuplicates = decide(pairs_P, tasks.result())
    for rank, copy in found.copies.items():
        outcomes.outcome_N[rank] = NEAR
        outcomes.original_N[rank] = copy.of
        outcomes.similarity_N[rank] = copy.similarity
    return dict(sorted(found.kept.items()))


def _select(
    plan: Plan, segments: Segments, outcomes: _Outcomes
) -> tuple[Mapping[int, Sequence[PlacedDrop]], tuple[str, ...]]:
    """Drop what is not selected; return the drop records by segment, and warnings."""
    left = outcomes.left()
    ids = segments.column("problem_id")[left]
    sources: list[str] = []
    for segment, own in segments.each():
        sources += [plan.sources[segment.source].name] * int((outcomes.outcome_N[own] == STAYS).sum())
    stays_N = outcomes.outcome_N == STAYS
    pool = Pool(
        problem_ids=[f"{problem_id:016x}" for problem_id in ids.tolist()],
        sources=sources,
        questions=lambda: _questions(segments, stays_N),
    )
    selection = select_problems(plan.cfg.select, pool, seed=plan.seed)
    not_selected: dict[int, list[PlacedDrop]] = {}
    number = 0
    for part, (segment, own) in enumerate(segments.each()):
        for index in np.flatnonzero(stays_N[own]).tolist():
            drop = selection.drop_of(number)
            number += 1
            if drop is not None:
                outcomes.outcome_N[own.start + index] = NOT_SELECTED
                placed = PlacedDrop(at=index, drop=_dropped_row(drop, segment, index, plan))
                not_selected.setdefault(part, []).append(placed)
    return not_selected, tuple(selection.notes)


def _questions(segments: Segments, stays_N: npt.NDArray[np.bool_]) -> Iterable[str]:
    """Yield the questions of the candidates that stay, in order of rank."""
    for segment, own in segments.each():
        for index in np.flatnonzero(stays_N[own]).tolist():
            yield segment.question(index)


def _write(decisions: _Decisions, result: Path) -> None:
    temporary = result.with_name(result.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    np.save(temporary / "fate.npy", decisions.outcomes.outcome_N)
    np.save(temporary / "of.npy", decisions.outcomes.original_N)
    np.save(temporary / "similarity.npy", decisions.outcomes.similarity_N)
    np.save(temporary / "kept.npy", decisions.kept)
    for segment, drops in decisions.not_selected.items():
        write_shard(temporary / "select" / f"{segment:05d}.parquet", drops)
    (temporary / "counts.json").write_text(json.dumps({"noted": decisions.noted, "notes": decisions.notes}))
    temporary.rename(result)


def drops_of(plan: Plan, segments: Segments, merged: Merged, number: int, folder: Path) -> list[DroppedRow]:
    """Return the drop records of one segment in the order of its rows."""
    segment = segments.parts[number]
    drops = [(placed.at, placed.drop) for placed in segment.drops()]
    if segment.num_candidates:
        at_N = segment.column("at")
        start = int(segments.starts[number])
        outcome_N = merged.outcome_N[start : start + segment.num_candidates]
        for index in np.flatnonzero((outcome_N == REPEAT) | (outcome_N == NEAR)).tolist():
            drop = _copy_drop(plan, segments, merged, start + index)
            drops.append((int(at_N[index]), _dropped_row(drop, segment, index, plan)))
        for placed in segment.leaks():
            if outcome_N[placed.index] == LEAK:
                row = _dropped_row(drop_of(placed.leak), segment, placed.index, plan)
                drops.append((int(at_N[placed.index]), row))
        drops += [(int(at_N[placed.at]), placed.drop) for placed in selection_drops(folder, number)]
    return [drop for _, drop in sorted(drops, key=lambda placed: placed[0])]


def _copy_drop(plan: Plan, segments: Segments, merged: Merged, candidate: int) -> Dropped:
    original = int(merged.original_N[candidate])
    (segment, index), (other, other_index) = segments.place(candidate), segments.place(original)
    source, other_source = (plan.sources[s.source].name for s in (segment, other))
    problem_id, matched_id = segment.problem_id(index), other.problem_id(other_index)
    if merged.outcome_N[candidate] == REPEAT:
        detail = f"{source}: same question as {matched_id} of {other_source}"
        if has_another_answer(segments, candidate, original):
            detail += ", another answer"
        reason = "repeated_question"
    else:
        alike = f"{100 * merged.similarity_N[candidate]:.0f} % like {matched_id} of {other_source}"
        detail = f"{source}: {alike}: {other.question(other_index)[:200]!r}"
        reason = "near_duplicate"
    return Dropped(problem_id=problem_id, step="dedup", reason=reason, detail=detail, matched_id=matched_id)


def _dropped_row(drop: Dropped, segment: Segment, index: int, plan: Plan) -> DroppedRow:
    return dropped_row(drop, source=plan.sources[segment.source].name, row=segment.row(index))
