"""Run decode steps: tensors of the running batch, compiled C on CPU, and the draw of each token.

Dispatching torch operations instead would cost more than the products and the C code together.

Axis letters: R allocated rows, B active rows, C hidden size, V vocabulary, L cached positions, T positions of a row.

Axis letters: B rows, L positions, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from klear_core.generate.decoder.decoder import Decoder, KvCache, Places, rope_tables
from klear_core.native import COMPILERS, compile_c
from klear_core.products import PackedWeight, instructions

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
    def of(cls, model: Decoder, *, compilers: Sequence[str] = COMPILERS) -> NativeStep | None:
        """Build the step; None for another device, a head size that does not fill vectors, or no compiler.

        In bfloat16 also if the processor has no instructions for its products.
        """
        s = model.shape
        has_products = model.dtype == torch.float32 or (model.dtype == torch.bfloat16 and bool(instructions()))
        if model.device.type != "cpu" or not has_products or s.head_dim % _LANES:
            return None
        sizes = {
            "HIDDEN": s.hidden_size,
            "NUM_HEADS": s.num_heads,
            "NUM_KV_HEADS": s.num_kv_heads,
            "HEAD_DIM": s.head_dim,
            "INTERMEDIATE": s.intermediate_size,
            "VOCAB": s.vocab_size,
            "HAS_QK_NORM": int(s.family.has_qk_norm),
        }
        library = compile_c(_SOURCE, sizes, _SIGNATURES, compilers=compilers)
        return None if library is None else cls(model, library)

    def __init__(self, model: Decoder, library: ctypes.CDLL) -> None:
        self._model, self._library = model, library
        self._is_half = model.dtype == torch.bfloat16
        self._weights = [*zip(model.qkv, model.out, model.gate_up, model.down, strict=True), (model.head,)]
        # weights are [out, in] as for F.linear; torch.mm takes the transposed views
        prepare = PackedWeight if self._is_half else Tensor.t
        *self._layers, (self._head,) = [tuple(prepare(w) for w in layer) for layer in self._weights]
        # the same memory as the model's in float32, copies in bfloat16
        self._cos, self._sin = rope_tables(model.shape, model.device) if self._is_half else (model.cos_LD, model.sin_LD)
        self._read_vectors()
        self._buffers = self._views = self._allocate(0, 0)
        self._length = 0

    def read_weights(self) -> None:
        """Copy the model's weights anew where this step has copies of them."""
        if not self._is_half:
            return
        self._read_vectors()
        for weights, copies in zip(self._weights, [*self._layers, (self._head,)], strict=True):
            for weight, copy in zip(weights, copies, strict=True):
                assert isinstance(copy, PackedWeight), type(copy)
                copy.pack(weight)

    def _read_vectors(self) -> None:
        m = self._model
        self._norm1, self._norm2 = [w.float() for w in m.norm1], [w.float() for w in m.norm2]
        self._qk_norm, self._norm = [w.float() for w in m.qk_norm], m.norm.float()
        self._bias = [None if bias is None else bias.float() for bias in m.qkv_bias]

    def decode(self, state: RowState, num_rows: int, shared: KvCache, private: KvCache) -> Tensor:
        """Return logits_BV after the newest token of each of the first rows. Valid until the next call."""
        m, lib, eps = self._model, self._library, self._model.shape.norm_eps
        b = self._buffers_for(num_rows, shared, private)
        # addresses for C; the model, the state, the caches and the buffers keep their tensors alive
        position, start, slot = state.position_R.data_ptr(), state.start_R.data_ptr(), state.slot_R.data_ptr()
        x, normed = b.x_BC.data_ptr(), b.normed_BC.data_ptr()
        qkv, attended, scratch = b.qkv.data_ptr(), b.attended.data_ptr(), b.scratch.data_ptr()
        cos, sin = self._cos.data_ptr(), self._sin.data_ptr()
        tokens, width, first = state.tokens_RT.data_ptr(), state.tokens_RT.shape[1], self._norm1[0].data_ptr()
        if self._is_half:
            tokens_B1 = state.tokens_RT[:num_rows].gather(1, state.position_R[:num_rows, None])
            b.x_BC.copy_(m.embed[tokens_B1[:, 0]])
            lib.norm(num_rows, x, first, normed, eps)
        else:
            # also applies the first layer's norm
            lib.embed(num_rows, tokens, width, position, m.embed.data_ptr(), x, first, normed, eps)
        for i, (qkv_w, out_w, gate_up_w, down_w) in enumerate(self._layers):
            bias = self._bias[i]
            if bias is not None:
                b.qkv.copy_(bias)
            _multiply(b.normed_BC, qkv_w, b.qkv, adds=bias is not None)
            at_shared = (shared.keys[i].data_ptr(), shared.values[i].data_ptr(), shared.length)
            at_private = (private.keys[i].data_ptr(), private.values[i].data_ptr(), private.length)
            # norms and rotates queries and keys, writes the new key and value to `private`, and attends
            qk_norm = self._qk_norm[i].data_ptr()
            lib.attend(
                num_rows, position, start, slot, qkv, qk_norm, cos, sin, *at_shared, *at_private, eps, scratch, attended
            )
            _multiply(b.attended, out_w, b.x_BC, adds=True)  # to the residual stream
            lib.norm(num_rows, x, self._norm2[i].data_ptr(), normed, eps)
            _multiply(b.normed_BC, gate_up_w, b.gate_up)
            lib.gate(num_rows, b.gate_up.data_ptr(), b.activated.data_ptr())
            _multiply(b.activated, down_w, b.x_BC, adds=True)
            # the norm that the next layer begins with, or the final one
            following = self._norm1[i + 1] if i + 1 < len(self._layers) else self._norm
            lib.norm(num_rows, x, following.data_ptr(), normed, eps)
        _multiply(b.normed_BC, self._head, b.logits_BV)
        return b.logits_BV

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
        # float32, torch's default, whatever the weights are
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


