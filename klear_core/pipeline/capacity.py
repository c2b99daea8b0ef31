"""Check that this machine can run what is pending: a processor for the model, and disk for the output.

Imported without torch; torch is asked for a GPU only where the answer matters.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from klear_core.cluster.engine_plan import plan_engines
from klear_core.cluster.nodes import joins_a_cluster, known_nodes
from klear_core.cluster.placement import cpu_refusal, is_too_large_for_cpu
from klear_core.cluster.places import Node
from klear_core.config.distill import LocalTeacherConfig
from klear_core.config.engine import TorchEngineConfig
from klear_core.config.evaluate import EvaluateConfig
from klear_core.config.jobs import DistillJob, EvaluateJob, RlJob, TagJob
from klear_core.config.rl import RlConfig
from klear_core.config.stage import Stage
from klear_core.config.tag import TagConfig
from klear_core.config.train import NO_TORCHAO
from klear_core.errors import ResourceError
from klear_core.pipeline.ahead import PendingWork
from klear_core.pipeline.estimate import estimate, num_curve_models
from klear_core.pipeline.known_models import planned_size

MIN_FREE_GB = 1.0
"""Gigabytes of the workspace's disk kept for metrics, reports, and MLflow's and Prefect's databases."""
_CHECKPOINT_BYTES = 12
"""Checkpoint bytes per parameter: weights and both moments of Adam, in float32."""
_TEXT_BYTES = 1.0
"""Bytes per token that may be written: four characters, compressed to a half, of answers that fill half of their
budget."""
_SHOWN_GB = 0.05
"""Smaller parts are not named in the message: they would be shown as 0.0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPart:
    """One part of what a stage writes to disk."""

    what: str
    gb: float
    is_checkpoint: bool = False


def machine_problems(work: PendingWork) -> Iterator[str]:
    """Yield a problem for each training that this machine has no processor or no library for."""
    yield from _device_problems(work)
    for stage in work.stages:
        training = stage.job.training()
        if training is not None and training.optim.kind == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
            yield f"{stage.section}.optim.kind = 'adamw_8bit': {NO_TORCHAO}"


def _device_problems(work: PendingWork) -> Iterator[str]:
    """Yield a problem for each engine whose `auto` device would be this machine's CPU, for a model too large for it.

    Learners, and engines of RL, are checked where they are placed.
    """
    if not joins_a_cluster():
        yield from _devices_missing(work, has_gpu=_torch_sees_gpu)


def _devices_missing(work: PendingWork, *, has_gpu: Callable[[], bool]) -> Iterator[str]:
    for stage in work.stages:
        use = None if isinstance(stage.job, RlJob) else stage.engine()
        if use is None or not isinstance(use.engine, TorchEngineConfig):
            continue
        size = planned_size(use.model or work.config.start_model)
        if size is None or not is_too_large_for_cpu(size.num_params):
            continue
        if use.engine.runtime.device == "auto" and not has_gpu():
            yield cpu_refusal(f"{use.key}.engine.runtime", size.num_params)


def pool_problems(work: PendingWork) -> Iterator[str]:
    """Yield a problem for each stage that samples with engines for which this machine or the cluster has no room."""
    try:
        nodes = known_nodes()
    except ResourceError:
        return  # a cluster that cannot be joined is reported where learners are placed
    yield from pool_problems_on(nodes, work)


def pool_problems_on(nodes: Sequence[Node], work: PendingWork) -> Iterator[str]:
    """Yield a problem for each stage that samples with engines for which these nodes have no room.

    The devices of this machine are checked by `machine_problems`, which asks torch for them.
    """
    if joins_a_cluster():
        yield from _devices_missing(work, has_gpu=lambda: any(node.num_gpus for node in nodes))
    sampling: dict[str, EvaluateConfig | TagConfig | LocalTeacherConfig] = {}
    # All models are evaluated with the settings of one section.
    sampling |= {stage.section: job.evaluate for stage, job in work.pending(EvaluateJob)}
    sampling |= {stage.section: job.tag for stage, job in work.pending(TagJob)}
    for stage, distill_job in work.pending(DistillJob):
        if isinstance(distill_job.distill.teacher, LocalTeacherConfig):
            sampling[f"{stage.section}.teacher"] = distill_job.distill.teacher
    gpus_of_nodes = [node.num_gpus for node in nodes]
    for section, cfg in sampling.items():
        try:
            plan_engines(cfg.runtime.num_engines, cfg.engine, gpus_of_nodes, key=section)
        except ResourceError as e:
            yield str(e)


def _torch_sees_gpu() -> bool:
    from klear_core.train.model import pick_device

    return pick_device("auto").type != "cpu"


def disk_problem(work: PendingWork, *, free_gb: float) -> str | None:
    """Return what the workspace's disk lacks for these stages, by what needs it; None if it has enough.

    The output of earlier attempts at these stages counts as free: it is continued or overwritten.
    """
    if not work.stages:
        return None
    parts = disk_parts(work)
    needed_gb, there_gb = sum(part.gb for part in parts), free_gb + work.begun_gb
    if there_gb >= needed_gb:
        return None
    counted = "; ".join(f"{part.what} {part.gb:.1f}" for part in parts if part.gb >= _SHOWN_GB)
    has_checkpoints = any(part.is_checkpoint for part in parts)
    fewer = ", or lower runtime.checkpoint.keep" if has_checkpoints else ""
    begun = f" and {work.begun_gb:.1f} GB of these stages' own" if work.begun_gb >= _SHOWN_GB else ""
    return (
        f"workspace.root = {work.config.workspace.root!r}: {free_gb:.2f} GB free there{begun}, "
        f"{needed_gb:.1f} GB needed: {counted}. "
        f"Choose another disk{fewer}"
    )


def disk_parts(work: PendingWork) -> list[DiskPart]:
    """Return what the disk holds when fullest: checkpoints are deleted when their stage ends, its result stays."""
    kept = [DiskPart(what="everything else", gb=MIN_FREE_GB)]
    # A stage's checkpoints are on the disk together with the results of all stages before it.
    fullest = kept
    for stage in work.stages:
        made, passing = _written_by(work, stage)
        kept = kept + made
        fullest = max(fullest, kept + passing, key=lambda parts: sum(part.gb for part in parts))
    return fullest


def _written_by(work: PendingWork, stage: Stage) -> tuple[list[DiskPart], list[DiskPart]]:
    """Return what a stage leaves on the disk, and what is there only while it runs."""
    training = stage.job.training()
    if training is None:
        return _text_of(work, stage), []
    size = planned_size(work.config.start_model)
    if size is None:
        return [], []
    # With LoRA checkpoints hold only the adapters, of which those on all layers are the most.
    num_trained = size.num_params if training.lora is None else size.adapter_params(training.lora.rank)
    checkpoint_gb = num_trained * _CHECKPOINT_BYTES / 1e9
    bytes_per_param = 2 if training.dtype == "bfloat16" else 4
    made = [DiskPart(what=f"{stage.name} model", gb=size.num_params * bytes_per_param / 1e9)]
    if isinstance(training, RlConfig) and training.keep_optimizer:
        made.append(DiskPart(what=f"{stage.name} optimizer", gb=checkpoint_gb))
    if isinstance(training, RlConfig) and training.runtime.save_steps:
        num_saved = len(training.runtime.save_steps)
        made.append(DiskPart(what=f"{num_saved} saved steps of {stage.name}", gb=num_saved * checkpoint_gb))
    count = training.runtime.checkpoint.keep + 1  # the next is complete before the oldest is deleted
    what = f"{count} checkpoints of {stage.name} at {checkpoint_gb:.1f}"
    passing = [DiskPart(what=what, gb=count * checkpoint_gb, is_checkpoint=True)]
    if stage.job.scorer() is not None:
        # Each model waits on the disk for its score, at worst all of them; one, where their number is not known.
        num_models = num_curve_models(work.config, stage) or 1
        model_gb = size.num_params * bytes_per_param / 1e9
        passing.append(DiskPart(what=f"{num_models} models of the curve of {stage.name}", gb=num_models * model_gb))
    return made, passing


def _text_of(work: PendingWork, stage: Stage) -> list[DiskPart]:
    """Return the texts that a stage without a training keeps: traces, or judged answers."""
    rows = estimate(work.config, [stage.name])
    max_tokens = rows[0].max_tokens if rows else None
    return [DiskPart(what=f"{stage.name} answers", gb=max_tokens * _TEXT_BYTES / 1e9)] if max_tokens else []
