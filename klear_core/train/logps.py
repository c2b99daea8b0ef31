"""Compute log-probability and entropy of given tokens from hidden states without holding all logits (the fused head).

Axis letters: N loss tokens, C those of one chunk, H hidden, V vocabulary, K a teacher's top tokens, J target and these.
With z = h W^T / temperature and p = softmax(z):  d logp_t / dz = onehot_t - p,  d entropy / dz = -p (log p + entropy).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from klear_core import products
from klear_core.train.kernels import registry
from klear_core.train.kernels.registry import Backend, compiler_errors

log = logging.getLogger(__name__)

CHUNK_LOGITS = 1 << 25
"""Logits held at once on CPU, 128 MiB in float32: Qwen's vocabulary of 151,936 makes chunks of 220 tokens."""
CHUNK_LOGITS_CUDA = 1 << 28
"""1 GiB in float32: reading the weight once per chunk then costs next to nothing beside the matrix products."""

TokenLossFn = Callable[[Tensor, Tensor, slice], Tensor]
"""(logp_C, entropy_C, where in N) -> loss_C, unreduced and scaled. A token's loss may not depend on other tokens."""


class TopTokens(NamedTuple):
    """K different tokens in place of each target, whose log-probs are added to the loss with fixed weights."""

    id_NK: Tensor
    """int64."""
    weight_NK: Tensor
    """The loss falls by this, times the token's log-prob."""

    @classmethod
    def none(cls, target_N: Tensor) -> TopTokens:
        """Return none."""
        return cls(target_N.new_empty((len(target_N), 0)), torch.empty((len(target_N), 0), device=target_N.device))


class HeadOutput(NamedTuple):
    """Loss, log-probs and entropies. A tuple, because FSDP finds the tensors that it must hook by walking tuples."""

    loss: Tensor
    """Scalar float32, the sum over N; carries the gradient."""
    logp_N: Tensor
    """float32, nats, at the temperature; detached."""
    entropy_N: Tensor
    """float32, nats; detached. NaN if it was not asked for."""
    top_weighted_logp_N: Tensor | None = None
    """Sum of the top tokens' log-probs times their weights; detached. None where the head computes none."""


def fused_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    loss_fn: TokenLossFn,
    *,
    temperature: float = 1.0,
    need_entropy: bool = False,
    max_logits: int | None = None,
    top_tokens: TopTokens | None = None,
) -> HeadOutput:
    """Return the sum of a pointwise loss; its gradient forms in the same pass (6NHV operations; to recompute takes 8).

    Products take inputs of the hidden states' dtype; the weight's gradient has the weight's.
    `need_entropy` computes the entropy (for a metric or the loss); otherwise `loss_fn` gets NaN in its place.
    `max_logits` bounds the logits held at once; None picks by device.
    """
    top_tokens = TopTokens.none(target_N) if top_tokens is None else top_tokens
    hidden_NH, weight_VH = _inputs(hidden_NH, weight_VH)
    size = chunk_size(weight_VH, target_N.numel(), max_logits)
    arguments = (hidden_NH, weight_VH, (target_N, top_tokens), loss_fn, temperature, need_entropy, size)
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


