"""Count stored answers as they stream by, whatever made them: scores by problem, and the shares that stand beside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from klear_core.config.settings import Settings
from klear_core.evaluate.stats import mean_interval, paired_interval
from klear_core.types import FinishReason, Outcome, Verdict


class Estimate(Settings):
    """A score or a difference of scores, with its interval over problems."""

    value: float
    low: float
    high: float
    num_problems: int


class Difference(Estimate):
    """A paired difference of two scores, after minus before."""

    num_fixed: int
    """Problems whose answers are mostly right after, and were not before."""
    num_broken: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


class Shares(Settings):
    """Counts of one set of answers that stand beside its score, and the score; None if nothing could be scored."""

    num_answers: int
    num_problems: int
    score: Estimate | None
    num_truncated: int | None
    """Answers that ran out of tokens; None if the file does not say."""
    num_no_answer: int
    """Answers in which the judge found none: no end of the thinking, no box, no program."""
    unscored: dict[Outcome, int]
    """Answers that could not be judged, by outcome; they are in no score."""
    num_without_verdict: int
    """Answers that no judge has seen."""

    @property
    def num_unscored(self) -> int:
        """Answers that could not be judged."""
        return sum(self.unscored.values())


@dataclass(slots=True)
class _ProblemCount:
    num_scored: int = 0
    num_correct: int = 0


@dataclass(slots=True)
class AnswerCounts:
    """Running counts of one set of answers; memory grows with the number of problems, not of answers."""

    num_answers: int = 0
    num_truncated: int = 0
    num_ends_unknown: int = 0
    num_no_answer: int = 0
    num_without_verdict: int = 0
    unscored: Counter[Outcome] = field(default_factory=Counter)
    problems: dict[str, _ProblemCount] = field(default_factory=dict)

    def add(self, problem_id: str, finish_reason: FinishReason | None, verdict: Verdict | None) -> None:
        """Count one answer."""
        self.num_answers += 1
        self.num_truncated += finish_reason == "length"
        self.num_ends_unknown += finish_reason is None
        problem = self.problems.setdefault(problem_id, _ProblemCount())
        if verdict is None:
            self.num_without_verdict += 1
            return
        if not verdict.outcome.counts_for_model:
            self.unscored[verdict.outcome] += 1
            return
        self.num_no_answer += verdict.outcome is Outcome.NO_ANSWER
        problem.num_scored += 1
        problem.num_correct += verdict.is_correct

    @property
    def means(self) -> Mapping[str, float]:
        """Share of right answers of each problem that has a scored one."""
        return {i: p.num_correct / p.num_scored for i, p in self.problems.items() if p.num_scored}

    def shares(self, *, confidence: float) -> Shares:
        """Return the counts so far with the mean over problems."""
        means = self.means
        score = None
        if means:
            interval = mean_interval(list(means.values()), confidence=confidence)
            score = Estimate(value=interval.value, low=interval.low, high=interval.high, num_problems=len(means))
        is_known = self.num_ends_unknown < self.num_answers
        return Shares(
            num_answers=self.num_answers,
            num_problems=len(self.problems),
            score=score,
            num_truncated=self.num_truncated if is_known else None,
            num_no_answer=self.num_no_answer,
            unscored=dict(self.unscored),
            num_without_verdict=self.num_without_verdict,
        )


def paired_estimate(before: AnswerCounts, after: AnswerCounts, *, confidence: float) -> Difference | None:
    """Return the mean difference over the problems scored in both, after minus before; None if there is none."""
    means_before, means_after = before.means, after.means
    shared = sorted(means_before.keys() & means_after.keys())  # sorted: sums must not depend on the order of a set
    if not shared:
        return None
    values_before = [means_before[i] for i in shared]
    values_after = [means_after[i] for i in shared]
    interval = paired_interval(values_before, values_after, confidence=confidence)
    majorities = [(a >= 0.5, b >= 0.5) for a, b in zip(values_before, values_after, strict=True)]
    return Difference(
        value=interval.value,
        low=interval.low,
        high=interval.high,
        num_problems=len(shared),
        num_fixed=majorities.count((False, True)),
        num_broken=majorities.count((True, False)),
    )
