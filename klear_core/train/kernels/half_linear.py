"""Compute linear layers on CPU by products of bfloat16 with float32 results; weights and activations stay float32.

It is the mixed precision of a GPU with fewer roundings: only the inputs of products are bfloat16.
Axis letters: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import Function

from klear_core import products
from klear_core.train.kernels import registry

PRODUCTS = "products/cpu"
registry.provide(PRODUCTS, products.product)


def halve_products(model: nn.Module) -> None:
    """Make all linear layers of a float32 model on CPU multiply in bfloat16, where the fast path is in use."""
    for module in model.modules():
        if type(module) is nn.Linear:
            # Replace the class rather than the bound method, as `fuse` does.
            module.__class__ = _HalfLinear


class _HalfLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self)


LAYERS = (nn.Linear, _HalfLinear)
"""Classes of layers that are nothing but their weight and bias."""


def linear(x: Tensor, *layers: nn.Linear) -> Tensor:
    """Return the outputs of layers of one of `LAYERS` side by side, as one product."""
    weights = [layer.weight for layer in layers]
    bias_O = None if layers[0].bias is None else _side_by_side([layer.bias for layer in layers])
    run = registry.in_use(PRODUCTS) if type(layers[0]) is _HalfLinear else None
    if run is None or not products.instructions():
        return F.linear(x, _side_by_side(weights), bias_O)
    y = _HalfProducts.apply(x, run, *weights)  # type: ignore[no-untyped-call]
    return y if bias_O is None else y + bias_O  # type: ignore[no-any-return]


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


class _HalfProducts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: registry.Run, *weights: Tensor) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1]).bfloat16()
        ctx.run = run
        # The weights are kept in float32, which their owner holds anyway.
        ctx.save_for_backward(x_NI, *weights)
        return run(None, x_NI, _joined(weights).T).view(*x.shape[:-1], -1)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, *weights = ctx.saved_tensors
        needs_x, _, *needs_weights = ctx.needs_input_grad
        dy_NO = dy.reshape(-1, dy.shape[-1])  # products round it
        dx = ctx.run(None, dy_NO, _joined(weights)).view(*dy.shape[:-1], -1) if needs_x else None
        dweights: Sequence[Tensor | None] = [None] * len(weights)
        if any(needs_weights):
            dweights = ctx.run(None, dy_NO.T, x_NI).split([len(weight) for weight in weights])
        return dx, None, *dweights


def _joined(weights: Sequence[Tensor]) -> Tensor:
    """Return weights as one: a single one as it is, several in bfloat16, to which products round them anyway."""
    if len(weights) == 1:
        return weights[0]
    half_OI = weights[0].new_empty(sum(map(len, weights)), weights[0].shape[1], dtype=torch.bfloat16)
    for part, weight in zip(torch.split(half_OI, [len(weight) for weight in weights]), weights, strict=True):
        part.copy_(weight)
    return half_OI
