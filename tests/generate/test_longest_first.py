from __future__ import annotations

import asyncio

from klear_core.generate.factory import LongestFirst

LENGTHS = {"a": 10, "b": 30, "c": 20}


async def ask(gate: LongestFirst, key: str, order: list[str]) -> None:
    async with gate.slot(key):
        order.append(key)
        await asyncio.sleep(0)
        gate.record(key, LENGTHS[key])


def test_one_answer_of_each_key_comes_first_and_then_those_of_the_longest() -> None:
    async def drive() -> list[str]:
        order: list[str] = []
        gate = LongestFirst(1, num_requests=9)
        await asyncio.gather(*(ask(gate, key, order) for key in "aaabbbccc"))
        return order

    # the first two are taken before the last has come
    assert asyncio.run(drive()) == ["a", "b", "c", "b", "b", "c", "c", "a", "a"]


def test_requests_go_in_order_while_more_are_to_come() -> None:
    async def drive() -> list[str]:
        order: list[str] = []
        gate = LongestFirst(1, num_requests=10)
        await asyncio.gather(*(ask(gate, key, order) for key in "aaabbbccc"))
        return order

    assert asyncio.run(drive()) == list("aaabbbccc")


def test_no_more_than_the_limit_run_and_a_cancelled_one_gives_its_room_back() -> None:
    async def drive() -> None:
        gate = LongestFirst(2, num_requests=4)
        running = 0
        most = 0

        async def hold(until: asyncio.Event) -> None:
            nonlocal running, most
            async with gate.slot("a"):
                running += 1
                most = max(most, running)
                try:
                    await until.wait()
                finally:
                    running -= 1

        never, now = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(hold(event)) for event in (never, never, never, now)]
        await asyncio.sleep(0.01)
        assert running == 2
        for task in tasks[:3]:
            task.cancel()
        now.set()
        await tasks[3]
        assert most == 2

    asyncio.run(drive())


def test_a_waiting_one_that_is_cancelled_in_its_turn_costs_no_room() -> None:
    async def drive() -> None:
        gate = LongestFirst(1, num_requests=3)
        order: list[str] = []
        first = asyncio.create_task(ask(gate, "a", order))
        second = asyncio.create_task(ask(gate, "b", order))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([first, second])
        await asyncio.wait_for(ask(gate, "c", order), 5)
        assert order == ["a", "c"]

    asyncio.run(drive())
