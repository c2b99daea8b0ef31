"""Check before a run that this machine and its GPUs can hold what is pending, and name the setting that would fit.

Imported without torch; torch is asked for a GPU only where the answer matters.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from klear_core.cluster.nodes import joins_a_cluster, known_nodes, plan_engines
from klear_core.cluster.placement import Node, cpu_refusal, gpu_memory_here, is_too_large_for_cpu
from klear_core.config.curate import TagConfig
from klear_core.config.distill import LocalTeacherConfig
from klear_core.config.evaluate import (
    EvaluateConfig,
    HardwareConfig,
    ServedModelConfig,
    TorchEngineConfig,
    VllmEngineConfig,
)
from klear_core.config.opd import OpdRolloutsConfig, OpdTeacherConfig
from klear_core.config.opd_jobs import OpdRolloutsJob, OpdScoresJob
from klear_core.config.rl import RlConfig
from klear_core.config.stage import DistillJob, EngineUse, EvaluateJob, LearnerUse, RlJob, Stage, TagJob
from klear_core.config.train import NO_TORCHAO, ModelConfig, SftConfig, TrainRuntime
from klear_core.errors import ResourceError
from klear_core.generate.model_size import ModelSize, engine_fit, planned_size
from klear_core.pipeline.costs.estimate import estimate, longest_sequence, num_inline_evals, trained_size
from klear_core.pipeline.costs.memory import LearnerPeak, learner_load, learner_peak, resident_bytes, with_margin_gb
from klear_core.pipeline.plan import PendingWork
from klear_core.pipeline.preflight.model_checks import window_of

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
    """Yield a problem for each training that this machine has no library for, and for each engine whose `auto` device
    would be its CPU, for a model too large for it. Learners, and engines of RL, are checked where they are placed.
    """
    if not joins_a_cluster():
        yield from _devices_missing(work, has_gpu=_torch_sees_gpu)
    for _, learner in work.trainings():
        if learner.training.optim.kind == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
            yield f"{learner.key}.optim.kind = 'adamw_8bit': {NO_TORCHAO}"


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


def pool_problems_on(nodes: Sequence[Node], work: PendingWork, *, are_remote: bool = False) -> Iterator[str]:
    """Yield a problem for each stage that samples with engines for which these nodes have no room.

    Devices of this machine are checked by `machine_problems`, which asks torch for them; `are_remote`: no node is it.
    """
    if are_remote or joins_a_cluster():
        yield from _devices_missing(work, has_gpu=lambda: any(node.num_gpus for node in nodes))
    sampling: dict[str, EvaluateConfig | TagConfig | LocalTeacherConfig | OpdRolloutsConfig | OpdTeacherConfig] = {
        **{stage.section: job.evaluate for stage, job in work.pending(EvaluateJob)},  # one section for all models
        **{stage.section: job.tag for stage, job in work.pending(TagJob)},
        **{f"{stage.section}.rollouts": job.rollouts for stage, job in work.pending(OpdRolloutsJob)},
        **{f"{stage.section}.{job.teacher}": job.runtime for stage, job in work.pending(OpdScoresJob)},
    }
    teachers = {f"{stage.section}.teacher": job.distill.teacher for stage, job in work.pending(DistillJob)}
    sampling |= {key: teacher for key, teacher in teachers.items() if isinstance(teacher, LocalTeacherConfig)}
    gpus_of_nodes = [node.num_gpus for node in nodes]
    for section, cfg in sampling.items():
        if isinstance(cfg.engine, ServedModelConfig):
            continue
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
    learner = stage.learner()
    if learner is None:
        return _text_of(work, stage), []
    training = learner.training
    size = trained_size(work.config, stage)
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
        num_models = num_inline_evals(work.config, stage) or 1
        model_gb = size.num_params * bytes_per_param / 1e9
        passing.append(DiskPart(what=f"{num_models} models of the curve of {stage.name}", gb=num_models * model_gb))
    return made, passing


def _text_of(work: PendingWork, stage: Stage) -> list[DiskPart]:
    """Return the texts that a stage without a learner keeps: traces, or judged answers."""
    rows = estimate(work.config, [stage.name])
    max_tokens = rows[0].max_tokens if rows else None
    return [DiskPart(what=f"{stage.name} answers", gb=max_tokens * _TEXT_BYTES / 1e9)] if max_tokens else []


# ---- GPU memory ----
# Check that learners and engines fit into the GPUs, and find the setting that would fit where they do not.


_MOST_WORKERS = 64
"""Most GPUs that are advised."""
_MOST_OF_A_GPU = 0.9
"""Largest gpu_memory_utilization that is advised; vLLM's default."""
_LESS = 0.8
"""Share of a plan's memory that is advised where the plan was not enough."""
_OFFLOADED: dict[str, int] = {"cpu_offload": True, "activation_checkpointing": True}


