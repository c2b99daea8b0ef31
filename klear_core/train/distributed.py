"""Train on several ranks: process group and collective calls, sharding by FSDP2, gathered weights.

With context parallelism, neighbouring ranks share rows (`context_parallel.py`); there is no tensor or pipeline
parallelism.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh

from klear_core import products
from klear_core.config.train import TrainRuntime
from klear_core.errors import ConfigError, ResourceError
from klear_core.metrics import Telemetry, made_progress
from klear_core.train.context_parallel import ALONE, Context
from klear_core.train.model import (
    DTYPES,
    Adapters,
    Dtype,
    FlopCount,
    Policy,
    base_name,
    factor_names,
    is_adapter,
    load_model,
    merge,
    pick_device,
)
from klear_core.train.packing import PackedBatch, pack, plan_rows
from klear_core.types import TokenRow

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def pack_share(rows: Sequence[TokenRow], runtime: TrainRuntime, world: World, flops: FlopCount) -> PackedBatch:
    """Return this rank's micro-batches of the rows of an update, with the work of a row as `flops` counts it.

    Prompts are shared on CPU only: no CUDA kernel supports it.
    """
    return pack(
        rows,
        tokens_per_microbatch=runtime.tokens_per_microbatch,
        shares_prompts=world.device.type == "cpu",
        device=world.device,
        rank=world.data_rank,  # ranks of a context get the same rows, and slice them
        num_ranks=world.num_data_ranks,
        row_work=flops.row_work(recomputes=runtime.activation_checkpointing),
        cp_group=world.cp_group,
    )


def plan_shares(rows: Sequence[TokenRow], runtime: TrainRuntime, world: World, flops: FlopCount) -> list[list[int]]:
    """Return the indices of the rows that `pack_share` gives to each data rank."""
    planned = plan_rows(
        rows,
        tokens_per_microbatch=runtime.tokens_per_microbatch,
        shares_prompts=world.device.type == "cpu",
        num_ranks=world.num_data_ranks,
        row_work=flops.row_work(recomputes=runtime.activation_checkpointing),
    )
    return [planned.rows_of(rank) for rank in range(world.num_data_ranks)]


def load_policy(
    folder: Path,
    world: World,
    *,
    dtype: Dtype,
    activation_checkpointing: bool,
    keep_layers: int = 0,
    cpu_offload: bool = False,
    adapters: Adapters | None = None,
) -> Policy:
    """Load a Hugging Face folder and shard it with `parallelise` (collective call); see `load_model` for errors.

    With several ranks only rank 0 reads the weights, into main memory. The others never hold more than their shards and
    one full weight.
    """
    # Weights that no update changes need no more digits than they are computed with.
    read = partial(load_model, folder, dtype="float32" if adapters is None else dtype, adapters=adapters)
    shard = partial(
        parallelise,
        world=world,
        dtype=dtype,
        activation_checkpointing=activation_checkpointing,
        keep_layers=keep_layers,
        cpu_offload=cpu_offload,
    )
    remote = torch.device("cpu") if cpu_offload else world.device
    if world.size == 1:
        return shard(read(device=remote))
    # Sharded before it has memory, so that only the shards are allocated.
    policy = shard(read(device="meta"))
    hf: Any = policy.to_empty(device=remote).hf
    for module in hf.modules():  # only weights are offloaded: buffers stay on the device that computes with them
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(world.device)
    hf.tie_weights()  # to_empty() allocates the head apart from its embedding
    source = read(device="cpu") if world.rank == 0 else None
    _broadcast_weights(source, policy, world)
    return policy


@torch.no_grad()
def _broadcast_weights(source: Policy | None, policy: Policy, world: World) -> None:
    """Copy rank 0's weights and buffers into every rank's policy, one at a time (collective call)."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    loaded = {} if source is None else _weights_and_buffers(source)
    # Names and their order are the same on all ranks, so that each broadcast carries the same tensor everywhere.
    for name, target in _weights_and_buffers(policy).items():
        # On the device of NCCL, though with offloading the target is in host memory.
        value = torch.empty(target.shape, dtype=target.dtype, device=world.device)
        if source is not None:
            value.copy_(loaded[name])
        dist.broadcast(value, src=0)
        made_progress(f"loading of {name}")
        if isinstance(target, DTensor):
            # src_data_rank=None: every rank has the full value by now and only cuts out its shard.
            shard = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(shard.to_local())
        else:
            target.copy_(value)


def _weights_and_buffers(policy: Policy) -> dict[str, Tensor]:
    return {**distinct_weights(policy), **dict(policy.named_buffers())}


