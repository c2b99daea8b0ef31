"""Estimate the share of an update in which learner ranks compute, and the context-parallel size that raises it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from klear_core.config.rl import RlConfig
from klear_core.config.sft import SftConfig
from klear_core.config.train import TrainRuntime
from klear_core.pipeline.model_size import ModelSize
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
