"""Count the arithmetic of a training step, and look up the hardware's peak, for their ratio (MFU)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from klear_core.train.balance import RowWork
from klear_core.train.model import Policy
from klear_core.train.packing import TokenRow

BF16_PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}
"""Dense bf16 FLOP/s from NVIDIA's data sheets, by words of the device name; the first entry that fits counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """Sizes of a dense decoder's matrix products.

    As is usual for MFU, norms, softmax and recomputed activations are not counted.
    """

    layer_params: int
    """Number of weights in all matrices of the layers; every token passes through each."""
    head_params: int
    """Vocabulary * hidden size; only loss tokens pass through the head."""
    attention_width: int
    """Layers * query heads * head size."""
    frozen_layer_params: int = 0
    """Number of `layer_params` that do not train (LoRA); their gradient is not computed."""
    frozen_head_params: int = 0
    """The same of `head_params`."""

    @classmethod
    def of(cls, policy: Policy) -> FlopCount:
        """Count a policy's matrices; sharded ones count in full."""
        hf: Any = policy.hf
        head = hf.get_output_embeddings().weight  # [V, H]; of FSDP's shards the shape is that of the whole
        # A lookup is no product, and the head is counted by itself (tied, it is the embedding's tensor). By identity,
        # because == on tensors compares element-wise.
        embeddings = {id(head)} | {id(m.weight) for m in hf.modules() if isinstance(m, nn.Embedding)}
        matrices = [p for p in hf.parameters() if p.ndim == 2 and id(p) not in embeddings]
        frozen_layer_params = sum(p.numel() for p in matrices if not p.requires_grad)
        config = hf.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = config.num_hidden_layers * config.num_attention_heads * head_dim
        # numel() of a sharded weight (DTensor) is its global size.
        layer_params = sum(p.numel() for p in matrices)
        return cls(
            layer_params=layer_params,
            head_params=head.numel(),
            attention_width=width,
            frozen_layer_params=frozen_layer_params,
            frozen_head_params=0 if head.requires_grad else head.numel(),
        )

    def step(self, rows: Sequence[TokenRow]) -> float:
        """Return the FLOPs of forward and backward over `rows`.

        That is 6 per weight and token (4 if it is frozen), and 2 * 6 per attention channel and pair of tokens that see
        each other.
        """
        num_tokens = sum(len(r.token_ids) for r in rows)
        # Attention is causal, so a token attends to half of its row on average.
        num_pairs = sum(len(r.token_ids) ** 2 / 2 for r in rows)
        num_loss_tokens = sum(sum(r.loss_mask) for r in rows)
        # 6: multiply and add, once forward and twice backward. Attention has two products, scores and weighted values.
        all_trained = 6.0 * (
            self.layer_params * num_tokens + self.head_params * num_loss_tokens + 2 * self.attention_width * num_pairs
        )
        # 2 of the 6 are the product that forms a weight's own gradient.
        return all_trained - 2.0 * (self.frozen_layer_params * num_tokens + self.frozen_head_params * num_loss_tokens)

    def row_work(self, *, recomputes: bool) -> RowWork:
        """Return the work of a row by its length, to balance ranks; with `recomputes` layers run forward twice.

        Unlike in `step`, recomputation counts, because it takes time. All tokens pass through the head here: the
        share that carries loss differs little between rows.
        """
        per_layer_weight = 8 if recomputes else 6  # the second forward pass takes 2; the head is not recomputed
        all_trained = per_layer_weight * self.layer_params + 6 * self.head_params
        # A frozen weight has no gradient of its own.
        product_flops = all_trained - 2 * (self.frozen_layer_params + self.frozen_head_params)
        return RowWork.of(product_flops=product_flops, attention_width=self.attention_width, recomputes=recomputes)


def peak_flops(device: torch.device) -> float | None:
    """Return the peak bf16 FLOP/s of a device; None if it is not in `BF16_PEAKS`."""
    if device.type != "cuda":
        return None
    return named_peak(torch.cuda.get_device_name(device))


def named_peak(device_name: str) -> float | None:
    """Return the peak bf16 FLOP/s of the GPU with this name, such as "NVIDIA A100-SXM4-80GB"; None if unknown."""
    # Whole words, because "L4" is a part of "L40" and "B200" of "GB200", which are other chips.
    words = set(device_name.replace("-", " ").split())
    return next((peak for key, peak in BF16_PEAKS.items() if words.issuperset(key.split())), None)
