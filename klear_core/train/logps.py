"""Compute log-probability and entropy of given tokens from hidden states without holding all logits (the fused head).

Axis letters: N loss tokens, C tokens of one chunk, H hidden, V vocabulary.
With z = h W^T / temperature and p = softmax(z):  d logp_t / dz = onehot_t - p,  d entropy / dz = -p (log p + entropy).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from klear_core.train.logits import Reading, add_product, passes_on, product, widened

CHUNK_LOGITS = 1 << 25
"""Logits held at once on CPU (128 MiB in float32).

A tiny vocabulary is one chunk, Qwen's 151,936 makes chunks of 220 tokens.
"""
CHUNK_LOGITS_CUDA = 1 << 28
"""1 GiB in float32: reading the weight once per chunk then costs next to nothing beside the matrix products."""

TokenLossFn = Callable[[Tensor, Tensor, slice], Tensor]
"""(logp_C, entropy_C, where in N) -> loss_C, unreduced and scaled. A token's loss may not depend on other tokens."""


class HeadOutput(NamedTuple):
    """Loss, log-probs and entropies. A tuple, because FSDP finds the tensors that it must hook by walking tuples."""

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
    """Return a pointwise loss, its gradient formed in the same pass: 6NHV operations; recomputing logits takes 8NHV.

    `need_entropy` computes the entropy (for a metric or the loss); otherwise `loss_fn` gets NaN in its place.
    `max_logits` bounds the logits held at once; None picks by device.
    """
    hidden_NH, weight_VH = _inputs(hidden_NH, weight_VH)
    size = chunk_size(weight_VH, target_N.numel(), max_logits)
    arguments = (hidden_NH, weight_VH, target_N, loss_fn, temperature, need_entropy, size)
    return HeadOutput(*_FusedLoss.apply(*arguments))  # type: ignore[no-untyped-call]


class TokenLogps(NamedTuple):
    """Log-probability and entropy, both float32 on N, in nats, and differentiable."""

    logp_N: Tensor
    entropy_N: Tensor


def token_logps(
    hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, *, temperature: float = 1.0, max_logits: int | None = None
) -> TokenLogps:
    """Return log-probability and entropy, for losses that join tokens (sequence ratios, means).

    This takes 8NHV operations with a backward pass, 2NHV without.
    """
    hidden_NH, weight_VH = _inputs(hidden_NH, weight_VH)
    size = chunk_size(weight_VH, target_N.numel(), max_logits)
    outputs = _TokenLogps.apply(hidden_NH, weight_VH, target_N, temperature, size)  # type: ignore[no-untyped-call]
    return TokenLogps(*outputs)


