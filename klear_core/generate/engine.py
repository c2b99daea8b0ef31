"""Define the interface of the engines that sample tokens, and track their open requests."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from pydantic import TypeAdapter

from klear_core.config.evaluate import SamplingConfig
from klear_core.errors import ResourceError
from klear_core.types import Completion

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Decoding settings of one request; `seed` makes its samples reproducible on the same engine.

    Log-probs are those of the distribution that a token was drawn from. With top_p = 1, top_k = 0 and
    repetition_penalty = 1 that is `log_softmax(logits / temperature)`, the same as the learner's. Otherwise it is
    renormalised after those three, and old log-probs for a policy ratio must be recomputed. Greedy (temperature 0)
    reports temperature 1, untruncated.
    """

    num_samples: int
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    max_new_tokens: int
    seed: int
    scored_ids: tuple[int, ...] = ()
    """Tokens whose log-probs are wanted in place of sampled ones, as `logps_of` asks; empty: sample."""
    num_top: int = 0
    """With `scored_ids`: how many of the likeliest tokens to tell in place of each."""

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"num_samples = {self.num_samples} and max_new_tokens = {self.max_new_tokens} must be at least 1"
            )


def one_sample(sampling: SamplingConfig, *, seed: int) -> SamplingParams:
    """Return the request for one answer with a stage's decoding settings."""
    return SamplingParams(
        num_samples=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        max_new_tokens=sampling.max_new_tokens,
        seed=seed,
    )


async def logps_of(
    engine: InferenceEngine,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    *,
    temperature: float = 1.0,
    num_top: int = 0,
) -> Completion:
    """Return an answer with the log-probs that an engine's model gives its tokens, as if it had sampled them.

    With `num_top` it also has that many of the model's likeliest tokens at each place, the likeliest first. Log-probs
    are those of `log_softmax(logits / temperature)`, as the learner's. Raise ValueError if prompt and answer do
    not fit the window (ours), or leave no room there for one more token (the others), or if the engine cannot tell
    them at this temperature: vLLM and endpoints can at 1 alone.
    """
    params = SamplingParams(
        num_samples=1,
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        max_new_tokens=len(answer_ids),
        seed=0,
        scored_ids=tuple(answer_ids),
        num_top=num_top,
    )
    # A request like others, so that pools, actors and retries treat it as they treat those.
    (completion,) = await engine.generate(prompt_ids, params)
    assert completion.token_ids == params.scored_ids, "an engine scored other tokens"
    assert len(completion.top_logps) == len(completion.top_ids) == num_top * len(params.scored_ids), "likeliest tokens"
    return completion


def check_room(num_prompt: int, params: SamplingParams, max_len: int) -> None:
    """Raise ValueError if a request leaves no room for a token."""
    num_tokens = num_prompt + len(params.scored_ids)
    if num_prompt == 0 or num_tokens >= max_len:
        raise ValueError(f"prompt of {num_tokens} tokens: 1 to {max_len - 1} leave room for an answer")


def check_logps_at_1(params: SamplingParams, engine_name: str) -> None:
    """Raise ValueError if the log-probs of given tokens are wanted at another temperature."""
    if params.scored_ids and params.temperature != 1:
        raise ValueError(f"the {engine_name} scores given tokens at temperature 1, not {params.temperature:g}")


