"""Check that learners and engines fit into the GPUs, and find the setting that would fit where they do not."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import product

from klear_core.config.engine import VllmEngineConfig
from klear_core.config.hardware import HardwareConfig
from klear_core.config.jobs import RlJob
from klear_core.config.rl import RlConfig
from klear_core.config.sft import SftConfig
from klear_core.config.stage import EngineUse, Stage
from klear_core.config.train import TrainRuntime
from klear_core.pipeline.ahead import PendingWork
from klear_core.pipeline.cost import longest_sequence
from klear_core.pipeline.engines import engine_fit
from klear_core.pipeline.known_models import planned_size
from klear_core.pipeline.memory import LearnerPeak, learner_load, learner_peak, resident_bytes
from klear_core.pipeline.model_size import ModelSize

MARGIN_SHARE, MARGIN_GB = 0.06, 1.5
"""Margin on top of what torch allocates: 6 % of the peak for fragmentation of its allocator, and 1.5 GB for the CUDA
context and the buffers of cuBLAS and NCCL. Ours; not measured on a GPU."""
_MOST_WORKERS = 64


def memory_problems(work: PendingWork) -> Iterator[str]:
    """Yield a problem for each stage that does not fit into a GPU, with the settings that would fit.

    Nothing is checked if the memory of the GPUs is not known, or the model's size.
    """
    hardware = known_hardware(work.config.hardware)
    size = planned_size(work.config.start_model)
    if hardware.gpu_memory_gb is None:
        return
    for stage in work.stages:
        training, use = stage.job.training(), stage.engine()
        if training is not None and size is not None and _is_on_gpu(training):
            yield from _learner_problems(stage, training, size, hardware.gpu_memory_gb)
        engine_size = size if use is None or use.model is None else planned_size(use.model)
        if use is not None and engine_size is not None:
            yield from _engine_problems(use, engine_size, hardware)
        if isinstance(stage.job, RlJob) and size is not None:
            yield from _shared_problems(stage, stage.job.rl, size, hardware.gpu_memory_gb)


def with_margin_gb(num_bytes: float) -> float:
    """Return gigabytes with the margin for what torch does not count."""
    return num_bytes / 1e9 * (1 + MARGIN_SHARE) + MARGIN_GB


def known_hardware(hardware: HardwareConfig) -> HardwareConfig:
    """Return the settings, with the memory of the first GPU here if they do not say it."""
    if hardware.gpu_memory_gb is not None:
        return hardware
    return hardware.model_copy(update={"gpu_memory_gb": gpu_memory_here()})


@cache
def gpu_memory_here() -> float | None:
    """Return the memory of the smallest GPU here in gigabytes, as its driver tells; None without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return min(float(line) for line in listed.stdout.splitlines()) * (1 << 20) / 1e9
    except (OSError, ValueError, subprocess.SubprocessError):
        return None  # no GPU, or none that tells


def _is_on_gpu(training: SftConfig | RlConfig) -> bool:
    """Return whether training is meant for a GPU: float32 is for CPUs."""
    return training.runtime.device != "cpu" and training.dtype == "bfloat16"


def _learner_problems(stage: Stage, training: SftConfig | RlConfig, size: ModelSize, gpu_gb: float) -> Iterator[str]:
    peak = learner_peak(size, learner_load(training))
    needed = with_margin_gb(peak.num_bytes)
    if needed <= gpu_gb:
        return
    remedy = _remedy(training, size, gpu_gb)
    key = f"{stage.section}.runtime"
    advice = f"set {remedy} in {key}" if remedy else "no number of GPUs up to 64 is enough with rows this long"
    if remedy and _fits_offloaded(training, size, gpu_gb):
        advice += ", or cpu_offload = true with activation_checkpointing = true, which is slower"
    yield f"{key}: a learner rank needs {needed:.1f} GB ({_parts(peak)}), a GPU has {gpu_gb:.0f}: {advice}"


def _parts(peak: LearnerPeak) -> str:
    named = [f"{kind} {num_bytes / 1e9:.1f}" for kind, num_bytes in peak.by_kind.items()]
    margin_gb = with_margin_gb(peak.num_bytes) - peak.num_bytes / 1e9
    return f"at its peak, {peak.moment}: {', '.join(named)}; margin {margin_gb:.1f}"


