"""Causal attention for packed rows, plugged into any `transformers` model through its attention registry.

Axis letters: B rows, T tokens, K query heads, D head size.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from klear_core.errors import ConfigError
from klear_core.train.packing import Layout, MicroBatch

NAME = "klear"


def register() -> None:
    """Make `attn_implementation="klear"` known to transformers. It builds no mask: causality and row bounds are ours."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def layout_for(device: torch.device, dtype: torch.dtype) -> Layout:
    """Rows end to end where a variable-length kernel runs (CUDA, half precision), padded buckets elsewhere."""
    return "varlen" if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) else "padded"


def attend(
    module: nn.Module,
    query_BKTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    micro: MicroBatch | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: causal attention within each row of `micro`; the result has tokens before heads."""
    assert attention_mask is None, "klear attention is given row bounds, not masks"
    if micro is None:  # a model that drops it would let packed rows see each other
        raise ConfigError(f"{type(module).__name__} does not hand attention arguments down to its layers; Klear cannot pack rows for it")
    _refuse_what_we_do_not_compute(module, others)
    context = micro.context
    query_BKTD, key_BKTD, value_BKTD = context.trade_tokens(query_BKTD, key_BKTD, value_BKTD)
    out_BTKD = _packed(query_BKTD, key_BKTD, value_BKTD, micro, scaling)
    return context.trade_heads(out_BTKD), None


def _packed(query_BKTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, micro: MicroBatch, scaling: float) -> Tensor:
    bounds = micro.bounds
    if bounds is None:
        return _dense(query_BKTD, key_BKTD, value_BKTD, scaling).transpose(1, 2)
    assert query_BKTD.shape[0] == 1, query_BKTD.shape  # varlen: all rows lie in one line
    q_TKD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query_BKTD, key_BKTD, value_BKTD))
    if query_BKTD.is_cuda:
        return _varlen_kernel(q_TKD, k_TKD, v_TKD, bounds, micro.max_row_len, scaling)[None]
    rows = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    outs = [_dense(query_BKTD[:, :, a:b], key_BKTD[:, :, a:b], value_BKTD[:, :, a:b], scaling) for a, b in rows]
    return torch.cat(outs, dim=2).transpose(1, 2)


def _dense(query_BKTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float) -> Tensor:
    """Causal over whole rows. Padding lies at the end of a row, where no real token can see it."""
    is_grouped = query_BKTD.shape[1] != key_BKTD.shape[1]
    return scaled_dot_product_attention(query_BKTD, key_BKTD, value_BKTD, is_causal=True, scale=scaling, enable_gqa=is_grouped)


def _varlen_kernel(q_TKD: Tensor, k_TKD: Tensor, v_TKD: Tensor, bounds: Tensor, max_row_len: int, scaling: float) -> Tensor:
    out: Tensor
    if _has_flash_attn():
        from flash_attn import flash_attn_varlen_func

        out = flash_attn_varlen_func(q_TKD, k_TKD, v_TKD, bounds, bounds, max_row_len, max_row_len, softmax_scale=scaling, causal=True)
        return out
    from torch.nn.attention.varlen import varlen_attn

    how: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}  # all that came before, nothing after
    if _varlen_attn_wants_gqa():
        how["enable_gqa"] = True
    out = varlen_attn(q_TKD, k_TKD, v_TKD, bounds, bounds, max_row_len, max_row_len, **how)  # type: ignore[assignment]
    return out


@cache
def _has_flash_attn() -> bool:
    return find_spec("flash_attn") is not None


@cache
def _varlen_attn_wants_gqa() -> bool:
    """Before torch 2.12 grouped heads needed no flag."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


def _refuse_what_we_do_not_compute(module: nn.Module, others: dict[str, Any]) -> None:
    if others.get("dropout"):
        raise ConfigError(
            f"{type(module).__name__} has attention dropout {others['dropout']}; set attention_dropout to 0 in the model's config"
        )
    unknown = [k for k in ("sliding_window", "softcap", "s_aux", "position_bias") if others.get(k) is not None]
    if unknown:
        raise ConfigError(f"{type(module).__name__} uses {', '.join(unknown)}, which Klear's training does not compute")
