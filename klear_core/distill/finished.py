"""Count the shards that earlier runs of the stage finished, and reopen those with too few traces."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.shards import Shard
from klear_core.config.distill import DistillConfig
from klear_core.distill.checks import is_enough
from klear_core.distill.shard_files import ShardFiles, is_over_budget
from klear_core.distill.teacher import Usage
from klear_core.distill.trace_counts import TraceCounts, failures_of
from klear_core.types import Problem

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedShard:
    """The record of an earlier run's finished shard, without the texts."""

    counts: TraceCounts
    num_failed: int
    usage: Usage
    is_over_budget: bool
    """Whether samples are missing because the budget was spent."""

    @classmethod
    def of(cls, shard: Shard[Problem]) -> FinishedShard:
        """Read the shard's records, which may be hundreds of megabytes, and keep only their counts."""
        records = ShardFiles(shard).read()
        counts = TraceCounts()
        counts.add(records.traces, records.dropped)
        return cls(
            counts=counts,
            num_failed=len(failures_of([*records.traces, *records.dropped])),
            usage=records.usage,
            is_over_budget=is_over_budget(records.dropped),
        )


def reopen_poor_shards(
    shards: Sequence[Shard[Problem]], finished: Mapping[Path, FinishedShard], cfg: DistillConfig
) -> None:
    """Reopen finished shards below a floor if all finished ones together are below it.

    The teacher may have been repaired since, so their incomplete replies are requested again. Shards that lack samples
    because the budget was spent are always reopened, and keep all that was paid for.
    """
    total = TraceCounts()
    for earlier in finished.values():
        total.merge(earlier.counts)
    if not total.num_asked:
        return
    is_total_poor = not is_enough(total, cfg.runtime)
    reopened = []
    for shard in shards:
        if shard.path not in finished:
            continue
        earlier = finished[shard.path]
        is_poor = is_total_poor and not is_enough(earlier.counts, cfg.runtime)
        if earlier.is_over_budget or is_poor:
            reopened.append(shard)
    if reopened:
        log.info("distill: %d finished shards of an earlier run lack traces, which are requested again", len(reopened))
    for shard in reopened:
        ShardFiles(shard).reopen(keeps_incomplete=finished[shard.path].is_over_budget)
