"""Compare models' evaluations problem by problem, to decide whether the later model is better."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from klear_core.artifacts.records import read_shards
from klear_core.config.settings import Settings
from klear_core.errors import DataError
from klear_core.evaluate.counts import AnswerCounts, CountsBy, Decoding, count_stored
from klear_core.evaluate.stats.intervals import (
    ProblemScores,
    paired_new_problems_interval,
    paired_rerun_interval,
    problem_scores,
)
from klear_core.evaluate.stats.significance import (
    corrected_by_question,
    gate_confidence,
    holm,
    sign_flip_test,
    unseen_loss,
)
from klear_core.scores import SAMPLES_FOLDER, Estimate, EvalReport, Range, read_reports
from klear_core.types import EvalSample

_DECODINGS: tuple[Decoding, ...] = ("sampled", "greedy")


class PairedComparison(Settings):
    """Difference of two models' scores on one benchmark: after minus before, over the problems scored for both."""

    benchmark: str
    decoding: Decoding
    num_problems: int = Field(ge=1)
    num_unpaired: int = Field(ge=0)
    """Problems scored for only one of the two models; they are left out."""
    before: float = Field(ge=0, le=1)
    after: float = Field(ge=0, le=1)
    difference: float = Field(ge=-1, le=1)
    new_problems: Range
    """Interval of the difference over other problems of this kind."""
    floor_binds: bool
    """Whether `new_problems` has the least width for so few problems, which could miss a change of two of them."""
    corrected: Range | None = Field(default=None, exclude_if=lambda ends: ends is None)
    """`new_problems` at a level corrected for all tests of a gain, for the rule of the champion. Its lower end is below
    0, too, where a rare loss that was not drawn explains the gain (`unseen_loss`)."""
    rerun: Range | None
    """Interval of the difference over other samples of the same problems; None for greedy answers."""
    p: float = Field(ge=0, le=1)
    """Two-sided p-value of the sign-flip test."""
    p_corrected: float = Field(ge=0, le=1)
    """`p` corrected for all questions that were asked together; it decides whether the models differ."""
    num_changed: int = Field(ge=0)
    """Problems with different scores; fewer than six are too few for a test at 95 %."""
    num_clusters: int | None = Field(default=None, exclude_if=lambda num: num is None)
    """Clusters of problems that interval and test are over, and that `num_changed` counts; None: single problems."""
    confidence: float = Field(gt=0, lt=1)
    is_same_decoding: bool
    """Whether both models were asked and decoded with the same settings; if not, these may explain part of the
    difference."""

    @property
    def is_clear(self) -> bool:
        """Whether the corrected test says that the models differ."""
        # Not p < 1 - confidence: 1 - 0.95 is rounded to slightly more than 0.05.
        return self.p_corrected + self.confidence < 1

    @property
    def is_better(self) -> bool:
        """Whether the later model is clearly better."""
        return self.is_clear and self.difference > 0

    @property
    def is_worse(self) -> bool:
        """Whether the later model is clearly worse."""
        return self.is_clear and self.difference < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The reports and the counts of one evaluation's artifact folder."""

    folder: Path
    reports: Mapping[str, EvalReport]
    counts: CountsBy
    """Counts of the benchmarks and decodings that have a scored answer."""

    def problem_ids(self, benchmark: str) -> frozenset[str]:
        """Return the ids of all problems of a benchmark that were asked, scored or not."""
        # The counts lack problems without a judged answer, and the report lists these alone.
        return self.scored_ids(benchmark) | frozenset(self.reports[benchmark].unscored_problems)

    def scored_ids(self, benchmark: str) -> frozenset[str]:
        """Return the ids of the problems with a scored sample."""
        counts = self.counts.get((benchmark, "sampled"))
        return frozenset(counts.scored if counts else ())


def compare(before: Path, after: Path) -> tuple[PairedComparison, ...]:
    """Compare two evaluations' artifact folders; see `compare_pairs`."""
    (comparisons,) = compare_pairs([(before, after)])
    return comparisons


def compare_pairs(pairs: Sequence[tuple[Path, Path]]) -> list[tuple[PairedComparison, ...]]:
    """Compare pairs of evaluations, before and after, on each benchmark and in each decoding that both have.

    p-values are corrected for all questions of the call: one for each pair and benchmark, which sampled answers decide
    where there are any. A pair of the same evaluation is no question and has no comparison. The confidence level is
    that of the later evaluation. Raise DataError if the benchmarks of a pair differ or one has no scored problem in
    common.
    """
    folders = dict.fromkeys(folder for pair in pairs for folder in pair)
    # An evaluation is in several pairs; its answers are read once.
    evaluations = {folder: read_evaluation(folder) for folder in folders}
    compared = [_compare(evaluations[before], evaluations[after]) if before != after else [] for before, after in pairs]
    p_values = [c.p for comparisons in compared for c in comparisons]
    questions = [(pair, c.benchmark) for pair, comparisons in enumerate(compared) for c in comparisons]
    corrected = iter(corrected_by_question(p_values, questions))
    results = []
    for comparisons in compared:
        results.append(tuple(c.model_copy(update={"p_corrected": next(corrected)}) for c in comparisons))
    return results


