"""Run an RL stage's sampling engines as Ray actors whose weights follow the learner's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from klear_core.cluster.actors import to_arrays
from klear_core.cluster.calls import START_S, RemoteCall, Restarts, StoredWeights, rollout_name, within
from klear_core.cluster.engine_actors import RolloutActor
from klear_core.cluster.ray_engine import RayEngine
from klear_core.cluster.rl_learner import RayLearner
from klear_core.generate.engine import SamplingParams, WeightOffer, WeightSource
from klear_core.generate.factory import num_slots
from klear_core.generate.pool import EnginePool
from klear_core.generate.pool_slots import EngineLost
from klear_core.rl.workers import LearnerLost, RlSetup
from klear_core.types import Completion

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class RayRolloutEngines:
    """A pool of rollout actors as one `TrainableEngine`."""

    def __init__(
        self,
        setup: RlSetup,
        restarts: Restarts,
        num_gpus: float,
        learner: RayLearner,
        actor_options: Callable[[int], Awaitable[dict[str, Any]]] | None = None,
    ) -> None:
        """`actor_options` returns the options of an actor by its index: where it is to run; None: anywhere."""
        self.version = 0
        self._actor_options = actor_options
        self._setup = setup
        self._learner = learner
        # Reserve no CPUs, and do not let Ray restart the actor, because a new engine must first get the current
        # weights.
        self._actor_type = ray.remote(num_cpus=0, num_gpus=num_gpus, max_restarts=0)(RolloutActor)
        self._weights: Sequence[ray.ObjectRef] = ()
        """Parts of the current weights in the object store; none before the first, and none if they go directly."""
        self._fetches_weights = False
        """Whether a new actor fetches its weights directly from the learner."""
        limit = num_slots(setup.cfg.rollout.engine, is_on_gpu=num_gpus > 0)
        self.engines = [self._engine(i, limit) for i in range(setup.cfg.runtime.num_rollout_actors)]
        self._pool = EnginePool(self.engines, restarts.count)

    def _engine(self, index: int, limit: int) -> RayEngine:
        return RayEngine(
            rollout_name(index),
            lambda: self._create_actor(index),
            lambda actor: self._load_actor(index, actor),
            limit=limit,
        )

    async def start(self) -> None:
        """Start all actors with the initial model."""
        await self._pool.start()

    async def check_direct(self) -> None:
        """Check the direct transfer of weights to all actors; see `RayLearner.check_direct`."""
        await self._learner.check_direct({i: engine.actor for i, engine in enumerate(self.engines)})

    async def _create_actor(self, index: int) -> Any:
        options = await self._actor_options(index) if self._actor_options else {}
        return self._actor_type.options(**options).remote()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Sample with the least busy actor; see `EnginePool.generate`."""
        return await self._pool.generate(prompt_ids, params)

    async def load_weights(self, weights: WeightSource, *, version: int) -> None:
        """Load weights into all actors, directly or through the object store; see `TrainableEngine.load_weights`."""
        self.version = version  # first, for actors that are replaced while the others load
        if isinstance(weights, WeightOffer):
            await self._send_weights_to_all()
            return
        if isinstance(weights, StoredWeights):
            self._weights = weights.parts
        else:
            self._weights = (ray.put(to_arrays(_tensors(weights))),)
        await self._call_all(self._loading())

    async def sleep(self) -> None:
        """Free the GPU memory of all actors; see `SleepingEngine.sleep`. A dead actor is replaced later, in `wake`."""
        timeout_s = self._setup.cfg.runtime.stall_timeout_s
        sleeping: dict[str, RemoteCall] = {"sleep (free its GPU memory)": lambda actor: actor.sleep.remote()}
        calls = [engine.call(sleeping, timeout_s=timeout_s) for engine in self.engines]
        for engine, dead in zip(self.engines, await asyncio.gather(*calls), strict=True):
            if dead is not None:
                log.warning("%s died before it slept (%s)", engine.name, type(dead.error).__name__)

    async def wake(self) -> None:
        """Wake all actors; see `SleepingEngine.wake`.

        Actors that died meanwhile are replaced only now: the learner has freed the memory that a new engine needs.
        """
        await self._call_all({"wake up (allocate its GPU memory)": lambda actor: actor.wake.remote()})

    async def close(self) -> None:
        """Stop all actors; waiting requests fail."""
        await self._pool.close()

    def status(self) -> str:
        """Return the number of open requests of each actor, in words."""
        return self._pool.status()

    def _loading(self) -> dict[str, RemoteCall]:
        """Return the calls that load the stored weights into an actor, by what each does; none if there are none.

        Every part has a call, and so a timeout, of its own: many nodes may fetch large weights from one.
        """
        if not self._weights:
            return {}
        of_version, version = f"the weights of version {self.version}", self.version
        calls: dict[str, RemoteCall] = {}
        for number, part in enumerate(self._weights, start=1):
            calls[f"receive part {number} of {len(self._weights)} of {of_version}"] = partial(_receive, part)
        calls[f"load {of_version}"] = lambda actor: actor.load_received.remote(version)
        return calls

    async def _call_all(self, calls: Mapping[str, RemoteCall]) -> None:
        """Make these calls of all actors concurrently, and replace those that died."""
        timeout_s = self._setup.cfg.runtime.stall_timeout_s

        async def call_or_replace(engine: RayEngine) -> None:
            dead = await engine.call(calls, timeout_s=timeout_s)
            if dead is not None:
                await self._replace(engine, dead.actor, dead.error)

        await asyncio.gather(*(call_or_replace(engine) for engine in self.engines))

    async def _send_weights_to_all(self) -> None:
        """Send weights directly from the learner to all actors, and replace those that did not get everything."""
        self._fetches_weights = True
        # Lock all engines, because no request may reach an actor that has old and new weights mixed.
        async with AsyncExitStack() as held:
            for engine in self.engines:
                await held.enter_async_context(engine.lock)
            actors = {i: engine.actor for i, engine in enumerate(self.engines)}
            try:
                failed = await self._learner.send_weights(actors)
            except LearnerLost as lost:
                failed = dict.fromkeys(actors, lost)  # any of them may have received a part
        await asyncio.gather(*(self._replace(self.engines[i], actors[i], error) for i, error in failed.items()))
        # After the engines were replaced: the loop restores the learner, and then sends its weights to all of them.
        for error in failed.values():
            if isinstance(error, LearnerLost):
                raise error

    async def _replace(self, engine: RayEngine, dead: Any, error: BaseException) -> None:
        """Start another actor with the current weights, unless another task noticed first and did so."""
        if engine.actor is dead:
            # The learner's restart was already counted.
            await self._pool.replace(engine, error, is_counted=not isinstance(error, LearnerLost))

    async def _load_actor(self, index: int, actor: Any) -> None:
        name, stall_timeout_s = rollout_name(index), self._setup.cfg.runtime.stall_timeout_s
        await within(actor.start.remote(self._setup), max(START_S, stall_timeout_s), name, "start its engine")
        for what, call in self._loading().items():
            await within(call(actor), stall_timeout_s, name, what)
        if not self._fetches_weights:
            return
        try:
            failed = await self._learner.send_weights({index: actor})
        except LearnerLost as lost:
            # The RL loop also receives this error, restores the learner, and then sends its weights to all actors.
            log.warning("rollout actor %d has the initial weights for now: %s", index, lost)
        else:
            if failed:
                raise EngineLost("it did not get its weights") from failed[index]


def _receive(part: ray.ObjectRef, actor: Any) -> Any:
    return actor.receive_weights.remote(part)


def _tensors(weights: Path | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(weights, Path):
        from safetensors.torch import load_file

        return {name: w for file in sorted(weights.glob("*.safetensors")) for name, w in load_file(file).items()}
    return weights
