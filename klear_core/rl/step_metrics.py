"""Compute the metrics of an RL step from its tokens, groups and answers, and save a few answers for the report.

Axis letters: N loss tokens of a micro-batch, or of one chunk of it.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from klear_core.artifacts.manifest import ReasonCounts
from klear_core.artifacts.records import read_shard, write_shard
from klear_core.config.losses import LossConfig
from klear_core.config.rl import RlConfig
from klear_core.prompts import THINK_CLOSE, THINK_OPEN, split_response
from klear_core.rl.groups import TRAINED
from klear_core.rl.losses import LossInputs, TokenTerms
from klear_core.rl.rewards import is_well_formed, terms_of
from klear_core.rl.stream import POOL_UNIT, POOLS
from klear_core.train.distributed import World
from klear_core.types import Completion, FinishReason, Outcome, Rollout, RolloutGroup

_SHARES = {
    "rl/entropy/mean": "entropy",
    "rl/ratio/mean": "ratio",
    "rl/ratio/bounded_frac": "bounded",
    "rl/clip/low_frac": "low",
    "rl/clip/high_frac": "high",
    "rl/clip/dual_frac": "dual",
    "rl/clip/erc_frac": "erc",
    "rl/clip/masked_frac": "loss_masked",
    "rl/clip/positive_frac": "clipped_positive",
    "rl/clip/negative_frac": "clipped_negative",
    "rl/outside/positive_below_frac": "positive_below",
    "rl/outside/negative_above_frac": "negative_above",
    "rl/mismatch/truncated_frac": "truncated",
    "rl/mismatch/masked_frac": "masked",
}
"""Metrics that are the mean of one column of `TokenStats.add` over all tokens."""

_OF_SOME = {
    "rl/weight/positive": ("weight_positive", "positive"),
    "rl/weight/negative": ("weight_negative", "negative"),
    "rl/distill/kl": ("kl", "with_teacher"),
}
"""Metrics that are a mean over some tokens, by the columns of the sum and of the count: the mean weight of those whose
advantage has one sign, and log(policy / teacher) of those with a teacher's, an estimate of KL(policy, teacher)."""

_SUMS = (
    "tokens",
    *_SHARES.values(),
    "pull",
    "pull_of_clipped",
    "positive",
    "negative",
    "weight_positive",
    "weight_negative",
    "kl",
    "with_teacher",
)
"""Columns of `TokenStats.add` whose sums over tokens are kept."""


