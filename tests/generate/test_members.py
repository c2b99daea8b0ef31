"""An endpoint in a pool: what happens when it goes away, and when it comes back."""

from __future__ import annotations

import asyncio

import pytest
from completions_endpoint import MODEL, serve
from fake_engine import FakeAnswer, FakeEngine

from klear_core.config.evaluate import HttpEngineConfig
from klear_core.errors import ConfigError, ResourceError
from klear_core.generate.engine import InferenceEngine, SamplingParams
from klear_core.generate.factory import EndpointMember, LocalMember, RestartLimit
from klear_core.generate.pool import EngineLost, EnginePool

PARAMS = SamplingParams(
    num_samples=1, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=8, seed=0
)


def config(base_url: str, model: str = MODEL) -> HttpEngineConfig:
    return HttpEngineConfig.model_validate({"base_url": base_url, "model": model, "runtime": {"max_retries": 0}})


def fake(_prompt: tuple[int, ...], _params: SamplingParams, _index: int) -> FakeAnswer:
    return FakeAnswer(text="hi")


async def no_pause(_seconds: float) -> None:
    await asyncio.sleep(0)


def test_an_endpoint_that_is_not_there_at_first_is_an_error_at_once() -> None:
    async def drive() -> None:
        with pytest.raises(ResourceError, match=r"127\.0\.0\.1:1/v1/models failed") as caught:
            await EndpointMember(config("http://127.0.0.1:1/v1")).start()
        assert not isinstance(caught.value, EngineLost)

    asyncio.run(drive())


def test_an_endpoint_without_the_model_is_refused_with_those_that_it_has() -> None:
    async def drive() -> None:
        async with serve(FakeEngine(fake), max_model_len=99) as base_url:
            with pytest.raises(ConfigError, match=rf"model = 'other' is not served at .*'{MODEL}'"):
                await EndpointMember(config(base_url, "other")).start()

    asyncio.run(drive())


def test_an_endpoint_that_goes_away_is_waited_for_and_in_the_end_lost() -> None:
    now = [0.0]

    async def pause(seconds: float) -> None:
        now[0] += seconds

    async def drive() -> None:
        async with serve(FakeEngine(fake), max_model_len=99) as base_url:
            member = EndpointMember(config(base_url), sleep=pause, clock=lambda: now[0])
            await member.start()
            assert member.limit == 8
        with pytest.raises(EngineLost, match="was away for 30 minutes"):
            await member.start()
        assert now[0] >= 1800
        await member.close()

    asyncio.run(drive())


def test_requests_of_an_endpoint_that_goes_away_are_answered_by_the_others() -> None:
    async def build() -> InferenceEngine:
        return FakeEngine(fake)

    async def drive() -> None:
        restarts = RestartLimit(1, window_s=60, key="max_restarts")
        async with serve(FakeEngine(fake), max_model_len=99) as base_url:
            members = [EndpointMember(config(base_url), sleep=no_pause), LocalMember("engine 0", build, limit=1)]
            pool = EnginePool(members, restarts.count)
            await pool.start()
            assert len(await asyncio.gather(*(pool.generate([65], PARAMS) for _ in range(20)))) == 20
        answers = await asyncio.gather(*(pool.generate([65], PARAMS) for _ in range(20)))
        assert {answer[0].text for answer in answers} == {"hi"}
        await pool.close()

    asyncio.run(drive())
