"""Run long-CoT supervised fine-tuning, from traces to a model folder.

A run that is killed anywhere and started again ends with the same weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from klear_core import stopping
from klear_core.artifacts.manifest import FileRecord, StageSummary
from klear_core.artifacts.records import read_shards
from klear_core.artifacts.remote_paths import RemotePaths, fetch_results, remote_paths_of, send_results
from klear_core.artifacts.shared import send_work
from klear_core.config.evaluate import InlineEvalConfig
from klear_core.config.train import SftConfig
from klear_core.hf_config import read_hf_config
from klear_core.metrics import SILENT, Telemetry, skipped_note
from klear_core.prompts import check_template, load_tokenizer
from klear_core.seeding import seed_for
from klear_core.sft.examples import TokenStore, build_store, check_store, plan_training
from klear_core.stopping import StoppedEarly, checkpoint_first
from klear_core.train.base_model import model_folder, wanted_window
from klear_core.train.checkpoint import Checkpoints
from klear_core.train.checkpoint_files import fetch_folder, send_folder
from klear_core.train.distributed import (
    RunRanks,
    World,
    adapter_weights,
    full_weights,
    load_policy,
    pack_share,
    run_here,
)
from klear_core.train.inline_eval import CheckpointExporter, OpenScorer, no_scorer, scoring
from klear_core.train.logps import HeadOutput, fused_loss
from klear_core.train.model import (
    ADAPTER_FOLDER,
    Adapters,
    FlopCount,
    Head,
    Policy,
    export_model,
    peak_flops,
    save_adapter,
)
from klear_core.train.packing import MicroBatch, PackedBatch
from klear_core.train.step import PROFILES, RankPaces, Updater, UpdateResult, check_profiled, profiled, save_bad_batch
from klear_core.types import SftExample, TeacherTrace, TokenRow


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Inputs of every rank."""

    cfg: SftConfig
    model: Path
    store: Path
    seed: int
    workdir: Path
    inline_eval: InlineEvalConfig | None = None
    """Steps whose models are exported to be scored; None: none."""
    remote: RemotePaths | None = None
    """Source of model and tokens for ranks on nodes with other disks; None without a shared store."""

    def on_this_node(self) -> _Job:
        """Return the inputs with this node's own paths."""
        if self.remote is None:
            return self
        model, workdir = self.remote.local_path(self.model), self.remote.local_path(self.workdir)
        store = workdir / self.store.relative_to(self.workdir)
        fetch_folder(store)
        return replace(self, model=model, workdir=workdir, store=store)


def train_sft(
    cfg: SftConfig,
    *,
    model: Path,
    traces: Path,
    workdir: Path,
    seed: int = 0,
    telemetry: Telemetry = SILENT,
    run_ranks: RunRanks[tuple[StageSummary, tuple[FileRecord, ...]]] = run_here,
    open_scorer: OpenScorer = no_scorer,
) -> StageSummary:
    """Train `model` on `traces/traces/*.parquet` and write `workdir/model`, a Hugging Face folder in `cfg.dtype`.

    `model` is a model artifact or a Hugging Face folder. `run_ranks` runs the learner ranks; the default is one rank in
    this process. `open_scorer` opens the scorer of the models that `cfg.runtime.curve` asks for during training.

    Raise ConfigError if the chat template is unfit, DataError if too few traces are usable, TrainingError after too
    many skipped steps.
    """
    tokenizer = load_tokenizer(model_folder(model))
    check_template(tokenizer)
    hf_config = read_hf_config(model_folder(model))
    cfg.runtime.check_attention_heads(hf_config.num_attention_heads, model_folder(model))
    cfg.runtime.check_layers(hf_config.num_hidden_layers, model_folder(model))
    store = workdir / "scratch" / "tokens"
    rows = read_shards(traces / "traces", TeacherTrace)
    # Tokenised once here, before the ranks start; each of them maps the same file.
    tokens = build_store(rows, tokenizer, store, max_tokens=cfg.max_tokens, overlong=cfg.overlong)
    warnings = check_store(tokens, cfg.runtime.rows, max_tokens=cfg.max_tokens)
    # Ranks in this process have its disk.
    remote = None if run_ranks is run_here else remote_paths_of(workdir)
    if remote is not None:
        send_folder(store)
    with open_scorer(model_folder(model)) as scorer, scoring(scorer, telemetry, stage="sft", workdir=workdir) as scores:
        inline_eval = None if scores is None else cfg.runtime.curve
        job = _Job(
            cfg=cfg, model=model, store=store, seed=seed, workdir=workdir, inline_eval=inline_eval, remote=remote
        )
        with checkpoint_first():
            summary, results = run_ranks(partial(_run_rank, job), cfg.runtime, telemetry)
        unscored = () if scores is None else scores.finish()
    fetch_results(remote, results, workdir)
    return summary.model_copy(update={"notes": (*warnings, *summary.notes, *unscored)})


