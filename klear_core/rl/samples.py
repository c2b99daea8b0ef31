"""From kept groups to rows to learn from, and their cut into mini-batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from klear_core.config.rl import AdvantageConfig, OverlongConfig
from klear_core.rl.advantages import advantages
from klear_core.rl.groups import TRAINED, Fates
from klear_core.types import Rollout, RolloutGroup, TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Rows to learn from, and the fates of the groups and answers that they came from."""

    rows: tuple[TrainSample, ...]
    fates: Fates


def to_samples(groups: Sequence[RolloutGroup], cfg: AdvantageConfig, overlong: OverlongConfig, *, oldest_allowed: int) -> Samples:
    """Advantages within each group, then one row per answer; not for masked over-long ones, nor for versions before `oldest_allowed`."""
    rows, fates = [], Fates()
    advantages_PG = advantages([[r.reward for r in g.rollouts] for g in groups], cfg)
    for group, advantages_G in zip(groups, advantages_PG, strict=True):
        group_rows = []
        for rollout, advantage in zip(group.rollouts, advantages_G, strict=True):
            fate = _fate(rollout, overlong, oldest_allowed)
            fates.rollout(fate)
            if fate == TRAINED:
                group_rows.append(_sample(group.problem.problem_id, rollout, advantage))
        fates.group(TRAINED if group_rows else "all_masked")
        rows += group_rows
    return Samples(rows=tuple(rows), fates=fates)


def cut_minibatches(rows: Sequence[TrainSample], count: int, *, seed: int) -> list[list[TrainSample]]:
    """At most `count` mini-batches of nearly equal size: groups in random order, the rows of a group next to each other."""
    problem_ids = list(dict.fromkeys(r.problem_id for r in rows))
    random.Random(seed).shuffle(problem_ids)  # noqa: S311
    rank = {p: i for i, p in enumerate(problem_ids)}
    ordered = sorted(rows, key=lambda r: rank[r.problem_id])
    count = min(count, len(ordered))
    edges = [i * len(ordered) // count for i in range(count + 1)] if count else [0]
    return [ordered[a:b] for a, b in pairwise(edges)]


def _fate(rollout: Rollout, overlong: OverlongConfig, oldest_allowed: int) -> str:
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
