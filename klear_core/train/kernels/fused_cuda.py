"""Compile the norms, rotations and gates of a Qwen3 for CUDA.

Each is one kernel forward and one backward instead of five to ten. They compute in float32 and round once, where
transformers rounds between its operations.
Axis letters: B rows, T tokens, K query heads, G key heads, D head size.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from klear_core.train.kernels.compiled import Backend, Compiled


class Kernels:
    """Kernels compiled by one backend."""

    def __init__(self, backend: Backend) -> None:
        self.norm = Compiled(norm, backend)
        self.gate = Compiled(gate, backend)
        self.rotate = Compiled(rotate, backend)


@cache
def kernels() -> Kernels:
    """Return the kernels of this process."""
    return Kernels("inductor")


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root-mean-square norm over the last axis, times `weight`."""
    return _normed(x, weight, eps).to(x.dtype)


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return (F.silu(gate.float()) * up.float()).to(up.dtype)


def rotate(
    q_BTKD: Tensor, k_BTGD: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalise each head of queries and keys, then rotate it by the token's angles (RoPE)."""
    cos_BT1D, sin_BT1D = cos_BTD[:, :, None].float(), sin_BTD[:, :, None].float()  # the same for all heads

    def rotated(x: Tensor, weight_D: Tensor) -> Tensor:
        normed = _normed(x, weight_D, eps)
        # Element d is rotated with element d + D/2, as in transformers.
        first, second = normed.chunk(2, dim=-1)
        return (normed * cos_BT1D + torch.cat((-second, first), dim=-1) * sin_BT1D).to(x.dtype)

    return rotated(q_BTKD, q_weight_D), rotated(k_BTGD, k_weight_D)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()  # float32 up to the caller's single rounding
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