class TokenStats:
    """Sums and extremes over the tokens of an update or an RL step, of this rank or (see `all_reduce`) of all."""

    def __init__(self, device: torch.device) -> None:
        # On the device, so that counting does not wait for it; float64, because a step sums millions of tokens.
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        # Maxima of minus the log-ratio and of the log-ratio: with the sign flipped, one max gives both extremes.
        self._extremes = torch.full((2,), -math.inf, device=device)

    def add(
        self,
        token: TokenTerms,
        batch: LossInputs,
        entropy_N: Tensor,
        cfg: LossConfig,
        *,
        truncate_at: float | None,
    ) -> None:
        """Add one chunk of tokens; `truncate_at` is the cap of the mismatch correction."""
        if token.weight_N.numel() == 0:
            return  # an empty tensor has no minimum
        ratio_N = token.log_ratio_N.exp()
        # Absolute gradient of the loss with respect to each token's log-prob.
        pull_N = (token.weight_N * token.advantage_N * batch.scale_N).abs()
        positive_N, negative_N = token.advantage_N > 0, token.advantage_N < 0
        columns = {
            "tokens": torch.ones_like(ratio_N),
            "entropy": entropy_N,
            "ratio": token.log_ratio_N.double().exp(),
            "bounded": token.bounded_N,
            "low": token.low_N,
            "high": token.high_N,
            "dual": token.dual_N,
            "erc": token.erc_N,
            "loss_masked": token.masked_N,
            # Out of the range, but against the advantage's direction: PPO and GPPO clip none of these, but for the dual
            # clip of negative ones.
            "positive_below": positive_N & (ratio_N < 1 - cfg.eps_low),
            "negative_above": negative_N & (ratio_N > 1 + cfg.eps_high),
            # Equality is exact: `clamp` returns the cap itself, and only the mask gives 0, since gaps are bounded.
            "truncated": torch.zeros_like(token.low_N) if truncate_at is None else batch.correction_N == truncate_at,
            "masked": batch.correction_N == 0,
            "pull": pull_N,
            "pull_of_clipped": pull_N * token.clipped_N,
            "positive": positive_N,
            "negative": negative_N,
            "clipped_positive": token.clipped_N & positive_N,
            "clipped_negative": token.clipped_N & negative_N,
            "weight_positive": token.weight_N * positive_N,
            "weight_negative": token.weight_N * negative_N,
            "with_teacher": batch.teacher_coef_N > 0,
            "kl": -token.teacher_log_ratio_N,
        }
        # [columns, N] -> [columns]; masks become 0 and 1.
        self._sums += torch.stack([columns[name].double() for name in _SUMS]).sum(dim=1)
        extremes = torch.stack([-token.log_ratio_N.min(), token.log_ratio_N.max()])
        self._extremes = torch.maximum(self._extremes, extremes)

    def add_top_tokens(self, top_weighted_logp_N: Tensor, batch: LossInputs) -> None:
        """Add KL(teacher, policy) over the teacher's likeliest tokens alone, from the head's `top_weighted_logp_N`."""
        # That is the sum over k of weight_k log(policy_k), with weight_k = teacher_coef * scale * teacher_k.
        factor_N = batch.teacher_coef_N * batch.scale_N
        own_N = (batch.top_logp_NK.exp() * batch.top_logp_NK).sum(dim=1)
        policy_N = top_weighted_logp_N / factor_N.clamp(min=torch.finfo(factor_N.dtype).tiny)
        kl_N = torch.where(factor_N > 0, own_N - policy_N, 0)
        self._sums[_SUMS.index("kl")] += kl_N.double().sum()

    def merge(self, other: TokenStats) -> None:
        """Add the tokens of `other` to these."""
        self._sums += other._sums
        self._extremes = torch.maximum(self._extremes, other._extremes)

    def all_reduce(self, world: World) -> TokenStats:
        """Return the statistics of all ranks together (collective call)."""
        total = TokenStats(world.device)
        total._sums, total._extremes = world.sum(self._sums), world.max(self._extremes)
        return total

    def metrics(self) -> dict[str, float]:
        """Return token means, extremes of the ratio, and the clipped tokens' share of the sum of absolute gradients.

        Empty without tokens. A mean over some tokens is absent if there is none of them.
        """
        # One transfer from the device for all sums.
        sums = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        if sums["tokens"] == 0:
            return {}
        metrics = {name: sums[column] / sums["tokens"] for name, column in _SHARES.items()}
        for name, (total, count) in _OF_SOME.items():
            if sums[count]:
                metrics[name] = sums[total] / sums[count]
        # The extremes are stored as log-ratios, the smaller one with its sign flipped.
        metrics["rl/ratio/min"] = math.exp(-self._extremes[0].item())
        metrics["rl/ratio/max"] = math.exp(self._extremes[1].item())
        metrics["rl/clip/pull_frac"] = sums["pull_of_clipped"] / sums["pull"] if sums["pull"] else 0.0
        return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParts:
    """Parts of a reward, besides the judge's score."""

    is_positive: bool | None = None
    """Whether the answer is right and well-formed; None in artifacts of earlier versions."""
    custom: Mapping[str, float | None] = field(default_factory=dict)
    """Values of the user's rewards without their weights; None for one that failed."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Terms that add up to the reward, see `rewards.terms_of`; empty in artifacts of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRollout:
    """One answer that the policy gave at some step, for people."""

    step: int
    problem_id: str
    question: str
    response: str
    num_tokens: int
    finish_reason: FinishReason
    outcome: Outcome
    score: float
    reward: float
    parts: RewardParts = RewardParts()


def describe_groups(groups: Sequence[RolloutGroup], reasons: ReasonCounts) -> dict[str, float]:
    """Return means over all judged answers, and counts of the step's groups and answers by what happened to them.

    `rl/pass/rate` is the share of answers that the verifier calls right, as in evaluation. Positive answers must also
    have the tags that the reward asks for.
    """
    rollouts = [r for g in groups for r in g.rollouts]  # all that were sampled, also of groups that were dropped
    by_group, by_rollout = (dict(sorted(reasons.of(unit).items())) for unit in ("group", "rollout"))
    num_asked = sum(by_group.values())
    num_informative = sum(_is_mixed(group) for group in groups)
    num_tokens = sum(len(r.completion.token_ids) for r in rollouts)
    # `asked` counts all; then each `pop` takes a reason out, so that what is left below are the other reasons.
    metrics = {
        "rl/groups/asked": float(num_asked),
        "rl/groups/kept": float(by_group.pop(TRAINED, 0)),
        "rl/groups/informative": float(num_informative),
        "rl/groups/informative_frac": num_informative / max(1, num_asked),
        "rl/groups/informative_per_mtok": num_informative / max(1, num_tokens) * 1e6,
        "rl/rollouts/trained": float(by_rollout.pop(TRAINED, 0)),
        # Present in every step, so that its curve has no gaps; other reasons appear only where they occur.
        "rl/groups/dropped_zero_advantage": float(by_group.pop("zero_advantage", 0)),
    }
    metrics |= {f"rl/groups/dropped_{reason}": float(n) for reason, n in by_group.items()}
    metrics |= {f"rl/rollouts/dropped_{reason}": float(n) for reason, n in by_rollout.items()}
    if by_pool := reasons.of(POOL_UNIT):
        drawn = sum(by_pool.values())
        metrics |= {f"rl/curriculum/{pool}_frac": by_pool.get(pool, 0) / drawn for pool in POOLS}
    return metrics | _rewards(rollouts) | _custom_rewards(rollouts) | _lengths(rollouts)


def _is_mixed(group: RolloutGroup) -> bool:
    """Return whether a group has right and wrong answers, whatever the filter makes of it."""
    return len({r.is_positive for r in group.rollouts if r.verdict.outcome.counts_for_model}) == 2


def _rewards(rollouts: Sequence[Rollout]) -> dict[str, float]:
    if not rollouts:
        return {}
    # Failures of the judge or sandbox are not wrong answers: they have a separate metric and stay out of the means.
    judged = [r for r in rollouts if r.verdict.outcome.counts_for_model]
    failed = {"rl/judge/failed_frac": 1 - len(judged) / len(rollouts)}
    if not judged:
        return failed
    num_correct = sum(r.verdict.is_correct for r in judged)
    rates = failed | {"rl/pass/rate": num_correct / len(judged)}
    # Where a reward function of the user failed, the sum of rewards has no meaning.
    rewarded = [r for r in judged if None not in r.custom_rewards.values()]
    if not rewarded:
        return rates
    return rates | {"rl/reward/mean": sum(r.reward for r in rewarded) / len(rewarded)}


def _custom_rewards(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each of the user's rewards, without its weight, and the share of answers where it failed.

    The value of an answer that it failed on is no part of the mean.
    """
    values: dict[str, list[float | None]] = {}
    for rollout in rollouts:
        for name, value in rollout.custom_rewards.items():
            values.setdefault(name, []).append(None if name in rollout.failed_rewards else value)
    metrics: dict[str, float] = {}
    for name, given in values.items():
        numbers = [value for value in given if value is not None]
        metrics[f"rl/reward/{name}/failed_frac"] = 1 - len(numbers) / len(given)
        if numbers:
            metrics[f"rl/reward/{name}/mean"] = math.fsum(numbers) / len(numbers)
    return metrics


