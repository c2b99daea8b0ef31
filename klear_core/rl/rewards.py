"""From verdicts to rewards, and from rewards to advantages. What the judge could not judge has no reward: see `groups.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import assert_never

from klear_core.config.rl import AdvantageConfig, BatchAdvantage, GrpoAdvantage, OverlongConfig, RewardConfig, RlooAdvantage
from klear_core.prompts import THINK_CLOSE, THINK_OPEN
from klear_core.types import Completion, Outcome, Verdict


def reward_of(completion: Completion, verdict: Verdict, cfg: RewardConfig) -> float:
    """Format first, as published (`reward_config.py`): no `</think>`, then no `<think>`, then what the verifier says."""
    fault = _format_reward(completion, cfg)
    if fault is not None:
        return fault
    score = verdict.score if verdict.outcome is Outcome.SCORED else 0.0
    if not cfg.soft:
        score = float(score == 1.0)
    return cfg.wrong + (cfg.correct - cfg.wrong) * score


def is_positive(completion: Completion, verdict: Verdict, cfg: RewardConfig) -> bool:
    """Right and well-formed: a total reward of 1 in the published code, here whatever the numbers and before a penalty."""
    return verdict.is_correct and _format_reward(completion, cfg) is None


def overlong_penalty(num_tokens: int, max_new_tokens: int, cfg: OverlongConfig) -> float:
    """What a response near the end of its budget loses: 0 up to the buffer, then a straight line to `penalty` (DAPO, arXiv 2503.14476)."""
    if cfg.penalty_tokens == 0:
        return 0.0
    over = num_tokens - (max_new_tokens - cfg.penalty_tokens)
    return cfg.penalty * min(1.0, max(0.0, over / cfg.penalty_tokens))


def _format_reward(completion: Completion, cfg: RewardConfig) -> float | None:
    """What an answer without its tags gets, whatever it says; None for a well-formed one."""
    if cfg.missing_close is not None and THINK_CLOSE not in completion.text:
        return cfg.missing_close
    if cfg.missing_open is not None and THINK_OPEN not in completion.text:
        return cfg.missing_open
    return None


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