def _run_rank(job: _Job, world: World, telemetry: Telemetry) -> tuple[StageSummary, tuple[FileRecord, ...]]:
    """Train, and return the files that rank 0 has sent to the store, for a driver with another disk."""
    job = job.on_this_node()
    summary = _train_rank(job, world, telemetry)
    results = (
        send_results(job.remote, job.workdir, ["skipped", ADAPTER_FOLDER, PROFILES, "model"]) if world.rank == 0 else ()
    )
    return summary, results


def _train_rank(job: _Job, world: World, telemetry: Telemetry) -> StageSummary:
    from klear_core.train.kernels.check import prove_fast_paths  # imports a model of transformers, and what that uses

    cfg, store = job.cfg, TokenStore(job.store)
    plan = plan_training(cfg, store, seed=job.seed)
    num_steps = plan.num_steps
    check_profiled(cfg.runtime.profile_steps, num_steps)
    validation = [store[r] for r in plan.split.validation]

    # Prove before the model is loaded, because another process on the same GPU needs memory for it.
    path_notes = prove_fast_paths(
        read_hf_config(model_folder(job.model)),
        world,
        cfg.dtype,
        context_parallel=cfg.runtime.context_parallel,
        kernel=cfg.runtime.attention,
    )
    policy = _load(job, world)
    flops = FlopCount.of(policy)
    speed = _Speedometer(flops, world)
    paces = RankPaces(world, "sft/time")
    updater = Updater(policy, cfg.optim, world, num_steps=num_steps)
    checkpoints = Checkpoints(job.workdir / "scratch" / "checkpoints", cfg.runtime.checkpoint, world)
    # A checkpoint's weights and moments are loaded in place; `first` is the step to continue at.
    first, counters = checkpoints.load_latest(policy, updater.optimizer) or (0, {"num_skipped": 0, "num_tokens": 0})
    exporter = _exporter(job, world)
    exporter.begin(policy, first=first, num_steps=num_steps)

    for step in range(first, num_steps):
        checkpoints.raise_failure()  # a run that cannot save must not go on until the next save
        speed.start()
        # Every rank reads all rows of the step; pack_share() then picks its micro-batches.
        rows = [store[r] for r in plan.order.step(step)]
        batch = pack_share(rows, cfg.runtime, world, flops)
        _seed_dropout(job, step, world)
        with profiled(cfg.runtime.profile_steps, step + 1, job.workdir / PROFILES, rank=world.rank):
            result = updater.update(batch, sft_heads(batch.micro_batches, rows, cfg.normalise), step=step)
        _count_update(result, batch, counters)
        if not result.is_applied:  # alike on all ranks, so all of them raise if these are too many
            _save_bad_batch(rows, job, step=step + 1, num_skipped=int(counters["num_skipped"]))
        done = step + 1
        metrics = _of_update(result, batch) | {
            "sft/optim/lr": result.lr,
            "sft/optim/skipped": counters["num_skipped"],
            "sft/data/epoch": done * cfg.rows_per_step / plan.order.rows_per_epoch,
        }
        metrics |= speed.metrics(rows)  # before validation, whose time is not the update's
        metrics |= paces.measure()
        if validation and (done % cfg.eval_every_steps == 0 or done == num_steps):
            metrics["sft/loss/validation"] = held_out_loss = _validation_loss(policy, validation, cfg, world, flops)
            _count_validation(held_out_loss, counters)
        telemetry.log(metrics, step=done)
        telemetry.progress(done, num_steps, f"loss {result.loss:.3f}" if result.is_applied else "update skipped")
        # Before the checkpoint: a killed run makes the models of later steps again, but none of earlier ones.
        exporter.offer(policy, step=done, num_steps=num_steps)
        is_last = done == num_steps or world.any(stopping.is_asked())
        if checkpoints.is_due(done) or is_last:
            send_work(job.workdir)  # the rows of the steps that it counts, if this rank is in the driver's process
            checkpoints.save(done, policy, updater.optimizer, counters)
        if is_last and done < num_steps:
            checkpoints.wait()
            raise StoppedEarly(f"SFT was asked to stop after step {done}")
    checkpoints.wait()  # a run killed from here on resumes behind the last step, and only exports

    _export(policy, job, world)
    notes = (*path_notes, *_skip_notes(counters), *exporter.notes())
    ledger = (store.ledger, *plan.ledger())
    return StageSummary(counts=_counts(num_steps, counters), ledger=ledger, seeds={"sft": job.seed}, notes=notes)