def memory_problems(work: PendingWork) -> Iterator[str]:
    """Yield a problem for each stage that does not fit into a GPU, with the settings that would fit.

    Nothing is checked if the memory of the GPUs is not known, or the model's size.
    """
    hardware = known_hardware(work.config.hardware)
    if hardware.gpu_memory_gb is None:
        return
    for stage in work.stages:
        learner, use, size = stage.learner(), stage.engine(), trained_size(work.config, stage)
        if learner is not None and size is not None and _is_on_gpu(learner.training):
            yield from _learner_problems(learner, size, hardware.gpu_memory_gb)
        model = work.config.start_model if use is None or use.model is None else use.model
        engine_size = planned_size(model)
        if isinstance(stage.job, RlJob) and _share_a_gpu(stage.job.rl):
            if size is not None:
                longest = _longest_held(stage.job.engine_in(stage.section), model)
                yield from _shared_problems(stage, stage.job.rl, size, hardware, longest=longest)
        elif use is not None and engine_size is not None:
            yield from _engine_problems(use, engine_size, hardware, longest=_longest_held(use, model))


def known_hardware(hardware: HardwareConfig) -> HardwareConfig:
    """Return the settings, with the memory of the smallest GPU here if they do not say it."""
    if hardware.gpu_memory_gb is not None:
        return hardware
    return hardware.model_copy(update={"gpu_memory_gb": gpu_memory_here()})


def _is_on_gpu(training: SftConfig | RlConfig) -> bool:
    """Return whether training is meant for a GPU: float32 is for CPUs."""
    return training.runtime.device != "cpu" and training.dtype == "bfloat16"


def _learner_problems(learner: LearnerUse, size: ModelSize, gpu_gb: float) -> Iterator[str]:
    training = learner.training
    peak = learner_peak(size, learner_load(training))
    needed = with_margin_gb(peak.num_bytes)
    if needed <= gpu_gb:
        return
    remedy = _remedy(training, size, gpu_gb)
    key = f"{learner.key}.runtime"
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
    # The present numbers first, which need be no powers of two: more GPUs are advised only where these are not enough.
    workers = [now.num_workers, *(n for n in _powers(_MOST_WORKERS) if n > now.num_workers)]
    wider = [c for c in _powers(size.num_heads) if size.num_heads % c == 0 and c > now.context_parallel]
    contexts = [now.context_parallel, *wider]
    # Fewest GPUs first, then the smallest context: sharing rows costs communication.
    for num_workers, context, checkpointing in product(workers, contexts, (now.activation_checkpointing, True)):
        if num_workers % context:
            continue
        changes = {
            "activation_checkpointing": checkpointing,
            "context_parallel": context,
            "num_workers": num_workers,
            # Less would save nothing: a longer row is a micro-batch of its own.
            "tokens_per_microbatch": min(now.tokens_per_microbatch, _longest_row(training)),
        }
        if _fits_with(changes, training, size, gpu_gb):
            return _differences(now, changes)
    return ""


def most_kept_layers(training: SftConfig | RlConfig, size: ModelSize, gpu_gb: float) -> int:
    """Return the most `keep_layers` with which a learner rank fits; 0 without activation checkpointing."""
    if not training.runtime.activation_checkpointing:
        return 0
    load = learner_load(training)
    for keep_layers in range(size.num_layers, 0, -1):
        peak = learner_peak(size, replace(load, keep_layers=keep_layers))
        if with_margin_gb(peak.num_bytes) <= gpu_gb:
            return keep_layers
    return 0


def smallest_context(training: SftConfig | RlConfig, size: ModelSize, gpu_gb: float) -> int:
    """Return the smallest `context_parallel` up to the present one that fits; it has the least communication."""
    now = training.runtime
    possible = (c for c in range(1, now.context_parallel) if now.num_workers % c == 0 and size.num_heads % c == 0)
    fitting = (c for c in possible if _fits_with({"context_parallel": c}, training, size, gpu_gb))
    return next(fitting, now.context_parallel)


