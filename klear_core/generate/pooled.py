"""Start the engines and endpoints of a stage as one pool."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from klear_core.config.engine import HttpEngineConfig
from klear_core.config.evaluate import EnginesRuntime, PoolRuntime
from klear_core.generate.factory import EngineSpec, Sampler, build_spec, limit_here, start_here
from klear_core.generate.pool import EnginePool
from klear_core.generate.pool_slots import PooledEngine
from klear_core.generate.restarts import RestartLimit

_WINDOW_S = 3600.0
"""Window of `max_restarts`."""


def endpoints_of(runtime: EnginesRuntime) -> tuple[HttpEngineConfig, ...]:
    """Return the endpoints that the settings name; evaluation has none."""
    return runtime.endpoints if isinstance(runtime, PoolRuntime) else ()


async def start_with_endpoints(spec: EngineSpec, *, runtime: EnginesRuntime, key: str, num_here: int) -> Sampler:
    """Start one engine in this process, or none (`num_here`), together with the endpoints that the settings name.

    Raise ResourceError if an endpoint does not answer, ConfigError if it lacks its model; `key` is the stage's section.
    """
    if not endpoints_of(runtime):
        return await start_here(spec)
    from klear_core.generate.members import LocalMember

    here = [LocalMember("engine 0", partial(build_spec, spec), limit=limit_here(spec))] if num_here else []
    return await start_members(here, runtime=runtime, key=key)


async def start_members(
    engines: Sequence[PooledEngine], *, runtime: EnginesRuntime, key: str, num_up: int | None = None
) -> Sampler:
    """Start these engines and the endpoints that the settings name as one pool; see `EnginePool.start`."""
    endpoints = endpoints_of(runtime)
    members = [*engines, *_members(endpoints)]
    restarts = RestartLimit(runtime.max_restarts, window_s=_WINDOW_S, key=f"{key}.runtime.max_restarts")
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


def _members(endpoints: Sequence[HttpEngineConfig]) -> list[PooledEngine]:
    if not endpoints:
        return []
    from klear_core.generate.members import EndpointMember

    return [EndpointMember(cfg) for cfg in endpoints]
