"""Hold one learner rank's model and optimizer, and turn the samples of an RL step into updates.

Every rank must make the same calls in the same order, because most of them contain collective calls.
Axis letters: N loss tokens of a micro-batch.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from klear_core.artifacts.records import read_shard, write_shard
from klear_core.config.load import as_option
from klear_core.config.losses import M2poConfig
from klear_core.config.rl import RlConfig
from klear_core.config.train import CheckpointConfig
from klear_core.errors import ArtifactError, ConfigError
from klear_core.generate.engine import TensorSpec
from klear_core.hf_config import read_hf_config
from klear_core.rl.groups import cut_minibatches
from klear_core.rl.losses import LossInputs, at_step, leaving_squares, m2_cutoff
from klear_core.rl.objective import (
    Denominators,
    EntropyBonus,
    MiniBatch,
    loss_head,
    make_loss_inputs,
    staleness,
    update_metrics,
)
from klear_core.rl.sample_arrays import LearnerSample, SampleArrays, SampleT, samples_here
from klear_core.rl.step_metrics import TokenStats
from klear_core.seeding import seed_for
from klear_core.train.base_model import model_folder, wanted_window
from klear_core.train.checkpoint import Checkpoints, Counters
from klear_core.train.checkpoint_files import fetch_shards
from klear_core.train.distributed import (
    World,
    adapter_weights,
    each_weight,
    full_weights,
    load_policy,
    local_weights,
    pack_share,
    plan_shares,
    weight_shapes,
)
from klear_core.train.logps import TokenLogps, token_logps
from klear_core.train.model import (
    ADAPTER_FOLDER,
    Adapters,
    FlopCount,
    Head,
    Policy,
    export_model,
    peak_flops,
    save_adapter,
    without_adapters,
)
from klear_core.train.packing import MicroBatch
from klear_core.train.step import (
    PROFILES,
    RankPaces,
    Updater,
    UpdateResult,
    check_profiled,
    profiled,
    save_bad_batch,
    time_when_done,
)
from klear_core.types import TrainSample

_OPTIMIZER = "optimizer"
_SKIPPED = "skipped"
SAVED_STEPS = "steps"
"""Folder of the saved steps in an RL artifact."""


class Learner:
    """Train the policy; `version` counts RL steps, and a step without samples changes only the version."""

    def __init__(self, cfg: RlConfig, model: Path, *, seed: int, workdir: Path, world: World) -> None:
        from klear_core.train.kernels.check import (
            prove_fast_paths,  # imports a model of transformers, and what that uses
        )

        self.cfg = cfg
        self.version = 0
        self._model = model
        self._seed = seed
        self._workdir = workdir
        self.world = world
        hf_config = read_hf_config(model_folder(model))
        cfg.runtime.check_attention_heads(hf_config.num_attention_heads, model_folder(model))
        cfg.runtime.check_layers(hf_config.num_hidden_layers, model_folder(model))
        # Before the model is loaded, because another process on the same GPU needs memory for it.
        runtime = cfg.runtime
        self.notes = prove_fast_paths(
            hf_config, world, cfg.dtype, context_parallel=runtime.context_parallel, kernel=runtime.attention
        )
        """Notes for the stage's manifest."""
        check_profiled(runtime.profile_steps, cfg.num_steps)
        self._num_skipped = 0
        self._entropy_bonus = EntropyBonus(coef=cfg.entropy_coef, applied=cfg.entropy_coef)
        self._policy = self._load()
        # A second, frozen copy of the initial model; `restore` changes the policy and never this one. With LoRA none is
        # needed, because the policy without its adapters is the initial model.
        needs_copy = cfg.kl_coef > 0 and cfg.lora is None
        self._ref = self._load().requires_grad_(False) if needs_copy else None
        self._updater = Updater(self._policy, cfg.optim, world, num_steps=cfg.num_steps)
        self._paces = RankPaces(world, "rl/speed")
        self._saved_steps = SavedSteps(workdir / SAVED_STEPS, world)
        self._checkpoints = Checkpoints(workdir / "scratch" / "checkpoints", cfg.runtime.checkpoint, world)
        self._flops, self._peak_flops = FlopCount.of(self._policy), peak_flops(world.device)
        if cfg.continue_optimizer:
            self._load_optimizer(model / _OPTIMIZER)

    def restore(self) -> Counters | None:
        """Load the newest checkpoint and return the counters saved with it; return None if there is none."""
        found = self._checkpoints.load_latest(self._policy, self._updater.optimizer)
        if found is None:
            return None
        self.version, counters = found
        self._num_skipped = int(counters["learner/skipped"])
        self._restore_entropy_bonus(counters)
        # Entries under `learner/` were added by `save`; the caller gets back only its counters.
        return {k: v for k, v in counters.items() if not k.startswith("learner/")}

    def begin_saved(self, steps: SavedSteps, step: int) -> None:
        """Load the state from before a saved step, which the next call of `step` then repeats (collective call)."""
        self._restore_entropy_bonus(steps.restore(step, self._policy, self._updater.optimizer))
        self.version = step - 1

    def save(self, counters: Counters) -> None:
        """Save the current state and the caller's counters as a checkpoint (collective call)."""
        own = {"learner/skipped": self._num_skipped, **self._entropy_counters()}
        self._checkpoints.save(self.version, self._policy, self._updater.optimizer, {**counters, **own})

    def _entropy_counters(self) -> dict[str, float]:
        """Return the state of the entropy bonus for a checkpoint; nothing if its weight is constant."""
        if self.cfg.entropy_target is None:
            return {}
        bonus = self._entropy_bonus
        return {"learner/entropy_coef": bonus.coef, "learner/entropy_weight": bonus.applied}

    def _restore_entropy_bonus(self, counters: Counters) -> None:
        if self.cfg.entropy_target is not None:
            coef, applied = counters["learner/entropy_coef"], counters["learner/entropy_weight"]
            self._entropy_bonus = EntropyBonus(coef=coef, applied=applied)

    def finish_save(self) -> None:
        """Wait until the last checkpoint is complete (collective call)."""
        self._checkpoints.wait()

    @torch.no_grad()
    def logps(self, samples: Sequence[LearnerSample]) -> list[TokenLogps]:
        """Return log-probs and entropies of this rank's share of the tokens, one micro-batch each (collective call)."""
        packed = pack_share(samples, self.cfg.runtime, self.world, self._flops)
        outputs = []
        for micro in packed.micro_batches:
            outputs.append(self._policy(micro, self._logp_head(micro)))
        return outputs

    @torch.no_grad()
    def logp_error(self, samples: Sequence[LearnerSample]) -> float:
        """Return the largest of the samples' mean distances from the sampler's log-probs, in nats (collective call)."""
        packed = pack_share(samples, self.cfg.runtime, self.world, self._flops)
        # One sum for each sample, in float64 because most distances are near 0.
        sums = torch.zeros(len(samples), dtype=torch.float64, device=self.world.device)
        for micro in packed.micro_batches:
            found: TokenLogps = self._policy(micro, self._logp_head(micro))
            sampler_logp_N = micro.gather({r: samples[r].sampler_logps for r in micro.rows}, torch.float64)
            sums.index_add_(0, micro.row_N, (found.logp_N.double() - sampler_logp_N).abs())
        counts = torch.tensor([s.num_loss_tokens for s in samples], device=sums.device)
        means = self.world.sum(sums) / counts
        return means.max().item()

    def local_weights(self) -> list[torch.Tensor]:
        """Return copies of this rank's shares of the weights; see `local_weights`."""
        return local_weights(self._policy)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights by Hugging Face name, in the training dtype on the CPU; empty on ranks other than 0."""
        gathered = full_weights(self._policy, dtype=self.cfg.dtype)
        self._release_cached_memory()
        return gathered

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """Return name, dtype and shape of each weight, in the order of `each_weight`."""
        shapes = weight_shapes(self._policy)
        return tuple(TensorSpec(name=name, dtype=self.cfg.dtype, shape=shape) for name, shape in shapes.items())

    def each_weight(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same weights as `weights` one by one, on each rank's device; every rank must iterate to the end."""
        return each_weight(self._policy, dtype=self.cfg.dtype)

    def export(self, target: Path) -> None:
        """Write the policy as a Hugging Face folder (rank 0) and, with `keep_optimizer`, the optimizer beside it."""
        self._checkpoints.wait()  # an asynchronous save that failed raises here, before the stage counts as done
        if self.cfg.keep_optimizer:
            kept = Checkpoints(target.parent / _OPTIMIZER, CheckpointConfig(keep=1), self.world)
            kept.save(self.version, self._policy, self._updater.optimizer, {})
        adapter, weights = adapter_weights(self._policy), self.weights()  # collective: outside the `if`
        if self.world.rank == 0:
            # First, because a run that is resumed takes a model folder as the end of its export.
            if self._policy.adapters is not None:
                save_adapter(adapter, self._policy.adapters, target.parent / ADAPTER_FOLDER)
            export_model(weights, model_folder(self._model), target, max_position_embeddings=wanted_window(self._model))

    def results(self) -> list[str]:
        """Return the names in the working folder of what the stage hands over; for rank 0 after `export`.

        The shards of ranks with other disks are fetched first.
        """
        for folder in (self._workdir / _OPTIMIZER, *self._saved_steps.states()):
            fetch_shards(folder)
        return [SAVED_STEPS, _SKIPPED, ADAPTER_FOLDER, _OPTIMIZER, PROFILES, "model"]

    def shares(self, samples: Sequence[SampleArrays]) -> list[list[int]]:
        """Return the indices of the samples that each data rank computes in the next step; no tokens are needed.

        Rank 0 gets all samples of a step that it is to save.
        """
        shares: list[list[int]] = [[] for _ in range(self.world.num_data_ranks)]
        for part in self._cut(samples):
            for rank, own in enumerate(plan_shares(part, self.cfg.runtime, self.world, self._flops)):
                shares[rank] += [part[i].index for i in own]
        if self.version + 1 in self.cfg.runtime.save_steps:
            shares[0] = list(range(len(samples)))
        return shares

    def step(self, samples: Sequence[LearnerSample]) -> dict[str, float]:
        """Make up to `minibatches_per_step` updates from these samples and return the step's metrics.

        Raise TrainingError once more than `runtime.max_nonfinite_steps` updates were skipped in the run.
        """
        self._checkpoints.raise_failure()  # a run that cannot save must not go on until the next save
        step = self.version + 1  # as it is logged
        is_saved = step in self.cfg.runtime.save_steps
        if is_saved:
            counters = self._entropy_counters()
            self._saved_steps.begin(step, samples, self._policy, self._updater.optimizer, counters)
        with profiled(self.cfg.runtime.profile_steps, step, self._workdir / PROFILES, rank=self.world.rank):
            metrics = self._learn(samples)
        metrics |= staleness(samples, version=self.version) | self._paces.measure()
        self._release_cached_memory()
        self.version = step
        if is_saved:
            self._saved_steps.finish(step, metrics)
        return metrics

    def _learn(self, samples: Sequence[LearnerSample]) -> dict[str, float]:
        cut = self._cut(samples)
        # Prepare all mini-batches before the first update, because old log-probs must come from the policy as it was
        # before this RL step.
        minibatches = [self._prepare(part) for part in cut]
        stats = TokenStats(self.world.device)
        started = time_when_done(self.world.device)  # MFU covers only the updates' forward and backward passes
        results = [self._update(minibatch, stats) for minibatch in minibatches]
        metrics = update_metrics(minibatches, results, stats, self.world, max_log_ratio=self.cfg.max_log_ratio)
        if self.cfg.entropy_target is not None:
            metrics["rl/entropy/coef"] = self._entropy_bonus.applied
            # Absent without an applied update. The mean over all ranks' tokens, so that all ranks adapt alike.
            if (entropy := metrics.get("rl/entropy/mean")) is not None:
                self._entropy_bonus = self._entropy_bonus.after(entropy, self.cfg.entropy_target)
        if self._peak_flops is not None:
            available = self._peak_flops * self.world.size * (time_when_done(self.world.device) - started)
            metrics["rl/speed/mfu"] = self._flops.step(samples) / available
        return metrics

    def _cut(self, samples: Sequence[SampleT]) -> list[list[SampleT]]:
        """Cut samples into mini-batches; every rank cuts all with the same seed, and then takes its share of each."""
        seed = seed_for(self._seed, "rl/minibatches", self.version)
        return cut_minibatches(samples, self.cfg.minibatches_per_step, seed=seed)

    def _release_cached_memory(self) -> None:
        """Free cached GPU memory so that sleeping engines on the same GPU can wake."""
        if self.cfg.rollout.sleeps_between_rollouts and self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self) -> Policy:
        lora = self.cfg.lora
        return load_policy(
            model_folder(self._model),
            self.world,
            dtype=self.cfg.dtype,
            activation_checkpointing=self.cfg.runtime.activation_checkpointing,
            keep_layers=self.cfg.runtime.keep_layers,
            cpu_offload=self.cfg.runtime.cpu_offload,
            adapters=None if lora is None else Adapters(cfg=lora, seed=seed_for(self._seed, "rl/lora")),
        )

    def _ref_logps(self, micro: MicroBatch, head: Head[TokenLogps]) -> torch.Tensor:
        """Return the log-probs of the initial model."""
        if self._ref is not None:
            found: TokenLogps = self._ref(micro, head)
            return found.logp_N
        with without_adapters(self._policy.hf):
            found = self._policy(micro, head)
        return found.logp_N

    def _load_optimizer(self, folder: Path) -> None:
        """Load moments, step counts and float32 weights of an earlier stage; keep this stage's optimizer settings."""
        optimizer = self._updater.optimizer
        # Loading overwrites the parameter groups' settings (Adam betas, weight decay), so this stage's are put back.
        settings = []
        for group in optimizer.param_groups:
            settings.append({k: v for k, v in group.items() if k != "params"})
        found = None
        if folder.is_dir():
            found = Checkpoints(folder, CheckpointConfig(keep=1), self.world).load_latest(self._policy, optimizer)
        if found is None:
            raise ConfigError(
                f"continue_optimizer: {folder} holds no optimizer state; "
                f"set keep_optimizer in the stage that made the model"
            )
        for group, saved in zip(optimizer.param_groups, settings, strict=True):
            group.update(saved)

    def _prepare(self, samples: Sequence[LearnerSample]) -> MiniBatch:
        packed = pack_share(samples, self.cfg.runtime, self.world, self._flops)
        # Count the samples of all ranks, because gradients are summed over ranks, not averaged.
        denominators = Denominators.of(samples)
        batches = [self._batch(micro, samples, denominators) for micro in packed.micro_batches]
        return MiniBatch(samples=samples, packed=packed, inputs=tuple(batches))

    def _logp_head(self, micro: MicroBatch) -> Head[TokenLogps]:
        # Use the sampling temperature, because the policy is the distribution that tokens were drawn from.
        return partial(token_logps, target_N=micro.target_N, temperature=self.cfg.rollout.sampling.temperature)

    @torch.no_grad()
    def _batch(self, micro: MicroBatch, samples: Sequence[LearnerSample], denominators: Denominators) -> LossInputs:
        """Return the inputs of a micro-batch's loss; those of the old and the initial model by a forward pass each."""
        cfg, head = self.cfg, self._logp_head(micro)
        ref_logp_N = self._ref_logps(micro, head) if cfg.kl_coef > 0 else None
        # Entropy-ratio clipping (ERC) needs the old policy's entropy. The sampler does not report it, so a forward pass
        # is needed even if the sampler's log-probs are used.
        needs_forward = cfg.old_logps == "learner" or cfg.erc is not None
        old: TokenLogps | None = self._policy(micro, head) if needs_forward else None
        return make_loss_inputs(micro, samples, old, ref_logp_N, denominators, cfg)

    @torch.no_grad()
    def _m2_cutoff(self, minibatch: MiniBatch, loss: M2poConfig) -> float:
        """Return M2PO's cutoff, which depends on all tokens of the mini-batch under the present weights.

        A forward pass of its own, because the weights of the first micro-batch depend on the last (collective call).
        """
        squares = []
        for micro, batch in zip(minibatch.packed.micro_batches, minibatch.inputs, strict=True):
            found: TokenLogps = self._policy(micro, self._logp_head(micro))
            squares.append(leaving_squares(found.logp_N, batch, self.cfg.max_log_ratio))
        return m2_cutoff(self.world.concat(torch.cat(squares)), loss.max_second_moment)

    def _update(self, minibatch: MiniBatch, stats: TokenStats) -> UpdateResult:
        # Loss with its scheduled betas, and weight of the entropy bonus, at this RL step.
        loss = at_step(self.cfg.loss, self.version)
        cfg = self.cfg.model_copy(update={"loss": loss, "entropy_coef": self._entropy_bonus.applied})
        update_stats, batches = TokenStats(self.world.device), minibatch.inputs
        if isinstance(cfg.loss, M2poConfig):
            cutoff = self._m2_cutoff(minibatch, cfg.loss)
            batches = tuple(replace(batch, m2_cutoff=cutoff) for batch in batches)
        loss_heads = [loss_head(batch, cfg, update_stats) for batch in batches]
        result = self._updater.update(minibatch.packed, loss_heads, step=self.version)
        # Statistics of a skipped update are discarded: one NaN would spoil the sums of the complete RL step.
        if result.is_applied:
            stats.merge(update_stats)
        else:
            self._num_skipped += 1
            allowed = cfg.runtime.max_nonfinite_steps
            folder = self._workdir / _SKIPPED
            # Each rank writes the rows that it has.
            rows, data_rank = samples_here(minibatch.samples), self.world.data_rank
            save_bad_batch(
                folder, rows, step=self.version + 1, num_skipped=self._num_skipped, max_skipped=allowed, rank=data_rank
            )
        return result


