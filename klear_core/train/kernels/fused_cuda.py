"""Norms, rotations and gates of a Qwen3 under training on CUDA: a kernel each, forward and backward, instead of five to ten.

They compute in float32 and round once, where transformers rounds between its operations.
Axis letters: B rows, T tokens, K query heads, G key heads, D head size.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from klear_core.train.kernels.compiled import Backend, Compiled


class Kernels:
    """One compiler's."""

    def __init__(self, backend: Backend) -> None:
        self.norm = Compiled(norm, backend)
        self.gate = Compiled(gate, backend)
        self.turn = Compiled(turn, backend)


@cache
def kernels() -> Kernels:
    """Those of the process."""
    return Kernels("inductor")


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis."""
    return _normed(x, weight, eps).to(x.dtype)


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return (F.silu(gate.float()) * up.float()).to(up.dtype)


def turn(
    q_BTKD: Tensor, k_BTGD: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Norm of each head, then its rotation, of queries and keys."""
    cos_BT1D, sin_BT1D = cos_BTD[:, :, None].float(), sin_BTD[:, :, None].float()

    def turned(x: Tensor, weight_D: Tensor) -> Tensor:
        normed = _normed(x, weight_D, eps)
        first, second = normed.chunk(2, dim=-1)
        return (normed * cos_BT1D + torch.cat((-second, first), dim=-1) * sin_BT1D).to(x.dtype)

    return turned(q_BTKD, q_weight_D), turned(k_BTGD, k_weight_D)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
