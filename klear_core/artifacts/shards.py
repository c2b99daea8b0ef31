"""Process items in shards, the unit of resume, with bounded concurrency; yield a shard when all its items are done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

from klear_core.artifacts.records import shard_name

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(Generic[T]):
    """Items whose results go to the file `path`; the shard is done if and only if that file exists."""

    path: Path
    items: tuple[T, ...]

    @property
    def is_done(self) -> bool:
        """Whether the file exists; files appear complete or not at all."""
        return self.path.exists()


def plan_shards(
    folder: Path, items: Sequence[T], *, items_per_shard: int, prefix: str = "", begun: Path | None = None
) -> list[Shard[T]]:
    """Cut `items` into consecutive shards of nearly equal size, at most `items_per_shard` each.

    If an earlier run left shards here, their number is kept, so that a changed `items_per_shard` repeats no work. The
    same holds for files in `begun`, which belong to unfinished shards.
    """
    earlier = [*folder.glob(f"{prefix}?????-of-?????.parquet")]
    if begun is not None:
        earlier += begun.glob("?????-of-?????.*")
    # The names of shards tell their number.
    count = int(earlier[0].stem.rpartition("-of-")[2]) if earlier else -(-len(items) // items_per_shard)
    return [
        Shard(
            path=folder / f"{prefix}{shard_name(i, count)}",
            items=tuple(items[i * len(items) // count : (i + 1) * len(items) // count]),
        )
        for i in range(count)
    ]


async def work_shards(
    shards: Iterable[Shard[T]], work: Callable[[Shard[T], T], Awaitable[R]], *, limit: int
) -> AsyncGenerator[tuple[Shard[T], list[R]], None]:
    """Yield each shard when it is done, with its results in item order; at most `limit` items run at a time.

    The next shard's items start as soon as there is room, so that one slow item delays no other. The first error ends
    the work and cancels what is running. Use with `contextlib.aclosing`, so that this also happens when the caller
    stops early.
    """
    jobs = iter((shard, i) for shard in shards for i in range(len(shard.items)))
    running: dict[asyncio.Task[R], tuple[Shard[T], int]] = {}
    finished: asyncio.Queue[asyncio.Task[R]] = asyncio.Queue()
    results: dict[Path, dict[int, R]] = {}
    try:
        while True:
            for shard, i in islice(jobs, limit - len(running)):
                task = asyncio.ensure_future(work(shard, shard.items[i]))
                # a queue of finished tasks, so that finding one takes no search through all running tasks
                task.add_done_callback(finished.put_nowait)
                running[task] = (shard, i)
            if not running:
                return
            task = await finished.get()
            shard, i = running.pop(task)
            by_index = results.setdefault(shard.path, {})
            by_index[i] = task.result()
            if len(by_index) == len(shard.items):
                del results[shard.path]
                yield shard, [by_index[j] for j in range(len(by_index))]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
