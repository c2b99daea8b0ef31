"""Check that this machine can run what is pending: a processor for the model, and disk for the output.

Imported without torch; torch is asked for a GPU only where the answer matters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from klear_core.cluster.placement import check_cpu_is_meant, cpu_refusal, gpus_here, is_too_large_for_cpu, plan_gpus
from klear_core.config.engine import TorchEngineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.train import TrainRuntime
from klear_core.errors import ResourceError
from klear_core.pipeline.ahead import PendingWork
from klear_core.pipeline.estimate import ModelSize, estimate, model_size
from klear_core.pipeline.graph import stages_of

MIN_FREE_GB = 1.0
"""Gigabytes on the workspace's disk for what is not counted: metrics, reports, MLflow's and Prefect's databases."""
_CHECKPOINT_BYTES = 12
"""Checkpoint bytes per parameter: weights and both moments of Adam, in float32."""
_TEXT_BYTES = 1.0
"""Bytes per token that may be written: four characters, compressed to a half, of answers that fill half of their
budget."""
_SHOWN_GB = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPart:
    """One part of what a stage writes to disk."""

    what: str
    gb: float


def device_problems(work: PendingWork) -> Iterator[str]:
    """Yield a problem for each `auto` device that would be a CPU, for a model too large to train or sample on one.

    The devices of a Ray cluster at RAY_ADDRESS are known only after joining it: then RL checks them itself, before it
    loads a model.
    """
    size = model_size(work.config.model)
    if size is None or not is_too_large_for_cpu(size.num_params):
        return
    in_this_process = {"sft": work.config.sft.runtime} if "sft" in work.stages else {}
    engine = work.config.evaluate.engine
    devices = {f"{name}.runtime": runtime.device for name, runtime in in_this_process.items()}
    if work.evaluates and isinstance(engine, TorchEngineConfig):
        devices["evaluate.engine.runtime"] = engine.runtime.device
    for key, device in devices.items():
        if device == "auto" and not _has_gpu():
            yield cpu_refusal(key, size.num_params)
    for name, rl in work.rl_stages() if not os.environ.get("RAY_ADDRESS") else ():
        yield from _rl_problems(name, rl, size)


def _rl_problems(name: str, rl: RlConfig, size: ModelSize) -> Iterator[str]:
    try:
        check_cpu_is_meant(rl, plan_gpus(rl, gpus_here()), size.num_params, stage=name)
    except ResourceError as e:
        yield str(e)


def _has_gpu() -> bool:
    from klear_core.train.model import pick_device

    return pick_device("auto").type != "cpu"


def disk_problem(work: PendingWork, *, free_gb: float) -> str | None:
    """Return what the workspace's disk lacks for these stages, with the parts of the need; None if it has enough.

    The output of earlier attempts at these stages counts as free: it is continued or overwritten.
    """
    if not work.stages:
        return None
    parts = disk_parts(work)
    needed_gb, there_gb = sum(part.gb for part in parts), free_gb + work.begun_gb
    if there_gb >= needed_gb:
        return None
    counted = "; ".join(f"{part.what} {part.gb:.1f}" for part in parts if part.gb >= _SHOWN_GB)
    begun = f" and {work.begun_gb:.1f} GB of these stages' own" if work.begun_gb >= _SHOWN_GB else ""
    return (
        f"workspace.root = {work.config.workspace.root!r}: {free_gb:.2f} GB free there{begun}, {needed_gb:.1f} GB needed: {counted}. "
        f"Choose another disk, or lower runtime.checkpoint.keep"
    )


def disk_parts(work: PendingWork) -> list[DiskPart]:
    """Return what is on the disk when it is fullest: a stage's checkpoints go when it ends, its result stays."""
    kept = [DiskPart(what="everything else", gb=MIN_FREE_GB)]
    fullest = kept
    for stage in (s.name for s in stages_of(work.config) if s.name in work.stages):
        made, passing = _written_by(work, stage)
        kept = kept + made
        fullest = max(fullest, kept + passing, key=lambda parts: sum(part.gb for part in parts))
    return fullest


def _written_by(work: PendingWork, stage: str) -> tuple[list[DiskPart], list[DiskPart]]:
    """Return what a stage leaves on the disk, and what is there only while it runs."""
    config, size = work.config, model_size(work.config.model)
    trainings = {"sft": config.sft, "rl": config.rl, "rl_code": config.rl_code}
    training = trainings.get(stage)
    if training is None:
        return _text_of(work, stage), []
    if size is None:
        return [], []
    runtime: TrainRuntime = training.runtime
    checkpoint_gb = size.num_params * _CHECKPOINT_BYTES / 1e9
    made = [DiskPart(what=f"{stage} model", gb=size.num_params * (2 if training.dtype == "bfloat16" else 4) / 1e9)]
    if isinstance(training, RlConfig) and training.keep_optimizer:
        made.append(DiskPart(what=f"{stage} optimizer", gb=checkpoint_gb))
    count = runtime.checkpoint.keep + 1  # the next is complete before the oldest is deleted
    passing = [DiskPart(what=f"{count} checkpoints of {stage} at {checkpoint_gb:.1f}", gb=count * checkpoint_gb)]
    return made, passing


def _text_of(work: PendingWork, stage: str) -> list[DiskPart]:
    kind = "evaluate" if stage.startswith("evaluate_") else stage
    if kind not in ("distill", "evaluate"):
        return []
    max_tokens = next((row.max_tokens for row in estimate(work.config, [stage]) if row.stage == kind), None)
    return [DiskPart(what=f"{stage} answers", gb=max_tokens * _TEXT_BYTES / 1e9)] if max_tokens else []
