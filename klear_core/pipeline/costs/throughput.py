"""Estimate how much of the time learner and engines compute, and the settings that raise it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from klear_core.config.evaluate import HardwareConfig, VllmEngineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.train import SftConfig, TrainRuntime
from klear_core.generate.model_size import ModelSize, engine_fit, step_seconds
from klear_core.pipeline.costs.estimate import learning_speed, training_flops
from klear_core.pipeline.costs.memory import learner_load, learner_peak, with_margin_gb
from klear_core.pipeline.preflight.capacity import known_hardware
from klear_core.train.balance import Item, RowWork, busy_bound, distribute, lockstep_work

ENOUGH = 0.93
"""Busy share below which a plan says that there are too few rows for the ranks. Ours."""
MEDIAN_SHARE, SIGMA = 9000 / 32768, 0.8
"""Assumed lengths: log-normal with this median, as a share of the longest row, cut there. Ours, after long chains of
thought of about 9,000 tokens at a budget of 32,768."""
_UPDATE_DRAWS = 8
"""Simulated updates over which a share is averaged."""
_TRIED = 64
"""Largest context-parallel size that is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyEstimate:
    """Shares of an update in which data ranks compute, for simulated rows."""

    num_ranks: int
    """Data ranks: groups of `context_parallel` processes."""
    num_rows: int
    """Rows of an update."""
    share: float
    bound: float
    """A share that no distribution of these rows over the ranks exceeds."""
    better: TrainRuntime | None
    """The settings with the smallest larger context that is enough, or the best one. None: none is needed, or none
    helps."""
    better_share: float
    """The share with these settings; `share` without them."""


def estimate_busy(training: SftConfig | RlConfig, size: ModelSize) -> BusyEstimate:
    """Return the busy share with rows of assumed lengths; communication is not counted."""
    runtime, num_rows = training.runtime, _rows_of_update(training)
    share, bound = _busy(training, size, runtime)
    better, better_share = None, share
    for wider in _wider_contexts(runtime, size):
        if better_share >= ENOUGH:
            break
        found, _ = _busy(training, size, wider)
        if found > better_share:
            better, better_share = wider, found
    return BusyEstimate(
        num_ranks=runtime.num_workers // runtime.context_parallel,
        num_rows=num_rows,
        share=share,
        bound=bound,
        better=better,
        better_share=better_share,
    )


def row_work(size: ModelSize, *, recomputes: bool) -> RowWork:
    """Return the work of a row as the learner counts it (`FlopCount.row_work`), all weights being trained."""
    layers, head = size.num_layers * size.layer_params, size.vocab_size * size.hidden_size
    product_flops = (8 if recomputes else 6) * layers + 6 * head
    return RowWork.of(
        product_flops=product_flops, attention_width=size.num_layers * size.query_size, recomputes=recomputes
    )


def draw_lengths(rng: random.Random, count: int, *, longest: int) -> list[int]:
    """Return row lengths from the assumed distribution."""
    median = math.log(MEDIAN_SHARE * longest)
    return [max(1, min(longest, round(rng.lognormvariate(median, SIGMA)))) for _ in range(count)]


def _rows_of_update(training: SftConfig | RlConfig) -> int:
    if isinstance(training, RlConfig):
        rollout = training.rollout
        return max(1, rollout.groups_per_step * rollout.samples_per_group // training.minibatches_per_step)
    return training.rows_per_step


def _longest_row(training: SftConfig | RlConfig) -> int:
    if isinstance(training, RlConfig):
        return training.rollout.sampling.max_new_tokens
    return training.max_tokens


def _wider_contexts(runtime: TrainRuntime, size: ModelSize) -> list[TrainRuntime]:
    """Return the settings with larger contexts, with as many tokens per process as now."""
    wider = []
    # Ranks form whole groups, and each rank of a group takes as many heads as the others.
    for context in range(runtime.context_parallel + 1, min(runtime.num_workers, _TRIED) + 1):
        if runtime.num_workers % context == 0 and size.num_heads % context == 0:
            tokens = runtime.tokens_per_microbatch * context // runtime.context_parallel
            wider.append(runtime.model_copy(update={"context_parallel": context, "tokens_per_microbatch": tokens}))
    return wider


def _busy(training: SftConfig | RlConfig, size: ModelSize, runtime: TrainRuntime) -> tuple[float, float]:
    """Return the busy share and its bound, over several draws of an update's rows."""
    work_of_row = row_work(size, recomputes=runtime.activation_checkpointing)
    num_ranks, capacity = runtime.num_workers // runtime.context_parallel, runtime.tokens_per_microbatch
    work = lockstep = least = 0.0
    for draw in range(_UPDATE_DRAWS):
        # Fixed seeds: a plan says the same each time, and contexts are compared on the same rows.
        rng = random.Random(draw)  # noqa: S311
        lengths = draw_lengths(rng, _rows_of_update(training), longest=_longest_row(training))
        items = [Item(num_tokens=n, work=work_of_row(n)) for n in lengths]
        mean = sum(item.work for item in items) / num_ranks
        plan = distribute(items, capacity=capacity, num_ranks=num_ranks)
        work += mean
        lockstep += lockstep_work(plan, items)
        least += mean / busy_bound(items, capacity=capacity, num_ranks=num_ranks)
    # Sums over the draws, and not a mean of shares: a longer update weighs more, as in a run.
    return work / lockstep, work / least


# ---- GPUs of learner and engines ----
# Estimate how the GPUs of an RL stage divide between engines and learner so that neither waits for the other.


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
    seconds = sum(training_flops(rl, size, n, n) / learning_speed(hardware, size, rl, n) for n in lengths)
    return num_rows * seconds / len(lengths)


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
