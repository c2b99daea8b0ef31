"""Weights from the learner's memory straight into the engines': over NCCL between GPUs, over gloo between CPUs, on one node or many.

For each hand-over every engine gets a process group of its own with the learner, who is rank 0 in it, and which is gone
afterwards. So an engine that dies breaks its own group and no other, and one that takes its place needs no bookkeeping. Making
the groups takes NCCL about a second, and an RL step minutes.

vLLM has a weight transfer of its own. Not used, because its trainer side waits in NCCL for ever if an engine is gone (torch's
groups time out), and because it knows no CPU backend, so that nothing of it could be tested without GPUs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from klear_core.generate.engine import TensorSpec, WeightOffer

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 20
"""One message: large enough for full bandwidth, small beside a layer's activations."""
_POLL_S = 0.01


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
        groups: dict[int, Any] = {}
        for engine in self._present(offer, engines):
            with _Losing(groups, engine):
                groups[engine] = _join(self._store, replace(offer, engine=engine), rank=0)
        source = iter(weights)
        for chunk in cut(offer.tensors, offer.chunk_bytes):
            bytes_N = torch.cat([_checked(next(source), spec).reshape(-1) for spec in chunk]).to(_device(offer)).view(torch.uint8)
            works = {}
            for engine, group in list(groups.items()):
                with _Losing(groups, engine):
                    works[engine] = group.broadcast(bytes_N, 0)
            for engine, work in works.items():
                with _Losing(groups, engine):
                    work.wait()
        assert next(source, None) is None, "more weights than were offered"
        for engine, group in list(groups.items()):
            with _Losing(groups, engine):
                _confirm(group, offer)
        return [engine for engine in engines if engine not in groups]

    def _present(self, offer: WeightOffer, engines: Sequence[int]) -> list[int]:
        """The engines that have come; for half the time that they wait, so that a missing one does not cost the others their turn."""
        deadline = time.monotonic() + self._timeout_s / 2
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
    group = _join(store, offer, rank=rank)
    for chunk in cut(offer.tensors, offer.chunk_bytes):
        flat_N = torch.empty(sum(map(_numel, chunk)), dtype=getattr(torch, chunk[0].dtype), device=_device(offer))
        group.broadcast(flat_N.view(torch.uint8), 0).wait()
        for spec, part_N in zip(chunk, torch.split(flat_N, [_numel(spec) for spec in chunk]), strict=True):
            yield spec.name, part_N.view(spec.shape)
    _confirm(group, offer)


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


class _Losing:
    """Whatever fails in here costs this engine its group, and nobody else anything."""

    def __init__(self, groups: dict[int, Any], engine: int) -> None:
        self._groups, self._engine = groups, engine

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, RuntimeError):  # how torch.distributed reports a lost peer
            return False
        log.warning("engine %d went away while it was given weights: %s", self._engine, error)
        self._groups.pop(self._engine, None)
        return True


def _join(store: Store, offer: WeightOffer, *, rank: int) -> Any:
    """A bare backend (torch's stubs know none of its collectives), outside torch's global groups, of which there may be others."""
    meeting = PrefixStore(f"{offer.key}/{offer.engine}", store)
    wait = timedelta(seconds=offer.timeout_s)
    if offer.backend == "gloo":
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        return ProcessGroupGloo(meeting, rank, 1 + offer.num_ranks, wait)
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = wait
    return ProcessGroupNCCL(meeting, rank, 1 + offer.num_ranks, options)


def _seat(offer: WeightOffer, engine: int, rank: int) -> str:
    return f"{offer.key}/{engine}/seat/{rank}"


def _confirm(group: Any, offer: WeightOffer) -> None:
    """Nobody leaves before all have everything."""
    count = torch.ones(1, device=_device(offer))
    group.allreduce([count]).wait()
    assert count.item() == 1 + offer.num_ranks, (count.item(), offer.num_ranks)


def _checked(pair: tuple[str, Tensor], spec: TensorSpec) -> Tensor:
    name, tensor = pair
    assert (name, tuple(tensor.shape), tensor.dtype) == (spec.name, spec.shape, getattr(torch, spec.dtype)), (name, tensor.shape, spec)
    return tensor


def _numel(spec: TensorSpec) -> int:
    return math.prod(spec.shape)


def _device(offer: WeightOffer) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if offer.backend == "nccl" else torch.device("cpu")
