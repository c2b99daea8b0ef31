"""Count judged answers while they are streamed, by problem, and compute the scores of a set of answers."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from klear_core.artifacts.records import read_shards
from klear_core.config.settings import Settings
from klear_core.evaluate.stats.intervals import (
    ProblemScores,
    g_pass_at_k,
    maj_at_n,
    new_problems_interval,
    problem_scores,
    problem_scores_without_noise,
    rerun_interval,
)
from klear_core.prompts import NO_CLOSE_TAG
from klear_core.scores import SAMPLES_FOLDER, Estimate, PassAtK, Score, StablePass
from klear_core.types import Difficulty, EvalSample, FinishReason, MathReference, Outcome, Problem, Verdict
from klear_core.verify.code.program import NO_PROGRAM

Decoding = Literal["sampled", "greedy"]
Counts = Mapping[str, tuple[int, int]]
"""Right and scored answers by problem id."""

_RIGHT = "right"
"""The vote of all right answers, because `0.5` and `1/2` are one answer. Wrong ones are told apart by their text, so
that forms of one wrong value split, and maj@n is a little higher than with a judge between all answers."""


class AnswerSummary(Settings):
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
class ProblemCounts:
    """Counts of one problem's answers in one decoding."""

    difficulty: Difficulty = Difficulty.UNKNOWN
    cluster: str = ""
    """Contest, subject or template that the problem shares with others; empty if none is known."""
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
class AnswerCounts:
    """Running counts of one set of answers; memory grows with the number of problems, not of answers."""

    problems: dict[str, ProblemCounts] = field(default_factory=dict)
    num_answers: int = 0
    num_tokens: int = 0
    num_truncated: int = 0
    num_ends_unknown: int = 0
    num_no_answer: int = 0
    num_untagged: int = 0
    """Complete answers that are no answer because they lack `</think>`."""
    num_unfenced: int = 0
    """Complete answers that are no answer because they hold no fenced program."""
    num_without_verdict: int = 0
    unscored: Counter[Outcome] = field(default_factory=Counter)

    def add(
        self, problem_id: str, finish_reason: FinishReason | None, verdict: Verdict | None, num_tokens: int = 0
    ) -> None:
        """Count one answer; an answer that could not be judged counts as neither right nor wrong."""
        self.num_answers += 1
        self.num_tokens += num_tokens
        self.num_truncated += finish_reason == "length"
        self.num_ends_unknown += finish_reason is None
        problem = self.problems.setdefault(problem_id, ProblemCounts())
        if verdict is None:
            self.num_without_verdict += 1
            return
        if not verdict.outcome.counts_for_model:
            self.unscored[verdict.outcome] += 1
            return
        self.num_no_answer += verdict.outcome is Outcome.NO_ANSWER
        self.num_untagged += finish_reason == "stop" and NO_CLOSE_TAG in verdict.detail
        self.num_unfenced += finish_reason == "stop" and NO_PROGRAM in verdict.detail
        problem.num_scored += 1
        problem.num_correct += verdict.is_correct

    @property
    def scored(self) -> Counts:
        """Right and scored answers of each problem that has a scored one."""
        return {i: p.counts for i, p in self.problems.items() if p.num_scored}

    @property
    def truncated_frac(self) -> float:
        """Share of all answers that ran out of tokens."""
        return self.num_truncated / self.num_answers

    def summary(self, *, confidence: float, decoding: Decoding) -> AnswerSummary:
        """Return the counts so far with the mean over problems; `decoding` is that of the answers."""
        # If a file says it of some answers alone, the others count as not cut off.
        is_known = self.num_ends_unknown < self.num_answers
        num_truncated = self.num_truncated if is_known else None
        score = self.score(confidence=confidence, has_rerun=decoding == "sampled")
        return AnswerSummary(
            num_answers=self.num_answers,
            num_problems=len(self.problems),
            score=score.estimate if score else None,
            num_truncated=num_truncated,
            num_no_answer=self.num_no_answer,
            unscored=dict(self.unscored),
            num_without_verdict=self.num_without_verdict,
        )

    def score(self, *, confidence: float, difficulty: Difficulty | None = None, has_rerun: bool = True) -> Score | None:
        """Return the mean over problems (of one difficulty, if given); None if no problem has a scored answer.

        Pass `has_rerun=False` for greedy answers, which another run would repeat.
        """
        problems = [p for p in self._with(1) if difficulty in (None, p.difficulty)]
        if not problems:
            return None
        scores = problem_scores([p.counts for p in problems], clusters=_clusters(problems))
        return _score(scores, problems, confidence=confidence, has_rerun=has_rerun)

    def pass_at(self, k: int, *, confidence: float) -> PassAtK | None:
        """Return pass@k over the problems with at least k scored samples; None if there is none."""
        problems = self._with(k)
        if not problems:
            return None
        scores = problem_scores([p.counts for p in problems], k=k, clusters=_clusters(problems))
        return PassAtK(k=k, score=_score(scores, problems, confidence=confidence, has_rerun=True))

    def stable_pass(self, k: int, *, threshold: float, confidence: float) -> StablePass | None:
        """Return G-Pass@k over the problems with at least k scored samples; None if there is none."""
        problems = self._with(k)
        if not problems:
            return None
        values = [g_pass_at_k(p.num_scored, p.num_correct, k, threshold=threshold) for p in problems]
        # The problem with the fewest answers has the largest step; a smaller one could make the interval too narrow.
        fewest = min(p.num_scored for p in problems)
        scores = problem_scores_without_noise(values, step=k / fewest, clusters=_clusters(problems))
        score = _score(scores, problems, confidence=confidence, has_rerun=False)
        return StablePass(k=k, threshold=threshold, score=score)

    def majority(self, *, confidence: float) -> Score | None:
        """Return maj@n over the problems whose answers can be counted as votes; None if there is none."""
        # With one vote the most common answer is the only one, and maj@1 would repeat avg@1.
        problems = [p for p in self._with(1) if len(p.votes) > 1]
        if not problems:
            return None
        values = []
        for problem in problems:
            answers, verdicts = zip(*problem.votes, strict=True)
            values.append(maj_at_n(answers, verdicts))
        scores = problem_scores_without_noise(values, step=1.0, clusters=_clusters(problems))
        return _score(scores, problems, confidence=confidence, has_rerun=False)

    def _with(self, num_scored: int) -> list[ProblemCounts]:
        """Return the problems with at least so many scored answers."""
        return [p for p in self.problems.values() if p.num_scored >= num_scored]


