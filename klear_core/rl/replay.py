"""Train other losses on the samples of a saved RL step, and measure how their updates differ from the run's.

Every loss starts from the weights and the optimizer state before the step and takes all mini-batches of the step; the
rest of the settings is the run's. Nothing is sampled. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from klear_core.config.losses import LossConfig
from klear_core.config.rl import RlConfig
from klear_core.metrics import NullTelemetry, Telemetry
from klear_core.rl.learner import SAVED_STEPS, Learner, SavedStep, SavedSteps
from klear_core.rl.losses import joins_tokens, k3, log_ratio
from klear_core.train.distributed import RunRanks, World, run_here
from klear_core.types import TrainSample

_MACHINE_METRICS = ("rl/speed/", "rl/batch/fill", "rl/batch/busy")
"""Prefixes of metrics that depend on the machine: speed, and how rows are distributed over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The saved step of an RL stage to train again, and the losses to train it with."""

    cfg: RlConfig
    """The run's settings."""
    seed: int
    model: Path
    """The artifact folder of the model that the stage began with."""
    folder: Path
    """The artifact folder of the RL stage."""
    step: int
    losses: Mapping[str, LossConfig]
    """Losses by the name to show. The run's own loss is always trained too, before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossEffect:
    """The effect of one step with one loss."""

    metrics: dict[str, float]
    """The metrics of the step, as the learner logs them."""
    cosine: float
    """Cosine between the change of all weights and their change with the run's loss; NaN if either is zero."""
    kl: float
    """KL(before, after) of the step, nats per token: the k3 estimate on the step's tokens, sampled before it."""
    entropy_change: float
    """Mean entropy over the vocabulary on the step's tokens, after minus before, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Effects of all losses of a replay."""

    own: LossEffect
    """The effect of the run's loss."""
    others: dict[str, LossEffect]
    left_out: tuple[str, ...]
    """Losses that look at whole answers, with which a teacher's likeliest tokens are not learnt."""
    num_samples: int
    difference: float
    """Largest relative difference of a metric of the run's loss from the logged one; 0 if all are equal to the bit."""


def replay(job: Replay, run_ranks: RunRanks[Replayed] = run_here) -> Replayed:
    """Train the step once with the run's loss and once with each of the others, on as many ranks as the settings say.

    `run_ranks` runs the ranks; the default is one rank in this process. Raise ArtifactError if the step is not saved.
    """
    return run_ranks(partial(_replay, job), job.cfg.runtime, NullTelemetry())


def _replay(job: Replay, world: World, _telemetry: Telemetry) -> Replayed:
    steps = SavedSteps(job.folder / SAVED_STEPS, world)
    saved = steps.load(job.step)
    # A loss that fails on these samples is a result of the replay: skipped updates are counted and do not end it.
    runtime = job.cfg.runtime.model_copy(update={"save_steps": (), "max_nonfinite_steps": 1_000_000})
    # The saved state has the optimizer's too, so none is loaded from the folder of the initial model.
    cfg = job.cfg.model_copy(update={"runtime": runtime, "continue_optimizer": False})
    with tempfile.TemporaryDirectory() as workdir:
        # One learner for all losses: `begin_saved` puts weights and moments back before each.
        learner = Learner(cfg, job.model, seed=job.seed, workdir=Path(workdir), world=world)
        own = _Trained.of(learner, steps, saved, cfg.loss)
        others = {}
        left_out = _left_out(job.losses, saved.samples)
        for name, loss in job.losses.items():
            if name in left_out:
                continue
            others[name] = _Trained.of(learner, steps, saved, loss).effect(own, world)
    return Replayed(
        own=own.effect(own, world),
        others=others,
        left_out=left_out,
        num_samples=len(saved.samples),
        difference=_difference(saved.metrics, own.metrics),
    )


def _left_out(losses: Mapping[str, LossConfig], samples: Sequence[TrainSample]) -> tuple[str, ...]:
    """Return the losses that cannot train these samples; the settings of a run refuse them, too."""
    has_tops = any(sample.top_ids for sample in samples)
    return tuple(name for name, loss in losses.items() if has_tops and joins_tokens(loss))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """One training of the step; the tensors are this rank's shares, on the CPU."""

    metrics: dict[str, float]
    changes: list[Tensor]
    """Change of each weight."""
    kl: float
    entropy_change: float

    @classmethod
    def of(cls, learner: Learner, steps: SavedSteps, saved: SavedStep, loss: LossConfig) -> _Trained:
        """Train the step from its beginning with `loss` (collective call)."""
        learner.cfg = learner.cfg.model_copy(update={"loss": loss})
        learner.begin_saved(steps, saved.step)
        weights = learner.local_weights()  # copies: the step overwrites the weights in place
        before = _measured(learner, saved.samples)
        metrics = learner.step(saved.samples)
        after = _measured(learner, saved.samples)
        changes = []
        for old, new in zip(weights, learner.local_weights(), strict=True):
            changes.append(new - old)
        # after / before on tokens that were sampled before the step: the k3 estimate of KL(before, after).
        bound = learner.cfg.max_log_ratio
        gap_N = log_ratio(after[0], before[0]).clamp(-bound, bound)
        sums = torch.stack([k3(gap_N).sum(), (after[1] - before[1]).sum()])
        # One reduction for both sums and the count: each rank has only its share of the tokens.
        total = learner.world.sum(torch.cat([sums, sums.new_tensor([len(gap_N)])]))
        kl, entropy_change = (total[:2] / total[2].clamp(min=1)).tolist()
        return cls(metrics=metrics, changes=changes, kl=kl, entropy_change=entropy_change)

    def effect(self, own: _Trained, world: World) -> LossEffect:
        """Compare with the run's loss (collective call)."""
        dots = [_dots(a, b) for a, b in zip(self.changes, own.changes, strict=True)]
        # Sums over weights and ranks come first: a cosine of shards would not add up to that of the whole.
        total = world.sum(torch.stack(dots).sum(dim=0).to(world.device))
        product, square, own_square = total.tolist()
        length = math.sqrt(square * own_square)
        return LossEffect(
            metrics=self.metrics,
            cosine=product / length if length else math.nan,
            kl=self.kl,
            entropy_change=self.entropy_change,
        )


def _measured(learner: Learner, samples: Sequence[TrainSample]) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of this rank's tokens under the present weights, in float64 (collective call)."""
    none_N = torch.zeros(0, dtype=torch.float64, device=learner.world.device)  # a step may have no samples
    logps, entropies = [none_N], [none_N]
    for output in learner.logps(samples):
        logps.append(output.logp_N.double())
        entropies.append(output.entropy_N.double())
    return torch.cat(logps), torch.cat(entropies)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Return a.b, a.a and b.b in float64."""
    a, b = a.flatten().double(), b.flatten().double()
    return torch.stack([a @ b, a @ a, b @ b])


def _difference(logged: Mapping[str, float], replayed: Mapping[str, float]) -> float:
    """Return the largest relative difference of two sets of metrics; infinite if one lacks a metric of the other."""
    first, second = _repeatable(logged), _repeatable(replayed)
    if first.keys() != second.keys():
        return math.inf
    # 1e-300 only avoids 0 / 0 where both are 0.
    differences = [abs(first[name] - second[name]) / max(abs(first[name]), abs(second[name]), 1e-300) for name in first]
    return max(differences, default=0.0)


def _repeatable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics that weights, samples and loss determine."""
    kept = {}
    for name, value in metrics.items():
        if math.isfinite(value) and not name.startswith(_MACHINE_METRICS):
            kept[name] = value
    return kept
