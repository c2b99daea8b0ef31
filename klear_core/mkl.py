"""Have MKL choose the code of its elementwise functions before threads share their work.

MKL chooses at the first call of each function. In the version of torch's wheels (2024.2), one of two threads that make
that call together may compute its part with 11 bits instead of 24 (github.com/pytorch/pytorch/issues/188792). torch
divides more than 2,048 numbers among its threads, so a process's first table of angles was wrong by 2e-4 about once
in 300 starts, for as long as the sampler lived.
"""

from __future__ import annotations

from functools import cache

import torch

FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "sin", "tan", "tanh"),
    *("erf", "erfc", "erfinv", "exp", "log", "log10", "log2", "sqrt", "trunc"),
)
"""Those that torch has MKL compute (aten/src/ATen/cpu/vml.h)."""


@cache
def choose_functions() -> None:
    """Call each function once in this thread; modules that compute on CPUs do so when they are imported."""
    for dtype in (torch.float32, torch.float64):
        x = torch.full((1,), 0.5, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(x)
