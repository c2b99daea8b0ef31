"""Estimate how often models are right from repeated answers: pass@k, G-Pass@k, maj@k; and summarise runs over seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from statistics import fmean, stdev

from klear_core.config.settings import Settings
from klear_core.evaluate.intervals import t_interval
from klear_core.scores import Range

SEED_CONFIDENCE = 0.95
"""Confidence level of intervals over seeds."""
_ROUNDING = 1e-12
"""Differences of scores between 0 and 1 that are smaller than this come from rounding."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> Fraction:
    """Return pass@k, the chance that one of k samples is right: 1 - C(n-c, k) / C(n, k), with c of n samples right.

    Unbiased for independent samples (Chen et al. 2021). Raise ValueError for k outside 1..n.
    """
    assert 0 <= num_correct <= num_samples, (num_correct, num_samples)
    _check_k("pass", k, num_samples)
    return 1 - Fraction(math.comb(num_samples - num_correct, k), math.comb(num_samples, k))


def g_pass_at_k(num_samples: int, num_correct: int, k: int, *, threshold: float) -> Fraction:
    """Return G-Pass@k, the chance that at least `threshold` (a share) of k samples are right.

    Liu et al. 2024, equation 3: unbiased, and pass@k for a threshold just above zero. Raise ValueError for k outside
    1..n.
    """
    assert 0 < threshold <= 1, threshold
    _check_k("G-Pass", k, num_samples)
    # the small number undoes rounding up after products like 0.1 * 30 = 3.0000000000000004
    fewest = max(1, math.ceil(threshold * k - 1e-9))
    num_wrong = num_samples - num_correct
    hits = sum(math.comb(num_correct, j) * math.comb(num_wrong, k - j) for j in range(fewest, min(num_correct, k) + 1))
    return Fraction(hits, math.comb(num_samples, k))


def maj_at_n(answers: Sequence[str | None], is_correct: Sequence[bool]) -> Fraction:
    """Return maj@n of one problem: the share of right samples among those that gave the most common answer.

    `answers` are normalised texts; None, no answer, gets no vote. Of several most common answers each is chosen with
    the same chance. 0 if no sample has an answer.
    """
    assert len(answers) == len(is_correct), (len(answers), len(is_correct))
    votes = Counter(a for a in answers if a is not None)
    if not votes:
        return Fraction(0)
    most = max(votes.values())
    winners = [answer for answer, n in votes.items() if n == most]
    # the judge may call two samples of one text differently, so each answer counts by its share of right samples
    right = sum(ok for answer, ok in zip(answers, is_correct, strict=True) if answer in winners)
    return Fraction(right, most * len(winners))


def _check_k(name: str, k: int, num_samples: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"{name}@{k} cannot be estimated from {num_samples} samples: k must be in 1..{num_samples}")


class SeedSpread(Settings):
    """Scores, or paired differences, of several complete runs that differ in their seed."""

    mean: float
    least: float
    most: float
    num: int
    interval: Range | None
    """Student's t interval of the mean; None if a run collapsed, because no interval over few runs is reliable then: at
    a collapse rate of 10 % it covers the mean of all runs in 42 of 100 cases."""


def seed_spread(values: Sequence[float], *, has_collapsed: bool, bounds: tuple[float, float]) -> SeedSpread:
    """Return mean and range, with a 95 % interval if no run collapsed. Raise ValueError for a single run."""
    if len(values) < 2:
        raise ValueError("one run has no spread over seeds")
    interval = None if has_collapsed else t_interval(values, bounds=bounds, confidence=SEED_CONFIDENCE)
    return SeedSpread(mean=fmean(values), least=min(values), most=max(values), num=len(values), interval=interval)


def t_test_p(values: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's t test that the mean is 0.

    Equal values have no spread to test by: theirs is that of the sign-flip test, 2 / 2^n, or 1 if they are 0.
    Differences of scores that are equal but for rounding are equal.
    """
    from scipy.special import stdtr

    mean, spread = fmean(values), stdev(values)
    if spread <= _ROUNDING:
        return 2.0 ** (1 - len(values)) if abs(mean) > _ROUNDING else 1.0
    t = mean / spread * len(values) ** 0.5
    return float(2 * stdtr(len(values) - 1, -abs(t)))


def largest_rate(num_events: int, num_runs: int) -> float:
    """Return the largest rate of an event that its count in so many runs leaves possible.

    None in 5 runs leave 45 %. It is the one-sided upper bound of Clopper and Pearson at 95 %.
    """
    from scipy.special import betaincinv

    if num_events == num_runs:
        return 1.0
    return float(betaincinv(num_events + 1, num_runs - num_events, SEED_CONFIDENCE))
