"""The fused head: log-probability and entropy of chosen tokens straight from hidden states, never holding all logits.

Axis letters: N loss tokens, C tokens of one chunk, H hidden, V vocabulary.
With z = h W^T / temperature and p = softmax(z):  d logp_t / dz = onehot_t - p,  d entropy / dz = -p (log p + entropy).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_LOGITS = 1 << 25
"""Logits held at once on CPU (128 MiB in float32): a tiny vocabulary is one chunk, Qwen's 151,936 makes chunks of 220 tokens."""
CHUNK_LOGITS_CUDA = 1 << 28
"""1 GiB in float32: large enough that reading the weight once a chunk is nothing beside the matrix products."""

TokenLossFn = Callable[[Tensor, Tensor, slice], Tensor]
"""(logp_C, entropy_C, where in N) -> unreduced loss_C, already scaled. Token i's loss may depend on token i's values alone."""


class HeadOutput(NamedTuple):
    """A tuple, because sharded modules find the tensors they must hook by walking tuples."""

    loss: Tensor
    """Scalar float32, the sum over N; carries the gradient."""
    logp_N: Tensor
    """float32, nats, at the temperature; detached."""
    entropy_N: Tensor
    """float32, nats; detached. NaN if it was not asked for."""


def fused_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    loss_fn: TokenLossFn,
    *,
    temperature: float = 1.0,
    need_entropy: bool = False,
    max_logits: int | None = None,
) -> HeadOutput:
    """A pointwise loss, with its gradient formed in the same pass: 6NHV operations, where recomputing logits takes 8NHV.

    `need_entropy` computes the entropy (for a metric or a loss that uses it); otherwise `loss_fn` is given NaN in its place.
    `max_logits` bounds the logits held at once; None picks by device.
    """
    size = chunk_size(weight_VH, target_N.numel(), max_logits)
    loss, logp_N, entropy_N = _FusedLoss.apply(hidden_NH, weight_VH, target_N, loss_fn, temperature, need_entropy, size)  # type: ignore[no-untyped-call]
    return HeadOutput(loss, logp_N, entropy_N)


class TokenLogps(NamedTuple):
    """Both float32 on N in nats and both differentiable."""

    logp_N: Tensor
    entropy_N: Tensor


def token_logps(
    hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, *, temperature: float = 1.0, max_logits: int | None = None
) -> TokenLogps:
    """Log-probability and entropy for losses that join tokens (sequence ratios, means); 8NHV with a backward pass, 2NHV without."""
    size = chunk_size(weight_VH, target_N.numel(), max_logits)
    logp_N, entropy_N = _TokenLogps.apply(hidden_NH, weight_VH, target_N, temperature, size)  # type: ignore[no-untyped-call]
    return TokenLogps(logp_N, entropy_N)


