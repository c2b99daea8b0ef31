"""Describe the updates of one RL step: loss, gradient, batch, and how far sampler and learner differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from klear_core.rl.losses import k3, log_ratio
from klear_core.rl.metrics import TokenStats
from klear_core.rl.objective import Targets
from klear_core.train.packing import PackedBatch
from klear_core.train.step import StepResult
from klear_core.train.world import World
from klear_core.types import TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """Input of one optimizer step: samples of all ranks, this rank's packed share, and loss targets by micro-batch."""

    samples: Sequence[TrainSample]
    packed: PackedBatch
    targets: tuple[Targets, ...]


def update_metrics(
    minibatches: Sequence[MiniBatch],
    results: Sequence[StepResult],
    stats: TokenStats,
    world: World,
    *,
    max_log_ratio: float,
) -> dict[str, float]:
    """Return metrics of the applied updates (collective call); only the update counts if none was applied."""
    token_metrics = stats.all_reduce(world).metrics()
    applied = [(m, r) for m, r in zip(minibatches, results, strict=True) if r.is_applied]
    metrics = {"rl/optim/updates": float(len(applied)), "rl/optim/skipped": float(len(results) - len(applied))}
    # `is_applied` comes from sums over all ranks, so all return here or none does: `_mismatch` below is collective.
    if not applied:
        return metrics
    # Each is a mini-batch mean: per-rank sums, divided by global counts, then summed over ranks.
    losses = [r.loss for _, r in applied]
    norms = [r.grad_norm for _, r in applied]
    sizes = [m.packed.num_tokens for m, _ in applied]
    fills = [m.packed.fill for m, _ in applied]
    busy = [m.packed.busy for m, _ in applied]
    metrics |= {
        "rl/loss/mean": sum(losses) / len(losses),
        "rl/grad/norm": sum(norms) / len(norms),
        "rl/grad/max": max(norms),
        "rl/optim/lr": applied[0][1].lr,  # one rate for all updates of an RL step
        "rl/batch/tokens": float(sum(sizes)),
        "rl/batch/fill": sum(fills) / len(fills),
        "rl/batch/busy": sum(busy) / len(busy),
    }
    first, result = applied[0]
    return metrics | token_metrics | _mismatch(first, result, world, bound=max_log_ratio)


def _mismatch(first: MiniBatch, result: StepResult, world: World, *, bound: float) -> dict[str, float]:
    """Return how far the log-probs of sampler and learner differ on the first applied mini-batch (collective call).

    Before that update the learner still has the weights with which the RL step began. With stale samples, the
    change of the policy since they were sampled is part of the difference.
    """
    # Log-ratio learner/sampler in float64: k3 is about gap^2/2, and float32 would round so small a value to 0.
    gaps = []
    for output, targets in zip(result.outputs, first.targets, strict=True):
        gaps.append(log_ratio(output.logp_N.double(), targets.sampler_logp_N.double()))
    gap_N = torch.cat(gaps).clamp(-bound, bound)
    k3_sum = world.sum(k3(gap_N).sum()).item()
    largest = world.max(torch.cat([gap_N.abs(), gap_N.new_zeros(1)]).max())  # this rank may have no token
    return {"rl/mismatch/k3": k3_sum / first.packed.num_loss_tokens, "rl/mismatch/max": largest.item()}


def staleness(samples: Sequence[TrainSample], *, version: int) -> dict[str, float]:
    """Return by how many policy versions the samples are older than `version`; nothing without samples."""
    ages = [version - s.oldest_version for s in samples]
    if not ages:
        return {}
    return {"rl/staleness/mean": sum(ages) / len(ages), "rl/staleness/max": float(max(ages))}