def compare_sampled(
    before: Evaluation, after: Evaluation, *, level: Callable[[float], float] = lambda confidence: confidence
) -> tuple[PairedComparison, ...]:
    """Compare avg@n alone, with the interval `corrected`: greedy answers are no part of either correction.

    `level` gives the confidence level to use, from that of the later evaluation. With several benchmarks half of the
    error is left for all of them together (`compare_together`).
    """
    num = len(after.reports)
    found = _compare(before, after, num_tests=2 * num if num > 1 else 1, level=level)
    compared = [c for c in found if c.decoding == "sampled"]
    corrected = holm([c.p for c in compared])
    return tuple(c.model_copy(update={"p_corrected": p}) for c, p in zip(compared, corrected, strict=True))


def compare_together(
    before: Evaluation,
    after: Evaluation,
    benchmarks: Sequence[str],
    *,
    level: Callable[[float], float] = lambda confidence: confidence,
) -> PairedComparison | None:
    """Compare avg@n over all problems of several benchmarks, as of one benchmark; None for fewer than two.

    Each problem has the same weight, and one of several benchmarks counts once. It has half of the error that
    `compare_sampled` shares out.
    """
    if len(benchmarks) < 2:
        return None
    confidence = level(after.reports[benchmarks[0]].confidence)
    found = _compare_one(before, after, benchmarks=benchmarks, decoding="sampled", num_tests=2, confidence=confidence)
    return found.model_copy(update={"benchmark": "all together", "p_corrected": min(1.0, 2 * found.p)})


@dataclass(frozen=True, slots=True, kw_only=True)
class FlippedAnswer:
    """Two models' answers to a problem with the same number, of which one is right and one is wrong."""

    before: EvalSample
    after: EvalSample


def flipped_answers(before: Path, after: Path) -> list[FlippedAnswer]:
    """Return the pairs of answers whose verdict differs, in the order of the later evaluation."""

    def key(sample: EvalSample) -> tuple[str, str, str, int]:
        return sample.benchmark, sample.problem_id, sample.decoding, sample.sample_idx

    def judged(folder: Path) -> Iterator[EvalSample]:
        samples = read_shards(folder / SAMPLES_FOLDER, EvalSample)
        return (sample for sample in samples if sample.verdict.outcome.counts_for_model)

    # Verdicts first: the texts of all answers of an evaluation do not fit into memory.
    was_right = {key(sample): sample.verdict.is_correct for sample in judged(before)}
    flipped = {key(s): s for s in judged(after) if was_right.get(key(s), s.verdict.is_correct) != s.verdict.is_correct}
    earlier = {key(sample): sample for sample in judged(before) if key(sample) in flipped}
    return [FlippedAnswer(before=earlier[each], after=sample) for each, sample in flipped.items()]


def read_evaluation(folder: Path) -> Evaluation:
    """Read the reports and count the answers of an evaluation's artifact folder."""
    reports = {report.benchmark: report for report in read_reports(folder)}
    counts = {key: found for key, found in count_stored(folder).items() if found.scored}
    return Evaluation(folder=folder, reports=reports, counts=counts)


def _compare(
    before: Evaluation,
    after: Evaluation,
    *,
    num_tests: int | None = None,
    level: Callable[[float], float] = lambda confidence: confidence,
) -> list[PairedComparison]:
    if before.reports.keys() != after.reports.keys():
        raise DataError(
            f"{before.folder} and {after.folder} cannot be compared: the one has the benchmarks "
            f"{sorted(before.reports)}, the other {sorted(after.reports)}"
        )
    comparisons: list[PairedComparison] = []
    for name in after.reports:
        for decoding in _DECODINGS:
            if (name, decoding) in before.counts and (name, decoding) in after.counts:
                confidence = level(after.reports[name].confidence)
                found = _compare_one(
                    before, after, benchmarks=[name], decoding=decoding, num_tests=num_tests, confidence=confidence
                )
                comparisons.append(found)
    return comparisons


