"""Define the Ray actors that run sampling engines, and their messages; imports no Ray."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from klear_core.cluster.actors import Arrays, to_tensors
from klear_core.generate.engine import (
    InferenceEngine,
    SamplingParams,
    SeparateEngine,
    SleepingEngine,
    TrainableEngine,
    WeightOffer,
)
from klear_core.generate.factory import EngineSpec, build_spec, build_trainable_engine
from klear_core.rl.workers import RlSetup
from klear_core.types import Completion

if TYPE_CHECKING:
    from torch import Tensor

_POLL_S = 0.1  # longest wait of an engine's actor for a first reply before it returns none
_GATHER_S = 0.04  # longest wait for more replies to return with the first: each message costs a millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of `generate`, sent to an actor."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Result of a request: its completions, or the reason why there are none."""

    request_id: int
    completions: tuple[Completion, ...]
    error: str = ""
    """Message of the ValueError that `generate` raised; empty if there are completions."""


class RequestServer:
    """Answer requests with an engine, many at a time, in few messages."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._running: dict[asyncio.Task[Reply], int] = {}

    async def exchange(self, requests: Sequence[Request], cancelled: Sequence[int]) -> list[Reply]:
        """Start these requests, cancel others, and return finished replies after a short wait for the first."""
        for request in requests:
            # The dict also keeps the task alive: asyncio itself holds only a weak reference.
            self._running[asyncio.create_task(self._answer(request))] = request.request_id
        unwanted = [task for task, request_id in self._running.items() if request_id in cancelled]
        # Taken out, because `result` of a cancelled task raises, and nobody waits for its reply.
        for task in unwanted:
            task.cancel()
            del self._running[task]
        await self._wait(_POLL_S, asyncio.FIRST_COMPLETED)
        await self._wait(_GATHER_S, asyncio.ALL_COMPLETED)
        finished = [task for task in self._running if task.done()]
        for task in finished:
            del self._running[task]
        return [task.result() for task in finished]

    async def _wait(self, timeout_s: float, until: str) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s, return_when=until)

    async def _answer(self, request: Request) -> Reply:
        try:
            completions = await self._engine.generate(request.prompt_ids, request.params)
        except ValueError as e:  # an invalid request: the caller of `generate` gets the error
            return Reply(request_id=request.request_id, completions=(), error=str(e))
        return Reply(request_id=request.request_id, completions=tuple(completions))


class EngineActor:
    """Run one sampling engine with fixed weights."""

    async def start(self, spec: EngineSpec) -> None:
        """Build the engine."""
        spec = spec.here()
        self._engine = await build_spec(spec)
        self._server = RequestServer(self._engine)
        if spec.home is not None and spec.is_sent:
            # The weights are loaded, and nobody else asks for this node's copy of the model.
            shutil.rmtree(spec.model_folder, ignore_errors=True)

    async def exchange(self, requests: Sequence[Request], cancelled: Sequence[int]) -> list[Reply]:
        """Start and cancel requests and return finished ones; see `RequestServer.exchange`."""
        return await self._server.exchange(requests, cancelled)

    async def close(self) -> None:
        """Close the engine with everything that it started."""
        await self._engine.close()


class RolloutActor:
    """Run one sampling engine of an RL run, whose weights follow the learner's."""

    async def start(self, setup: RlSetup) -> None:
        """Build the engine with the initial weights (version 0)."""
        from klear_core.train.base import model_folder

        setup = setup.here()
        cfg, folder = setup.cfg, model_folder(setup.model)
        threads = cfg.runtime.rollout_threads
        self._engine: TrainableEngine = await build_trainable_engine(
            cfg.rollout.engine, folder, num_threads=threads, seed=setup.seed
        )
        self._server = RequestServer(self._engine)
        self._received: dict[str, Tensor] = {}
        """New weights, as far as they have come."""

    async def receive_weights(self, arrays: Arrays) -> None:
        """Copy a part of new weights from the object store, for `load_received`."""
        # In a thread, so that replies do not wait.
        self._received |= await asyncio.to_thread(to_tensors, arrays)

    async def load_received(self, version: int) -> None:
        """Load the weights, once all parts were received; see `TrainableEngine.load_weights`."""
        weights, self._received = self._received, {}
        await self._engine.load_weights(weights, version=version)

    async def fetch_weights(self, offer: WeightOffer) -> None:
        """Load the weights that the learner offers. After an error old and new ones are mixed: discard the engine."""
        await self._engine.load_weights(offer, version=offer.version)

    async def digest_offered(self, offer: WeightOffer) -> list[str]:
        """Fetch offered tensors without loading them; return a digest of what each process of the engine received."""
        from klear_core.generate.transfer import fetch
        from klear_core.generate.transfer_check import digest_of

        if isinstance(self._engine, SeparateEngine):
            return await self._engine.digest_offered(offer)
        return [await asyncio.to_thread(lambda: digest_of(fetch(offer, rank=1)))]  # the engine is in this process

    async def sleep(self) -> None:
        """Free the engine's GPU memory; see `SleepingEngine.sleep`."""
        await self._sleeper().sleep()

    async def wake(self) -> None:
        """Allocate the engine's GPU memory again; see `SleepingEngine.wake`."""
        await self._sleeper().wake()

    async def exchange(self, requests: Sequence[Request], cancelled: Sequence[int]) -> list[Reply]:
        """Start and cancel requests and return finished ones; see `RequestServer.exchange`."""
        return await self._server.exchange(requests, cancelled)

    async def close(self) -> None:
        """Close the engine with everything that it started."""
        await self._engine.close()

    def _sleeper(self) -> SleepingEngine:
        assert isinstance(self._engine, SleepingEngine), type(self._engine)
        return self._engine
