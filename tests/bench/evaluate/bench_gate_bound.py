"""Bound how often any rule can promote a gain without promoting rare losses: `klear bench gate_bound`.

An oracle knows how problems are distributed, the gain to find, and the candidates that it must not promote, and applies
the likelihood ratio test of all answers (Neyman and Pearson): no rule with its error promotes the gain more often. The
candidates have the mean change 0: equal on every problem, better on some and worse on others (`uneven`), or `rare`: 5 %
of all problems are lost entirely, out of those whose chance is above a threshold, with a gain on the others. A rule must
bear all of them, so the least power over the candidates is the bound.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from klear_core.evaluate.stats.significance import GATE_GAIN
from klear_core.seeding import seed_for

Floats = npt.NDArray[np.float64]

SUITES = {"AIME24": (30, 64), "AIME24+25": (60, 64), "AMC23 + BRUMO25": (70, 32), "LCB v6": (131, 8)}
"""Problems and samples of each."""
NUM_RUNS = 20_000
EQUAL_ERROR, RARE_ERROR = 0.025, 0.03
THRESHOLDS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
_NUM_CHANCES, _NUM_GAINS = 200, 41
_CHANCES: Floats = (np.arange(_NUM_CHANCES) + 0.5) / _NUM_CHANCES


def _after(gain: float) -> Floats:
    """Return the chances after a mean gain in logits with a standard deviation of 0.5, by chance before and spread."""
    from scipy.special import ndtri

    spread = 0.5 * ndtri((np.arange(_NUM_GAINS) + 0.5) / _NUM_GAINS)
    logits = np.log(_CHANCES / (1 - _CHANCES))[:, None]
    return np.asarray(1 / (1 + np.exp(-(logits + gain + spread))))


def _lost(threshold: float) -> Floats:
    """Return the share of problems that are lost, by chance before; 5 % of all."""
    is_above = threshold < _CHANCES
    return np.where(is_above, 0.05 / is_above.mean(), 0.0)


def gain_of_rare(threshold: float) -> float:
    """Return the gain in logits of the other problems with which the mean change is 0."""
    lost = _lost(threshold)
    low, high = 0.0, 3.0
    for _ in range(50):
        middle = (low + high) / 2
        change = (1 - lost) * (_after(middle).mean(axis=1) - _CHANCES) - lost * _CHANCES
        low, high = (middle, high) if change.sum() < 0 else (low, middle)
    return high


def counts_of(after: Floats, lost: Floats, n: int) -> Floats:
    """Return the chance of each pair of counts of right answers, before and after, of a drawn problem."""
    from scipy.stats import binom

    right = np.arange(n + 1)
    before = binom.pmf(right, n, _CHANCES[:, None])
    changed = binom.pmf(right, n, after[..., None]).mean(axis=1)
    nothing = np.where(right == 0, 1.0, 0.0)
    mixed = (1 - lost)[:, None] * changed + lost[:, None] * nothing
    return np.asarray(before.T @ mixed / _NUM_CHANCES)


def candidates(n: int) -> Iterator[tuple[str, Floats, float]]:
    """Yield name, distribution of counts and allowed error of each candidate that must not be promoted."""
    none = np.zeros(_NUM_CHANCES)
    yield "equal", counts_of(_CHANCES[:, None], none, n), EQUAL_ERROR
    yield "uneven", counts_of(_after(0.0), none, n), EQUAL_ERROR
    for threshold in THRESHOLDS:
        after = _after(gain_of_rare(threshold))
        yield f"rare, chances above {threshold}", counts_of(after, _lost(threshold), n), RARE_ERROR


def power(better: Floats, other: Floats, num_problems: int, *, error: float) -> float:
    """Return how often the likelihood ratio test against `other` finds `better`."""
    draw = np.random.default_rng(seed_for(0, "bench/gate_bound", num_problems))
    ratio = np.log(np.maximum(better, 1e-300)) - np.log(np.maximum(other, 1e-300))
    sums = []
    for counts in (other, better):
        edges = np.cumsum(counts.ravel()) / counts.sum()
        drawn = [np.searchsorted(edges, draw.random((1000, num_problems))) for _ in range(NUM_RUNS // 1000)]
        sums.append(np.concatenate([ratio.ravel()[cells].sum(axis=1) for cells in drawn]))
    return float(np.mean(sums[1] > np.quantile(sums[0], 1 - error)))


def measure() -> list[dict[str, object]]:
    """Return the oracle's power against each candidate, and the least of each suite."""
    measures: list[dict[str, object]] = []
    for name, (num_problems, n) in SUITES.items():
        better = counts_of(_after(GATE_GAIN), np.zeros(_NUM_CHANCES), n)
        found = {what: power(better, other, num_problems, error=error) for what, other, error in candidates(n)}
        least = min(found.values())
        for what, value in (found | {"bound": least}).items():
            row = {"name": f"{name}: {what}", "value": value, "unit": "share", "target": ">= 0", "ok": True}
            measures.append(row | {"versions": {"numpy": np.__version__}})
    return measures
