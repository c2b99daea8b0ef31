"""Judge a file of answers, for `klear judge`. Rows are streamed: judging starts before the last row is read."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.tests_file import load_tests, sizes_of_tests
from klear_core.config.verify import VerifyConfig
from klear_core.data.references import reference_from_json
from klear_core.data.rowfiles import parquet_batches
from klear_core.errors import DataError
from klear_core.types import CodeReference, CustomReference, Difficulty, Outcome, Problem, Reference, Verdict, domain_of
from klear_core.verify import user_code
from klear_core.verify.pool import JudgePool, build_judge_pool

_IN_FLIGHT = 512  # answers submitted at a time: bounds how many responses are in memory
_IN_FLIGHT_CHARS = 64 << 20
"""Characters of responses and tests submitted at a time: tests of one problem may have hundreds of kilobytes."""
_ROW_KEYS = {"id", "response", "reference"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """An invalid row; `line` counts from 1."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    answer_id: str
    verdict: Future[Verdict]
    num_chars: int


def judge_file(
    path: Path,
    cfg: VerifyConfig,
    *,
    out: Path | None = None,
    bare_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> JudgeSummary:
    """Judge the rows of a JSONL or Parquet file (`id`, `response`, `reference`); with `out`, write a row per answer.

    `bare_code`: a code row's `response` is the program itself. `progress(judged, read)` is called after each verdict.
    Raise DataError if the file cannot be read (invalid rows are only counted), ConfigError if a judge of the user's own
    cannot be used; JudgeError and SandboxError as `JudgePool.judge` does.
    """
    user_code.check_judges(cfg.judges)
    bad_rows: list[BadRow] = []
    verdicts: list[tuple[str, Verdict]] = []
    waiting: deque[_Waiting] = deque()
    num_rows = chars_in_flight = 0

    with build_judge_pool(cfg) as pool:

        def take_oldest() -> None:
            nonlocal chars_in_flight
            oldest = waiting.popleft()
            verdict = oldest.verdict.result()
            chars_in_flight -= oldest.num_chars
            pool.health.record(verdict)
            verdicts.append((oldest.answer_id, verdict))
            if progress is not None:
                progress(len(verdicts), num_rows)

        for line, value in _rows(path):
            num_rows += 1
            answer = _answer_of(value, line, judges={judge.name for judge in cfg.judges})
            if isinstance(answer, BadRow):
                bad_rows.append(answer)
                continue
            num_chars = _num_chars(answer)
            verdict = _submit(pool, answer, bare_code=bare_code)
            waiting.append(_Waiting(answer_id=answer.answer_id, verdict=verdict, num_chars=num_chars))
            chars_in_flight += num_chars
            # take from the front only, so that verdicts keep the order of the file
            while waiting and (
                len(waiting) >= _IN_FLIGHT or chars_in_flight > _IN_FLIGHT_CHARS or waiting[0].verdict.done()
            ):
                take_oldest()
        while waiting:
            take_oldest()
        notes = pool.notes
    if out is not None:
        _write(out, verdicts)
    return _summary(num_rows, verdicts, bad_rows, notes)


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


def _rows(path: Path) -> Iterator[tuple[int, object]]:
    """Yield (line number from 1, parsed value); for a line that is not JSON the value is a DataError."""
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        # surrogateescape: bytes that are not UTF-8 make at most their own line invalid, and the file is read on
        with path.open(encoding="utf-8", errors="surrogateescape") as f:
            for line, text in enumerate(f, start=1):
                if text.strip():
                    yield line, _parse(text)
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e.strerror})") from e


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        return DataError(f"not JSON: {e}")


def _parquet_rows(path: Path) -> Iterator[tuple[int, object]]:
    import pyarrow as pa

    try:
        line = 0
        for batch in parquet_batches(path):
            for row in batch.to_pylist():
                line += 1
                yield line, row
    except (OSError, pa.ArrowInvalid) as e:
        raise DataError(f"{path}: not a readable Parquet file ({e})") from e


def _answer_of(value: object, line: int, *, judges: Set[str]) -> _AnswerRow | BadRow:
    if isinstance(value, DataError):
        return BadRow(line=line, reason=str(value))
    if not isinstance(value, Mapping):
        return BadRow(line=line, reason=f"a row must be an object, not {type(value).__name__}")
    if set(value) != _ROW_KEYS:
        return BadRow(line=line, reason=_wrong_keys(set(value)))
    answer_id, response = value["id"], value["response"]
    if not isinstance(answer_id, str | int) or isinstance(answer_id, bool):
        return BadRow(line=line, reason=f"id must be text or a number, not {answer_id!r:.80}")
    if not isinstance(response, str):
        return BadRow(line=line, reason=f"response of {answer_id} must be text, not {type(response).__name__}")
    try:
        reference = reference_from_json(_plain(value["reference"]))
    except DataError as e:
        return BadRow(line=line, reason=f"reference of {answer_id}: {e}")
    if isinstance(reference, CustomReference) and reference.judge not in judges:
        has = ", ".join(sorted(judges)) or "none"
        return BadRow(
            line=line, reason=f"reference of {answer_id}: verify.judges has {has}, and not {reference.judge!r}"
        )
    return _AnswerRow(answer_id=str(answer_id), response=response, reference=reference)


def _wrong_keys(keys: set[object]) -> str:
    missing, unknown = sorted(_ROW_KEYS - keys), sorted(map(str, keys - _ROW_KEYS))
    faults: list[str] = []
    if missing:
        faults.append(f"missing {missing}")
    if unknown:
        faults.append(f"unknown {unknown[:8]}")
    return f"keys {' and '.join(faults)}; a row has exactly {sorted(_ROW_KEYS)}"


def _plain(reference: object) -> object:
    """Return the reference as JSON values. Parquet holds it as JSON text, or as a struct whose absent keys are null."""
    if isinstance(reference, str):
        parsed = _parse(reference)
        if isinstance(parsed, DataError):
            raise parsed
        return parsed
    if isinstance(reference, Mapping):
        plain: dict[object, object] = {}
        for key, value in reference.items():
            if value is not None:
                plain[key] = _plain(value) if isinstance(value, Mapping) else value
        return plain
    return reference


def _write(out: Path, verdicts: list[tuple[str, Verdict]]) -> None:
    rows = [_written(answer_id, verdict) for answer_id, verdict in verdicts]
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(out.name + ".tmp")
    if out.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

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
