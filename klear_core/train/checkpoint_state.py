"""Collect what a checkpoint holds, copy it, and report each tensor that is written or read."""

from __future__ import annotations

import io
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from klear_core.progress import made_progress
from klear_core.train.world import World


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    """Return the weights that are trained, the optimizer's state, and this rank's random state."""
    # By parameter names and in shards (DTensor), so that another number of ranks can load it.
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # Frozen weights are those of the initial model: with LoRA a checkpoint holds only the adapters. A tied weight is in
    # the state under both its names, which torch's own option to leave out frozen weights overlooks.
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    trained = {name: value for name, value in model_state.items() if name not in frozen}
    # A key for each rank: of a tensor that several ranks name alike, DCP writes one rank's. Only the CPU's state:
    # on CUDA only the dropout of LoRA draws numbers, and each SFT step seeds it.
    return {"model": trained, "optimizer": optimizer_state, f"random.{world.rank}": torch.get_rng_state()}


def cpu_copy(state: Any) -> Any:
    """Return a copy of the state on the CPU; training overwrites the original in place."""
    if is_traceable_wrapper_subclass(state) and not isinstance(state, DTensor):
        # torchao's 8-bit moments, whose own `to` shares their memory if they are on the CPU already.
        source: Any = cast(Any, state).detach()
        names, context = source.__tensor_flatten__()
        parts = {name: cpu_copy(getattr(source, name)) for name in names}
        return type(source).__tensor_unflatten__(parts, context, source.shape, source.stride())
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)  # without `copy`, a tensor on the CPU would be returned itself
    if isinstance(state, dict):
        return {k: cpu_copy(v) for k, v in state.items()}
    if isinstance(state, list):
        return [cpu_copy(v) for v in state]
    return state


class SavePlanner(DefaultSavePlanner):
    """Reports every tensor that is written."""

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the data of one item, as the writer asks for it."""
        made_progress(f"writing of {write_item.index.fqn} to a checkpoint")
        return super().resolve_data(write_item)


class LoadPlanner(DefaultLoadPlanner):
    """Reports every tensor that is read."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the tensor that one item is read into."""
        made_progress(f"reading of {read_item.dest_index.fqn} from a checkpoint")
        tensor: Tensor = super().resolve_tensor(read_item)
        return tensor
