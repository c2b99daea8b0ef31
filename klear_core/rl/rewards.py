"""Turn verdicts into rewards, and rewards into advantages. Answers that could not be judged are dropped in `groups.py`.

Axis letters: P prompts, G samples of one prompt.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import assert_never

from klear_core.config.rl import (
    AdvantageConfig,
    BatchAdvantage,
    CustomReward,
    GrpoAdvantage,
    OverlongConfig,
    RewardConfig,
    RlooAdvantage,
)
from klear_core.config.verify import source_digest
from klear_core.errors import JudgeError, RewardError
from klear_core.prompts import THINK_CLOSE, THINK_OPEN
from klear_core.types import Completion, JudgedAnswer, MathReference, Outcome, Problem, Verdict
from klear_core.verify import JudgeHealth, JudgePool


def reward_of(completion: Completion, verdict: Verdict, cfg: RewardConfig) -> float:
    """Return the reward: that of a missing `</think>`, else of a missing `<think>`, else of the verdict.

    This is the order of the published code (`reward_config.py`).
    """
    format_reward = _format_reward(completion, cfg)
    if format_reward is not None:
        return format_reward
    # NO_ANSWER counts as wrong; verdicts of failed judges also come here, and `groups.py` drops them by their outcome.
    score = verdict.score if verdict.outcome is Outcome.SCORED else 0.0
    # A hard reward: a program that passes only some of its tests is as wrong as one that passes none.
    if not cfg.soft:
        score = float(score == 1.0)
    return cfg.wrong + (cfg.correct - cfg.wrong) * score


def custom_reward(values: Mapping[str, float | None], cfg: RewardConfig) -> float:
    """Return the weighted sum of the user's rewards; `groups.py` drops answers for which one of them failed."""
    weight_of = {reward.label: reward.weight for reward in cfg.custom}
    return math.fsum(weight_of[name] * value for name, value in values.items() if value is not None)


def is_positive(completion: Completion, verdict: Verdict, cfg: RewardConfig) -> bool:
    """Return whether an answer is right and well-formed.

    The published code tests for a total reward of 1; here the configured rewards and penalties do not matter.
    """
    return verdict.is_correct and is_well_formed(completion, cfg)


def is_well_formed(completion: Completion, cfg: RewardConfig) -> bool:
    """Return whether an answer has the tags that the reward asks for."""
    return _format_reward(completion, cfg) is None


def overlong_penalty(num_tokens: int, max_new_tokens: int, cfg: OverlongConfig) -> float:
    """Return the amount taken off a response near the end of its token budget (DAPO, arXiv 2503.14476).

    It is 0 up to the last `penalty_tokens` of the budget, then grows linearly to `penalty`.
    """
    if cfg.penalty_tokens == 0:
        return 0.0
    over = num_tokens - (max_new_tokens - cfg.penalty_tokens)  # negative before the last `penalty_tokens`
    return cfg.penalty * min(1.0, max(0.0, over / cfg.penalty_tokens))


def _format_reward(completion: Completion, cfg: RewardConfig) -> float | None:
    """Return the fixed reward of an answer without its tags; None if it is well-formed."""
    # `text` includes a `<think>` that the chat template puts into the prompt (see `prompts.completed`).
    if cfg.missing_close is not None and THINK_CLOSE not in completion.text:
        return cfg.missing_close
    if cfg.missing_open is not None and THINK_OPEN not in completion.text:
        return cfg.missing_open
    return None


STD_FLOOR = 1e-6
"""Added to standard deviations (the paper's code), so that equal rewards give 0 instead of rounding noise over 0."""


def advantages(rewards_PG: Sequence[Sequence[float]], cfg: AdvantageConfig) -> list[list[float]]:
    """Return one advantage per reward, in the same order. All tokens of a response share it."""
    match cfg:
        case GrpoAdvantage(std="none"):
            return [_centred(rewards_G) for rewards_G in rewards_PG]
        case GrpoAdvantage():
            ddof = 1 if cfg.std == "sample" else 0  # the variance is divided by G - ddof
            return [_standardised(rewards_G, ddof=ddof) for rewards_G in rewards_PG]
        case RlooAdvantage():
            return [_leave_one_out(rewards_G) for rewards_G in rewards_PG]
        case BatchAdvantage():
            return _batch_standardised(rewards_PG)
        case _:
            assert_never(cfg)


