"""Compute linear layers on CPU by products of bfloat16 with float32 results; weights and activations stay float32.

It is the mixed precision of a GPU with fewer roundings: only the inputs of products are bfloat16.
Axis letters: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

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
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias in float32."""
    run = registry.in_use(PRODUCTS)
    if run is None or not products.instructions():
        return F.linear(x, weight_OI, bias_O)
    y = _HalfProducts.apply(x, weight_OI, run)  # type: ignore[no-untyped-call]
    return y if bias_O is None else y + bias_O  # type: ignore[no-any-return]


class _HalfProducts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, run: registry.Run) -> Tensor:
        x_NI, half_OI = x.reshape(-1, x.shape[-1]).bfloat16(), weight_OI.bfloat16()
        ctx.run = run
        # The weight is kept in float32, which its owner holds anyway.
        ctx.save_for_backward(x_NI, weight_OI)
        return run(None, x_NI, half_OI.T).view(*x.shape[:-1], -1)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_NI, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dy_NO = dy.reshape(-1, dy.shape[-1]).bfloat16()
        dx = ctx.run(None, dy_NO, weight_OI.bfloat16()).view(*dy.shape[:-1], -1) if needs_x else None
        dweight_OI = ctx.run(None, dy_NO.T, x_NI) if needs_weight else None
        return dx, dweight_OI, None
