"""Count verdicts by outcome, and stop a stage in which the judge itself fails too often."""

from __future__ import annotations

import threading
from collections import Counter

from klear_core.errors import JudgeError
from klear_core.types import Outcome, Verdict

_JUDGE_FAILURES = (Outcome.JUDGE_FAILED, Outcome.SANDBOX_FAILED, Outcome.TIMED_OUT)
"""Outcomes of a failed judge. TIMED_OUT means that the judge ran out of time; a program that does is SCORED."""


class JudgeHealth:
    """Counts verdicts by outcome, and raises once too many of them failed for reasons that are not the model's."""

    def __init__(self, *, max_failed_frac: float, min_failed_count: int, what: str = "verdicts") -> None:
        """Count from zero. `what` names the counted verdicts in the error."""
        self._what = what
        self._max_failed_frac = max_failed_frac
        self._min_failed_count = min_failed_count
        self._lock = threading.Lock()
        self._counts: Counter[Outcome] = Counter()

    @property
    def counts(self) -> dict[Outcome, int]:
        """Return the number of verdicts so far, by outcome."""
        with self._lock:
            return dict(self._counts)

    @property
    def num_failed(self) -> int:
        """Return the number of failures so far that are not the model's."""
        counts = self.counts
        return sum(counts.get(outcome, 0) for outcome in _JUDGE_FAILURES)

    def record(self, verdict: Verdict) -> None:
        """Count a verdict. Raise JudgeError when failures of the judge or sandbox exceed the limit."""
        with self._lock:
            self._counts[verdict.outcome] += 1
            failed = sum(self._counts[o] for o in _JUDGE_FAILURES)
            total = self._counts.total()
        if (
            verdict.outcome in _JUDGE_FAILURES
            and failed >= self._min_failed_count
            and failed > self._max_failed_frac * total
        ):
            raise JudgeError(
                f"{failed} of {total} {self._what} failed for reasons that are not the model's "
                f"(limit {self._max_failed_frac:.0%}, verify.max_failed_frac); continuing would use unreliable "
                f"ones. Last failure: {verdict.outcome}: {verdict.detail}"
            )