def _clusters(problems: Sequence[ProblemCounts]) -> list[str]:
    return [problem.cluster for problem in problems]


def _score(scores: ProblemScores, problems: Sequence[ProblemCounts], *, confidence: float, has_rerun: bool) -> Score:
    """Return the mean of the problems' scores with its intervals."""
    rerun = rerun_interval(scores, confidence=confidence) if has_rerun else None
    return Score(
        value=scores.mean,
        new_problems=new_problems_interval(scores, confidence=confidence),
        rerun=rerun,
        num_problems=len(problems),
        num_samples=sum(p.num_scored for p in problems),
        num_clusters=scores.num_clusters,
    )


Tallies = Mapping[Decoding, AnswerCounts]


def tally(
    samples: Iterable[EvalSample],
    problems: Iterable[Problem],
    *,
    clusters: Mapping[str, str] = MappingProxyType({}),
    read_vote: Callable[[str], str | None] | None = None,
) -> Tallies:
    """Count a benchmark's answers by decoding. Problems without a scored answer are kept, with counts of zero.

    `clusters` has the cluster of a problem by its id. `read_vote` returns the answer that a response to a math problem
    gives, for maj@n.
    """
    tallies: Tallies = {"sampled": AnswerCounts(), "greedy": AnswerCounts()}
    is_math: dict[str, bool] = {}
    for problem in problems:
        is_math[problem.problem_id] = isinstance(problem.reference, MathReference)
        for counts in tallies.values():
            cluster = clusters.get(problem.problem_id, "")
            counts.problems[problem.problem_id] = ProblemCounts(problem.difficulty, cluster)
    for sample in samples:
        counts, verdict = tallies[sample.decoding], sample.verdict
        has_vote = is_math[sample.problem_id] and verdict.outcome.counts_for_model
        counts.add(sample.problem_id, sample.finish_reason, verdict, sample.num_tokens)
        if read_vote is not None and has_vote:
            vote = _RIGHT if verdict.is_correct else read_vote(sample.response)
            counts.problems[sample.problem_id].votes.append((vote, verdict.is_correct))
    return tallies


CountsBy = Mapping[tuple[str, Decoding], AnswerCounts]
"""Counts of answers by benchmark and decoding."""


def count_stored(evaluation: Path) -> CountsBy:
    """Count the answers in an evaluation's artifact folder by benchmark and decoding."""
    found: dict[tuple[str, Decoding], AnswerCounts] = defaultdict(AnswerCounts)
    clusters = read_clusters(evaluation)
    # Only counts are kept: all answers of an evaluation would not fit into memory.
    for sample in read_shards(evaluation / SAMPLES_FOLDER, EvalSample):
        counts = found[sample.benchmark, sample.decoding]
        counts.add(sample.problem_id, sample.finish_reason, sample.verdict, sample.num_tokens)
    for (benchmark, _), counts in found.items():
        for problem_id, problem in counts.problems.items():
            problem.cluster = clusters.get(benchmark, {}).get(problem_id, "")
    return dict(found)


_CLUSTERS_FILE = "clusters.json"
"""File of an evaluation: cluster by benchmark and problem id; absent if none are known."""


def write_clusters(evaluation: Path, clusters: Mapping[str, Mapping[str, str]]) -> None:
    """Write the clusters of the problems, by benchmark and problem id, unless there are none."""
    if clusters:
        (evaluation / _CLUSTERS_FILE).write_text(json.dumps(clusters, indent=1, sort_keys=True) + "\n")


def read_clusters(evaluation: Path) -> Mapping[str, Mapping[str, str]]:
    """Return the clusters of an evaluation's problems, by benchmark and problem id; empty if none are known."""
    path = evaluation / _CLUSTERS_FILE
    found: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}
    return found
