"""Estimate scores from repeated answers to the same problems, with confidence intervals over problems.

Samples of one problem are correlated, so the unit of every interval is the problem: its mean over its samples is one
observation in 0..1. The interval thus covers the change from sampling again and from other problems of the same kind.

The interval is Student's t on the problem means, after adding one problem that is always solved and one that never is;
for paired differences, one that went from never to always and one the other way. With one sample per problem this is
the adjusted Wald family (Agresti and Coull 1998; Bonett and Price 2012 for pairs). It needs no special rules for scores
near 0 or 1, where the plain interval collapses to a point: for 0 of 30 it gives 0 to 0.095.

tests/evaluate/test_stats.py measures the coverage: it stays near the nominal level down to 10 problems and at scores
near 0, where the plain t interval loses most of it. The price is a wider interval if all problems are equally hard,
which those of benchmarks are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its confidence interval; `low <= value <= high`."""

    value: float
    low: float
    high: float


def mean_interval(problem_means: Sequence[float], *, confidence: float) -> Interval:
    """Return avg@n, with equal weight for every problem. `problem_means` are shares of right samples, in 0..1."""
    assert problem_means, "no problem has a scored sample"
    assert all(0 <= m <= 1 for m in problem_means), problem_means
    return _interval(problem_means, added=(0.0, 1.0), bounds=(0.0, 1.0), confidence=confidence)


def paired_interval(before: Sequence[float], after: Sequence[float], *, confidence: float) -> Interval:
    """Return the mean of after minus before over the same problems; positive if after is better."""
    assert len(before) == len(after) > 0, (len(before), len(after))
    differences = [b - a for a, b in zip(before, after, strict=True)]
    return _interval(differences, added=(-1.0, 1.0), bounds=(-1.0, 1.0), confidence=confidence)


def seed_interval(values: Sequence[float], *, bounds: tuple[float, float], confidence: float) -> Interval:
    """Return the plain Student's t interval, cut to `bounds`, for the scores (or differences) of at least two seeds.

    Equal values give a single point: seeds do not differ, which says nothing about other problems.
    """
    assert len(values) > 1, "one run has no spread"
    mean, half = _t_interval(values, confidence)
    return Interval(value=mean, low=max(mean - half, bounds[0]), high=min(mean + half, bounds[1]))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return pass@k, the chance that one of k samples is right: 1 - C(n-c, k) / C(n, k), with c of n samples right.

    Unbiased for independent samples (Chen et al. 2021). The ratio is a product of c factors 1 - k/i, summed as logs.
    """
    assert 0 <= num_correct <= num_samples, (num_correct, num_samples)
    assert 1 <= k <= num_samples, (k, num_samples)
    num_wrong = num_samples - num_correct
    if num_wrong < k:
        return 1.0
    return -math.expm1(math.fsum(math.log1p(-k / i) for i in range(num_wrong + 1, num_samples + 1)))


def _interval(
    values: Sequence[float], *, added: tuple[float, float], bounds: tuple[float, float], confidence: float
) -> Interval:
    """Return the mean of `values` with the Student's t interval of `values` and the `added` ones, cut to `bounds`."""
    value = math.fsum(values) / len(values)
    centre, half = _t_interval([*values, *added], confidence)
    low, high = max(centre - half, bounds[0]), min(centre + half, bounds[1])
    # min and max: below 70 % confidence the value can lie outside the interval
    return Interval(value=value, low=min(low, value), high=max(high, value))


def _t_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the mean and the half width of its Student's t interval."""
    from scipy.special import stdtrit

    num = len(values)
    mean = math.fsum(values) / num
    variance = math.fsum((v - mean) ** 2 for v in values) / (num - 1)
    # two-sided: the quantile at 1/2 + confidence/2 leaves (1 - confidence)/2 on each side
    return mean, float(stdtrit(num - 1, 0.5 + confidence / 2)) * math.sqrt(variance / num)
