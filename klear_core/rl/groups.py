"""Which groups teach something, and where all the others went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from klear_core.config.rl import GroupFilterConfig, OverlongConfig
from klear_core.ledger import LedgerStep
from klear_core.types import Rollout, RolloutGroup

SAME_REWARD = 1e-9
"""Rewards closer than this are equal: they come from the same few settings."""

TRAINED = "trained"
SURPLUS = "surplus"
"""Informative, but more than a step has room for."""


@dataclass(slots=True)
class Fates:
    """What became of every prompt asked and every answer sampled, as plain counts (`group/trained`, `rollout/overlong`)."""

    counts: Counter[str] = field(default_factory=Counter)

    def group(self, fate: str, count: int = 1) -> None:
        """Count prompts by what became of their group: `trained` or why not."""
        self.counts[f"group/{fate}"] += count

    def rollout(self, fate: str, count: int = 1) -> None:
        """Count answers by what became of them: `trained` or why not."""
        self.counts[f"rollout/{fate}"] += count

    def add(self, other: Fates) -> None:
        """Add another count to this one."""
        self.counts.update(other.counts)

    def of(self, unit: str) -> dict[str, int]:
        """Counts by fate of one unit, in name order."""
        return {name.removeprefix(f"{unit}/"): n for name, n in sorted(self.counts.items()) if name.startswith(f"{unit}/") and n}

    def ledger(self) -> tuple[LedgerStep, ...]:
        """One step for prompts and one for answers, each adding up to what was asked."""
        return tuple(_ledger_step(unit, self.of(unit)) for unit in ("group", "rollout"))


def _ledger_step(unit: str, fates: Mapping[str, int]) -> LedgerStep:
    dropped = {fate: n for fate, n in fates.items() if fate != TRAINED}
    return LedgerStep(step=f"{unit}_filter", unit=unit, num_in=sum(fates.values()), num_out=fates.get(TRAINED, 0), dropped=dropped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Groups worth a gradient, with what could not be used taken out of them, and the fates of all the rest."""

    groups: tuple[RolloutGroup, ...]
    fates: Fates


def keep_informative(groups: Sequence[RolloutGroup], cfg: GroupFilterConfig, overlong: OverlongConfig) -> Kept:
    """Drop answers that say nothing about the model, then groups without a contrast. What is kept has no fate yet."""
    kept, fates = [], Fates()
    for group in groups:
        usable, lost = _split_usable(group, overlong)
        for reason, count in lost.items():
            fates.rollout(reason, count)
        trouble = _too_few(usable, lost) or _trouble(usable, cfg)
        if trouble is None:
            kept.append(RolloutGroup(problem=group.problem, rollouts=usable))
        else:
            fates.group(trouble)
            fates.rollout(f"group_{trouble}", len(usable))
    return Kept(groups=tuple(kept), fates=fates)


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
