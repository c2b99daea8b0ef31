"""Ways in which a kernel can be wrong; module-level, so that another process can be given them too."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from klear_core.train.kernels import registry
from klear_core.train.logps import ChunkLogps, HeadKernels

SHORT = 40
"""Tokens up to which a kernel that is right for short inputs is right."""


class _WrongGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 1.05 * grad


def wrong_by_a_factor(out: Tensor) -> Tensor:
    return 1.02 * out


def not_a_number(out: Tensor) -> Tensor:
    return torch.cat((out[..., :-1], out[..., -1:] * torch.nan), dim=-1)


def wrong_gradient(out: Tensor) -> Tensor:
    return _WrongGradient.apply(out)


def raises(_out: Tensor) -> Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def right_for_short(out: Tensor) -> Tensor:
    axis = 1 if out.dim() > 1 and len(out) == 1 else 0  # attention and the head have no axis of rows
    position = torch.arange(out.shape[axis]).view(-1, *[1] * (out.dim() - axis - 1))
    return torch.where(position < SHORT, out, 0.9 * out)


def ends_the_process(_out: Tensor) -> Tensor:
    os._exit(3)  # as after a signal, without a core dump


FAULTS = [wrong_by_a_factor, not_a_number, wrong_gradient, raises, right_for_short]


def with_fault(name: str, fault: Callable[[Tensor], Tensor]) -> dict[str, registry.Run]:
    """The fast path of this name with a fault in its results."""
    return {name: partial(_spoilt, registry.provided()[name], fault)}


def _spoilt(run: registry.Run, fault: Callable[[Tensor], Tensor], *arguments: Any, **others: Any) -> Any:
    found = run(*arguments, **others)
    return tuple(map(fault, found)) if isinstance(found, tuple) else fault(found)


class SpoiltHeadKernels(HeadKernels):
    """The head's kernels, with a fault in the log-probs, or in the gradient of the logits."""

    def __init__(self, fault: Callable[[Tensor], Tensor], *, is_gradient: bool) -> None:
        super().__init__()
        self._fault, self._is_gradient = fault, is_gradient

    def read(self, z_CV: Tensor, token_CJ: Tensor, *, need_entropy: bool) -> ChunkLogps:
        logps = super().read(z_CV, token_CJ, need_entropy=need_entropy)
        return logps if self._is_gradient else logps._replace(logp_CJ=self._fault(logps.logp_CJ))

    def grad(self, *arguments: Any, **others: Any) -> Tensor:
        found = super().grad(*arguments, **others)
        return self._fault(found) if self._is_gradient else found