def _seed_dropout(job: _Job, step: int, world: World) -> None:
    """Seed the masks of a step, so that a resumed run draws the same ones. Without dropout nothing is drawn."""
    if job.cfg.lora is not None and job.cfg.lora.dropout > 0:
        torch.manual_seed(seed_for(job.seed, "sft/lora/dropout", step, world.rank))


def _count_update(result: UpdateResult, batch: PackedBatch, counters: dict[str, float]) -> None:
    if result.is_applied:
        counters["num_tokens"] += batch.num_tokens
        counters["train_loss"] = result.loss
    else:
        counters["num_skipped"] += 1


def _skip_notes(counters: Mapping[str, float]) -> tuple[str, ...]:
    """Return a note on the updates that were skipped, if there are any."""
    num_skipped = int(counters["num_skipped"])
    return (skipped_note(num_skipped),) if num_skipped else ()


def _count_validation(held_out_loss: float, counters: dict[str, float]) -> None:
    counters.pop("validation_loss", None)  # an earlier model's loss must not be reported for this one
    # Checkpoint counters are written as JSON, which has no NaN.
    if math.isfinite(held_out_loss):
        counters["validation_loss"] = held_out_loss


def _load(job: _Job, world: World) -> Policy:
    cfg = job.cfg
    return load_policy(
        model_folder(job.model),
        world,
        dtype=cfg.dtype,
        activation_checkpointing=cfg.runtime.activation_checkpointing,
        keep_layers=cfg.runtime.keep_layers,
        cpu_offload=cfg.runtime.cpu_offload,
        adapters=None if cfg.lora is None else Adapters(cfg=cfg.lora, seed=seed_for(job.seed, "sft/lora")),
    )


def _exporter(job: _Job, world: World) -> CheckpointExporter:
    return CheckpointExporter(
        job.inline_eval,
        workdir=job.workdir,
        source=model_folder(job.model),
        window=wanted_window(job.model),
        dtype=job.cfg.dtype,
        world=world,
    )


def _export(policy: Policy, job: _Job, world: World) -> None:
    """Write the model, and the LoRA adapter beside it (collective call)."""
    # All ranks gather, though only rank 0 writes.
    adapter, weights = adapter_weights(policy), full_weights(policy, dtype=job.cfg.dtype)
    if world.rank > 0:
        return
    if policy.adapters is not None:
        save_adapter(adapter, policy.adapters, job.workdir / ADAPTER_FOLDER)
    export_model(
        weights, model_folder(job.model), job.workdir / "model", max_position_embeddings=wanted_window(job.model)
    )


def _counts(num_steps: int, counters: Mapping[str, float]) -> dict[str, int | float]:
    """Return the numbers to show first: the result, then the work done."""
    losses = {name: value for name, value in counters.items() if name.endswith("_loss")}
    return (
        {"steps": num_steps} | losses | {"tokens": int(counters["num_tokens"]), "skipped": int(counters["num_skipped"])}
    )


def _of_update(result: UpdateResult, batch: PackedBatch) -> dict[str, float]:
    """Return the metrics of an update; none if it was skipped."""
    if not result.is_applied:
        return {}
    return {
        "sft/loss/train": result.loss,
        "sft/grad/norm": result.grad_norm,
        "sft/batch/tokens": batch.num_tokens,
        "sft/batch/fill": batch.fill,
        "sft/batch/busy": batch.busy,
    }


