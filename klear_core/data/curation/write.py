"""Write the problems in their shuffled order, the drop records in the order of the rows, and the leaks."""

from __future__ import annotations

import shutil
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import islice
from pathlib import Path

import numpy as np

from klear_core.artifacts.records import shard_name, write_shard
from klear_core.data.candidates import Candidate, DroppedRow, SourceRow, problem_from
from klear_core.data.curation.decontaminate import Leak, drop_of
from klear_core.data.curation.merge import LEAK, NOT_SELECTED, STAYS, Merged, drops_of, load_merged, selection_drops
from klear_core.data.curation.near_duplicates import Ranks
from klear_core.data.curation.segment import Segments, groups_of, open_segments
from klear_core.data.curation.sketch import Numbers
from klear_core.data.curation.work_plan import Plan, Tasks, load_plan

_ROWS_PER_TASK = 16_384

PROBLEMS, ROWS, DROPPED, LEAKS = "problems", "rows", "dropped", "leaks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The division of a table into shards and of these into tasks."""

    num_rows: int
    rows_per_shard: int

    @property
    def count(self) -> int:
        """Return the number of shards, at least one."""
        return max(1, -(-self.num_rows // self.rows_per_shard))

    @property
    def per_task(self) -> int:
        """Return the number of shards that one task writes."""
        return max(1, _ROWS_PER_TASK // self.rows_per_shard)

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks."""
        return -(-self.count // self.per_task)

    def of_task(self, task: int) -> range:
        """Return the shards of a task."""
        return range(task * self.per_task, min(self.count, (task + 1) * self.per_task))

    def rows(self, shards: range) -> slice:
        """Return the rows in consecutive shards."""
        return slice(shards.start * self.rows_per_shard, min(self.num_rows, shards.stop * self.rows_per_shard))


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteProblems(Tasks):
    """The tasks that write `problems` and `rows`, each some consecutive shards of the shuffled order."""

    folder: Path
    shards: Shards

    def is_done(self, task: int) -> bool:
        """Return whether the task's shards were written; those of `rows` come last."""
        return all(self._file(ROWS, shard).exists() for shard in self.shards.of_task(task))

    def do(self, task: int) -> None:
        """Write some shards."""
        state = open_state(self.folder)
        shards = self.shards.of_task(task)
        rows = self.shards.rows(shards)
        candidates = candidates_of(state, np.array(state.merged.kept[rows]))
        for shard in shards:
            part = self.shards.rows(range(shard, shard + 1))
            own = candidates[part.start - rows.start : part.stop - rows.start]
            write_shard(self._file(PROBLEMS, shard), [problem_from(c, state.plan.cfg.difficulty) for c in own])
            source_rows = [SourceRow(problem_id=c.problem_id, source=c.source, row=c.row) for c in own]
            write_shard(self._file(ROWS, shard), source_rows)

    def _file(self, table: str, shard: int) -> Path:
        return self.folder / "written" / table / shard_name(shard, self.shards.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDropped(Tasks):
    """The tasks that write `dropped`, each some consecutive shards."""

    folder: Path
    shards: Shards

    def is_done(self, task: int) -> bool:
        """Return whether the task's shards were written."""
        return all(self._file(shard).exists() for shard in self.shards.of_task(task))

    def do(self, task: int) -> None:
        """Write some shards."""
        state = open_state(self.folder)
        shards = self.shards.of_task(task)
        rows = self.shards.rows(shards)
        drops = _drops(state, rows)
        for shard in shards:
            write_shard(self._file(shard), list(islice(drops, self.shards.rows_per_shard)))

    def _file(self, shard: int) -> Path:
        return self.folder / "written" / DROPPED / shard_name(shard, self.shards.count)


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Everything that the tasks which write the result read: plan, segments and outcomes."""

    plan: Plan
    segments: Segments
    merged: Merged
    folder: Path

    def not_selected(self) -> Iterator[DroppedRow]:
        """Yield the drop records of the candidates that were not selected."""
        for number in range(len(self.segments.parts)):
            yield from (placed.drop for placed in selection_drops(self.folder, number))


def open_state(folder: Path) -> State:
    """Return the state of a curation that has been merged."""
    return State(load_plan(folder / "plan.pickle"), open_segments(folder / "blocks"), load_merged(folder), folder)


def num_drops(state: State) -> Ranks:
    """Return the number of rows of each segment that became no problem."""
    counts = [part.num_drops + int((state.merged.outcome_N[own] != STAYS).sum()) for part, own in state.segments.each()]
    return np.array(counts, dtype=np.int64)


def leaks_in(state: State) -> Iterator[Leak]:
    """Yield all leaks in order of rank, except those of dropped repeats and near-duplicates."""
    for segment, own in state.segments.each():
        outcome_N = state.merged.outcome_N[own]
        for placed in segment.leaks():
            if outcome_N[placed.index] in (STAYS, LEAK, NOT_SELECTED):
                yield placed.leak


def candidates_of(state: State, numbers: Ranks) -> list[Candidate]:
    """Return candidates in the order of their numbers. Each file is read once."""
    part_of = np.searchsorted(state.segments.starts, numbers, side="right") - 1
    found: list[Candidate | None] = [None] * len(numbers)
    for part in np.unique(part_of).tolist():
        segment = state.segments.parts[part]
        own = np.flatnonzero(part_of == part)
        indices = numbers[own] - state.segments.starts[part]
        group_N = groups_of(segment.column("order"), state.plan.num_groups)
        place_N = _places_in_groups(group_N)
        for group in np.unique(group_N[indices]).tolist():
            in_group = group_N[indices] == group
            candidates = segment.in_group(group, place_N[indices[in_group]].tolist())
            for place, candidate in zip(own[in_group].tolist(), candidates, strict=True):
                found[place] = candidate
    return [candidate for candidate in found if candidate is not None]


def _places_in_groups(group_N: Numbers) -> Ranks:
    """Return the place of each candidate among those of its group."""
    order = np.argsort(group_N, kind="stable")
    starts = np.searchsorted(group_N[order], group_N[order])  # where each sorted candidate's group begins
    place_N: Ranks = np.empty(len(group_N), dtype=np.int64)
    place_N[order] = np.arange(len(order)) - starts
    return place_N


def _drops(state: State, rows: slice) -> Iterator[DroppedRow]:
    """Yield a range of all drop records."""
    ends = np.cumsum(num_drops(state))
    for number, end in enumerate(ends.tolist()):
        start = int(ends[number - 1]) if number else 0
        if start < rows.stop and rows.start < end:
            drops = drops_of(state.plan, state.segments, state.merged, number, state.folder)
            assert len(drops) == end - start, (number, len(drops), end - start)
            yield from drops[max(0, rows.start - start) : rows.stop - start]


# ---- leak table ----
# Write the prompts that overlap with benchmark questions beside the questions, for a person to judge.


LEAKS_PAGE = "leaks.html"

_SHOWN_PER_KIND = 20
"""Rows of the page for each set of rules and each benchmark; the Parquet file has all."""
_SHOWN_CHARS = 600

_HEAD = """<!doctype html><meta charset="utf-8"><title>Prompts like benchmark questions</title>
<style>body{font:14px sans-serif;margin:2em}table{border-collapse:collapse;width:100%}
td,th{border:1px solid #ccc;padding:6px;vertical-align:top;text-align:left}td.text{width:38%;white-space:pre-wrap}
</style><h1>Prompts like benchmark questions</h1>
"""


@dataclass(slots=True)
class LeakCounts:
    """Numbers of leaks."""

    num_leaks: int = 0
    num_by_rules: Counter[str] = field(default_factory=Counter)
    """By `Leak.rules`."""
    num_dropped: Counter[str] = field(default_factory=Counter)
    """Dropped prompts by reason."""


def write_leaks(folder: Path, leaks: Iterable[Leak], *, rows_per_shard: int) -> LeakCounts:
    """Write all leaks to `leaks/*.parquet`, and some of every kind to `leaks.html`; return their numbers."""
    counts = LeakCounts()
    shown = _Shown()
    shutil.rmtree(folder / "leaks", ignore_errors=True)
    parts: list[Path] = []
    rows = iter(leaks)
    while (shard := list(islice(rows, rows_per_shard))) or not parts:
        parts.append(folder / "leaks" / f"{len(parts):05d}.parquet")
        write_shard(parts[-1], shard)
        for leak in shard:
            counts.num_leaks += 1
            counts.num_by_rules[leak.rules] += 1
            if leak.is_dropped:
                counts.num_dropped[drop_of(leak).reason] += 1
            shown.add(leak)
    # Only now is it known how many shards there are.
    for i, part in enumerate(parts):
        part.replace(part.with_name(shard_name(i, len(parts))))
    (folder / LEAKS_PAGE).write_text(shown.page(counts), encoding="utf-8", errors="replace")
    return counts


class _Shown:
    """The first leaks of each kind, in the order of their problems' ids."""

    def __init__(self) -> None:
        self._of_kind: dict[tuple[str, str], list[Leak]] = defaultdict(list)
        self._num_of_kind: Counter[tuple[str, str]] = Counter()

    def add(self, leak: Leak) -> None:
        """Take note of a leak."""
        kind = (leak.rules, leak.benchmark)
        self._num_of_kind[kind] += 1
        shown = self._of_kind[kind]
        insort(shown, leak, key=lambda leak: leak.problem_id)
        del shown[_SHOWN_PER_KIND:]

    def page(self, counts: LeakCounts) -> str:
        """Return the page."""
        rows = ["<table><tr><th>rules, benchmark<th>shared<th>prompt<th>benchmark question</tr>"]
        for kind, shown in sorted(self._of_kind.items()):
            rows += [_row(leak) for leak in shown]
            num_more = self._num_of_kind[kind] - len(shown)
            if num_more:
                rows.append(f"<tr><td colspan=4>and {num_more} more like these</tr>")
        num_dropped = counts.num_dropped.total()
        summary = f"<p>{counts.num_leaks} prompts match at least one rule; {num_dropped} were dropped.</p>\n"
        return _HEAD + summary + "\n".join(rows) + "</table>\n"


def _row(leak: Leak) -> str:
    state = "dropped" if leak.is_dropped else "kept"
    cells = (
        f"<td>{escape(leak.rules)}<br><b>{state}</b><br>{escape(leak.benchmark)} {escape(leak.question_id)}<br>"
        f"{escape(leak.source)} {leak.problem_id}</td>",
        f"<td>{leak.num_shared} times {escape(leak.shared)}</td>",
        f'<td class="text">{escape(leak.prompt[:_SHOWN_CHARS])}</td>',
        f'<td class="text">{escape(leak.question[:_SHOWN_CHARS])}</td>',
    )
    return f"<tr>{''.join(cells)}</tr>"
