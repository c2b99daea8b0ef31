"""Join the learner's processes to a process group, and call the collective operations on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from klear_core.config.train import TrainRuntime
from klear_core.train.context import ALONE, Context
from klear_core.train.model import pick_device

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(days=1)
"""Longest wait for other ranks in a collective call, also while rank 0 alone reads or exports the model.

The driver ends ranks that are stuck: those of which none makes progress for `runtime.stall_timeout_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Rank, size and device of this process among the learner's processes."""

    rank: int
    size: int
    device: torch.device
    cp_group: Context = ALONE
    """Context-parallel group of c ranks: ranks 0 to c-1 share their rows, c to 2c-1 the next ones, and so on."""

    @property
    def data_rank(self) -> int:
        """Return the index of the share of rows that this rank (or its context) computes."""
        return self.rank // self.cp_group.size

    @property
    def num_data_ranks(self) -> int:
        """Return the number of shares that the rows of a step are cut into."""
        return self.size // self.cp_group.size

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over all ranks (collective call)."""
        if self.size == 1:
            return value
        total = value.clone()  # all_reduce overwrites its argument
        dist.all_reduce(total)
        return total

    def max(self, value: Tensor) -> Tensor:
        """Return the element-wise maximum over all ranks (collective call)."""
        if self.size == 1:
            return value
        largest = value.clone()  # all_reduce overwrites its argument
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest

    def barrier(self) -> None:
        """Wait for all ranks (collective call)."""
        if self.size > 1:
            dist.barrier()

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, on every rank (collective call)."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size  # pickled objects, which torch sends over gloo: for small things only
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank (collective call)."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


@contextmanager
def join_world(runtime: TrainRuntime, *, rank: int, init_method: str) -> Iterator[World]:
    """Join `runtime.num_workers` processes as rank `rank`, on the first GPU that this process sees.

    `init_method` is their rendezvous (`file://...`, `tcp://host:port`).
    """
    device = pick_device(runtime.device)
    if device.type == "cpu":
        torch.set_num_threads(runtime.num_threads)  # torch's default can be all cores, in each rank
    size = runtime.num_workers
    if size > 1:
        # gloo beside NCCL: objects, and with offloading gradients and their norm, are in host memory.
        backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=init_method, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
        )
    try:
        yield World(rank=rank, size=size, device=device, cp_group=join_context(rank, runtime.context_parallel))
    finally:
        if dist.is_initialized():  # for a single rank `parallelise` creates the group
            dist.destroy_process_group()


def join_context(rank: int, size: int) -> Context:
    """Return the context-parallel group of this rank, of `size` neighbouring ranks (collective call)."""
    if size == 1:
        return ALONE
    # Every rank creates the groups of all ranks: torch requires it, even of ranks that are not members.
    # Neighbours, because Ray places them on one node, where an all-to-all in each layer is cheapest.
    group, _ = dist.new_subgroups(size, timeout=COLLECTIVE_TIMEOUT)  # type: ignore[no-untyped-call]
    return Context(rank=rank % size, size=size, group=group)


def ensure_process_group(world: World) -> None:
    """Create a process group for a single rank, which FSDP2 needs too; an in-process store replaces the rendezvous."""
    if not dist.is_initialized():
        assert world.size == 1, "several ranks join in join_world"
        backend = "cuda:nccl,cpu:gloo" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
