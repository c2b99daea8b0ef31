"""Replace what fake tensors cannot run, or would hide, by functions that allocate the same.

Calling `install` changes torch's classes and our kernels for the whole process: `measure` runs in one of its own.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, _sharding_prop
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from klear_core.train import logps
from klear_core.train.kernels import attention, fused, registry

R = TypeVar("R")


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
    attend = lambda q, k, v, *_, **__: _Attention.apply(q, k, v)  # type: ignore[no-untyped-call]  # noqa: E731
    registry.provide(attention.VARLEN_ATTN, attend)
    if is_compiled:
        # Under a dispatch mode torch.compile does nothing without saying so, and kernels would count as uncompiled.
        head_kernels = _FakeHeadKernels()
        for part in fused.PARTS:
            registry.provide(f"{part}/cuda", getattr(_Kernels, part))
        # The type of a fake tensor's device is still that of the CPU.
        registry.provide("head/cpu", lambda: head_kernels)


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


class _FakeHeadKernels(logps.HeadKernels):
    """Allocates what the head's compiled kernels do: numbers for each token, and the gradient of the logits."""

    def read(self, z_CV: Tensor, token_CJ: Tensor, *, need_entropy: bool) -> logps.ChunkLogps:  # noqa: ARG002 same call
        # All that the compiled pass writes: four numbers for each token, and no second tensor of [C, V].
        entropy_C, max_C, logsum_C = (z_CV.new_empty(z_CV.shape[0]) for _ in range(3))
        return logps.ChunkLogps(
            z_CV.new_empty(token_CJ.shape), entropy_C, logps.Normaliser(max_C[:, None], logsum_C[:, None])
        )

    def _grad_without_onehot(self, z_CV: Tensor, _norm: Any, _factors: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(z_CV, dtype=dtype)


# ---- tracker ----
# Follow the bytes of all tensors that a piece of code holds, by kind and by moment.


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live storages of fake tensors. Create it inside the fake mode whose tensors it is to count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moment = "start"
        """Name of what is being computed; set by the caller."""
        self.peaks: dict[str, dict[str, int]] = {}
        """Bytes by kind when a moment held most, by moment."""
        self._live: dict[int, tuple[int, str]] = {}
        """Size and kind of each storage, by its address in C++."""
        self._by_kind: dict[str, int] = defaultdict(int)
        self._total = 0
        self._kind: str | None = None
        self._mode = active_fake_mode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the storages of its outputs."""
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes back as an operation on the local tensor
        out = func(*args, **(kwargs or {}))
        # DTensor asks for the shapes of whole tensors in a fake mode of its own: nobody allocates those.
        if active_fake_mode() is self._mode:
            # Storages and not tensors: views share one, which then counts once.
            for x in tree_leaves(out):
                if isinstance(x, FakeTensor) and x.device.type != "meta":
                    self.count(x.untyped_storage())
        return out

    def count(self, storage: torch.UntypedStorage, kind: str | None = None) -> None:
        """Record a storage's present size. `kind` names what it holds; None keeps the name that it has."""
        key, size = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is None:
            weakref.finalize(storage, self._drop, key)  # called when the last tensor on it is gone
            kind = kind or self._kind or ("temporary in backward" if is_backward() else "kept by forward")
        else:
            # Taken off and added again below: FSDP resizes storages, and a label may change the kind.
            self._by_kind[known[1]] -= known[0]
            self._total -= known[0]
            kind = kind or known[1]
        self._live[key] = (size, kind)
        self._by_kind[kind] += size
        self._total += size
        self._note_peak()

    def label(self, tensor: Tensor | None, kind: str) -> None:
        """Name what a tensor's storage holds; of a DTensor the local shard."""
        if tensor is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self.count(local.untyped_storage(), kind)

    @contextmanager
    def kind(self, kind: str) -> Iterator[None]:
        """Name all storages that are made inside."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def labelled(self, kind: str, function: Callable[..., R]) -> Callable[..., R]:
        """Return the function; storages made by it are named `kind`."""

        @wraps(function)
        def inner(*args: Any, **kwargs: Any) -> R:
            with self.kind(kind):
                return function(*args, **kwargs)

        return inner

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage has been counted."""
        return storage._cdata in self._live

    def _note_peak(self) -> None:
        moment = f"{self.moment}, {'backward' if is_backward() else 'forward'}"
        # The kinds at the moment of the largest total, not the largest of each kind.
        if self._total > sum(self.peaks.get(moment, {}).values()):
            self.peaks[moment] = {kind: size for kind, size in self._by_kind.items() if size}

    def _drop(self, key: int) -> None:
        size, kind = self._live.pop(key)
        self._by_kind[kind] -= size
        self._total -= size


def is_backward() -> bool:
    """Return whether autograd is running a backward pass in this thread."""
    # The id of the running backward pass, -1 outside; torch's own checkpointing asks in the same way.
    return torch._C._current_graph_task_id() != -1