def advice_on_memory(training: SftConfig | RlConfig, size: ModelSize) -> str:
    """Return what to set after a learner rank has run out of the memory that the plan said was enough."""
    peak = learner_peak(size, learner_load(training))
    planned_gb, less_gb = with_margin_gb(peak.num_bytes), _LESS * with_margin_gb(peak.num_bytes)
    remedy = _remedy(training, size, less_gb)
    ways = [f"{remedy} needs {1 - _LESS:.0%} less"] if remedy else []
    if _fits_offloaded(training, size, less_gb):
        ways.append("cpu_offload = true with activation_checkpointing = true needs less still, and is slower")
    told = "; ".join(ways) or "shorter rows need less"
    return (
        f"the plan has {planned_gb:.1f} GB for a rank with {_parts(peak)}. In the stage's runtime, {told}; "
        "`klear doctor --gpu` names other processes on the GPU. The stage continues from its checkpoint"
    )


def _fits_offloaded(training: SftConfig | RlConfig, size: ModelSize, gpu_gb: float) -> bool:
    """Return whether the same number of GPUs is enough with weights, gradients and moments in host memory."""
    # no other moments may be in host memory
    return training.optim.kind == "adamw" and _fits_with(_OFFLOADED, training, size, gpu_gb)


def _fits_with(changes: Mapping[str, object], training: SftConfig | RlConfig, size: ModelSize, gpu_gb: float) -> bool:
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


def _longest_held(use: EngineUse, model: ModelConfig) -> int:
    """Return the tokens of the longest sequence that an engine must have room for.

    vLLM does not start unless its cache holds one sequence of `max_model_len`, which is the model's window if it is
    not set, however short the answers are.
    """
    window = window_of(model)
    if not isinstance(use.engine, VllmEngineConfig) or use.engine.max_model_len is not None or window is None:
        return longest_sequence(use)
    return use.engine.stretched(window)


def _engine_problems(use: EngineUse, size: ModelSize, hardware: HardwareConfig, *, longest: int) -> Iterator[str]:
    engine = use.engine
    if not isinstance(engine, VllmEngineConfig):
        return
    fit = engine_fit(size, engine, hardware, longest=longest)
    if fit.sequences >= 1:
        return
    held = f"{fit.weights_gb:.1f} GB of weights on each of {engine.runtime.tensor_parallel} GPUs"
    lack = f"{fit.cache_tokens} tokens of cache beside {held}: not one answer of {fit.longest} fits"
    remedy = _engine_remedy(engine, size, hardware, longest=fit.longest)
    advice = f"set {remedy}" if remedy else "no number of GPUs that divides its heads is enough"
    yield f"{use.key}.engine.runtime: {lack}; {advice}{_shorter(use, longest)}"


def _shorter(use: EngineUse, longest: int) -> str:
    """Return the advice to limit an engine's sequences, if they may be longer than its answers; else nothing."""
    if longest <= longest_sequence(use):
        return ""
    return f", or {use.key}.engine.max_model_len, which is the model's {longest}, to that of a prompt and its answer"


def _engine_remedy(engine: VllmEngineConfig, size: ModelSize, hardware: HardwareConfig, *, longest: int) -> str:
    """Return a setting of the engine with which one answer fits, as in a TOML file; empty if there is none."""
    cache_mb = engine.runtime.kv_cache_mb
    # What costs least comes first: a larger cache, then a larger share of the GPU, then more GPUs.
    if cache_mb is not None:
        # The tokens that 1,000 MiB hold tell how much a single answer needs.
        held = engine_fit(size, _with(engine, kv_cache_mb=1000), hardware, longest=longest).cache_tokens
        cache_mb = math.ceil(1000 * longest / max(held, 1))
        if _holds_an_answer(_with(engine, kv_cache_mb=cache_mb), size, hardware, longest):
            return f"kv_cache_mb = {cache_mb}"
    now = engine.runtime.gpu_memory_utilization
    for share in (percent / 100 for percent in range(1, 1 + round(100 * _MOST_OF_A_GPU))):
        if share > now and _holds_an_answer(_with(engine, gpu_memory_utilization=share), size, hardware, longest):
            return f"gpu_memory_utilization = {share:g}"
    for ranks in _powers(size.num_heads):
        wider = _with(engine, tensor_parallel=ranks)
        if size.num_heads % ranks == 0 and _holds_an_answer(wider, size, hardware, longest):
            return f"tensor_parallel = {ranks}"
    return ""


def _with(engine: VllmEngineConfig, **changes: float) -> VllmEngineConfig:
    return engine.model_copy(update={"runtime": engine.runtime.model_copy(update=changes)})


def _holds_an_answer(engine: VllmEngineConfig, size: ModelSize, hardware: HardwareConfig, longest: int) -> bool:
    return engine_fit(size, engine, hardware, longest=longest).sequences >= 1