def chunk_size(weight_VH: Tensor, num_tokens: int, max_logits: int | None) -> int:
    """Tokens of one chunk: as many as the logits budget allows, in equal chunks."""
    budget = max_logits or (CHUNK_LOGITS_CUDA if weight_VH.is_cuda else CHUNK_LOGITS)
    most = max(1, budget // weight_VH.shape[0])
    num_chunks = max(1, -(-num_tokens // most))
    return max(1, -(-num_tokens // num_chunks))


def _log_softmax(hidden_CH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    z_CV = hidden_CH @ weight_VH.T
    z_CV = z_CV.to(_at_least_float32(z_CV.dtype))  # bf16 has 8 bits, too few for log-probabilities over 150k tokens
    if temperature != 1.0:
        z_CV /= temperature
    return torch.log_softmax(z_CV, dim=-1)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _entropy(logp_CV: Tensor, p_CV: Tensor) -> Tensor:
    entropy_C: Tensor = -torch.linalg.vecdot(p_CV, logp_CV.clamp_min(-1e30))  # a token of probability 0 adds 0, not 0 * -inf
    return entropy_C


def _add_grads(grads: tuple[Tensor | None, Tensor | None], dz_CV: Tensor, hidden_CH: Tensor, weight_VH: Tensor, chunk: slice) -> None:
    grad_hidden_NH, grad_weight_VH = grads
    dz_CV = dz_CV.to(weight_VH.dtype)
    if grad_hidden_NH is not None:
        torch.mm(dz_CV, weight_VH, out=grad_hidden_NH[chunk])
    if grad_weight_VH is None:
        return
    if grad_weight_VH.dtype == dz_CV.dtype:
        grad_weight_VH.addmm_(dz_CV.T, hidden_CH)
    else:
        grad_weight_VH += dz_CV.T @ hidden_CH  # float32 sum over chunks


def _grad_buffers(needs_input_grad: tuple[bool, ...], hidden_NH: Tensor, weight_VH: Tensor) -> tuple[Tensor | None, Tensor | None]:
    grad_hidden_NH = torch.empty_like(hidden_NH) if needs_input_grad[0] else None
    grad_weight_VH = torch.zeros_like(weight_VH, dtype=_at_least_float32(weight_VH.dtype)) if needs_input_grad[1] else None
    return grad_hidden_NH, grad_weight_VH


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, loss_fn: TokenLossFn, temperature: float, need_entropy: bool, size: int
    ):
        num_tokens = target_N.numel()
        logp_N = torch.empty(num_tokens, dtype=_at_least_float32(hidden_NH.dtype), device=hidden_NH.device)
        entropy_N = torch.full_like(logp_N, torch.nan)
        loss = logp_N.new_zeros(())
        grads = _grad_buffers(ctx.needs_input_grad, hidden_NH, weight_VH)
        for start in range(0, num_tokens, size):
            chunk = slice(start, min(start + size, num_tokens))
            target_C1 = target_N[chunk, None]
            logp_CV = _log_softmax(hidden_NH[chunk], weight_VH, temperature)
            logp_N[chunk] = logp_CV.gather(1, target_C1)[:, 0]
            p_CV = logp_CV.exp()
            if need_entropy:
                entropy_N[chunk] = _entropy(logp_CV, p_CV)
            loss_C, dlogp_C, dentropy_C = _pointwise(loss_fn, logp_N[chunk], entropy_N[chunk], chunk)
            loss += loss_C.sum()
            if any(ctx.needs_input_grad[:2]):
                dz_CV = _grad_logits(logp_CV, p_CV, target_C1, dlogp_C, entropy_N[chunk], dentropy_C, temperature)
                _add_grads(grads, dz_CV, hidden_NH[chunk], weight_VH, chunk)
        ctx.save_for_backward(*grads)
        ctx.weight_dtype = weight_VH.dtype
        ctx.mark_non_differentiable(logp_N, entropy_N)
        return loss, logp_N, entropy_N

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _logp: Tensor, _entropy: Tensor):  # type: ignore[no-untyped-def]
        grad_hidden_NH, grad_weight_VH = ctx.saved_tensors
        grad_hidden_NH = None if grad_hidden_NH is None else grad_hidden_NH * grad_loss.to(grad_hidden_NH.dtype)
        grad_weight_VH = None if grad_weight_VH is None else (grad_weight_VH * grad_loss).to(ctx.weight_dtype)
        return grad_hidden_NH, grad_weight_VH, None, None, None, None, None


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, temperature: float, size: int):  # type: ignore[no-untyped-def]
        num_tokens = target_N.numel()
        logp_N = torch.empty(num_tokens, dtype=_at_least_float32(hidden_NH.dtype), device=hidden_NH.device)
        entropy_N = torch.empty_like(logp_N)
        for start in range(0, num_tokens, size):
            chunk = slice(start, min(start + size, num_tokens))
            logp_CV = _log_softmax(hidden_NH[chunk], weight_VH, temperature)
            logp_N[chunk] = logp_CV.gather(1, target_N[chunk, None])[:, 0]
            entropy_N[chunk] = _entropy(logp_CV, logp_CV.exp())
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, entropy_N)
        ctx.temperature, ctx.size = temperature, size
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx, dlogp_N: Tensor, dentropy_N: Tensor):  # type: ignore[no-untyped-def]
        hidden_NH, weight_VH, target_N, entropy_N = ctx.saved_tensors
        grads = _grad_buffers(ctx.needs_input_grad, hidden_NH, weight_VH)
        for start in range(0, target_N.numel(), ctx.size):
            chunk = slice(start, min(start + ctx.size, target_N.numel()))
            logp_CV = _log_softmax(hidden_NH[chunk], weight_VH, ctx.temperature)
            given = (dlogp_N[chunk], entropy_N[chunk], dentropy_N[chunk], ctx.temperature)
            dz_CV = _grad_logits(logp_CV, logp_CV.exp(), target_N[chunk, None], *given)
            _add_grads(grads, dz_CV, hidden_NH[chunk], weight_VH, chunk)
        grad_hidden_NH, grad_weight_VH = grads
        return grad_hidden_NH, None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype), None, None, None


def _pointwise(loss_fn: TokenLossFn, logp_C: Tensor, entropy_C: Tensor, chunk: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss of each token of a chunk and its derivatives by that token's log-probability and entropy."""
    with torch.enable_grad():
        logp_C, entropy_C = logp_C.detach().requires_grad_(), entropy_C.detach().requires_grad_()
        loss_C = loss_fn(logp_C, entropy_C, chunk)
        if not loss_C.requires_grad:  # nothing to learn here, all tokens are masked by the loss
            return loss_C, torch.zeros_like(logp_C), None
        dlogp_C, dentropy_C = torch.autograd.grad(loss_C.sum(), (logp_C, entropy_C), allow_unused=True)
    return loss_C.detach(), torch.zeros_like(logp_C) if dlogp_C is None else dlogp_C, dentropy_C


def _grad_logits(
    logp_CV: Tensor,
    p_CV: Tensor,
    target_C1: Tensor,
    dlogp_C: Tensor,
    entropy_C: Tensor,
    dentropy_C: Tensor | None,
    temperature: float,
) -> Tensor:
    """dLoss/d(h W^T); `p_CV` is overwritten, for at this size a copy costs as much as the arithmetic."""
    dlogp_C1 = dlogp_C[:, None] / temperature
    if dentropy_C is None:
        p_CV *= -dlogp_C1
    else:
        p_CV *= -dlogp_C1 - dentropy_C[:, None] / temperature * (logp_CV.clamp_min(-1e30) + entropy_C[:, None])
    return p_CV.scatter_add_(1, target_C1, dlogp_C1)
