"""Choose what a stage samples with: an engine in this process, or a pool on the GPUs of a machine or a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from klear_core.cluster.engine_plan import plan_engines
from klear_core.cluster.placement import gpus_here
from klear_core.config.engine import LocalEngineConfig
from klear_core.config.evaluate import EvaluateRuntime
from klear_core.generate.factory import SamplerSource
from tasks.resources import Needs, ray_session

_STORE_BYTES = 128 << 20  # requests and answers; weights are read from the disk


@contextmanager
def open_samplers(engine: LocalEngineConfig, runtime: EvaluateRuntime, *, section: str) -> Iterator[SamplerSource]:
    """Yield what starts the engines of a stage; `section` is that of its settings.

    Ray is started, or joined, only if there is more than one engine, or if RAY_ADDRESS names a cluster, whose GPUs are
    then used. Raise ResourceError if there are too few GPUs.
    """
    if not os.environ.get("RAY_ADDRESS"):
        plan = plan_engines(runtime.num_engines, engine, gpus_here(), key=section)
        if plan.num_engines == 1:
            yield SamplerSource(section=section)
            return
    num_engines = 1 if runtime.num_engines == "auto" else runtime.num_engines
    with ray_session(Needs(num_cpus=num_engines * runtime.num_threads, object_store_bytes=_STORE_BYTES)):
        from klear_core.cluster.engine_pool import start_pool

        yield SamplerSource(section=section, start=partial(start_pool, runtime=runtime, key=section))
