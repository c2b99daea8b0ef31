"""Start a pool of sampling engines as Ray actors, for stages whose weights do not change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray

from klear_core.cluster.calls import awaited, within
from klear_core.cluster.engine_actors import EngineActor
from klear_core.cluster.engine_plan import EnginePlan, check_engines_have_gpus, plan_engines
from klear_core.cluster.nodes import ray_nodes
from klear_core.cluster.places import Node
from klear_core.cluster.ray_engine import RayEngine
from klear_core.config.evaluate import EnginesRuntime
from klear_core.errors import ResourceError, TrainingError
from klear_core.generate.factory import EngineSpec, Sampler, num_slots
from klear_core.generate.pooled import start_members, start_with_endpoints
from klear_core.hf_config import read_hf_config

log = logging.getLogger(__name__)

_START_S = 1800.0  # longest wait for an engine to load its model: 64 GB from a shared disk take minutes
_NOTICE_S = 30.0  # wait for GPUs from which on the log says so; a process starts within seconds
_QUEUE_S = 86400.0  # longest wait for GPUs if no engine of the pool has any: other runs end, or free some at their ends


async def start_pool(spec: EngineSpec, *, runtime: EnginesRuntime, key: str) -> Sampler:
    """Start the engines that fit the Ray cluster which this process is connected to, and join the endpoints of the
    settings to them.

    One engine on CPU stays in this process. Raise ResourceError if there are too few GPUs, or for a model too large for
    a CPU; `key` is the stage's section.
    """
    plan = plan_engines(runtime.num_engines, spec.cfg, [node.num_gpus for node in ray_nodes()], key=key)
    if plan.num_engines:
        check_engines_have_gpus(plan, spec.cfg, read_hf_config(spec.model_folder).num_params, key=key)
    if plan.num_engines == 0 or plan == EnginePlan(num_engines=1, gpus_per_engine=0):
        return await start_with_endpoints(spec, runtime=runtime, key=key, num_here=plan.num_engines)
    return await start_planned(spec, plan=plan, runtime=runtime, key=key)


async def start_planned(spec: EngineSpec, *, plan: EnginePlan, runtime: EnginesRuntime, key: str) -> Sampler:
    """Start the engines of a plan as Ray actors, and join the endpoints of the settings; `key` is its section."""
    limit = num_slots(spec.cfg, is_on_gpu=plan.gpus_per_engine > 0)
    engines: list[RayEngine] = []
    # The queue holds the list and not a copy, because engines are made with its `wait`.
    queue = GpuQueue(engines, plan.gpus_per_engine, key=key)
    engines += [_engine(index, spec, plan, limit, queue) for index in range(plan.num_engines)]
    return await start_members(engines, runtime=runtime, key=key, num_up=1)


class GpuQueue:
    """Waits until Ray has given engines of a pool their GPUs, and says once that it waits."""

    def __init__(
        self,
        engines: Sequence[RayEngine],
        gpus_per_engine: int,
        *,
        key: str,
        nodes: Callable[[], Sequence[Node]] = ray_nodes,
    ) -> None:
        """`nodes` returns the living nodes of the cluster; `key` is the stage's section."""
        self._engines, self._gpus_per_engine, self._key = engines, gpus_per_engine, key
        self._nodes = nodes
        self._has_noticed = False

    async def wait(self, actor: Any) -> None:
        """Return when an actor runs. Raise ResourceError if none of the pool's does for too long."""
        running = asyncio.ensure_future(awaited(actor.__ray_ready__.remote()))
        try:
            done, _ = await asyncio.wait([running], timeout=_NOTICE_S)
            if not done:
                self._notice()
            deadline = asyncio.get_running_loop().time() + (_QUEUE_S if self._gpus_per_engine else _START_S)
            while not done:
                done, _ = await asyncio.wait([running], timeout=_START_S)
                is_late = asyncio.get_running_loop().time() >= deadline or not self._has_room()
                if not done and is_late and not any(engine.is_there for engine in self._engines):
                    raise ResourceError(self._refusal())
            await running
        finally:
            running.cancel()

    def _has_room(self) -> bool:
        """Return whether a node has enough GPUs for an engine, free or not. Nodes may be lost while engines wait."""
        return any(node.num_gpus >= self._gpus_per_engine for node in self._nodes())

    def _notice(self) -> None:
        if self._has_noticed:
            return
        self._has_noticed = True
        num_queued = sum(engine.is_queued for engine in self._engines)
        # a warning, so that a terminal shows it
        log.warning(
            "%s: %d of %d engines wait for GPUs that other work of the Ray cluster holds, and join when they have them",
            self._key, num_queued, len(self._engines),
        )  # fmt: skip

    def _refusal(self) -> str:
        num_gpus = sum(node.num_gpus for node in self._nodes())
        return (
            f"{self._key}: none of {len(self._engines)} engines got its {self._gpus_per_engine} GPUs; the Ray cluster "
            f"has {num_gpus} in all: nodes were lost, or other work holds them"
        )


def _engine(index: int, spec: EngineSpec, plan: EnginePlan, limit: int, queue: GpuQueue) -> RayEngine:
    # No CPUs are reserved, because the number of threads is a setting. SPREAD: on CPU, nothing else would keep Ray from
    # putting all engines on one node. An actor of several GPUs is always on one node.
    actor_type = ray.remote(num_cpus=0, num_gpus=plan.gpus_per_engine, max_restarts=0, scheduling_strategy="SPREAD")(
        EngineActor
    )

    async def load(actor: Any) -> None:
        try:
            await within(actor.start.remote(spec), _START_S, f"engine {index}", "start")
        except TrainingError as error:  # a timeout
            raise ResourceError(str(error)) from error

    async def create() -> Any:
        return actor_type.remote()

    return RayEngine(f"engine {index}", create, load, limit=limit, wait_for_gpus=queue.wait)
