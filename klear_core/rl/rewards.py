"""From a verdict to a reward. Judge failures have none: see `groups.py`."""

from __future__ import annotations

from klear_core.config.rl import OverlongConfig, RewardConfig
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
