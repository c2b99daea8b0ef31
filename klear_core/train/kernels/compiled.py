"""Functions that torch.compile makes kernels of, for as long as it can."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

log = logging.getLogger(__name__)

R = TypeVar("R")
Backend = str | Callable[..., Any]
"""One of torch.compile's."""


class Compiled(Generic[R]):
    """Called as the function itself, which takes over for good, with a warning, when it cannot be compiled."""

    def __init__(self, function: Callable[..., R], backend: Backend) -> None:
        self._function = function
        self._kernel: Callable[..., R] | None = torch.compile(function, backend=backend)

    @property
    def is_compiled(self) -> bool:
        """Whether kernels run, as far as is known: the first call makes them, and may fail."""
        return self._kernel is not None

    def __call__(self, *given: Any) -> R:
        """What the function gives. Keyword arguments are not taken."""
        if self._kernel is not None:
            try:
                return self._kernel(*given)
            except compiler_errors() as e:
                self._kernel = None
                what = f"{type(e).__name__}: {e}"
                log.warning("%s runs uncompiled, at more memory traffic: torch.compile failed with %s", self._function.__name__, what)
        return self._function(*given)


def compiler_errors() -> type[Exception]:
    """Whatever goes wrong before a kernel runs: no Triton, no C compiler, a graph that it cannot lower."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException
