"""Start the engines of a stage: the one of a config, or a pool of engines and endpoints."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from klear_core.config.evaluate import (
    MAX_BATCH_SIZE,
    EngineConfig,
    EnginesRuntime,
    HttpEngineConfig,
    LocalEngineConfig,
    PoolRuntime,
    TorchEngineConfig,
    VllmEngineConfig,
)
from klear_core.errors import ResourceError
from klear_core.generate.engine import InferenceEngine, PooledEngine, SamplingParams, TrainableEngine, limit_of
from klear_core.generate.http_engine import HttpEngine
from klear_core.generate.pool import EngineLost, EnginePool
from klear_core.types import Completion

if TYPE_CHECKING:
    from klear_core.artifacts.remote_paths import RemotePaths

log = logging.getLogger(__name__)

_QUEUE_MARGIN = 1.25
"""Requests sent to an engine per request that it can decode at a time, so that its batch never waits for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Inputs of `build_engine`, for a process that builds the engine elsewhere."""

    cfg: LocalEngineConfig
    model_folder: Path
    num_threads: int
    seed: int
    window: int | None = None
    artifact: Path | None = None
    """The model's artifact, from which a node with another disk gets the folder; None if the folder is in none."""
    remote: RemotePaths | None = None
    answer_tokens: int | None = None
    """Most tokens of an answer, by which an engine gets no more requests than its cache has room for; None: not known,
    which leaves its batch size as the only limit."""
    is_sent: bool = False
    """Whether the folder belongs to no artifact but has a copy in the store, which `fetch_folder` finds."""

    @classmethod
    def of_model(
        cls, cfg: LocalEngineConfig, model: Path, *, num_threads: int, seed: int, workdir: Path, answer_tokens: int
    ) -> EngineSpec:
        """Return the inputs for a model artifact or a Hugging Face folder, in a stage that works in this folder."""
        from klear_core.artifacts.remote_paths import remote_paths_of
        from klear_core.train.base_model import model_folder, wanted_window

        folder = model_folder(model)
        return cls(
            cfg=cfg,
            model_folder=folder,
            num_threads=num_threads,
            seed=seed,
            window=wanted_window(model),
            artifact=None if folder == model else model,
            remote=remote_paths_of(workdir),
            answer_tokens=answer_tokens,
        )

    def on_this_node(self) -> EngineSpec:
        """Return the inputs with this node's own folder of the model."""
        if self.remote is None:
            return self
        if self.is_sent:
            from klear_core.train.checkpoint_files import fetch_folder

            folder = self.remote.local_path(self.model_folder.parent) / self.model_folder.name
            fetch_folder(folder)
            return replace(self, model_folder=folder)
        if self.artifact is None:
            return self
        from klear_core.train.base_model import model_folder

        return replace(self, model_folder=model_folder(self.remote.local_path(self.artifact)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """An engine, or a pool of them as one."""

    engine: InferenceEngine
    limit: int
    """Requests to send it at a time."""
    num_engines: int = 1


StartSampler = Callable[[EngineSpec], Awaitable[Sampler]]
"""Starts what a stage samples with: an engine in this process, or a pool of several in others."""


def num_slots(cfg: LocalEngineConfig, *, is_on_gpu: bool) -> int:
    """Return the number of requests to send an engine at a time: a full batch, and some that wait for room in it."""
    match cfg:
        case TorchEngineConfig():
            batch_size = cfg.runtime.max_batch_size or MAX_BATCH_SIZE["cuda" if is_on_gpu else "cpu"]
        case VllmEngineConfig():
            batch_size = cfg.runtime.max_num_seqs
        case _:
            assert_never(cfg)
    return math.ceil(batch_size * _QUEUE_MARGIN)


@asynccontextmanager
async def running(start_sampler: StartSampler, spec: EngineSpec) -> AsyncIterator[Sampler]:
    """Start a stage's sampler for the block, and close it afterwards."""
    sampler = await start_sampler(spec)
    try:
        yield sampler
    finally:
        await sampler.engine.close()


async def start_here(spec: EngineSpec) -> Sampler:
    """Build one engine in this process; see `build_engine`."""
    engine = await build_spec(spec)
    return Sampler(engine=engine, limit=limit_of(engine, limit_here(spec), spec.answer_tokens))


def limit_here(spec: EngineSpec) -> int:
    """Return the number of requests to send at a time to this engine in this process; see `num_slots`."""
    is_on_gpu = True  # also of vLLM on a CPU: the number of its slots does not depend on it
    if isinstance(spec.cfg, TorchEngineConfig):
        from klear_core.generate.decoder.torch_engine import device_name

        is_on_gpu = device_name(spec.cfg) == "cuda"
    return num_slots(spec.cfg, is_on_gpu=is_on_gpu)


async def build_spec(spec: EngineSpec) -> InferenceEngine:
    """Build the engine in this process; see `build_engine`."""
    return await build_engine(
        spec.cfg, spec.model_folder, num_threads=spec.num_threads, seed=spec.seed, window=spec.window
    )


async def build_engine(
    cfg: EngineConfig, model_folder: Path, *, num_threads: int, seed: int, window: int | None = None
) -> InferenceEngine:
    """Build the engine for the model of this Hugging Face folder. An HTTP endpoint ignores the folder.

    Raise ConfigError if the engine cannot run this model, ResourceError if it is not installed. `seed` is the engine's
    own; samples depend on `SamplingParams.seed`. `window` raises the positions that the folder's config states.
    """
    match cfg:
        case TorchEngineConfig() | VllmEngineConfig():
            return await build_trainable_engine(cfg, model_folder, num_threads=num_threads, seed=seed, window=window)
        case HttpEngineConfig():
            return HttpEngine(cfg)
        case _:
            assert_never(cfg)


async def build_trainable_engine(
    cfg: LocalEngineConfig,
    model_folder: Path,
    *,
    num_threads: int,
    seed: int,
    version: int = 0,
    window: int | None = None,
) -> TrainableEngine:
    """Build an engine whose weights can be replaced; see `build_engine`. `version` numbers the folder's weights."""
    match cfg:
        case TorchEngineConfig():
            from klear_core.generate.decoder.torch_engine import TorchEngine

            # loading takes seconds: keep the event loop free meanwhile
            return await asyncio.to_thread(
                TorchEngine, model_folder, cfg, num_threads=num_threads, version=version, window=window
            )
        case VllmEngineConfig():
            from klear_core.generate.vllm_engine import VllmEngine

            return await VllmEngine.start(
                cfg, model_folder, num_threads=num_threads, seed=seed, version=version, window=window
            )
        case _:
            assert_never(cfg)


# ---- pool of a stage ----
# Start the engines and endpoints of a stage as one pool.


_WINDOW_S = 3600.0
"""Window of `max_restarts`."""


DeadNodes = Callable[[BaseException], Set[str]]
"""Returns the ids of the nodes whose death an error reports."""


def _no_nodes(_: BaseException) -> Set[str]:
    return frozenset()


def endpoints_of(runtime: EnginesRuntime) -> tuple[HttpEngineConfig, ...]:
    """Return the endpoints that the settings name; evaluation has none."""
    return runtime.endpoints if isinstance(runtime, PoolRuntime) else ()


async def start_with_endpoints(spec: EngineSpec, *, runtime: EnginesRuntime, key: str, num_here: int) -> Sampler:
    """Start one engine in this process, or none (`num_here`), together with the endpoints that the settings name.

    Raise ResourceError if an endpoint does not answer, ConfigError if it lacks its model; `key` is the stage's section.
    """
    if not endpoints_of(runtime):
        return await start_here(spec)

    here = [LocalMember("engine 0", partial(build_spec, spec), limit=limit_here(spec))] if num_here else []
    return await start_members(here, runtime=runtime, key=key)


async def start_members(
    engines: Sequence[PooledEngine],
    *,
    runtime: EnginesRuntime,
    key: str,
    num_up: int | None = None,
    dead_nodes: DeadNodes = _no_nodes,
) -> Sampler:
    """Start these engines and the endpoints that the settings name as one pool; see `EnginePool.start`."""
    endpoints = endpoints_of(runtime)
    members = [*engines, *map(EndpointMember, endpoints)]
    limit_key = f"{key}.runtime.max_restarts"
    restarts = RestartLimit(runtime.max_restarts, window_s=_WINDOW_S, key=limit_key, dead_nodes=dead_nodes)
    pool = EnginePool(members, restarts.count)
    try:
        await pool.start(num_up=num_up)
    except BaseException:  # also if cancelled: engines that are up hold GPUs
        await pool.close()
        raise
    # An endpoint's own limit grows with what it can serve; requests above it wait in the pool.
    limit_here = sum(engine.limit for engine in engines)
    limit_there = sum(cfg.runtime.max_concurrency for cfg in endpoints)
    return Sampler(engine=pool, limit=limit_here + limit_there, num_engines=len(members))


class RestartLimit:
    """Counts lost engines within a window of time, and refuses to replace more than a number of them."""

    def __init__(
        self,
        allowed: int,
        *,
        window_s: float,
        key: str,
        clock: Callable[[], float] = time.monotonic,
        dead_nodes: DeadNodes = _no_nodes,
    ) -> None:
        """`key` is the setting that allows so many, for the message; the engines of a dead node are one loss."""
        self._allowed, self._window_s, self._key, self._clock = allowed, window_s, key, clock
        self._losses: deque[float] = deque()
        self._dead_nodes = dead_nodes
        self._counted: set[str] = set()
        """Ids of the dead nodes that were counted."""

    def count(self, name: str, error: BaseException) -> None:
        """Count a loss, unless that of its node was. Raise ResourceError, with the last reason, if too many were."""
        now = self._clock()
        nodes = self._dead_nodes(error)
        is_new = not nodes or not nodes <= self._counted
        self._counted |= nodes
        if is_new:
            self._losses.append(now)
        while self._losses and self._losses[0] < now - self._window_s:
            self._losses.popleft()
        if is_new and len(self._losses) > self._allowed:
            raise ResourceError(
                f"{len(self._losses)} engines were lost within {self._window_s / 60:g} minutes, and {self._key} = "
                f"{self._allowed} allows no more; the last was {name}: {error}"
            ) from error
        log.warning("%s was lost (%s); starting another", name, error)


# ---- members of a pool ----
# Make members of a pool from engines in this process and from OpenAI-compatible endpoints.


_AWAY_S = 1800.0
"""Seconds for which an endpoint that was there may be away before it counts as lost once more."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 60.0  # between two questions to an endpoint that is away; doubles


class LocalMember:
    """A `PooledEngine` over an engine in this process."""

    is_queued = False

    def __init__(self, name: str, build: Callable[[], Awaitable[InferenceEngine]], *, limit: int) -> None:
        self.name = name
        self.limit = limit
        self._build = build
        self._engine: InferenceEngine | None = None

    async def start(self) -> None:
        """Build the engine, in place of an earlier one."""
        await self.close()
        self._engine = await self._build()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Sample; see `PooledEngine.generate`."""
        assert self._engine is not None, "the engine has not been started"
        return await self._engine.generate(prompt_ids, params)

    async def close(self) -> None:
        """Close the engine."""
        # Taken out first, so that a second close during the await does not close it again.
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()


class EndpointMember:
    """A `PooledEngine` over an endpoint. Klear cannot start it, and waits for it instead.

    It draws other samples from a seed than our own engine does, so in a pool of both kinds an answer depends on which
    of them gave it.
    """

    is_queued = False

    def __init__(
        self,
        cfg: HttpEngineConfig,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = f"endpoint {cfg.base_url}"
        self._cfg, self._sleep, self._clock = cfg, sleep, clock
        self._engine: HttpEngine | None = None
        self._was_there = False

    @property
    def limit(self) -> int:
        """Return the number of requests at which the endpoint gives the most tokens per second, as far as known."""
        return self._engine.limit if self._engine is not None else 1

    async def start(self) -> None:
        """Check that the endpoint serves the model; one that has gone away is waited for. See `PooledEngine.start`."""
        await self.close()
        self._engine = HttpEngine(self._cfg, sleep=self._sleep)  # its limit begins anew, for an idle server
        # At first it must answer at once: a wrong address is reported before anything is spent.
        if self._was_there:
            await self._wait_for(self._engine)
        else:
            await self._engine.check()
        self._was_there = True

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Sample; see `PooledEngine.generate`."""
        assert self._engine is not None, "the endpoint has not been checked"
        return await self._engine.generate(prompt_ids, params)

    async def close(self) -> None:
        """Close the connections."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def _wait_for(self, engine: HttpEngine) -> None:
        give_up_at = self._clock() + _AWAY_S
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await engine.check()
            except ResourceError as error:  # a ConfigError (it now serves another model) rises at once
                if self._clock() >= give_up_at:
                    raise EngineLost(f"{self.name} was away for {_AWAY_S / 60:g} minutes: {error}") from error
                log.warning("%s does not answer; asking again in %g s: %s", self.name, pause_s, error)
            else:
                return
            await self._sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


# ---- scheduling ----
# Admit requests to an engine so that none is left over for long when all others are done.


class LongestFirst:
    """Limit the open requests. At the end of the queue, requests with the longest expected answers go first.

    Answers to one key (a problem) have similar lengths, so the first answer to each key predicts the others. Until the
    last request has come, requests go in order: reordered earlier, a few short answers would keep their shards open.
    """

    def __init__(self, limit: int, *, num_requests: int) -> None:
        """`num_requests` will come in all."""
        self._room = limit
        self._num_to_come = num_requests
        self._waiting: dict[asyncio.Future[None], Hashable] = {}
        """Requests in the order in which they came, with their keys."""
        self._asked: set[Hashable] = set()
        self._lengths: dict[Hashable, tuple[int, int]] = {}
        """Number of answers and of their tokens, by key."""
        self._num_answers = self._num_tokens = 0

    @asynccontextmanager
    async def slot(self, key: Hashable) -> AsyncIterator[None]:
        """Wait for room, and hold it during the block."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = key
        self._num_to_come -= 1
        self._admit()
        try:
            await turn
            yield
        finally:
            # A turn that waits no longer was admitted, and its room is free now.
            if self._waiting.pop(turn, None) is None:
                self._room += 1
            self._admit()

    def record(self, key: Hashable, num_tokens: int) -> None:
        """Note the length of an answer."""
        num_answers, total = self._lengths.get(key, (0, 0))
        self._lengths[key] = (num_answers + 1, total + num_tokens)
        self._num_answers += 1
        self._num_tokens += num_tokens

    def _admit(self) -> None:
        while self._room > 0 and self._waiting:
            turn = self._next()
            self._asked.add(self._waiting.pop(turn))
            self._room -= 1
            if turn.cancelled():  # its caller has yet to learn that, and to give the room back
                continue
            turn.set_result(None)

    def _next(self) -> asyncio.Future[None]:
        if self._num_to_come > 0:
            return next(iter(self._waiting))
        # Once for each key, not for each of its requests.
        expected = {key: self._expected(key) for key in set(self._waiting.values())}
        return max(self._waiting, key=lambda turn: expected[self._waiting[turn]])  # the first of equals

    def _expected(self, key: Hashable) -> float:
        """Return the expected length of an answer; a key that was never asked goes before all others."""
        if key not in self._asked:
            return float("inf")
        # Before the first answer to a key has come, the average of all other keys is expected.
        num_answers, num_tokens = self._lengths.get(key, (self._num_answers, self._num_tokens))
        return num_tokens / max(1, num_answers)
