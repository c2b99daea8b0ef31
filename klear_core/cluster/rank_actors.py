"""Define the Ray actors that run learner ranks, thin shells around plain classes; imports no Ray."""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from logging.handlers import QueueHandler
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple
from urllib.parse import urlsplit

import numpy as np

from klear_core import stopping
from klear_core.artifacts.manifest import FileRecord
from klear_core.artifacts.remote_paths import send_results
from klear_core.cluster.placement import num_engine_ranks, transfer_backend
from klear_core.config.train import TrainRuntime
from klear_core.generate.engine import WeightOffer
from klear_core.metrics import Heartbeat, NullTelemetry, heartbeat
from klear_core.rl.interfaces import RlSetup
from klear_core.rl.sample_arrays import SampleArrays, Tokens, with_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from klear_core.generate.weight_transfer import WeightServer
    from klear_core.rl.learner import Learner
    from klear_core.train.distributed import Body

LOGGER = "klear_core"

T = TypeVar("T")
Args = TypeVarTuple("Args")


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A call of `Telemetry.log`, or of `Telemetry.add`."""

    metrics: dict[str, float]
    step: int
    is_added: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """A call of `Telemetry.progress`."""

    done: int
    total: int
    note: str


Report = Logged | Progressed | logging.LogRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Everything a rank reports in one answer to the driver."""

    items: list[Report]
    progress: Heartbeat


class Outbox:
    """Telemetry and log queue of a rank, which keeps everything until the driver takes it. Thread-safe."""

    def __init__(self) -> None:
        self._reports: deque[Report] = deque()

    def put_nowait(self, record: logging.LogRecord) -> None:
        """Keep a log record, which `QueueHandler` has made picklable."""
        self._reports.append(record)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Keep metrics; see `Telemetry.log`."""
        self._reports.append(Logged(metrics=dict(metrics), step=step))

    def add(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Keep metrics of an earlier step; see `Telemetry.add`."""
        self._reports.append(Logged(metrics=dict(metrics), step=step, is_added=True))

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Keep progress; see `Telemetry.progress`."""
        self._reports.append(Progressed(done=done, total=total, note=note))

    def take(self) -> list[Report]:
        """Return everything kept, and forget it."""
        # As many as there are now: other threads may append meanwhile, and those stay for the next call.
        return [self._reports.popleft() for _ in range(len(self._reports))]


class RankActor:
    """Run one learner rank. `take_reports` runs on a thread of its own, while another call works."""

    def __init__(self) -> None:
        # Read when torch is imported: rows of many lengths would leave the GPU's memory in pieces.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        self._outbox = Outbox()
        self._exit = ExitStack()  # never closed: the process group lasts as long as the actor

    def join(self, runtime: TrainRuntime, rank: int, init_method: str, level: int) -> None:
        """Join the process group of all ranks; keep log records from `level` on, for the driver."""
        from klear_core.cluster.nodes import bind_to_node_address
        from klear_core.train.distributed import join_world

        logger = logging.getLogger(LOGGER)
        # The other ranks log what rank 0 logs; only their warnings may be about something of their own.
        logger.setLevel(level if rank == 0 else max(level, logging.WARNING))
        logger.addHandler(QueueHandler(self._outbox))  # type: ignore[arg-type]
        # Without Ray all ranks are on the machine of rank 0.
        self._host = bind_to_node_address() or urlsplit(init_method).hostname or ""
        self._world = self._exit.enter_context(join_world(runtime, rank=rank, init_method=init_method))

    def run(self, body: Body[Any]) -> Any:
        """Run `body` to its end and return its result; None on ranks above 0, whose telemetry is dropped."""
        is_first = self._world.rank == 0
        try:
            value = body(self._world, self._outbox if is_first else NullTelemetry())
        except Exception as error:  # noqa: BLE001  # raised again, in a form that can be sent to the driver
            raise _portable(error, self._world.rank) from None
        return value if is_first else None

    def take_reports(self) -> Reports:
        """Return telemetry and log records since the last call, and how much the rank has done."""
        return Reports(items=self._outbox.take(), progress=heartbeat())

    def stop(self) -> None:
        """Ask the training of this rank to save a checkpoint and stop."""
        stopping.ask()

    def stacks(self) -> str:
        """Return the Python stack of every thread of this process."""
        with TemporaryFile() as file:  # faulthandler writes to a file alone
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read().decode(errors="replace")

    def process_id(self) -> int:
        """Return the id of the actor's process."""
        return os.getpid()


