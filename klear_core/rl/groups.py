"""Select the groups to train on, count every dropped one by reason, and cut the rest into samples and mini-batches.

Axis letters: P prompts, G samples of one prompt.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from klear_core.artifacts.manifest import LedgerStep, ReasonCounts
from klear_core.artifacts.records import read_shards
from klear_core.config.rewards import OverlongConfig
from klear_core.config.rl import PromptFilterConfig, RlConfig
from klear_core.errors import ConfigError, DataError
from klear_core.rl.rewards import group_advantages, has_advantage
from klear_core.rl.sample_arrays import SampleT
from klear_core.rl.stream import POOL_UNIT
from klear_core.scores import read_pass_rates
from klear_core.types import CodeReference, PassRate, Problem, Rollout, RolloutGroup, TrainSample, UnverifiableReference

TRAINED = "trained"
"""Reason under which groups and answers that reached the learner are counted."""

SURPLUS = "surplus"
"""Reason for informative groups beyond `groups_per_step`."""

CANCELLED = "cancelled"
"""Reason for groups that were cancelled before they were complete, because their step needed no more groups."""


def reason_ledger(reasons: ReasonCounts) -> tuple[LedgerStep, ...]:
    """Return one ledger step for prompts (`group`) and one for answers (`rollout`); each adds up to the number asked.

    Those that reached the learner are counted under TRAINED.
    """
    steps = []
    for unit in ("group", "rollout"):
        dropped = dict(sorted(reasons.of(unit).items()))
        num_trained = dropped.pop(TRAINED, 0)
        num_in = num_trained + sum(dropped.values())
        # The pools that a curriculum drew the prompts from; empty without one.
        pools = reasons.of(POOL_UNIT) if unit == "group" else {}
        noted = {f"from_{pool}": n for pool, n in sorted(pools.items())}
        steps.append(LedgerStep.of(f"{unit}_filter", unit, num_in=num_in, dropped=dropped, noted=noted))
    return tuple(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Groups to train on, without their unusable answers, and counts of everything that was dropped."""

    groups: tuple[RolloutGroup, ...]
    reasons: ReasonCounts


def filter_groups(groups: Sequence[RolloutGroup], cfg: RlConfig) -> Kept:
    """Drop unusable answers, then the groups that the filter rejects; `to_samples` counts the answers that are left."""
    kept, reasons = [], ReasonCounts()
    for group in groups:
        usable, lost = split_usable(group, cfg.overlong)
        for lost_reason, count in lost.items():
            reasons.count("rollout", lost_reason, count)
        # Test the size first, because the accuracy and reward tests need at least one usable answer.
        reason = _too_few(usable, lost) or _uninformative(usable, cfg)
        if reason is None:
            kept.append(RolloutGroup(problem=group.problem, rollouts=usable))
        else:
            reasons.count("group", reason)
            # These answers were usable by themselves; they are dropped because of their group.
            reasons.count("rollout", f"group_{reason}", len(usable))
    return Kept(groups=tuple(kept), reasons=reasons)


def split_usable(group: RolloutGroup, overlong: OverlongConfig) -> tuple[tuple[Rollout, ...], Counter[str]]:
    """Return the answers that are compared with each other, and counts of the others by reason."""
    usable, lost = [], Counter[str]()
    for rollout in group.rollouts:
        reason = _unusable(rollout, overlong)
        if reason is None:
            usable.append(rollout)
        else:
            lost[reason] += 1
    return tuple(usable), lost


def _unusable(rollout: Rollout, overlong: OverlongConfig) -> str | None:
    """Return the reason to drop an answer before its group's advantages; None if it is usable."""
    # A judge or sandbox failure is not a wrong answer: it gets no reward and stays out of the group's mean.
    if not rollout.verdict.outcome.counts_for_model:
        return rollout.verdict.outcome.value
    if rollout.completion.finish_reason == "abort":
        return "aborted"
    # The same holds for a failure of the user's own code.
    for name, value in rollout.custom_rewards.items():
        if value is None:
            return f"reward_{name}_failed"
    # "drop" removes the answer before advantages; "mask" keeps it in the group's mean (see `_trained_or_reason`).
    if overlong.handling == "drop" and rollout.completion.finish_reason == "length":
        return "overlong"
    return None


def _too_few(usable: Sequence[Rollout], lost: Counter[str]) -> str | None:
    """Return the most common reason for lost answers if fewer than 2 are left to compare, else None."""
    if len(usable) >= 2:
        return None
    # `max` keeps the first of equals, so sorting decides ties by name and not by the order of answers.
    return max(sorted(lost), key=lost.__getitem__)


