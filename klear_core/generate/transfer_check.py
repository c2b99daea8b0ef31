"""Make tensors of known content, and hash what an engine received of them, to check the direct transfer of weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from klear_core.generate.engine import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

CHECK_CHUNK_BYTES = 1 << 20
"""Bytes of one message: the known tensors take several."""


def known_tensors() -> dict[str, Tensor]:
    """Return a few tensors of the dtypes of weights: one larger than a message, small neighbours, and a large one."""
    import torch

    bits = torch.arange(1 << 19, dtype=torch.int32)  # every word differs, so that no shift or swap goes unseen
    return {
        "large": bits.view(torch.bfloat16).reshape(1 << 10, -1),
        "small": bits[:1000].view(torch.bfloat16),
        "smaller": bits[7:8].view(torch.bfloat16),
        "full_precision": (bits + (1 << 20)).view(torch.float32),
    }


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Return name, dtype and shape of each tensor, as an offer has them."""
    specs: list[TensorSpec] = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape)))
    return tuple(specs)


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of names, dtypes, shapes and bits, in the order of the tensors."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # bits, not values: some of the known numbers are NaN, which equals nothing
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
