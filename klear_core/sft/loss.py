"""Compute the SFT loss: token cross-entropy, divided once by counts of the complete step.

So the loss does not depend on how rows are divided among micro-batches and ranks. Klear-Reasoner's equation 8 prints a
mean probability per sequence; we read it as the log-probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from klear_core.train.logps import HeadOutput, fused_loss
from klear_core.train.model import Head
from klear_core.train.packing import MicroBatch, TokenRow

Normalise = Literal["token", "sample"]


def row_weights(rows: Sequence[TokenRow], normalise: Normalise) -> Tensor:
    """Return the weight of each row's loss tokens, float32 [rows]; over all loss tokens the weights sum to 1.

    `token`: 1 / loss tokens of the step. `sample`: 1 / (loss tokens of the row * rows).
    """
    # Of all rows of the step, on every rank: with local counts, tokens would weigh more on ranks that have few.
    counts = torch.tensor([sum(r.loss_mask) for r in rows], dtype=torch.float32)
    assert bool((counts > 0).all()), "a row without loss tokens has no gradient"
    return torch.ones_like(counts) / counts.sum() if normalise == "token" else 1 / (counts * len(rows))


def sft_heads(
    micro_batches: Sequence[MicroBatch], rows: Sequence[TokenRow], normalise: Normalise
) -> list[Head[HeadOutput]]:
    """Return one head per micro-batch; losses of all micro-batches and ranks add up to the weighted cross-entropy."""
    weights = row_weights(rows, normalise)
    return [_sft_head(micro, weights) for micro in micro_batches]


def _sft_head(micro: MicroBatch, weights: Tensor) -> Head[HeadOutput]:
    # Each loss token takes the weight of its row, whichever micro-batch it is in.
    weight_N = weights.to(micro.row_N.device)[micro.row_N]

    def loss_fn(logp_C: Tensor, _entropy_C: Tensor, where: slice) -> Tensor:
        return -weight_N[where] * logp_C  # minus: minimise the negative log-likelihood; `where` selects a chunk of N

    # The temperature stays 1: the cross-entropy is of the model itself, not of a sampler.
    return partial(fused_loss, target_N=micro.target_N, loss_fn=loss_fn)
