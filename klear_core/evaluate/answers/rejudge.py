"""Judge stored answers again with other settings, and report which verdicts changed, answer by answer."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Literal

from pydantic import ValidationError

from klear_core.artifacts.records import write_shard
from klear_core.config.settings import Settings
from klear_core.config.verify import VerifyConfig
from klear_core.errors import ArtifactError, ConfigError, DataError
from klear_core.evaluate.answers.judge_file import Submitted, verdicts_in_order
from klear_core.evaluate.answers.stored import (
    ANSWERS_FOLDER,
    PROBLEMS_FOLDER,
    REJUDGE_FILE,
    AnswerSource,
    Generation,
    RejudgedAnswer,
    UnreadRow,
)
from klear_core.evaluate.compare.paired import PairedDifference, paired_difference
from klear_core.evaluate.counts import AnswerCounts, AnswerSummary, Decoding
from klear_core.types import CodeReference, Difficulty, Outcome, Problem, StoredTests, Verdict, domain_of
from klear_core.verify import user_code
from klear_core.verify.judge_pool import JudgePool

# ---- rejudged ----
# Describe the result of judging stored answers again: scores under both judgements, and the changed verdicts.


Mark = Literal["right", "wrong", "no answer", "not judged", "no verdict"]


class Change(Settings):
    """One answer whose verdict changed."""

    benchmark: str
    problem_id: str
    template: str
    """Name of the prompt template; empty for the question as it stands."""
    decoding: Decoding
    sample_idx: int
    before: Mark
    after: Mark
    detail_before: str
    detail_after: str


class Rescored(Settings):
    """One benchmark's answers of one template and decoding under both judgements."""

    benchmark: str
    template: str
    """Name of the prompt template; empty for the questions as they stand."""
    decoding: Decoding
    before: AnswerSummary
    after: AnswerSummary
    difference: PairedDifference | None
    """After minus before over the problems scored in both; None if there is none."""
    changes: dict[str, int]
    """Answers by change of their verdict, such as `wrong to right`."""


class RejudgeSummary(Settings):
    """Result of judging a set of answers again, as stored in `rejudge.json`."""

    name: str
    origin: str
    layout: str
    verify_before: VerifyConfig | None
    """Settings of the judge whose verdicts were stored; None if another program judged, or nobody."""
    verify_after: VerifyConfig
    templates: dict[str, str]
    """Texts of the prompt templates, by name."""
    confidence: float
    benchmarks: tuple[Rescored, ...]
    num_unread: int
    unread: tuple[str, ...]
    """The first rows that could not be read, each with its place and the reason."""
    first_changes: tuple[Change, ...]
    notes: tuple[str, ...]


def mark_of(verdict: Verdict | None) -> Mark:
    """Return a verdict in a word. A program that passes some of its tests is wrong."""
    if verdict is None:
        return "no verdict"
    if not verdict.outcome.counts_for_model:
        return "not judged"
    if verdict.outcome is Outcome.NO_ANSWER:
        return "no answer"
    return "right" if verdict.is_correct else "wrong"


def read_summary(folder: Path) -> RejudgeSummary:
    """Return the summary of a folder that `klear rejudge` wrote."""
    path = folder / REJUDGE_FILE
    try:
        return RejudgeSummary.model_validate_json(path.read_bytes())
    except ValidationError as e:
        raise ArtifactError(f"{path}: not a summary of this version of Klear: {e}") from e


# ---- rejudge ----


CHANGES_FILE = "changes.jsonl"
"""A line for each answer whose verdict changed."""

_SHARD_ANSWERS = 2000
_SHARD_CHARS = 16 << 20
_MAX_TOLD = 20
"""Unreadable rows and changed answers that are kept for the terminal; the files have all."""

_Part = tuple[str, str, Decoding]
"""Benchmark, name of the prompt template (empty for plain questions) and decoding of answers that have one score."""


