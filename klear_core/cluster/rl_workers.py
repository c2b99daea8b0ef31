"""Start and stop all Ray actors of an RL run."""

from __future__ import annotations

import asyncio
from functools import partial

import ray

from klear_core.cluster.calls import Restarts
from klear_core.cluster.judge_pool import build_cluster_judges
from klear_core.cluster.placement import check_cpu_is_meant, is_direct, plan_gpus
from klear_core.cluster.places import place_rl
from klear_core.cluster.rl_learner import RayLearner
from klear_core.cluster.rollout_engines import RayRolloutEngines
from klear_core.config.verify import VerifyConfig
from klear_core.errors import ResourceError
from klear_core.generate.engine import TrainableEngine
from klear_core.hf_config import read_hf_config
from klear_core.rl.start_checks import check_engine
from klear_core.rl.workers import LearnerHandle, RlSetup
from klear_core.train.base import model_folder
from klear_core.verify import JudgePool


class RayWorkers:
    """Implement `Workers` on the Ray cluster that this process is connected to."""

    def __init__(self) -> None:
        self._learner: RayLearner | None = None
        self._engines: RayRolloutEngines | None = None

    async def start(self, setup: RlSetup) -> tuple[LearnerHandle, TrainableEngine]:
        """Start learner ranks and rollout actors concurrently. Raise ResourceError without Ray or with too few GPUs."""
        if not ray.is_initialized():
            raise ResourceError("Ray is not running in this process: call ray.init first")
        runtime, engine = setup.cfg.runtime, setup.cfg.rollout.engine
        gpus = plan_gpus(runtime, engine, ray.cluster_resources().get("GPU", 0.0))
        check_cpu_is_meant(runtime, engine, gpus, read_hf_config(model_folder(setup.model)).num_params)
        restarts = Restarts(runtime.max_restarts)

        self._learner = learner = RayLearner(
            setup,
            restarts,
            gpus.learner,
            is_direct=is_direct(runtime, engine, gpus),
            plan=partial(place_rl, runtime, engine, gpus),
        )
        self._engines = RayRolloutEngines(setup, restarts, gpus.rollout, learner, learner.engine_options)
        await learner.reserve()  # before an engine is started that shares a GPU with a rank
        await asyncio.gather(self._learner.start(), self._engines.start())
        if self._learner.is_direct:
            await self._engines.check_direct()
        self._learner.add_note(await check_engine(self._learner, self._engines, setup))
        return self._learner, self._engines

    def judges(self, cfg: VerifyConfig) -> JudgePool:
        """Build judges on all nodes of the cluster."""
        return build_cluster_judges(cfg)

    def status(self) -> str:
        """Describe the rollout actors and their open requests."""
        return self._engines.status() if self._engines else "no rollout actor"

    async def close(self) -> None:
        """Stop all actors."""
        if self._engines is not None:
            await self._engines.close()
        if self._learner is not None:
            self._learner.close()
