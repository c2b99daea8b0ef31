"""Compute the smallest gain that a benchmark can show, from its numbers of problems and of samples, before any run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from klear_core.evaluate.sign_flip import min_changed

POWER = 0.8
"""Share of runs in which a gain of the printed size is shown, by convention (Cohen 1988)."""
_SPREAD = 0.5
"""Standard deviation of the gain over problems, in logits: training does not help all problems equally."""
_NUM_POINTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Detectable:
    """Differences of avg@n that an evaluation can tell from chance."""

    gain: float | None
    """Smallest gain over another model that the sign-flip test shows in 4 of 5 runs; None if no gain can be."""
    rerun: float
    """Largest difference of two runs of one model, in 95 of 100 cases."""


def detectable(num_problems: int, num_samples: int, *, confidence: float) -> Detectable:
    """Return the smallest differences that an evaluation shows if all difficulties are equally frequent.

    With paired problems only the noise of sampling and the spread of the gain over problems remain. The power is that
    of Student's t test, which the exact sign-flip test has, too (docs/statistics.md), with a correction for few
    answers.
    """
    from scipy.special import ndtri, stdtrit

    difficulty = (np.arange(_NUM_POINTS) + 0.5) / _NUM_POINTS
    noise = float(np.mean(difficulty * (1 - difficulty))) / num_samples
    rerun = min(1.0, float(ndtri(0.5 + confidence / 2)) * math.sqrt(2 * noise / num_problems))
    if num_problems < min_changed(confidence):
        return Detectable(gain=None, rerun=rerun)
    quantiles = float(stdtrit(num_problems - 1, 0.5 + confidence / 2)) + float(ndtri(POWER))
    logits = np.log(difficulty / (1 - difficulty))[:, None]
    spread = _SPREAD * ndtri((np.arange(_NUM_POINTS) + 0.5) / _NUM_POINTS)[None, :]
    # Sums of differences are 2 / n apart, and the exact p-value counts all choices of signs at the sum that is seen.
    continuity = 1 / (num_samples * num_problems)
    low, high = 0.0, 12.0  # mean gain in logits
    for _ in range(40):
        middle = (low + high) / 2
        after = 1 / (1 + np.exp(-(logits + middle + spread)))
        change = after - difficulty[:, None]
        # Over drawn problems the difference varies by the spread of the gain and by the sampling noise of both models.
        variance = float(np.var(change)) + noise + float(np.mean(after * (1 - after))) / num_samples
        needed = quantiles * math.sqrt(variance / num_problems) + continuity
        is_seen = float(np.mean(change)) >= needed
        low, high = (low, middle) if is_seen else (middle, high)
    gain = float(np.mean(1 / (1 + np.exp(-(logits + high + spread))) - difficulty[:, None]))
    # at the largest gain that there is, nothing was seen
    return Detectable(gain=gain if high < 12.0 else None, rerun=rerun)