@cache
def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for its next micro-batch.

    glibc gives large blocks back to the system, which clears each page when it is used again: a tenth of an update's
    time at 135 million parameters. The peak was at most 3 % higher. Other C libraries have no such call.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_TRIM_THRESHOLD, -1)  # never
        set_option(_M_MMAP_THRESHOLD, 1 << 28)  # a chunk of logits and less; newer versions alone take more than 32 MiB


def parallelise(
    policy: Policy,
    world: World,
    *,
    dtype: Dtype,
    activation_checkpointing: bool,
    keep_layers: int = 0,
    cpu_offload: bool = False,
) -> Policy:
    """Shard the policy over the ranks by layer, and make it compute in `dtype`.

    One rank in float32 stays as it is, and so do the frozen weights of one rank, unless they are offloaded to host
    memory. One rank on a CPU with instructions for bfloat16 computes products alone in it. Gradients are summed over
    ranks, not averaged, so a loss must divide by global counts. Raise ConfigError if
    `cpu_offload` has nothing to offload.
    """
    if cpu_offload and world.size == 1 and world.device.type == "cpu":
        raise ConfigError("runtime.cpu_offload: one CPU rank has everything in host memory already; set it to false")
    if world.device.type == "cpu":
        keep_freed_memory()
    hf: Any = policy.hf
    if activation_checkpointing:
        # The reentrant form gives no gradients where a layer's input needs none: with LoRA, behind a frozen embedding.
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # The last ones, because the backward pass frees what they keep first.
        for layer in list(hf.base_model.layers)[len(hf.base_model.layers) - keep_layers :]:
            layer.gradient_checkpointing = False
    if world.size == 1 and dtype == "float32" and not cpu_offload:
        return policy
    is_wide = policy.adapters is None and all(p.dtype == torch.float32 for p in policy.parameters())
    # Fake tensors, by which memory is planned, have no memory to multiply.
    is_fake = any(isinstance(p, FakeTensor) for p in policy.parameters())
    if world.size == 1 and world.device.type == "cpu" and is_wide and not is_fake and products.instructions():
        policy.multiply_in_half()
        return policy
    ensure_process_group(world)
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # One axis over all ranks, those of a context too: they share rows, not weights, and the sum of gradients over all
    # ranks also adds up their slices of a row.
    mesh = init_device_mesh(world.device.type, (world.size,))
    # Gradients are summed over ranks in float32: a sum in bf16 would drop small contributions.
    precision = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if cpu_offload else OffloadPolicy()
    is_whole = world.size == 1 and not cpu_offload
    # One rank would hold a second copy of frozen weights that are in `dtype` already.
    kept = {p for p in policy.parameters() if is_whole and not p.requires_grad and p.dtype == DTYPES[dtype]}
    shard = partial(fully_shard, mesh=mesh, mp_policy=precision, offload_policy=offload, ignored_params=kept)
    # Shard the layers first, so that the call for the policy takes the remaining weights (embedding, final norm, head).
    for layer in hf.base_model.layers:
        # With one rank that keeps its weights, resharding only repeats the cast.
        shard(layer, reshard_after_forward=not is_whole)
    shard(policy)
    for module in (policy, *hf.base_model.layers):
        module.set_gradient_divide_factor(1.0)  # a sum over ranks; the default is the mean
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction with a factor
    return policy


# ---- world ----
# Join the learner's processes to a process group, and call the collective operations on it.


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

    def any(self, value: bool) -> bool:
        """Return whether `value` is true on any rank (collective call)."""
        return bool(self.max(torch.tensor(value, dtype=torch.int32, device=self.device)))

    def concat(self, value_N: Tensor) -> Tensor:
        """Return the elements of all ranks' tensors, one rank after the other (collective call).

        The tensors have one axis, whose length may differ.
        """
        if self.size == 1:
            return value_N
        counts = torch.zeros(self.size, dtype=torch.int64, device=value_N.device)
        counts[self.rank] = len(value_N)
        ends = self.sum(counts).cumsum(0).tolist()
        all_N = value_N.new_zeros(ends[-1])
        all_N[ends[self.rank] - len(value_N) : ends[self.rank]] = value_N
        return self.sum(all_N)  # every place is filled by one rank and 0 on the others

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
    # torch's default can be all cores, in each rank; Ray's, of an actor without CPUs of its own, is one. On a GPU they
    # matter to an optimizer whose moments are in host memory.
    torch.set_num_threads(runtime.num_threads)
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


