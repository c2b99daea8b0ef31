"""Compile functions with torch.compile, and fall back to the plain function where that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

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
