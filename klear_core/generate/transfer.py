"""Weights from the learner's memory straight into the engines': over NCCL between GPUs, over gloo between CPUs, on one node or many.

For each hand-over every engine gets a process group of its own with the learner, who is rank 0 in it, and which is gone
afterwards. So an engine that dies breaks its own group and no other, and one that takes its place needs no bookkeeping. Making
the groups takes NCCL about a second, and an RL step minutes.

Time is kept here, on the CPU. NCCL's `wait` only makes the GPU wait, and its timeout ends the whole process; gloo has no abort.

vLLM has a weight transfer of its own. Not used, because its trainer side waits in NCCL for ever if an engine is gone, and
because it knows no CPU backend, so that nothing of it could be tested without GPUs.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from klear_core.generate.engine import TensorSpec, WeightOffer

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 20
"""One message: large enough for full bandwidth, small beside a layer's activations."""
_POLL_S = 0.002
_HARMLESS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""NCCL's watchdog reports what went wrong in a group that is made under these, and leaves the process alive."""
_MAKING_ONE = threading.Lock()


class WeightServer:
    """The learner's side, on its rank 0."""

    def __init__(self, host: str, *, timeout_s: float) -> None:
        """Listen at a free port; `host` is this machine's name or address for the engines."""
        self._timeout_s = timeout_s
        self._host = host
        wait = timedelta(seconds=timeout_s)
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait)
        self._num_offers = 0

    def offer(
        self,
        tensors: Sequence[TensorSpec],
        *,
        version: int,
        backend: Literal["gloo", "nccl"],
        num_ranks: int,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> WeightOffer:
        """An offer to engine 0 of what `send` is to send next; `replace` makes it one to another engine."""
        self._num_offers += 1
        return WeightOffer(
            host=self._host,
            port=self._store.port,
            key=str(self._num_offers),
            engine=0,
            num_ranks=num_ranks,
            backend=backend,
            timeout_s=self._timeout_s,
            version=version,
            tensors=tuple(tensors),
            chunk_bytes=chunk_bytes,
        )

    def send(self, offer: WeightOffer, weights: Iterable[tuple[str, Tensor]], engines: Sequence[int]) -> list[int]:
        """Send to all these engines at once, as they fetch; those that went away meanwhile. `weights` are looked at one by one."""
        groups = self._join(offer, self._present(offer, engines))
        device = _device(offer)
        try:
            source = iter(weights)
            for chunk in cut(offer.tensors, offer.chunk_bytes):
                bytes_N = torch.cat([_checked(next(source), spec).reshape(-1) for spec in chunk]).to(device).view(torch.uint8)
                self._with_each(groups, partial(_Group.broadcast, bytes_N=bytes_N))
            assert next(source, None) is None, "more weights than were offered"
            self._with_each(groups, partial(_Group.arrive, device=device))
        except BaseException:
            for group in groups.values():
                group.abandon()
            raise
        for group in groups.values():
            group.close()
        return [engine for engine in engines if engine not in groups]

    def _join(self, offer: WeightOffer, engines: Sequence[int]) -> dict[int, _Group]:
        """Groups with all these engines, made side by side; without those that fail or take too long."""
        deadline = self._deadline()
        coming = {engine: _start_joining(self._store, replace(offer, engine=engine), rank=0) for engine in engines}
        groups: dict[int, _Group] = {}
        for engine, group in coming.items():
            with _Losing(groups, engine):
                groups[engine] = _joined(group, deadline)
        return groups

    def _with_each(self, groups: dict[int, _Group], start: Callable[[_Group], Any]) -> None:
        """Start something with all engines, and wait for all; those with whom it fails are left out of `groups`."""
        deadline = self._deadline()
        works = {}
        for engine, group in list(groups.items()):
            with _Losing(groups, engine):
                works[engine] = start(group)
        for engine, work in works.items():
            with _Losing(groups, engine):
                _finish(work, deadline)

    def _deadline(self) -> float:
        """Half the time that engines wait, so that one that is stuck does not cost the others their patience."""
        return time.monotonic() + self._timeout_s / 2

    def _present(self, offer: WeightOffer, engines: Sequence[int]) -> list[int]:
        """The engines that have come by the deadline."""
        deadline = self._deadline()
        keys = {engine: [_seat(offer, engine, rank) for rank in range(1, 1 + offer.num_ranks)] for engine in engines}
        while time.monotonic() < deadline and not self._store.check([key for of_engine in keys.values() for key in of_engine]):
            time.sleep(_POLL_S)
        present = [engine for engine in engines if self._store.check(keys[engine])]
        if len(present) < len(engines):
            log.warning("engines %s did not come for their weights", sorted(set(engines) - set(present)))
        return present


def fetch(offer: WeightOffer, *, rank: int) -> Iterator[tuple[str, Tensor]]:
    """The offered weights, as they arrive; `rank` counts the engine's processes from 1. RuntimeError if the learner is not there."""
    store = TCPStore(offer.host, offer.port, timeout=timedelta(seconds=offer.timeout_s))
    store.set(_seat(offer, offer.engine, rank), "taken")
    group = _joined(_start_joining(store, offer, rank=rank), time.monotonic() + offer.timeout_s)
    device = _device(offer)
    try:
        for chunk in cut(offer.tensors, offer.chunk_bytes):
            flat_N = torch.empty(sum(map(_numel, chunk)), dtype=getattr(torch, chunk[0].dtype), device=device)
            _finish(group.broadcast(flat_N.view(torch.uint8)), time.monotonic() + offer.timeout_s)
            for spec, part_N in zip(chunk, torch.split(flat_N, [_numel(spec) for spec in chunk]), strict=True):
                yield spec.name, part_N.view(spec.shape)
        _finish(group.arrive(device), time.monotonic() + offer.timeout_s)
    except BaseException:  # GeneratorExit is one: the engine wants no more
        group.abandon()
        raise
    group.close()


def cut(tensors: Sequence[TensorSpec], chunk_bytes: int) -> list[tuple[TensorSpec, ...]]:
    """Messages: neighbours of one dtype, up to `chunk_bytes` together; a tensor above that travels alone. Both sides cut alike."""
    chunks: list[list[TensorSpec]] = []
    free = 0
    for spec in tensors:
        size = _numel(spec) * getattr(torch, spec.dtype).itemsize
        if not chunks or size > free or chunks[-1][0].dtype != spec.dtype:
            chunks.append([])
            free = chunk_bytes
        chunks[-1].append(spec)
        free -= size
    return [tuple(chunk) for chunk in chunks]


class _Group:
    """The group of an engine and the learner. It holds the only reference to torch's, for whoever drops that waits for its threads."""

    def __init__(self, torchs: Any) -> None:
        self._held = [torchs]

    def broadcast(self, bytes_N: Tensor) -> Any:
        """The learner's bytes, to be finished."""
        return self._held[0].broadcast(bytes_N, 0)

    def arrive(self, device: torch.device) -> Any:
        """To be finished when all have come this far: nobody leaves before all have everything."""
        return self._held[0].allreduce([torch.ones(1, device=device)])

    def close(self) -> None:
        """Leave, nothing being under way."""
        self._held.pop().shutdown()

    def abandon(self) -> None:
        """Leave whatever is under way, in a thread: gloo would wait for a peer that is stuck until its own timeout."""
        threading.Thread(target=lambda: self._held.pop().abort(), daemon=True).start()


class _Losing:
    """Whatever fails in here costs this engine its group, and nobody else anything."""

    def __init__(self, groups: dict[int, _Group], engine: int) -> None:
        self._groups, self._engine = groups, engine

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, RuntimeError):  # how torch.distributed reports a lost peer
            return False
        log.warning("engine %d went away while it was given weights: %s", self._engine, error)
        if self._engine in self._groups:
            self._groups.pop(self._engine).abandon()
        return True


