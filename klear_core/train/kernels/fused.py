"""Compute the norms, rotations and gates of a Qwen3 in one compiled pass each, forward and backward.

transformers' operations take five to ten passes each. There are passes for float32 on CPU, in C, and for CUDA, by
torch.compile. All other dtypes and devices, and models that are no plain Qwen3, use transformers' operations.
Axis letters: B rows, T tokens, H heads, D head size.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import Function
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP, Qwen3RMSNorm

from klear_core.native import call, compile_c
from klear_core.train.kernels import attention, registry
from klear_core.train.kernels.registry import Backend, Compiled

# ---- fused cuda ----
# Compile the norms, rotations and gates of a Qwen3 for CUDA.
#
# Each is one kernel forward and one backward instead of five to ten. They compute in float32 and round once, where
# transformers rounds between its operations.
# Axis letters: B rows, T tokens, K query heads, G key heads, D head size.


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


# ---- fused ----


_SOURCE = Path(__file__).with_name("fused.c")
_PART = 256
"""Rows per partial sum; must equal PART in the C source."""


def fuse(hf: nn.Module) -> None:
    """Make the modules of a transformers Qwen3 use the compiled passes; leave other models unchanged."""
    # The exact type, because a subclass, such as another model's attention, may compute something else.
    if not any(type(m) is Qwen3Attention for m in hf.modules()):
        return
    for module in hf.modules():
        fused = _FUSED.get(type(module))
        if fused is not None:
            # Replace the class rather than the bound method, so that copies and shards of the model keep working.
            module.__class__ = fused


class _Norm(Qwen3RMSNorm):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        norm = registry.on_device("norm", x)
        if norm is None or not (x.is_cuda or _fits(x, self.weight)):
            return super().forward(x)  # type: ignore[no-any-return]
        return norm(x, self.weight, self.variance_epsilon)  # type: ignore[no-any-return]


class _Mlp(Qwen3MLP):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        gate = registry.on_device("gate", x) if self.config.hidden_act == "silu" else None
        if gate is not None and x.is_cuda:
            return self.down_proj(gate(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]
        if gate is not None and _fits(x, self.gate_proj.weight):
            gate_up = _project(x, self.gate_proj, self.up_proj)
            return self.down_proj(gate(gate_up))  # type: ignore[no-any-return]
        return super().forward(x)  # type: ignore[no-any-return]


class _FusedAttention(Qwen3Attention):  # type: ignore[misc]
    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **others: Any
    ) -> tuple[Tensor, None]:
        rotate = registry.on_device("rotate", hidden_states)
        if rotate is None:
            return super().forward(hidden_states, position_embeddings, **others)  # type: ignore[no-any-return]
        if hidden_states.is_cuda:
            qkv = self._on_cuda(rotate, hidden_states, *position_embeddings)
        elif _fits(hidden_states, self.q_norm.weight, self.head_dim) and self.q_proj.bias is None:
            qkv = self._on_cpu(rotate, hidden_states, *position_embeddings)
        else:
            return super().forward(hidden_states, position_embeddings, **others)  # type: ignore[no-any-return]
        # [B, T, H, D] -> [B, H, T, D], as transformers calls its attention functions.
        heads_first = (x.transpose(1, 2) for x in qkv)
        dropout = self.attention_dropout if self.training else 0.0  # passed on only to be refused if it is not 0
        out, _ = attention.attend(
            self, *heads_first, scaling=self.scaling, dropout=dropout, sliding_window=self.sliding_window, **others
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None

    def _on_cuda(self, rotate: registry.Run, x: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q_BTHD, k_BTHD, v_BTHD = (p(x).view(*x.shape[:-1], -1, self.head_dim) for p in projections)
        eps = self.q_norm.variance_epsilon
        return *rotate(q_BTHD, k_BTHD, self.q_norm.weight, self.k_norm.weight, *angles, eps), v_BTHD

    def _on_cpu(self, rotate: registry.Run, x: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
        # transformers gives one table of angles for all rows; the C code reads one per token.
        angles = tuple(a.expand(*x.shape[:2], -1).contiguous() for a in angles)
        qkv_BTHD = _project(x, self.q_proj, self.k_proj, self.v_proj).view(*x.shape[:-1], -1, self.head_dim)
        num_kv_heads = self.k_proj.out_features // self.head_dim
        # Heads of queries, keys and values lie side by side, in the order of the projections above.
        sizes = [qkv_BTHD.shape[2] - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
        q_BTHD, k_BTHD, v_BTHD = torch.split(qkv_BTHD, sizes, dim=2)
        eps = self.q_norm.variance_epsilon
        return *rotate(q_BTHD, k_BTHD, self.q_norm.weight, self.k_norm.weight, *angles, eps), v_BTHD


_FUSED: dict[type[nn.Module], type[nn.Module]] = {Qwen3RMSNorm: _Norm, Qwen3MLP: _Mlp, Qwen3Attention: _FusedAttention}


def _project(x: Tensor, *projections: nn.Linear) -> Tensor:
    """Return the outputs of all projections of x side by side.

    One wide product is faster than narrow ones, and its gradient for x needs no sum. A layer with a LoRA adapter is
    more than its weight, so it is called.
    """
    if any(type(p) is not nn.Linear for p in projections):  # also a layer that multiplies in bfloat16
        return torch.cat([p(x) for p in projections], dim=-1)
    return F.linear(x, torch.cat([p.weight for p in projections]))


def _fits(x: Tensor, weight: Tensor, head_dim: int | None = None) -> bool:
    """Return whether the C functions support such tensors and could be compiled on this machine."""
    # The C code computes in float32 only; under autocast callers expect half precision.
    is_plain = (
        x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    )
    return is_plain and _library(head_dim or _ANY_HEAD_DIM) is not None


class _NormPass(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, y = x.contiguous(), torch.empty(x.shape)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        # All leading axes are flattened: C sees a matrix of rows.
        _call("norm_forward", x.numel() // len(weight), len(weight), x, weight, eps, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        num_rows, dx = x.numel() // len(weight), torch.empty_like(x)
        parts = torch.zeros(-(-num_rows // _PART), len(weight))  # zeros, because C adds each row to its part
        _call("norm_backward", num_rows, len(weight), dy.contiguous(), x, weight, ctx.eps, dx, parts)
        # Partial sums cover a fixed number of rows, so the result does not depend on the number of threads.
        return dx, parts.sum(0), None


class _RotatePass(Function):
    """Normalise each head, then rotate it by the token's angles (RoPE)."""

    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor, weight: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, eps: float) -> Tensor:
        x_BTHD, y_BTHD = x_BTHD.contiguous(), torch.empty(x_BTHD.shape)
        ctx.save_for_backward(x_BTHD, weight, cos_BTD, sin_BTD)
        ctx.eps = eps
        num_tokens, num_heads = x_BTHD.shape[:2].numel(), x_BTHD.shape[2]
        arguments = (num_tokens, num_heads, x_BTHD, weight, cos_BTD, sin_BTD, eps)
        _call("rotate_forward", *arguments, y_BTHD, head_dim=len(weight))
        return y_BTHD

    @staticmethod
    def backward(ctx: Any, dy_BTHD: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x_BTHD, weight, cos_BTD, sin_BTD = ctx.saved_tensors
        num_tokens, dx_BTHD = x_BTHD.shape[:2].numel(), torch.empty_like(x_BTHD)
        # All heads of a token share the weight [D], so a part sums over the heads of its tokens, too.
        parts = torch.zeros(-(-num_tokens // _PART), len(weight))
        arguments = (num_tokens, x_BTHD.shape[2], dy_BTHD.contiguous(), x_BTHD, weight, cos_BTD, sin_BTD, ctx.eps)
        _call("rotate_backward", *arguments, dx_BTHD, parts, head_dim=len(weight))
        return dx_BTHD, parts.sum(0), None, None, None  # angles are constants


class _GatePass(Function):
    """Compute silu(gate) * up, where gate and up are the halves of one tensor."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()  # C gets bare pointers
        size = gate_up.shape[-1] // 2
        y = torch.empty(*gate_up.shape[:-1], size)
        ctx.save_for_backward(gate_up)
        _call("gate_forward", gate_up.numel() // (2 * size), size, gate_up, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad, size = torch.empty_like(gate_up), gate_up.shape[-1] // 2
        _call("gate_backward", gate_up.numel() // (2 * size), size, dy.contiguous(), gate_up, grad)
        return grad


# Argument types: l int64_t, f float, p pointer (see `compile_c`).
_SIGNATURES = {
    "norm_forward": "llppfp",
    "norm_backward": "llpppfpp",
    "rotate_forward": "llppppfp",
    "rotate_backward": "llpppppfpp",
    "gate_forward": "llpp",
    "gate_backward": "llppp",
}
_ANY_HEAD_DIM = 16  # the C source needs the macro to compile; norms and gates do not use it


@cache
def _library(head_dim: int) -> ctypes.CDLL | None:
    return compile_c(_SOURCE, {"HEAD_DIM": head_dim}, _SIGNATURES)


def _call(name: str, *arguments: Tensor | float, head_dim: int = _ANY_HEAD_DIM) -> None:
    call(_library(head_dim), name, *arguments)


def _rotate_cpu(
    q_BTKD: Tensor, k_BTGD: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    queries, keys = (q_BTKD, q_weight_D, cos_BTD, sin_BTD, eps), (k_BTGD, k_weight_D, cos_BTD, sin_BTD, eps)
    return _RotatePass.apply(*queries), _RotatePass.apply(*keys)  # type: ignore[no-untyped-call]


def _norm_cuda(*arguments: Any) -> Tensor:
    return kernels().norm(*arguments)


def _gate_cuda(*arguments: Any) -> Tensor:
    return kernels().gate(*arguments)


def _rotate_cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    return kernels().rotate(*arguments)


PARTS = ("norm", "gate", "rotate")
"""Parts of the model with fast paths here."""


def has_library(head_dim: int = _ANY_HEAD_DIM) -> bool:
    """Return whether the C functions could be compiled on this machine."""
    return _library(head_dim) is not None


registry.provide("norm/cpu", _NormPass.apply)
registry.provide("gate/cpu", _GatePass.apply)
registry.provide("rotate/cpu", _rotate_cpu)
registry.provide("norm/cuda", _norm_cuda)
registry.provide("gate/cuda", _gate_cuda)
registry.provide("rotate/cuda", _rotate_cuda)
