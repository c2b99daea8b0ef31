"""Follow the bytes of all tensors that a piece of code holds, by kind and by moment."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

R = TypeVar("R")


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

    def forget_peaks(self) -> None:
        """Forget the peaks so far; what is live stays."""
        self.peaks.clear()

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
