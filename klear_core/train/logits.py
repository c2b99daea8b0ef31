"""Compute the logits of one chunk of tokens, then read and differentiate them in two passes.

The first pass finds log-probs and entropies, the second the gradient; the loss function is called in between. Every
product accumulates in float32, whatever its inputs: logits are not rounded before their softmax, nor is the weight's
gradient between chunks. On CUDA each pass is one compiled kernel, and log-probs exist only in its registers. Elsewhere
log-probs overwrite the logits, and results do not depend on a compiler.

Axis letters: C tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from klear_core.train.kernels import paths
from klear_core.train.kernels.compiled import Backend, compiler_errors

log = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
_LEAST = -1e30
"""Replaces a log-prob of minus infinity (probability 0): it adds 0 to an entropy, where 0 * -inf would be NaN."""


def widened(x: Tensor) -> Tensor:
    """Return half precision as float32 where no product of half inputs has a float32 result: off CUDA."""
    return x.float() if x.dtype in HALF and paths.on_device("products", x) is None else x


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, in float32 if both are half precision (CUDA only, see `widened`)."""
    # torch.mm of halves accumulates in float32, but would round its result to half.
    half = paths.on_device("products", a) if a.dtype in HALF else None
    return torch.mm(a, b) if half is None else half(None, a, b)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total` in place; `total` may have a wider dtype than both."""
    half = paths.on_device("products", a) if a.dtype in HALF else None
    if total.dtype == a.dtype or half is None:
        torch.addmm(total, a, b, out=total)
    else:
        half(total, a, b)


def _product_of_halves(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32, or add it to the float32 `total` in place."""
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


class Normaliser(NamedTuple):
    """Normaliser of a softmax: log-probs are (z - max) - logsum, where logsum is log(sum(exp(z - max))).

    The order matters: for logits far from 0, max + logsum would lose digits of logsum.
    """

    max_C1: Tensor
    logsum_C1: Tensor


class Reading(NamedTuple):
    """Result of the first pass over a chunk's logits."""

    logp_C: Tensor
    """Log-probs of the targets."""
    entropy_C: Tensor
    """Entropies; NaN if they were not asked for."""
    normaliser: Normaliser | None
    """None if log-probs have overwritten the logits."""


class Passes:
    """Runs the two passes over a chunk's logits: compiled if `backend` is given, until a compiler error."""

    def __init__(self, backend: Backend | None = None) -> None:
        self.failure = ""
        """The compiler error, once there was one."""
        self._read: Callable[..., Reading] | None = None
        self._grad: Callable[..., Tensor] | None = None
        if backend is not None:
            self._read = torch.compile(_read, backend=backend)
            self._grad = torch.compile(_grad, backend=backend)

    @property
    def is_compiled(self) -> bool:
        """Return whether compiled kernels are in use; the first chunk compiles them, which may still fail."""
        return self._read is not None

    def read(self, z_CV: Tensor, target_C1: Tensor, *, need_entropy: bool) -> Reading:
        """Run the first pass. It may overwrite `z_CV`, which only `grad` can use afterwards."""
        if self._read is not None:
            try:
                _mark_length_dynamic(z_CV, target_C1)
                return self._read(z_CV, target_C1, need_entropy=need_entropy, in_place=False)
            # Raised before any kernel has run: `z_CV` is intact, and the plain pass below can read it.
            except compiler_errors() as e:
                self._fall_back(e)
        return _read(z_CV, target_C1, need_entropy=need_entropy, in_place=True)

    def grad(
        self,
        z_CV: Tensor,
        reading: Reading,
        target_C1: Tensor,
        dlogp_C: Tensor,
        dentropy_C: Tensor | None,
        *,
        dtype: torch.dtype,
    ) -> Tensor:
        """Run the second pass: return dLoss/dz in `dtype` from dLoss/dlogp and dLoss/dentropy. May overwrite `z_CV`."""
        # One number per token, broadcast over V.
        dentropy_C1 = None if dentropy_C is None else dentropy_C[:, None]
        factors = (dlogp_C[:, None], reading.entropy_C[:, None], dentropy_C1)
        dz_CV = self._grad_without_onehot(z_CV, reading.normaliser, factors, dtype)
        # dz = dlogp (onehot - p) + entropy term; only the target has the onehot. `_slope` overwrites its input: clone.
        dz_C1 = _slope(reading.logp_C[:, None].clone(), *factors) + dlogp_C[:, None]
        # Replace the target's column instead of adding dlogp to it: in half precision it has been rounded already.
        return dz_CV.scatter_(1, target_C1, dz_C1.to(dtype))

    def _grad_without_onehot(
        self, z_CV: Tensor, norm: Normaliser | None, factors: _Factors, dtype: torch.dtype
    ) -> Tensor:
        # Without a normaliser the first pass ran uncompiled, and `z_CV` holds log-probs.
        if self._grad is not None and norm is not None:
            try:
                _mark_length_dynamic(z_CV, *norm, *factors)
                return self._grad(z_CV, norm, factors, dtype)
            except compiler_errors() as e:
                self._fall_back(e)
        return _grad(z_CV, norm, factors, dtype)

    def _fall_back(self, error: Exception) -> None:
        self._read = self._grad = None
        self.failure = f"{type(error).__name__}: {error}"
        log.warning(
            "the fused head runs uncompiled, at more memory traffic: torch.compile failed with %s", self.failure
        )


def passes_on(device_type: str) -> Passes:
    """Return the passes for a kind of device; all heads of the process share them."""
    compiled = paths.in_use(f"head/{device_type}")
    passes: Passes = _plain_passes() if compiled is None else compiled()
    return passes


@cache
def _plain_passes() -> Passes:
    return Passes()


@cache
def _compiled_passes() -> Passes:
    return Passes("inductor")


paths.provide("products/cuda", _product_of_halves)
paths.provide("head/cuda", _compiled_passes)


def _read(z_CV: Tensor, target_C1: Tensor, *, need_entropy: bool, in_place: bool) -> Reading:
    # Uncompiled, log-probs overwrite the logits to save a second [C, V] tensor. Compiled, they stay in registers, and
    # `_grad` computes them again from the logits and the normaliser.
    if in_place:
        norm, logp_CV = None, torch.log_softmax(z_CV, dim=-1, out=z_CV)
    else:
        max_C1 = z_CV.amax(dim=-1, keepdim=True)  # subtracted, so that no exponential overflows
        norm = Normaliser(max_C1, (z_CV - max_C1).exp().sum(dim=-1, keepdim=True).log())
        logp_CV = _log_probs(z_CV, norm)
    logp_C = logp_CV.gather(1, target_C1)[:, 0]
    if not need_entropy:
        return Reading(logp_C, torch.full_like(logp_C, torch.nan), norm)
    # -sum(p log p). Clamping in place is safe: a clamped log-prob still has probability 0.
    return Reading(logp_C, -logp_CV.exp().mul_(logp_CV.clamp_min_(_LEAST)).sum(dim=-1), norm)


def _grad(z_CV: Tensor, norm: Normaliser | None, factors: _Factors, dtype: torch.dtype) -> Tensor:
    # Rounded to `dtype` last: everything before is in the dtype of the logits, float32 or wider.
    return _slope(z_CV if norm is None else _log_probs(z_CV, norm), *factors).to(dtype)


def _log_probs(z_CV: Tensor, norm: Normaliser) -> Tensor:
    return (z_CV - norm.max_C1) - norm.logsum_C1


_Factors = tuple[Tensor, Tensor, Tensor | None]
"""dLoss/dlogp, the entropy, and dLoss/dentropy (None if the loss does not depend on it), each C1."""


def _slope(logp: Tensor, dlogp_C1: Tensor, entropy_C1: Tensor, dentropy_C1: Tensor | None) -> Tensor:
    """Return dLoss/dz without the target's onehot term: -p (dlogp + dentropy (log p + entropy)). Overwrites `logp`."""
    # From dlogp/dz = onehot - p and dentropy/dz = -p (log p + entropy); `exp` turns log-probs into p.
    if dentropy_C1 is None:
        return logp.exp_().mul_(-dlogp_C1)
    # exp() makes a new tensor, so that `logp` can be reused for the second factor.
    return logp.exp().mul_(logp.clamp_min_(_LEAST).add_(entropy_C1).mul_(-dentropy_C1).sub_(dlogp_C1))


def _mark_length_dynamic(*tensors: Tensor | None) -> None:
    """Mark axis 0 as dynamic, so that one kernel serves every C instead of one kernel each.

    Micro-batches differ in length, and so do their last chunks.
    """
    for tensor in tensors:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
