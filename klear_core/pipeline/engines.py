"""Estimate what an inference engine holds and how fast it samples, from sizes and a GPU's memory and bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from klear_core.config.engine import VllmEngineConfig
from klear_core.config.hardware import HardwareConfig
from klear_core.pipeline.model_size import ModelSize

VALUE_BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes of a weight, or of a number in the KV cache, by the engine's dtype."""
_WORKSPACE_GB = 3.0
"""Memory per GPU for activations of the largest batch, CUDA graphs and NCCL. Ours; not measured on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFit:
    """A vLLM engine on GPUs of a given memory."""

    weights_gb: float
    """Gigabytes of weights per GPU."""
    cache_tokens: int
    """Tokens that fit into the KV cache of all its GPUs; 0 if not even the weights fit."""
    longest: int
    """Tokens of the longest prompt with its answer."""
    tokens_per_s: float
    """Estimated speed when it is full, over all its GPUs; 0 if nothing fits."""

    @property
    def sequences(self) -> int:
        """Return the number of answers of full length that fit at once."""
        return self.cache_tokens // self.longest


def engine_fit(size: ModelSize, engine: VllmEngineConfig, hardware: HardwareConfig, *, longest: int) -> EngineFit:
    """Return what fits, and the speed of decoding as the time to read weights and cache once per token.

    The answers are on average half as long as the longest. `hardware.gpu_memory_gb` must be known.
    """
    assert hardware.gpu_memory_gb is not None
    ranks, value_bytes = engine.runtime.tensor_parallel, VALUE_BYTES[engine.dtype]
    weights = size.num_params * value_bytes
    token_bytes = _token_bytes(size, engine)
    usable = engine.runtime.gpu_memory_utilization * hardware.gpu_memory_gb * 1e9 * ranks
    free = usable - weights - _WORKSPACE_GB * 1e9 * ranks
    if engine.runtime.kv_cache_mb is not None:
        free = min(free, (engine.runtime.kv_cache_mb << 20) * ranks)
    cache_tokens = max(0, int(free / token_bytes))
    # Twice as many answers as of full length, for on average they are half as long.
    batch = min(engine.runtime.max_num_seqs, 2 * cache_tokens // longest)
    speed = 0.0
    if batch:
        speed = batch / step_seconds(size, engine, hardware, batch=batch, cached_tokens=batch * longest / 2)
    return EngineFit(weights_gb=weights / ranks / 1e9, cache_tokens=cache_tokens, longest=longest, tokens_per_s=speed)


def step_seconds(
    size: ModelSize, engine: VllmEngineConfig, hardware: HardwareConfig, *, batch: int, cached_tokens: float
) -> float:
    """Return the seconds of one decoding step: a token for each of `batch` answers, with so many tokens cached."""
    ranks = engine.runtime.tensor_parallel
    bandwidth = hardware.memory_tb_per_s * 1e12 * hardware.decoding_efficiency * ranks
    weights = size.num_params * VALUE_BYTES[engine.dtype]
    reading_s = (weights + cached_tokens * _token_bytes(size, engine)) / bandwidth
    # A large batch is bound by arithmetic: two operations per weight and token.
    computing_s = 2 * size.num_params * batch / (hardware.peak_tflops * 1e12 * hardware.mfu * ranks)
    return max(reading_s, computing_s)


def _token_bytes(size: ModelSize, engine: VllmEngineConfig) -> int:
    # Key heads are split over the ranks, or copied where there are more ranks than heads.
    copies = max(1, engine.runtime.tensor_parallel // size.num_kv_heads)
    # 2: a key and a value for each layer and key head.
    return 2 * size.num_layers * size.kv_size * copies * VALUE_BYTES[engine.dtype]