def _share_a_gpu(rl: RlConfig) -> bool:
    """Return whether learner and vLLM engine take turns on one GPU."""
    shares = rl.runtime.learner_gpus is not None and 0 < rl.runtime.learner_gpus < 1
    return shares and isinstance(rl.rollout.engine, VllmEngineConfig) and _is_on_gpu(rl)


def _shared_problems(
    stage: Stage, rl: RlConfig, size: ModelSize, hardware: HardwareConfig, *, longest: int
) -> Iterator[str]:
    """Check that learner and engine fit on one GPU together: the learner's weights and optimizer stay there."""
    engine, gpu_gb = rl.rollout.engine, hardware.gpu_memory_gb
    assert isinstance(engine, VllmEngineConfig), engine
    assert gpu_gb is not None
    key = f"{stage.section}.rollout.engine.runtime"
    if not engine.runtime.sleep_mode:
        yield f"{key}.sleep_mode = false: learner and engine share a GPU, so the engine must release it: set it to true"
    share, most = engine.runtime.gpu_memory_utilization, _share_left(rl, size, gpu_gb)
    if share <= most and _holds_an_answer(engine, size, hardware, longest):
        return
    advised = min(most, _MOST_OF_A_GPU)
    if advised and _holds_an_answer(_with(engine, gpu_memory_utilization=advised), size, hardware, longest):
        advice = f"set {advised:g} at most"
    else:
        ways = _room_for_both(rl, size, hardware, section=stage.section, longest=longest)
        own = "set learner_gpus and rollout_gpus to whole numbers, so that each has GPUs of its own"
        advice = f"no share holds the engine: {'set ' + ', or '.join(ways) if ways else own}"
    resident_gb = _resident_gb(rl, size)
    kept = f"while the engine samples, the learner keeps {resident_gb:.1f} of {gpu_gb:.0f} GB"
    use = stage.job.engine_in(stage.section)
    assert use is not None, stage.name
    yield f"{key}.gpu_memory_utilization = {share:g}: {kept}: {advice}{_shorter(use, longest)}"


def _resident_gb(rl: RlConfig, size: ModelSize) -> float:
    """Return what the learner keeps on the GPU while the engine samples: weights and moments, but no gradients."""
    return with_margin_gb(resident_bytes(size, learner_load(rl)))


def _share_left(rl: RlConfig, size: ModelSize, gpu_gb: float) -> float:
    """Return the share of a GPU that the learner leaves, in hundredths rounded down."""
    left_gb = max(0.0, gpu_gb - _resident_gb(rl, size))
    return int(100 * left_gb / gpu_gb) / 100


def _room_for_both(rl: RlConfig, size: ModelSize, hardware: HardwareConfig, *, section: str, longest: int) -> list[str]:
    """Return settings of the learner that leave room for the engine: the fewest ranks, and offloading."""
    now, engine = rl.runtime, rl.rollout.engine
    assert isinstance(engine, VllmEngineConfig), engine
    # More ranks hold smaller shards of the weights and moments; offloading keeps none of them on the GPU.
    share = engine.runtime.gpu_memory_utilization
    more_ranks = [{"num_workers": n} for n in _powers(_MOST_WORKERS) if n > now.num_workers]
    found = []
    for kind in (more_ranks, [_OFFLOADED] if rl.optim.kind == "adamw" else []):
        for changes in kind:
            changed = rl.model_copy(update={"runtime": now.model_copy(update=changes)})
            new_share = _share_beside(changed, size, hardware, longest=longest)
            if new_share is not None:
                beside = "" if new_share == share else f" with gpu_memory_utilization = {new_share:g}"
                found.append(f"{_differences(now, changes)} in {section}.runtime{beside}")
                break
    return found


def _share_beside(rl: RlConfig, size: ModelSize, hardware: HardwareConfig, *, longest: int) -> float | None:
    """Return the share of a GPU that the engine can have beside this learner, its own if possible; None if no share."""
    engine, gpu_gb = rl.rollout.engine, hardware.gpu_memory_gb
    assert isinstance(engine, VllmEngineConfig), engine
    assert gpu_gb is not None
    if with_margin_gb(learner_peak(size, learner_load(rl)).num_bytes) > gpu_gb:
        return None
    most = min(_MOST_OF_A_GPU, _share_left(rl, size, gpu_gb))
    own = engine.runtime.gpu_memory_utilization
    for share in (own, most):
        if 0 < share <= most and _holds_an_answer(_with(engine, gpu_memory_utilization=share), size, hardware, longest):
            return share
    return None
