"""Count stored answers of any source while they are streamed: scores by problem, and the shares shown beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from klear_core.config.settings import Settings
from klear_core.evaluate.stats.intervals import (
    estimates_of,
    new_problems_interval,
    paired_new_problems_interval,
    paired_rerun_interval,
    rerun_interval,
)
from klear_core.evaluate.stats.significance import sign_flip_test
from klear_core.scores import Range
from klear_core.types import FinishReason, Outcome, Verdict


class Estimate(Settings):
    """A score or a difference of scores, with its two intervals."""

    value: float
    new_problems: Range
    """Interval over other problems of this kind."""
    rerun: Range | None
    """Interval over other samples of these problems; None with one answer per problem, which would show no noise."""
    num_problems: int


class Difference(Estimate):
    """A paired difference of two scores, after minus before."""

    num_fixed: int
    """Problems whose answers are mostly right after, and were not before."""
    num_broken: int
    p: float
    """p-value of the sign-flip test, not corrected for the number of comparisons."""
    num_changed: int | None = None
    """Problems with different scores; None in files of earlier versions."""
    floor_binds: bool | None = None
    """Whether `new_problems` is as narrow as so few problems allow; None in files of earlier versions."""


class Shares(Settings):
    """The score of one set of answers, and the counts shown beside it; the score is None if nothing could be scored."""

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
        # The judge failed and not the model: neither right nor wrong.
        if not verdict.outcome.counts_for_model:
            self.unscored[verdict.outcome] += 1
            return
        self.num_no_answer += verdict.outcome is Outcome.NO_ANSWER
        problem.num_scored += 1
        problem.num_correct += verdict.is_correct

    @property
    def scored(self) -> Mapping[str, tuple[int, int]]:
        """Right and scored answers of each problem that has a scored one."""
        return {i: (p.num_correct, p.num_scored) for i, p in self.problems.items() if p.num_scored}

    def shares(self, *, confidence: float) -> Shares:
        """Return the counts so far with the mean over problems."""
        scored = self.scored
        score = None
        if scored:
            estimates = estimates_of(list(scored.values()))
            score = Estimate(
                value=estimates.mean,
                new_problems=new_problems_interval(estimates, confidence=confidence),
                rerun=rerun_interval(estimates, confidence=confidence) if _have_several(scored) else None,
                num_problems=len(scored),
            )
        # If a file says it of some answers alone, the others count as not cut off.
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
    scored_before, scored_after = before.scored, after.scored
    shared = sorted(scored_before.keys() & scored_after.keys())  # sorted: sums must not depend on the order of a set
    if not shared:
        return None
    x = estimates_of([scored_before[i] for i in shared])
    y = estimates_of([scored_after[i] for i in shared])
    has_rerun = _have_several(scored_before) and _have_several(scored_after)
    rerun = paired_rerun_interval(x, y, confidence=confidence) if has_rerun else None
    majorities = [(a >= 0.5, b >= 0.5) for a, b in zip(x.value, y.value, strict=True)]
    gains = [b - a for a, b in zip(x.exact, y.exact, strict=True)]
    new_problems, test = paired_new_problems_interval(x, y, confidence=confidence), sign_flip_test(gains)
    return Difference(
        value=y.mean - x.mean,
        new_problems=new_problems.range,
        rerun=rerun,
        num_problems=len(shared),
        num_fixed=majorities.count((False, True)),
        num_broken=majorities.count((True, False)),
        p=test.p,
        num_changed=test.num_changed,
        floor_binds=new_problems.floor_binds,
    )


def _have_several(scored: Mapping[str, tuple[int, int]]) -> bool:
    return any(num > 1 for _, num in scored.values())
