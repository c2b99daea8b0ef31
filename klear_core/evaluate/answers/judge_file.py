"""Judge a file of answers, for `klear judge`. Rows are streamed: judging starts before the last row is read."""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from klear_core.artifacts.records import load_tests, sizes_of_tests
from klear_core.config.verify import VerifyConfig
from klear_core.data.formats.references import reference_from_cell
from klear_core.data.readers import BrokenRow, FileRow, read_rows
from klear_core.errors import DataError
from klear_core.types import CodeReference, CustomReference, Difficulty, Outcome, Problem, Reference, Verdict, domain_of
from klear_core.verify import user_code
from klear_core.verify.blame import JudgeHealth
from klear_core.verify.judge_pool import JudgePool

_ROW_KEYS = {"id", "response", "reference"}
_BROKEN = {"not_json": "not JSON", "not_utf8": "not UTF-8", "not_an_object": "a row must be an object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """An invalid row; `line` is its line in JSONL, its number in other files, both from 1."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSummary:
    """Counts of a file's rows by outcome; `num_rows` is the sum of `outcomes` and the bad rows."""

    num_rows: int
    outcomes: dict[Outcome, int]
    num_full_score: int
    mean_score: float | None
    """Mean over the verdicts with `counts_for_model`; None if there is none."""
    bad_rows: tuple[BadRow, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnswerRow:
    answer_id: str
    response: str
    reference: Reference


@dataclass(slots=True)
class _Reader:
    """Reads the answers of a file, counts its rows, and keeps the invalid ones."""

    path: Path
    judges: Set[str]
    num_rows: int = 0
    bad_rows: list[BadRow] = field(default_factory=list)

    def answers(self) -> Iterator[_AnswerRow]:
        """Yield the answers of the valid rows."""
        for row in read_rows(self.path, label=self.path.name):
            self.num_rows += 1
            answer = _answer_of(row, judges=self.judges)
            if isinstance(answer, BadRow):
                self.bad_rows.append(answer)
            else:
                yield answer


def judge_file(
    path: Path,
    cfg: VerifyConfig,
    *,
    out: Path | None = None,
    bare_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> JudgeSummary:
    """Judge the rows of a data file (`id`, `response`, `reference`); with `out`, write a row per answer.

    `bare_code`: a code row's `response` is the program itself. `progress(judged, read)` is called after each verdict.
    Raise DataError if the file is not there or damaged (invalid rows are only counted), ConfigError if it is of an
    unknown kind or a judge of the user's own cannot be used; JudgeError and SandboxError as `JudgePool.judge` does.
    """
    if not path.is_file():
        raise DataError(f"{path}: {'a folder' if path.is_dir() else 'no such file'}; `klear judge` takes one file")
    user_code.check_judges(cfg.judges)
    reader = _Reader(path, {judge.name for judge in cfg.all_judges})
    # Verdicts alone are kept until the end; responses and tests are dropped when they are judged.
    verdicts: list[tuple[str, Verdict]] = []
    with JudgePool(cfg) as pool:
        submitted = (_submitted(pool, answer, bare_code=bare_code) for answer in reader.answers())
        for answer_id, verdict in verdicts_in_order(submitted, pool.health):
            verdicts.append((answer_id, verdict))
            if progress is not None:
                progress(len(verdicts), reader.num_rows)
        notes = pool.notes
    if out is not None:
        _write(out, verdicts)
    return _summary(reader.num_rows, verdicts, reader.bad_rows, notes)


def _submitted(pool: JudgePool, answer: _AnswerRow, *, bare_code: bool) -> Submitted[str]:
    num_chars = _num_chars(answer)
    verdict = _submit(pool, answer, bare_code=bare_code)
    return Submitted(answer=answer.answer_id, verdict=verdict, num_chars=num_chars)


def _num_chars(answer: _AnswerRow) -> int:
    """Return about how much memory judging an answer takes: the size of its response and tests."""
    if not isinstance(answer.reference, CodeReference):
        return len(answer.response)
    return len(answer.response) + sum(sizes_of_tests(load_tests(answer.reference)))


def _submit(pool: JudgePool, answer: _AnswerRow, *, bare_code: bool) -> Future[Verdict]:
    if bare_code and isinstance(answer.reference, CodeReference):
        return pool.submit_program(answer.answer_id, answer.reference, answer.response)
    problem = Problem(
        problem_id=answer.answer_id,
        source="file",
        domain=domain_of(answer.reference),
        question="",
        reference=answer.reference,
        difficulty=Difficulty.UNKNOWN,
    )
    return pool.submit(problem, answer.response)


def _answer_of(row: FileRow | BrokenRow, *, judges: Set[str]) -> _AnswerRow | BadRow:
    try:
        return _parsed(row, judges=judges)
    except DataError as e:
        number = re.search(r"\d+$", row.where)
        assert number is not None, row.where
        return BadRow(line=int(number[0]), reason=str(e))


def _parsed(row: FileRow | BrokenRow, *, judges: Set[str]) -> _AnswerRow:
    """Return the answer in a row. Raise DataError if there is none."""
    if isinstance(row, BrokenRow):
        raise DataError(f"{_BROKEN.get(row.reason, row.reason)}: {row.detail}")
    if set(row.fields) != _ROW_KEYS:
        raise DataError(_wrong_keys(set(row.fields)))
    answer_id, response = row.fields["id"], row.fields["response"]
    if not isinstance(answer_id, str | int) or isinstance(answer_id, bool):
        raise DataError(f"id must be text or an integer, not {answer_id!r:.80}")
    if not isinstance(response, str):
        raise DataError(f"response of {answer_id} must be text, not {type(response).__name__}")
    try:
        reference = reference_from_cell(row.fields["reference"])
    except DataError as e:
        raise DataError(f"reference of {answer_id}: {e}") from e
    if isinstance(reference, CustomReference) and reference.judge not in judges:
        has = ", ".join(sorted(judges)) or "none"
        raise DataError(f"reference of {answer_id}: verify.judges has {has}, and not {reference.judge!r}")
    return _AnswerRow(answer_id=str(answer_id), response=response, reference=reference)


def _wrong_keys(keys: set[str]) -> str:
    missing, unknown = sorted(_ROW_KEYS - keys), sorted(keys - _ROW_KEYS)
    faults: list[str] = []
    if missing:
        faults.append(f"missing {missing}")
    if unknown:
        faults.append(f"unknown {unknown[:8]}")
    return f"keys {' and '.join(faults)}; a row has exactly {sorted(_ROW_KEYS)}"


def _write(out: Path, verdicts: list[tuple[str, Verdict]]) -> None:
    rows = [_written(answer_id, verdict) for answer_id, verdict in verdicts]
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(out.name + ".tmp")
    if out.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        # Without a schema a column of nulls alone, such as the scores of failed judgements, would have no type.
        schema = pa.schema(
            [("id", pa.string()), ("outcome", pa.string()), ("score", pa.float64()), ("detail", pa.string())]
        )
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), beside, compression="zstd")
    else:
        beside.write_text("".join(json.dumps(row) + "\n" for row in rows))
    beside.replace(out)


def _written(answer_id: str, verdict: Verdict) -> dict[str, object]:
    """Return an output row; `score` is null if the outcome says nothing about the model."""
    score = verdict.score if verdict.outcome.counts_for_model else None
    return {"id": answer_id, "outcome": verdict.outcome.value, "score": score, "detail": verdict.detail}


def _summary(
    num_rows: int, verdicts: list[tuple[str, Verdict]], bad_rows: list[BadRow], notes: tuple[str, ...]
) -> JudgeSummary:
    scores = [verdict.score for _, verdict in verdicts if verdict.outcome.counts_for_model]
    outcomes = Counter(verdict.outcome for _, verdict in verdicts)
    return JudgeSummary(
        num_rows=num_rows,
        outcomes=dict(outcomes),
        num_full_score=scores.count(1.0),
        mean_score=sum(scores) / len(scores) if scores else None,
        bad_rows=tuple(bad_rows),
        notes=notes,
    )


# ---- in order ----
# Judge many answers at a time and return their verdicts in the order of the answers.


_IN_FLIGHT = 512
"""Answers submitted at a time: bounds how many responses are in memory."""
_IN_FLIGHT_CHARS = 64 << 20
"""Characters of responses and tests submitted at a time: tests of one problem may have hundreds of kilobytes."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted(Generic[T]):
    """An answer whose judging has begun."""

    answer: T
    verdict: Future[Verdict]
    num_chars: int
    """Characters of its response and tests that are in memory until it is judged."""


def verdicts_in_order(submitted: Iterable[Submitted[T]], health: JudgeHealth) -> Iterator[tuple[T, Verdict]]:
    """Yield every answer with its verdict, in order, and count the verdict in `health`.

    Memory stays bounded if `submitted` is a generator that submits an answer when it is asked for the next one.
    """
    waiting: deque[Submitted[T]] = deque()
    chars_in_flight = 0
    for item in submitted:
        waiting.append(item)
        chars_in_flight += item.num_chars
        # Take from the front only, so that the order is kept.
        # Limits make the loop wait for the oldest answer; one that is judged already is passed on without a wait.
        while waiting and (
            len(waiting) >= _IN_FLIGHT or chars_in_flight > _IN_FLIGHT_CHARS or waiting[0].verdict.done()
        ):
            oldest = waiting.popleft()
            chars_in_flight -= oldest.num_chars
            yield _counted(oldest, health)
    while waiting:
        yield _counted(waiting.popleft(), health)


def _counted(item: Submitted[T], health: JudgeHealth) -> tuple[T, Verdict]:
    verdict = item.verdict.result()
    health.record(verdict)
    return item.answer, verdict