def _portable(error: Exception, rank: int) -> Exception:
    """Return the error with its traceback as a note, because a traceback cannot be pickled.

    If the error cannot be pickled either, return a RuntimeError in its place.
    """
    trace = f"On rank {rank}:\n{''.join(traceback.format_exception(error))}"
    error.add_note(trace)
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:  # noqa: BLE001  # an exception's class can raise anything when it is copied
        error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(trace)
    return error


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

        setup = setup.on_this_node()
        self._learner = Learner(setup.cfg, setup.model, seed=setup.seed, workdir=setup.workdir, world=self._world)
        self._setup = setup
        self._server: WeightServer | None = None

    def call(self, method: Callable[[Learner, *Args], T], *args: *Args) -> T:
        """Call `method` with this rank's learner; see `LearnerHandle.call`."""
        return method(self._learner, *args)

    def shares(self, counts: Sequence[SampleArrays]) -> list[list[int]]:
        """Return which rows each data rank computes in the next step; see `Learner.shares`."""
        return self._learner.shares(counts)

    def step(self, counts: Sequence[SampleArrays], tokens: Tokens) -> dict[str, float]:
        """Do one RL step with the tokens of this rank's rows; see `Learner.step`."""
        return self._learner.step(with_tokens(counts, tokens))

    def weights(self, num_parts: int) -> tuple[bool | Arrays, ...]:
        """Return True and the weights in so many parts, each an object of its own.

        The caller awaits the first; the parts stay in the store.
        """
        return True, *split_parts(to_arrays(self._learner.weights()), num_parts)

    def offer_weights(self) -> WeightOffer:
        """Return this rank's offer of the current weights, which `send_weights` then sends."""
        from klear_core.generate.weight_transfer import WeightServer

        cfg = self._setup.cfg
        # One store for all transfers of this process; each offer has a key of its own in it.
        if self._server is None:
            timeout_s = min(_TRANSFER_TIMEOUT_S, cfg.runtime.stall_timeout_s)
            self._server = WeightServer(self._host, timeout_s=timeout_s)
        return self._server.offer(
            self._learner.weight_specs(),
            version=self._learner.version,
            backend=transfer_backend(cfg.runtime, self._world.device.type),
            num_ranks=num_engine_ranks(cfg.rollout.engine),
        )

    def send_weights(self, offer: WeightOffer, engines: Sequence[int]) -> list[int]:
        """Send the offered weights to these engines while they fetch; return the engines that were lost.

        Gathering a sharded weight is a collective call, so ranks without an engine take part, too.
        """
        assert offer.version == self._learner.version, (offer.version, self._learner.version)
        if engines and self._server is not None:
            return self._server.send(offer, self._learner.each_weight(), engines)
        for _ in self._learner.each_weight():
            pass
        return []

    def offer_known(self) -> tuple[WeightOffer, str]:
        """Return this rank's offer of known tensors, which `send_known` then sends, and their digest."""
        from klear_core.generate.weight_transfer import (
            CHECK_CHUNK_BYTES,
            WeightServer,
            digest_of,
            known_tensors,
            specs_of,
        )

        known = known_tensors()
        # A store of its own, because the timeout of a check is shorter.
        self._check_server = WeightServer(self._host, timeout_s=check_timeout_s(self._setup))
        offer = self._check_server.offer(
            specs_of(known),
            version=0,
            backend=transfer_backend(self._setup.cfg.runtime, self._world.device.type),
            num_ranks=num_engine_ranks(self._setup.cfg.rollout.engine),
            chunk_bytes=CHECK_CHUNK_BYTES,
        )
        return offer, digest_of(known.items())

    def send_known(self, offer: WeightOffer, engines: Sequence[int]) -> list[int]:
        """Send the known tensors to these engines while they fetch; return the engines that were lost."""
        from klear_core.generate.weight_transfer import known_tensors

        on_device = ((name, tensor.to(self._world.device)) for name, tensor in known_tensors().items())
        return self._check_server.send(offer, on_device, engines)

    def export(self, target: Path) -> tuple[FileRecord, ...]:
        """Write the model folder; see `Learner.export`. Rank 0 returns the files, for a driver with another disk."""
        workdir, remote = self._setup.workdir, self._setup.remote
        if remote is None:
            self._learner.export(target)
            return ()
        self._learner.export(workdir / target.name)
        return send_results(remote, workdir, self._learner.results()) if self._world.rank == 0 else ()
