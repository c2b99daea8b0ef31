"""Translate an engine's settings into the arguments of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klear_core.config.engine import VllmEngineConfig
from klear_core.errors import ConfigError
from klear_core.generate.vllm_worker import WorkerExtension
from klear_core.hf_config import HfConfig, read_hf_config

_TOKENS_PER_STEP = 2048
"""Prompt tokens that are computed together on a CPU: vLLM's default."""
_CPU_CACHE_SHARE = 0.25
"""KV cache, of the free host memory. vLLM's own default, 0.9 of all memory, fails if other programs run."""


def engine_arguments(
    cfg: VllmEngineConfig, model_folder: Path, *, seed: int, window: int | None = None
) -> dict[str, Any]:
    """Return keyword arguments of vLLM's `AsyncEngineArgs`.

    `window` raises the positions of the folder's config; YaRN multiplies the result, or `yarn_original_window`.
    """
    model = read_hf_config(model_folder)
    num_positions = model.window(window)
    stretched = cfg.stretched(num_positions)
    if cfg.max_model_len is not None and cfg.max_model_len > stretched:
        raise ConfigError(
            f"max_model_len = {cfg.max_model_len} exceeds the {stretched} positions of {model_folder}; "
            "yarn_factor stretches them"
        )
    arguments: dict[str, Any] = {
        "model": str(model_folder),
        "dtype": cfg.dtype,
        "max_model_len": cfg.max_model_len or stretched,
        "tensor_parallel_size": cfg.runtime.tensor_parallel,
        "gpu_memory_utilization": cfg.runtime.gpu_memory_utilization,
        "max_num_seqs": cfg.runtime.max_num_seqs,
        "enforce_eager": cfg.runtime.enforce_eager,
        "enable_sleep_mode": cfg.runtime.sleep_mode,
        "seed": seed % 2**32,  # numpy's limit
        "logprobs_mode": "processed_logprobs",  # temperature included, as the learner's
        "generation_config": "vllm",  # ignore the folder's sampling defaults
        "disable_log_stats": True,
        "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__name__}",
    }
    if cfg.runtime.kv_cache_mb is not None:
        arguments["kv_cache_memory_bytes"] = cfg.runtime.kv_cache_mb << 20
    overrides: dict[str, Any] = {}
    # also without YaRN, if `window` raises them
    if stretched != model.max_position_embeddings:
        overrides["max_position_embeddings"] = stretched
    if cfg.yarn_factor is not None:
        overrides["rope_parameters"] = _yarn(cfg, model, window=cfg.yarn_original_window or num_positions)
    if overrides:
        arguments["hf_overrides"] = overrides
    return arguments


def for_cpu(arguments: Mapping[str, Any], *, free_bytes: int) -> dict[str, Any]:
    """Return the arguments with what vLLM's CPU build needs; `free_bytes` is the free memory for each rank.

    Nothing is compiled: `VllmEngine` turns off torch's compiler, without which vLLM's own does not work. No prompt is
    computed in parts: a seeded answer to one that is ends the engine process (0.32 sets the offset of its generator,
    and those on CPU have none), and there are seeds in all our requests.
    """
    longest: int = arguments["max_model_len"]
    # the cache size comes first, so that a configured one replaces it
    return {"kv_cache_memory_bytes": int(_CPU_CACHE_SHARE * free_bytes)} | {
        **arguments,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(longest, _TOKENS_PER_STEP),  # the longest prompt is computed whole
    }


def _yarn(cfg: VllmEngineConfig, model: HfConfig, *, window: int) -> dict[str, Any]:
    """Return YaRN settings (arXiv 2309.00071) over a window; vLLM's `max_position_embeddings` is the stretched one."""
    if model.rope_type != "default":
        raise ConfigError(f"yarn_factor = {cfg.yarn_factor}: the model already has rope_parameters {model.rope}")
    yarn: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": model.theta,
        "factor": cfg.yarn_factor,
        "original_max_position_embeddings": window,
    }
    if cfg.yarn_attention_factor is not None:
        yarn["attention_factor"] = cfg.yarn_attention_factor
    return yarn