def _uninformative(usable: Sequence[Rollout], cfg: RlConfig) -> str | None:
    """Return the reason to drop a group; None if it is to be trained on."""
    limits = cfg.group_filter
    accuracies = [float(r.is_positive) for r in usable]
    accuracy = sum(accuracies) / len(accuracies)
    if accuracy < limits.min_accuracy:
        return "too_hard"
    if accuracy > limits.max_accuracy:
        return "too_easy"
    # Without an advantage the policy term has no gradient, unless a teacher adds to it.
    if limits.zero_advantage == "reward" and cfg.distill is None and not has_advantage(usable, cfg):
        return "zero_advantage"
    if limits.zero_advantage == "accuracy" and len(set(accuracies)) == 1:
        return "same_accuracy"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The samples of a step, and counts of the groups and answers that they came from."""

    samples: tuple[TrainSample, ...]
    reasons: ReasonCounts


def to_samples(groups: Sequence[RolloutGroup], cfg: RlConfig, *, oldest_allowed: int) -> Selection:
    """Compute advantages, then make one sample of each answer.

    Over-long answers (with `handling = "mask"`) and answers with a token sampled by a version before `oldest_allowed`
    give no sample.
    """
    samples, reasons = [], ReasonCounts()
    # Of all answers of the group, because those without a sample below still belong to its mean and deviation.
    advantages_PG = group_advantages(groups, cfg)
    for group, advantages_G in zip(groups, advantages_PG, strict=True):
        group_samples = []
        for rollout, advantage in zip(group.rollouts, advantages_G, strict=True):
            oldest = min(rollout.completion.policy_versions)  # once: an answer has thousands
            reason = _trained_or_reason(rollout, oldest, cfg.overlong, oldest_allowed)
            reasons.count("rollout", reason)
            if reason == TRAINED:
                group_samples.append(_sample(group.problem.problem_id, rollout, advantage, oldest))
        # A group is trained even if some of its answers give no sample; only one without any is dropped.
        reasons.count("group", TRAINED if group_samples else "all_masked")
        samples += group_samples
    return Selection(samples=tuple(samples), reasons=reasons)


def cut_minibatches(samples: Sequence[SampleT], count: int, *, seed: int) -> list[list[SampleT]]:
    """Cut samples into at most `count` mini-batches whose sizes differ by at most 1.

    Groups come in random order and the samples of a group stay adjacent, but a cut may fall inside a group.
    """
    # A dict and not a set: ranks cut by themselves, and the order of a set of strings differs between processes.
    problem_ids = list(dict.fromkeys(sample.problem_id for sample in samples))
    random.Random(seed).shuffle(problem_ids)  # noqa: S311
    rank = {p: i for i, p in enumerate(problem_ids)}
    ordered = sorted(samples, key=lambda sample: rank[sample.problem_id])  # stable: the order within a group is kept
    count = min(count, len(ordered))  # no mini-batch is empty: an update needs at least one sample
    if count == 0:
        return []
    edges = [i * len(ordered) // count for i in range(count + 1)]
    return [ordered[a:b] for a, b in pairwise(edges)]


def _trained_or_reason(rollout: Rollout, oldest: int, overlong: OverlongConfig, oldest_allowed: int) -> str:
    """Return TRAINED, or the reason why an answer gives no sample."""
    # The oldest token decides: weights may have changed in the middle of an answer.
    if oldest < oldest_allowed:
        return "stale"
    if overlong.handling == "mask" and rollout.completion.finish_reason == "length":
        return "overlong"
    return TRAINED


def _sample(problem_id: str, rollout: Rollout, advantage: float, oldest: int) -> TrainSample:
    prompt_ids, completion = rollout.prompt_ids, rollout.completion
    assert len(completion.token_ids) == len(completion.logps) > 0, (
        problem_id,
        len(completion.token_ids),
        len(completion.logps),
    )
    return TrainSample(
        problem_id=problem_id,
        token_ids=(*prompt_ids, *completion.token_ids),
        loss_mask=(False,) * len(prompt_ids) + (True,) * len(completion.token_ids),
        # Zeros are padding: the loss reads old log-probs only where `loss_mask` is True.
        sampler_logps=(0.0,) * len(prompt_ids) + completion.logps,
        advantage=advantage,
        is_positive=rollout.is_positive,
        oldest_version=oldest,
    )


# ---- problems ----
# Choose the problems that an RL stage trains on; the others are counted by reason.


def choose_problems(artifact: Path, domain: str, cfg: PromptFilterConfig) -> tuple[list[Problem], LedgerStep]:
    """Return the problems of this domain that the filter keeps, and a ledger step that counts the others.

    Raise ConfigError if the filter needs pass rates and the artifact has none, DataError if no problem is left.
    """
    # Empty without a filter by pass rate, which then looks none up; None if the artifact has no file of them.
    rates = read_pass_rates(artifact) if cfg.needs_pass_rates else {}
    if rates is None:
        raise ConfigError(
            f"{artifact}: its problems have no pass rates, which rl.prompts.min_pass_rate and max_pass_rate compare: "
            "measure them with --set 'tag_rl={}', or --set 'tag={}' where RL has no prompts of its own"
        )
    num_problems = 0
    chosen: list[Problem] = []
    dropped: Counter[str] = Counter()
    for problem in read_shards(artifact / "problems", Problem):
        num_problems += 1
        reason = drop_reason(problem, domain, cfg, rates)
        if reason:
            dropped[reason] += 1
        else:
            chosen.append(problem)
    if not chosen:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in dropped.most_common())
        raise DataError(
            f"{artifact}: RL can train on none of its {num_problems:,} problems ({reasons}); it needs {domain} "
            "problems with answers or tests that rl.prompts keeps"
        )
    dropped_by_reason = dict(sorted(dropped.items()))
    return chosen, LedgerStep.of("choose_problems", "problem", num_in=num_problems, dropped=dropped_by_reason)


def drop_reason(problem: Problem, domain: str, cfg: PromptFilterConfig, rates: Mapping[str, PassRate]) -> str:
    """Return why RL does not train on a problem; empty if it does."""
    # A problem is counted once, under the first reason that holds.
    if problem.domain != domain:
        return "other_domain"
    if isinstance(problem.reference, UnverifiableReference):
        return "unverifiable"
    if isinstance(problem.reference, CodeReference) and problem.reference.num_tests < cfg.min_tests:
        return "few_tests"
    if not cfg.needs_pass_rates:
        return ""
    rate = rates.get(problem.problem_id)
    if rate is None:
        return "no_pass_rate"
    if rate.value < cfg.min_pass_rate:
        return "low_pass_rate"
    return "high_pass_rate" if rate.value > cfg.max_pass_rate else ""