class _HeadInputs(NamedTuple):
    """Inputs of the head, and the arithmetic of one chunk of them.

    Callers must release a chunk's [C, V] tensors before they start the next chunk, or two chunks are held at once.
    """

    hidden_NH: Tensor
    weight_VH: Tensor
    target_N: Tensor
    top_tokens: TopTokens
    temperature: float

    def tokens(self, chunk: slice) -> Tensor:
        """Return the chunk's target and top tokens as token_CJ, the target first."""
        return torch.cat([self.target_N[chunk, None], self.top_tokens.id_NK[chunk]], dim=1)

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

    def read(self, chunk: slice, *, need_entropy: bool) -> tuple[Tensor, ChunkLogps]:
        """Return the chunk's logits (for `add_grads`) and the log-probs and entropies read from them."""
        z_CV = product(self.hidden_NH[chunk], self.weight_VH.T)
        # Divide in place, to avoid a second [C, V] tensor.
        if self.temperature != 1.0:
            z_CV /= self.temperature
        return z_CV, head_kernels_on(z_CV.device.type).read(z_CV, self.tokens(chunk), need_entropy=need_entropy)

    def add_grads(
        self, grads: _Grads, chunk: slice, z_CV: Tensor, logps: ChunkLogps, dlogp_CJ: Tensor, dentropy_C: Tensor | None
    ) -> None:
        """Add the chunk to `grads`, given the loss's derivatives by its log-probs and entropies."""
        # z = logits / temperature: dLoss/dlogits has a factor 1 / temperature, applied here to [C] instead of [C, V].
        dlogp_CJ = dlogp_CJ / self.temperature
        dentropy_C = None if dentropy_C is None else dentropy_C / self.temperature
        # In the weight's dtype where products take inputs of one dtype; those of CPUs round what is float32.
        rounds = z_CV.device.type == "cpu" and not isinstance(z_CV, FakeTensor)
        kernels, dtype = head_kernels_on(z_CV.device.type), z_CV.dtype if rounds else self.weight_VH.dtype
        dz_CV = kernels.grad(z_CV, logps, self.tokens(chunk), dlogp_CJ, dentropy_C, dtype=dtype)
        # z = h W^T, so dLoss/dh = dz W and dLoss/dW = dz^T h; the first is complete after one chunk, the second a sum.
        if grads.hidden_NH is not None:
            dhidden_CH = grads.hidden_NH[chunk]
            if rounds:
                dhidden_CH.copy_(product(dz_CV, self.weight_VH))
            else:
                torch.mm(dz_CV, self.weight_VH, out=dhidden_CH)
        if grads.weight_VH is not None:
            product(dz_CV.T, self.hidden_NH[chunk], grads.weight_VH)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        tokens: tuple[Tensor, TopTokens],
        loss_fn: TokenLossFn,
        temperature: float,
        need_entropy: bool,
        size: int,
    ):
        target_N, top_tokens = tokens
        inputs = _HeadInputs(hidden_NH, weight_VH.to(hidden_NH.dtype), target_N, top_tokens, temperature)
        grads = inputs.grads(*ctx.needs_input_grad[:2])
        logp_N, entropy_N = inputs.nan_per_token(), inputs.nan_per_token()
        top_weighted_logp_N, loss = inputs.nan_per_token(), logp_N.new_zeros(())

        # The loss is a sum over tokens: form each chunk's gradient while its logits are in memory.
        # A function, because its [C, V] locals are released on return.
        def add(chunk: slice) -> None:
            z_CV, logps = inputs.read(chunk, need_entropy=need_entropy)
            logp_N[chunk], entropy_N[chunk] = logps.logp_CJ[:, 0], logps.entropy_C
            loss_C, dlogp_C, dentropy_C = _pointwise(loss_fn, logps, chunk)
            weight_CK = top_tokens.weight_NK[chunk]
            # Bounded, because a weight of 0 times a log-prob of minus infinity would be NaN.
            top_weighted_logp_N[chunk] = (weight_CK * logps.logp_CJ[:, 1:].clamp(min=_LEAST)).sum(dim=1)
            loss.add_((loss_C - top_weighted_logp_N[chunk]).sum())
            dlogp_CJ = torch.cat([dlogp_C[:, None], -weight_CK], dim=1)
            if any(ctx.needs_input_grad[:2]):
                inputs.add_grads(grads, chunk, z_CV, logps, dlogp_CJ, dentropy_C)

        for chunk in inputs.chunks(size):
            add(chunk)
        # Backward needs neither logits nor weight, so nothing of size [N, V] outlives forward.
        ctx.save_for_backward(*grads)
        ctx.weight_dtype = weight_VH.dtype  # dtype of the gradient that backward returns; its sum is in float32
        ctx.mark_non_differentiable(logp_N, entropy_N, top_weighted_logp_N)
        return loss, logp_N, entropy_N, top_weighted_logp_N

    @staticmethod
    def backward(ctx, grad_loss: Tensor, *_unused: Tensor):  # type: ignore[no-untyped-def]
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
        inputs = _HeadInputs(hidden_NH, weight_VH.to(hidden_NH.dtype), target_N, TopTokens.none(target_N), temperature)
        logp_N, entropy_N = inputs.nan_per_token(), inputs.nan_per_token()
        # No gradient can be formed here: a token's derivative can depend on tokens of later chunks.
        for chunk in inputs.chunks(size):
            logps = inputs.read(chunk, need_entropy=True)[1]
            logp_N[chunk], entropy_N[chunk] = logps.logp_CJ[:, 0], logps.entropy_C
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, entropy_N)
        ctx.temperature, ctx.size = temperature, size
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx, dlogp_N: Tensor, dentropy_N: Tensor):  # type: ignore[no-untyped-def]
        hidden_NH, weight_VH, target_N, entropy_N = ctx.saved_tensors
        inputs = _HeadInputs(
            hidden_NH, weight_VH.to(hidden_NH.dtype), target_N, TopTokens.none(target_N), ctx.temperature
        )
        grads = inputs.grads(*ctx.needs_input_grad[:2])

        # Logits are computed again: 2NHV more operations, but no [N, V] tensor is kept from forward.
        def add(chunk: slice) -> None:
            # The entropy was saved; to compute it again takes one more [C, V] tensor.
            z_CV, logps = inputs.read(chunk, need_entropy=False)
            logps = logps._replace(entropy_C=entropy_N[chunk])
            inputs.add_grads(grads, chunk, z_CV, logps, dlogp_N[chunk, None], dentropy_N[chunk])

        for chunk in inputs.chunks(ctx.size):
            add(chunk)
        grad_weight_VH = None if grads.weight_VH is None else grads.weight_VH.to(weight_VH.dtype)
        return grads.hidden_NH, grad_weight_VH, None, None, None


