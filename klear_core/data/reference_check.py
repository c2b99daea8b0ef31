"""Check before training that the judge can use the references of a benchmark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from klear_core.artifacts.floors import Share
from klear_core.errors import DataError, SandboxError
from klear_core.types import Problem
from klear_core.verify import JudgePool, faulty_references, has_test_program

_SHOWN = 20
"""Number of bad rows that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceCheck:
    """Counts by reason of the references that the judge cannot use, and notes for the report."""

    counts: dict[str, int]
    notes: tuple[str, ...]


def check_references(
    problems: Sequence[Problem], judges: JudgePool, max_unscored_rate: float, *, benchmark: str
) -> ReferenceCheck:
    """Find the references that the judge cannot use, by judging an answer of our own to each problem.

    Raise DataError if they are so many that evaluation would stop, or all of them, so that it could score no answer.
    Without a sandbox the references' own programs are not tried, and a note says so.
    """
    notes, can_run_tests = _prepare(problems, judges, benchmark)
    faults = faulty_references(problems, judges, run_tests=can_run_tests)
    counts = dict(Counter(str(verdict.outcome) for _, verdict in faults))
    share = Share(what=f"references of benchmark {benchmark} can be judged", num_in=len(problems), lost=counts)
    which = listed([f"problem {p.problem_id} ({p.question[:60]!r}): {v.outcome}: {v.detail}" for p, v in faults])
    if len(faults) > max_unscored_rate * len(problems) or share.num_out == 0:
        raise DataError(
            f"{share}; evaluation would stop after all the training, for evaluate.max_unscored_rate is "
            f"{max_unscored_rate:g}. Repair or remove these rows, or raise that setting: {which}"
        )
    if faults:
        notes += (f"{share}; answers to the others will be in no score: {which}",)
    return ReferenceCheck(counts=counts, notes=notes)


def listed(items: Sequence[str]) -> str:
    """Return the items in one line, and the number of those that are too many to show."""
    more = [f"and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return "; ".join([*items[:_SHOWN], *more])


def _prepare(problems: Sequence[Problem], judges: JudgePool, benchmark: str) -> tuple[tuple[str, ...], bool]:
    """Return notes on the sandbox, and whether the references' own programs can be run."""
    tested = [problem for problem in problems if has_test_program(problem)]
    try:
        return judges.prepare(tested), True
    except SandboxError as e:
        return (f"benchmark {benchmark}: the test programs of {len(tested)} problems were not tried: {e}",), False