def _remedy(training: SftConfig | RlConfig, size: ModelSize, gpu_gb: float) -> str:
    """Return the settings that fit with the fewest GPUs, as in a TOML file; empty if none does."""
    now = training.runtime
    workers = [n for n in _powers(_MOST_WORKERS) if n >= now.num_workers] or [now.num_workers]
    contexts = [c for c in _powers(size.num_heads) if size.num_heads % c == 0 and c >= now.context_parallel]
    # Fewest GPUs first, then the smallest context: sharing rows costs communication.
    for num_workers, context, checkpointing in product(workers, contexts, (now.activation_checkpointing, True)):
        if num_workers % context:
            continue
        changes = {
            "activation_checkpointing": checkpointing,
            "context_parallel": context,
            "num_workers": num_workers,
            "tokens_per_microbatch": min(now.tokens_per_microbatch, _longest_row(training)),
        }
        runtime = now.model_copy(update=changes)
        changed = training.model_copy(update={"runtime": runtime})
        if with_margin_gb(learner_peak(size, learner_load(changed)).num_bytes) <= gpu_gb:
            return _differences(now, changes)
    return ""


def _fits_offloaded(training: SftConfig | RlConfig, size: ModelSize, gpu_gb: float) -> bool:
    """Return whether the same number of GPUs is enough with weights, gradients and moments in host memory."""
    if training.optim.kind != "adamw":
        return False  # no other moments may be there
    changes = {"cpu_offload": True, "activation_checkpointing": True}
    changed = training.model_copy(update={"runtime": training.runtime.model_copy(update=changes)})
    return with_margin_gb(learner_peak(size, learner_load(changed)).num_bytes) <= gpu_gb


def _longest_row(training: SftConfig | RlConfig) -> int:
    if isinstance(training, RlConfig):
        return training.rollout.max_prompt_tokens + training.rollout.sampling.max_new_tokens
    return training.max_tokens


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length())]


def _differences(now: TrainRuntime, changes: dict[str, int]) -> str:
    parts = [f"{name} = {str(value).lower()}" for name, value in changes.items() if getattr(now, name) != value]
    return ", ".join(parts)


def _engine_problems(use: EngineUse, size: ModelSize, hardware: HardwareConfig) -> Iterator[str]:
    engine = use.engine
    if not isinstance(engine, VllmEngineConfig):
        return
    fit = engine_fit(size, engine, hardware, longest=longest_sequence(use))
    if fit.sequences >= 1:
        return
    held = f"{fit.weights_gb:.1f} GB of weights on each of {engine.runtime.tensor_parallel} GPUs"
    lack = f"{fit.cache_tokens} tokens of cache beside {held}: not one answer of {fit.longest} fits"
    remedy = "a larger gpu_memory_utilization"
    for ranks in _powers(size.num_heads):
        wider = engine.model_copy(update={"runtime": engine.runtime.model_copy(update={"tensor_parallel": ranks})})
        if size.num_heads % ranks == 0 and engine_fit(size, wider, hardware, longest=fit.longest).sequences >= 1:
            remedy = f"tensor_parallel = {ranks}"
            break
    yield f"{use.key}.engine.runtime: {lack}; set {remedy}"


def _shared_problems(stage: Stage, rl: RlConfig, size: ModelSize, gpu_gb: float) -> Iterator[str]:
    """Check learner and engine on one GPU: they take turns, and the learner's weights and optimizer stay there."""
    engine = rl.rollout.engine
    shares = rl.runtime.learner_gpus is not None and 0 < rl.runtime.learner_gpus < 1
    if not shares or not isinstance(engine, VllmEngineConfig) or not _is_on_gpu(rl):
        return
    key = f"{stage.section}.rollout.engine.runtime"
    if not engine.runtime.sleep_mode:
        yield f"{key}.sleep_mode = false: learner and engine share a GPU, so the engine must release it: set it to true"
    # While the engine samples there are no gradients: weights and both moments of Adam, 12 bytes per weight.
    resident_gb = with_margin_gb(resident_bytes(size, learner_load(rl)))
    used_gb = engine.runtime.gpu_memory_utilization * gpu_gb
    if resident_gb + used_gb > gpu_gb:
        most = max(0.0, (gpu_gb - resident_gb) / gpu_gb)
        yield (
            f"{key}.gpu_memory_utilization = {engine.runtime.gpu_memory_utilization:g}: while the engine samples, the "
            f"learner keeps {resident_gb:.1f} of {gpu_gb:.0f} GB: set {int(100 * most) / 100:g} at most"
        )
