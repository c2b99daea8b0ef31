from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from klear_core.artifacts.records import Shard, plan_shards, work_shards


def sizes(shards: list[Shard[int]]) -> list[int]:
    return [len(s.items) for s in shards]


def test_shards_cover_all_items_in_order_and_are_nearly_equal(tmp_path: Path) -> None:
    shards = plan_shards(tmp_path, range(10), items_per_shard=4)
    assert [i for s in shards for i in s.items] == list(range(10))
    assert sizes(shards) == [3, 3, 4]
    assert [s.path.name for s in shards] == [
        "00000-of-00003.parquet",
        "00001-of-00003.parquet",
        "00002-of-00003.parquet",
    ]


def test_no_items_make_no_shard(tmp_path: Path) -> None:
    assert plan_shards(tmp_path, [], items_per_shard=4) == []


def test_a_changed_shard_size_keeps_the_cut_of_earlier_work(tmp_path: Path) -> None:
    first = plan_shards(tmp_path, range(10), items_per_shard=4, prefix="a-")
    first[1].path.touch()
    again = plan_shards(tmp_path, range(10), items_per_shard=9, prefix="a-")
    assert again == first
    assert [s.is_done for s in again] == [False, True, False]
    assert len(plan_shards(tmp_path, range(10), items_per_shard=9, prefix="a_long-")) == 2


def make_shards(*shards: tuple[int, ...]) -> list[Shard[int]]:
    return [Shard(path=Path(str(i)), items=items) for i, items in enumerate(shards)]


async def collect(shards: list[Shard[int]], work: object, limit: int) -> list[tuple[str, list[int]]]:
    async with aclosing(work_shards(shards, work, limit=limit)) as finished:  # type: ignore[arg-type]
        return [(shard.path.name, results) async for shard, results in finished]


def test_results_come_in_item_order_whatever_finishes_first() -> None:
    gates = {i: asyncio.Event() for i in range(3)}

    async def work(_shard: Shard[int], item: int) -> int:
        if item < 2:
            await gates[item + 1].wait()  # 2 ends first, then 1, then 0
        gates[item].set()
        return item * 10

    assert asyncio.run(collect(make_shards((0, 1, 2)), work, 3)) == [("0", [0, 10, 20])]


def test_a_slow_item_does_not_hold_up_the_next_shard() -> None:
    slow = asyncio.Event()

    async def work(_shard: Shard[int], item: int) -> int:
        if item == 0:
            await slow.wait()
        if item == 3:
            slow.set()
        return item

    assert asyncio.run(collect(make_shards((0, 1), (2, 3)), work, 2)) == [("1", [2, 3]), ("0", [0, 1])]


def test_no_more_than_limit_items_are_worked_on_at_a_time() -> None:
    running, most = 0, 0

    async def work(_shard: Shard[int], item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return item

    asyncio.run(collect(make_shards(tuple(range(20)), tuple(range(20))), work, 3))
    assert most == 3


def test_the_first_error_rises_and_cancels_what_runs() -> None:
    cancelled: list[int] = []

    async def work(_shard: Shard[int], item: int) -> int:
        if item == 1:
            raise ValueError("broken")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise
        return item

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(collect(make_shards((0, 1, 2)), work, 3))
    assert cancelled == [0, 2]
