"""Compute the norms, rotations and gates of a model in one compiled pass each, forward and backward.

transformers' operations take five to ten passes each. There are passes for float32 on CPU, in C, for Llama, Qwen2 and
Qwen3, and for CUDA, by torch.compile, for Qwen3. All other dtypes, devices and models use transformers' operations.
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

from klear_core.native import call, compile_c
from klear_core.train.kernels import attention, half_linear, registry
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


FAMILIES = {"cpu": ("llama", "qwen2", "qwen3"), "cuda": ("qwen3",)}
"""Values of `model_type` with passes on a device."""


def fuse(hf: Any) -> None:
    """Make the modules of a model of transformers use the compiled passes; leave other families unchanged."""
    family = hf.config.model_type
    if family not in FAMILIES["cpu"]:
        return
    for module in hf.modules():
        kind: Any = type(module)
        # The exact class, because a subclass, such as another model's attention, may compute something else.
        if kind.__module__ == f"transformers.models.{family}.modeling_{family}":
            part = _PARTS.get(kind.__name__.removeprefix(family.capitalize()))
            if part is not None:
                # Replace the class rather than the bound method, so that copies and shards of the model keep working.
                module.__class__ = _fused_class(part, kind, has_cuda=family in FAMILIES["cuda"])


@cache
def _fused_class(part: type[_Fused], kind: type[nn.Module], *, has_cuda: bool) -> type[nn.Module]:
    return type(kind.__name__, (part, kind), {"__module__": __name__, "has_cuda": has_cuda})


class _Fused(nn.Module):
    has_cuda: bool
    """Whether its family has passes for CUDA."""

    def find(self, part: str, x: Tensor, weight: Tensor, head_dim: int | None = None) -> registry.Run | None:
        """Return the compiled pass for such tensors, if there is one."""
        fits = self.has_cuda if x.is_cuda else _fits(x, weight, head_dim)
        return registry.on_device(part, x) if fits else None


# The attributes that are named below are those of transformers' classes.
class _Norm(_Fused):
    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        norm = self.find("norm", x, self.weight)
        if norm is None:
            return super().forward(x)  # type: ignore[no-any-return]
        return norm(x, self.weight, self.variance_epsilon)  # type: ignore[no-any-return]


class _Mlp(_Fused):
    config: Any
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        gate = self.find("gate", x, self.gate_proj.weight) if self.config.hidden_act == "silu" else None
        if gate is None:
            return super().forward(x)  # type: ignore[no-any-return]
        if x.is_cuda:
            return self.down_proj(gate(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]
        return self.down_proj(gate(_project(x, self.gate_proj, self.up_proj)))  # type: ignore[no-any-return]


class _Attention(_Fused):
    head_dim: int
    scaling: float
    attention_dropout: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_norm: Any
    k_norm: Any

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *others: Any, **named: Any
    ) -> tuple[Tensor, None]:
        rotate = self.find("rotate", hidden_states, self.q_proj.weight, self.head_dim)
        if rotate is None:
            return super().forward(hidden_states, position_embeddings, *others, **named)  # type: ignore[no-any-return]
        heads = self._on_cuda if hidden_states.is_cuda else self._on_cpu
        # [B, T, H, D] -> [B, H, T, D], as transformers calls its attention functions.
        heads_first = (x.transpose(1, 2) for x in heads(rotate, hidden_states, *position_embeddings))
        dropout = self.attention_dropout if self.training else 0.0  # passed on only to be refused if it is not 0
        window = getattr(self, "sliding_window", None)  # a Llama has none
        out, _ = attention.attend(
            self, *heads_first, scaling=self.scaling, dropout=dropout, sliding_window=window, **named
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
        # Heads of queries, keys and values lie side by side, in the order of the projections.
        qkv_BTHD = _project(x, self.q_proj, self.k_proj, self.v_proj).view(*x.shape[:-1], -1, self.head_dim)
        num_kv_heads = self.k_proj.out_features // self.head_dim
        norms = [getattr(self, name, None) for name in ("q_norm", "k_norm")]  # Qwen3's alone
        weights = [None if norm is None else norm.weight for norm in norms]
        eps = 0.0 if norms[0] is None else norms[0].variance_epsilon
        return rotate(qkv_BTHD, num_kv_heads, *weights, *angles, eps)  # type: ignore[no-any-return]


_PARTS = {"RMSNorm": _Norm, "MLP": _Mlp, "Attention": _Attention}
"""What is fused, by the end of its class's name."""


