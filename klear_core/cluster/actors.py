"""Define the code that runs inside Ray actors (thin wrappers around plain classes) and its messages; imports no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from klear_core.cluster.placement import num_engine_ranks
from klear_core.generate.engine import SamplingParams, SleepingEngine, WeightOffer
from klear_core.rl.workers import RlSetup
from klear_core.types import Completion, TrainSample

if TYPE_CHECKING:
    from torch import Tensor

    from klear_core.generate.transfer import WeightServer
    from klear_core.train.checkpoint import Counters

Arrays = dict[str, tuple[str, np.ndarray[Any, Any]]]
"""Weights as (torch dtype, numpy array) by name. Ray shares numpy arrays between processes and pickles tensors."""

_TRANSFER_TIMEOUT_S = 300.0  # longest wait of learner and engine for each other at a weight transfer
_POLL_S = 0.1  # longest wait of a rollout actor for a first reply before it returns none
_GATHER_S = 0.04  # longest wait for more replies to return with the first: each message costs a millisecond


def to_arrays(weights: Mapping[str, Tensor]) -> Arrays:
    """Return numpy views of the weights; bfloat16, which numpy lacks, as int16 with the same bits."""
    import torch

    arrays: Arrays = {}
    for name, weight in weights.items():
        dtype = str(weight.dtype).removeprefix("torch.")
        bits = weight.view(torch.int16) if weight.dtype == torch.bfloat16 else weight
        arrays[name] = (dtype, bits.numpy())
    return arrays


def to_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Return copies as tensors: arrays in the object store are shared by all readers and must not be written."""
    import torch

    tensors = {}
    for name, (dtype, array) in arrays.items():
        # The view turns int16 back into bfloat16; for other dtypes it changes nothing.
        tensors[name] = torch.from_numpy(array.copy()).view(getattr(torch, dtype))
    return tensors


class LearnerActor:
    """Run one learner rank."""

    def start(self, setup: RlSetup, rank: int, init_method: str) -> None:
        """Join the process group of all ranks and load the initial model."""
        from klear_core.rl.learner import Learner
        from klear_core.train.parallel import join_world

        self._exit = ExitStack()  # never closed: the process group lasts as long as the actor
        joining = join_world(setup.cfg.runtime, rank=rank, init_method=init_method, sees_only_its_gpu=True)
        world = self._exit.enter_context(joining)
        self._learner = Learner(setup.cfg, setup.model, seed=setup.seed, workdir=setup.workdir, world=world)
        self._setup, self._world = setup, world
        self._host = urlsplit(init_method).hostname or ""  # the node of rank 0
        self._server: WeightServer | None = None

    def restore(self) -> Counters | None:
        """Restore the newest checkpoint; see `Learner.restore`."""
        return self._learner.restore()

    def notes(self) -> tuple[str, ...]:
        """Return notes for the stage's manifest, the same on each rank."""
        return self._learner.notes

    def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Do one RL step; see `Learner.step`."""
        return self._learner.step(samples)

    def weights(self) -> tuple[bool, Arrays]:
        """Return True and the weights, as two objects: the caller awaits the first; the second stays in the store."""
        return True, to_arrays(self._learner.weights())

    def offer_weights(self) -> WeightOffer | None:
        """Return an offer of the current weights, which `send_weights` then sends; None on ranks above 0."""
        if self._world.rank > 0:
            return None
        from klear_core.generate.transfer import WeightServer

        cfg = self._setup.cfg
        if self._server is None:
            timeout_s = min(_TRANSFER_TIMEOUT_S, cfg.runtime.stall_timeout_s)
            self._server = WeightServer(self._host, timeout_s=timeout_s)
        return self._server.offer(
            self._learner.weight_specs(),
            version=self._learner.version,
            backend="nccl" if self._world.device.type == "cuda" else "gloo",
            num_ranks=num_engine_ranks(cfg.rollout.engine),
        )

    def send_weights(self, offer: WeightOffer, engines: Sequence[int]) -> list[int]:
        """Send the offered weights to these engines while they fetch; rank 0 returns the engines that were lost."""
        assert offer.version == self._learner.version, (offer.version, self._learner.version)
        if self._server is not None:
            return self._server.send(offer, self._learner.each_weight(), engines)
        for _ in self._learner.each_weight():  # gathering a sharded weight is a collective call: take part in it
            pass
        return []

    def save(self, counters: Counters) -> None:
        """Save a checkpoint; see `Learner.save`."""
        self._learner.save(counters)

    def export(self, target: Path) -> None:
        """Write the model folder; see `Learner.export`."""
        self._learner.export(target)


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


class RolloutActor:
    """Run one sampling engine."""

    async def start(self, setup: RlSetup, arrays: Arrays | None, version: int) -> None:
        """Build the engine with the initial weights (version 0), then load `arrays`, if given, as `version`."""
        from klear_core.generate.factory import build_trainable_engine
        from klear_core.train.base import model_folder

        cfg, folder = setup.cfg, model_folder(setup.model)
        threads = cfg.runtime.rollout_threads
        self._engine = await build_trainable_engine(cfg.rollout.engine, folder, num_threads=threads, seed=setup.seed)
        self._running: dict[asyncio.Task[Reply], int] = {}
        if arrays is not None:
            await self.load_weights(arrays, version)

    async def load_weights(self, arrays: Arrays, version: int) -> None:
        """Load weights from the object store; see `TrainableEngine.load_weights`."""
        await self._engine.load_weights(to_tensors(arrays), version=version)

    async def fetch_weights(self, offer: WeightOffer) -> None:
        """Load the weights that the learner offers. After an error old and new ones are mixed: discard the engine."""
        await self._engine.load_weights(offer, version=offer.version)

    async def sleep(self) -> None:
        """Free the engine's GPU memory; see `SleepingEngine.sleep`."""
        await self._sleeper().sleep()

    async def wake(self) -> None:
        """Allocate the engine's GPU memory again; see `SleepingEngine.wake`."""
        await self._sleeper().wake()

    async def exchange(self, requests: Sequence[Request], cancelled: Sequence[int]) -> list[Reply]:
        """Start these requests, cancel others, and return finished replies after a short wait for the first."""
        for request in requests:
            # The dict also keeps the task alive: asyncio itself holds only a weak reference.
            self._running[asyncio.create_task(self._answer(request))] = request.request_id
        unwanted = [task for task, request_id in self._running.items() if request_id in cancelled]
        for task in unwanted:
            task.cancel()
            del self._running[task]
        await self._wait(_POLL_S, asyncio.FIRST_COMPLETED)
        await self._wait(_GATHER_S, asyncio.ALL_COMPLETED)
        finished = [task for task in self._running if task.done()]
        for task in finished:
            del self._running[task]
        return [task.result() for task in finished]

    async def close(self) -> None:
        """Close the engine with everything that it started."""
        await self._engine.close()

    def _sleeper(self) -> SleepingEngine:
        assert isinstance(self._engine, SleepingEngine), type(self._engine)
        return self._engine

    async def _wait(self, timeout_s: float, until: str) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s, return_when=until)

    async def _answer(self, request: Request) -> Reply:
        try:
            completions = await self._engine.generate(request.prompt_ids, request.params)
        except ValueError as e:  # an invalid request: the caller of `generate` gets the error
            return Reply(request_id=request.request_id, completions=(), error=str(e))
        return Reply(request_id=request.request_id, completions=tuple(completions))
