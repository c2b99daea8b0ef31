"""Send weights from the learner's memory to the engines: over NCCL between GPUs, over gloo between CPUs.

For each transfer, each engine and the learner (rank 0) create their own process group, and close it afterwards. So an
engine that dies breaks no other engine's group, and a replacement engine simply joins the next transfer. Creating the
groups takes about a second with NCCL; an RL step takes minutes. Learner and engines may be on different nodes.

vLLM's weight transfer is not used, because its trainer side waits in NCCL for ever if an engine is gone, and
because it has no CPU backend, so that none of it could be tested without GPUs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from klear_core.generate.engine import TensorSpec, WeightOffer
from klear_core.generate.transfer_group import (
    POLL_S,
    Group,
    device_of,
    start_joining_group,
    wait_for_group,
    wait_for_work,
)

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 20
"""Bytes of one message: large enough for full bandwidth, small next to a layer's activations."""


class WeightServer:
    """The learner's side of a transfer; runs on learner rank 0."""

    def __init__(self, host: str, *, timeout_s: float) -> None:
        """Listen on a free port; `host` is this machine's name or address for the engines."""
        self._timeout_s = timeout_s
        self._host = host
        timeout = timedelta(seconds=timeout_s)
        # port 0: the system picks a free one, which travels in the offer; engines connect later
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
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
        """Return the offer for the next `send`, addressed to engine 0; replace its `engine` field for another one."""
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
        """Send to all these engines at once, and return the engines that failed. `weights` are read one by one."""
        # joining waits for all members, so groups are created only with engines that have registered
        groups = self._create_groups(offer, self._wait_for_registration(offer, engines))
        device = device_of(offer)
        try:
            source = iter(weights)
            for chunk in split_chunks(offer.tensors, offer.chunk_bytes):
                # a chunk has one dtype; as flat bytes, one broadcast carries all its tensors
                flat = torch.cat([_require_match(next(source), spec).reshape(-1) for spec in chunk])
                data = flat.to(device).view(torch.uint8)
                self._with_each(groups, partial(Group.broadcast, data=data))
            assert next(source, None) is None, "more weights than were offered"
            # no process may close a group before all have received everything
            self._with_each(groups, partial(Group.barrier, device=device))
        except BaseException:
            for group in groups.values():
                group.abort()
            raise
        for group in groups.values():
            group.close()
        return [engine for engine in engines if engine not in groups]

    def _create_groups(self, offer: WeightOffer, engines: Sequence[int]) -> dict[int, Group]:
        """Create the groups with all these engines in parallel; leave out those that fail or take too long."""
        deadline = self._deadline()
        joining = {
            engine: start_joining_group(self._store, replace(offer, engine=engine), rank=0) for engine in engines
        }
        groups: dict[int, Group] = {}
        for engine, future in joining.items():
            with _drop_on_failure(groups, engine):
                groups[engine] = wait_for_group(future, deadline)
        return groups

    def _with_each(self, groups: dict[int, Group], start: Callable[[Group], Any]) -> None:
        """Start an operation with all engines, then wait for all; remove those that fail from `groups`."""
        deadline = self._deadline()
        works = {}
        for engine, group in list(groups.items()):  # a copy: a failure removes an entry
            with _drop_on_failure(groups, engine):
                works[engine] = start(group)
        for engine, work in works.items():
            with _drop_on_failure(groups, engine):
                wait_for_work(work, deadline)

    def _deadline(self) -> float:
        """Return now plus half the engines' timeout, so that a stuck engine does not time out the others."""
        return time.monotonic() + self._timeout_s / 2

    def _wait_for_registration(self, offer: WeightOffer, engines: Sequence[int]) -> list[int]:
        """Wait for all these engines, and return those that have registered by the deadline."""
        deadline = self._deadline()
        keys = {engine: _registration_keys(offer, engine) for engine in engines}
        all_keys = [key for of_engine in keys.values() for key in of_engine]
        while time.monotonic() < deadline and not self._store.check(all_keys):
            time.sleep(POLL_S)
        registered = [engine for engine in engines if self._store.check(keys[engine])]
        if len(registered) < len(engines):
            log.warning("engines %s did not register for their weights", sorted(set(engines) - set(registered)))
        return registered


def fetch(offer: WeightOffer, *, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the offered weights as they arrive; `rank` counts the engine's processes from 1.

    Raise RuntimeError if the learner is unreachable.
    """
    store = TCPStore(offer.host, offer.port, timeout=timedelta(seconds=offer.timeout_s))
    # the learner opens a group only with engines whose ranks have all registered
    store.set(_registration_key(offer, offer.engine, rank), "registered")
    group = wait_for_group(start_joining_group(store, offer, rank=rank), time.monotonic() + offer.timeout_s)
    device = device_of(offer)
    try:
        for chunk in split_chunks(offer.tensors, offer.chunk_bytes):
            sizes = [_numel(spec) for spec in chunk]
            # receive as bytes, read as the chunk's dtype: both are views of one buffer. Each chunk has a new one,
            # because the caller may keep the weights
            flat = torch.empty(sum(sizes), dtype=getattr(torch, chunk[0].dtype), device=device)
            # a deadline for each message, because all of them may take longer than the timeout
            wait_for_work(group.broadcast(flat.view(torch.uint8)), time.monotonic() + offer.timeout_s)
            for spec, part in zip(chunk, torch.split(flat, sizes), strict=True):
                yield spec.name, part.view(spec.shape)
        wait_for_work(group.barrier(device), time.monotonic() + offer.timeout_s)
    except BaseException:  # also covers GeneratorExit, raised when the engine stops reading
        group.abort()
        raise
    group.close()


def split_chunks(tensors: Sequence[TensorSpec], chunk_bytes: int) -> list[tuple[TensorSpec, ...]]:
    """Split tensors into messages: neighbours of one dtype, up to `chunk_bytes`; a larger tensor is sent alone.

    Sender and receiver both call this, so that their messages match.
    """
    chunks: list[list[TensorSpec]] = []
    free = 0
    for spec in tensors:
        size = _numel(spec) * getattr(torch, spec.dtype).itemsize
        # one dtype a message: sender and receiver see it as one flat tensor
        if not chunks or size > free or chunks[-1][0].dtype != spec.dtype:
            chunks.append([])
            free = chunk_bytes
        chunks[-1].append(spec)
        free -= size
    return [tuple(chunk) for chunk in chunks]


@contextmanager
def _drop_on_failure(groups: dict[int, Group], engine: int) -> Iterator[None]:
    """Remove this engine from `groups` if the block fails, without effect on the other engines."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed reports a lost peer this way
        log.warning("engine %d was lost while weights were sent to it: %s", engine, error)
        if engine in groups:
            groups.pop(engine).abort()


def _registration_key(offer: WeightOffer, engine: int, rank: int) -> str:
    return f"{offer.key}/{engine}/registered/{rank}"


def _registration_keys(offer: WeightOffer, engine: int) -> list[str]:
    return [_registration_key(offer, engine, rank) for rank in range(1, 1 + offer.num_ranks)]


def _require_match(pair: tuple[str, Tensor], spec: TensorSpec) -> Tensor:
    name, tensor = pair
    # the receiver cuts the bytes by the offer alone, so another order or shape would load garbage silently
    assert (name, tuple(tensor.shape), tensor.dtype) == (spec.name, spec.shape, getattr(torch, spec.dtype)), (
        name,
        tensor.shape,
        spec,
    )
    return tensor


def _numel(spec: TensorSpec) -> int:
    return math.prod(spec.shape)
