"""Build the engine that a config asks for. Each engine's library is imported only when it is needed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from klear_core.config.engine import (
    MAX_BATCH_SIZE,
    EngineConfig,
    HttpEngineConfig,
    LocalEngineConfig,
    TorchEngineConfig,
    VllmEngineConfig,
)
from klear_core.generate.engine import InferenceEngine, TrainableEngine

if TYPE_CHECKING:
    from klear_core.artifacts.home import Home

_QUEUE_MARGIN = 1.25
"""Requests sent to an engine per request that it can decode at a time, so that its batch never waits for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Inputs of `build_engine`, for a process that builds the engine elsewhere."""

    cfg: LocalEngineConfig
    model_folder: Path
    num_threads: int
    seed: int
    window: int | None = None
    artifact: Path | None = None
    """The model's artifact, from which a node with another disk gets the folder; None if the folder is in none."""
    home: Home | None = None
    is_sent: bool = False
    """Whether the folder belongs to no artifact but has a copy in the store, which `fetch_folder` finds."""

    def here(self) -> EngineSpec:
        """Return the inputs with this node's own folder of the model."""
        if self.home is None:
            return self
        if self.is_sent:
            from klear_core.train.checkpoint_copies import fetch_folder

            folder = self.home.here(self.model_folder.parent) / self.model_folder.name
            fetch_folder(folder)
            return replace(self, model_folder=folder)
        if self.artifact is None:
            return self
        from klear_core.train.base import model_folder

        return replace(self, model_folder=model_folder(self.home.here(self.artifact)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """An engine, or a pool of them as one."""

    engine: InferenceEngine
    limit: int
    """Requests to send it at a time."""
    num_engines: int = 1


StartSampler = Callable[[EngineSpec], Awaitable[Sampler]]
"""Starts what a stage samples with: an engine in this process, or a pool of several in others."""


def num_slots(cfg: LocalEngineConfig, *, is_on_gpu: bool) -> int:
    """Return the number of requests to send an engine at a time: a full batch, and some that wait for room in it."""
    match cfg:
        case TorchEngineConfig():
            batch_size = cfg.runtime.max_batch_size or MAX_BATCH_SIZE["cuda" if is_on_gpu else "cpu"]
        case VllmEngineConfig():
            batch_size = cfg.runtime.max_num_seqs
        case _:
            assert_never(cfg)
    return math.ceil(batch_size * _QUEUE_MARGIN)


async def start_here(spec: EngineSpec) -> Sampler:
    """Build one engine in this process; see `build_engine`."""
    engine = await build_spec(spec)
    return Sampler(engine=engine, limit=limit_here(spec))


def limit_here(spec: EngineSpec) -> int:
    """Return the number of requests to send at a time to this engine in this process; see `num_slots`."""
    return num_slots(spec.cfg, is_on_gpu=_has_gpu(spec.cfg))


async def build_spec(spec: EngineSpec) -> InferenceEngine:
    """Build the engine in this process; see `build_engine`."""
    return await build_engine(
        spec.cfg, spec.model_folder, num_threads=spec.num_threads, seed=spec.seed, window=spec.window
    )


async def build_engine(
    cfg: EngineConfig, model_folder: Path, *, num_threads: int, seed: int, window: int | None = None
) -> InferenceEngine:
    """Build the engine for the model of this Hugging Face folder. An HTTP endpoint ignores the folder.

    Raise ConfigError if the engine cannot run this model, ResourceError if it is not installed. `seed` is the engine's
    own; samples depend on `SamplingParams.seed`. `window` raises the positions that the folder's config states.
    """
    match cfg:
        case TorchEngineConfig() | VllmEngineConfig():
            return await build_trainable_engine(cfg, model_folder, num_threads=num_threads, seed=seed, window=window)
        case HttpEngineConfig():
            from klear_core.generate.http_engine import HttpEngine

            return HttpEngine(cfg)
        case _:
            assert_never(cfg)


async def build_trainable_engine(
    cfg: LocalEngineConfig,
    model_folder: Path,
    *,
    num_threads: int,
    seed: int,
    version: int = 0,
    window: int | None = None,
) -> TrainableEngine:
    """Build an engine whose weights can be replaced; see `build_engine`. `version` numbers the folder's weights."""
    match cfg:
        case TorchEngineConfig():
            from klear_core.generate.qwen3.engine import TorchEngine

            # loading takes seconds: keep the event loop free meanwhile
            return await asyncio.to_thread(
                TorchEngine, model_folder, cfg, num_threads=num_threads, version=version, window=window
            )
        case VllmEngineConfig():
            from klear_core.generate.vllm_engine import VllmEngine

            return await VllmEngine.start(
                cfg, model_folder, num_threads=num_threads, seed=seed, version=version, window=window
            )
        case _:
            assert_never(cfg)


def _has_gpu(cfg: LocalEngineConfig) -> bool:
    """Return whether an engine in this process samples on a GPU."""
    if isinstance(cfg, TorchEngineConfig):
        from klear_core.generate.qwen3.engine import device_name

        return device_name(cfg) == "cuda"
    return True  # also of vLLM on a CPU: the number of its slots does not depend on it