def _standardised(rewards_G: Sequence[float], *, ddof: int) -> list[float]:
    """Return (r - mean) / std; `ddof` is 1 for the sample std and 0 for the population std.

    A group of one gets its reward with the sample std (the paper's code), and 0 with the population std.
    """
    # Its sample variance would be 0 / 0.
    if len(rewards_G) == 1:
        return list(rewards_G) if ddof else [0.0]
    centred_G = _centred(rewards_G)
    std = math.sqrt(sum(c * c for c in centred_G) / (len(rewards_G) - ddof))
    return _over_std(centred_G, std)


def _centred(rewards_G: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards_G) / len(rewards_G)  # fsum is exact, so the order of answers does not matter
    return [r - mean for r in rewards_G]


def _leave_one_out(rewards_G: Sequence[float]) -> list[float]:
    """Return r - mean of the others = G / (G - 1) * (r - mean of all); 0 for a group of one."""
    if len(rewards_G) == 1:
        return [0.0]
    return [c * len(rewards_G) / (len(rewards_G) - 1) for c in _centred(rewards_G)]


def _batch_standardised(rewards_PG: Sequence[Sequence[float]]) -> list[list[float]]:
    centred_PG = [_centred(rewards_G) for rewards_G in rewards_PG]
    flat = [c for centred_G in centred_PG for c in centred_G]
    # Every group has mean 0 by now, so the batch has too and needs no centring.
    std = math.sqrt(math.fsum(c * c for c in flat) / max(1, len(flat)))  # a step may have no group
    return [_over_std(centred_G, std) for centred_G in centred_PG]


def _over_std(centred_G: Sequence[float], std: float) -> list[float]:
    return [c / (std + STD_FLOOR) for c in centred_G]


# ---- user rewards ----
# Compute rewards of the user's own for a judged answer, in the judges' worker processes.


log = logging.getLogger(__name__)


class UserRewards:
    """Computes the configured functions' values; see `RewardValues`. Their source must not change afterwards."""

    def __init__(self, rewards: Sequence[CustomReward], judges: JudgePool) -> None:
        """Hash the sources. Raise ConfigError if one is missing."""
        self._judges = judges
        # The digest goes with each request, so that a worker notices if the source is another by now.
        self._rewards = {reward: source_digest(reward.module) for reward in rewards}
        self._health = {
            reward.label: JudgeHealth(
                max_failed_frac=judges.cfg.max_failed_frac,
                min_failed_count=judges.cfg.min_failed_count,
                what=f"values of the reward {reward.label!r}",
            )
            for reward in rewards
        }

    async def __call__(self, problem: Problem, completion: Completion, verdict: Verdict) -> dict[str, float | None]:
        """Return each reward's value by name, None where the function failed.

        Raise RewardError when one fails too often: the limits are those of the judges.
        """
        if not verdict.outcome.counts_for_model or completion.finish_reason == "abort":
            return {}  # such an answer is dropped from its group, whatever its rewards are
        reference = problem.reference
        answer = JudgedAnswer(
            problem_id=problem.problem_id,
            source=problem.source,
            question=problem.question,
            answers=reference.answers if isinstance(reference, MathReference) else (),
            text=completion.text,
            score=verdict.score,
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
        )
        values = await asyncio.gather(*(self._value(reward, answer) for reward in self._rewards))
        return dict(zip(self._health, values, strict=True))  # both dicts are in the order of the settings

    async def _value(self, reward: CustomReward, answer: JudgedAnswer) -> float | None:
        future = self._judges.submit_reward(reward, self._rewards[reward], answer)
        result = await asyncio.wrap_future(future)
        health = self._health[reward.label]
        # Before `record`, which counts this one: a warning for each failure would flood the log.
        is_first_failure = not result.outcome.counts_for_model and health.num_failed == 0
        try:
            health.record(result)
        except JudgeError as e:
            raise RewardError(str(e)) from e
        if result.outcome.counts_for_model:
            return result.score
        if is_first_failure:
            log.warning("the reward %r failed on an answer: %s", reward.label, result.detail)
        return None