@dataclass(slots=True)
class _Unread:
    """Number of rows that could not be read, and the first of them."""

    num: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, row: UnreadRow) -> None:
        self.num += 1
        if self.num <= _MAX_TOLD:
            self.first.append(f"{row.where}: {row.reason}")


@dataclass(slots=True)
class _Pair:
    """Counts of one benchmark, template and decoding under both judgements."""

    before: AnswerCounts = field(default_factory=AnswerCounts)
    after: AnswerCounts = field(default_factory=AnswerCounts)
    changes: Counter[str] = field(default_factory=Counter)


def rejudge(
    source: AnswerSource,
    verify: VerifyConfig,
    out: Path,
    *,
    confidence: float = 0.95,
    progress: Callable[[int], None] | None = None,
) -> RejudgeSummary:
    """Judge all answers of `source` again; write them with both verdicts, the changes, and `rejudge.json` to `out`.

    The folder must be new, empty or of an earlier such command, and appears when it is complete. Answers are streamed:
    memory does not grow with their number. Raise DataError if no answer can be read, ConfigError if a judge of the user
    cannot be used, JudgeError and SandboxError as `JudgePool.judge` does.
    """
    check_folder(out)
    user_code.check_judges(verify.judges)
    beside = out.with_name(out.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    unread = _Unread()
    with JudgePool(verify) as pool, (beside / CHANGES_FILE).open("w", encoding="utf-8") as changes:
        writer = _Writer(beside, changes)
        submitted = _submitted(source.read(), pool, unread)
        for row, verdict in verdicts_in_order(submitted, pool.health):
            writer.add(row, verdict)
            if progress is not None:
                progress(writer.num_answers)
        writer.flush()
        notes = pool.notes
    if not writer.num_answers:
        shutil.rmtree(beside)
        raise DataError(
            f"{source.origin}: none of its {unread.num:,} rows could be read: {'; '.join(unread.first[:3])}"
        )
    summary = RejudgeSummary(
        name=source.name,
        origin=source.origin,
        layout=source.layout,
        verify_before=source.verify,
        verify_after=verify,
        templates=dict(source.templates),
        confidence=confidence,
        benchmarks=tuple(_rescored(key, pair, confidence) for key, pair in writer.tallies.items()),
        num_unread=unread.num,
        unread=tuple(unread.first),
        first_changes=tuple(writer.first_changes),
        notes=notes,
    )
    (beside / REJUDGE_FILE).write_text(summary.model_dump_json(indent=2))
    shutil.rmtree(out, ignore_errors=True)
    beside.rename(out)
    return summary


def check_folder(out: Path) -> None:
    """Raise ConfigError if `out` holds anything that an earlier such command did not write, or is `.`."""
    if not out.name:
        raise ConfigError(f"--out {out}: has no name of its own; name a new folder")
    if out.exists() and not (out / REJUDGE_FILE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: exists and was not written by `klear rejudge`; name a new folder")


def _submitted(
    rows: Iterable[Generation | UnreadRow], pool: JudgePool, unread: _Unread
) -> Iterator[Submitted[Generation]]:
    """Submit the answers one after the other; count the rows that cannot be read in `unread`."""
    for row in rows:
        if isinstance(row, UnreadRow):
            unread.add(row)
        else:
            yield Submitted(answer=row, verdict=pool.submit(_problem(row), row.response), num_chars=_num_chars(row))


def _problem(row: Generation) -> Problem:
    return Problem(
        problem_id=row.problem_id,
        source=row.benchmark,
        domain=domain_of(row.reference),
        question=row.question,
        reference=row.reference,
        difficulty=Difficulty.UNKNOWN,  # no judge reads it
    )


def _num_chars(row: Generation) -> int:
    """Return about how much memory judging an answer takes; small tests, which are in memory anyway, count nothing."""
    tests = row.reference.tests if isinstance(row.reference, CodeReference) else None
    return len(row.response) + (tests.num_chars if isinstance(tests, StoredTests) else 0)


@dataclass(slots=True)
class _Writer:
    """Writes judged answers and their problems in shards, counts them, and lists the changes of verdicts."""

    folder: Path
    changes: IO[str]
    tallies: dict[_Part, _Pair] = field(default_factory=lambda: defaultdict(_Pair))
    first_changes: list[Change] = field(default_factory=list)
    num_answers: int = 0
    _answers: list[RejudgedAnswer] = field(default_factory=list)
    _problems: list[Problem] = field(default_factory=list)
    _seen: set[tuple[str, str]] = field(default_factory=set)
    _num_shards: int = 0
    _num_chars: int = 0

    def add(self, row: Generation, verdict: Verdict) -> None:
        """Take one answer; write a shard if enough have come."""
        self.num_answers += 1
        change = _count(self.tallies[row.benchmark, row.template, row.decoding], row, verdict)
        if change is not None:
            self.changes.write(change.model_dump_json() + "\n")
            if len(self.first_changes) < _MAX_TOLD:
                self.first_changes.append(change)
        # A problem may have thousands of answers: its question and tests are stored once, with the first of them.
        if (row.benchmark, row.problem_id) not in self._seen:
            self._seen.add((row.benchmark, row.problem_id))
            self._problems.append(_problem(row))
        self._answers.append(_stored(row, verdict))
        self._num_chars += len(row.response)
        if len(self._answers) >= _SHARD_ANSWERS or self._num_chars >= _SHARD_CHARS:
            self.flush()

    def flush(self) -> None:
        """Write what has come since the last shard."""
        if not self._answers:
            return
        # numbered without a total, which is known only at the end; the names sort in the order of the answers
        name = f"{self._num_shards:06d}.parquet"
        write_shard(self.folder / ANSWERS_FOLDER / name, self._answers)
        if self._problems:
            write_shard(self.folder / PROBLEMS_FOLDER / name, self._problems)
        self._num_shards, self._num_chars = self._num_shards + 1, 0
        self._answers.clear()
        self._problems.clear()


def _count(pair: _Pair, row: Generation, verdict: Verdict) -> Change | None:
    """Count an answer under both judgements; return its change if there was a verdict before, and another mark."""
    pair.before.add(row.problem_id, row.finish_reason, row.verdict)
    pair.after.add(row.problem_id, row.finish_reason, verdict)
    before, after = mark_of(row.verdict), mark_of(verdict)
    if row.verdict is None or before == after:
        return None
    pair.changes[f"{before} to {after}"] += 1
    return Change(
        benchmark=row.benchmark,
        problem_id=row.problem_id,
        template=row.template,
        decoding=row.decoding,
        sample_idx=row.sample_idx,
        before=before,
        after=after,
        detail_before=row.verdict.detail,
        detail_after=verdict.detail,
    )


def _stored(row: Generation, verdict: Verdict) -> RejudgedAnswer:
    answer = RejudgedAnswer(
        benchmark=row.benchmark,
        problem_id=row.problem_id,
        template=row.template,
        decoding=row.decoding,
        sample_idx=row.sample_idx,
        response=row.response,
        num_tokens=row.num_tokens,
        finish_reason=row.finish_reason,
        verdict=verdict,
        before_outcome=None,
        before_score=None,
        before_detail=None,
    )
    if row.verdict is None:
        return answer
    before = row.verdict
    return replace(answer, before_outcome=before.outcome, before_score=before.score, before_detail=before.detail)


def _rescored(part: _Part, pair: _Pair, confidence: float) -> Rescored:
    benchmark, template, decoding = part
    return Rescored(
        benchmark=benchmark,
        template=template,
        decoding=decoding,
        before=pair.before.summary(confidence=confidence, decoding=decoding),
        after=pair.after.summary(confidence=confidence, decoding=decoding),
        difference=paired_difference(pair.before, pair.after, confidence=confidence, decoding=decoding),
        changes=dict(pair.changes.most_common()),
    )