def _multiply(x: Tensor, weight: Tensor | PackedWeight, out: Tensor, *, adds: bool = False) -> None:
    if isinstance(weight, PackedWeight):
        weight.multiply(x, out, adds=adds)
    elif adds:
        out.addmm_(x, weight)
    else:
        torch.mm(x, weight, out=out)


_SIGNATURES = {
    "embed": "iplpppppf",
    "norm": "ipppf",
    "gate": "ipp",
    "attend": "ippppppppplpplfpp",
    "draw": "iippppplpppipp",
    "move_rows": "ippplll",
}
"""Argument kinds of each function, as `decode.c` declares them (see `compile_c`)."""


# ---- state ----
# Hold the running batch's state of each row as tensors. R: allocated rows, B: active rows, T: positions of a row.


@dataclass(slots=True, kw_only=True)
class RowState:
    """Values of each row that the decode step reads and writes, with room for R rows."""

    position_R: Tensor
    """Index of the newest token, the one whose key and value are not in the cache yet."""
    start_R: Tensor
    """Number of positions in the shared cache; later ones are in the row's private cache."""
    slot_R: Tensor
    """Row of the shared cache."""
    end_R: Tensor
    """Length, prompt included, at which the row's token budget is used up."""
    tokens_RT: Tensor
    logps_RT: Tensor
    """Log-prob of each new token, at the index of the token; unused on the prompt."""
    keys_R: Tensor
    """Key of each row's random draws; see `Decoding`."""
    temperature_R: Tensor
    top_p_R: Tensor
    top_k_R: Tensor
    penalty_R: Tensor

    @staticmethod
    def empty(device: torch.device) -> RowState:
        """Return a state without rows."""
        long = torch.zeros(0, dtype=torch.int64, device=device)
        real = torch.zeros(0, device=device)
        return RowState(
            position_R=long,
            start_R=long,
            slot_R=long,
            end_R=long,
            tokens_RT=long[:, None],
            logps_RT=real[:, None],
            keys_R=long,
            temperature_R=real,
            top_p_R=real,
            top_k_R=long,
            penalty_R=real,
        )

    def reserve(self, num_rows: int, length: int) -> None:
        """Make room for at least this many rows and positions; contents are kept."""
        room = self.tokens_RT.shape
        if num_rows <= room[0] and length <= room[1]:
            return
        num_rows, length = max(num_rows, room[0]), max(length, room[1])
        for field in fields(self):
            old: Tensor = getattr(self, field.name)
            # (R,) or (R, T): a tensor of one axis takes the number of rows alone
            # zeros, because a decode step may read rows that nobody owns: token 0 exists, and temperature 0 is greedy
            new = old.new_zeros((num_rows, length)[: old.dim()])
            new[tuple(slice(size) for size in old.shape)] = old
            setattr(self, field.name, new)

    def move(self, source_R: Tensor, target_R: Tensor) -> None:
        """Copy rows."""
        # no row is both source and target
        for tensor in self.tensors():
            tensor[target_R] = tensor[source_R]

    def places(self, num_rows: int, *, longest_shared: int, longest_private: int) -> Places:
        """Return the cache positions of the first rows, as views."""
        return Places(
            positions_B=self.position_R[:num_rows],
            starts_B=self.start_R[:num_rows],
            slots_B=self.slot_R[:num_rows],
            longest_shared=longest_shared,
            longest_private=longest_private,
        )

    def decoding(self, num_rows: int) -> Decoding:
        """Return the sampling parameters of the first rows, as views."""
        return Decoding(
            keys_B=self.keys_R[:num_rows],
            temperature_B=self.temperature_R[:num_rows],
            top_p_B=self.top_p_R[:num_rows],
            top_k_B=self.top_k_R[:num_rows],
        )

    def tensors(self) -> list[Tensor]:
        """Return all tensors; the first axis of each is the row."""
        return [getattr(self, f.name) for f in fields(self)]


# ---- sampling ----
# Draw a token and its log-probability from logits; no row's draw depends on the other rows.
#
# The log-probability is that of the distribution the token was drawn from, as in vLLM's `processed_logprobs`. With
# top_p = 1, top_k = 0 and no repetition penalty it is `log_softmax(logits / temperature)` over the full vocabulary,
# which is what a learner computes. With any of the three it is renormalised afterwards, and a learner that needs old
# log-probs of the untruncated policy must recompute them. Greedy tokens report temperature 1 and ignore top_p and
# top_k.


