"""Define the trials of fast paths: small inputs for each part of the model, and the same part by plain operations.

The inputs have the model's sizes wherever a kernel is built for a size, and few tokens.
Axis letters: T tokens, N loss tokens, K query heads, G key and value heads, D head size, H hidden, I intermediate, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from klear_core import products
from klear_core.hf_config import HfConfig
from klear_core.train.kernels import attention, fused
from klear_core.train.kernels.fused import kernels
from klear_core.train.kernels.half_linear import PRODUCTS
from klear_core.train.kernels.registry import Run
from klear_core.train.logps import HALF, fused_loss, head_kernels_on, token_logps

Outputs = tuple[Tensor, ...]

_EPS = 1e-5  # kernels take it as an argument, so it need not be the model's
_HEAD_HIDDEN = 64  # kernels of the head see only logits, so the hidden size need not be the model's
_LENGTHS = {"cpu": (300, 7), "cuda": (1100, 37)}
"""Tokens of the trials of elementwise parts. The first is larger than any block that kernels cut rows into (128 at
most, 256 rows per partial sum). The second differs, so that torch.compile builds its kernel for any length."""
_ROWS = {"cpu": ((1,), (5,), (300,), (20, 9, 1, 30)), "cuda": ((1,), (5,), (37,), (130,), (1100,))}
"""Rows of attention's trial, by length. Several numbers in one tuple are a prompt and the rows that share it, which
only CPU kernels support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes that kernels are built for."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    model_type: str
    """The family, by which norms, rotations and gates have fast paths; Qwen3 alone has norms in its rotations."""
    has_window: bool = False
    """Whether layers attend within a sliding window."""

    @classmethod
    def of(cls, config: HfConfig, *, context_parallel: int = 1) -> ModelSizes:
        """Read the sizes from a model's config; with context parallelism a rank attends with a part of the heads."""
        num_kv_heads = config.num_key_value_heads or config.num_attention_heads
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=config.num_attention_heads // context_parallel,
            # Key heads are repeated until the ranks divide their number; see `Context.gather_tokens`.
            num_kv_heads=math.lcm(num_kv_heads, context_parallel) // context_parallel,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            vocab=config.vocab_size,
            model_type=config.model_type,
            has_window=bool(config.use_sliding_window) or "sliding_attention" in (config.layer_types or ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One input, and two functions of it that should agree."""

    leaves: Outputs
    """In the dtype of the stage; `plain` gets them in float64."""
    fast: Callable[..., Outputs]
    plain: Callable[..., Outputs]
    has_gradient: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A trial of the fast paths of one part."""

    what: str
    trials: Callable[[Run, ModelSizes, torch.device, torch.dtype], Iterator[Trial]]
    plain: str
    """Name of the form that is used where all fast paths are left out."""


def is_used(name: str, sizes: ModelSizes, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a stage on this device, in this dtype, would use a fast path of this name."""
    part, kind, *_ = name.split("/")
    if kind != device.type:
        return False
    if name == attention.COMPILED_C:
        return dtype == torch.float32 and attention.fits_head_dim(sizes.head_dim)
    if part in fused.PARTS:
        return sizes.model_type in fused.FAMILIES[kind] and (kind == "cuda" or dtype == torch.float32)
    return dtype in HALF if part in ("attention", "products") else True


def why_missing(name: str, sizes: ModelSizes) -> str:
    """Return why this machine does not have a path that it would use; an empty string if it has."""
    part, kind, *_ = name.split("/")
    if name in attention.FASTER:
        return attention.why_no_faster(name)
    if name == attention.VARLEN_ATTN and not attention.has_varlen_attn():
        return "this torch has no torch.nn.attention.varlen"
    if name == PRODUCTS and not products.instructions():
        return "this processor has no instructions for bfloat16 (AVX512_BF16 or AMX)"
    has_c = True
    if name == attention.COMPILED_C:
        has_c = attention.has_library(sizes.head_dim)
    elif part in fused.PARTS and kind == "cpu":
        has_c = fused.has_library(sizes.head_dim) if part == "rotate" else fused.has_library()
    return "" if has_c else "its C source was not compiled"


def compiler_failure(name: str) -> str:
    """Return the error of torch.compile for this path, empty if it had none; known once the path has run."""
    part, kind, *_ = name.split("/")
    if kind != "cuda" or part not in (*fused.PARTS, "head"):
        return ""
    compiled: Any = head_kernels_on(kind) if part == "head" else getattr(kernels(), part)
    return str(compiled.failure)


def _attention(run: Run, sizes: ModelSizes, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    groups = _ROWS[device.type]
    lengths = [length for group in groups for length in group]
    num_tokens, max_len = sum(lengths), max(lengths)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    group_bounds = torch.tensor([0, *accumulate(map(len, groups))], dtype=torch.int32)
    scaling = sizes.head_dim**-0.5
    heads = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    leaves = _draw(device, dtype, *((num_tokens, n, sizes.head_dim) for n in heads))

    # The compiled C is never used with a window. 29 is shorter than most rows, and no multiple of a kernel's block.
    for window in (None, 29) if sizes.has_window and device.type == "cuda" else (None,):
        rows = attention.Rows(cu_seqlens, group_bounds, max_len, window)
        fast = partial(_attend_fast, run, rows, scaling)
        yield Trial(leaves=leaves, fast=fast, plain=partial(_attend_plain, rows, scaling))


def _attend_fast(run: Run, rows: attention.Rows, scaling: float, *qkv: Tensor) -> Outputs:
    return (run(*qkv, rows, scaling),)


def _attend_plain(rows: attention.Rows, scaling: float, *qkv: Tensor) -> Outputs:
    q_TKD, k_TGD, v_TGD = qkv
    segments = (rows.cu_seqlens, rows.group_bounds)
    return (attention.by_segment(q_TKD, k_TGD, v_TGD, *segments, scaling, rows.window),)


def _norm(run: Run, sizes: ModelSizes, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    for length in _LENGTHS[device.type]:
        leaves = _draw(device, dtype, (1, length, sizes.hidden), (sizes.hidden,))
        yield Trial(leaves=leaves, fast=lambda x, w: (run(x, w, _EPS),), plain=lambda x, w: (_rms_norm(x, w),))


def _gate(run: Run, sizes: ModelSizes, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    def fast(gate: Tensor, up: Tensor) -> Outputs:
        # The C function takes both halves in one tensor.
        return (run(torch.cat((gate, up), dim=-1)) if device.type == "cpu" else run(gate, up),)

    for length in _LENGTHS[device.type]:
        shape = (1, length, sizes.intermediate)
        leaves = _draw(device, dtype, shape, shape)
        yield Trial(leaves=leaves, fast=fast, plain=lambda gate, up: (F.silu(gate) * up,))


def _rotate(run: Run, sizes: ModelSizes, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    head_dim = sizes.head_dim
    for length in _LENGTHS[device.type]:
        # Frequencies from 1 down to 1e-4, as of RoPE with base 10,000; both halves of a head have the same angles.
        angle_TD = torch.arange(length, device=device)[:, None] * 0.1 ** torch.linspace(0, 4, head_dim // 2).to(device)
        angle_1TD = torch.cat((angle_TD, angle_TD), dim=-1)[None]
        # Rounded here, so that the plain form in float64 sees the numbers that the kernel sees.
        cos_1TD, sin_1TD = angle_1TD.cos().to(dtype), angle_1TD.sin().to(dtype)

        # Angles as defaults: each trial keeps those of its own length.
        def fast(*x: Tensor, cos: Tensor = cos_1TD, sin: Tensor = sin_1TD) -> Outputs:
            qkv, weights = x[:3], x[3:] or (None, None)
            if device.type == "cuda":
                return (*run(*qkv[:2], *weights, cos, sin, _EPS), qkv[2])
            # The C function takes them side by side.
            return tuple(run(torch.cat(qkv, dim=2), sizes.num_kv_heads, *weights, cos, sin, _EPS))

        def plain(*x: Tensor, cos: Tensor = cos_1TD, sin: Tensor = sin_1TD) -> Outputs:
            q, k, v, *weights = x
            if weights:
                q, k = _rms_norm(q, weights[0]), _rms_norm(k, weights[1])
            return (*apply_rotary_pos_emb(q, k, cos.to(q.dtype), sin.to(q.dtype), unsqueeze_dim=2), v)

        heads = [(1, length, n, head_dim) for n in (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)]
        norms = [(head_dim,)] * 2 if sizes.model_type == "qwen3" else []
        yield Trial(leaves=_draw(device, dtype, *heads, *norms), fast=fast, plain=plain)


def _head(_run: Run, sizes: ModelSizes, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    # The complete head is tried, through the dispatch that a stage uses: its kernels are never called alone.
    num_tokens = 130
    g = torch.Generator().manual_seed(2)
    target_N = torch.randint(sizes.vocab, (num_tokens,), generator=g).to(device)
    factor_N = torch.linspace(0.5, 2.0, num_tokens, device=device)  # differs by token, to detect a wrong chunk offset
    temperature = 0.7

    def fast(hidden_NH: Tensor, weight_VH: Tensor) -> Outputs:
        def loss(logp_C: Tensor, entropy_C: Tensor, at: slice) -> Tensor:
            return factor_N[at] * (0.1 * entropy_C - logp_C)

        inputs = hidden_NH, weight_VH, target_N
        most = 65 * sizes.vocab  # two chunks
        formed = fused_loss(*inputs, loss, temperature=temperature, need_entropy=True, max_logits=most)
        read = token_logps(*inputs, temperature=temperature, max_logits=most)
        return formed.loss, *read

    def plain(hidden_NH: Tensor, weight_VH: Tensor) -> Outputs:
        logp_NV = F.log_softmax(hidden_NH @ weight_VH.T / temperature, dim=-1)
        logp_N = logp_NV.gather(1, target_N[:, None])[:, 0]
        entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
        return (factor_N * (0.1 * entropy_N - logp_N)).sum(), logp_N, entropy_N

    hidden_NH, weight_VH = _draw(device, dtype, (num_tokens, _HEAD_HIDDEN), (sizes.vocab, _HEAD_HIDDEN))
    # Logits then have a standard deviation of 0.3 sqrt(64) / 0.7 = 3.4: a softmax neither flat nor of one token.
    yield Trial(leaves=(hidden_NH, (0.3 * weight_VH).detach()), fast=fast, plain=plain)


def _products(run: Run, sizes: ModelSizes, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    total_32 = torch.ones(96, sizes.hidden, device=device)

    def fast(a: Tensor, b: Tensor) -> Outputs:
        # On CPUs operands may be float32 and are rounded, which these numbers do not need.
        wide = (a.float(), b.float()) if device.type == "cpu" else (a, b)
        return run(None, a, b), run(total_32.clone(), *wide)

    def plain(a: Tensor, b: Tensor) -> Outputs:
        return a @ b, total_32 + a @ b

    # Sums of 1024 terms, whose rounding to bfloat16 is above the tolerance of a float32 result.
    leaves = _draw(device, dtype, (96, 1024), (1024, sizes.hidden))
    yield Trial(leaves=leaves, fast=fast, plain=plain, has_gradient=False)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    # It normalises in float32 even if its input is float64, which is exact enough for every tolerance here.
    module = Qwen3RMSNorm(len(weight), eps=_EPS).to(weight.device)
    out: Tensor = torch.func.functional_call(module, {"weight": weight}, (x,))
    return out


def _draw(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Outputs:
    """Return normal numbers; a vector is a norm's weight, around 1. torch's global generator is left as it is."""
    g = torch.Generator().manual_seed(0)  # on the CPU, so that every device gets the same numbers
    leaves = []
    for shape in shapes:
        drawn = torch.randn(shape, generator=g)
        leaves.append((drawn if len(shape) > 1 else 1 + 0.2 * drawn).to(device=device, dtype=dtype))
    return tuple(leaves)


PARTS = {
    "products": Part(what="products of halves in float32", trials=_products, plain="products in float32"),
    "attention": Part(what="attention", trials=_attention, plain="torch's attention, row by row"),
    "norm": Part(what="norms", trials=_norm, plain="transformers' norms"),
    "gate": Part(what="gates", trials=_gate, plain="transformers' gates"),
    "rotate": Part(what="rotations", trials=_rotate, plain="transformers' rotations"),
    "head": Part(what="head", trials=_head, plain="the uncompiled head"),
}
"""Parts in the order of their trials: the head uses the products."""
