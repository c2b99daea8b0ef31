"""Make members of a pool from engines in this process and from OpenAI-compatible endpoints."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from klear_core.config.engine import HttpEngineConfig
from klear_core.errors import ResourceError
from klear_core.generate.engine import InferenceEngine, SamplingParams
from klear_core.generate.http_engine import HttpEngine
from klear_core.generate.pool_slots import EngineLost
from klear_core.types import Completion

log = logging.getLogger(__name__)

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
