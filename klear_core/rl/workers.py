"""How the loop reaches the learner and the sampling engines, wherever they run; and both in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from klear_core.config.rl import RlConfig
from klear_core.errors import TrainingError
from klear_core.generate.engine import TrainableEngine, WeightSource
from klear_core.types import TrainSample

if TYPE_CHECKING:
    from klear_core.rl.learner import Learner

T = TypeVar("T")
Counters = Mapping[str, int | float]


class LearnerLost(TrainingError):  # noqa: N818  # it is an event to recover from before it is an error
    """The learner died. It was made anew without its state: restore it and go on from its checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSetup:
    """What learner and engines are made from."""

    cfg: RlConfig
    model: Path
    """The artifact folder of the initial model."""
    seed: int
    workdir: Path


class LearnerHandle(Protocol):
    """The learner as the loop sees it. Every call may raise LearnerLost."""

    async def restore(self) -> Counters | None:
        """Load the newest checkpoint; what was saved with it, or None if there is none and the initial model is in place."""
        ...

    async def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """One RL step."""
        ...

    async def weights(self) -> WeightSource:
        """The present weights, to be given to the policy's `load_weights`."""
        ...

    async def save(self, counters: Counters) -> None:
        """Checkpoint."""
        ...

    async def export(self, target: Path) -> None:
        """Write the model folder."""
        ...


class Workers(Protocol):
    """Makes and ends the processes of one RL stage."""

    async def start(self, setup: RlSetup) -> tuple[LearnerHandle, TrainableEngine]:
        """The learner with the initial model, and the policy that samples with it as version 0."""
        ...

    def status(self) -> str:
        """What the sampling engines are doing, in words."""
        ...

    async def close(self) -> None:
        """End all that was started; nothing of it survives."""
        ...


class LocalWorkers:
    """Learner and engine in this process: for tests, debugging, and machines without Ray."""

    def __init__(self, engine: TrainableEngine | None = None) -> None:
        """`engine` takes the place of the configured one."""
        self._engine = engine
        self._learner: LocalLearner | None = None

    async def start(self, setup: RlSetup) -> tuple[LearnerHandle, TrainableEngine]:
        """One learner rank, whatever `runtime.num_workers` says."""
        from klear_core.generate.factory import build_trainable_engine
        from klear_core.rl.learner import Learner
        from klear_core.train.base import model_folder
        from klear_core.train.model import pick_device
        from klear_core.train.parallel import World

        runtime = setup.cfg.runtime
        world = World(rank=0, size=1, device=pick_device(runtime.device))
        learner = Learner(setup.cfg, setup.model, seed=setup.seed, workdir=setup.workdir, world=world)
        if self._engine is None:
            folder = model_folder(setup.model)
            threads = runtime.rollout_threads
            self._engine = await build_trainable_engine(setup.cfg.rollout.engine, folder, num_threads=threads, seed=setup.seed)
        self._learner = LocalLearner(learner, num_threads=runtime.num_threads)
        return self._learner, self._engine

    def status(self) -> str:
        """One engine."""
        return "the engine in this process"

    async def close(self) -> None:
        """End the threads of both."""
        if self._learner is not None:
            self._learner.close()
        if self._engine is not None:
            await self._engine.close()


class LocalLearner:
    """A `LearnerHandle` on a thread of its own, so that sampling and judging go on beside it."""

    def __init__(self, learner: Learner, *, num_threads: int) -> None:
        import torch

        self._learner = learner
        self._thread = ThreadPoolExecutor(1, "learner", initializer=torch.set_num_threads, initargs=(num_threads,))

    async def restore(self) -> Counters | None:
        """As `Learner.restore`."""
        return await self._run(self._learner.restore)

    async def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """As `Learner.step`."""
        return await self._run(partial(self._learner.step, samples))

    async def weights(self) -> WeightSource:
        """As `Learner.weights`."""
        return await self._run(self._learner.weights)

    async def save(self, counters: Counters) -> None:
        """As `Learner.save`."""
        await self._run(partial(self._learner.save, counters))

    async def export(self, target: Path) -> None:
        """As `Learner.export`."""
        await self._run(partial(self._learner.export, target))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
