"""Compute attention over a packed sequence on CPU in float32, in compiled C.

Only causal products are computed, without padding, and shared prompts are read in place.

Axis letters: T tokens, K query heads, G key and value heads, D head size.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from klear_core.native import call, compile_c

_SOURCE = Path(__file__).with_name("attention.c")
# Argument types: l int64_t, f float, p pointer (see `compile_c`).
_SIGNATURES = {"attention_forward": "lllppfppppp", "attention_backward": "lllppfppppppppp"}
_LANES = 16  # float32 numbers of a 512-bit vector; must equal LANES in the C source


def supports(q_TKD: Tensor) -> bool:
    """Return whether `attend` supports such tensors on this machine."""
    is_plain = q_TKD.device.type == "cpu" and q_TKD.dtype == torch.float32
    return is_plain and fits_head_dim(q_TKD.shape[2]) and has_library(q_TKD.shape[2])


def fits_head_dim(head_dim: int) -> bool:
    """Return whether heads of this size fill the C code's vectors."""
    return head_dim % _LANES == 0


def has_library(head_dim: int) -> bool:
    """Return whether the C functions could be compiled on this machine."""
    return _library(head_dim) is not None


def attend_on_cpu(
    q_TKD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cu_seqlens: Tensor, group_bounds: Tensor, scaling: float
) -> Tensor:
    """Compute causal attention within segments; see `MicroBatch` for `cu_seqlens` and `group_bounds`."""
    arguments = (q_TKD, k_TGD, v_TGD, cu_seqlens, group_bounds, scaling)
    return _PackedAttention.apply(*arguments)  # type: ignore[no-any-return,no-untyped-call]


class _PackedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q_TKD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cu_seqlens: Tensor, group_bounds: Tensor, scaling: float
    ) -> Tensor:
        # C gets bare pointers: it knows neither strides nor dtypes. cu_seqlens and group_bounds are int32 on the CPU.
        q_TKD, k_TGD, v_TGD = q_TKD.contiguous(), k_TGD.contiguous(), v_TGD.contiguous()
        # log_sums: the log of each query's sum of exponentials, from which backward computes the weights again.
        out_TKD, log_sums_TK = torch.empty_like(q_TKD), torch.empty(q_TKD.shape[:2])
        # In the order of the C functions' first six arguments.
        ctx.shape = (len(group_bounds) - 1, q_TKD.shape[1], k_TGD.shape[1], cu_seqlens, group_bounds, scaling)
        call(_library(q_TKD.shape[2]), "attention_forward", *ctx.shape, q_TKD, k_TGD, v_TGD, out_TKD, log_sums_TK)
        ctx.save_for_backward(q_TKD, k_TGD, v_TGD, out_TKD, log_sums_TK)
        return out_TKD

    @staticmethod
    def backward(ctx: Any, dout_TKD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        saved = ctx.saved_tensors  # read once: activation checkpointing refuses a second time
        q_TKD, k_TGD, v_TGD, _, _ = saved
        # The C code assigns dq, but adds to dk and dv.
        grads = torch.empty_like(q_TKD), torch.zeros_like(k_TGD), torch.zeros_like(v_TGD)
        call(_library(q_TKD.shape[2]), "attention_backward", *ctx.shape, *saved, dout_TKD.contiguous(), *grads)
        return *grads, None, None, None


@cache
def _library(head_dim: int) -> ctypes.CDLL | None:
    return compile_c(_SOURCE, {"HEAD_DIM": head_dim}, _SIGNATURES)
