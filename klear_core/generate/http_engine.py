"""Sample from an OpenAI-compatible completions endpoint that takes and returns token ids (vLLM: `return_token_ids`).

Log-probs follow the endpoint's own setting. Start vLLM with `--logprobs-mode processed_logprobs`, so that they include
the temperature like those of the other engines. Its default leaves the temperature out, and no reply says which mode is
on.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import httpx
from pydantic import BaseModel, ValidationError

from klear_core.config.evaluate import HttpEngineConfig
from klear_core.errors import ConfigError, ResourceError
from klear_core.generate.engine import OpenRequests, SamplingParams, check_logps_at_1, check_room, scored
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


class _PromptLogProb(BaseModel):
    logprob: float


class _ScoredChoice(BaseModel):
    prompt_logprobs: list[dict[int, _PromptLogProb] | None]
    """Of each token of the prompt, by token id; none of the first."""


class _LogpsReply(BaseModel):
    choices: list[_ScoredChoice]


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
        check_logps_at_1(params, "endpoint")
        if params.scored_ids:
            return [await self._open.run(self._logps_of_given(list(prompt_ids), params))]
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
        budget = min(params.max_new_tokens, await self._room(len(prompt_ids), params))
        tasks = [
            asyncio.create_task(self._sample(prompt_ids, params, sample_idx=i, budget=budget))
            for i in range(params.num_samples)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one failed, nobody reads the others
                task.cancel()

    async def _room(self, prompt_len: int, params: SamplingParams) -> int:
        """Return the most tokens to ask for: vLLM refuses a budget beyond its window."""
        max_len = (await self._served_model()).max_model_len or sys.maxsize
        check_room(prompt_len, params, max_len)
        return max_len - prompt_len

    async def _logps_of_given(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        """Return the given tokens with log-probs: they are part of the prompt, of which vLLM's server tells these."""
        await self._room(len(prompt_ids), params)
        token_ids = [*prompt_ids, *params.scored_ids]
        body: dict[str, object] = {
            "model": self._cfg.model,
            "prompt": token_ids,
            "max_tokens": 1,  # it samples at least one
            "temperature": 1.0,
            "prompt_logprobs": params.num_top,  # beside those of the tokens that are there
        }
        content = await self._request("POST", "completions", body)
        try:
            (choice,) = _LogpsReply.model_validate_json(content).choices
            told = choice.prompt_logprobs[len(prompt_ids) :]
            logps = [(of_place or {})[token].logprob for token, of_place in zip(params.scored_ids, told, strict=True)]
            # A token that is there and not among the likeliest is less likely than they are: it comes last.
            tops = []
            for of_place in told:
                found = sorted((of_place or {}).items(), key=lambda item: -item[1].logprob)
                tops += [(token, entry.logprob) for token, entry in found[: params.num_top]]
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"{self._cfg.base_url}/completions does not answer with the log-probs of its prompt, as vLLM does "
                f"(prompt_logprobs): it cannot score given tokens ({type(error).__name__})"
            ) from error
        self._slots.count(len(token_ids))
        top_ids, top_logps = [token for token, _ in tops], [logp for _, logp in tops]
        return scored(params, logps, version=0, top_ids=top_ids, top_logps=top_logps)

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
            "min_p": 0.0,  # or vLLM takes that of the model's generation_config.json
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


# ---- concurrency ----
# Find the number of concurrent requests at which an endpoint gives the most tokens per second.


_MIN_GAIN = 0.1
"""Gain in throughput that a changed limit must bring to be kept, as a share of the relative change."""
_STEP = 1 / 8
"""Growth of the limit when probing, once doubling has ended."""
_CUT = 0.7
"""Factor on the limit after a refusal, unless the endpoint demonstrably serves more."""
_FIRST_HOLD, _LONGEST_HOLD = 2, 32
"""Windows between two probes: twice as many after every probe that failed."""


