"""Estimates from repeated answers to the same problems, with intervals that count problems and samples.

Samples of one problem are alike, so the unit of every interval is the problem: its mean over its samples is one
observation in 0..1. That covers both what a re-run would change and what other problems of the same kind would.

The interval is Student's t on the problem means after one problem that is always solved and one that never is have been
added; for paired differences, one that went from never to always and one the other way. With one sample a problem this
is the adjusted Wald family (Agresti and Coull 1998; Bonett and Price 2012 for pairs). It replaces special rules for
scores near 0 or 1, where the plain interval collapses to a point: at 0 of 30 it says 0 to 0.095.

tests/evaluate/test_stats.py measures its coverage, which stays near the nominal one down to 10 problems and at scores near 0,
where the plain t interval loses most of it. The price is width where all problems are equally hard, which benchmarks are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A confidence interval and what it is about; `low <= value <= high`."""

    value: float
    low: float
    high: float


def mean_interval(problem_means: Sequence[float], *, confidence: float) -> Interval:
    """avg@n over problems, each weighing the same. `problem_means` are shares of right samples, in 0..1."""
    assert problem_means, "no problem has a scored sample"
    assert all(0 <= m <= 1 for m in problem_means), problem_means
    return _interval(problem_means, added=(0.0, 1.0), bounds=(0.0, 1.0), confidence=confidence)


def paired_interval(before: Sequence[float], after: Sequence[float], *, confidence: float) -> Interval:
    """The mean of after minus before over the same problems, positive if after is better."""
    assert len(before) == len(after) > 0, (len(before), len(after))
    differences = [b - a for a, b in zip(before, after, strict=True)]
    return _interval(differences, added=(-1.0, 1.0), bounds=(-1.0, 1.0), confidence=confidence)


def seed_interval(values: Sequence[float], *, bounds: tuple[float, float], confidence: float) -> Interval:
    """Plain Student's t, cut at what is possible, on a few whole runs: the scores of at least two seeds, or their differences.

    Equal results give a point, which says that seeds do not differ, and nothing of other problems.
    """
    assert len(values) > 1, "one run has no spread"
    mean, half = _t_interval(values, confidence)
    return Interval(value=mean, low=max(mean - half, bounds[0]), high=min(mean + half, bounds[1]))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that k of n samples, drawn without return, hold a right one: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021).

    Unbiased for samples that are drawn independently; the ratio is a product of c factors 1 - k/i, summed in logs.
    """
    assert 0 <= num_correct <= num_samples, (num_correct, num_samples)
    assert 1 <= k <= num_samples, (k, num_samples)
    num_wrong = num_samples - num_correct
    if num_wrong < k:
        return 1.0
    return -math.expm1(math.fsum(math.log1p(-k / i) for i in range(num_wrong + 1, num_samples + 1)))


def _interval(values: Sequence[float], *, added: tuple[float, float], bounds: tuple[float, float], confidence: float) -> Interval:
    """Student's t around the mean of `values` and the two `added` ones, within `bounds`."""
    value = math.fsum(values) / len(values)
    centre, half = _t_interval([*values, *added], confidence)
    low, high = max(centre - half, bounds[0]), min(centre + half, bounds[1])
    return Interval(value=value, low=min(low, value), high=max(high, value))  # the value can lie outside below 70 % confidence


def _t_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Mean and half width."""
    from scipy.special import stdtrit

    num = len(values)
    mean = math.fsum(values) / num
    variance = math.fsum((v - mean) ** 2 for v in values) / (num - 1)
    return mean, float(stdtrit(num - 1, 0.5 + confidence / 2)) * math.sqrt(variance / num)
