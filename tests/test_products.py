"""Products of bfloat16 with float32 results, on processors that have instructions for them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from klear_core.products import PackedWeight, instructions, product

pytestmark = pytest.mark.skipif(not instructions(), reason="this processor has neither AVX512_BF16 nor AMX")


def drawn(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).bfloat16()


def is_exact(found: Tensor, wanted: Tensor) -> bool:
    """Up to the rounding of float32 sums, which is a thousandth of bfloat16's."""
    return bool(torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()) + 1e-4))


SIZES = [(1, 1, 1), (3, 31, 33), (32, 32, 32), (33, 100, 65), (200, 576, 96)]
LONG = [(300, 2500, 40), (40, 5000, 300)]
"""Sums that are computed in parts, of more rows than columns and of fewer."""


@pytest.mark.parametrize("sizes", SIZES + LONG, ids=str)
def test_products_of_all_layouts_are_those_of_float64(sizes: tuple[int, int, int]) -> None:
    rows, terms, columns = sizes
    a, b = drawn(rows, terms), drawn(terms, columns)
    exact = a.double() @ b.double()
    for left in (a, a.T.contiguous().T):
        for right in (b, b.T.contiguous().T):
            found = product(None, left, right)
            assert is_exact(found, exact)
            assert torch.equal(product(None, left.float(), right), found)
            assert torch.equal(product(None, left, right.float()), found)
    strided = drawn(rows, 3 * terms)[:, ::3]
    assert is_exact(product(None, strided, b), strided.double() @ b.double())


def test_a_product_is_added_to_a_total_in_place() -> None:
    a, b, total = drawn(40, 50), drawn(50, 70), torch.full((40, 70), 1e3)
    assert product(total, a, b) is total
    assert is_exact(total, 1e3 + a.double() @ b.double())


@pytest.mark.parametrize("sizes", LONG, ids=str)
def test_a_long_sum_is_added_to_a_total(sizes: tuple[int, int, int]) -> None:
    rows, terms, columns = sizes
    a, b = drawn(rows, terms), drawn(terms, columns)
    total = product(torch.full((rows, columns), 1e3), a, b)
    assert is_exact(total, 1e3 + a.double() @ b.double())


@pytest.mark.parametrize("sizes", [(0, 5, 3), (4, 0, 3), (4, 5, 0)], ids=str)
def test_empty_products_are_zero(sizes: tuple[int, int, int]) -> None:
    rows, terms, columns = sizes
    assert torch.equal(product(None, drawn(rows, terms), drawn(terms, columns)), torch.zeros(rows, columns))


def test_inputs_are_rounded_to_nearest_with_ties_to_even() -> None:
    # bfloat16 has steps of 2^-7 at 1: half a step goes to the even neighbour, more goes up.
    x = torch.tensor([[1 + 2**-8], [1 + 3 * 2**-8], [1 + 2**-8 + 2**-20], [-1 - 2**-8]])
    out = torch.empty(4, 1)
    PackedWeight(torch.ones(1, 1, dtype=torch.bfloat16)).multiply(x, out)
    assert out[:, 0].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, -1.0]
    assert torch.equal(out, x.bfloat16().float())
    left, right = torch.randn(70, 90), torch.randn(90, 50)
    assert torch.equal(product(None, left, right), product(None, left.bfloat16(), right.bfloat16()))
    assert torch.equal(product(None, left, right.T.contiguous().T), product(None, left.T.contiguous().T, right))


def test_a_row_has_the_same_bits_whatever_rows_are_beside_it() -> None:
    x, weight = torch.randn(70, 100), PackedWeight(drawn(90, 100))
    whole, alone = torch.empty(70, 90), torch.empty(1, 90)
    weight.multiply(x, whole)
    for i in (0, 17, 69):
        weight.multiply(x[i : i + 1], alone)
        assert torch.equal(alone[0], whole[i])


def test_what_is_not_finite_stays_so() -> None:
    x = torch.tensor([[torch.nan], [torch.inf], [-torch.inf]])
    out = torch.empty(3, 1)
    PackedWeight(torch.ones(1, 1, dtype=torch.bfloat16)).multiply(x, out)
    assert out.isnan()[:, 0].tolist()[0]
    assert not out.isfinite().any()


def test_a_compiler_that_does_not_know_the_instructions_is_told_of(tmp_path: Path) -> None:
    """Such as gcc 9, which this one is made to be by the processor that it compiles for."""
    compiler = tmp_path / "cc"
    gcc = shutil.which("gcc") or pytest.skip("no gcc")
    compiler.write_text(f'#!/bin/bash\nexec {gcc} "${{@/-march=native/-march=x86-64}}"\n')
    compiler.chmod(0o755)
    code = "from klear_core.products import instructions; print(repr(instructions()))"
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    assert said.stdout == "''\n"
    assert "slower than in float32: this processor multiplies bfloat16, but the C compiler" in said.stderr
