"""Read one block of a source: parse its rows, and compute the values that later steps compare."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from uuid import uuid4

import numpy as np

from klear_core.artifacts.records import StoredTestsWriter, sizes_of_tests
from klear_core.config.curate import CurateConfig
from klear_core.config.data import GeneratedSource, QuestionSet
from klear_core.config.verify import CodeConfig, MathConfig
from klear_core.data.benchmarks import why_unreadable
from klear_core.data.candidates import Candidate, difficulty_of, dropped_row
from klear_core.data.curation.decontaminate import Decontaminator, Leak
from klear_core.data.curation.near_duplicates import marks_of, near_table
from klear_core.data.curation.normalise import tokens_of
from klear_core.data.curation.segment import (
    PlacedDrop,
    PlacedLeak,
    exact_key,
    keys_array,
    write_rest,
    write_segment,
    written_answers,
)
from klear_core.data.curation.sketch import Numbers, Ragged, joined, ragged
from klear_core.data.curation.work_plan import Block, Plan, SourcePlan, Tasks, load_plan
from klear_core.data.formats.code_rows import QuestionTables
from klear_core.data.formats.fields import READ
from klear_core.data.generated.puzzles import generate
from klear_core.data.sources import read_pieces
from klear_core.seeding import seed_for
from klear_core.types import CodeReference, CustomReference, Difficulty, Dropped, MathReference, Reference, StoredTests

TAGS = tuple(Difficulty)
"""Difficulty tags by their code in the column `tag`."""
NOT_LEAKED, LEAKED, LEAK_DROPPED = range(3)
"""Codes of the column `leak`."""

_MATH, _CODE = MathConfig(), CodeConfig()
_SEGMENT_ROWS = 32_768
_SEGMENT_CHARS = 24 << 20
_CHUNK_ROWS = 512
"""Candidates that are sketched together."""
_CHUNK_CHARS = 1 << 20

Row = Candidate | Dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBlocks(Tasks):
    """The tasks that read the blocks of a plan, one task per block. A result is a folder, renamed when it is whole."""

    folder: Path
    """Folder of the curation's working files."""
    key: str
    """`Plan.key`: a process that runs tasks of several curations tells them apart by it."""

    def is_done(self, task: int) -> bool:
        """Return whether the block was read."""
        return self._result(task).is_dir()

    def do(self, task: int) -> None:
        """Read one block and write its segments."""
        plan, guard = _shared(self.folder, self.key)
        # A unique name, because an earlier attempt at this task that counts as dead may still be writing.
        temporary = self.folder / "reading" / f"{task:05d}-{uuid4().hex}"
        block = plan.blocks[task]
        reader = _Reader(plan, plan.sources[block.source], guard)
        rows = _rows_of(plan, block)
        number = 0
        # A block without rows gets one empty segment, which marks it as read.
        while reader.write(temporary / f"{number:05d}", rows, source=block.source) or not number:
            number += 1
        result = self._result(task)
        result.parent.mkdir(exist_ok=True)
        if not result.exists():
            temporary.rename(result)

    def _result(self, task: int) -> Path:
        return self.folder / "blocks" / f"{task:05d}"


def save_guard(guard: Decontaminator, file: Path) -> None:
    """Write the indexes of protected questions, which take long to build, for the processes that read blocks."""
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(pickle.dumps(guard))
    temporary.replace(file)


@lru_cache(maxsize=1)
def _shared(folder: Path, key: str) -> tuple[Plan, Decontaminator]:
    plan = load_plan(folder / "plan.pickle")
    assert plan.key == key, (plan.key, key)
    guard = pickle.loads((folder / "guard.pickle").read_bytes())  # noqa: S301  the curation's own file
    assert isinstance(guard, Decontaminator)
    return plan, guard


@lru_cache(maxsize=1)
def _question_tables(_key: str, lookup: tuple[tuple[QuestionSet, str], ...]) -> QuestionTables:
    """Return the tables of a source, which several blocks look their questions up in.

    They are remembered under the key of the plan, which changes with the tables' files.
    """
    return QuestionTables(dict(lookup))