_MASK = {shift: (1 << (64 - shift)) - 1 for shift in (12, 27, 30, 31)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Sampling parameters of B rows."""

    keys_B: Tensor
    """One int64 per sample; key and position determine the draw."""
    temperature_B: Tensor
    top_p_B: Tensor
    top_k_B: Tensor


def draw(logits_BV: Tensor, positions_B: Tensor, decoding: Decoding, *, is_truncated: bool) -> tuple[Tensor, Tensor]:
    """Return tokens_B and logps_B (float32, nats). `is_truncated`: whether any row has top_p < 1 or top_k > 0."""
    is_greedy_B = decoding.temperature_B == 0
    if is_truncated:
        logits_BV = truncate_rows(logits_BV, decoding)
    # after truncation, so that log-probs belong to the distribution sampled from
    logp_BV = torch.log_softmax(_scaled(logits_BV, decoding.temperature_B), -1)
    # inverse transform sampling; the CDF ends near 1, not at 1, so the uniform is scaled by its last entry
    cdf_BV = torch.cumsum(logp_BV.exp(), -1, dtype=torch.float64)
    threshold_B1 = uniforms(decoding.keys_B, positions_B)[:, None] * cdf_BV[:, -1:]
    sampled_B = torch.searchsorted(cdf_BV, threshold_B1, right=True)[:, 0]  # right: never picks probability zero
    tokens_B = torch.where(is_greedy_B, logits_BV.argmax(-1), sampled_B)  # argmax takes the first of equal logits
    return tokens_B, logp_BV.gather(-1, tokens_B[:, None])[:, 0]


def truncate_rows(logits_BV: Tensor, decoding: Decoding) -> Tensor:
    """Set logits to -inf where top_k or top_p removes the token, and keep the others as they are."""
    is_greedy_B = decoding.temperature_B == 0
    # greedy rows ignore both
    top_k_B, top_p_B = decoding.top_k_B.masked_fill(is_greedy_B, 0), decoding.top_p_B.masked_fill(is_greedy_B, 1.0)
    return truncate(logits_BV, decoding.temperature_B, top_k_B, top_p_B)


def penalise(logits_BV: Tensor, seen_BL: Tensor, penalty_B: Tensor) -> Tensor:
    """Divide positive and multiply negative logits of tokens already in the row, prompt included.

    This is the repetition penalty of CTRL (arXiv 1909.05858).
    """
    is_seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool).scatter_(1, seen_BL, True)
    penalty_B1 = penalty_B[:, None]
    # dividing a negative logit would make its token likelier
    penalised_BV = torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    return torch.where(is_seen_BV, penalised_BV, logits_BV)


def truncate(logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Set logits to -inf outside the top_k largest (0: all), then outside the smallest set that reaches top_p.

    Of equal logits the first stay. Ranks are those of the logits themselves, because after division by the temperature,
    or as probabilities, two different logits may round to one number.
    """
    sorted_BV, order_BV = logits_BV.sort(stable=True, dim=-1, descending=True)
    rank_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    keep_k_B = torch.where(top_k_B == 0, len(rank_V), top_k_B)
    is_cut_BV = rank_V >= keep_k_B[:, None]
    scaled_BV = _scaled(sorted_BV.masked_fill(is_cut_BV, -torch.inf), temperature_B)
    probs_BV = scaled_BV.softmax(-1, dtype=torch.float64)  # float32 sums this long are off in the 5th digit
    mass_before_BV = probs_BV.cumsum(-1) - probs_BV
    # the mass before a token, not with it: the token that crosses top_p stays
    is_cut_BV |= (mass_before_BV >= top_p_B[:, None]) & (top_p_B < 1)[:, None]
    # from ranks back to token ids
    return logits_BV.masked_fill(torch.empty_like(is_cut_BV).scatter_(1, order_BV, is_cut_BV), -torch.inf)


def _scaled(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """Return logits over temperature (greedy: 1), minus their maximum.

    The maximum is subtracted first, so that a small temperature cannot overflow them.
    """
    divisor_B = torch.where(temperature_B == 0, 1.0, temperature_B)
    return (logits_BV - logits_BV.amax(-1, keepdim=True)) / divisor_B[:, None]


def uniforms(keys_B: Tensor, positions_B: Tensor) -> Tensor:
    """Return one float64 in [0, 1) per (key, position): splitmix64 (Steele, Lea and Flood 2014), 52 bits."""
    # splitmix64's constants as signed int64; overflow wraps as it does for unsigned
    z = keys_B + (positions_B + 1) * -0x61C8864680B583EB
    z = (z ^ _shift(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shift(z, 27)) * -0x6B2FB644ECCEEE15
    z = z ^ _shift(z, 31)
    return _shift(z, 12).double() * 2.0**-52


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & _MASK[bits]  # torch shifts int64 arithmetically; the mask makes it logical