def _start_joining(store: Store, offer: WeightOffer, *, rank: int) -> Future[_Group]:
    """In a thread, which is left to itself if it takes too long: no backend can be relied on to give up."""
    device, joining = _device(offer), Future[_Group]()

    def join() -> None:
        try:
            joining.set_result(_Group(_torchs_group(store, offer, rank, device)))
        except BaseException as error:  # noqa: BLE001  # carried to whoever waits for the group
            joining.set_exception(error)

    threading.Thread(target=join, daemon=True).start()
    return joining


def _joined(joining: Future[_Group], deadline: float) -> _Group:
    try:
        return joining.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        raise RuntimeError("it did not join in time") from None


def _finish(work: Any, deadline: float) -> None:
    """Until torch has done it; RuntimeError if it failed, or the deadline passes."""
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError("it did not answer in time")
        time.sleep(_POLL_S)
    work.wait()  # does not wait any more, but raises what the work ended with


def _torchs_group(store: Store, offer: WeightOffer, rank: int, device: torch.device) -> Any:
    """A bare backend (torch's stubs know none of its collectives), outside torch's global groups, of which there may be others.

    Its own timeout only cleans up behind ours.
    """
    meeting = PrefixStore(f"{offer.key}/{offer.engine}", store)
    timeout = timedelta(seconds=2 * offer.timeout_s)
    if offer.backend == "gloo":
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        return ProcessGroupGloo(meeting, rank, 1 + offer.num_ranks, timeout)
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _harmless():
        group: Any = ProcessGroupNCCL(meeting, rank, 1 + offer.num_ranks, options)
    group.eager_connect_single_device(device)  # or the first broadcast would, where nobody looks at the clock
    return group


@contextmanager
def _harmless() -> Iterator[None]:
    """NCCL groups made meanwhile never end the process; torch reads this from the environment, once for each."""
    with _MAKING_ONE:
        before = {name: os.environ.get(name) for name in _HARMLESS}
        os.environ.update(_HARMLESS)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _seat(offer: WeightOffer, engine: int, rank: int) -> str:
    return f"{offer.key}/{engine}/seat/{rank}"


def _checked(pair: tuple[str, Tensor], spec: TensorSpec) -> Tensor:
    name, tensor = pair
    assert (name, tuple(tensor.shape), tensor.dtype) == (spec.name, spec.shape, getattr(torch, spec.dtype)), (name, tensor.shape, spec)
    return tensor


def _numel(spec: TensorSpec) -> int:
    return math.prod(spec.shape)


def _device(offer: WeightOffer) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if offer.backend == "nccl" else torch.device("cpu")
