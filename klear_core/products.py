"""Multiply matrices of bfloat16 with float32 sums and float32 results, on CPUs with instructions for it.

torch's own products of bfloat16 on CPU round their results to bfloat16, in which logits of 16 are an eighth apart.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from klear_core.config.settings import multiplies_bfloat16
from klear_core.native import NO_BFLOAT16, call, compile_c

log = logging.getLogger(__name__)

_BLOCK = 32  # rows and columns of a block; must equal BLOCK in products.c
_SOURCE = Path(__file__).with_name("products.c")
_SIGNATURES = {
    "pack_right": "llpillp",
    "multiply": "lllpillppi",
}
_INSTRUCTIONS = {1: "AVX512_BF16", 2: "AMX"}
_TOLERANCE = 1e-5
"""Relative error allowed in the trial: float32 has 24 bits, and its sums have a hundred terms."""


@cache
def instructions() -> str:
    """Return the instructions for bfloat16 of this processor, once they were seen to compute right; empty if none."""
    library = compile_c(_SOURCE, {}, {"instructions": ""})
    kind = 0 if library is None else library.instructions()
    if kind not in _INSTRUCTIONS:
        if library is not None and multiplies_bfloat16():  # without a library `compile_c` has said why
            log.warning("products of bfloat16 run as plain torch, slower than in float32: %s", NO_BFLOAT16)
        return ""
    error = _error_of_trial()
    if not error <= _TOLERANCE:  # also true for NaN
        log.warning("products of bfloat16 by %s are wrong by %.3g and are not used", _INSTRUCTIONS[kind], error)
        return ""
    return _INSTRUCTIONS[kind]


def product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32, or add it to the float32 `total` in place; float32 operands are rounded to bfloat16."""
    (rows, terms), columns = a.shape, b.shape[1]
    if 0 in (rows, terms, columns):  # nothing to add
        return a.new_zeros(rows, columns, dtype=torch.float32) if total is None else total
    right = _room(terms, columns)
    call(_library(), "pack_right", terms, columns, *_side(b), right)
    out = a.new_empty(rows, columns, dtype=torch.float32) if total is None else total
    assert out.is_contiguous(), out.stride()
    call(_library(), "multiply", rows, columns, terms, *_side(a), right, out, int(total is not None))
    return out


class PackedWeight:
    """A weight [outputs, inputs] in bfloat16, in the order in which products read it: a copy of the same size."""

    def __init__(self, weight: Tensor) -> None:
        self._num_outputs, self._num_inputs = weight.shape
        self._packed = _room(*weight.shape)
        self.pack(weight)

    def pack(self, weight: Tensor) -> None:
        """Overwrite the weight."""
        # The transposed view: inputs are the terms of the sums.
        call(_library(), "pack_right", self._num_inputs, self._num_outputs, *_side(weight.T), self._packed)

    def multiply(self, x: Tensor, out: Tensor, *, adds: bool = False) -> None:
        """Set `out` to x @ weight.T, or add that; both are contiguous float32, and `x` is rounded to bfloat16."""
        sizes = (len(x), self._num_outputs, self._num_inputs)
        call(_library(), "multiply", *sizes, *_side(x), self._packed, out, int(adds))


def _side(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return what the C functions are told of a matrix: its numbers, whether they are float32, and the strides."""
    assert x.dtype in (torch.bfloat16, torch.float32), x.dtype
    if 1 not in x.stride():  # the C code reads rows or columns that lie side by side
        x = x.contiguous()
    to_row, to_column = x.stride()
    return x, int(x.dtype == torch.float32), to_row, to_column


def _room(rows: int, columns: int) -> Tensor:
    return torch.empty(-(-rows // _BLOCK) * -(-columns // _BLOCK) * _BLOCK**2, dtype=torch.bfloat16)


@cache
def _library() -> ctypes.CDLL | None:
    return compile_c(_SOURCE, {}, _SIGNATURES)


def _error_of_trial() -> float:
    """Return the largest error of a few small products, as a share of the largest result."""
    errors = []
    g = torch.Generator().manual_seed(0)
    # One block, parts of blocks, and several of them.
    for rows, terms, columns in ((1, 1, 1), (5, 70, 45), (64, 96, 96)):
        a = torch.randn(rows, terms, generator=g).bfloat16()
        b = torch.randn(columns, terms, generator=g).bfloat16()
        exact = a.double() @ b.double().T
        found = torch.empty(rows, columns)
        PackedWeight(b).multiply(a.float(), found)
        for result, wanted in ((found, exact), (product(found.clone(), a, b.T), 2 * exact)):
            errors.append((result - wanted).abs().max() / wanted.abs().max())
    return float(torch.stack(errors).max())  # NaN if one of them is
