"""Count the samples of distillation: every requested sample is a trace or is dropped for a counted reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from klear_core.artifacts.floors import Share
from klear_core.artifacts.ledger import LedgerStep
from klear_core.distill.select import defect_of, failed_to_judge, unjudged
from klear_core.distill.teacher import OVER_BUDGET
from klear_core.types import Dropped, TeacherTrace

STEPS = ("ask", "complete", "judge", "select")
"""Steps that a sample passes: the teacher replies, the reply is complete, it is judged, the policy keeps it."""


class TraceCounts:
    """Counts over finished shards; a resumed run gets the same ones, because it recounts the records in the shards."""

    def __init__(self) -> None:
        self.num_traces = 0
        self.num_tokens = 0
        self.num_correct: Counter[str] = Counter()
        """Number of correct answers by difficulty."""
        self.num_judged: Counter[str] = Counter()
        """Number of answers judged correct or wrong by difficulty, kept or not."""
        self._first_lost: dict[str, str] = {}
        """First dropped sample of each step, as text with its problem id."""
        self._dropped: dict[str, Counter[str]] = {step: Counter() for step in STEPS}
        self._noted: dict[str, Counter[str]] = {step: Counter() for step in STEPS}

    def add(self, traces: Iterable[TeacherTrace], dropped: Iterable[Dropped]) -> None:
        """Count the records of one shard."""
        for trace in traces:
            self._add_trace(trace)
        for drop in dropped:
            self._dropped[drop.step][drop.reason] += 1
            self._first_lost.setdefault(drop.step, f"problem {drop.problem_id}, {drop.reason}, {drop.detail}")
            # Wrong answers that the policy drops were judged too; their reason is `wrong_<difficulty>`.
            kind, _, difficulty = drop.reason.partition("_")
            if drop.step == "select" and kind == "wrong":
                self.num_judged[difficulty] += 1

    def merge(self, later: TraceCounts) -> None:
        """Add the counts of shards that come after those counted so far."""
        self.num_traces += later.num_traces
        self.num_tokens += later.num_tokens
        self.num_correct += later.num_correct
        self.num_judged += later.num_judged
        # The right operand wins, so the examples stay those of the earlier shards.
        self._first_lost = later._first_lost | self._first_lost
        for step in STEPS:
            self._dropped[step] += later._dropped[step]
            self._noted[step] += later._noted[step]

    def _add_trace(self, trace: TeacherTrace) -> None:
        self.num_traces += 1
        self.num_tokens += trace.num_tokens
        verdict = trace.verdict
        if defect := defect_of(trace):
            self._noted["complete"][f"{defect}_but_kept"] += 1
        if not verdict.outcome.counts_for_model:
            self._noted["judge"][f"{verdict.outcome}_but_kept"] += 1
            return
        self.num_judged[trace.difficulty] += 1
        if verdict.is_correct:
            self.num_correct[trace.difficulty] += 1
        else:
            self._noted["select"][f"wrong_but_kept_{trace.difficulty}"] += 1

    @property
    def num_asked(self) -> int:
        """Return the number of requested samples in the counted shards."""
        return self.num_traces + sum(dropped.total() for dropped in self._dropped.values())

    def complete(self) -> Share:
        """Return the share of samples with a complete, judged answer."""
        steps = [step for step in STEPS if step != "select"]
        lost = sum((self._dropped[step] for step in steps), Counter[str]())
        example = next((self._first_lost[step] for step in steps if step in self._first_lost), "")
        return Share(
            what="answers of the teacher are complete and judged", num_in=self.num_asked, lost=lost, example=example
        )

    def selected(self) -> Share:
        """Return the share of complete, judged answers that the policy keeps."""
        example = self._first_lost.get("select", "")
        what = "complete answers are kept by distill.select"
        return Share(what=what, num_in=self.complete().num_out, lost=self._dropped["select"], example=example)

    def ledger(self) -> tuple[LedgerStep, ...]:
        """Return one entry per step, in order; each step's output count is the next one's input count."""
        num_out = self.num_traces
        entries: list[LedgerStep] = []
        for step in reversed(STEPS):  # from the last step back, because only its output, the traces, was counted
            dropped, noted = self._dropped[step], self._noted[step]
            num_in = num_out + dropped.total()
            counts = {"dropped": dict(sorted(dropped.items())), "noted": dict(sorted(noted.items()))}
            entries.append(LedgerStep(step=step, unit="trace", num_in=num_in, num_out=num_out, **counts))
            num_out = num_in
        return tuple(reversed(entries))

    def metrics(self) -> dict[str, float]:
        """Return counts and rates so far, by metric name."""
        metrics: dict[str, float] = {
            "distill/trace/count": self.num_traces,
            "distill/trace/tokens_mean": self.num_tokens / max(self.num_traces, 1),
            "distill/request/failed": self._dropped["ask"].total(),
            "distill/reply/incomplete": self._dropped["complete"].total(),
            "distill/judge/failed": self._dropped["judge"].total(),
        }
        if self.num_judged:
            metrics["distill/accuracy/all"] = self.num_correct.total() / self.num_judged.total()
        for difficulty, num_judged in sorted(self.num_judged.items()):
            metrics[f"distill/accuracy/{difficulty}"] = self.num_correct[difficulty] / num_judged
        return metrics


class FailureBudget:
    """Checks the failure rate. Failures in unfinished shards do not persist: a rerun requests those samples again."""

    def __init__(self, max_failure_rate: float) -> None:
        self.max_failure_rate = max_failure_rate
        self._num_asked = 0
        self._num_failed = 0

    def count(self, *, num_asked: int, num_failed: int) -> None:
        """Count a finished shard."""
        self._num_asked += num_asked
        self._num_failed += num_failed

    def is_exceeded(self, *, num_asked: int, num_failed: int) -> bool:
        """Return whether a shard of `num_asked` requests, `num_failed` of them failed, puts the total above the limit.

        The shard's remaining requests count as successes. A shard finishes only within the limit, so that a rerun can
        finish the rest once the cause is fixed.
        """
        return self._num_failed + num_failed > self.max_failure_rate * (self._num_asked + num_asked)


def failures_of(outcomes: Iterable[TeacherTrace | Dropped]) -> list[Dropped]:
    """Return the samples that failed at the teacher or the judge, including those that a setting keeps."""
    found: list[Dropped] = []
    for outcome in outcomes:
        match outcome:
            case Dropped(step="ask" | "judge", reason=reason) if reason != OVER_BUDGET:
                found.append(outcome)
            case TeacherTrace() if failed_to_judge(outcome):
                found.append(unjudged(outcome))
            case _:
                pass
    return found