def chunk_size(weight_VH: Tensor, num_tokens: int, max_logits: int | None) -> int:
    """Return the tokens per chunk: as many as the logits budget allows, in chunks of equal size."""
    budget = max_logits or (CHUNK_LOGITS_CUDA if weight_VH.is_cuda else CHUNK_LOGITS)
    most = max(1, budget // weight_VH.shape[0])
    # Both divisions round up. Chunks are equal, because a short last one would read the whole weight for few tokens.
    num_chunks = max(1, -(-num_tokens // most))
    return max(1, -(-num_tokens // num_chunks))


def _inputs(hidden_NH: Tensor, weight_VH: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors in the dtype that the head computes with.

    Under `no_grad` they are detached: an autograd function's `needs_input_grad` looks only at its tensors.
    """
    hidden_NH, weight_VH = widened(hidden_NH), widened(weight_VH)
    # Detached inputs make _FusedLoss skip the gradients, which nobody would use.
    return (hidden_NH, weight_VH) if torch.is_grad_enabled() else (hidden_NH.detach(), weight_VH.detach())


class _Grads(NamedTuple):
    """Gradients to be filled in; None for inputs that need none."""

    hidden_NH: Tensor | None
    weight_VH: Tensor | None
    """Sum over chunks, in at least float32."""


class _Head(NamedTuple):
    """Arithmetic of one chunk.

    Callers must release a chunk's [C, V] tensors before they start the next chunk, or two chunks are held at once.
    """

    hidden_NH: Tensor
    weight_VH: Tensor
    target_N: Tensor
    temperature: float

    def chunks(self, size: int) -> Iterator[slice]:
        num_tokens = self.target_N.numel()
        return (slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size))

    def nan_per_token(self) -> Tensor:
        """Return one number per token, NaN until it is computed."""
        # At least float32: half precision would round log-probs, of which ratios are exponentials.
        dtype = torch.promote_types(self.hidden_NH.dtype, torch.float32)
        return torch.full_like(self.target_N, torch.nan, dtype=dtype)

    def grads(self, needs_hidden: bool, needs_weight: bool) -> _Grads:
        hidden_NH = torch.empty_like(self.hidden_NH) if needs_hidden else None  # each chunk writes different rows
        # All chunks add to the weight's gradient, which would round at every addition in half precision.
        sum_dtype = torch.promote_types(self.weight_VH.dtype, torch.float32)
        weight_VH = torch.zeros_like(self.weight_VH, dtype=sum_dtype) if needs_weight else None
        return _Grads(hidden_NH=hidden_NH, weight_VH=weight_VH)

    def read(self, chunk: slice, *, need_entropy: bool) -> tuple[Tensor, Reading]:
        """Return the chunk's logits (for `add_grads`) and the log-probs and entropies read from them."""
        z_CV = product(self.hidden_NH[chunk], self.weight_VH.T)
        # Divide in place, to avoid a second [C, V] tensor.
        if self.temperature != 1.0:
            z_CV /= self.temperature
        return z_CV, passes_on(z_CV.device.type).read(z_CV, self.target_N[chunk, None], need_entropy=need_entropy)

    def add_grads(
        self, grads: _Grads, chunk: slice, z_CV: Tensor, reading: Reading, dlogp_C: Tensor, dentropy_C: Tensor | None
    ) -> None:
        """Add the chunk to `grads`, given the loss's derivatives by its log-probs and entropies."""
        # z = logits / temperature: dLoss/dlogits has a factor 1 / temperature, applied here to [C] instead of [C, V].
        dlogp_C = dlogp_C / self.temperature
        dentropy_C = None if dentropy_C is None else dentropy_C / self.temperature
        passes, dtype = passes_on(z_CV.device.type), self.weight_VH.dtype
        # In the weight's dtype, because both products below take inputs of one dtype.
        dz_CV = passes.grad(z_CV, reading, self.target_N[chunk, None], dlogp_C, dentropy_C, dtype=dtype)
        # z = h W^T, so dLoss/dh = dz W and dLoss/dW = dz^T h; the first is complete after one chunk, the second a sum.
        if grads.hidden_NH is not None:
            torch.mm(dz_CV, self.weight_VH, out=grads.hidden_NH[chunk])
        if grads.weight_VH is not None:
            add_product(grads.weight_VH, dz_CV.T, self.hidden_NH[chunk])


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor,
        loss_fn: TokenLossFn,
        temperature: float,
        need_entropy: bool,
        size: int,
    ):
        head = _Head(hidden_NH, weight_VH, target_N, temperature)
        grads = head.grads(*ctx.needs_input_grad[:2])
        logp_N, entropy_N = head.nan_per_token(), head.nan_per_token()
        loss = logp_N.new_zeros(())

        # The loss is a sum over tokens: form each chunk's gradient while its logits are in memory.
        # A function, because its [C, V] locals are released on return.
        def add(chunk: slice) -> None:
            z_CV, reading = head.read(chunk, need_entropy=need_entropy)
            logp_N[chunk], entropy_N[chunk] = reading.logp_C, reading.entropy_C
            loss_C, dlogp_C, dentropy_C = _pointwise(loss_fn, reading, chunk)
            loss.add_(loss_C.sum())
            if any(ctx.needs_input_grad[:2]):
                head.add_grads(grads, chunk, z_CV, reading, dlogp_C, dentropy_C)

        for chunk in head.chunks(size):
            add(chunk)
        # Backward needs neither logits nor weight, so nothing of size [N, V] outlives forward.
        ctx.save_for_backward(*grads)
        ctx.weight_dtype = weight_VH.dtype  # dtype of the gradient that backward returns; its sum is in float32
        ctx.mark_non_differentiable(logp_N, entropy_N)
        return loss, logp_N, entropy_N

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _logp: Tensor, _entropy: Tensor):  # type: ignore[no-untyped-def]
        # Both were formed in forward for grad_loss = 1, so that only the factor is missing.
        grad_hidden_NH, grad_weight_VH = ctx.saved_tensors
        grad_hidden_NH = None if grad_hidden_NH is None else grad_hidden_NH * grad_loss.to(grad_hidden_NH.dtype)
        if grad_weight_VH is not None:  # scale and cast in one pass, without a second float32 copy
            grad_weight_VH = torch.mul(
                grad_weight_VH, grad_loss, out=torch.empty_like(grad_weight_VH, dtype=ctx.weight_dtype)
            )
        return grad_hidden_NH, grad_weight_VH, None, None, None, None, None


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor,
        temperature: float,
        size: int,
    ):
        head = _Head(hidden_NH, weight_VH, target_N, temperature)
        logp_N, entropy_N = head.nan_per_token(), head.nan_per_token()
        # No gradient can be formed here: a token's derivative can depend on tokens of later chunks.
        for chunk in head.chunks(size):
            logp_N[chunk], entropy_N[chunk], _ = head.read(chunk, need_entropy=True)[1]
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, entropy_N)
        ctx.temperature, ctx.size = temperature, size
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx, dlogp_N: Tensor, dentropy_N: Tensor):  # type: ignore[no-untyped-def]
        hidden_NH, weight_VH, target_N, entropy_N = ctx.saved_tensors
        head = _Head(hidden_NH, weight_VH, target_N, ctx.temperature)
        grads = head.grads(*ctx.needs_input_grad[:2])

        # Logits are computed again: 2NHV more operations, but no [N, V] tensor is kept from forward.
        def add(chunk: slice) -> None:
            # The entropy was saved; to compute it again takes one more [C, V] tensor.
            z_CV, reading = head.read(chunk, need_entropy=False)
            reading = reading._replace(entropy_C=entropy_N[chunk])
            head.add_grads(grads, chunk, z_CV, reading, dlogp_N[chunk], dentropy_N[chunk])

        for chunk in head.chunks(ctx.size):
            add(chunk)
        grad_weight_VH = None if grads.weight_VH is None else grads.weight_VH.to(weight_VH.dtype)
        return grads.hidden_NH, grad_weight_VH, None, None, None


def _pointwise(loss_fn: TokenLossFn, reading: Reading, chunk: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return each token's loss and its derivatives by the token's log-prob and entropy (None: independent of it)."""
    # Autograd is off inside a Function's forward. Detached leaves: the derivatives are by these numbers, not by z.
    with torch.enable_grad():
        logp_C, entropy_C = reading.logp_C.detach().requires_grad_(), reading.entropy_C.detach().requires_grad_()
        loss_C = loss_fn(logp_C, entropy_C, chunk)
        if not loss_C.requires_grad:  # constant: the loss masks all tokens of this chunk
            return loss_C, torch.zeros_like(logp_C), None
        # Losses are pointwise, so the gradient of their sum is the vector of each one's derivative.
        dlogp_C, dentropy_C = torch.autograd.grad(loss_C.sum(), (logp_C, entropy_C), allow_unused=True)
    if dlogp_C is None:  # the loss depends on the entropy alone
        dlogp_C = torch.zeros_like(logp_C)
    return loss_C.detach(), dlogp_C, dentropy_C
