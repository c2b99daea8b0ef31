"""Turn verdicts into rewards, and rewards into advantages. Answers that could not be judged are dropped in `groups.py`.

Axis letters: P prompts, G samples of one prompt.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from klear_core.config.rewards import (
    AdvantageConfig,
    BatchAdvantage,
    CustomReward,
    GdpoAdvantage,
    GrpoAdvantage,
    MaxRlAdvantage,
    OverlongConfig,
    PassAtKAdvantage,
    RewardConfig,
    RlooAdvantage,
)
from klear_core.config.rl import RlConfig
from klear_core.config.verify import source_digest
from klear_core.errors import JudgeError, RewardError
from klear_core.prompts import THINK_CLOSE, THINK_OPEN
from klear_core.types import (
    FAILED_ON_ANSWER,
    Completion,
    JudgedAnswer,
    MathReference,
    Outcome,
    Problem,
    Rollout,
    RolloutGroup,
    Verdict,
)
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
    """Return the weighted sum of the user's rewards; those that failed are left out.

    `with_failed_values` adds those that failed on the answer, `groups.py` drops answers for which one failed by itself.
    """
    weight_of = {reward.label: reward.weight for reward in cfg.custom}
    given = {name: value for name, value in values.items() if value not in (None, FAILED_ON_ANSWER)}
    return math.fsum(weight_of[name] * value for name, value in given.items() if value is not None)


def with_failed_values(rollouts: Sequence[Rollout], cfg: RewardConfig) -> tuple[Rollout, ...]:
    """Return a complete group in which an answer that a user's reward failed on has the reward's `failed_value`, or the
    value of the answer that gains least by this reward.

    So no answer is better off for making a reward fail. Where the reward failed on all answers there is no such value,
    and they are dropped as if it had failed by itself.
    """
    filled = list(rollouts)
    for reward in cfg.custom:
        name, weight = reward.label, reward.weight
        values = [rollout.custom_rewards.get(name) for rollout in filled]
        given = [value for value in values if value is not None and value != FAILED_ON_ANSWER]
        lowest = min(given, key=lambda value: weight * value, default=None)
        value = lowest if reward.failed_value is None else reward.failed_value
        for i, rollout in enumerate(filled):
            if values[i] == FAILED_ON_ANSWER:
                filled[i] = replace(
                    rollout,
                    reward=rollout.reward + weight * (value or 0.0),
                    custom_rewards={**rollout.custom_rewards, name: value},
                    failed_rewards=(*rollout.failed_rewards, name),
                )
    return tuple(filled)


def complete_rewards(rollouts: Sequence[Rollout], cfg: RlConfig) -> tuple[Rollout, ...]:
    """Return a complete group with the rewards that depend on its other answers: values of failed functions, length."""
    rollouts = with_failed_values(rollouts, cfg.reward)
    if cfg.reward.length_coef == 0:
        return rollouts
    judged = [r.is_positive for r in rollouts if r.verdict.outcome.counts_for_model]
    pass_rate = sum(judged) / max(1, len(judged))  # without a judged answer no reward has a meaning
    cost = cfg.reward.length_coef * pass_rate / cfg.rollout.sampling.max_new_tokens  # of one token
    return tuple(replace(r, reward=r.reward - cost * len(r.completion.token_ids)) for r in rollouts)


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


SAME_REWARD = 1e-9
"""Rewards closer than this count as equal."""

STD_FLOOR = 1e-6
"""Added to standard deviations (the paper's code), so that equal rewards give 0 instead of rounding noise over 0."""


def group_advantages(groups: Sequence[RolloutGroup], cfg: RlConfig) -> list[list[float]]:
    """Return one advantage per answer of each group. All tokens of a response share it."""
    values_PKG = [compared_values(group.rollouts, cfg) for group in groups]
    if isinstance(cfg.advantage, GdpoAdvantage):
        weights_K = _part_weights(cfg)
        sums_PG = []
        for values_KG in values_PKG:
            standardised_KG = [_standardised(values_G, ddof=0) for values_G in values_KG]
            # One tuple per answer, with its advantage in each part.
            by_answer = zip(*standardised_KG, strict=True)
            sums_PG.append([_weighted(weights_K, parts_K) for parts_K in by_answer])
        return _batch_standardised(sums_PG)
    return advantages([values_KG[0] for values_KG in values_PKG], cfg.advantage)


def compared_values(rollouts: Sequence[Rollout], cfg: RlConfig) -> list[list[float]]:
    """Return the values of a group's answers that its advantages compare: one list, or one per part of the reward."""
    match cfg.advantage:
        case MaxRlAdvantage():
            return [[float(r.is_positive) for r in rollouts]]
        case GdpoAdvantage():
            parts = [_reward_parts(r, cfg.reward) for r in rollouts]
            return [list(part_G) for part_G in zip(*parts, strict=True)]
        case _:
            return [[r.reward for r in rollouts]]


def has_advantage(rollouts: Sequence[Rollout], cfg: RlConfig) -> bool:
    """Return whether any answer of a group has an advantage."""
    values_KG = compared_values(rollouts, cfg)
    if isinstance(cfg.advantage, PassAtKAdvantage):
        # The best of k answers is never one of the k - 1 lowest, so differences among those do not matter.
        k = min(cfg.advantage.k, len(rollouts) - 1)
        values_KG = [sorted(values_G)[k - 1 :] for values_G in values_KG]
    return any(max(values_G) - min(values_G) >= SAME_REWARD for values_G in values_KG)


def terms_of(rollout: Rollout, cfg: RlConfig) -> dict[str, float]:
    """Return the terms of a reward by what they are for; their sum is the reward.

    `format` replaces `answer` where a tag is missing, `custom` is the weighted sum of the user's rewards.
    """
    first = reward_of(rollout.completion, rollout.verdict, cfg.reward)
    is_formed = is_well_formed(rollout.completion, cfg.reward)
    custom = custom_reward(rollout.custom_rewards, cfg.reward)
    max_new_tokens = cfg.rollout.sampling.max_new_tokens
    overlong = -overlong_penalty(len(rollout.completion.token_ids), max_new_tokens, cfg.overlong)
    return {
        "answer": first if is_formed else 0.0,
        "format": 0.0 if is_formed else first,
        "custom": custom,
        "overlong": overlong,
        # The cost of a token depends on the group's pass rate, see `complete_rewards`: the rest of the sum.
        "length": rollout.reward - first - custom - overlong if cfg.reward.length_coef else 0.0,
    }


def _reward_parts(rollout: Rollout, cfg: RewardConfig) -> list[float]:
    """Return the parts of a reward without their weights, in the order of `_part_weights`."""
    verdict = reward_of(rollout.completion, rollout.verdict, cfg)
    # What was subtracted for length is the rest of the sum; rounding leaves 1e-16, which `STD_FLOOR` makes nothing of.
    length = rollout.reward - verdict - custom_reward(rollout.custom_rewards, cfg)
    custom = [rollout.custom_rewards[reward.label] or 0.0 for reward in cfg.custom if reward.weight]
    return [verdict, length, *custom]


def _part_weights(cfg: RlConfig) -> list[float]:
    overlong = cfg.overlong.penalty if cfg.overlong.penalty_tokens else 0.0
    custom = [reward.weight for reward in cfg.reward.custom if reward.weight]
    return [1.0, overlong + cfg.reward.length_coef, *custom]


def advantages(rewards_PG: Sequence[Sequence[float]], cfg: AdvantageConfig) -> list[list[float]]:
    """Return one advantage per reward, in the same order; with `maxrl` a reward is an accuracy, 0 or 1."""
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
        case MaxRlAdvantage():
            return [_over_mean(rewards_G) for rewards_G in rewards_PG]
        case PassAtKAdvantage():
            return [_best_of_k(rewards_G, cfg.k) for rewards_G in rewards_PG]
        case GdpoAdvantage():  # of a single part
            return _batch_standardised([_standardised(rewards_G, ddof=0) for rewards_G in rewards_PG])
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


def _over_mean(accuracies_G: Sequence[float]) -> list[float]:
    """Return (a - mean) / mean; 0 where no answer is right."""
    mean = sum(accuracies_G) / len(accuracies_G)
    if mean == 0:
        return [0.0] * len(accuracies_G)
    return [(a - mean) / mean for a in accuracies_G]


def _best_of_k(rewards_G: Sequence[float], k: int) -> list[float]:
    """Return E(best of S | answer in S) - E(best of S) over the standard deviation of best of S, for random subsets S
    of k answers.

    Of the answers in ascending order, the one of rank i (from 0) is the best of C(i, k-1) subsets.
    """
    num, k = len(rewards_G), min(k, len(rewards_G) - 1)
    if k == 0:
        return [0.0] * num
    order = sorted(range(num), key=lambda g: rewards_G[g])
    ascending = [rewards_G[g] for g in order]
    share = [math.comb(i, k - 1) / math.comb(num, k) for i in range(num)]
    mean = _weighted(share, ascending)
    std = math.sqrt(_weighted(share, [(r - mean) ** 2 for r in ascending]))
    best_with_G = [0.0] * num
    for rank, g in enumerate(order):
        # With this answer in S: it is the best if the others are below it, else one above is, with k-2 others below.
        best = math.comb(rank, k - 1) * ascending[rank]
        if k > 1:
            best += math.fsum(math.comb(i - 1, k - 2) * ascending[i] for i in range(rank + 1, num))
        best_with_G[g] = best / math.comb(num - 1, k - 1)
    return _over_std([best - mean for best in best_with_G], std)


def _weighted(weights: Sequence[float], values: Sequence[float]) -> float:
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True))


def _over_std(centred_G: Sequence[float], std: float) -> list[float]:
    return [c / (std + STD_FLOOR) for c in centred_G]


# ---- user rewards ----
# Compute rewards of the user's own for a judged answer, in the judges' worker processes.


log = logging.getLogger(__name__)


class UserRewards:
    """Computes the configured functions' values; see `RewardFunction`. Their source must not change afterwards."""

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
        self._warned: set[str] = set()
        """Rewards of which a failure was logged."""

    async def __call__(self, problem: Problem, completion: Completion, verdict: Verdict) -> dict[str, float | None]:
        """Return each reward's value by name: None where the function failed by itself, FAILED_ON_ANSWER where it
        failed on this answer and works on a trivial one to the same problem.

        Raise RewardError when one fails too often by itself: the limits are those of the judges.
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
        has_failed = not result.outcome.counts_for_model or result.score == FAILED_ON_ANSWER
        if has_failed and reward.label not in self._warned:  # a warning for each failure would flood the log
            self._warned.add(reward.label)
            log.warning("the reward %r failed on an answer: %s", reward.label, result.detail)
        try:
            health.record(result)
        except JudgeError as e:
            raise RewardError(str(e)) from e
        return result.score if result.outcome.counts_for_model else None
