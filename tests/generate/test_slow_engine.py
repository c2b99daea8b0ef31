"""An engine that takes longer than the others for its tokens is named, and gets fewer requests until it is as fast."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
from virtual_clock import run_virtually

from klear_core.generate.engine import EngineStats, Pace, SamplingParams
from klear_core.generate.pool import EnginePool
from klear_core.types import Completion

PARAMS = SamplingParams(
    num_samples=1, temperature=1, top_p=1, top_k=0, repetition_penalty=1, max_new_tokens=100, seed=0
)


class TimedEngine:
    """Ten tokens a request, each of which takes so many seconds and more with every request beside it."""

    limit = 40
    is_queued = False

    def __init__(self, name: str, token_s: float) -> None:
        self.name, self.token_s = name, token_s
        self.num_running = self.num_answers = 0
        self.asked: list[int] = []
        """Seeds of all requests, in order."""
        self.given_up: list[int] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        self.num_running += 1
        self.asked.append(params.seed)
        try:
            for _ in range(10):
                await asyncio.sleep(self.token_s * (1 + self.num_running / 4))
        except asyncio.CancelledError:
            self.given_up.append(params.seed)
            raise
        finally:
            self.num_running -= 1
        self.num_answers += 1
        return [
            Completion(text="", token_ids=(1,) * 10, logps=(0.0,) * 10, finish_reason="stop", policy_versions=(0,) * 10)
        ]


async def served(
    engines: list[TimedEngine], num_requests: int, in_flight: int, *, slow_at: float | None = None
) -> list[float]:
    """Return how many seconds each answer took; at `slow_at` the last engine becomes three times slower."""
    pool = EnginePool(engines, lambda _name, error: (_ for _ in ()).throw(error))
    await pool.start()
    room, loop = asyncio.Semaphore(in_flight), asyncio.get_running_loop()

    async def ask(seed: int) -> float:
        async with room:
            began = loop.time()
            await pool.generate((1,), replace(PARAMS, seed=seed))
            return loop.time() - began

    if slow_at is not None:
        loop.call_at(slow_at, setattr, engines[-1], "token_s", 3 * engines[-1].token_s)
    return list(await asyncio.gather(*map(ask, range(num_requests))))


def test_a_slow_engine_gets_fewer_requests_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    engines = [TimedEngine(f"engine {i}", 3.0 if i == 2 else 1.0) for i in range(6)]
    with caplog.at_level(logging.WARNING):
        seconds = run_virtually(served(engines, 3000, 120))
    usual = sorted(seconds)[len(seconds) // 2]
    assert max(seconds[1500:]) < 1.8 * usual, "its answers would take 3 times as long"
    assert engines[2].num_answers < engines[0].num_answers / 3
    named = [record.getMessage() for record in caplog.records if "is slow" in record.getMessage()]
    assert [message.partition(" is slow")[0] for message in named] == ["engine 2"]


def test_a_short_answer_that_waited_for_room_does_not_make_an_engine_slow() -> None:
    """The mean of each answer's seconds for a token would be 50 times as long."""
    pace = Pace()
    for _ in range(100):
        pace.add(10.0, 1000)
    assert pace.seconds_per_token == pytest.approx(0.01)
    pace.add(10.0, 1)
    assert pace.seconds_per_token == pytest.approx(0.01, rel=0.06)


def test_equal_engines_get_equal_shares_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    engines = [TimedEngine(f"engine {i}", 1.0) for i in range(6)]
    with caplog.at_level(logging.WARNING):
        run_virtually(served(engines, 1200, 120))
    assert {engine.num_answers for engine in engines} == {200}
    assert caplog.records == []


def test_the_newest_requests_of_an_engine_that_becomes_slow_are_asked_again_elsewhere_with_their_seeds() -> None:
    engines = [TimedEngine(f"engine {i}", 1.0) for i in range(6)]
    run_virtually(served(engines, 1200, 120, slow_at=300.0))
    slow, others = engines[-1], engines[:-1]
    assert slow.given_up, "it has 20, and may keep a fifth of 40"
    assert len(slow.given_up) <= 12
    assert slow.given_up == sorted(slow.given_up), "seeds count the requests: the order of asking"
    began_with = slow.asked[slow.asked.index(slow.given_up[0]) - 8 : slow.asked.index(slow.given_up[0])]
    assert not set(began_with) & set(slow.given_up), "the oldest stay"
    again = [seed for engine in others for seed in engine.asked if seed in slow.given_up]
    assert sorted(again) == slow.given_up
    assert sum(engine.num_answers for engine in engines) == 1200
    assert not any(engine.given_up for engine in others)


def test_a_slow_engine_keeps_its_requests_where_no_other_has_room() -> None:
    engines = [TimedEngine(f"engine {i}", 1.0) for i in range(4)]
    run_virtually(served(engines, 1600, 400, slow_at=300.0))
    assert not any(engine.given_up for engine in engines)
    assert sum(engine.num_answers for engine in engines) == 1600


class ReportingEngine(TimedEngine):
    """An engine that reports its load, so that its pool reports its rate."""

    cache_tokens = None

    async def stats(self) -> EngineStats:
        return EngineStats()


def test_the_first_rate_counts_from_the_first_request_and_not_from_the_start_of_the_machine() -> None:
    async def body() -> list[EngineStats | None]:
        await asyncio.sleep(1_000_000)  # the machine has been up for days
        pool = EnginePool([ReportingEngine("engine 0", 0.8)], lambda _name, error: (_ for _ in ()).throw(error))
        await pool.start()
        await asyncio.sleep(500)
        told: list[EngineStats | None] = []
        for pause_s in (0, 10):
            for _ in range(3):  # one at a time: ten tokens in ten seconds
                await pool.generate((1,), PARAMS)
            await asyncio.sleep(pause_s)
            told.append(await pool.stats())
        return told

    rates = [load.tokens_per_s for load in run_virtually(body()) if load is not None]
    assert rates == [pytest.approx((1.0,)), pytest.approx((30 / 40,))]
