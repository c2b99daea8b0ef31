import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable

import httpx
import pytest
from completions_endpoint import MODEL, choice
from pydantic import ValidationError

from klear_core.config.evaluate import HttpEngineConfig, HttpRuntime
from klear_core.errors import ConfigError, ResourceError
from klear_core.generate.engine import SamplingParams, logps_of
from klear_core.generate.http_engine import HttpEngine
from klear_core.seeding import seed_for

PARAMS = SamplingParams(
    num_samples=2, temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05, max_new_tokens=10, seed=3
)
MODELS = {"data": [{"id": "other"}, {"id": MODEL, "max_model_len": 12}]}
ANSWER = {"choices": [choice("hi", (104, 105, 258), (-0.1, -0.2, -0.3), "stop")]}
Reply = tuple[int, object] | Exception


def run(
    replies: Callable[[int, dict[str, object]], Reply],
    body: Callable[[HttpEngine], Awaitable[None]],
    **settings: object,
) -> list[float]:
    """Let `body` use an engine whose n-th completion request gets `replies(n, request)`; the pauses it took."""
    count, pauses = iter(range(1_000)), []

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json=MODELS)
        reply = replies(next(count), json.loads(request.content))
        if isinstance(reply, Exception):
            raise reply
        await asyncio.sleep(0)
        return httpx.Response(reply[0], json=reply[1], headers={"retry-after": "7"} if reply[0] == 429 else {})

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def main() -> None:
        cfg = HttpEngineConfig.model_validate({"base_url": "http://endpoint/v1", "model": MODEL} | settings)
        engine = HttpEngine(cfg, transport=httpx.MockTransport(handle), sleep=pause)
        await body(engine)
        await engine.close()

    asyncio.run(main())
    return pauses


def test_every_sample_is_a_request_with_its_own_seed_and_the_whole_decoding_profile() -> None:
    asked: list[dict[str, object]] = []

    def replies(_count: int, request: dict[str, object]) -> Reply:
        asked.append(request)
        return 200, ANSWER

    async def body(engine: HttpEngine) -> None:
        completions = await engine.generate([1, 2, 3], PARAMS)
        assert [c.token_ids for c in completions] == [(104, 105, 258)] * 2
        assert completions[0].logps == (-0.1, -0.2, -0.3)
        assert completions[0].text == "hi"
        assert completions[0].finish_reason == "stop"

    run(replies, body)
    assert {int(str(request["seed"])) for request in asked} == {seed_for(3, "generate/sample", i) for i in range(2)}
    common = {k: v for k, v in asked[0].items() if k != "seed"}
    assert common == {
        "model": MODEL,
        "prompt": [1, 2, 3],
        "max_tokens": 9,  # the window of 12 leaves no more
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,  # a setting of the model's own would be another decoding
        "repetition_penalty": 1.05,
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }


def test_busy_and_broken_connections_are_tried_again_with_growing_pauses() -> None:
    troubles: list[Reply] = [(503, {}), httpx.ConnectError("refused"), (429, {}), (500, {}), (200, ANSWER)]

    async def body(engine: HttpEngine) -> None:
        assert len(await engine.generate([1], dataclasses.replace(PARAMS, num_samples=1))) == 1

    assert run(lambda n, _: troubles[n], body) == [0.5, 1.0, 7.0, 4.0]  # 7 is what the endpoint asked for


def test_retries_end() -> None:
    async def body(engine: HttpEngine) -> None:
        with pytest.raises(ResourceError, match=r"failed 3 times; the last: HTTP 503"):
            await engine.generate([1], PARAMS)

    run(lambda _n, _request: (503, {}), body, runtime=HttpRuntime(max_retries=2))


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, ValueError), (401, ConfigError), (403, ConfigError), (404, ConfigError), (422, ValueError)],
)
def test_refusals_are_final(status: int, kind: type[Exception]) -> None:
    async def body(engine: HttpEngine) -> None:
        with pytest.raises(kind, match=f"HTTP {status}"):
            await engine.generate([1], PARAMS)

    assert run(lambda _n, _request: (status, {"error": "no"}), body) == []