def scored(
    params: SamplingParams,
    logps: Sequence[float],
    *,
    version: int,
    top_ids: Sequence[int] = (),
    top_logps: Sequence[float] = (),
) -> Completion:
    """Return the completion that answers a request for log-probs of given tokens. It has no text: the caller has it."""
    return Completion(
        text="",
        token_ids=params.scored_ids,
        logps=tuple(logps),
        finish_reason="length",
        policy_versions=(version,) * len(params.scored_ids),
        top_ids=tuple(top_ids),
        top_logps=tuple(top_logps),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, dtype and shape of one weight, under its Hugging Face name."""

    name: str
    dtype: str
    """The dtype's name in torch: `bfloat16`."""
    shape: tuple[int, ...]


TransferBackend = Literal["gloo", "nccl", "ipc"]
"""Between CPUs; between GPUs; between two processes on one GPU, by handles of its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOffer:
    """An offer of new weights that one engine can fetch from a learner's memory; see `weight_transfer`."""

    host: str
    port: int
    """Port of the learner's TCPStore, through which both sides form a process group."""
    key: str
    """Identifies this transfer among all that use the store."""
    engine: int
    num_ranks: int
    """Processes of the engine; each fetches all weights."""
    backend: TransferBackend
    timeout_s: float
    """Seconds that an engine waits for the learner; the learner waits half as long."""
    version: int
    tensors: tuple[TensorSpec, ...]
    """All tensors, in the order in which they are sent."""
    chunk_bytes: int


_OFFER = TypeAdapter(WeightOffer)


def dump_offer(offer: WeightOffer) -> str:
    """Serialise an offer as JSON, for calls between processes that carry only text."""
    return _OFFER.dump_json(offer).decode()


def load_offer(text: str) -> WeightOffer:
    """Parse the output of `dump_offer`."""
    return _OFFER.validate_json(text)


WeightSource = Path | Mapping[str, "Tensor"] | WeightOffer
"""New weights: a Hugging Face folder, all tensors by Hugging Face name, or an offer to fetch them from a learner."""


class InferenceEngine(Protocol):
    """Samples completions. Calls may overlap: each engine does its own batching."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Return `params.num_samples` completions of one prompt, in sample order; with `params.scored_ids` the one that
        has these tokens, with their log-probs (see `logps_of`).

        Raise ValueError if the prompt leaves no room.
        """
        ...

    async def close(self) -> None:
        """Release all resources; open requests fail."""
        ...


OnTokens = Callable[[int, tuple[int, ...]], None]
"""Gets a sample's number and its tokens so far, in any thread; slow work in it slows the sampling."""


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that tells the tokens of unfinished samples."""

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_tokens: OnTokens | None
    ) -> list[Completion]:
        """Return what `generate` does, and call `on_tokens` meanwhile."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Load of an engine since it was last asked, or of several together."""

    cache_usage: float = 0.0
    """Largest share of the KV cache that was in use."""
    num_waiting: int = 0
    """Most requests that waited for room in the cache."""
    num_preempted: int = 0
    """Requests that lost their place in the cache, and were computed again."""
    num_drafted: int = 0
    """Tokens that speculative decoding guessed."""
    num_accepted: int = 0
    """Guessed tokens that were kept."""
    tokens_per_s: tuple[float, ...] = ()
    """Tokens of finished answers a second, of each engine of a pool that has been sent a request."""

    def metrics(self, stage: str) -> dict[str, float]:
        """Return the metrics of a stage's engines."""
        found = {
            f"{stage}/engine/cache_usage": self.cache_usage,
            f"{stage}/engine/waiting": float(self.num_waiting),
            f"{stage}/engine/preempted": float(self.num_preempted),
        }
        if self.num_drafted:
            found[f"{stage}/engine/accepted_frac"] = self.num_accepted / self.num_drafted
        if self.tokens_per_s:
            found[f"{stage}/engine/tokens_per_s"] = statistics.median(self.tokens_per_s)
            found[f"{stage}/engine/least_tokens_per_s"] = min(self.tokens_per_s)
        return found


def combined(stats: Sequence[EngineStats | None]) -> EngineStats | None:
    """Return the load of several engines together: the fullest cache, and sums; None if none of them told any."""
    told = [one for one in stats if one is not None]
    if not told:
        return None
    return EngineStats(
        cache_usage=max(one.cache_usage for one in told),
        num_waiting=sum(one.num_waiting for one in told),
        num_preempted=sum(one.num_preempted for one in told),
        num_drafted=sum(one.num_drafted for one in told),
        num_accepted=sum(one.num_accepted for one in told),
    )


_AVERAGE_OVER = 20  # answers
_FEWEST_ANSWERS = 4  # before an engine is compared with others


@dataclass(slots=True)
class Pace:
    """Seconds that an engine's last answers took for each of their tokens.

    All their seconds over all their tokens: a short answer that waited for room in a full cache says little.
    """

    mean_seconds: float = 0.0
    mean_tokens: float = 0.0
    """Averages over its last answers."""
    num_answers: int = 0
    num_tokens: int = 0
    """Tokens of all answers since `since`."""
    since: float | None = None
    """Time of the first request, or of the last call of `rate`; None before a request."""

    def begin(self, at: float) -> None:
        """Count the time from now on, if this is the first request."""
        if self.since is None:
            self.since = at

    def add(self, seconds: float, num_tokens: int) -> None:
        """Count an answer."""
        self.num_answers += 1
        self.num_tokens += num_tokens
        weight = 1 / min(self.num_answers, _AVERAGE_OVER)
        self.mean_seconds += weight * (seconds - self.mean_seconds)
        self.mean_tokens += weight * (num_tokens - self.mean_tokens)

    def rate(self, at: float) -> float:
        """Return the tokens a second since the last call, or the first request."""
        assert self.since is not None, "an engine without a request has no rate"
        rate, self.num_tokens, self.since = self.num_tokens / max(1e-9, at - self.since), 0, at
        return rate

    @property
    def seconds_per_token(self) -> float:
        """Return the seconds for a token of its last answers."""
        return self.mean_seconds / max(1.0, self.mean_tokens)

    @property
    def is_known(self) -> bool:
        """Return whether there were enough answers to compare it with others."""
        return self.num_answers >= _FEWEST_ANSWERS


@runtime_checkable
class MeasuredEngine(Protocol):
    """An engine that may report how full it is; `engine_stats` asks any engine."""

    cache_tokens: int | None
    """Tokens that its KV cache has room for; None if that is not known, or grows."""

    async def stats(self) -> EngineStats | None:
        """Return the load since the last call; None if it is not known."""
        ...


_CACHE_USED = 0.9
"""Share of the cache that requests fill on average: when long answers come together, it overflows."""
_MEAN_IN_FLIGHT = 0.27
"""Mean length of the answers in flight, as a share of the longest, with the lengths that a plan assumes
(`klear_core.pipeline.costs.throughput`): long ones are in flight more often, and half done on average."""


def limit_of(engine: object, limit: int, answer_tokens: int | None) -> int:
    """Return `limit`, or the requests that an engine's cache has room for if they are fewer.

    More would be preempted and computed again, which no score shows. `answer_tokens` is the longest answer, if known.
    """
    cache_tokens = engine.cache_tokens if isinstance(engine, MeasuredEngine) else None
    if cache_tokens is None or answer_tokens is None:
        return limit
    return max(1, min(limit, int(_CACHE_USED * cache_tokens / (_MEAN_IN_FLIGHT * answer_tokens))))


async def engine_stats(engine: object) -> EngineStats | None:
    """Return an engine's load since the last call; None of one that reports none."""
    return await engine.stats() if isinstance(engine, MeasuredEngine) else None


class PooledEngine(InferenceEngine, Protocol):
    """One engine of a pool. A ResourceError of `generate` says that it can do nothing more until it is started."""

    name: str
    """Name for messages: `engine 3`."""

    @property
    def limit(self) -> int:
        """Return the number of requests to send it at a time; it may change."""
        ...

    @property
    def is_queued(self) -> bool:
        """Return whether its start waits for GPUs that other work holds."""
        ...

    async def start(self) -> None:
        """Start the engine, or another in place of one that died or was closed. EngineLost if it dies meanwhile."""
        ...


class TrainableEngine(InferenceEngine, Protocol):
    """An engine whose weights can be replaced by those of the policy under training."""

    version: int

    async def load_weights(self, weights: WeightSource, *, version: int) -> None:
        """Use these weights from the next token on, and drop all cached prefixes of the old ones."""
        ...


@runtime_checkable
class SeparateEngine(TrainableEngine, Protocol):
    """An engine with processes of its own, each of which fetches the weights."""

    async def digest_offered(self, offer: WeightOffer) -> list[str]:
        """Fetch offered tensors without loading them; return a digest of what each process received."""
        ...


@runtime_checkable
class SleepingEngine(TrainableEngine, Protocol):
    """An engine that can release its GPU memory to a learner while it has no requests."""

    async def sleep(self) -> None:
        """Release the GPU memory. No request may run or start until `wake`."""
        ...

    async def wake(self) -> None:
        """Take the memory back, with the weights from before `sleep` unless they were dropped. No effect if awake."""
        ...


# ---- requests ----
# Track the open requests of an engine that runs on an event loop; fail them when it closes or falls silent.


SILENCE_S = 600.0
"""Longest wait for the answer to a ping, as for an engine's actor in Ray. A working engine answers between two of its
steps, and the longest of them, a load of new weights, is given up after 300 s."""
_PAUSE = 0.1
"""Pause before each ping as a share of that wait: a minute, so that short requests cause no pings."""


class OpenRequests:
    """The open requests of an engine; `close` cancels them and refuses new ones."""

    def __init__(
        self,
        engine_name: str,
        *,
        ping: Callable[[], Awaitable[object]] | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`ping` returns once the engine's process answers; an engine without a process of its own needs none.

        If an answer takes longer than `silence_s`, open and later requests fail with ResourceError.
        """
        self._engine_name = engine_name
        self._ping, self._silence_s = ping, silence_s
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watch: asyncio.Task[None] | None = None
        """Runs only while requests are open. Between them the event loop may stand still, as in a chat while its user
        thinks, and a ping would then look unanswered."""
        self._end = ""
        """What ended the engine, in words; empty while it serves."""

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raise ResourceError if the engine is closed or falls silent before that."""
        if self._end:
            work.close()  # or Python warns that the coroutine was never awaited
            raise ResourceError(f"the {self._engine_name} {self._end}")
        task = asyncio.create_task(work)
        self._tasks.add(task)
        if self._ping is not None and self._watch is None:
            self._watch = asyncio.create_task(self._watch_pings(self._ping))
        try:
            return await task
        except asyncio.CancelledError:
            # a cancelled caller and an ended engine both arrive here; only the second is a ResourceError
            if self._end and task.cancelled():
                raise ResourceError(f"the {self._engine_name} {self._end}") from None
            raise
        finally:
            self._tasks.discard(task)
            if self._watch is not None and not self._tasks:
                self._watch.cancel()
                self._watch = None

    def close(self) -> None:
        """Fail all open requests and all later ones."""
        self._fail("was closed")

    async def _watch_pings(self, ping: Callable[[], Awaitable[object]]) -> None:
        try:
            while True:
                await asyncio.sleep(_PAUSE * self._silence_s)
                await asyncio.wait_for(ping(), self._silence_s)
        except TimeoutError:
            self._fail(f"gave no sign of life for {self._silence_s:g} s")

    def _fail(self, end: str) -> None:
        self._end = self._end or end
        for task in self._tasks:
            task.cancel()
