"""Estimate how the GPUs of an RL stage divide between engines and learner so that neither waits for the other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from klear_core.config.engine import VllmEngineConfig
from klear_core.config.hardware import HardwareConfig
from klear_core.config.rl import RlConfig
from klear_core.pipeline.busy import draw_lengths
from klear_core.pipeline.cost import training_flops
from klear_core.pipeline.engines import engine_fit, step_seconds
from klear_core.pipeline.fits import known_hardware, with_margin_gb
from klear_core.pipeline.memory import learner_load, learner_peak
from klear_core.pipeline.model_size import ModelSize

_LENGTH_DRAWS = 4000
"""Simulated answers from which mean lengths are taken."""
_CACHE_USED = 0.9
"""Share of the cache that requests fill on average: when long answers come together, it overflows. From
`klear bench rollout_scale`, where more are preempted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Engines and learner ranks, with the seconds that each needs for a step if it never waits."""

    num_engines: int
    num_workers: int
    sampling_s: float
    learning_s: float

    @property
    def step_s(self) -> float:
        """Return the seconds between steps: those of the slower side."""
        return max(self.sampling_s, self.learning_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitEstimate:
    """The configured split and the best one of as many GPUs."""

    now: Split
    best: Split
    requests_per_engine: int
    """Requests that keep an engine's cache full at their mean length."""


def estimate_split(rl: RlConfig, size: ModelSize, hardware: HardwareConfig) -> SplitEstimate | None:
    """Return the split that balances engines and learner, at assumed lengths and pass rates; None if it is not known.

    Unknown are engines other than vLLM, learners in float32, GPUs shared by both, and models that do not fit.
    """
    known = known_hardware(hardware)
    engine, shared = rl.rollout.engine, rl.runtime.learner_gpus is not None and rl.runtime.learner_gpus < 1
    if not isinstance(engine, VllmEngineConfig) or rl.dtype != "bfloat16" or shared or known.gpu_memory_gb is None:
        return None
    longest = rl.rollout.sampling.max_new_tokens
    # A fixed seed, so that a plan says the same each time.
    lengths = draw_lengths(random.Random(0), _LENGTH_DRAWS, longest=longest)  # noqa: S311
    mean = sum(lengths) / _LENGTH_DRAWS
    # Long answers are more often in flight than short ones, and half done on average.
    mean_in_flight = sum(n * n for n in lengths) / sum(lengths) / 2
    cache_tokens = engine_fit(size, engine, known, longest=longest).cache_tokens
    batch = min(engine.runtime.max_num_seqs, int(_CACHE_USED * cache_tokens / mean_in_flight))
    if not batch:
        return None
    tokens_per_s = batch / step_seconds(size, engine, known, batch=batch, cached_tokens=batch * mean_in_flight)
    rollout = rl.rollout
    # If pass rates are spread evenly, 2 of n + 1 groups of n answers are all right or all wrong and give no gradient.
    informative_share = 1 - 2 / (rollout.samples_per_group + 1)
    sampled = rollout.groups_per_step * rollout.samples_per_group * mean / informative_share
    learning = _learning_gpu_s(rl, size, known, lengths)

    def split(num_engines: int, num_workers: int) -> Split:
        return Split(
            num_engines=num_engines,
            num_workers=num_workers,
            sampling_s=sampled / tokens_per_s / num_engines,
            learning_s=learning / num_workers,
        )

    now = split(rl.runtime.num_rollout_actors, rl.runtime.num_workers)
    others = [split(engines, workers) for engines, workers in _splits(rl, engine, size, known.gpu_memory_gb)]
    # Of equally fast splits the configured one.
    best = min([now, *others], key=lambda found: found.step_s)
    return SplitEstimate(now=now, best=best, requests_per_engine=batch)


def _learning_gpu_s(rl: RlConfig, size: ModelSize, hardware: HardwareConfig, lengths: list[int]) -> float:
    """Return the seconds of one GPU for a step's updates and old log-probs."""
    num_rows = rl.rollout.groups_per_step * rl.rollout.samples_per_group
    flops = sum(training_flops(rl, size, n, n) for n in lengths) / len(lengths)
    return num_rows * flops / (hardware.peak_tflops * 1e12 * hardware.mfu)


def _splits(rl: RlConfig, engine: VllmEngineConfig, size: ModelSize, gpu_gb: float) -> Iterator[tuple[int, int]]:
    """Yield engines and learner ranks for as many GPUs as now, as far as the learner fits."""
    runtime, tensor_parallel = rl.runtime, engine.runtime.tensor_parallel
    num_gpus = runtime.num_workers + runtime.num_rollout_actors * tensor_parallel
    # Learner ranks form whole context-parallel groups; what is left must hold at least one engine.
    for num_workers in range(runtime.context_parallel, num_gpus, runtime.context_parallel):
        num_engines = (num_gpus - num_workers) // tensor_parallel
        changed = rl.model_copy(update={"runtime": runtime.model_copy(update={"num_workers": num_workers})})
        if num_engines and with_margin_gb(learner_peak(size, learner_load(changed)).num_bytes) <= gpu_gb:
            yield num_engines, num_workers
