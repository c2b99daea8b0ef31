"""Start a pool of sampling engines as Ray actors, for stages whose weights do not change."""

from __future__ import annotations

from typing import Any

import ray

from klear_core.cluster.calls import within
from klear_core.cluster.engine_actors import EngineActor
from klear_core.cluster.engine_plan import EnginePlan, check_engines_have_gpus, plan_engines
from klear_core.cluster.nodes import ray_nodes
from klear_core.cluster.ray_engine import RayEngine
from klear_core.config.evaluate import EnginesRuntime
from klear_core.errors import ResourceError, TrainingError
from klear_core.generate.factory import EngineSpec, Sampler, num_slots
from klear_core.generate.pooled import start_members, start_with_endpoints
from klear_core.hf_config import read_hf_config

_START_S = 1800.0  # longest wait for an actor's GPUs and for its model: 64 GB from a shared disk take minutes


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
    engines = [_engine(index, spec, plan, limit) for index in range(plan.num_engines)]
    return await start_members(engines, runtime=runtime, key=key)


def _engine(index: int, spec: EngineSpec, plan: EnginePlan, limit: int) -> RayEngine:
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

    return RayEngine(f"engine {index}", actor_type.remote, load, limit=limit)