def _project(x: Tensor, *projections: nn.Linear) -> Tensor:
    """Return the outputs of all projections of x side by side.

    One wide product is faster than narrow ones, and its gradient for x needs no sum. A layer with a LoRA adapter is
    more than its weight, so it is called.
    """
    if any(type(p) not in half_linear.LAYERS for p in projections):
        return torch.cat([p(x) for p in projections], dim=-1)
    return half_linear.linear(x, *projections)


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
    """Normalise each head of queries and keys if there are weights, then rotate it by the token's angles (RoPE).

    Queries, keys and values come side by side; they are returned one by one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv_BTHD: Tensor,
        num_kv_heads: int,
        q_weight_D: Tensor | None,
        k_weight_D: Tensor | None,
        cos_BTD: Tensor,
        sin_BTD: Tensor,
        eps: float,
    ) -> tuple[Tensor, ...]:
        qkv_BTHD = qkv_BTHD.contiguous()  # C gets bare pointers
        ctx.num_kv_heads, ctx.eps, ctx.shape = num_kv_heads, eps, qkv_BTHD.shape
        # Rotations are undone without what they rotated.
        ctx.save_for_backward(None if q_weight_D is None else qkv_BTHD, q_weight_D, k_weight_D, cos_BTD, sin_BTD)
        q_BTKD, k_BTGD, v_BTGD = split_heads(qkv_BTHD, num_kv_heads)
        rotated = [torch.empty(q_BTKD.shape), torch.empty(k_BTGD.shape)]
        for x, weight_D, y in zip((q_BTKD, k_BTGD), (q_weight_D, k_weight_D), rotated, strict=True):
            arguments = (*_sizes(x), x, weight_D, cos_BTD, sin_BTD, eps)
            _call("rotate_forward", *arguments, y, head_dim=x.shape[-1])
        return *rotated, v_BTGD.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved_BTHD, *weights, cos_BTD, sin_BTD = ctx.saved_tensors
        dqkv_BTHD = torch.empty(ctx.shape)
        # Without norms the values are not read.
        x_BTHD = dqkv_BTHD if saved_BTHD is None else saved_BTHD
        dx, x = split_heads(dqkv_BTHD, ctx.num_kv_heads), split_heads(x_BTHD, ctx.num_kv_heads)
        dx[2].copy_(grads[2])
        dweights: list[Tensor | None] = []
        for i, weight_D in enumerate(weights):
            # All heads of a token share the weight [D], so a part sums over the heads of its tokens, too.
            num_parts = -(-dx[i].shape[:2].numel() // _PART)
            parts = None if weight_D is None else torch.zeros(num_parts, len(weight_D))
            arguments = (*_sizes(dx[i]), grads[i].contiguous(), x[i], weight_D, cos_BTD, sin_BTD, ctx.eps, dx[i], parts)
            _call("rotate_backward", *arguments, head_dim=ctx.shape[-1])
            dweights.append(None if parts is None else parts.sum(0))
        return dqkv_BTHD, None, *dweights, None, None, None  # angles are constants


def split_heads(qkv_BTHD: Tensor, num_kv_heads: int) -> tuple[Tensor, ...]:
    """Return the views of queries, keys and values."""
    return torch.split(qkv_BTHD, [qkv_BTHD.shape[2] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=2)


def _sizes(x_BTHD: Tensor) -> tuple[int, int, int]:
    """Return the number of tokens, of heads, and the distance between tokens."""
    return x_BTHD.shape[:2].numel(), x_BTHD.shape[2], x_BTHD.stride(1)


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
    "rotate_forward": "lllppppfp",
    "rotate_backward": "lllpppppfpp",
    "gate_forward": "llpp",
    "gate_backward": "llppp",
}
_ANY_HEAD_DIM = 16  # the C source needs the macro to compile; norms and gates do not use it


@cache
def _library(head_dim: int) -> ctypes.CDLL | None:
    return compile_c(_SOURCE, {"HEAD_DIM": head_dim}, _SIGNATURES)


def _call(name: str, *arguments: Tensor | float | None, head_dim: int = _ANY_HEAD_DIM) -> None:
    call(_library(head_dim), name, *arguments)


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
registry.provide("rotate/cpu", _RotatePass.apply)
registry.provide("norm/cuda", _norm_cuda)
registry.provide("gate/cuda", _gate_cuda)
registry.provide("rotate/cuda", _rotate_cuda)
