"""A pool that shares GPUs with other work: it begins with what it has, and closes what it does not need any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from klear_core.errors import ResourceError
from klear_core.generate.engine import EngineStats, SamplingParams, engine_stats
from klear_core.generate.pool import EngineLost, EnginePool
from klear_core.types import Completion


class OnGpu:
    """Answers a seed when it is told to. Starts when it has its GPU."""

    def __init__(self, name: str, *, limit: int = 4, has_gpu: bool = True) -> None:
        self.name, self.limit = name, limit
        self.is_queued = False
        self.gpu, self.loaded = asyncio.Event(), asyncio.Event()
        self.loaded.set()
        if has_gpu:
            self.gpu.set()
        self.events: list[str] = []
        self.asked: dict[int, asyncio.Future[None]] = {}
        self.num_deaths_to_come = 0

    async def start(self) -> None:
        self.is_queued = not self.gpu.is_set()
        try:
            await self.gpu.wait()
        finally:
            self.is_queued = False
        await self.loaded.wait()
        self.events.append("start")
        if self.num_deaths_to_come:
            self.num_deaths_to_come -= 1
            raise EngineLost("died while it started")

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        self.asked[params.seed] = asyncio.get_running_loop().create_future()
        await self.asked[params.seed]
        return [Completion(text=self.name, token_ids=(1,), logps=(-1.0,), finish_reason="stop", policy_versions=(0,))]

    async def close(self) -> None:
        self.events.append("close")

    def answer(self, seed: int) -> None:
        self.asked[seed].set_result(None)

    def die(self) -> None:
        for asked in self.asked.values():
            if not asked.done():
                asked.set_exception(ResourceError("out of memory"))


class Losses(list[str]):
    def count(self, name: str, _error: BaseException) -> None:
        self.append(name)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test; fail on exceptions of tasks that nobody awaits."""
    complaints: list[str] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, what: complaints.append(str(what)))
        await asyncio.wait_for(body(), 20)
        assert len(asyncio.all_tasks()) <= 2  # this one and that of wait_for: nothing is left running

    asyncio.run(watched())
    assert not complaints


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def no_pause(_seconds: float) -> None:
    await asyncio.sleep(0)


async def started(*engines: OnGpu, losses: Losses | None = None) -> EnginePool:
    pool = EnginePool(engines, (losses if losses is not None else Losses()).count, sleep=no_pause)
    await pool.start(num_up=1)
    return pool


def ask(pool: EnginePool, *seeds: int) -> list[asyncio.Task[list[Completion]]]:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(
            num_samples=1, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=8, seed=seed
        )

    return [asyncio.create_task(pool.generate([1], params(seed))) for seed in seeds]


async def texts(asked: Sequence[asyncio.Task[list[Completion]]]) -> list[str]:
    return [completions[0].text for completions in await asyncio.gather(*asked)]


def test_an_engine_without_a_request_is_closed_once_the_last_one_has_come_while_another_works_on() -> None:
    async def body() -> None:
        first, second = OnGpu("first"), OnGpu("second")
        pool = await started(first, second)
        pool.expect(3)
        asked = ask(pool, 0, 1)
        await settle()
        second.answer(1)
        await settle()
        assert second.events == ["start"]  # one more is to come, and it gets it
        asked += ask(pool, 2)
        await settle()
        second.answer(2)
        await settle()
        assert second.events == ["start", "close"]
        assert first.events == ["start"]
        first.answer(0)
        assert await texts(asked) == ["first", "second", "second"]
        await pool.close()
        assert (first.events, second.events) == (["start", "close"], ["start", "close"])

    run(body)


def test_no_engine_is_closed_while_a_request_waits_or_when_nobody_said_how_many_come() -> None:
    async def body() -> None:
        for is_known in (True, False):
            engine = OnGpu("engine 0", limit=1)
            pool = await started(engine)
            if is_known:
                pool.expect(2)
            asked = ask(pool, 0, 1)
            await settle()
            engine.answer(0)
            await settle()
            assert engine.events == ["start"]
            engine.answer(1)
            await settle()
            assert engine.events == (["start", "close"] if is_known else ["start"])
            assert await texts(asked) == ["engine 0"] * 2
            await pool.close()

    run(body)


def test_the_last_requests_of_an_engine_that_dies_go_to_one_that_lives_and_it_is_not_replaced() -> None:
    async def body() -> None:
        losses = Losses()
        first, second = OnGpu("first"), OnGpu("second")
        pool = await started(first, second, losses=losses)
        pool.expect(2)
        asked = ask(pool, 0, 1)
        await settle()
        first.die()
        await settle()
        second.answer(0)
        second.answer(1)
        assert await texts(asked) == ["second", "second"]
        assert losses == ["first"]
        assert first.events == ["start", "close"]
        await pool.close()

    run(body)


def test_the_last_engine_that_works_is_replaced_when_it_dies_and_those_that_were_closed_stay_so() -> None:
    async def body() -> None:
        first, second = OnGpu("first"), OnGpu("second")
        pool = await started(first, second)
        pool.expect(2)
        asked = ask(pool, 0, 1)
        await settle()
        second.answer(1)
        await settle()
        first.die()
        await settle()
        first.answer(0)
        assert await texts(asked) == ["first", "second"]
        assert first.events == ["start", "start", "close"]
        assert second.events == ["start", "close"]
        await pool.close()

    run(body)


def test_an_engine_is_started_again_if_more_requests_come_than_were_expected() -> None:
    async def body() -> None:
        engine = OnGpu("engine 0")
        pool = await started(engine)
        pool.expect(0)
        await settle()
        assert engine.events == ["start", "close"]
        asked = ask(pool, 0)
        await settle()
        engine.answer(0)
        assert await texts(asked) == ["engine 0"]
        await settle()
        assert engine.events == ["start", "close", "start", "close"]
        await pool.close()

    run(body)


