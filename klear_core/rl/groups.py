"""Which groups teach something, where all others went, and the rows and mini-batches that are left."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from klear_core.artifacts.ledger import LedgerStep
from klear_core.config.rl import AdvantageConfig, GroupFilterConfig, OverlongConfig
from klear_core.rl.rewards import advantages
from klear_core.types import Rollout, RolloutGroup, TrainSample

SAME_REWARD = 1e-9
"""Rewards closer than this are equal: they come from the same few settings."""

TRAINED = "trained"

SURPLUS = "surplus"
"""Informative, but more than a step has room for."""


@dataclass(slots=True)
class DropCounts:
    """What became of every prompt asked and every answer sampled, as plain counts (`group/trained`, `rollout/overlong`)."""

    counts: Counter[str] = field(default_factory=Counter)

    def group(self, reason: str, count: int = 1) -> None:
        """Count prompts by what became of their group: `trained` or why not."""
        self.counts[f"group/{reason}"] += count

    def rollout(self, reason: str, count: int = 1) -> None:
        """Count answers by what became of them: `trained` or why not."""
        self.counts[f"rollout/{reason}"] += count

    def add(self, other: DropCounts) -> None:
        """Add another count to this one."""
        self.counts.update(other.counts)

    def of(self, unit: str) -> dict[str, int]:
        """Counts by reason of one unit, in name order."""
        return {name.removeprefix(f"{unit}/"): n for name, n in sorted(self.counts.items()) if name.startswith(f"{unit}/") and n}

    def ledger(self) -> tuple[LedgerStep, ...]:
        """One step for prompts and one for answers, each adding up to what was asked."""
        return tuple(_ledger_step(unit, self.of(unit)) for unit in ("group", "rollout"))


def _ledger_step(unit: str, drops: Mapping[str, int]) -> LedgerStep:
    dropped = {reason: n for reason, n in drops.items() if reason != TRAINED}
    return LedgerStep(step=f"{unit}_filter", unit=unit, num_in=sum(drops.values()), num_out=drops.get(TRAINED, 0), dropped=dropped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Groups worth a gradient, with what could not be used taken out of them, and counts of all the rest by reason."""

    groups: tuple[RolloutGroup, ...]
    drops: DropCounts


def keep_informative(groups: Sequence[RolloutGroup], cfg: GroupFilterConfig, overlong: OverlongConfig) -> Kept:
    """Drop answers that say nothing about the model, then groups without a contrast. What is kept is not counted yet."""
    kept, drops = [], DropCounts()
    for group in groups:
        usable, lost = _split_usable(group, overlong)
        for reason, count in lost.items():
            drops.rollout(reason, count)
        trouble = _too_few(usable, lost) or _trouble(usable, cfg)
        if trouble is None:
            kept.append(RolloutGroup(problem=group.problem, rollouts=usable))
        else:
            drops.group(trouble)
            drops.rollout(f"group_{trouble}", len(usable))
    return Kept(groups=tuple(kept), drops=drops)


def _split_usable(group: RolloutGroup, overlong: OverlongConfig) -> tuple[tuple[Rollout, ...], Counter[str]]:
    usable, lost = [], Counter[str]()
    for rollout in group.rollouts:
        reason = _why_unusable(rollout, overlong)
        if reason is None:
            usable.append(rollout)
        else:
            lost[reason] += 1
    return tuple(usable), lost


def _why_unusable(rollout: Rollout, overlong: OverlongConfig) -> str | None:
    if not rollout.verdict.outcome.is_models_doing:
        return rollout.verdict.outcome.value
    if rollout.completion.finish_reason == "abort":
        return "aborted"
    if overlong.handling == "drop" and rollout.completion.finish_reason == "length":
        return "overlong"
    return None


def _too_few(usable: Sequence[Rollout], lost: Counter[str]) -> str | None:
    """A group of one has nothing to compare with; the reason is what took most of the others."""
    if len(usable) >= 2:
        return None
    return max(sorted(lost), key=lost.__getitem__)


def _trouble(usable: Sequence[Rollout], cfg: GroupFilterConfig) -> str | None:
    accuracies = [float(r.is_positive) for r in usable]
    accuracy = sum(accuracies) / len(accuracies)
    if accuracy < cfg.min_accuracy:
        return "too_hard"
    if accuracy > cfg.max_accuracy:
        return "too_easy"
    rewards = [r.reward for r in usable]
    if cfg.zero_advantage == "reward" and max(rewards) - min(rewards) < SAME_REWARD:
        return "zero_advantage"
    if cfg.zero_advantage == "accuracy" and len(set(accuracies)) == 1:
        return "same_accuracy"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Rows to learn from, and counts of the groups and answers that they came from."""

    rows: tuple[TrainSample, ...]
    drops: DropCounts


def to_samples(groups: Sequence[RolloutGroup], cfg: AdvantageConfig, overlong: OverlongConfig, *, oldest_allowed: int) -> Samples:
    """Advantages within each group, then one row per answer; not for masked over-long ones, nor for versions before `oldest_allowed`."""
    rows, drops = [], DropCounts()
    advantages_PG = advantages([[r.reward for r in g.rollouts] for g in groups], cfg)
    for group, advantages_G in zip(groups, advantages_PG, strict=True):
        group_rows = []
        for rollout, advantage in zip(group.rollouts, advantages_G, strict=True):
            reason = _trained_or_reason(rollout, overlong, oldest_allowed)
            drops.rollout(reason)
            if reason == TRAINED:
                group_rows.append(_sample(group.problem.problem_id, rollout, advantage))
        drops.group(TRAINED if group_rows else "all_masked")
        rows += group_rows
    return Samples(rows=tuple(rows), drops=drops)


def cut_minibatches(rows: Sequence[TrainSample], count: int, *, seed: int) -> list[list[TrainSample]]:
    """At most `count` mini-batches of nearly equal size: groups in random order, the rows of a group next to each other."""
    problem_ids = list(dict.fromkeys(r.problem_id for r in rows))
    random.Random(seed).shuffle(problem_ids)  # noqa: S311
    rank = {p: i for i, p in enumerate(problem_ids)}
    ordered = sorted(rows, key=lambda r: rank[r.problem_id])
    count = min(count, len(ordered))
    edges = [i * len(ordered) // count for i in range(count + 1)] if count else [0]
    return [ordered[a:b] for a, b in pairwise(edges)]


def _trained_or_reason(rollout: Rollout, overlong: OverlongConfig, oldest_allowed: int) -> str:
    if min(rollout.completion.policy_versions) < oldest_allowed:
        return "stale"
    if overlong.handling == "mask" and rollout.completion.finish_reason == "length":
        return "overlong"
    return TRAINED


def _sample(problem_id: str, rollout: Rollout, advantage: float) -> TrainSample:
    prompt_ids, completion = rollout.prompt_ids, rollout.completion
    assert len(completion.token_ids) == len(completion.logps) > 0, (problem_id, len(completion.token_ids), len(completion.logps))
    return TrainSample(
        problem_id=problem_id,
        token_ids=(*prompt_ids, *completion.token_ids),
        loss_mask=(False,) * len(prompt_ids) + (True,) * len(completion.token_ids),
        old_logps=(0.0,) * len(prompt_ids) + completion.logps,
        advantage=advantage,
        is_positive=rollout.is_positive,
        oldest_version=min(completion.policy_versions),
    )