# ---- saved steps ----
# Save RL steps in full (samples, weights and optimizer state before the step, metrics), to replay them.


_SAMPLES, _METRICS, _STATE = "samples.parquet", "metrics.json", "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """Samples that one RL step trained on, and the metrics that the learner returned for it."""

    step: int
    samples: tuple[TrainSample, ...]
    metrics: dict[str, float]


class SavedSteps:
    """The saved steps of one RL stage. Steps count from 1, as in the log; step n ends with the learner's version n."""

    def __init__(self, folder: Path, world: World) -> None:
        self._folder = folder
        self._world = world

    def begin(
        self,
        step: int,
        samples: Sequence[LearnerSample],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        counters: Counters,
    ) -> None:
        """Save samples, weights, optimizer state and counters before the step (collective call)."""
        folder = self._of(step)
        if self._world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # left by an attempt that was killed in this step
            write_shard(folder / _SAMPLES, samples_here(samples))
        # No rank may write its state before rank 0 has cleared the folder.
        self._world.barrier()
        state = Checkpoints(folder / _STATE, CheckpointConfig(keep=1), self._world)
        state.save(step - 1, model, optimizer, counters)

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Save the step's metrics, which makes it complete."""
        if self._world.rank > 0:
            return
        # NaN and infinity are not JSON; replay compares finite metrics only.
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        # Renamed when whole, because the file marks the step as complete (see `steps`).
        beside = self._of(step) / f"{_METRICS}.tmp"
        beside.write_text(json.dumps(finite, indent=2))
        beside.replace(self._of(step) / _METRICS)

    def load(self, step: int) -> SavedStep:
        """Return a saved step. Raise ArtifactError, which lists the saved steps, if it is not one of them."""
        folder = self._of(step)
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise ArtifactError(
                f"{self._folder.parent}: RL step {step} is not saved; saved steps: {there}. "
                f"Make the stage again (--rerun-from) with {as_option('rl.runtime.save_steps', [step])}"
            )
        samples = read_shard(folder / _SAMPLES, TrainSample)
        metrics = json.loads((folder / _METRICS).read_text())
        return SavedStep(step=step, samples=tuple(samples), metrics=metrics)

    def restore(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Counters:
        """Load weights and optimizer state from before the step and return the counters (collective call).

        Raise ArtifactError if they are damaged.
        """
        folder = self._of(step) / _STATE
        found = Checkpoints(folder, CheckpointConfig(keep=1), self._world).load_latest(model, optimizer)
        if found is None:
            raise ArtifactError(f"{folder}: no complete state; the files of step {step} are damaged")
        _, counters = found
        return counters

    def steps(self) -> list[int]:
        """Return the complete steps in order."""
        return sorted(int(file.parent.name) for file in self._folder.glob(f"*/{_METRICS}"))

    def states(self) -> list[Path]:
        """Return the folders of the states before the steps, also of steps that are not complete."""
        return sorted(self._folder.glob(f"*/{_STATE}"))

    def _of(self, step: int) -> Path:
        return self._folder / f"{step:08d}"
