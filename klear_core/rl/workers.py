"""Define the interface between the RL loop and its learner and engines, and implement it within this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from klear_core.config.rl import RlConfig
from klear_core.config.verify import VerifyConfig
from klear_core.errors import TrainingError
from klear_core.generate.engine import TrainableEngine, WeightSource
from klear_core.types import TrainSample
from klear_core.verify import JudgePool, build_judge_pool

if TYPE_CHECKING:
    from klear_core.artifacts.home import Home
    from klear_core.rl.learner import Learner
    from klear_core.train.checkpoint import Counters

T = TypeVar("T")


class LearnerLost(TrainingError):  # noqa: N818  # it is an event to recover from before it is an error
    """The learner died and was restarted with the initial model: call `restore` and go on from its checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSetup:
    """Inputs from which learner and engines are built."""

    cfg: RlConfig
    model: Path
    """The artifact folder of the initial model."""
    seed: int
    workdir: Path
    home: Home | None = None
    """Place from which nodes with other disks fetch the model, and to which they send the result; None without a shared
    store."""

    def here(self) -> RlSetup:
        """Return the setup with this node's own paths."""
        if self.home is None:
            return self
        return replace(self, model=self.home.here(self.model), workdir=self.home.here(self.workdir))


class LearnerHandle(Protocol):
    """The calls that the loop makes to the learner. Each may raise LearnerLost."""

    async def restore(self) -> Counters | None:
        """Load the newest checkpoint and return its counters; without one keep the initial model and return None."""
        ...

    async def notes(self) -> tuple[str, ...]:
        """Return notes for the stage's manifest, known once the learner has started."""
        ...

    async def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Do one RL step and return its metrics."""
        ...

    async def distance(self, samples: Sequence[TrainSample]) -> float:
        """Return the largest mean distance of a sample's log-probs from the sampler's, in nats."""
        ...

    async def weights(self) -> WeightSource:
        """Return the current weights, for the engine's `load_weights`."""
        ...

    async def save(self, counters: Counters) -> None:
        """Save a checkpoint with these counters."""
        ...

    async def export(self, target: Path) -> None:
        """Write the model folder."""
        ...


class Workers(Protocol):
    """Start and stop the processes of one RL stage."""

    async def start(self, setup: RlSetup) -> tuple[LearnerHandle, TrainableEngine]:
        """Start the learner with the initial model, and the engine that samples from it as version 0."""
        ...

    def judges(self, cfg: VerifyConfig) -> JudgePool:
        """Build the judges; use the result as a context manager."""
        ...

    def status(self) -> str:
        """Describe what the sampling engines are doing, for messages."""
        ...

    async def close(self) -> None:
        """Stop every process and thread that was started."""
        ...


class LocalWorkers:
    """Run learner and engine in this process: for tests, debugging, and machines without Ray."""

    def __init__(self, engine: TrainableEngine | None = None) -> None:
        """Use `engine`, if given, instead of the configured one."""
        self._engine = engine
        self._learner: LocalLearner | None = None

    async def start(self, setup: RlSetup) -> tuple[LearnerHandle, TrainableEngine]:
        """Start one learner rank, whatever `runtime.num_workers` says."""
        # Imported here, because the driver of a cluster imports this module and needs no torch.
        from klear_core.generate.factory import build_trainable_engine
        from klear_core.rl.learner import Learner
        from klear_core.rl.start_checks import check_engine
        from klear_core.train.base import model_folder
        from klear_core.train.model import pick_device
        from klear_core.train.world import World

        runtime = setup.cfg.runtime
        world = World(rank=0, size=1, device=pick_device(runtime.device))
        learner = Learner(setup.cfg, setup.model, seed=setup.seed, workdir=setup.workdir, world=world)
        is_ours = self._engine is None
        if self._engine is None:
            folder = model_folder(setup.model)
            threads = runtime.rollout_threads
            self._engine = await build_trainable_engine(
                setup.cfg.rollout.engine, folder, num_threads=threads, seed=setup.seed
            )
        self._learner = LocalLearner(learner, num_threads=runtime.num_threads)
        # A caller's own engine may have a model of its own.
        if is_ours:
            self._learner.add_note(await check_engine(self._learner, self._engine, setup))
        return self._learner, self._engine

    def judges(self, cfg: VerifyConfig) -> JudgePool:
        """Build judges on this machine."""
        return build_judge_pool(cfg)

    def status(self) -> str:
        """Name the engine."""
        return "the engine in this process"

    async def close(self) -> None:
        """Stop the learner's thread and close the engine."""
        if self._learner is not None:
            self._learner.close()
        if self._engine is not None:
            await self._engine.close()


class LocalLearner:
    """A `LearnerHandle` that runs the learner on a separate thread, so that sampling and judging can go on."""

    def __init__(self, learner: Learner, *, num_threads: int) -> None:
        import torch

        self._learner = learner
        self._notes: list[str] = []
        # One thread, so the learner's calls never overlap.
        self._thread = ThreadPoolExecutor(1, "learner", initializer=torch.set_num_threads, initargs=(num_threads,))

    async def restore(self) -> Counters | None:
        """Restore the newest checkpoint; see `Learner.restore`."""
        return await self._run(self._learner.restore)

    async def notes(self) -> tuple[str, ...]:
        """Return notes for the stage's manifest; see `Learner.notes`."""
        return (*self._learner.notes, *self._notes)

    def add_note(self, note: str) -> None:
        """Add a note for the stage's manifest, unless it is empty."""
        self._notes += [note] if note else []

    async def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Do one RL step; see `Learner.step`."""
        return await self._run(partial(self._learner.step, samples))

    async def distance(self, samples: Sequence[TrainSample]) -> float:
        """Compare with the sampler's log-probs; see `Learner.distance`."""
        return await self._run(partial(self._learner.distance, samples))

    async def weights(self) -> WeightSource:
        """Return the current weights; see `Learner.weights`."""
        return await self._run(self._learner.weights)

    async def save(self, counters: Counters) -> None:
        """Save a checkpoint; see `Learner.save`."""
        await self._run(partial(self._learner.save, counters))

    async def export(self, target: Path) -> None:
        """Write the model folder; see `Learner.export`."""
        await self._run(partial(self._learner.export, target))

    def close(self) -> None:
        """Shut the thread down without waiting for a running call."""
        self._thread.shutdown(wait=False)

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
