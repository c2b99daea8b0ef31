"""Choose where a stage samples and judges: on this machine, or on the GPUs and nodes of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from klear_core.artifacts.home import home_of
from klear_core.cluster.engine_plan import plan_engines, plan_scorer
from klear_core.cluster.nodes import ray_nodes
from klear_core.cluster.placement import gpus_here
from klear_core.config.curve import CurveJob
from klear_core.config.engine import LocalEngineConfig
from klear_core.config.evaluate import EnginesRuntime
from klear_core.config.train import TrainRuntime
from klear_core.config.verify import VerifyConfig
from klear_core.evaluate.compute import Compute
from klear_core.generate.pooled import start_with_endpoints
from klear_core.hf_config import read_hf_config
from klear_core.verify import JudgePool, build_judge_pool
from tasks.resources import Needs, ray_session, share_model

if TYPE_CHECKING:
    from klear_core.train.curve import ModelScorer

_STORE_BYTES = 128 << 20  # requests and answers; weights are read from the disk


@contextmanager
def open_compute(engine: LocalEngineConfig, runtime: EnginesRuntime, model: Path, *, section: str) -> Iterator[Compute]:
    """Yield what starts the engines of a stage with a model; `section` is that of the stage's settings.

    Ray is started, or joined, only if there are several engines (endpoints not counted), or if RAY_ADDRESS names a
    cluster, whose GPUs are then used; a given model is sent there. Raise ResourceError if there are too few GPUs.
    """
    if not os.environ.get("RAY_ADDRESS"):
        plan = plan_engines(runtime.num_engines, engine, [gpus_here()], key=section)
        if plan.num_engines <= 1:
            start = partial(start_with_endpoints, runtime=runtime, key=section, num_here=plan.num_engines)
            yield Compute(section=section, start_sampler=start)
            return
    # `auto` is as many as the GPUs hold, which is known once Ray runs; it must have CPUs for one engine at least.
    num_engines = 1 if runtime.num_engines == "auto" else runtime.num_engines
    with ray_session(Needs(num_cpus=max(1, num_engines * runtime.num_threads), object_store_bytes=_STORE_BYTES)):
        from klear_core.cluster.engine_pool import start_pool
        from klear_core.cluster.judge_pool import build_cluster_judges

        share_model(model)
        yield Compute(
            section=section,
            start_sampler=partial(start_pool, runtime=runtime, key=section),
            build_judges=build_cluster_judges,
        )


@contextmanager
def open_judges() -> Iterator[Callable[[VerifyConfig], JudgePool]]:
    """Yield what builds the judges of a stage without engines: on all nodes of the cluster that RAY_ADDRESS names."""
    if not os.environ.get("RAY_ADDRESS"):
        yield build_judge_pool
        return
    with ray_session(Needs(num_cpus=1, object_store_bytes=_STORE_BYTES)):
        from klear_core.cluster.judge_pool import build_cluster_judges

        yield build_cluster_judges


def scorer_beside(
    job: CurveJob, runtime: TrainRuntime, folder: Path, *, is_on_ray: bool, seed: int, workdir: Path
) -> AbstractContextManager[ModelScorer]:
    """Return the scorer of the models of an SFT run: on GPUs of Ray that its ranks leave free, else in processes.

    `folder` is that of the model to train. Raise ResourceError if the engine needs GPUs and none is left.
    """
    from klear_core.evaluate.model_process import process_scorer

    if not is_on_ray:  # the only rank trains in this process, on the CPU
        return process_scorer(job, folder, seed=seed)
    assert job.scorer is not None
    num_params = read_hf_config(folder).num_params
    plan = plan_scorer(job.scorer.engine, runtime, ray_nodes(), num_params, key="sft")
    # On the CPU. Its `device = "auto"` must not find the GPUs, which belong to the ranks.
    if plan.gpus_per_engine == 0:
        return process_scorer(job, folder, seed=seed, hides_gpus=True)
    from klear_core.cluster.model_scorer import ray_scorer

    return ray_scorer(job, folder, plan=plan, seed=seed, home=home_of(workdir), key="sft")
