"""What a step looked like: numbers for the curves, and a few answers for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from klear_core.records import read_shard, read_shards, write_shard
from klear_core.rl.groups import TRAINED, Fates
from klear_core.types import FinishReason, Outcome, Rollout, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRollout:
    """One answer as the policy gave it at some step, for the report."""

    step: int
    problem_id: str
    question: str
    response: str
    num_tokens: int
    finish_reason: FinishReason
    outcome: Outcome
    score: float
    reward: float


def describe_groups(groups: Sequence[RolloutGroup], fates: Fates) -> dict[str, float]:
    """Means over all answers that could be judged, and the fates of all groups and answers of the step.

    `rl/pass/rate` is of answers that the verifier calls right, as in evaluation; for positive ones the reward's tags must be there too.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    by_group, by_rollout = fates.of("group"), fates.of("rollout")
    metrics = {
        "rl/groups/asked": float(sum(by_group.values())),
        "rl/groups/kept": float(by_group.pop(TRAINED, 0)),
        "rl/rollouts/trained": float(by_rollout.pop(TRAINED, 0)),
        "rl/groups/dropped_zero_advantage": float(by_group.pop("zero_advantage", 0)),
    }
    metrics |= {f"rl/groups/dropped_{reason}": float(n) for reason, n in by_group.items()}
    metrics |= {f"rl/rollouts/dropped_{reason}": float(n) for reason, n in by_rollout.items()}
    return metrics | _rewards(rollouts) | _lengths(rollouts)


def _rewards(rollouts: Sequence[Rollout]) -> dict[str, float]:
    if not rollouts:
        return {}
    judged = [r for r in rollouts if r.verdict.outcome.is_models_doing]
    failed = {"rl/judge/failed_frac": 1 - len(judged) / len(rollouts)}
    if not judged:
        return failed
    return failed | {
        "rl/reward/mean": sum(r.reward for r in judged) / len(judged),
        "rl/pass/rate": sum(r.verdict.is_correct for r in judged) / len(judged),
    }


def _lengths(rollouts: Sequence[Rollout]) -> dict[str, float]:
    if not rollouts:
        return {}
    lengths = [len(r.completion.token_ids) for r in rollouts]
    return {
        "rl/response/mean_tokens": sum(lengths) / len(lengths),
        "rl/response/max_tokens": float(max(lengths)),
        "rl/response/truncated_frac": sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts),
    }


def show(folder: Path, groups: Sequence[RolloutGroup], *, step: int, num_groups: int = 2, num_samples: int = 2) -> None:
    """Keep the first answers of a step in a shard of its own, so that a rerun of the step replaces it."""
    shown = [_shown(step, g, r) for g in groups[:num_groups] for r in g.rollouts[:num_samples]]
    write_shard(folder / f"{step:08d}.parquet", shown)


def gather_shown(folder: Path, target: Path) -> None:
    """All kept answers in one file, in step order."""
    write_shard(target, list(read_shards(folder, ShownRollout)))


def last_shown(folder: Path) -> str:
    """The newest kept answer in a few words, with its problem's id; empty if there is none."""
    for shard in sorted(folder.glob("*.parquet"), reverse=True):
        for shown in read_shard(shard, ShownRollout):
            return f"step {shown.step}, problem {shown.problem_id}: {shown.outcome}, score {shown.score:g}, {shown.num_tokens} tokens"
    return ""


def _shown(step: int, group: RolloutGroup, rollout: Rollout) -> ShownRollout:
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
    )
