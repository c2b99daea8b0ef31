"""Many learner processes as one: FSDP2 shards the model, gradients add up over ranks. One process runs the same code.

With context parallelism neighbouring ranks share rows (`context.py`); there is no tensor or pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from klear_core.config.train import TrainRuntime
from klear_core.errors import ResourceError
from klear_core.train.context import ALONE, Context
from klear_core.train.model import DTYPES, Dtype, Policy, load_model, pick_device
from klear_core.train.packing import PackedBatch, Row, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among the learner's processes."""

    rank: int
    size: int
    device: torch.device
    context: Context = ALONE
    """Ranks 0 to c-1 share their rows, c to 2c-1 the next ones, and so on."""

    @property
    def data_rank(self) -> int:
        """Which share of the rows is this rank's, or its context's."""
        return self.rank // self.context.size

    @property
    def num_data_ranks(self) -> int:
        """Shares that the rows of a step are cut into."""
        return self.size // self.context.size

    def sum(self, value: Tensor) -> Tensor:
        """Added up over all ranks."""
        if self.size == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total

    def max(self, value: Tensor) -> Tensor:
        """The largest of all ranks, each number by itself."""
        if self.size == 1:
            return value
        largest = value.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            dist.barrier()

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


@contextmanager
def join_world(runtime: TrainRuntime, *, rank: int, init_method: str, sees_only_its_gpu: bool = False) -> Iterator[World]:
    """Be rank `rank` of `runtime.num_workers` processes that meet at `init_method` (`file://...`, `tcp://host:port`).

    `sees_only_its_gpu`: whoever started the process hid all other GPUs from it, as Ray does.
    """
    device = _device_of_rank(runtime, 0, 1) if sees_only_its_gpu else _device_of_rank(runtime, rank, runtime.num_workers)
    if device.type == "cpu":
        torch.set_num_threads(runtime.num_threads)
    size = runtime.num_workers
    if size > 1:
        backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=timedelta(minutes=30))
    try:
        yield World(rank=rank, size=size, device=device, context=_join_context(rank, runtime.context_parallel))
    finally:
        if dist.is_initialized():  # also by `parallelise`, for one rank
            dist.destroy_process_group()


def _join_context(rank: int, size: int) -> Context:
    if size == 1:
        return ALONE
    group, _ = dist.new_subgroups(size)  # type: ignore[no-untyped-call]
    return Context(rank=rank % size, size=size, group=group)


def _device_of_rank(runtime: TrainRuntime, index: int, num_wanted: int) -> torch.device:
    device = pick_device(runtime.device)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    if num_wanted > count:
        raise ResourceError(f"runtime.num_workers={runtime.num_workers}, but this machine has {count} GPUs")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def pack_share(rows: Sequence[Row], runtime: TrainRuntime, world: World) -> PackedBatch:
    """This rank's micro-batches of a step's rows. Prompts are shared on CPU, where our own attention can read them."""
    return pack(
        rows,
        tokens_per_microbatch=runtime.tokens_per_microbatch,
        shares_prompts=world.device.type == "cpu",
        device=world.device,
        rank=world.data_rank,
        num_ranks=world.num_data_ranks,
        context=world.context,
    )


def load_policy(folder: Path, world: World, *, dtype: Dtype, activation_checkpointing: bool) -> Policy:
    """The model of a Hugging Face folder, as `parallelise` makes it. Of several ranks the first reads it, in main memory.

    The others never hold more than their shards and one weight. Errors are those of `load_model`.
    """
    if world.size == 1:
        return parallelise(load_model(folder, device=world.device), world, dtype=dtype, activation_checkpointing=activation_checkpointing)
    policy = parallelise(load_model(folder, device="meta"), world, dtype=dtype, activation_checkpointing=activation_checkpointing)
    hf: Any = policy.to_empty(device=world.device).hf
    hf.tie_weights()
    _hand_out(load_model(folder, device="cpu") if world.rank == 0 else None, policy, world)
    return policy


@torch.no_grad()
def _hand_out(whole: Policy | None, policy: Policy, world: World) -> None:
    """Rank 0's weights and buffers into those of every rank's policy, one by one."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    theirs = {} if whole is None else {**_distinct_weights(whole), **dict(whole.named_buffers())}
    for name, mine in {**_distinct_weights(policy), **dict(policy.named_buffers())}.items():
        value = theirs[name].to(world.device) if whole is not None else torch.empty(mine.shape, dtype=mine.dtype, device=world.device)
        dist.broadcast(value, src=0)
        if isinstance(mine, DTensor):
            mine.to_local().copy_(distribute_tensor(value, mine.device_mesh, mine.placements, src_data_rank=None).to_local())
        else:
            mine.copy_(value)


def parallelise(policy: Policy, world: World, *, dtype: Dtype, activation_checkpointing: bool) -> Policy:
    """Make the policy compute in `dtype` over float32 weights, sharded over the ranks by layer.

    One rank in float32 stays as it is. Gradients are summed over ranks, not averaged, so a loss must divide by global counts.
    """
    hf: Any = policy.hf
    if activation_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if world.size == 1 and dtype == "float32":
        return policy
    _ensure_process_group(world)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    precision = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
    for layer in hf.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=world.size > 1)  # alone it would only cast again
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in (policy, *hf.base_model.layers):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction with a factor
    return policy


def _ensure_process_group(world: World) -> None:
    """FSDP2 wants a process group even for one rank, which needs no meeting place then."""
    if not dist.is_initialized():
        assert world.size == 1, "several ranks join in join_world"
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def full_weights(policy: nn.Module, *, dtype: Dtype | None = None) -> dict[str, Tensor]:
    """The weights of `each_weight`, together, on the CPU of rank 0 (other ranks get an empty dict). Every rank must call.

    In their own dtype those of a single process on the CPU are the policy's own memory, not copies.
    """
    is_wanted = not dist.is_initialized() or dist.get_rank() == 0
    weights = {}
    for name, weight in each_weight(policy, dtype=dtype):
        if is_wanted:
            weights[name] = weight.cpu()
    return weights


def each_weight(policy: nn.Module, *, dtype: Dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """All weights under their Hugging Face names, one by one, whole, on every rank's own device. Every rank must iterate to the end.

    A tied head, which is its embedding once more, is left out.
    """
    from torch.distributed.tensor import DTensor

    for name, weight in _distinct_weights(policy).items():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        yield name, whole.detach().to(whole.dtype if dtype is None else DTYPES[dtype])


def weight_shapes(policy: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of `each_weight`, in its order; nothing is gathered."""
    return {name: tuple(weight.shape) for name, weight in _distinct_weights(policy).items()}


def _distinct_weights(policy: nn.Module) -> dict[str, Tensor]:
    distinct: dict[int, tuple[str, Tensor]] = {}
    for name, weight in policy.state_dict(keep_vars=True).items():
        distinct.setdefault(id(weight), (name.removeprefix("hf."), weight))
    return dict(distinct.values())
