"""Provide causal attention over a packed sequence to any `transformers` model, through its attention registry.

Axis letters: T tokens, K query heads, G key and value heads, D head size.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import scaled_dot_product_attention

from klear_core.config.train import AttentionKernel
from klear_core.errors import ConfigError
from klear_core.native import call, compile_c
from klear_core.train.kernels import registry
from klear_core.train.packing import MicroBatch

log = logging.getLogger(__name__)

# ---- attention cpu ----
# Compute attention over a packed sequence on CPU in float32, in compiled C.
#
# Only causal products are computed, without padding, and shared prompts are read in place.


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


# ---- attention ----


NAME = "klear"


def register() -> None:
    """Register `attn_implementation="klear"` with transformers, which then builds no mask: `attend` needs none."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module,
    query_1KTD: Tensor,
    key_1GTD: Tensor,
    value_1GTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    micro: MicroBatch | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each row of `micro`; the result has tokens before heads.

    transformers calls this from each layer, with the keyword arguments that the model was called with. A token of a
    layer with a `sliding_window` attends to that many tokens, itself included.
    """
    assert attention_mask is None, "klear attention is given segments of a packed sequence, not masks"
    if micro is None:  # the model dropped it: packed rows would see each other
        raise ConfigError(
            f"{type(module).__name__} does not pass attention arguments to its layers; Klear cannot pack rows for it"
        )
    _check_supported(module, others)
    query_1KTD, key_1GTD, value_1GTD = micro.cp_group.gather_tokens(query_1KTD, key_1GTD, value_1GTD)
    # A micro-batch is one packed sequence, so the batch axis has size 1. Kernels for packed rows take tokens first.
    q_TKD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query_1KTD, key_1GTD, value_1GTD))
    out_TKD = _attend(q_TKD, k_TGD, v_TGD, micro, scaling, sliding_window)
    return micro.cp_group.gather_heads(out_TKD[None]), None  # None: the attention weights, which are never stored


class Rows(NamedTuple):
    """Rows of a packed sequence, for the kernels; see `MicroBatch`."""

    cu_seqlens: Tensor
    group_bounds: Tensor
    max_len: int
    window: int | None = None
    """Number of last tokens, its own included, that a token sees; None: all before it."""


def _attend(
    q_TKD: Tensor, k_TGD: Tensor, v_TGD: Tensor, micro: MicroBatch, scaling: float, window: int | None
) -> Tensor:
    # No row is longer than the packed sequence, so that a window of that length leaves nothing out.
    if window is not None and window >= len(q_TKD):
        window = None
    kernel = _pick_kernel(q_TKD, window)
    if kernel is None:
        return by_segment(q_TKD, k_TGD, v_TGD, micro.cu_seqlens, micro.group_bounds, scaling, window)
    rows = Rows(micro.cu_seqlens, micro.group_bounds, micro.max_segment_len, window)
    return kernel(q_TKD, k_TGD, v_TGD, rows, scaling)  # type: ignore[no-any-return]


def _pick_kernel(q_TKD: Tensor, window: int | None) -> registry.Run | None:
    if q_TKD.is_cuda and q_TKD.dtype in (torch.bfloat16, torch.float16):
        faster = (registry.in_use(name) for name in FASTER)
        return next(filter(None, faster), None) or registry.in_use(VARLEN_ATTN)
    # The compiled C has no sliding window.
    return registry.in_use(COMPILED_C) if window is None and supports(q_TKD) else None


def by_segment(
    q_TKD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cu_seqlens: Tensor,
    group_bounds: Tensor,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """Compute attention with one call of torch's attention per segment.

    It computes the dtypes and devices that no kernel supports, and checks the kernels in tests.
    """
    ends, outs = cu_seqlens.tolist(), []
    for first, end in pairwise(group_bounds.tolist()):
        prefix = slice(ends[first], ends[first + 1])
        for segment in range(first, end):
            at = slice(ends[segment], ends[segment + 1])
            keys, values = k_TGD[at], v_TGD[at]
            # After a shared prompt, a segment also sees all of it; the copies' gradients are summed by autograd.
            if segment > first:
                keys, values = torch.cat([k_TGD[prefix], keys]), torch.cat([v_TGD[prefix], values])
            outs.append(_attend_last(q_TKD[at], keys, values, scaling, window))
    return torch.cat(outs)


def _attend_last(q_TKD: Tensor, k_SGD: Tensor, v_SGD: Tensor, scaling: float, window: int | None) -> Tensor:
    """Compute causal attention of the last T of S tokens."""
    num_queries, num_keys = len(q_TKD), len(k_SGD)
    # `is_causal` lines up the first query with the first key, which is right for T = S only; otherwise build the mask.
    mask_TS = None
    if num_keys > num_queries or (window is not None and window < num_keys):
        # Query i is token num_before + i of the row: it sees the keys up to there, the last `window` of them.
        num_before = num_keys - num_queries
        mask_TS = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_TKD.device).tril(num_before)
        if window is not None:
            mask_TS = mask_TS.triu(num_before - window + 1)
    q_1KTD, k_1GSD, v_1GSD = (x.transpose(0, 1)[None] for x in (q_TKD, k_SGD, v_SGD))
    is_grouped = q_TKD.shape[1] != k_SGD.shape[1]  # torch pairs G key heads with K query heads only if asked to
    out_1KTD = scaled_dot_product_attention(
        q_1KTD, k_1GSD, v_1GSD, attn_mask=mask_TS, is_causal=mask_TS is None, scale=scaling, enable_gqa=is_grouped
    )
    return out_1KTD[0].transpose(0, 1)


def _compiled_c(q_TKD: Tensor, k_TGD: Tensor, v_TGD: Tensor, rows: Rows, scaling: float) -> Tensor:
    return attend_on_cpu(q_TKD, k_TGD, v_TGD, rows.cu_seqlens, rows.group_bounds, scaling)


def _varlen_attn(
    q_TKD: Tensor, k_TGD: Tensor, v_TGD: Tensor, rows: Rows, scaling: float, *, impl: str | None = None
) -> Tensor:
    """Compute attention by torch's kernel: FlashAttention-2 of its wheel, or the one that `impl` names."""
    from torch.nn.attention.varlen import varlen_attn

    _switch_to(impl)
    # No flag makes it causal: the window does, which ends at the query itself.
    options: dict[str, Any] = {"scale": scaling, "window_size": _window_size(rows)}
    if _varlen_attn_has_gqa_flag():
        options["enable_gqa"] = True
    lengths = (rows.cu_seqlens, rows.cu_seqlens, rows.max_len, rows.max_len)
    out: Tensor = varlen_attn(q_TKD, k_TGD, v_TGD, *lengths, **options)  # type: ignore[assignment]
    return out


