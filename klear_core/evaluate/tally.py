"""Count judged answers by problem, and compute scores from the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from klear_core.config.verify import VerifyConfig
from klear_core.evaluate.intervals import (
    Estimates,
    estimates_of,
    estimates_without_noise,
    new_problems_interval,
    rerun_interval,
)
from klear_core.evaluate.stats import g_pass_at_k, maj_at_n
from klear_core.scores import PassAtK, Score, StablePass
from klear_core.types import Difficulty, EvalSample, MathReference, Outcome, Problem
from klear_core.verify.math.text import find_answer, normalise
from klear_core.verify.window import NoAnswer, find_answer_text


@dataclass(slots=True)
class ProblemTally:
    """Counts of one problem's answers in one decoding (sampled or greedy)."""

    difficulty: Difficulty
    num_scored: int = 0
    num_correct: int = 0
    votes: list[tuple[str | None, bool]] = field(default_factory=list)
    """Answer (None: none was found) and verdict of each scored sample, for maj@n; empty if there is none to count."""

    @property
    def counts(self) -> tuple[int, int]:
        """Right and scored answers."""
        return self.num_correct, self.num_scored

    @property
    def mean(self) -> float:
        """Share of right answers among the scored ones."""
        return self.num_correct / self.num_scored


@dataclass(slots=True)
class Tally:
    """Counts of all answers in one decoding, in total and by problem."""

    problems: dict[str, ProblemTally]
    num_samples: int = 0
    num_tokens: int = 0
    num_truncated: int = 0
    num_no_answer: int = 0
    unscored: Counter[Outcome] = field(default_factory=Counter)

    def add(self, sample: EvalSample) -> None:
        """Count one answer; an answer that could not be judged counts as neither right nor wrong."""
        self.num_samples += 1
        self.num_tokens += sample.num_tokens
        self.num_truncated += sample.finish_reason == "length"
        self.num_no_answer += sample.verdict.outcome is Outcome.NO_ANSWER
        if not sample.verdict.outcome.counts_for_model:
            self.unscored[sample.verdict.outcome] += 1
            return
        problem = self.problems[sample.problem_id]
        problem.num_scored += 1
        problem.num_correct += sample.verdict.is_correct

    @property
    def scored(self) -> list[ProblemTally]:
        """Problems with at least one scored answer."""
        return [p for p in self.problems.values() if p.num_scored]

    @property
    def truncated_frac(self) -> float:
        """Share of all answers that ran out of tokens."""
        return self.num_truncated / self.num_samples

    def score(self, *, confidence: float, difficulty: Difficulty | None = None, has_rerun: bool = True) -> Score | None:
        """Return the mean over problems (of one difficulty, if given); None if no problem has a scored answer.

        Pass `has_rerun=False` for greedy answers, which another run would repeat.
        """
        problems = [p for p in self.scored if difficulty in (None, p.difficulty)]
        if not problems:
            return None
        estimates = estimates_of([p.counts for p in problems])
        return _score(estimates, problems, confidence=confidence, has_rerun=has_rerun)

    def pass_at(self, k: int, *, confidence: float) -> PassAtK | None:
        """Return pass@k over the problems with at least k scored samples; None if there is none."""
        problems = [p for p in self.scored if p.num_scored >= k]
        if not problems:
            return None
        estimates = estimates_of([p.counts for p in problems], k=k)
        return PassAtK(k=k, score=_score(estimates, problems, confidence=confidence))

    def stable_pass(self, k: int, *, threshold: float, confidence: float) -> StablePass | None:
        """Return G-Pass@k over the problems with at least k scored samples; None if there is none."""
        problems = [p for p in self.scored if p.num_scored >= k]
        if not problems:
            return None
        values = [g_pass_at_k(p.num_scored, p.num_correct, k, threshold=threshold) for p in problems]
        # The problem with the fewest answers has the largest step; a smaller one could make the interval too narrow.
        fewest = min(p.num_scored for p in problems)
        estimates = estimates_without_noise(values, step=k / fewest)
        score = _score(estimates, problems, confidence=confidence, has_rerun=False)
        return StablePass(k=k, threshold=threshold, score=score)

    def majority(self, *, confidence: float) -> Score | None:
        """Return maj@n over the problems whose answers can be counted as votes; None if there is none."""
        # With one vote the most common answer is the only one, and maj@1 would repeat avg@1.
        problems = [p for p in self.scored if len(p.votes) > 1]
        if not problems:
            return None
        values = []
        for problem in problems:
            answers, verdicts = zip(*problem.votes, strict=True)
            values.append(maj_at_n(answers, verdicts))
        estimates = estimates_without_noise(values, step=1.0)
        return _score(estimates, problems, confidence=confidence, has_rerun=False)


Tallies = Mapping[Literal["sampled", "greedy"], Tally]


def tally(
    samples: Iterable[EvalSample], problems: Iterable[Problem], *, read_vote: Callable[[str], str | None] | None = None
) -> Tallies:
    """Count a benchmark's answers by decoding. Problems without a scored answer are kept, with counts of zero.

    `read_vote` returns the answer that a response to a math problem gives, for maj@n.
    """
    difficulties: dict[str, Difficulty] = {}
    is_math: dict[str, bool] = {}
    for problem in problems:
        difficulties[problem.problem_id] = problem.difficulty
        is_math[problem.problem_id] = isinstance(problem.reference, MathReference)
    tallies: Tallies = {"sampled": _empty_tally(difficulties), "greedy": _empty_tally(difficulties)}
    for sample in samples:
        counts = tallies[sample.decoding]
        counts.add(sample)
        if read_vote is not None and is_math[sample.problem_id] and sample.verdict.outcome.counts_for_model:
            vote = _RIGHT if sample.verdict.is_correct else read_vote(sample.response)
            counts.problems[sample.problem_id].votes.append((vote, sample.verdict.is_correct))
    return tallies


_RIGHT = "right"
"""The vote of all right answers, because `0.5` and `1/2` are one answer."""


def read_math_vote(verify: VerifyConfig, response: str) -> str | None:
    """Return the answer that the math judge reads in a response, in one spelling; None if there is none."""
    text = find_answer_text(response, verify)
    if isinstance(text, NoAnswer):
        return None
    answer = find_answer(text, verify.math)
    if isinstance(answer, NoAnswer):
        return None
    return f"wrong: {normalise(answer.texts[-1])}"


def _empty_tally(difficulties: Mapping[str, Difficulty]) -> Tally:
    return Tally({problem_id: ProblemTally(difficulty) for problem_id, difficulty in difficulties.items()})


def _score(
    estimates: Estimates, problems: Sequence[ProblemTally], *, confidence: float, has_rerun: bool = True
) -> Score:
    """Return the mean of the estimates with its intervals."""
    rerun = rerun_interval(estimates, confidence=confidence) if has_rerun else None
    return Score(
        value=estimates.mean,
        new_problems=new_problems_interval(estimates, confidence=confidence),
        rerun=rerun,
        num_problems=len(problems),
        num_samples=sum(p.num_scored for p in problems),
    )
