"""Train on several ranks: FSDP2 shards the model, and gradients are summed over ranks. One process runs the same code.

With context parallelism, neighbouring ranks share rows (`context.py`); there is no tensor or pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from klear_core.config.train import TrainRuntime
from klear_core.errors import ConfigError
from klear_core.progress import made_progress
from klear_core.train.flops import FlopCount
from klear_core.train.gather import distinct_weights
from klear_core.train.lora import Adapters
from klear_core.train.model import DTYPES, Dtype, Policy, load_model
from klear_core.train.packing import PackedBatch, TokenRow, pack
from klear_core.train.world import World, ensure_process_group


def pack_share(rows: Sequence[TokenRow], runtime: TrainRuntime, world: World, flops: FlopCount) -> PackedBatch:
    """Return this rank's micro-batches of a step's rows, with the work of a row as `flops` counts it.

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


def load_policy(
    folder: Path,
    world: World,
    *,
    dtype: Dtype,
    activation_checkpointing: bool,
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
        cpu_offload=cpu_offload,
    )
    home = torch.device("cpu") if cpu_offload else world.device
    if world.size == 1:
        return shard(read(device=home))
    # Sharded before it has memory, so that only the shards are allocated.
    policy = shard(read(device="meta"))
    hf: Any = policy.to_empty(device=home).hf
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


def parallelise(
    policy: Policy, world: World, *, dtype: Dtype, activation_checkpointing: bool, cpu_offload: bool = False
) -> Policy:
    """Shard the policy over the ranks by layer, and make it compute in `dtype`.

    One rank in float32 stays as it is, and so do the frozen weights of one rank, unless they are offloaded to host
    memory. Gradients are summed over ranks, not averaged, so a loss must divide by global counts. Raise ConfigError if
    `cpu_offload` has nothing to offload.
    """
    if cpu_offload and world.size == 1 and world.device.type == "cpu":
        raise ConfigError("runtime.cpu_offload: one CPU rank has everything in host memory already; set it to false")
    hf: Any = policy.hf
    if activation_checkpointing:
        # The reentrant form gives no gradients where a layer's input needs none: with LoRA, behind a frozen embedding.
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if world.size == 1 and dtype == "float32" and not cpu_offload:
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