def _pointwise(loss_fn: TokenLossFn, logps: ChunkLogps, chunk: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return each token's loss and its derivatives by the token's log-prob and entropy (None: independent of it)."""
    # Autograd is off inside a Function's forward. Detached leaves: the derivatives are by these numbers, not by z.
    with torch.enable_grad():
        logp_C, entropy_C = logps.logp_CJ[:, 0].detach().requires_grad_(), logps.entropy_C.detach().requires_grad_()
        loss_C = loss_fn(logp_C, entropy_C, chunk)
        if not loss_C.requires_grad:  # constant: the loss masks all tokens of this chunk
            return loss_C, torch.zeros_like(logp_C), None
        # Losses are pointwise, so the gradient of their sum is the vector of each one's derivative.
        dlogp_C, dentropy_C = torch.autograd.grad(loss_C.sum(), (logp_C, entropy_C), allow_unused=True)
    if dlogp_C is None:  # the loss depends on the entropy alone
        dlogp_C = torch.zeros_like(logp_C)
    return loss_C.detach(), dlogp_C, dentropy_C


# ---- logits ----
# Compute the logits of one chunk of tokens, then read and differentiate them in two passes.
#
# The first pass finds log-probs and entropies, the second the gradient; the loss function is called in between. Every
# product accumulates in float32, whatever its inputs: logits are not rounded before their softmax, nor is the
# weight's gradient between chunks. On CUDA each pass is one compiled kernel, and log-probs exist only in its
# registers. Elsewhere log-probs overwrite the logits, and results do not depend on a compiler.


HALF = (torch.bfloat16, torch.float16)
_LEAST = -1e30
"""Replaces a log-prob of minus infinity (probability 0): it adds 0 to an entropy, where 0 * -inf would be NaN."""


def widened(x: Tensor) -> Tensor:
    """Return half precision as float32 where no product of half inputs has a float32 result."""
    return x.float() if x.dtype in HALF and _product_of(x) is None else x


def product(a: Tensor, b: Tensor, total: Tensor | None = None) -> Tensor:
    """Return a @ b, in float32 if `b` is half precision (see `widened`), or add it to `total` in place."""
    # torch.mm of halves accumulates in float32, but would round its result to half.
    half = _product_of(b)
    if half is not None:
        return half(total, a, b)  # type: ignore[no-any-return]
    return torch.mm(a, b) if total is None else torch.addmm(total, a, b, out=total)


def _product_of(x: Tensor) -> registry.Run | None:
    """Return the product of half precision with a float32 result on the device of `x`; None if there is none."""
    if isinstance(x, FakeTensor):  # by which a GPU's memory is planned: C could read nothing there
        return _product_of_halves if x.dtype in HALF else None
    if x.dtype not in HALF or (x.device.type == "cpu" and (x.dtype != torch.bfloat16 or not products.instructions())):
        return None
    return registry.on_device("products", x)


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


class ChunkLogps(NamedTuple):
    """Log-probs and entropies of a chunk, the result of the first pass over its logits."""

    logp_CJ: Tensor
    """Log-probs of the target and, after it, of the top tokens in its place."""
    entropy_C: Tensor
    """Entropies; NaN if they were not asked for."""
    normaliser: Normaliser | None
    """None if log-probs have overwritten the logits."""


class HeadKernels:
    """Runs the two passes over a chunk's logits: compiled if `backend` is given, until a compiler error."""

    def __init__(self, backend: Backend | None = None) -> None:
        self.failure = ""
        """The compiler error, once there was one."""
        self._read: Callable[..., ChunkLogps] | None = None
        self._grad: Callable[..., Tensor] | None = None
        if backend is not None:
            self._read = torch.compile(_read, backend=backend)
            self._grad = torch.compile(_grad, backend=backend)

    @property
    def is_compiled(self) -> bool:
        """Return whether compiled kernels are in use; the first chunk compiles them, which may still fail."""
        return self._read is not None

    def read(self, z_CV: Tensor, token_CJ: Tensor, *, need_entropy: bool) -> ChunkLogps:
        """Run the first pass. It may overwrite `z_CV`, which only `grad` can use afterwards."""
        if self._read is not None:
            try:
                _mark_length_dynamic(z_CV, token_CJ)
                return self._read(z_CV, token_CJ, need_entropy=need_entropy, in_place=False)
            # Raised before any kernel has run: `z_CV` is intact, and the plain pass below can read it.
            except compiler_errors() as e:
                self._fall_back(e)
        return _read(z_CV, token_CJ, need_entropy=need_entropy, in_place=True)

    def grad(
        self,
        z_CV: Tensor,
        logps: ChunkLogps,
        token_CJ: Tensor,
        dlogp_CJ: Tensor,
        dentropy_C: Tensor | None,
        *,
        dtype: torch.dtype,
    ) -> Tensor:
        """Run the second pass: return dLoss/dz in `dtype` from dLoss/dlogp and dLoss/dentropy. May overwrite `z_CV`."""
        # One number per token, broadcast over V.
        dentropy_C1 = None if dentropy_C is None else dentropy_C[:, None]
        factors = (dlogp_CJ.sum(dim=1, keepdim=True), logps.entropy_C[:, None], dentropy_C1)
        dz_CV = self._grad_without_onehot(z_CV, logps.normaliser, factors, dtype)
        # dz = sum over j of dlogp_j (onehot_j - p) + entropy term; only the tokens read have a onehot, the target and
        # a top token that is the same have both. `_slope` overwrites its input: clone.
        is_same_CJJ = token_CJ[:, :, None] == token_CJ[:, None, :]
        onehot_CJ = (is_same_CJJ * dlogp_CJ[:, None, :]).sum(dim=2)
        dz_CJ = _slope(logps.logp_CJ.clone(), *factors) + onehot_CJ
        # Replace their columns instead of adding to them: in half precision they have been rounded already.
        return dz_CV.scatter_(1, token_CJ, dz_CJ.to(dtype))

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


def head_kernels_on(device_type: str) -> HeadKernels:
    """Return the kernels for a kind of device; all heads of the process share them."""
    compiled = registry.in_use(f"head/{device_type}")
    kernels: HeadKernels = _PLAIN if compiled is None else compiled()
    return kernels


_PLAIN = HeadKernels()


@cache
def _compiled_head_kernels() -> HeadKernels:
    return HeadKernels("inductor")


registry.provide("products/cuda", _product_of_halves)
registry.provide("head/cuda", _compiled_head_kernels)


def _read(z_CV: Tensor, token_CJ: Tensor, *, need_entropy: bool, in_place: bool) -> ChunkLogps:
    # Uncompiled, log-probs overwrite the logits to save a second [C, V] tensor. Compiled, they stay in registers, and
    # `_grad` computes them again from the logits and the normaliser.
    if in_place:
        norm, logp_CV = None, torch.log_softmax(z_CV, dim=-1, out=z_CV)
    else:
        max_C1 = z_CV.amax(dim=-1, keepdim=True)  # subtracted, so that no exponential overflows
        norm = Normaliser(max_C1, (z_CV - max_C1).exp().sum(dim=-1, keepdim=True).log())
        logp_CV = _log_probs(z_CV, norm)
    logp_CJ = logp_CV.gather(1, token_CJ)
    if not need_entropy:
        return ChunkLogps(logp_CJ, torch.full_like(logp_CJ[:, 0], torch.nan), norm)
    # -sum(p log p). Clamping in place is safe: a clamped log-prob still has probability 0.
    return ChunkLogps(logp_CJ, -logp_CV.exp().mul_(logp_CV.clamp_min_(_LEAST)).sum(dim=-1), norm)


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
    """Mark axis 0 as dynamic: micro-batches and their last chunks differ in length, and one kernel serves them all."""
    for tensor in tensors:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
