"""Requests of an engine with a process of its own: one that hangs answers no ping."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from virtual_clock import run_virtually

from klear_core.errors import ResourceError
from klear_core.generate.engine import OpenRequests


async def never() -> None:
    await asyncio.Event().wait()


async def after(seconds: float, ping: Callable[[], Awaitable[object]]) -> str:
    """Ask for an answer that takes so many seconds, and then for another."""
    requests = OpenRequests("engine", ping=ping)
    first = await requests.run(asyncio.sleep(seconds, result="answer 0"))
    second = await requests.run(asyncio.sleep(seconds, result="answer 1"))
    return f"{first}, {second}"


def test_requests_of_days_are_answered_while_pings_are() -> None:
    times = []

    async def ping() -> None:
        times.append(asyncio.get_running_loop().time())
        await asyncio.sleep(599)

    assert run_virtually(after(86_400, ping)) == "answer 0, answer 1"
    assert times[:3] == [60, 60 + 599 + 60, 2 * (60 + 599) + 60]


def test_a_process_that_leaves_a_ping_unanswered_for_ten_minutes_fails_open_and_later_requests() -> None:
    async def body() -> list[float]:
        requests = OpenRequests("engine", ping=never)
        times = []
        open_ones = [asyncio.create_task(requests.run(asyncio.sleep(86_400))) for _ in range(3)]
        for request in [*open_ones, requests.run(asyncio.sleep(0))]:
            with pytest.raises(ResourceError, match=r"^the engine gave no sign of life for 600 s$"):
                await request
            times.append(asyncio.get_running_loop().time())
        return times

    assert run_virtually(body()) == [660] * 4


def test_nobody_is_pinged_between_requests_nor_for_short_ones() -> None:
    pings = []

    async def ping() -> None:
        pings.append(1)

    async def body() -> None:
        requests = OpenRequests("engine", ping=ping)
        for _ in range(5):
            await requests.run(asyncio.sleep(59))
            await asyncio.sleep(86_400)

    run_virtually(body())
    assert pings == []


def test_the_caller_of_a_cancelled_request_is_cancelled_and_the_others_go_on() -> None:
    async def body() -> str:
        requests = OpenRequests("engine", ping=never)
        cancelled = asyncio.create_task(requests.run(never()))
        other = asyncio.create_task(requests.run(asyncio.sleep(30, result="answer")))
        await asyncio.sleep(1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        return await other

    assert run_virtually(body()) == "answer"
