"""Define the record that a source yields before curation, and turn it into a problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.records import StoredTestsWriter
from klear_core.config.curate import DifficultyConfig
from klear_core.types import Difficulty, Domain, Dropped, Problem, Reference, problem_id_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A question and its reference from one source; curation turns it into a Problem or drops it."""

    source: str
    domain: Domain
    question: str
    reference: Reference
    rating: float | None
    """The source's difficulty rating as a share of its scale, in [0, 1]; None if the source has no rating."""
    row: str = ""
    """Place of the row in its source, such as `train-00001.jsonl:17`."""
    contest_id: str = ""
    """Contest problem that the row holds, such as `atcoder/abc365_b`; empty if the row does not say."""
    contest_date: str = ""
    """Day of the contest as the row writes it, `2024-08-03T00:00:00`; empty if the row does not say."""
    stated_id: str = ""
    """Id that the source gave the row; empty if it gave none."""
    solution: str = ""
    """Program that the source publishes as a solution, in Python; empty if there is none."""
    cluster: str = ""
    """Contest, subject or template that the problem shares with others; empty if the row does not say."""

    @property
    def problem_id(self) -> str:
        """Return the id that the Problem will have."""
        return problem_id_of(self.question, self.domain)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """The source row that a training problem was made of."""

    problem_id: str
    source: str
    row: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedRow:
    """A source row that became no training problem, and why."""

    problem_id: str
    """Id that the problem would have; the place of a row that could not be read."""
    source: str
    row: str
    step: str
    reason: str
    matched_id: str
    """Id of the problem or benchmark question that it repeats; empty if it was dropped for another reason."""
    detail: str


def dropped_row(drop: Dropped, *, source: str, row: str) -> DroppedRow:
    """Return a drop record with the source row that was dropped."""
    return DroppedRow(
        problem_id=drop.problem_id,
        source=source,
        row=row,
        step=drop.step,
        reason=drop.reason,
        matched_id=drop.matched_id,
        detail=drop.detail,
    )


def with_stored_tests(rows: Iterable[Candidate | Dropped], file: Path) -> Iterator[Candidate | Dropped]:
    """Yield the rows with handles in place of large tests, which are written to `file` and can be read at once."""
    with StoredTestsWriter(file) as tests:
        for row in rows:
            if isinstance(row, Dropped):
                yield row
            else:
                yield dataclasses.replace(row, reference=tests.stored(row.reference))


def problem_from(candidate: Candidate, cfg: DifficultyConfig) -> Problem:
    """Return the candidate as a problem with its difficulty tag."""
    return Problem(
        problem_id=candidate.problem_id,
        source=candidate.source,
        domain=candidate.domain,
        question=candidate.question,
        reference=candidate.reference,
        difficulty=difficulty_of(candidate.rating, cfg),
    )


# ---- difficulty ----
# Derive difficulty tags from the source's rating.


def difficulty_of(rating: float | None, cfg: DifficultyConfig) -> Difficulty:
    """Return the tag of a rating in [0, 1]; unknown if the rating is None."""
    if rating is None:
        return Difficulty.UNKNOWN
    if rating < cfg.easy_below:
        return Difficulty.EASY
    return Difficulty.HARD if rating >= cfg.hard_from else Difficulty.MEDIUM