def _compare_one(
    before: Evaluation,
    after: Evaluation,
    *,
    benchmarks: Sequence[str],
    decoding: Decoding,
    num_tests: int | None,
    confidence: float,
) -> PairedComparison:
    """Compare two evaluations on the problems of the benchmarks, which are taken together."""
    counts = [(before.counts[name, decoding], after.counts[name, decoding]) for name in benchmarks]
    pair = _scored_in_both(counts)
    if pair is None:
        raise DataError(f"benchmark {benchmarks[0]!r}: the two evaluations have no scored problem in common")
    asked = [[_asked(each.reports[name]) for name in benchmarks] for each in (before, after)]
    corrected = None
    if num_tests is not None:
        ends = paired_new_problems_interval(*pair, confidence=gate_confidence(confidence, num_tests)).range
        beyond = pair[1].mean - pair[0].mean - float(unseen_loss(pair[1].value - pair[0].value))
        corrected = Range(low=min(ends.low, max(beyond, -1.0)), high=ends.high)
    found = _difference(*pair, confidence=confidence, decoding=decoding)
    assert found.num_changed is not None, "only files of earlier versions lack it"
    assert found.floor_binds is not None, "only files of earlier versions lack it"
    return PairedComparison(
        benchmark=benchmarks[0],
        decoding=decoding,
        num_problems=found.num_problems,
        num_unpaired=sum(len(old.scored.keys() ^ new.scored.keys()) for old, new in counts),
        before=pair[0].mean,
        after=pair[1].mean,
        difference=found.value,
        new_problems=found.new_problems,
        floor_binds=found.floor_binds,
        corrected=corrected,
        rerun=found.rerun,
        p=found.p,
        p_corrected=found.p,
        num_changed=found.num_changed,
        num_clusters=found.num_clusters,
        confidence=confidence,
        is_same_decoding=asked[0] == asked[1],
    )


def _asked(report: EvalReport) -> tuple[dict[str, Any], str]:
    """Return how the questions of a benchmark were asked."""
    return report.decoding.compared(), report.prompt


# ---- one difference ----


class PairedDifference(Estimate):
    """A paired difference of two scores, after minus before, over the problems scored in both."""

    num_fixed: int
    """Problems whose answers are mostly right after, and were not before."""
    num_broken: int
    p: float
    """p-value of the sign-flip test, not corrected for the number of comparisons."""
    num_changed: int | None = None
    """Problems, or clusters of them, with different scores; None in files of earlier versions."""
    floor_binds: bool | None = None
    """Whether `new_problems` is as narrow as so few problems allow; None in files of earlier versions."""


def paired_difference(
    before: AnswerCounts, after: AnswerCounts, *, confidence: float, decoding: Decoding
) -> PairedDifference | None:
    """Return the mean difference over the problems scored in both, after minus before; None if there is none."""
    pair = _scored_in_both([(before, after)])
    if pair is None:
        return None
    return _difference(*pair, confidence=confidence, decoding=decoding)


def _scored_in_both(counts: Sequence[tuple[AnswerCounts, AnswerCounts]]) -> tuple[ProblemScores, ProblemScores] | None:
    """Return both scores of each problem that has both, in one order; None if no problem has.

    `counts` has those before and after of each benchmark; a problem of several benchmarks counts once.
    """
    scores: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    clusters: list[str] = []
    seen: set[str] = set()
    for before, after in counts:
        shared = sorted(before.scored.keys() & after.scored.keys() - seen)  # sums must not depend on a set's order
        scores[0].extend(before.scored[i] for i in shared)
        scores[1].extend(after.scored[i] for i in shared)
        # an evaluation of an earlier version does not know the clusters of its problems
        clusters += [after.problems[i].cluster or before.problems[i].cluster for i in shared]
        seen.update(shared)
    if not seen:
        return None
    return problem_scores(scores[0], clusters=clusters), problem_scores(scores[1], clusters=clusters)


def _difference(
    before: ProblemScores, after: ProblemScores, *, confidence: float, decoding: Decoding
) -> PairedDifference:
    new_problems = paired_new_problems_interval(before, after, confidence=confidence)
    differences = [b - a for a, b in zip(before.exact, after.exact, strict=True)]
    test = sign_flip_test(differences, None if before.clusters is None else before.clusters.tolist())
    majorities = [(a >= 0.5, b >= 0.5) for a, b in zip(before.value, after.value, strict=True)]
    rerun = None  # another run would give the same greedy answers
    if decoding == "sampled":
        rerun = paired_rerun_interval(before, after, confidence=confidence)
    return PairedDifference(
        value=after.mean - before.mean,
        new_problems=new_problems.range,
        rerun=rerun,
        num_problems=len(before.value),
        num_clusters=before.num_clusters,
        num_fixed=majorities.count((False, True)),
        num_broken=majorities.count((True, False)),
        p=test.p,
        num_changed=test.num_changed,
        floor_binds=new_problems.floor_binds,
    )
