"""Run the decode step on CPU in float32: torch's matrix products, with compiled C between them.

Dispatching torch operations instead would cost more than the products and the C code together.

Axis letters: R allocated rows, B active rows, C hidden size, V vocabulary, L cached positions, T positions of a row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from klear_core.generate.qwen3.model import KvCache, Qwen3
from klear_core.generate.qwen3.state import RowState
from klear_core.native import COMPILERS, compile_c

_LANES = 16  # floats of one vector in decode.c
_SOURCE = Path(__file__).with_name("decode.c")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    """Working memory of B rows."""

    x_BC: Tensor
    normed_BC: Tensor
    qkv: Tensor  # [B, (query heads + 2 * key/value heads) * head size]
    attended: Tensor  # [B, query heads * head size]
    gate_up: Tensor  # [B, 2 * intermediate size]
    activated: Tensor  # [B, intermediate size]
    logits_BV: Tensor
    scratch: Tensor  # attention scores: [B, query heads of one key/value head * cached positions]

    def rows(self, num_rows: int) -> _Buffers:
        """Return views of the first rows."""
        return _Buffers(
            x_BC=self.x_BC[:num_rows],
            normed_BC=self.normed_BC[:num_rows],
            qkv=self.qkv[:num_rows],
            attended=self.attended[:num_rows],
            gate_up=self.gate_up[:num_rows],
            activated=self.activated[:num_rows],
            logits_BV=self.logits_BV[:num_rows],
            scratch=self.scratch[:num_rows],
        )


class NativeStep:
    """The C functions for one model, and their buffers. Only one thread may use it."""

    @classmethod
    def of(cls, model: Qwen3, *, compilers: Sequence[str] = COMPILERS) -> NativeStep | None:
        """Build the step; None for another device or dtype, a head size that does not fill vectors, or no compiler."""
        s = model.shape
        if model.device.type != "cpu" or model.dtype != torch.float32 or s.head_dim % _LANES:
            return None
        sizes = {
            "HIDDEN": s.hidden_size,
            "NUM_HEADS": s.num_heads,
            "NUM_KV_HEADS": s.num_kv_heads,
            "HEAD_DIM": s.head_dim,
            "INTERMEDIATE": s.intermediate_size,
            "VOCAB": s.vocab_size,
        }
        library = compile_c(_SOURCE, sizes, _SIGNATURES, compilers=compilers)
        return None if library is None else cls(model, library)

    def __init__(self, model: Qwen3, library: ctypes.CDLL) -> None:
        self._model, self._library = model, library
        # weights are [out, in] as for F.linear; torch.mm takes the transposed views
        self._layers = []
        for qkv, out, gate_up, down in zip(model.qkv, model.out, model.gate_up, model.down, strict=True):
            self._layers.append((qkv.T, out.T, gate_up.T, down.T))
        self._buffers = self._views = self._allocate(0, 0)
        self._length = 0

    def decode(self, state: RowState, num_rows: int, shared: KvCache, private: KvCache) -> Tensor:
        """Return logits_BV after the newest token of each of the first rows. Valid until the next call."""
        m, lib, eps = self._model, self._library, self._model.shape.norm_eps
        b = self._buffers_for(num_rows, shared, private)
        # addresses for C; the model, the state, the caches and the buffers keep their tensors alive
        position, start, slot = state.position_R.data_ptr(), state.start_R.data_ptr(), state.slot_R.data_ptr()
        x, normed = b.x_BC.data_ptr(), b.normed_BC.data_ptr()
        qkv, attended, scratch = b.qkv.data_ptr(), b.attended.data_ptr(), b.scratch.data_ptr()
        cos, sin = m.cos_LD.data_ptr(), m.sin_LD.data_ptr()
        tokens, width, first = state.tokens_RT.data_ptr(), state.tokens_RT.shape[1], m.norm1[0].data_ptr()
        # also applies the first layer's norm
        lib.embed(num_rows, tokens, width, position, m.embed.data_ptr(), x, first, normed, eps)
        for i, (qkv_w, out_w, gate_up_w, down_w) in enumerate(self._layers):
            torch.mm(b.normed_BC, qkv_w, out=b.qkv)
            at_shared = (shared.keys[i].data_ptr(), shared.values[i].data_ptr(), shared.length)
            at_private = (private.keys[i].data_ptr(), private.values[i].data_ptr(), private.length)
            # norms and rotates queries and keys, writes the new key and value to `private`, and attends
            qk_norm = m.qk_norm[i].data_ptr()
            lib.attend(
                num_rows, position, start, slot, qkv, qk_norm, cos, sin, *at_shared, *at_private, eps, scratch, attended
            )
            b.x_BC.addmm_(b.attended, out_w)  # in place: adds to the residual stream
            lib.norm(num_rows, x, m.norm2[i].data_ptr(), normed, eps)
            torch.mm(b.normed_BC, gate_up_w, out=b.gate_up)
            lib.gate(num_rows, b.gate_up.data_ptr(), b.activated.data_ptr())
            b.x_BC.addmm_(b.activated, down_w)
            # the norm that the next layer begins with, or the final one
            following = m.norm1[i + 1] if i + 1 < len(self._layers) else m.norm
            lib.norm(num_rows, x, following.data_ptr(), normed, eps)
        return torch.mm(b.normed_BC, m.head.T, out=b.logits_BV)

    def draw(
        self, logits_BV: Tensor, state: RowState, stop_ids: Tensor, *, num_running: int
    ) -> tuple[list[int], list[int]]:
        """Append a token to every row, overwriting the logits.

        Returns the rows that are done, and for each of them 1 if an end token ended it, else 0.
        """
        ended_B, has_stopped_B = torch.empty(2, len(logits_BV), dtype=torch.int64)
        count = self._library.draw(
            len(logits_BV),
            num_running,
            logits_BV.data_ptr(),
            state.keys_R.data_ptr(),
            state.temperature_R.data_ptr(),
            state.position_R.data_ptr(),
            state.end_R.data_ptr(),
            state.tokens_RT.shape[1],
            state.tokens_RT.data_ptr(),
            state.logps_RT.data_ptr(),
            stop_ids.data_ptr(),
            len(stop_ids),
            ended_B.data_ptr(),
            has_stopped_B.data_ptr(),
        )
        # the C code reports a row with non-finite logits as -1 - row
        if count < 0:
            raise FloatingPointError(f"logits of row {-1 - count} of the batch are not finite; are the weights?")
        return ended_B[:count].tolist(), has_stopped_B[:count].tolist()

    def move(self, cache: KvCache, state: RowState, source_R: Tensor, target_R: Tensor, *, length: int) -> None:
        """Copy rows of the state, and of the cache up to `length` positions."""
        count, source, target = len(source_R), source_R.data_ptr(), target_R.data_ptr()
        for tensor in state.tensors():
            # a whole row is one piece: its stride is its size in bytes
            size = tensor.stride(0) * tensor.element_size()
            self._library.move_rows(count, source, target, tensor.data_ptr(), 1, size, size)
        s = self._model.shape
        for keys, values in zip(cache.keys, cache.values, strict=True):
            # a key row is K * D runs of positions, a value row K runs of positions times D
            position, row = keys.element_size(), cache.length * keys.element_size()
            self._library.move_rows(
                count, source, target, keys.data_ptr(), s.num_kv_heads * s.head_dim, row, length * position
            )
            position, row = s.head_dim * position, s.head_dim * row
            self._library.move_rows(count, source, target, values.data_ptr(), s.num_kv_heads, row, length * position)

    def _buffers_for(self, num_rows: int, shared: KvCache, private: KvCache) -> _Buffers:
        # buffers only grow; views of the same number of rows are reused
        length = shared.length + private.length
        if len(self._buffers.x_BC) < num_rows or self._length < length:
            # as many rows as the cache, so that buffers grow as rarely
            self._buffers, self._length = self._allocate(private.num_rows, length), length
            self._views = self._buffers.rows(num_rows)
        elif len(self._views.x_BC) != num_rows:
            self._views = self._buffers.rows(num_rows)
        return self._views

    def _allocate(self, num_rows: int, length: int) -> _Buffers:
        s = self._model.shape
        # float32, torch's default, as the weights: see `of`
        return _Buffers(
            x_BC=torch.empty(num_rows, s.hidden_size),
            normed_BC=torch.empty(num_rows, s.hidden_size),
            qkv=torch.empty(num_rows, (s.num_heads + 2 * s.num_kv_heads) * s.head_dim),
            attended=torch.empty(num_rows, s.num_heads * s.head_dim),
            gate_up=torch.empty(num_rows, 2 * s.intermediate_size),
            activated=torch.empty(num_rows, s.intermediate_size),
            logits_BV=torch.empty(num_rows, s.vocab_size),
            scratch=torch.empty(num_rows, s.num_heads // s.num_kv_heads * length),
        )


_SIGNATURES = {
    "embed": "iplpppppf",
    "norm": "ipppf",
    "gate": "ipp",
    "attend": "ippppppppplpplfpp",
    "draw": "iippppplpppipp",
    "move_rows": "ippplll",
}
"""Argument kinds of each function, as `decode.c` declares them (see `compile_c`)."""