# ---- gather ----
# Gather the weights of a sharded policy, with their Hugging Face names and LoRA adapters merged.


def full_weights(policy: Policy, *, dtype: Dtype | None = None) -> dict[str, Tensor]:
    """Return the weights of `each_weight` on the CPU of rank 0, an empty dict on other ranks (collective call).

    In a single process on the CPU and without a cast, they share the policy's memory and are no copies.
    """
    return _collect(each_weight(policy, dtype=dtype))


def adapter_weights(policy: Policy) -> dict[str, Tensor]:
    """Return the weights of the LoRA adapters on the CPU of rank 0, an empty dict on other ranks (collective call)."""
    named = distinct_weights(policy).items()
    return _collect((name, _gather(weight)) for name, weight in named if is_adapter(name))


def _collect(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    # All ranks take part in gathering, but only rank 0 keeps the results.
    is_wanted = not dist.is_initialized() or dist.get_rank() == 0
    kept = {}
    for name, weight in weights:
        if is_wanted:
            kept[name] = weight.cpu()  # at once, so that the device holds one full weight at a time
    return kept


def local_weights(policy: nn.Module) -> list[Tensor]:
    """Return copies of the weights on the CPU; of sharded ones only this rank's shards."""
    from torch.distributed.tensor import DTensor

    copies = []
    for weight in distinct_weights(policy).values():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        copies.append(local.detach().to("cpu", copy=True))  # on a CPU, `to` alone would return the policy's own memory
    return copies


@torch.no_grad()
def each_weight(policy: Policy, *, dtype: Dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight with its Hugging Face name, gathered in full on every rank's device, LoRA adapters merged.

    Collective: every rank must iterate to the end. A tied head is left out, because it is the embedding's tensor.
    """
    weights = distinct_weights(policy)
    for name, weight in weights.items():
        if is_adapter(name):
            continue
        full = _gather(weight)  # on all ranks, though only one may use it: full_tensor() is an all-gather
        factors = factor_names(name)
        if factors is not None:
            assert policy.adapters is not None
            a, b = factors
            # In float32, before the cast: half precision would round each term by itself.
            full = merge(full, (_gather(weights[a]), _gather(weights[b])), policy.adapters.scale)
        made_progress(f"gathering of {name}")
        yield base_name(name), full.to(full.dtype if dtype is None else DTYPES[dtype])


def weight_shapes(policy: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of `each_weight`, in its order, without gathering."""
    named = distinct_weights(policy).items()
    return {base_name(name): tuple(weight.shape) for name, weight in named if not is_adapter(name)}


def _gather(weight: Tensor) -> Tensor:
    """Return the full weight, apart from its graph (collective call)."""
    from torch.distributed.tensor import DTensor

    full: Tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight  # unsharded: no copy
    return full.detach()


def distinct_weights(policy: nn.Module) -> dict[str, Tensor]:
    """Return the weights by name, tied ones once, as they are on this rank."""
    # Tied weights are one object, kept under its first name: by identity, because == on tensors compares element-wise.
    # keep_vars: otherwise each entry is a new detached tensor.
    distinct: dict[int, tuple[str, Tensor]] = {}
    for name, weight in policy.state_dict(keep_vars=True).items():
        distinct.setdefault(id(weight), (name.removeprefix("hf."), weight))
    return dict(distinct.values())


# ---- ranks ----
# Define how a stage runs its learner ranks, and run a single rank in this process.
#
# Several ranks, and ranks on GPUs, are Ray actors (`klear_core.cluster.gang`), which the stage's task passes in.


R = TypeVar("R")
Body = Callable[[World, Telemetry], R]
"""The work of one rank; all ranks make the same collective calls in the same order."""


RunRanks = Callable[[Body[R], TrainRuntime, Telemetry], R]
"""Runs `body` on every rank and returns rank 0's result; its telemetry and log records come to this process.

`body` and its result must be picklable, and `body` must go on from its own checkpoint: it runs again if a rank dies.
Raises a rank's exception as it is, TrainingError if ranks die more often than `runtime.max_restarts`.
"""


def run_here(body: Body[R], runtime: TrainRuntime, telemetry: Telemetry) -> R:
    """Run the only rank in this process; see `RunRanks`. Raise ResourceError if there are several."""
    if runtime.num_workers > 1:
        raise ResourceError(f"runtime.num_workers = {runtime.num_workers}: several learner ranks run on Ray only")
    with join_world(runtime, rank=0, init_method="") as world:  # one rank meets no other, so it needs no address
        return body(world, telemetry)
