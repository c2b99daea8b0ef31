"""Sample from an OpenAI-compatible completions endpoint that takes and returns token ids (vLLM: `return_token_ids`).

Log-probs follow the endpoint's own setting. Start vLLM with `--logprobs-mode processed_logprobs`, so that they include
the temperature like those of the other engines. Its default leaves the temperature out, and no reply says which mode is
on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence

import httpx
from pydantic import BaseModel, ValidationError

from klear_core.config.engine import HttpEngineConfig
from klear_core.errors import ConfigError, ResourceError
from klear_core.generate.concurrency import AdaptiveSlots
from klear_core.generate.engine import SamplingParams
from klear_core.generate.requests import OpenRequests
from klear_core.seeding import seed_for
from klear_core.types import Completion, FinishReason

FIRST_PAUSE_S = 0.5
"""Seconds before the first retry; doubles with each, up to LONGEST_PAUSE_S, unless the endpoint sends Retry-After."""
LONGEST_PAUSE_S = 30.0
BUSY_STATUSES = frozenset({408, 409, 429, 500, 502, 503, 504})
"""Statuses that are retried; every other status above 399 is final."""
REFUSALS = frozenset({429, 503})
"""Statuses by which a server says that it has too many requests."""
FIRST_CONCURRENCY = 8
"""Concurrent requests at the start, as to a teacher; see `HttpRuntime.max_concurrency`."""


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None
    """Sent by vLLM; other servers may leave it out."""


class _Models(BaseModel):
    data: list[_Model]


class _LogProbs(BaseModel):
    token_logprobs: list[float]


class _Choice(BaseModel):
    text: str
    token_ids: list[int]
    logprobs: _LogProbs
    finish_reason: FinishReason


class _Reply(BaseModel):
    choices: list[_Choice]


class HttpEngine:
    """An `InferenceEngine` over HTTP. Klear does not set the endpoint's weights: all tokens have version 0.

    Each sample is a separate request with its own seed, so that a retry repeats no other sample.
    """

    def __init__(
        self,
        cfg: HttpEngineConfig,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._cfg, self._sleep = cfg, sleep
        self._client = httpx.AsyncClient(
            base_url=cfg.base_url.rstrip("/") + "/",
            headers=_headers(cfg),
            timeout=cfg.runtime.timeout_s,
            transport=transport,
        )
        self._slots = AdaptiveSlots(
            minimum=FIRST_CONCURRENCY, maximum=cfg.runtime.max_concurrency, window_s=cfg.runtime.probe_s
        )
        self._model_lock = asyncio.Lock()
        self._model: _Model | None = None
        self._open = OpenRequests("HTTP engine")

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Return `params.num_samples` completions, in sample order.

        Raise ValueError if the endpoint finds no room for the prompt, ConfigError if it refuses the request or gives no
        token ids, ResourceError if it stays busy or unreachable through all retries.
        """
        return await self._open.run(self._samples(list(prompt_ids), params))

    @property
    def limit(self) -> int:
        """Return the number of requests that the endpoint is sent at a time at present."""
        return self._slots.limit

    async def check(self) -> None:
        """Ask the endpoint for its models. Raise ResourceError if it does not answer, ConfigError if it lacks ours."""
        await self._served_model()

    async def close(self) -> None:
        """Close all connections; open requests fail."""
        self._open.close()
        await self._client.aclose()

    async def _samples(self, prompt_ids: list[int], params: SamplingParams) -> list[Completion]:
        budget = await self._budget(len(prompt_ids), params)
        tasks = [
            asyncio.create_task(self._sample(prompt_ids, params, sample_idx=i, budget=budget))
            for i in range(params.num_samples)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one failed, nobody reads the others
                task.cancel()

    async def _budget(self, prompt_len: int, params: SamplingParams) -> int:
        max_len = (await self._served_model()).max_model_len
        if prompt_len == 0 or (max_len is not None and prompt_len >= max_len):
            raise ValueError(
                f"prompt of {prompt_len} tokens: 1 to {(max_len or 0) - 1} leave room "
                f"for an answer of {self._cfg.model}"
            )
        if max_len is None:
            return params.max_new_tokens
        return min(params.max_new_tokens, max_len - prompt_len)  # vLLM refuses a budget beyond its window

    async def _served_model(self) -> _Model:
        async with self._model_lock:  # ask the endpoint once, however many requests start together
            if self._model is None:
                served = self._models(await self._request("GET", "models", None))
                names = [model.id for model in served]
                if self._cfg.model not in names:
                    raise ConfigError(f"model = {self._cfg.model!r} is not served at {self._cfg.base_url}: {names} are")
                self._model = served[names.index(self._cfg.model)]
        return self._model

    async def _sample(
        self, prompt_ids: list[int], params: SamplingParams, *, sample_idx: int, budget: int
    ) -> Completion:
        body: dict[str, object] = {
            "model": self._cfg.model,
            "prompt": prompt_ids,
            "max_tokens": budget,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "repetition_penalty": params.repetition_penalty,
            "seed": seed_for(params.seed, "generate/sample", sample_idx),  # label and index as in the other engines
            "logprobs": 0,  # only that of the sampled token
            "return_token_ids": True,  # encoding the text again could give other tokens
            "skip_special_tokens": False,  # think tags may be special tokens
            "spaces_between_special_tokens": False,
        }
        content = await self._request("POST", "completions", body)
        choice = self._only_choice(content)
        token_ids, logps = tuple(choice.token_ids), tuple(choice.logprobs.token_logprobs)
        self._slots.count(len(token_ids))  # throughput by which the number of slots is chosen
        if len(token_ids) != len(logps):
            raise ConfigError(
                f"{self._cfg.base_url}/completions gave {len(token_ids)} token ids and {len(logps)} log-probs"
            )
        return Completion(
            text=choice.text,
            token_ids=token_ids,
            logps=logps,
            finish_reason=choice.finish_reason,
            policy_versions=(0,) * len(token_ids),
        )

    def _models(self, content: bytes) -> list[_Model]:
        try:
            return _Models.model_validate_json(content).data
        except ValidationError as error:
            raise ConfigError(f"{self._cfg.base_url}/models does not list models: {error}") from error

    def _only_choice(self, content: bytes) -> _Choice:
        """Return the answer in a reply. ConfigError, because a ValueError would blame the prompt."""
        try:
            choices = _Reply.model_validate_json(content).choices
        except ValidationError as error:
            raise ConfigError(
                f"{self._cfg.base_url}/completions does not answer with token ids and log-probs: {error}"
            ) from error
        if len(choices) != 1:
            raise ConfigError(f"{self._cfg.base_url}/completions gave {len(choices)} answers to a request for one")
        return choices[0]

    async def _send(self, method: str, path: str, body: dict[str, object] | None) -> httpx.Response:
        """Return the response to one try, made in a slot; a server that is too busy lowers their number."""
        async with self._slots.slot() as sent_at:
            try:
                response = await self._client.request(method, path, json=body)
            except httpx.TimeoutException:  # too busy to answer in time
                self._slots.refuse(sent_at=sent_at)
                raise
        if response.status_code in REFUSALS:
            self._slots.refuse(sent_at=sent_at)
        return response

    async def _request(self, method: str, path: str, body: dict[str, object] | None) -> bytes:
        """Return the reply's body, after as many tries as the config allows."""
        last_error = ""
        for attempt in range(self._cfg.runtime.max_retries + 1):
            pause_s = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S)
            try:
                response = await self._send(method, path, body)  # the pause before a retry holds no slot
            except httpx.TransportError as error:
                last_error = f"{type(error).__name__}: {error}"
            else:
                if response.is_success:
                    return response.content
                last_error = f"HTTP {response.status_code}: {response.text[:500]}"
                if response.status_code not in BUSY_STATUSES:
                    raise _final_error(response.status_code, f"{response.url}: {last_error}")
                pause_s = _requested_pause_s(response) or pause_s  # `Retry-After: 0` pauses as usual
            if attempt < self._cfg.runtime.max_retries:
                await self._sleep(pause_s)
        raise ResourceError(
            f"{self._cfg.base_url}/{path} failed {self._cfg.runtime.max_retries + 1} times; the last: {last_error}"
        )


def _headers(cfg: HttpEngineConfig) -> dict[str, str]:
    if not cfg.api_key_env:
        return {}
    key = os.environ.get(cfg.api_key_env, "")
    if not key:
        raise ConfigError(f"api_key_env = {cfg.api_key_env!r}: this environment variable is not set")
    return {"Authorization": f"Bearer {key}"}


def _final_error(status: int, message: str) -> ValueError:
    if status in (400, 413, 422):  # our fields are well-formed, so the prompt is at fault
        return ValueError(message)
    return ConfigError(message)


def _requested_pause_s(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after", "")  # seconds, or a date, which is ignored
    return min(float(text), LONGEST_PAUSE_S) if text.isdigit() else None
