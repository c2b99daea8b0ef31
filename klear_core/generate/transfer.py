"""Send weights from the learner's memory to the engines: over NCCL between GPUs, over gloo between CPUs.

For each transfer every engine forms its own process group with the learner, which is rank 0 in it; it is closed
afterwards. So an engine that dies breaks no other engine's group, and its replacement needs no bookkeeping. Creating
the groups takes NCCL about a second, and an RL step minutes. Learner and engines may be on different nodes.

Timeouts are kept here, on the CPU. NCCL's `wait` only makes the GPU wait, and its timeout ends the process; gloo has no
abort.

vLLM's own weight transfer is not used, because its trainer side waits in NCCL for ever if an engine is gone, and
because it has no CPU backend, so that none of it could be tested without GPUs.
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
"""Bytes of one message: large enough for full bandwidth, small next to a layer's activations."""
_POLL_S = 0.002
_HARMLESS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Environment in which NCCL's watchdog reports the errors of a new group, but leaves the process alive."""
_MAKING_ONE = threading.Lock()


class WeightServer:
    """The learner's side of a transfer, on its rank 0."""

    def __init__(self, host: str, *, timeout_s: float) -> None:
        """Listen on a free port; `host` is this machine's name or address for the engines."""
        self._timeout_s = timeout_s
        self._host = host
        wait = timedelta(seconds=timeout_s)
        # port 0: the system picks a free one, which travels in the offer
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
        """Return an offer to engine 0 of what `send` will send next; change `engine` to address another."""
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
        """Send to all these engines at once, and return those that were lost. Reads `weights` one by one."""
        groups = self._join(offer, self._present(offer, engines))
        device = _device(offer)
        try:
            source = iter(weights)
            for chunk in cut(offer.tensors, offer.chunk_bytes):
                # a chunk has one dtype; as flat bytes, one broadcast carries all its tensors
                bytes_N = (
                    torch.cat([_checked(next(source), spec).reshape(-1) for spec in chunk]).to(device).view(torch.uint8)
                )
                self._with_each(groups, partial(_Group.broadcast, bytes_N=bytes_N))
            assert next(source, None) is None, "more weights than were offered"
            # a barrier: nobody closes a group before all have received everything
            self._with_each(groups, partial(_Group.arrive, device=device))
        except BaseException:
            for group in groups.values():
                group.abandon()
            raise
        for group in groups.values():
            group.close()
        return [engine for engine in engines if engine not in groups]

    def _join(self, offer: WeightOffer, engines: Sequence[int]) -> dict[int, _Group]:
        """Create the groups with all these engines in parallel; leave out those that fail or take too long."""
        deadline = self._deadline()
        coming = {engine: _start_joining(self._store, replace(offer, engine=engine), rank=0) for engine in engines}
        groups: dict[int, _Group] = {}
        for engine, group in coming.items():
            with _Losing(groups, engine):
                groups[engine] = _joined(group, deadline)
        return groups

    def _with_each(self, groups: dict[int, _Group], start: Callable[[_Group], Any]) -> None:
        """Start an operation with all engines, then wait for all; remove those that fail from `groups`."""
        deadline = self._deadline()
        works = {}
        for engine, group in list(groups.items()):
            with _Losing(groups, engine):
                works[engine] = start(group)
        for engine, work in works.items():
            with _Losing(groups, engine):
                _finish(work, deadline)

    def _deadline(self) -> float:
        """Return a deadline after half the engines' timeout, so that a stuck engine does not time out the others."""
        return time.monotonic() + self._timeout_s / 2

    def _present(self, offer: WeightOffer, engines: Sequence[int]) -> list[int]:
        """Return the engines that have registered by the deadline."""
        deadline = self._deadline()
        keys = {engine: [_seat(offer, engine, rank) for rank in range(1, 1 + offer.num_ranks)] for engine in engines}
        while time.monotonic() < deadline and not self._store.check(
            [key for of_engine in keys.values() for key in of_engine]
        ):
            time.sleep(_POLL_S)
        present = [engine for engine in engines if self._store.check(keys[engine])]
        if len(present) < len(engines):
            log.warning("engines %s did not come for their weights", sorted(set(engines) - set(present)))
        return present


