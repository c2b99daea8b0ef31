"""From rewards to advantages: how much better than its group a response was. P groups, G rewards of a group (ragged)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import assert_never

from klear_core.config.rl import AdvantageConfig, BatchAdvantage, GrpoAdvantage, RlooAdvantage

STD_FLOOR = 1e-6
"""Added to standard deviations (the paper's code), so that equal rewards give zero and not rounding noise over zero."""


def advantages(rewards_PG: Sequence[Sequence[float]], cfg: AdvantageConfig) -> list[list[float]]:
    """One advantage per reward, in the same order. All tokens of a response share it."""
    match cfg:
        case GrpoAdvantage(std="none"):
            return [_centred(rewards_G) for rewards_G in rewards_PG]
        case GrpoAdvantage():
            return [_standardised(rewards_G, ddof=1 if cfg.std == "sample" else 0) for rewards_G in rewards_PG]
        case RlooAdvantage():
            return [_leave_one_out(rewards_G) for rewards_G in rewards_PG]
        case BatchAdvantage():
            return _batch_standardised(rewards_PG)
        case _:
            assert_never(cfg)


def _standardised(rewards_G: Sequence[float], *, ddof: int) -> list[float]:
    """A group of one is its own reward with the sample std (the paper's code), and 0 with the population std."""
    if len(rewards_G) == 1:
        return list(rewards_G) if ddof else [0.0]
    centred_G = _centred(rewards_G)
    std = math.sqrt(sum(c * c for c in centred_G) / (len(rewards_G) - ddof))
    return [c / (std + STD_FLOOR) for c in centred_G]


def _centred(rewards_G: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [r - mean for r in rewards_G]


def _leave_one_out(rewards_G: Sequence[float]) -> list[float]:
    """r - mean of the others = G / (G - 1) * (r - mean); nothing to compare with gives 0."""
    if len(rewards_G) == 1:
        return [0.0]
    return [c * len(rewards_G) / (len(rewards_G) - 1) for c in _centred(rewards_G)]


def _batch_standardised(rewards_PG: Sequence[Sequence[float]]) -> list[list[float]]:
    centred_PG = [_centred(rewards_G) for rewards_G in rewards_PG]
    flat = [c for centred_G in centred_PG for c in centred_G]
    std = math.sqrt(math.fsum(c * c for c in flat) / max(1, len(flat)))  # group means are 0, so theirs is too
    return [[c / (std + STD_FLOOR) for c in centred_G] for centred_G in centred_PG]