def _rows_of(plan: Plan, block: Block) -> Iterator[Row]:
    source_plan = plan.sources[block.source]
    source = source_plan.source
    if isinstance(source, GeneratedSource):
        return generate(source, seed=plan.seed)
    tables = _question_tables(plan.key, tuple(source.lookup.items()))
    return iter(read_pieces(source, block.pieces, source_plan.first, tables))


@dataclass(slots=True)
class _Found:
    """Results for the rows of a segment so far."""

    candidates: list[Candidate] = field(default_factory=list)
    columns: list[dict[str, Numbers | Ragged]] = field(default_factory=list)
    """Columns of each chunk."""
    drops: list[PlacedDrop] = field(default_factory=list)
    leaks: list[PlacedLeak] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    too_long: int = 0
    example: str = ""
    num_rows: int = 0
    num_chars: int = 0


class _Reader:
    def __init__(self, plan: Plan, source: SourcePlan, guard: Decontaminator) -> None:
        self._plan = plan
        self._cfg: CurateConfig = plan.cfg
        self._source = source
        self._guard = guard

    def write(self, folder: Path, rows: Iterator[Row], *, source: int) -> bool:
        """Write a segment of the next rows; return whether it is full, so that there may be more rows."""
        found = _Found()
        # Large tests are only in memory until they are compared.
        with StoredTestsWriter(folder / "large.tests") as tests:
            while found.num_rows < _SEGMENT_ROWS and found.num_chars < _SEGMENT_CHARS:
                chunk = self._next_chunk(rows, found)
                if chunk is None:
                    break
                self._add(chunk, found, tests)
        folder.mkdir(parents=True, exist_ok=True)
        if found.candidates:
            write_segment(folder, found.candidates, _all_rows(found.columns), num_groups=self._plan.num_groups)
        counts = {
            "source": source,
            "num_rows": found.num_rows,
            "num_candidates": len(found.candidates),
            "num_drops": len(found.drops),
            "lost": found.lost,
            "too_long": found.too_long,
            "example": found.example,
        }
        write_rest(folder, found.drops, found.leaks, counts)
        (folder / "large.tests").unlink(missing_ok=True)
        return found.num_rows >= _SEGMENT_ROWS or found.num_chars >= _SEGMENT_CHARS

    def _next_chunk(self, rows: Iterator[Row], found: _Found) -> list[tuple[int, Candidate]] | None:
        """Return the next candidates with their places in the segment; None after the last row."""
        chunk: list[tuple[int, Candidate]] = []
        num_chars = 0
        is_empty = True
        for row in islice(rows, _CHUNK_ROWS):
            is_empty = False
            at, found.num_rows = found.num_rows, found.num_rows + 1
            drop = row if isinstance(row, Dropped) else self._unreadable(row) or self._too_long(row)
            if drop is None:
                assert isinstance(row, Candidate)
                chunk.append((at, row))
                num_chars += len(row.question) + _num_chars(row.reference)
            else:
                found.drops.append(self._placed(drop, row, at))
                found.too_long += drop.step != READ
                if drop.step == READ:
                    found.lost[drop.reason] += 1
                    found.example = found.example or drop.detail
            if num_chars >= _CHUNK_CHARS:
                break
        return None if is_empty else chunk

    def _unreadable(self, candidate: Candidate) -> Dropped | None:
        """Return the drop record of a problem whose answers could never be judged, by the limits of the defaults."""
        why = why_unreadable(candidate.reference, math=_MATH, code=_CODE)
        if not why:
            return None
        detail = f"{candidate.row}: {why}"
        return Dropped(problem_id=candidate.problem_id, step=READ, reason="unreadable_reference", detail=detail)

    def _too_long(self, candidate: Candidate) -> Dropped | None:
        length, most = len(candidate.question), self._cfg.max_question_chars
        if length <= most:
            return None
        detail = f"{candidate.source}: {length} characters, at most {most} are allowed"
        return Dropped(problem_id=candidate.problem_id, step="length", reason="question_too_long", detail=detail)

    def _placed(self, drop: Dropped, row: Row, at: int) -> PlacedDrop:
        # a row that could not be read is known by its place alone
        place = row.row if isinstance(row, Candidate) else row.problem_id
        return PlacedDrop(at=at, drop=dropped_row(drop, source=self._source.name, row=place))

    def _add(self, chunk: Sequence[tuple[int, Candidate]], found: _Found, tests: StoredTestsWriter) -> None:
        if not chunk:
            return
        candidates = [candidate for _, candidate in chunk]
        tokens = [tokens_of(candidate.question) for candidate in candidates]
        leaks = self._guard.leaks_in(candidates, tokens)
        ids = [candidate.problem_id for candidate in candidates]
        answers = [written_answers(candidate) for candidate in candidates]
        tags = [TAGS.index(difficulty_of(candidate.rating, self._cfg.difficulty)) for candidate in candidates]
        order = [seed_for(self._plan.seed, "data/shuffle", problem_id) for problem_id in ids]
        keys = [exact_key(*both, self._cfg.dedup) for both in zip(candidates, tokens, strict=True)]
        leak_codes = [_leak_code(leak) for leak in leaks]
        places = [at for at, _ in chunk]
        numbers = [int(problem_id, 16) for problem_id in ids]
        sorted_answers = [sorted(a or ()) for a in answers]
        is_math = [a is not None for a in answers]
        columns: dict[str, Numbers | Ragged] = {
            "at": np.array(places, dtype=np.uint32),
            "key": keys_array(keys),
            "problem_id": np.array(numbers, dtype=np.uint64),
            "order": np.array(order, dtype=np.uint64),
            "tag": np.array(tags, dtype=np.uint8),
            "leak": np.array(leak_codes, dtype=np.uint8),
            "answers": ragged(sorted_answers, np.uint64),
            "is_math": np.array(is_math, dtype=np.bool_),
            "is_solved": np.array([bool(candidate.solution) for candidate in candidates], dtype=np.bool_),
        }
        if self._cfg.dedup.near.enabled:
            columns |= self._sketched(candidates, tokens)
        first = len(found.candidates)
        found.leaks += [PlacedLeak(index=first + i, leak=leak) for i, leak in enumerate(leaks) if leak]
        found.columns.append(columns)
        found.candidates += [_with_stored_tests(c, tests) for c in candidates]
        found.num_chars += sum(len(c.question) + _num_chars(c.reference) for c in found.candidates[first:])

    def _sketched(self, candidates: Sequence[Candidate], tokens: Iterable[list[str]]) -> dict[str, Numbers | Ragged]:
        # A question without a token (`?`) is compared as it stands.
        bare = [self._source.templates.bare(t) or [c.question] for c, t in zip(candidates, tokens, strict=True)]
        marks = [marks_of(candidate.question, candidate.reference) for candidate in candidates]
        table = near_table(bare, [candidate.domain for candidate in candidates], marks, self._cfg.dedup.near)
        return {
            "shingles": table.shingles,
            "bands": table.band_keys_BN,
            "facts": table.facts_N,
            "num_facts": table.num_facts_N,
            "asked": table.asked,
            "told": table.told,
        }