def fetch(offer: WeightOffer, *, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the offered weights as they arrive; `rank` counts the engine's processes from 1.

    RuntimeError if the learner is unreachable.
    """
    store = TCPStore(offer.host, offer.port, timeout=timedelta(seconds=offer.timeout_s))
    # the learner opens a group only with engines whose ranks have all registered
    store.set(_seat(offer, offer.engine, rank), "taken")
    group = _joined(_start_joining(store, offer, rank=rank), time.monotonic() + offer.timeout_s)
    device = _device(offer)
    try:
        for chunk in cut(offer.tensors, offer.chunk_bytes):
            # receive as bytes, read as the chunk's dtype: both are views of one buffer
            flat_N = torch.empty(sum(map(_numel, chunk)), dtype=getattr(torch, chunk[0].dtype), device=device)
            _finish(group.broadcast(flat_N.view(torch.uint8)), time.monotonic() + offer.timeout_s)
            for spec, part_N in zip(chunk, torch.split(flat_N, [_numel(spec) for spec in chunk]), strict=True):
                yield spec.name, part_N.view(spec.shape)
        _finish(group.arrive(device), time.monotonic() + offer.timeout_s)
    except BaseException:  # GeneratorExit is one: the engine stopped reading
        group.abandon()
        raise
    group.close()


def cut(tensors: Sequence[TensorSpec], chunk_bytes: int) -> list[tuple[TensorSpec, ...]]:
    """Split tensors into messages: neighbours of one dtype, up to `chunk_bytes`; a larger tensor is sent alone.

    Sender and receiver both call this, so that their messages match.
    """
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
    """The process group of an engine and the learner.

    Holds the only reference to torch's group, because dropping the last one waits for the group's threads.
    """

    def __init__(self, torchs: Any) -> None:
        self._held = [torchs]

    def broadcast(self, bytes_N: Tensor) -> Any:
        """Start a broadcast of the learner's bytes; returns the pending work."""
        return self._held[0].broadcast(bytes_N, 0)

    def arrive(self, device: torch.device) -> Any:
        """Start a barrier, so that no process leaves before all have everything; returns the pending work."""
        return self._held[0].allreduce([torch.ones(1, device=device)])

    def close(self) -> None:
        """Close the group; nothing may be pending."""
        self._held.pop().shutdown()

    def abandon(self) -> None:
        """Abort the group, in a thread: gloo would wait for a stuck peer until its own timeout."""
        threading.Thread(target=lambda: self._held.pop().abort(), daemon=True).start()


class _Losing:
    """Context in which a failure removes this engine from `groups`, without effect on the other engines."""

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
    """Join the group in a daemon thread, which is abandoned if it takes too long: no backend reliably times out."""
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
    """Wait until torch has done the work; RuntimeError if it failed, or the deadline passes."""
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError("it did not answer in time")
        time.sleep(_POLL_S)
    work.wait()  # returns at once; raises the error that the work ended with


def _torchs_group(store: Store, offer: WeightOffer, rank: int, device: torch.device) -> Any:
    """Return a bare backend, independent of torch's global groups, of which others may exist.

    The type is Any, because torch's stubs lack the collectives. Its timeout is longer than ours and only cleans up.
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
    # otherwise the first broadcast would connect, without a deadline
    group.eager_connect_single_device(device)
    return group


@contextmanager
def _harmless() -> Iterator[None]:
    """Set the variables under which new NCCL groups never end the process; torch reads them once per group."""
    with _MAKING_ONE:  # the environment belongs to all threads
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
    assert (name, tuple(tensor.shape), tensor.dtype) == (spec.name, spec.shape, getattr(torch, spec.dtype)), (
        name,
        tensor.shape,
        spec,
    )
    return tensor


def _numel(spec: TensorSpec) -> int:
    return math.prod(spec.shape)


def _device(offer: WeightOffer) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if offer.backend == "nccl" else torch.device("cpu")