def test_an_endpoint_without_token_ids_or_logps_is_named_as_such() -> None:
    without_ids = {"choices": [ANSWER["choices"][0] | {"token_ids": None}]}
    fewer_logps = {"choices": [choice("hi", (1, 2), (-0.1,), "stop")]}

    async def body(engine: HttpEngine) -> None:
        with pytest.raises(ConfigError, match="token ids"):
            await engine.generate([1], PARAMS)

    for answer in (without_ids, fewer_logps):
        run(lambda _n, _request, answer=answer: (200, answer), body)


@pytest.mark.parametrize("count", [0, 2])
def test_an_endpoint_with_another_number_of_answers_is_named_and_not_taken_for_a_prompt_without_room(
    count: int,
) -> None:
    async def body(engine: HttpEngine) -> None:
        with pytest.raises(ConfigError, match=rf"/completions gave {count} answers to a request for one"):
            await engine.generate([1], PARAMS)

    run(lambda _n, _request: (200, {"choices": ANSWER["choices"] * count}), body)


def test_an_endpoint_whose_list_of_models_cannot_be_read_is_named() -> None:
    async def main() -> None:
        cfg = HttpEngineConfig(base_url="http://endpoint/v1", model=MODEL)
        transport = httpx.MockTransport(lambda _request: httpx.Response(200, text="<html>sign in</html>"))
        engine = HttpEngine(cfg, transport=transport)
        with pytest.raises(ConfigError, match="http://endpoint/v1/models does not list models"):
            await engine.check()
        await engine.close()

    asyncio.run(main())


def test_a_model_that_is_not_served_is_a_config_error() -> None:
    async def body(engine: HttpEngine) -> None:
        with pytest.raises(ConfigError, match=r"'absent' is not served .* \['other', 'tiny'\]"):
            await engine.generate([1], PARAMS)

    run(lambda _n, _request: (200, ANSWER), body, model="absent")


def test_no_more_requests_are_under_way_than_allowed() -> None:
    under_way, most = 0, 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(5):
            await asyncio.sleep(0)
        under_way -= 1
        return httpx.Response(200, json=MODELS if request.url.path.endswith("/models") else ANSWER)

    async def main() -> None:
        cfg = HttpEngineConfig(base_url="http://endpoint/v1/", model=MODEL, runtime=HttpRuntime(max_concurrency=3))
        engine = HttpEngine(cfg, transport=httpx.MockTransport(handle))
        await asyncio.gather(*(engine.generate([1], PARAMS) for _ in range(10)))
        await engine.close()

    asyncio.run(main())
    assert most == 3


@pytest.mark.parametrize(
    "url", ["localhost:8000/v1", "http://host:PORT/v1", "http://host:80000/v1", "http://me:k@h/v1"]
)
def test_an_address_that_is_none_is_refused_with_the_settings(url: str) -> None:
    with pytest.raises(ValidationError, match="base_url"):
        HttpEngineConfig(base_url=url, model=MODEL)


def test_the_key_comes_from_the_named_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json=MODELS if request.url.path.endswith("/models") else ANSWER)

    async def main() -> None:
        cfg = HttpEngineConfig(base_url="http://endpoint/v1", model=MODEL, api_key_env="KLEAR_TEST_KEY")
        engine = HttpEngine(cfg, transport=httpx.MockTransport(handle))
        await engine.generate([1], PARAMS)
        await engine.close()

    with pytest.raises(ConfigError, match="KLEAR_TEST_KEY"):
        asyncio.run(main())
    monkeypatch.setenv("KLEAR_TEST_KEY", "abc")
    asyncio.run(main())
    assert set(seen) == {"Bearer abc"}


def test_an_endpoint_without_log_probs_of_its_prompt_cannot_score() -> None:
    async def body(engine: HttpEngine) -> None:
        with pytest.raises(ConfigError, match="cannot score given tokens"):
            await logps_of(engine, [1, 2], [3])
        with pytest.raises(ValueError, match="scores given tokens at temperature 1"):
            await logps_of(engine, [1, 2], [3], temperature=0.5)

    for answer in (ANSWER, {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": -1}}, {"4": {"logprob": -1}}]}]}):
        run(lambda _n, _request, answer=answer: (200, answer), body)
