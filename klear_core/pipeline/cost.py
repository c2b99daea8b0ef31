"""Estimate the GPU-hours of a stage: arithmetic of training at an assumed MFU, and decoding at an assumed bandwidth."""

from __future__ import annotations

from typing import assert_never

from klear_core.config.engine import VllmEngineConfig
from klear_core.config.hardware import HardwareConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.sft import SftConfig
from klear_core.config.stage import EngineUse, Stage
from klear_core.pipeline.engines import engine_fit
from klear_core.pipeline.model_size import ModelSize

_TRAINING_FLOPS = 6
"""Operations per weight and token: multiply and add, once forward and twice backward. Recomputation is not counted, as
is usual for MFU."""
_OLD_LOGP_FLOPS = 2
"""The same of the forward pass that computes old log-probs in RL."""
_ASSUMED_GPU_GB = 80.0
"""Memory of a GPU, for the size of the KV cache, where `hardware.gpu_memory_gb` is not set."""


def gpu_hours(config: PipelineConfig, stage: Stage, size: ModelSize | None, *, max_tokens: int | None) -> float | None:
    """Return the GPU-hours in which a stage trains on or samples `max_tokens`; None if they are not known.

    Stages whose engine is not vLLM, and training that may run on a CPU, have none.
    """
    if size is None or max_tokens is None:
        return None
    hardware, training, use = config.hardware, stage.job.training(), stage.engine()
    sampling = 0.0
    if use is not None:
        hours = sampling_hours(hardware, size, use, max_tokens)
        if hours is None:
            return None
        sampling = hours
    match training:
        case None:
            return sampling if use is not None else None
        case SftConfig():
            if training.dtype != "bfloat16":
                return None
            flops = _flops(size, max_tokens, training.max_tokens, operations=_TRAINING_FLOPS)
            return flops / _speed(hardware) / 3600
        case RlConfig():
            learning = _rl_flops(training, size) / _speed(hardware) / 3600
            return _rl_gpu_hours(training, use, learning=learning, sampling=sampling)
        case _:
            assert_never(training)


def _rl_gpu_hours(rl: RlConfig, use: EngineUse | None, *, learning: float, sampling: float) -> float:
    """Return the hours of all GPUs of the stage: those of the learner wait while engines sample, and vice versa."""
    assert use is not None
    assert isinstance(use.engine, VllmEngineConfig)
    learners = rl.runtime.num_workers
    engines = rl.runtime.num_rollout_actors * use.engine.runtime.tensor_parallel
    if rl.runtime.learner_gpus is not None and rl.runtime.learner_gpus < 1:
        return learning + sampling  # they share the GPUs, and take turns
    # The two sides run one after the other in this bound, and all GPUs are held for both.
    return (learning / learners + sampling / engines) * (learners + engines)


def _rl_flops(rl: RlConfig, size: ModelSize) -> float:
    """Return the operations of all updates, if every row is of full length; surplus rollouts are not trained on."""
    rollout = rl.rollout
    longest = rollout.max_prompt_tokens + rollout.sampling.max_new_tokens
    num_tokens = rl.num_steps * rollout.groups_per_step * rollout.samples_per_group * longest
    return training_flops(rl, size, num_tokens, longest)


def training_flops(rl: RlConfig, size: ModelSize, num_tokens: int, row_tokens: int) -> float:
    """Return the operations of updates, and of old log-probs, over so many tokens in rows of `row_tokens`."""
    operations = _TRAINING_FLOPS + (_OLD_LOGP_FLOPS if rl.old_logps == "learner" else 0)
    return _flops(size, num_tokens, row_tokens, operations=operations)


def sampling_hours(hardware: HardwareConfig, size: ModelSize, use: EngineUse, max_tokens: int) -> float | None:
    """Return the GPU-hours in which an engine samples so many tokens; None if it is not vLLM."""
    if not isinstance(use.engine, VllmEngineConfig):
        return None
    known = hardware
    if hardware.gpu_memory_gb is None:
        known = hardware.model_copy(update={"gpu_memory_gb": _ASSUMED_GPU_GB})
    fit = engine_fit(size, use.engine, known, longest=longest_sequence(use))
    if not fit.tokens_per_s:
        return None
    return max_tokens / fit.tokens_per_s * use.engine.runtime.tensor_parallel / 3600


def longest_sequence(use: EngineUse) -> int:
    """Return the tokens of the longest prompt with its answer that an engine may hold."""
    limit = use.engine.max_model_len if isinstance(use.engine, VllmEngineConfig) else None
    return limit or use.sampling.max_new_tokens


def _flops(size: ModelSize, num_tokens: int, row_tokens: int, *, operations: int) -> float:
    """Return the operations of matrix products and attention over rows of `row_tokens`, as `train.flops` counts."""
    weights = size.num_layers * size.layer_params + size.vocab_size * size.hidden_size
    # Attention is causal, so a token attends to half of its row; it has two products, scores and weighted values.
    attention = 2 * size.num_layers * size.query_size * row_tokens / 2
    # The embedding is a look-up, so of embedding and head only the head counts, also where they are not tied.
    return operations * num_tokens * (weights + attention)


def _speed(hardware: HardwareConfig) -> float:
    return hardware.peak_tflops * 1e12 * hardware.mfu
