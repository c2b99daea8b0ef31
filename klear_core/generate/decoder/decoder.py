"""Run a Llama, Qwen2 or Qwen3: fused weight buffers, a KV cache of rows, prefill and one-token decode in plain torch.

Axis letters: N tokens of all rows laid end to end, R cache rows, B active rows, T tokens of a row, L positions of a
row's private cache, P positions of the shared cache, S = P + L positions attended to, H query heads, K key/value heads,
G query heads per key/value head, D head size, C hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from klear_core.generate.decoder.shape import DecoderShape
from klear_core.generate.engine import WeightSource
from klear_core.generate.model_weights import check_shapes, tensor_shapes, tensors
from klear_core.mkl import choose_functions

choose_functions()

_SCORED_TOGETHER = 256  # tokens whose logits are in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Cache positions of B rows.

    The first `starts_B[b]` positions of row b lie in row `slots_B[b]` of the shared cache. The others, up to
    `positions_B[b]`, lie in row b of the rows' private cache.
    """

    positions_B: Tensor
    starts_B: Tensor
    slots_B: Tensor
    longest_shared: int
    """Upper bound on `starts_B`."""
    longest_private: int
    """Upper bound on the positions that a row has in its private cache."""


class Decoder:
    """Weights and forward pass; computes what transformers' models of these families do, in fewer, larger products."""

    def __init__(self, shape: DecoderShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        s = shape
        num_qk, qkv_size = s.num_heads + s.num_kv_heads, (s.num_heads + 2 * s.num_kv_heads) * s.head_dim

        def buffers(*size: int) -> list[Tensor]:
            return [torch.zeros(size, dtype=dtype, device=device) for _ in range(s.num_layers)]

        # buffers are only overwritten, never reallocated: `native` keeps views of them
        self.norm1, self.norm2 = buffers(s.hidden_size), buffers(s.hidden_size)
        self.qkv, self.out = buffers(qkv_size, s.hidden_size), buffers(s.hidden_size, s.num_heads * s.head_dim)
        # without elements in families that lack it
        self.qk_norm = buffers(num_qk if s.family.has_qk_norm else 0, s.head_dim)
        self.qkv_bias = buffers(qkv_size) if s.family.has_qkv_bias else [None] * s.num_layers
        self.gate_up, self.down = (
            buffers(2 * s.intermediate_size, s.hidden_size),
            buffers(s.hidden_size, s.intermediate_size),
        )
        self.norm = torch.zeros(s.hidden_size, dtype=dtype, device=device)
        self.embed = torch.zeros(s.vocab_size, s.hidden_size, dtype=dtype, device=device)
        self.head = self.embed if s.is_tied else torch.zeros_like(self.embed)
        # angles in float32, cast at the end: bfloat16 cannot tell large positions apart
        self.cos_LD, self.sin_LD = (table.to(dtype) for table in rope_tables(shape, device))

    def load(self, weights: WeightSource) -> None:
        """Overwrite all weights in place. ConfigError, with nothing changed, if a name or shape does not fit."""
        targets = self._targets()
        check_shapes(tensor_shapes(weights), {name: _stored_shape(name, target) for name, target in targets.items()})
        for name, tensor in tensors(weights):
            if name in targets:
                # query and key norms are stored once and repeated here for every head
                target = targets[name]
                target.copy_(tensor.expand_as(target))

    def prefill(self, tokens_BT: Tensor, cache: KvCache, slots_B: Tensor) -> None:
        """Write keys and values of all tokens to the cache, those of prompt i into row `slots_B[i]`.

        Prompts are padded on the right; positions past a prompt's length are never attended to.
        """
        num_prompts, num_tokens = tokens_BT.shape
        # N = B * T tokens; positions restart at 0 in every prompt
        rotation = self._rotation(torch.arange(num_tokens, device=self.device).repeat(num_prompts))
        x_NC = F.embedding(tokens_BT.reshape(-1), self.embed)
        for i in range(self.shape.num_layers):
            # [N, heads, D] -> [B, heads, T, D] for attention
            heads = (
                y.view(num_prompts, num_tokens, -1, self.shape.head_dim).transpose(1, 2)
                for y in self._qkv(i, x_NC, rotation)
            )
            q_BHTD, k_BKTD, v_BKTD = heads
            # keys are cached as [D, L], so that decode multiplies by them without a transpose
            cache.keys[i][slots_B, :, :, :num_tokens] = k_BKTD.mT.to(cache.dtype)
            cache.values[i][slots_B, :, :num_tokens] = v_BKTD.to(cache.dtype)
            # the rest of the last layer only feeds logits, which prefill does not need; right padding needs no mask
            # besides the causal one
            if i + 1 < self.shape.num_layers:
                out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True)
                x_NC = self._after_attention(i, x_NC, out_BHTD.transpose(1, 2).reshape(len(x_NC), -1))

    def logps(
        self, tokens_T: Tensor, num_prompt: int, *, temperature: float, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return logp_N, top_id_NK and top_logp_NK by one pass without a cache, log-probs in float32.

        N counts the tokens after the first `num_prompt`, K the `num_top` likeliest tokens in place of each.
        """
        x_TC, rotation = (
            F.embedding(tokens_T, self.embed),
            self._rotation(torch.arange(len(tokens_T), device=self.device)),
        )
        for i in range(self.shape.num_layers):
            # [T, heads, D] -> [1, heads, T, D] for attention
            q_1HTD, k_1KTD, v_1KTD = (y.transpose(0, 1)[None] for y in self._qkv(i, x_TC, rotation))
            out_1HTD = F.scaled_dot_product_attention(q_1HTD, k_1KTD, v_1KTD, is_causal=True, enable_gqa=True)
            x_TC = self._after_attention(i, x_TC, out_1HTD[0].transpose(0, 1).reshape(len(tokens_T), -1))
        states_NC = self._rms_norm(x_TC[num_prompt - 1 : -1], self.norm)  # a token is predicted by the one before it
        targets_N = tokens_T[num_prompt:]
        found = []
        # In parts, because logits of a long answer over a large vocabulary would need gigabytes at once.
        for start in range(0, len(targets_N), _SCORED_TOGETHER):
            part = slice(start, start + _SCORED_TOGETHER)
            logps_NV = torch.log_softmax(F.linear(states_NC[part], self.head).float() / temperature, -1)
            top_NK = logps_NV.topk(num_top, dim=1)
            found.append((logps_NV.gather(1, targets_N[part, None])[:, 0], top_NK.indices, top_NK.values))
        logp_N, top_id_NK, top_logp_NK = (torch.cat(parts) for parts in zip(*found, strict=True))
        return logp_N, top_id_NK, top_logp_NK

    def decode(self, tokens_B: Tensor, places: Places, shared: KvCache, private: KvCache) -> Tensor:
        """Run one decode step at each row's position; returns logits_BV in float32."""
        s, num_rows = self.shape, len(tokens_B)
        # lengths are rounded up, so that a row's sums run in the same order whatever the longest row is
        num_shared, num_private = round_up(places.longest_shared), round_up(places.longest_private)
        private_B = places.positions_B - places.starts_B
        # -inf at positions that only longer rows have; + 1 because the new token attends to itself
        bias_B11S = torch.cat([self._bias(num_shared, places.starts_B), self._bias(num_private, private_B + 1)], -1)
        key_addresses, value_addresses = private.addresses(private_B)
        rotation, x_NC = self._rotation(places.positions_B), F.embedding(tokens_B, self.embed)
        for i in range(s.num_layers):
            q_NHD, k_NKD, v_NKD = self._qkv(i, x_NC, rotation)
            # written before the products below, so that they include the new token
            private.keys[i].view(-1).index_copy_(0, key_addresses, k_NKD.reshape(-1))
            private.values[i].view(-1).index_copy_(0, value_addresses, v_NKD.reshape(-1))
            # G query heads share a key/value head; the queries carry the softmax scale, being smaller than the scores
            q_BKGD = q_NHD.reshape(num_rows, s.num_kv_heads, -1, s.head_dim) * s.head_dim**-0.5
            # indexing with slots_B copies each row's shared prefix
            shared_BKGP = q_BKGD @ shared.keys[i][:, :, :, :num_shared][places.slots_B]
            private_BKGL = q_BKGD @ private.keys[i][:num_rows, :, :, :num_private]
            # one softmax over both caches, then each part of the probabilities times the values of that cache
            probs_BKGS = torch.softmax(torch.cat([shared_BKGP, private_BKGL], -1).add_(bias_B11S), -1)
            out_BKGD = probs_BKGS[..., :num_shared] @ shared.values[i][:, :, :num_shared][places.slots_B]
            out_BKGD += probs_BKGS[..., num_shared:] @ private.values[i][:num_rows, :, :num_private]
            x_NC = self._after_attention(i, x_NC, out_BKGD.reshape(num_rows, -1))
        # log-probs of a large vocabulary need float32, whatever the model's dtype
        return F.linear(self._rms_norm(x_NC, self.norm), self.head).float()

    def _qkv(self, layer: int, x_NC: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return query_NHD and key_NKD, normalised and rotated, and value_NKD."""
        s, (cos_N1D, sin_N1D) = self.shape, rotation
        num_qk = s.num_heads + s.num_kv_heads
        normed_NC = self._rms_norm(x_NC, self.norm1[layer])
        qkv = F.linear(normed_NC, self.qkv[layer], self.qkv_bias[layer]).view(len(x_NC), -1, s.head_dim)
        # queries and keys are contiguous in the fused buffer, so one norm and one rotation serve both
        qk = qkv[:, :num_qk]
        if s.family.has_qk_norm:
            qk = self._rms_norm(qk, self.qk_norm[layer])
        qk = qk * cos_N1D + qk.roll(s.head_dim // 2, -1) * sin_N1D  # the sine has rotate_half's minus sign
        return qk[:, : s.num_heads], qk[:, s.num_heads :], qkv[:, num_qk:]

    def _after_attention(self, layer: int, x_NC: Tensor, attended_NC: Tensor) -> Tensor:
        # residual connections around the attention and around the MLP
        x_NC = x_NC + F.linear(attended_NC, self.out[layer])
        gate, up = F.linear(self._rms_norm(x_NC, self.norm2[layer]), self.gate_up[layer]).chunk(2, -1)
        return x_NC + F.linear(F.silu(gate) * up, self.down[layer])

    def _rotation(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos_LD[positions_N][:, None], self.sin_LD[positions_N][:, None]

    def _bias(self, length: int, counts_B: Tensor) -> Tensor:
        """Return [B, 1, 1, length]: 0 for the first `counts_B[b]` positions of row b, -inf for the others."""
        is_beyond_BL = torch.arange(length, device=self.device) >= counts_B[:, None]
        bias_BL = torch.zeros(is_beyond_BL.shape, dtype=self.dtype, device=self.device).masked_fill_(
            is_beyond_BL, -torch.inf
        )
        return bias_BL[:, None, None]

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), eps=self.shape.norm_eps) * weight

    def _targets(self) -> dict[str, Tensor]:
        """Map each Hugging Face tensor to its place, a view into a fused buffer."""
        s = self.shape
        num_q, num_kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        targets = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        if not s.is_tied:
            targets["lm_head.weight"] = self.head
        for i in range(s.num_layers):
            q, k, v = torch.split(self.qkv[i], [num_q, num_kv, num_kv])
            gate, up = self.gate_up[i].chunk(2)
            layer = {
                "input_layernorm": self.norm1[i],
                "post_attention_layernorm": self.norm2[i],
                "self_attn.q_proj": q,
                "self_attn.k_proj": k,
                "self_attn.v_proj": v,
                "self_attn.o_proj": self.out[i],
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": self.down[i],
            }
            if s.family.has_qk_norm:
                layer["self_attn.q_norm"] = self.qk_norm[i][: s.num_heads]
                layer["self_attn.k_norm"] = self.qk_norm[i][s.num_heads :]
            targets |= {f"model.layers.{i}.{name}.weight": target for name, target in layer.items()}
            bias = self.qkv_bias[i]
            if bias is not None:
                parts = zip("qkv", torch.split(bias, [num_q, num_kv, num_kv]), strict=True)
                targets |= {f"model.layers.{i}.self_attn.{part}_proj.bias": target for part, target in parts}
        return targets


def rope_tables(shape: DecoderShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [L, D] of each position's angles in float32; the sine has rotate_half's minus sign."""
    exponents = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
    positions = torch.arange(round_up(shape.max_len), device=device)  # rounded up: padding has positions, too
    angles = positions.float()[:, None] * (1.0 / shape.rope_theta**exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


class KvCache:
    """Keys of all layers as [R, K, D, L] and values as [R, K, L, D]; position p of a row holds its p-th cached token.

    Grows, never shrinks.
    """

    def __init__(self, shape: DecoderShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.num_rows = self.length = 0
        self.dtype = dtype
        self._num_heads, self._head_dim = shape.num_kv_heads, shape.head_dim
        empty = torch.zeros(0, shape.num_kv_heads, 0, shape.head_dim, dtype=dtype, device=device)
        self.keys, self.values = [empty.mT] * shape.num_layers, [empty] * shape.num_layers

    def reserve(self, num_rows: int, length: int) -> None:
        """Make room for at least this many rows and positions; contents are kept."""
        if num_rows <= self.num_rows and length <= self.length:
            return
        self.num_rows, self.length = max(num_rows, self.num_rows), round_up(max(length, self.length))
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            self.keys[i] = keys.new_zeros(self.num_rows, self._num_heads, self._head_dim, self.length)
            self.keys[i][: keys.shape[0], :, :, : keys.shape[3]] = keys
            self.values[i] = values.new_zeros(self.num_rows, self._num_heads, self.length, self._head_dim)
            self.values[i][: values.shape[0], :, : values.shape[2]] = values

    def addresses(self, positions_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return flat indices, into keys and into values, of one position in each of the first B rows."""
        row_heads = torch.arange(len(positions_B) * self._num_heads, device=positions_B.device)[:, None]
        positions = positions_B.repeat_interleave(self._num_heads)[:, None]
        axis_D = torch.arange(self._head_dim, device=positions_B.device)
        # the fastest axis is the position in keys [R, K, D, L] and D in values [R, K, L, D]
        key_addresses = (row_heads * self._head_dim + axis_D) * self.length + positions
        value_addresses = (row_heads * self.length + positions) * self._head_dim + axis_D
        return key_addresses.reshape(-1), value_addresses.reshape(-1)

    def move(self, source_R: Tensor, target_R: Tensor, *, length: int) -> None:
        """Copy rows, up to `length` positions of each."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target_R, :, :, :length] = keys[source_R, :, :, :length]
            values[target_R, :, :length] = values[source_R, :, :length]


def round_up(length: int, multiple: int = 16) -> int:
    """Round up to whole vectors: sums over a padded axis then run in the same order in every batch."""
    return -(-length // multiple) * multiple


def _stored_shape(name: str, target: Tensor) -> tuple[int, ...]:
    """Return the shape in the file, where all heads share one query norm and one key norm."""
    return (target.shape[-1],) if name.endswith(("q_norm.weight", "k_norm.weight")) else tuple(target.shape)
