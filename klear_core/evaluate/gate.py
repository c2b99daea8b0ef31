"""Compare two models' evaluations problem by problem, to decide whether the later model is better."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from klear_core.artifacts.records import read_shards
from klear_core.config.settings import Settings, result_settings
from klear_core.errors import DataError
from klear_core.evaluate.stats import paired_interval
from klear_core.scores import EvalReport, read_reports
from klear_core.types import EvalSample

Decoding = Literal["sampled", "greedy"]
_DECODINGS: tuple[Decoding, ...] = ("sampled", "greedy")


class Comparison(Settings):
    """Difference of two models' scores on one benchmark: after minus before, over the problems scored for both."""

    benchmark: str
    decoding: Decoding
    num_problems: int = Field(ge=1)
    num_unpaired: int = Field(ge=0)
    """Problems scored for only one of the two models; they are left out."""
    before: float = Field(ge=0, le=1)
    after: float = Field(ge=0, le=1)
    difference: float = Field(ge=-1, le=1)
    low: float = Field(ge=-1, le=1)
    high: float = Field(ge=-1, le=1)
    confidence: float = Field(gt=0, lt=1)
    is_same_decoding: bool
    """Whether both models were decoded with the same settings; if not, these may explain part of the difference."""

    @property
    def is_better(self) -> bool:
        """Whether the entire interval is above zero."""
        return self.low > 0

    @property
    def is_worse(self) -> bool:
        """Whether the entire interval is below zero."""
        return self.high < 0

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.is_better or self.is_worse


def compare(before: Path, after: Path) -> tuple[Comparison, ...]:
    """Compare two evaluations' artifact folders, for each benchmark and each decoding that both have.

    The confidence level is that of `after`. Raise DataError if the benchmarks differ or one has no scored problem in
    common.
    """
    reports_before = {r.benchmark: r for r in read_reports(before)}
    reports_after = {r.benchmark: r for r in read_reports(after)}
    if reports_before.keys() != reports_after.keys():
        raise DataError(
            f"{before} and {after} cannot be compared: the one has the benchmarks {sorted(reports_before)}, "
            f"the other {sorted(reports_after)}"
        )
    means_before, means_after = _problem_means(before), _problem_means(after)
    comparisons: list[Comparison] = []
    for name, report in reports_after.items():
        for decoding in _DECODINGS:
            key = (name, decoding)
            if key in means_before and key in means_after:
                comparisons.append(
                    _compare_one(means_before[key], means_after[key], reports_before[name], report, decoding=decoding)
                )
    return tuple(comparisons)


def _compare_one(
    before: Mapping[str, float],
    after: Mapping[str, float],
    report_before: EvalReport,
    report_after: EvalReport,
    *,
    decoding: Decoding,
) -> Comparison:
    shared = sorted(before.keys() & after.keys())  # sorted, so that float sums do not depend on the order of a set
    if not shared:
        raise DataError(f"benchmark {report_after.benchmark!r}: the two evaluations have no scored problem in common")
    means_before = [before[problem_id] for problem_id in shared]
    means_after = [after[problem_id] for problem_id in shared]
    interval = paired_interval(means_before, means_after, confidence=report_after.confidence)
    return Comparison(
        benchmark=report_after.benchmark,
        decoding=decoding,
        num_problems=len(shared),
        num_unpaired=len(before.keys() ^ after.keys()),
        before=sum(means_before) / len(shared),
        after=sum(means_after) / len(shared),
        difference=interval.value,
        low=interval.low,
        high=interval.high,
        confidence=report_after.confidence,
        is_same_decoding=result_settings(report_before.decoding) == result_settings(report_after.decoding),
    )


def _problem_means(folder: Path) -> dict[tuple[str, Decoding], dict[str, float]]:
    """Return the share of right answers of every problem with a scored answer, by benchmark and decoding."""
    num_scored: Counter[tuple[str, Decoding, str]] = Counter()
    num_correct: Counter[tuple[str, Decoding, str]] = Counter()
    for sample in read_shards(folder / "samples", EvalSample):
        if sample.verdict.outcome.counts_for_model:
            key = (sample.benchmark, sample.decoding, sample.problem_id)
            num_scored[key] += 1
            num_correct[key] += sample.verdict.is_correct
    means: dict[tuple[str, Decoding], dict[str, float]] = defaultdict(dict)
    for (benchmark, decoding, problem_id), n in num_scored.items():
        means[benchmark, decoding][problem_id] = num_correct[benchmark, decoding, problem_id] / n
    return dict(means)