def _lengths(rollouts: Sequence[Rollout]) -> dict[str, float]:
    if not rollouts:
        return {}
    lengths = [len(r.completion.token_ids) for r in rollouts]
    return {
        "rl/response/mean_tokens": sum(lengths) / len(lengths),
        "rl/response/max_tokens": float(max(lengths)),
        "rl/response/truncated_frac": sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts),
    }


def save_shown(
    folder: Path,
    groups: Sequence[RolloutGroup],
    cfg: RlConfig,
    *,
    step: int,
    num_groups: int = 2,
    num_samples: int = 2,
) -> None:
    """Save the first answers of a step in a separate shard, so that a rerun of the step replaces it."""
    shown = [_shown_rollout(step, g, r, cfg) for g in groups[:num_groups] for r in g.rollouts[:num_samples]]
    write_shard(folder / f"{step:08d}.parquet", shown)


def last_shown(folder: Path) -> str:
    """Describe the newest saved answer in a few words, with its problem's id; empty if there is none."""
    for shard in sorted(folder.glob("*.parquet"), reverse=True):  # padded numbers: name order is step order
        for shown in read_shard(shard, ShownRollout):
            result = f"{shown.outcome}, score {shown.score:g}, {shown.num_tokens} tokens"
            return f"step {shown.step}, problem {shown.problem_id}: {result}"
    return ""


