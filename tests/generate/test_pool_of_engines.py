"""Several engines as one: who gets what, and what happens to the requests of an engine that dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from klear_core.errors import ResourceError
from klear_core.generate.engine import SamplingParams
from klear_core.generate.factory import RestartLimit
from klear_core.generate.pool import EngineLost, EnginePool
from klear_core.types import Completion


def params(seed: int) -> SamplingParams:
    return SamplingParams(
        num_samples=1, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=8, seed=seed
    )


def answer_to(seed: int) -> list[Completion]:
    ids = (seed % 200,)
    return [Completion(text=str(seed), token_ids=ids, logps=(-1.0,), finish_reason="stop", policy_versions=(0,))]


class Mortal:
    """Answers when it is told to, and dies with everything that it holds of the prompt (666,), or of any if broken."""

    is_queued = False

    def __init__(self, name: str, *, limit: int = 4, is_slow: bool = False, is_broken: bool = False) -> None:
        self.name, self.limit, self.is_slow, self.is_broken = name, limit, is_slow, is_broken
        self.seen: list[int] = []
        self.most_at_once = 0
        self.num_starts = 0
        self.dies_at_start = 0
        self.may_restart = asyncio.Event()
        self.may_restart.set()
        self.is_closed = False
        self._end = asyncio.Event()
        self._dead = asyncio.Event()
        self._num_running = 0

    async def start(self) -> None:
        self.num_starts += 1
        if self.dies_at_start:
            self.dies_at_start -= 1
            raise EngineLost("died while it started")
        if self.num_starts > 1:
            await self.may_restart.wait()
        self._dead = asyncio.Event()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        dead = self._dead
        self.seen.append(params.seed)
        self._num_running += 1
        self.most_at_once = max(self.most_at_once, self._num_running)
        try:
            if list(prompt_ids) == [0]:
                raise ValueError("leave room")
            await asyncio.sleep(0)
            if self.is_broken or list(prompt_ids) == [666]:
                dead.set()
            for _ in range(3):
                await asyncio.sleep(0)
                if dead.is_set():
                    raise ResourceError("out of memory")
            if self.is_slow:
                waits = [asyncio.ensure_future(e.wait()) for e in (self._end, dead)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
                if dead.is_set():
                    raise ResourceError("out of memory")
            return answer_to(params.seed)
        finally:
            self._num_running -= 1

    def die(self) -> None:
        self._dead.set()

    def finish(self) -> None:
        self._end.set()

    async def close(self) -> None:
        self.is_closed = True


def no_limit(_name: str, _error: BaseException) -> None:
    pass


async def no_pause(_seconds: float) -> None:
    await asyncio.sleep(0)


def pool_of(*engines: Mortal, count: Callable[[str, BaseException], None] = no_limit) -> EnginePool:
    return EnginePool(engines, count, sleep=no_pause)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 20))


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def test_requests_go_to_the_least_busy_engine_within_its_limit_and_the_others_wait_in_order() -> None:
    async def body() -> None:
        small, large = Mortal("small", limit=2, is_slow=True), Mortal("large", limit=4, is_slow=True)
        pool = pool_of(small, large)
        await pool.start()
        asked = [asyncio.create_task(pool.generate([1], params(i))) for i in range(9)]
        await settle()
        # shares of the limits: 0/2 0/4, 1/2 0/4, 1/2 1/4, 1/2 2/4 (equal: the first), 2/2 2/4, 2/2 3/4
        assert (small.seen, large.seen) == ([0, 3], [1, 2, 4, 5])
        assert pool.status() == "small (2 requests), large (4 requests), 3 more wait"
        small.finish()
        large.finish()
        assert [c.text for answers in await asyncio.gather(*asked) for c in answers] == [str(i) for i in range(9)]
        assert (small.most_at_once, large.most_at_once) == (2, 4)

    run(body)


def test_the_requests_of_an_engine_that_dies_are_asked_again_with_their_seeds() -> None:
    async def body() -> None:
        losses: list[str] = []
        first, second = Mortal("first", is_slow=True), Mortal("second")
        pool = pool_of(first, second, count=lambda name, error: losses.append(f"{name}: {error}"))
        await pool.start()
        asked = [asyncio.create_task(pool.generate([1], params(i))) for i in range(8)]
        await settle()
        held = set(first.seen)
        first.die()
        first.is_slow = False
        answers = await asyncio.gather(*asked)
        assert [a[0].text for a in answers] == [str(i) for i in range(8)]
        assert losses == ["first: out of memory"]
        assert first.num_starts == 2
        assert held <= set(second.seen + first.seen[len(held) :])

    run(body)


@pytest.mark.parametrize(("num_engines", "limit"), [(1, 1), (1, 16), (3, 8)])
def test_a_request_that_kills_engines_fails_by_name_and_all_others_are_answered(num_engines: int, limit: int) -> None:
    async def body() -> None:
        engines = [Mortal(f"engine {i}", limit=limit) for i in range(num_engines)]
        pool = pool_of(*engines)
        await pool.start()
        prompts = [[1] if i != 5 else [666] for i in range(40)]
        asked = [pool.generate(prompt, params(i)) for i, prompt in enumerate(prompts)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        poison = results.pop(5)
        assert isinstance(poison, ResourceError)
        assert "seed 5 and a prompt of 1 tokens is given up" in str(poison)
        assert "engines died while they had it" in str(poison)
        assert [r[0].text for r in results if isinstance(r, list)] == [str(i) for i in range(40) if i != 5]
        assert await pool.generate([1], params(99)) == answer_to(99)
        assert sum(e.num_starts for e in engines) - num_engines <= 10  # halving finds it, one by one would be 40

    run(body)


def test_two_poisonous_requests_are_both_found() -> None:
    async def body() -> None:
        pool = pool_of(Mortal("a", limit=16), Mortal("b", limit=16))
        await pool.start()
        prompts = [[666] if i in (3, 17) else [1] for i in range(40)]
        asked = [pool.generate(prompt, params(i)) for i, prompt in enumerate(prompts)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [i for i, r in enumerate(results) if isinstance(r, ResourceError)] == [3, 17]

    run(body)


@pytest.mark.parametrize(("num_requests", "limit"), [(3, 1), (40, 4)])
def test_an_engine_that_dies_of_every_request_costs_no_request_while_another_is_well(
    num_requests: int, limit: int
) -> None:
    async def body() -> None:
        broken, well = Mortal("broken", limit=limit, is_broken=True), Mortal("well", limit=limit)
        pool = pool_of(broken, well)
        await pool.start()
        answers = await asyncio.gather(*(pool.generate([1], params(i)) for i in range(num_requests)))
        assert [a[0].text for a in answers] == [str(i) for i in range(num_requests)]
        assert len(broken.seen) == len(set(broken.seen))  # none was asked there twice

    run(body)


def test_the_last_try_of_a_request_waits_for_an_engine_that_did_not_have_it_yet() -> None:
    async def body() -> None:
        broken, away = Mortal("broken", is_broken=True), Mortal("away")
        pool = pool_of(broken, away)
        await pool.start()
        away.may_restart.clear()
        replacing = asyncio.create_task(pool.replace(away, EngineLost("gone")))
        await settle()
        asked = asyncio.create_task(pool.generate([1], params(7)))
        await settle()
        assert broken.seen == [7, 7]
        assert not asked.done()
        away.may_restart.set()
        assert await asked == answer_to(7)
        await replacing

    run(body)


def test_an_engine_that_dies_while_it_starts_is_started_again() -> None:
    async def body() -> None:
        engine = Mortal("engine 0")
        engine.dies_at_start = 2
        pool = pool_of(engine)
        await pool.start()
        assert await pool.generate([1], params(1)) == answer_to(1)
        assert engine.num_starts == 3

    run(body)


def test_too_many_losses_within_the_window_end_the_pool_with_the_last_reason() -> None:
    async def body() -> None:
        limit = RestartLimit(1, window_s=3600, key="evaluate.runtime.max_restarts")
        engine = Mortal("engine 0", is_slow=True)
        pool = pool_of(engine, count=limit.count)
        await pool.start()
        asked = asyncio.create_task(pool.generate([1], params(1)))
        waits = asyncio.create_task(pool.generate([1], params(2)))
        for _ in range(2):
            await settle()
            engine.die()
        for task in (asked, waits):
            with pytest.raises(ResourceError, match=r"2 engines were lost within 60 minutes, and evaluate.runtime."):
                await task
        with pytest.raises(ResourceError, match=r"max_restarts = 1 allows no more; the last was engine 0: out of mem"):
            await pool.generate([1], params(3))

    run(body)


def test_losses_long_ago_do_not_count() -> None:
    times = iter((0.0, 1.0, 62.0, 63.0, 64.0))
    limit = RestartLimit(2, window_s=60, key="k", clock=lambda: next(times))
    for _ in range(4):
        limit.count("engine 0", ResourceError("gone"))
    with pytest.raises(ResourceError, match="3 engines were lost"):
        limit.count("engine 0", ResourceError("gone"))


def test_all_engines_of_a_dead_node_are_one_loss() -> None:
    limit = RestartLimit(1, window_s=60, key="k", dead_nodes=lambda error: {str(error)} - {"exit code 1"})
    for i in range(8):
        limit.count(f"engine {i}", ResourceError("node a"))
    with pytest.raises(ResourceError, match="2 engines were lost"):
        limit.count("engine 8", ResourceError("exit code 1"))


def test_a_request_that_an_engine_refuses_fails_alone() -> None:
    async def body() -> None:
        engine = Mortal("engine 0")
        pool = pool_of(engine)
        await pool.start()
        with pytest.raises(ValueError, match="leave room"):
            await pool.generate([0], params(1))
        assert await pool.generate([1], params(2)) == answer_to(2)
        assert engine.num_starts == 1

    run(body)


def test_a_cancelled_request_makes_room_for_the_next() -> None:
    async def body() -> None:
        engine = Mortal("engine 0", limit=1, is_slow=True)
        pool = pool_of(engine)
        await pool.start()
        first, second, third = (asyncio.create_task(pool.generate([1], params(i))) for i in range(3))
        await settle()
        for task in (first, second):
            task.cancel()
        await settle()
        assert engine.seen == [0, 2]
        engine.finish()
        assert await third == answer_to(2)

    run(body)


def test_close_fails_what_is_open_and_what_comes_later() -> None:
    async def body() -> None:
        engine = Mortal("engine 0", limit=1, is_slow=True)
        pool = pool_of(engine)
        await pool.start()
        asked = [asyncio.create_task(pool.generate([1], params(i))) for i in range(3)]
        await settle()
        await pool.close()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(r, ResourceError) and "closed" in str(r) for r in results)
        with pytest.raises(ResourceError, match="closed"):
            await pool.generate([1], params(9))
        assert engine.is_closed

    run(body)