class ConcurrencyLimit:
    """Grows the limit window by window while throughput grows with it, and cuts it when the server refuses.

    It doubles until the first refusal or the first window without a gain. Afterwards it tries an eighth more and an
    eighth less in turn, and keeps what gives more tokens per second. After a refusal the limit is the number of
    requests that the server was serving, which it has just shown that it can serve.
    """

    def __init__(self, *, minimum: int, maximum: int, window_s: float, now: float) -> None:
        self.value = minimum
        self._minimum, self._maximum, self._window_s = minimum, maximum, window_s
        self._is_doubling = True
        self._direction = 1
        """1 if the next probe is a higher limit, -1 if it is a lower one."""
        self._best: tuple[int, float] | None = None
        """Limit and tokens per second of the last window that is to be beaten."""
        self._is_new = False
        """Whether the limit was just changed: the first window after that counts a burst of first tokens."""
        self._hold, self._next_hold = 0, _FIRST_HOLD
        self._cut_at = float("-inf")
        self._start_window(now)

    def restart(self, now: float) -> None:
        """Begin again at the minimum: the server was away, and comes back with nothing to do."""
        self.value, self._is_doubling, self._direction, self._best = self._minimum, True, 1, None
        self._cut_at = now  # refusals of requests sent before say nothing about the server that is back
        self._start_window(now)

    def count_tokens(self, num_tokens: int) -> None:
        """Count tokens that arrived."""
        self._num_tokens += num_tokens

    def is_window_over(self, now: float) -> bool:
        """Return whether the current window has lasted long enough for `end_window`."""
        return now - self._started >= self._window_s

    def refuse(self, *, num_served: int, sent_at: float, now: float) -> None:
        """Cut the limit after a refusal, while the server serves `num_served` other requests.

        Requests sent before the last cut say nothing about the present limit.
        """
        if sent_at <= self._cut_at:
            return
        self._cut_at = now
        lower = max(num_served, int(self.value * _CUT))
        self._set(min(lower, self.value - 1))  # at least one less, whatever it serves
        self._give_up_probe()
        self._start_window(now)

    def end_window(self, now: float, *, is_full: bool, is_settled: bool) -> None:
        """Choose the limit of the next window.

        `is_full` says that requests waited for the limit, `is_settled` that nearly all have their first token. Windows
        of which either is false measure something else, and are not compared.
        """
        rate = self._num_tokens / (now - self._started)
        self._start_window(now)
        # Too few requests to reach the limit: this rate measures the demand, and the one to beat is of another demand.
        if not is_full:
            self._best = None
            return
        if not is_settled:
            return
        if self._is_new:
            self._is_new = False
            return
        if self._hold > 0:
            self._hold -= 1
            return
        if self._best is not None and self.value != self._best[0]:
            best_value, best_rate = self._best
            change = abs(self.value / best_value - 1)
            # The same bar for a lower limit: it is kept only if it gives more, not if it gives as much.
            if rate < best_rate * (1 + _MIN_GAIN * change):
                self._set(best_value)
                self._direction = -self._direction
                self._give_up_probe()
                return
            self._next_hold = _FIRST_HOLD  # a probe that succeeded: the next failure is followed by a short pause again
        self._best = (self.value, rate)
        step = self.value if self._is_doubling else max(1, round(self.value * _STEP))
        self._set(self.value + self._direction * step)
        if self.value == self._best[0]:
            # At a bound. The next probe is an eighth less, not the double step, which would fall to the minimum.
            self._direction, self._is_doubling = -self._direction, False

    def _give_up_probe(self) -> None:
        self._is_doubling, self._best = False, None
        self._hold = self._next_hold
        self._next_hold = min(2 * self._next_hold, _LONGEST_HOLD)

    def _set(self, value: int) -> None:
        before = self.value
        self.value = max(self._minimum, min(value, self._maximum))
        self._is_new = self.value != before

    def _start_window(self, now: float) -> None:
        self._started, self._num_tokens = now, 0


class AdaptiveSlots:
    """Slots for requests to one endpoint whose replies are not streamed; their number follows its throughput."""

    def __init__(
        self, *, minimum: int, maximum: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        # The user's maximum may be below the usual first limit.
        self._limit = ConcurrencyLimit(minimum=min(minimum, maximum), maximum=maximum, window_s=window_s, now=clock())
        self._num_open = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._replies_in_window = 0
        self._is_full = False
        """Whether all slots were taken when the last one was given back."""

    @property
    def limit(self) -> int:
        """Return the present number of slots."""
        return self._limit.value

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[float]:
        """Wait for a slot, first come, first served, and hold it during the block; yield the time it was taken."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was this request's turn when its caller was cancelled
                self._num_open -= 1
            self._admit()
            raise
        try:
            yield self._clock()
        finally:
            self._is_full = self._num_open >= self._limit.value
            self._num_open -= 1
            self._admit()

    def count(self, num_tokens: int) -> None:
        """Count a whole reply, and adapt the limit once a window is over that had a round of them."""
        self._limit.count_tokens(num_tokens)
        self._replies_in_window += 1
        now = self._clock()
        if self._limit.is_window_over(now) and self._replies_in_window >= self._limit.value:
            self._replies_in_window = 0
            # Above a limit that was lowered, the window measures the old one.
            is_within = self._num_open <= self._limit.value
            self._limit.end_window(now, is_full=self._is_full or bool(self._waiting), is_settled=is_within)
            self._admit()

    def refuse(self, *, sent_at: float) -> None:
        """Lower the limit: the endpoint has refused a request that took its slot at this time."""
        # Without a stream it is unknown how many of the open requests it has begun to serve.
        self._limit.refuse(num_served=0, sent_at=sent_at, now=self._clock())
        self._replies_in_window = 0

    def _admit(self) -> None:
        while self._waiting and self._num_open < self._limit.value:
            turn = self._waiting.popleft()
            if not turn.cancelled():  # else its caller was cancelled while it waited
                self._num_open += 1
                turn.set_result(None)
