"""The learner: one rank's model and optimizer, and the RL step that turns samples into updates. Every rank makes the same calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from klear_core.config.rl import RlConfig
from klear_core.config.train import CheckpointConfig
from klear_core.errors import ConfigError
from klear_core.generate.engine import TensorSpec
from klear_core.hf_config import read_hf_config
from klear_core.rl.groups import cut_minibatches
from klear_core.rl.losses import at_step, k3, log_ratio
from klear_core.rl.metrics import TokenStats
from klear_core.rl.objective import Denominators, OldPolicy, Targets, head_of, make_targets
from klear_core.seeding import seed_for
from klear_core.train.base import model_folder, wanted_window
from klear_core.train.checkpoint import Checkpoints, Counters
from klear_core.train.flops import FlopCount, peak_flops
from klear_core.train.logps import token_logps
from klear_core.train.model import Policy, export_model
from klear_core.train.packing import MicroBatch, PackedBatch
from klear_core.train.parallel import World, each_weight, full_weights, load_policy, pack_share, weight_shapes
from klear_core.train.step import StepResult, Updater, keep_bad_batch
from klear_core.types import TrainSample

_OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class _MiniBatch:
    """One optimizer step: its rows, packed, and what the loss needs of each micro-batch of this rank, in order."""

    rows: Sequence[TrainSample]
    packed: PackedBatch
    targets: tuple[Targets, ...]


class Learner:
    """`version` counts RL steps; an RL step with no samples changes nothing but the version."""

    def __init__(self, cfg: RlConfig, model: Path, *, seed: int, workdir: Path, world: World) -> None:
        self.cfg = cfg
        self.version = 0
        self._model = model
        self._seed = seed
        self._workdir = workdir
        self._world = world
        cfg.runtime.check_heads(read_hf_config(model_folder(model)).num_attention_heads, model_folder(model))
        self._num_skipped = 0
        self._policy = self._load()
        self._reference = self._load().requires_grad_(False) if cfg.kl_coef > 0 else None
        self._updater = Updater(self._policy, cfg.optim, world, num_steps=cfg.num_steps)
        self._checkpoints = Checkpoints(workdir / "scratch" / "checkpoints", cfg.runtime.checkpoint, world)
        self._flops, self._peak_flops = FlopCount.of(self._policy), peak_flops(world.device)
        if cfg.continue_optimizer:
            self._take_over(model / _OPTIMIZER)

    def restore(self) -> Counters | None:
        """Go back to the newest checkpoint, and return what was saved with it; None if there is none, and nothing is changed."""
        found = self._checkpoints.load_latest(self._policy, self._updater.optimizer)
        if found is None:
            return None
        self.version, counters = found
        self._num_skipped = int(counters["learner/skipped"])
        return {k: v for k, v in counters.items() if not k.startswith("learner/")}

    def save(self, counters: Counters) -> None:
        """Keep the present state and the caller's counters as a checkpoint."""
        self._checkpoints.save(self.version, self._policy, self._updater.optimizer, {**counters, "learner/skipped": self._num_skipped})

    def weights(self) -> dict[str, torch.Tensor]:
        """The present weights under their Hugging Face names, in the training dtype on the CPU of rank 0 (others: empty)."""
        gathered = full_weights(self._policy, dtype=self.cfg.dtype)
        self._release_cached_memory()
        return gathered

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """What `each_weight` gives."""
        return tuple(TensorSpec(name=name, dtype=self.cfg.dtype, shape=shape) for name, shape in weight_shapes(self._policy).items())

    def each_weight(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `weights`, one by one and on this rank's device. Every rank must iterate to the end."""
        return each_weight(self._policy, dtype=self.cfg.dtype)

    def export(self, target: Path) -> None:
        """Write the policy as a Hugging Face folder (rank 0), after the last asynchronous checkpoint; beside it the optimizer, if asked."""
        self._checkpoints.wait()
        if self.cfg.keep_optimizer:
            self._kept(target.parent / _OPTIMIZER).save(self.version, self._policy, self._updater.optimizer, {})
        weights = self.weights()
        if self._world.rank == 0:
            export_model(weights, model_folder(self._model), target, max_position_embeddings=wanted_window(self._model))

    def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Up to `minibatches_per_step` updates from these samples; metrics of the step. TrainingError after too many bad updates."""
        metrics = self._learn(samples) | self._staleness(samples)
        self._release_cached_memory()
        self.version += 1
        return metrics

    def _learn(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        cfg = self.cfg.model_copy(update={"loss": at_step(self.cfg.loss, self.version)})
        cut = cut_minibatches(samples, cfg.minibatches_per_step, seed=seed_for(self._seed, "rl/minibatches", self.version))
        minibatches = [self._prepare(rows, cfg) for rows in cut]  # all of them before the first update moves the policy
        stats = TokenStats(self._world.device)
        started = self._time()
        results = [self._update(minibatch, cfg, stats) for minibatch in minibatches]
        metrics = self._describe(minibatches, results, stats)
        if self._peak_flops is not None:
            available = self._peak_flops * self._world.size * (self._time() - started)
            metrics["rl/speed/mfu"] = self._flops.step(samples) / available
        return metrics

    def _time(self) -> float:
        """Seconds, when all that the device was given is done."""
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return time.perf_counter()

    def _release_cached_memory(self) -> None:
        """Keep no memory that is not in use: engines that wake need what they lent."""
        if self.cfg.rollout.is_asleep_between and self._world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self) -> Policy:
        checkpointing = self.cfg.runtime.activation_checkpointing
        return load_policy(model_folder(self._model), self._world, dtype=self.cfg.dtype, activation_checkpointing=checkpointing)

    def _kept(self, folder: Path) -> Checkpoints:
        return Checkpoints(folder, CheckpointConfig(keep=1), self._world)

    def _take_over(self, folder: Path) -> None:
        """Moments and step counts are the earlier stage's; betas, decay and all other settings stay this one's."""
        optimizer = self._updater.optimizer
        own = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        if not folder.is_dir() or self._kept(folder).load_latest(self._policy, optimizer) is None:
            raise ConfigError(f"continue_optimizer: {folder} holds no optimizer state; set keep_optimizer in the stage that made the model")
        for group, settings in zip(optimizer.param_groups, own, strict=True):
            group.update(settings)

    def _prepare(self, rows: Sequence[TrainSample], cfg: RlConfig) -> _MiniBatch:
        packed = pack_share(rows, cfg.runtime, self._world)
        counts = Denominators.of(rows)
        targets = [make_targets(micro, rows, self._ask_old(micro, rows, cfg), counts, cfg) for micro in packed.micros]
        return _MiniBatch(rows=rows, packed=packed, targets=tuple(targets))

    @torch.no_grad()
    def _ask_old(self, micro: MicroBatch, rows: Sequence[TrainSample], cfg: RlConfig) -> OldPolicy:
        sampler_logp_N = micro.gather([r.old_logps for r in rows])
        nan_N = torch.full_like(sampler_logp_N, torch.nan)
        head = partial(token_logps, target_N=micro.target_N, temperature=cfg.rollout.sampling.temperature)
        ref_logp_N = self._reference(micro, head).logp_N if self._reference is not None else nan_N
        asks_learner = cfg.old_logps == "learner" or cfg.erc is not None
        logp_N, entropy_N = self._policy(micro, head) if asks_learner else (nan_N, nan_N)
        return OldPolicy(
            logp_N=logp_N if cfg.old_logps == "learner" else sampler_logp_N,
            sampler_logp_N=sampler_logp_N,
            entropy_N=entropy_N,
            ref_logp_N=ref_logp_N,
        )

    def _update(self, minibatch: _MiniBatch, cfg: RlConfig, stats: TokenStats) -> StepResult:
        targets = {id(micro): t for micro, t in zip(minibatch.packed.micros, minibatch.targets, strict=True)}
        own = TokenStats(self._world.device)
        result = self._updater.step(minibatch.packed, lambda micro: head_of(targets[id(micro)], cfg, own), step=self.version)
        if result.is_applied:
            stats.merge(own)
        else:
            self._num_skipped += 1
            allowed = cfg.runtime.max_nonfinite_steps
            folder = self._workdir / "skipped"
            keep_bad_batch(folder, minibatch.rows, step=self.version, num_skipped=self._num_skipped, max_skipped=allowed)
        return result

    def _describe(self, minibatches: Sequence[_MiniBatch], results: Sequence[StepResult], stats: TokenStats) -> dict[str, float]:
        """Metrics of the updates that were applied, without which a step has their count alone; every rank takes part in the sums."""
        of_tokens = stats.over(self._world).metrics()
        applied = [(m, r) for m, r in zip(minibatches, results, strict=True) if r.is_applied]
        metrics = {"rl/optim/updates": float(len(applied)), "rl/optim/skipped": float(len(results) - len(applied))}
        if not applied:
            return metrics
        norms = [r.grad_norm for _, r in applied]
        metrics |= {
            "rl/loss/mean": sum(r.loss for _, r in applied) / len(applied),
            "rl/grad/norm": sum(norms) / len(norms),
            "rl/grad/max": max(norms),
            "rl/optim/lr": applied[0][1].lr,
            "rl/batch/tokens": float(sum(m.packed.num_tokens for m, _ in applied)),
            "rl/batch/fill": sum(m.packed.fill for m, _ in applied) / len(applied),
        }
        return metrics | of_tokens | self._mismatch(*applied[0])

    def _mismatch(self, first: _MiniBatch, result: StepResult) -> dict[str, float]:
        """How far sampler and learner disagree, on the first mini-batch applied: until then the learner is as the step found it.

        With stale samples the policy's own movement since they were sampled is part of it.
        """
        gaps = [log_ratio(o.logp_N.double(), t.sampler_logp_N.double()) for o, t in zip(result.outputs, first.targets, strict=True)]
        bound = self.cfg.max_log_ratio
        gap_N = torch.cat(gaps).clamp(-bound, bound)
        k3_sum = self._world.sum(k3(gap_N).sum()).item()
        largest = self._world.max(torch.cat([gap_N.abs(), gap_N.new_zeros(1)]).max())  # this rank may have no token
        return {"rl/mismatch/k3": k3_sum / first.packed.num_loss_tokens, "rl/mismatch/max": largest.item()}

    def _staleness(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        ages = [self.version - s.oldest_version for s in samples]
        return {"rl/staleness/mean": sum(ages) / len(ages), "rl/staleness/max": float(max(ages))} if ages else {}
