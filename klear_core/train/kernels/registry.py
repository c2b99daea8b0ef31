"""Keep the fast paths of this process by name, and compile functions with torch.compile.

A name is `part/device`, or `part/device/library` where several libraries have the part.
`klear_core.train.kernels.check` compares each with the plain operations at the start of a stage, and leaves
out those that disagree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Run = Callable[..., Any]

# Module state, because kernels are looked up inside a model's layers, where no argument could bring them.
_runs: dict[str, Run] = {}
_left_out: dict[str, str] = {}


def provide(name: str, run: Run) -> None:
    """Make `run` the fast path of this name; its callers must be able to do without it."""
    _runs[name] = run


def in_use(name: str) -> Run | None:
    """Return the fast path; None if there is none or it was left out, for the caller to use plain operations."""
    return None if name in _left_out else _runs.get(name)


def on_device(part: str, x: Tensor) -> Run | None:
    """Return the fast path of a part of the model on the device of `x`."""
    return in_use(f"{part}/{'cuda' if x.is_cuda else 'cpu'}")


def leave_out(name: str, reason: str) -> None:
    """Use plain operations in place of this fast path until this process ends."""
    _left_out[name] = reason


def left_out() -> Mapping[str, str]:
    """Return the names of the paths that were left out, with the reasons."""
    return dict(_left_out)


def provided() -> Mapping[str, Run]:
    """Return all fast paths, those left out too."""
    return dict(_runs)


@contextmanager
def replaced(runs: Mapping[str, Run]) -> Iterator[None]:
    """Use other functions under these names for the length of the block, with nothing left out at its start."""
    before, before_left_out = dict(_runs), dict(_left_out)
    _runs.update(runs)
    _left_out.clear()
    try:
        yield
    finally:
        _runs.clear()
        _runs.update(before)
        _left_out.clear()
        _left_out.update(before_left_out)


# ---- compiled ----
# Compile functions with torch.compile, and fall back to the plain function where that fails.


log = logging.getLogger(__name__)

R = TypeVar("R")
Backend = str | Callable[..., Any]
"""Backend of torch.compile, by name or as a callable."""


class Compiled(Generic[R]):
    """Calls a function compiled; after a compiler error, warns and calls it uncompiled from then on."""

    def __init__(self, function: Callable[..., R], backend: Backend) -> None:
        self._function = function
        self.failure = ""
        """The compiler error, once there was one."""
        # Returns at once: compilation begins with the first call, by its shapes and dtypes.
        self._kernel: Callable[..., R] | None = torch.compile(function, backend=backend)

    @property
    def is_compiled(self) -> bool:
        """Return whether a compiled kernel is in use; the first call compiles it, which may still fail."""
        return self._kernel is not None

    def __call__(self, *arguments: Any) -> R:
        """Return the function's result. Only positional arguments are supported."""
        if self._kernel is not None:
            try:
                return self._kernel(*arguments)
            except compiler_errors() as e:
                # Drop the kernel for good, because compiling again would fail again, seconds later, in every call.
                self._kernel = None
                self.failure = what = f"{type(e).__name__}: {e}"
                log.warning(
                    "%s runs uncompiled, at more memory traffic: torch.compile failed with %s",
                    self._function.__name__,
                    what,
                )
        return self._function(*arguments)


def compiler_errors() -> type[Exception]:
    """Return the class of errors before a kernel runs: no Triton, no C compiler, a graph that cannot be lowered."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException
