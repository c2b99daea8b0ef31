"""Define the code that runs inside the learner's Ray actors, a thin wrapper around a plain class; imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from klear_core.artifacts.home import send_results
from klear_core.artifacts.ledger import FileRecord
from klear_core.cluster.placement import num_engine_ranks
from klear_core.cluster.rank_actor import RankActor
from klear_core.generate.engine import WeightOffer
from klear_core.rl.workers import RlSetup
from klear_core.types import TrainSample

if TYPE_CHECKING:
    from torch import Tensor

    from klear_core.generate.transfer import WeightServer
    from klear_core.train.checkpoint import Counters

Arrays = dict[str, tuple[str, np.ndarray[Any, Any]]]
"""Weights as (torch dtype, numpy array) by name. Ray shares numpy arrays between processes and pickles tensors."""

_TRANSFER_TIMEOUT_S = 300.0  # longest wait of learner and engine for each other at a weight transfer
_CHECK_TIMEOUT_S = 120.0  # the same for the check of direct transfer


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


def split_parts(arrays: Arrays, count: int) -> list[Arrays]:
    """Split weights into `count` parts of about the same size, in order; with fewer weights some are empty."""
    parts: list[Arrays] = [{} for _ in range(count)]
    total = sum(array.nbytes for _, array in arrays.values())
    size = 0
    for name, (dtype, array) in arrays.items():
        parts[min(count - 1, count * size // max(1, total))][name] = (dtype, array)
        size += array.nbytes
    return parts


def check_timeout_s(setup: RlSetup) -> float:
    """Return how many seconds an engine waits for the learner in the check of direct transfer."""
    return min(_CHECK_TIMEOUT_S, setup.cfg.runtime.stall_timeout_s)


class LearnerActor(RankActor):
    """Run one learner rank of RL."""

    def load(self, setup: RlSetup) -> None:
        """Load the initial model, once the rank has joined the others (collective call)."""
        from klear_core.rl.learner import Learner

        setup = setup.here()
        self._learner = Learner(setup.cfg, setup.model, seed=setup.seed, workdir=setup.workdir, world=self._world)
        self._setup = setup
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

    def weights(self, num_parts: int) -> tuple[bool | Arrays, ...]:
        """Return True and the weights in so many parts, each an object of its own.

        The caller awaits the first; the parts stay in the store.
        """
        return True, *split_parts(to_arrays(self._learner.weights()), num_parts)

    def offer_weights(self) -> WeightOffer | None:
        """Return an offer of the current weights, which `send_weights` then sends; None on ranks above 0."""
        if self._world.rank > 0:
            return None
        from klear_core.generate.transfer import WeightServer

        cfg = self._setup.cfg
        # One store for all transfers of this process; each offer has a key of its own in it.
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

    def distance(self, samples: Sequence[TrainSample]) -> float:
        """Compare with the sampler's log-probs; see `Learner.distance`."""
        return self._learner.distance(samples)

    def offer_known(self) -> tuple[WeightOffer, str]:
        """Return an offer of known tensors, which `send_known` then sends, and their digest. For rank 0 only."""
        from klear_core.generate.transfer import WeightServer
        from klear_core.generate.transfer_check import CHECK_CHUNK_BYTES, digest_of, known_tensors, specs_of

        known = known_tensors()
        # A store of its own, because the timeout of a check is shorter.
        self._check_server = WeightServer(self._host, timeout_s=check_timeout_s(self._setup))
        offer = self._check_server.offer(
            specs_of(known),
            version=0,
            backend="nccl" if self._world.device.type == "cuda" else "gloo",
            num_ranks=num_engine_ranks(self._setup.cfg.rollout.engine),
            chunk_bytes=CHECK_CHUNK_BYTES,
        )
        return offer, digest_of(known.items())

    def send_known(self, offer: WeightOffer, engines: Sequence[int]) -> list[int]:
        """Send the known tensors to these engines while they fetch; return the engines that were lost."""
        from klear_core.generate.transfer_check import known_tensors

        on_device = ((name, tensor.to(self._world.device)) for name, tensor in known_tensors().items())
        return self._check_server.send(offer, on_device, engines)

    def save(self, counters: Counters) -> None:
        """Save a checkpoint; see `Learner.save`."""
        self._learner.save(counters)

    def export(self, target: Path) -> tuple[FileRecord, ...]:
        """Write the model folder; see `Learner.export`. Rank 0 returns the files, for a driver with another disk."""
        workdir, home = self._setup.workdir, self._setup.home
        if home is None:
            self._learner.export(target)
            return ()
        self._learner.export(workdir / target.name)
        return send_results(home, workdir, self._learner.results()) if self._world.rank == 0 else ()
