"""Gather the weights of a sharded policy, with their Hugging Face names and LoRA adapters merged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from klear_core.progress import made_progress
from klear_core.train.lora import base_name, factor_names, is_adapter, merge
from klear_core.train.model import DTYPES, Dtype, Policy


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