def _shown_rollout(step: int, group: RolloutGroup, rollout: Rollout, cfg: RlConfig) -> ShownRollout:
    return ShownRollout(
        step=step,
        problem_id=group.problem.problem_id,
        question=group.problem.question,
        response=rollout.completion.text,
        num_tokens=len(rollout.completion.token_ids),
        finish_reason=rollout.completion.finish_reason,
        outcome=rollout.verdict.outcome,
        score=rollout.verdict.score,
        reward=rollout.reward,
        parts=RewardParts(
            is_positive=rollout.is_positive, custom=dict(rollout.custom_rewards), terms=terms_of(rollout, cfg)
        ),
    )


# ---- answers ----
# Describe the answers of a step by their form.


_LOOP_TOKENS, _LOOP_TIMES, _LONGEST_PERIOD = 32, 4, 64
_COMMON_SCRIPTS = {"LATIN", "GREEK", "MODIFIER"}
"""Writing systems that mathematics uses in every language."""


def describe_answers(groups: Sequence[RolloutGroup], cfg: RlConfig) -> dict[str, float]:
    """Return shares of all sampled answers of a step; empty without answers.

    `same_frac` is the share of the most common final answer, over all problems. `other_script_frac` is the mean share
    of letters in a writing system that neither the question nor mathematics uses.
    """
    answers = [(group, rollout) for group in groups for rollout in group.rollouts]
    if not answers:
        return {}
    completions = [rollout.completion for _, rollout in answers]
    counts = {
        "malformed": sum(not is_well_formed(c, cfg.reward) for c in completions),
        "repeated": sum(ends_in_loop(_without_end(c)) for c in completions),
        "empty": sum(not _final(c.text).strip() for c in completions),
        "extra_tags": sum(_has_extra_tags(c.text) for c in completions),
        "same": Counter(_final(c.text) for c in completions).most_common(1)[0][1],
        "other_script": sum(_other_script(group.problem.question, rollout) for group, rollout in answers),
    }
    return {f"rl/answers/{name}_frac": count / len(answers) for name, count in counts.items()}


def ends_in_loop(token_ids: Sequence[int]) -> bool:
    """Return whether the last 32 tokens or more are one piece of up to 64 tokens, four times or more in a row."""
    for period in range(1, _LONGEST_PERIOD + 1):
        length = max(_LOOP_TOKENS, _LOOP_TIMES * period)
        tail = token_ids[-length:]
        # Shifted by one period, a loop is equal to itself.
        if len(tail) == length and tail[period:] == tail[:-period]:
            return True
    return False


def _without_end(completion: Completion) -> tuple[int, ...]:
    """Return the tokens without the end of the turn, which would hide a loop before it."""
    return completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids


def _final(text: str) -> str:
    """Return what follows the thinking; without `</think>` the whole text."""
    split = split_response(text)
    return split.answer if split.is_closed else text


def _has_extra_tags(text: str) -> bool:
    return text.count(THINK_OPEN) > 1 or text.count(THINK_CLOSE) > 1


def _other_script(question: str, rollout: Rollout) -> float:
    text = rollout.completion.text
    if text.isascii():
        return 0.0
    known = _COMMON_SCRIPTS | {_script_of(char) for char in set(question) if char.isalpha()}
    letters = {char: count for char, count in Counter(text).items() if char.isalpha()}
    others = sum(count for char, count in letters.items() if _script_of(char) not in known)
    return others / max(1, sum(letters.values()))


@cache
def _script_of(char: str) -> str:
    """Return the first word of a letter's Unicode name, which is its writing system; variants count as their letter."""
    return unicodedata.name(unicodedata.normalize("NFKC", char)[0], "").partition(" ")[0]