class _Speedometer:
    """Measure tokens per second and, if the hardware's peak is known, the share of it that was used (MFU)."""

    def __init__(self, flops: FlopCount, world: World) -> None:
        self._flops = flops
        peak = peak_flops(world.device)
        # All ranks together, as a step's rows are those of all ranks.
        self._peak = None if peak is None else peak * world.size
        self._started = 0.0

    def start(self) -> None:
        """Mark the start of a step."""
        self._started = time.perf_counter()

    def metrics(self, rows: Sequence[SftExample]) -> dict[str, float]:
        """Return the metrics of a step over `rows` that ends now."""
        # The update has read its loss as a number, so the device has finished its work.
        seconds = time.perf_counter() - self._started
        speed = {"sft/time/tokens_per_s": sum(len(r.token_ids) for r in rows) / seconds}
        return speed if self._peak is None else speed | {"sft/time/mfu": self._flops.step(rows) / seconds / self._peak}


def _save_bad_batch(rows: Sequence[SftExample], job: _Job, *, step: int, num_skipped: int) -> None:
    allowed = job.cfg.runtime.max_nonfinite_steps
    save_bad_batch(job.workdir / "skipped", rows, step=step, num_skipped=num_skipped, max_skipped=allowed)


@torch.no_grad()
def _validation_loss(
    policy: Policy, rows: Sequence[SftExample], cfg: SftConfig, world: World, flops: FlopCount
) -> float:
    """Return the cross-entropy over all held-out rows in nats, normalised as in training (collective call)."""
    micro_batches = pack_share(rows, cfg.runtime, world, flops).micro_batches
    heads = sft_heads(micro_batches, rows, cfg.normalise)
    policy.eval()  # switches off the adapters' dropout
    losses = [policy(micro, head).loss for micro, head in zip(micro_batches, heads, strict=True)]
    policy.train()
    return float(world.sum(torch.stack(losses).sum()))  # each loss is divided by the counts of all rows already


# ---- loss ----
# Compute the SFT loss: token cross-entropy, divided once by counts of the complete step.
#
# So the loss does not depend on how rows are divided among micro-batches and ranks. Klear-Reasoner's equation 8
# prints a mean probability per sequence; we read it as the log-probability.


Normalise = Literal["token", "sample"]


def row_scales(rows: Sequence[TokenRow], normalise: Normalise) -> Tensor:
    """Return the factor of each row's loss tokens, float32 [rows]; over all loss tokens the factors sum to 1.

    `token`: 1 / loss tokens of the step. `sample`: 1 / (loss tokens of the row * rows).
    """
    # Of all rows of the step, on every rank: with local counts, tokens would weigh more on ranks that have few.
    counts = torch.tensor([sum(r.loss_mask) for r in rows], dtype=torch.float32)
    assert bool((counts > 0).all()), "a row without loss tokens has no gradient"
    return torch.ones_like(counts) / counts.sum() if normalise == "token" else 1 / (counts * len(rows))


def sft_heads(
    micro_batches: Sequence[MicroBatch], rows: Sequence[TokenRow], normalise: Normalise
) -> list[Head[HeadOutput]]:
    """Return one head per micro-batch; losses of all micro-batches and ranks add up to the weighted cross-entropy."""
    scales = row_scales(rows, normalise)
    return [_sft_head(micro, scales) for micro in micro_batches]


def _sft_head(micro: MicroBatch, scales: Tensor) -> Head[HeadOutput]:
    # Each loss token takes the factor of its row, whichever micro-batch it is in.
    scale_N = scales.to(micro.row_N.device)[micro.row_N]

    def loss_fn(logp_C: Tensor, _entropy_C: Tensor, where: slice) -> Tensor:
        return -scale_N[where] * logp_C  # minus: minimise the negative log-likelihood; `where` selects a chunk of N

    # The temperature stays 1: the cross-entropy is of the model itself, not of a sampler.
    return partial(fused_loss, target_N=micro.target_N, loss_fn=loss_fn)