def _window_size(rows: Rows) -> tuple[int, int]:
    """Return how many tokens are seen before and after a token; -1: all of them."""
    assert len(rows.group_bounds) == len(rows.cu_seqlens), "the kernels know no shared prompts"
    # transformers counts the token itself in a window, the kernels only those before it.
    return (-1 if rows.window is None else rows.window - 1, 0)


def _switch_to(impl: str | None) -> None:
    """Make torch's attention call this implementation from now on, in the whole process; None: its own."""
    from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
    from torch.nn.attention._registry import restore_flash_attention_impl

    if current_flash_attention_impl() == impl:
        return
    if impl is None:
        restore_flash_attention_impl()
    else:
        activate_flash_attention_impl(impl)


COMPILED_C, VARLEN_ATTN = "attention/cpu", "attention/cuda/varlen_attn"
FASTER = {"attention/cuda/FA4": "flash_attn.cute", "attention/cuda/FA3": "flash_attn_interface"}
"""Paths that a setting asks for, and the module that each needs; torch calls their switch a prototype."""
registry.provide(COMPILED_C, _compiled_c)
registry.provide(VARLEN_ATTN, _varlen_attn)


def ask_for(kernel: AttentionKernel) -> None:
    """Provide the kernel that `runtime.attention` names, for `klear_core.train.kernels.check` to try."""
    if kernel != "torch":
        registry.provide(f"attention/cuda/{kernel}", partial(_varlen_attn, impl=kernel))


def why_no_faster(name: str) -> str:
    """Return why this machine cannot have a path of `FASTER`; empty if it may."""
    from torch.nn.attention import list_flash_attention_impls

    impl, module = name.rpartition("/")[2], FASTER[name]
    if impl not in list_flash_attention_impls():
        return f"this torch has no switch to {impl}"
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        is_there = False
    return "" if is_there else f"no module {module} is installed; {impl} comes with {_WHEELS[impl]}"


_WHEELS = {"FA4": "pip install flash-attn-4", "FA3": "the hopper folder of the flash-attention repository"}


def hide_broken_wheel(name: str) -> None:
    """Make a package that is installed and does not import look absent, with a warning.

    transformers imports flash_attn wherever it is installed, and one that was built for another torch then ends every
    stage: the commonest broken wheel.
    """
    if name in sys.modules or find_spec(name) is None:
        return
    try:
        import_module(name)
    except Exception as error:  # noqa: BLE001  a library that does not load can raise anything
        sys.modules[name] = None  # type: ignore[assignment]  # as Python's import system documents it
        log.warning("%s is installed, does not import and is left out: %s", name, error)


hide_broken_wheel("flash_attn")  # before any model of transformers is imported


@cache
def has_varlen_attn() -> bool:
    """Return whether this torch has attention over rows of various lengths."""
    return find_spec("torch.nn.attention.varlen") is not None


@cache
def _varlen_attn_has_gqa_flag() -> bool:
    """Return whether grouped heads need a flag; before torch 2.12 they did not."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


def _check_supported(module: nn.Module, others: dict[str, Any]) -> None:
    if others.get("dropout"):
        raise ConfigError(
            f"{type(module).__name__} has attention dropout {others['dropout']}; "
            f"set attention_dropout to 0 in the model's config"
        )
    # Gemma 2 caps its scores (softcap), gpt-oss has attention sinks (s_aux), T5 and its kin add a bias by distance.
    unknown = [k for k in ("softcap", "s_aux", "position_bias") if others.get(k) is not None]
    if unknown:
        raise ConfigError(f"{type(module).__name__} uses {', '.join(unknown)}, which Klear's training does not compute")