def _with_stored_tests(candidate: Candidate, tests: StoredTestsWriter) -> Candidate:
    stored = tests.stored(candidate.reference)
    return candidate if stored is candidate.reference else replace(candidate, reference=stored)


def _leak_code(leak: Leak | None) -> int:
    """Return the code of a candidate in the column `leak`."""
    if leak is None:
        return NOT_LEAKED
    return LEAK_DROPPED if leak.is_dropped else LEAKED


def _all_rows(chunks: Sequence[dict[str, Numbers | Ragged]]) -> dict[str, Numbers | Ragged]:
    """Return the columns of all chunks as one; band keys have their candidates on the second axis."""
    columns: dict[str, Numbers | Ragged] = {}
    for name in chunks[0]:
        parts = [chunk[name] for chunk in chunks]
        lists = [part for part in parts if isinstance(part, Ragged)]
        if lists:
            columns[name] = joined(lists)
            continue
        arrays = [part for part in parts if not isinstance(part, Ragged)]
        columns[name] = np.concatenate(arrays, axis=-1 if name == "bands" else 0)
    return columns


def _num_chars(reference: Reference) -> int:
    """Return the size of a reference in memory, roughly."""
    match reference:
        case MathReference(answers=answers):
            return sum(map(len, answers))
        case CodeReference(tests=tests) if not isinstance(tests, StoredTests):
            return sum(sizes_of_tests(tests))
        case CustomReference(value_json=text):
            return len(text)
        case _:
            return 0