def test_requests_that_turn_out_to_be_answered_already_do_not_keep_engines() -> None:
    async def body() -> None:
        engine = OnGpu("engine 0")
        pool = await started(engine)
        pool.expect(2)
        pool.expect(-1)
        asked = ask(pool, 0)
        await settle()
        engine.answer(0)
        await settle()
        assert engine.events == ["start", "close"]
        await asyncio.gather(*asked)
        await pool.close()

    run(body)


def test_a_pool_begins_with_the_engines_that_have_gpus_and_the_others_join() -> None:
    async def body() -> None:
        here, away = OnGpu("here", limit=1), OnGpu("away", limit=1, has_gpu=False)
        pool = await started(here, away)
        asked = ask(pool, 0, 1)
        await settle()
        assert (list(here.asked), list(away.asked)) == ([0], [])
        away.gpu.set()
        await settle()
        assert (list(here.asked), list(away.asked)) == ([0], [1])
        here.answer(0)
        away.answer(1)
        assert await texts(asked) == ["here", "away"]
        await pool.close()

    run(body)


def test_an_engine_gets_no_more_than_its_share_while_others_load_but_those_without_gpus_do_not_count() -> None:
    async def body() -> None:
        up, loads, away = OnGpu("up"), OnGpu("loads"), OnGpu("away", has_gpu=False)
        loads.loaded.clear()
        pool = await started(up, loads, away)
        pool.expect(4)
        asked = ask(pool, 0, 1, 2, 3)
        await settle()
        assert (list(up.asked), list(loads.asked)) == ([0, 1], [])
        up.answer(0)
        await settle()
        assert list(up.asked) == [0, 1, 2]  # three are left: two for each
        loads.loaded.set()
        await settle()
        assert list(loads.asked) == [3]
        for engine, seed in ((up, 1), (up, 2), (loads, 3)):
            engine.answer(seed)
        assert await texts(asked) == ["up", "up", "up", "loads"]
        await pool.close()

    run(body)


def test_a_pool_waits_for_all_engines_by_default() -> None:
    async def body() -> None:
        first, second = OnGpu("first"), OnGpu("second")
        second.loaded.clear()
        pool = EnginePool((first, second), Losses().count)
        starting = asyncio.create_task(pool.start())
        await settle()
        assert first.events == ["start"]
        assert not starting.done()
        second.loaded.set()
        await starting
        await pool.close()

    run(body)


def test_a_pool_without_any_gpu_waits_for_one() -> None:
    async def body() -> None:
        first, second = OnGpu("first", has_gpu=False), OnGpu("second", has_gpu=False)
        starting = asyncio.create_task(started(first, second))
        await settle()
        assert not starting.done()
        second.gpu.set()
        await settle()
        assert starting.done()
        await (await starting).close()

    run(body)


def test_engines_that_still_wait_for_gpus_wait_no_longer_when_others_have_the_last_requests() -> None:
    async def body() -> None:
        here, away = OnGpu("here"), OnGpu("away", has_gpu=False)
        pool = await started(here, away)
        pool.expect(1)
        asked = ask(pool, 0)
        await settle()
        assert away.events == ["close"]
        assert not away.is_queued
        here.answer(0)
        assert await texts(asked) == ["here"]
        await pool.close()

    run(body)


def test_close_ends_starts_and_a_pool_that_is_closed_while_it_starts_says_so() -> None:
    async def body() -> None:
        first, second = OnGpu("first", has_gpu=False), OnGpu("second")
        second.loaded.clear()
        pool = EnginePool((first, second), Losses().count)
        starting = asyncio.create_task(pool.start())
        await settle()
        await pool.close()
        with pytest.raises(ResourceError, match="closed"):
            await starting
        first.gpu.set()
        second.loaded.set()
        await settle()
        assert (first.events, second.events) == (["close"], ["close"])

    run(body)


def test_an_engine_that_dies_without_an_answer_is_started_again_after_ever_longer_pauses() -> None:
    async def body() -> None:
        pauses: list[float] = []

        async def pause(seconds: float) -> None:
            pauses.append(seconds)

        engine = OnGpu("engine 0")
        engine.num_deaths_to_come = 8
        pool = EnginePool([engine], Losses().count, sleep=pause)
        await pool.start()
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
        asked = ask(pool, 0)
        await settle()
        engine.answer(0)
        await settle()
        asked += ask(pool, 1)
        await settle()
        engine.die()
        await settle()
        assert len(pauses) == 8  # the last one had given an answer
        engine.answer(1)
        await asyncio.gather(*asked)
        await pool.close()

    run(body)


class Measured(OnGpu):
    """An engine that reports its load until it is closed."""

    cache_tokens = None

    async def stats(self) -> EngineStats | None:
        num_preempted = int(self.name)
        return EngineStats(num_preempted=num_preempted) if self.events[-1] == "start" else None


def test_the_load_of_engines_that_the_last_requests_leave_idle_is_reported_once() -> None:
    async def body() -> None:
        engines = [Measured("3"), Measured("4")]
        pool = await started(*engines)
        pool.expect(2)
        asked = ask(pool, 0, 1)
        await settle()
        for seed, engine in enumerate(engines):
            engine.answer(seed)
        await asyncio.gather(*asked)
        load = await engine_stats(pool)
        assert load is not None
        assert (load.num_preempted, len(load.tokens_per_s)) == (7, 2)
        assert [engine.events for engine in engines] == [["start", "close"]] * 2
        assert await engine_stats(pool) is None
        await pool.close()

    run(body)
