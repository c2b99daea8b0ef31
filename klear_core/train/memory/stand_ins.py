"""Replace what fake tensors cannot run, or would hide, by functions that allocate the same.

Calling `install` changes torch's classes and our kernels for the whole process: `measure` runs in one of its own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.distributed.tensor import _sharding_prop

from klear_core.train import logits
from klear_core.train.kernels import attention, fused, paths


def install(*, is_compiled: bool) -> None:
    """Make fake tensors on the CPU take our CUDA paths. `is_compiled=False` leaves out what torch.compile does."""
    fake = cast(Any, FakeTensor)
    # A CPU build of torch cannot hold fake CUDA tensors: autograd ends the process, as it has no device guard.
    fake.is_cuda = property(lambda _: True)  # what our code asks to choose a kernel
    # A step reads its loss and norm as numbers, and updates only if they are finite.
    fake.item = lambda _: 0.0
    fake.__bool__ = lambda _: True
    # DTensor works out shapes of whole tensors in the active fake mode; in one of its own they are not counted.
    cast(Any, _sharding_prop).detect_fake_mode = lambda *_: None
    for kernel in (attention.FLASH_ATTN, attention.VARLEN_ATTN):
        paths.provide(kernel, lambda q, k, v, *_, **__: _Attention.apply(q, k, v))  # type: ignore[no-untyped-call]
    if is_compiled:
        # Under a dispatch mode torch.compile does nothing without saying so, and passes would count as uncompiled.
        passes = _HeadPasses()
        for part in fused.PARTS:
            paths.provide(f"{part}/cuda", getattr(_Kernels, part))
        paths.provide("head/cpu", lambda: passes)  # the type of a fake tensor's device is still that of the CPU


class _Attention(Function):
    """Allocates what FlashAttention-2 does: output and log-sums; backward also a float32 gradient of the queries, and
    gradients of keys and values for every query head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, log_sums = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _, log_sums = ctx.saved_tensors
        dout = dout.contiguous()
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        # Held inside the kernel only, but at the same time as the gradients, so they count in the peak.
        inside = [torch.empty_like(q, dtype=torch.float32), torch.empty_like(q), torch.empty_like(q)]
        inside.append(torch.empty_like(log_sums))
        del inside, dout
        return grads


class _Pass(Function):
    """Allocates what a compiled pointwise pass does: it keeps its inputs and makes its outputs, and nothing else."""

    @staticmethod
    def forward(ctx: Any, outputs_like: tuple[int, ...], *inputs: Tensor) -> Any:
        ctx.save_for_backward(*inputs)
        outs = tuple(torch.empty_like(inputs[i], memory_format=torch.contiguous_format) for i in outputs_like)
        return outs if len(outs) > 1 else outs[0]

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        grads: list[Tensor | None] = []
        for x, is_needed in zip(ctx.saved_tensors, needs, strict=True):
            grads.append(torch.empty_like(x) if is_needed else None)
        return None, *grads


def _pass(outputs_like: tuple[int, ...], *inputs: Tensor) -> Any:
    return _Pass.apply(outputs_like, *inputs)  # type: ignore[no-untyped-call]


class _Kernels:
    """The interface of `fused_cuda.Kernels`."""

    @staticmethod
    def norm(x: Tensor, weight: Tensor, _eps: float) -> Any:
        return _pass((0,), x, weight)

    @staticmethod
    def gate(gate: Tensor, up: Tensor) -> Any:
        return _pass((0,), gate, up)

    @staticmethod
    def rotate(q: Tensor, k: Tensor, *weights_and_angles: Any) -> Any:
        return _pass((0, 1), q, k, *weights_and_angles[:-1])  # the last one is a number


class _HeadPasses(logits.Passes):
    """Allocates what the head's compiled passes do: numbers for each token, and the gradient of the logits."""

    def read(self, z_CV: Tensor, target_C1: Tensor, *, need_entropy: bool) -> logits.Reading:  # noqa: ARG002  same call
        # All that the compiled pass writes: four numbers for each token, and no second tensor of [C, V].
        logp_C, entropy_C, max_C, logsum_C = (z_CV.new_empty(z_CV.shape[0]) for _ in range(4))
        return logits.Reading(logp_C, entropy_C, logits.Normaliser(max_C[:, None], logsum_C[:, None]))

    def _grad_without_onehot(self, z_CV: Tensor, _norm: Any, _factors: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(z_CV, dtype=dtype)
