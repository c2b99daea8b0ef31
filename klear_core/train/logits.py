"""The logits of one chunk of tokens: the product that makes them, the two passes over them, and the products of their gradient.

Every product adds up in float32, whatever goes in: logits are not rounded before their softmax, nor the weight's gradient
between chunks. The loss is asked between the two passes. On CUDA each is one compiled kernel, and log-probs exist in its
registers alone; elsewhere they take the place of the logits, and nothing depends on what a compiler makes of it.

Axis letters: C tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from klear_core.train.kernels.compiled import Backend, compiler_errors

log = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
_LEAST = -1e30
"""Stands for the log-prob minus infinity of a token with probability 0: it adds 0 to an entropy, where 0 * -inf is no number."""


def widened(x: Tensor) -> Tensor:
    """Half precision off CUDA as float32, for no product there takes the one and gives the other."""
    return x.float() if x.dtype in HALF and not x.is_cuda else x


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, in float32 if they are half precision (on CUDA, see `widened`)."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.dtype in HALF else torch.mm(a, b)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where `total` may be wider than both."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


class Normaliser(NamedTuple):
    """Log-probs are (z - max) - logsum. In this order, for logits far from 0 lose to rounding what max + logsum adds."""

    max_C1: Tensor
    logsum_C1: Tensor


class Reading(NamedTuple):
    """What the first pass finds."""

    logp_C: Tensor
    """Of the targets."""
    entropy_C: Tensor
    """NaN if it was not asked for."""
    normaliser: Normaliser | None
    """None: log-probs have taken the place of the logits."""


class Passes:
    """The two passes over a chunk's logits, compiled if `backend` is given, for as long as that works."""

    def __init__(self, backend: Backend | None = None) -> None:
        self._read: Callable[..., Reading] | None = None if backend is None else torch.compile(_read, backend=backend)
        self._grad: Callable[..., Tensor] | None = None if backend is None else torch.compile(_grad, backend=backend)

    @property
    def is_compiled(self) -> bool:
        """Whether kernels run, as far as is known: the first chunk makes them, and may fail."""
        return self._read is not None

    def read(self, z_CV: Tensor, target_C1: Tensor, *, need_entropy: bool) -> Reading:
        """The first pass. From here on `z_CV` is of use to `grad` alone."""
        if self._read is not None:
            try:
                _may_be_of_any_length(z_CV, target_C1)
                return self._read(z_CV, target_C1, need_entropy=need_entropy, in_place=False)
            except compiler_errors() as e:
                self._give_up(e)
        return _read(z_CV, target_C1, need_entropy=need_entropy, in_place=True)

    def grad(
        self, z_CV: Tensor, reading: Reading, target_C1: Tensor, dlogp_C: Tensor, dentropy_C: Tensor | None, *, dtype: torch.dtype
    ) -> Tensor:
        """The second pass: dLoss/dz in `dtype`, from the derivatives by log-prob and entropy. `z_CV` may be overwritten."""
        given = (dlogp_C[:, None], reading.entropy_C[:, None], None if dentropy_C is None else dentropy_C[:, None])
        dz_CV = self._grad_elsewhere(z_CV, reading.normaliser, given, dtype)
        dz_C1 = _slope(reading.logp_C[:, None].clone(), *given) + dlogp_C[:, None]
        return dz_CV.scatter_(1, target_C1, dz_C1.to(dtype))  # not added to what is there: in half precision that has been rounded

    def _grad_elsewhere(self, z_CV: Tensor, norm: Normaliser | None, given: _Given, dtype: torch.dtype) -> Tensor:
        if self._grad is not None and norm is not None:
            try:
                _may_be_of_any_length(z_CV, *norm, *given)
                return self._grad(z_CV, norm, given, dtype)
            except compiler_errors() as e:
                self._give_up(e)
        return _grad(z_CV, norm, given, dtype)

    def _give_up(self, error: Exception) -> None:
        self._read = self._grad = None
        log.warning("the fused head runs uncompiled, at more memory traffic: torch.compile failed with %s: %s", type(error).__name__, error)


@cache
def passes_on(device_type: str) -> Passes:
    """Those of a kind of device; every head of the process shares them."""
    return Passes("inductor" if device_type == "cuda" else None)


def _read(z_CV: Tensor, target_C1: Tensor, *, need_entropy: bool, in_place: bool) -> Reading:
    if in_place:
        norm, logp_CV = None, torch.log_softmax(z_CV, dim=-1, out=z_CV)
    else:
        max_C1 = z_CV.amax(dim=-1, keepdim=True)
        norm = Normaliser(max_C1, (z_CV - max_C1).exp().sum(dim=-1, keepdim=True).log())
        logp_CV = _log_probs(z_CV, norm)
    logp_C = logp_CV.gather(1, target_C1)[:, 0]
    if not need_entropy:
        return Reading(logp_C, torch.full_like(logp_C, torch.nan), norm)
    return Reading(logp_C, -logp_CV.exp().mul_(logp_CV.clamp_min_(_LEAST)).sum(dim=-1), norm)


def _grad(z_CV: Tensor, norm: Normaliser | None, given: _Given, dtype: torch.dtype) -> Tensor:
    return _slope(z_CV if norm is None else _log_probs(z_CV, norm), *given).to(dtype)


def _log_probs(z_CV: Tensor, norm: Normaliser) -> Tensor:
    return (z_CV - norm.max_C1) - norm.logsum_C1


_Given = tuple[Tensor, Tensor, Tensor | None]
"""dLoss/dlogp, the entropy, and dLoss/dentropy (None: the loss does not depend on it), each C1."""


def _slope(logp: Tensor, dlogp_C1: Tensor, entropy_C1: Tensor, dentropy_C1: Tensor | None) -> Tensor:
    """dLoss/dz of tokens other than the target: -p (dlogp + dentropy (log p + entropy)). `logp` is overwritten."""
    if dentropy_C1 is None:
        return logp.exp_().mul_(-dlogp_C1)
    return logp.exp().mul_(logp.clamp_min_(_LEAST).add_(entropy_C1).mul_(-dentropy_C1).sub_(dlogp_C1))


def _may_be_of_any_length(*tensors: Tensor | None) -> None:
    """Have one kernel made for every C, not one for each: micro-batches differ in length, and so do their last chunks."""
    for tensor in tensors:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
