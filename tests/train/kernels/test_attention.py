"""Attention over a packed sequence: the compiled one and the one by segments, each against the formula in float64."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from klear_core.native import compile_c
from klear_core.train.kernels import attention
from klear_core.train.kernels.attention import by_segment

needs_compiler = pytest.mark.skipif(
    compile_c(attention._SOURCE, {"HEAD_DIM": 16}) is None,
    reason="no C compiler on this machine: attention is torch's alone",
)
WAYS = [pytest.param(attention.attend_on_cpu, marks=needs_compiler), by_segment]

GROUPS = [[1], [20], [8, 5, 1, 30], [3, 16, 17]]
"""Lengths of segments; where there are several, the first is what the others share. Blocks of 8 queries and 16 keys, whole and not."""


def packed(groups: list[list[int]]) -> tuple[Tensor, Tensor, list[list[int]]]:
    """cu_seqlens, group_bounds, and for every token the places of the tokens that it sees."""
    cu_seqlens, ends, seen = [0], [0], []
    for lengths in groups:
        shared = list(range(cu_seqlens[-1], cu_seqlens[-1] + lengths[0]))
        for i, length in enumerate(lengths):
            before = shared if i else []
            seen += [before + list(range(cu_seqlens[-1], cu_seqlens[-1] + t + 1)) for t in range(length)]
            cu_seqlens.append(cu_seqlens[-1] + length)
        ends.append(len(cu_seqlens) - 1)
    return torch.tensor(cu_seqlens, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32), seen


def by_formula(q_TKD: Tensor, k_TGD: Tensor, v_TGD: Tensor, seen: list[list[int]], scaling: float) -> Tensor:
    """Token by token and head by head, softmax(q . k * scaling) . v over what the token sees."""
    group = q_TKD.shape[1] // k_TGD.shape[1]
    outs = []
    for t, places in enumerate(seen):
        for head in range(q_TKD.shape[1]):
            keys, values = k_TGD[places, head // group], v_TGD[places, head // group]
            outs.append((keys @ q_TKD[t, head] * scaling).softmax(0) @ values)
    return torch.stack(outs).view(q_TKD.shape)


def draw(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, size: float = 1.0) -> list[Tensor]:
    """Queries, keys and values, and the gradient of what comes out."""
    g = torch.Generator().manual_seed(0)
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    return [(size * torch.randn(num_tokens, n, head_dim, generator=g)).requires_grad_() for n in heads]


@pytest.mark.parametrize("attend", WAYS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (3, 3, 32), (4, 1, 128)])
def test_values_and_gradients_are_those_of_the_formula(attend, num_heads, num_kv_heads, head_dim):
    cu_seqlens, group_bounds, seen = packed(GROUPS)
    *qkv, dout = draw(len(seen), num_heads, num_kv_heads, head_dim)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    scaling = 1 / math.sqrt(head_dim)
    want = by_formula(*exact, seen, scaling)
    found = attend(*qkv, cu_seqlens, group_bounds, scaling)
    torch.testing.assert_close(found.double(), want, atol=2e-6, rtol=0)
    wanted = torch.autograd.grad(want, exact, dout.double())
    for own, other in zip(torch.autograd.grad(found, qkv, dout), wanted, strict=True):
        torch.testing.assert_close(own.double(), other, atol=2e-5, rtol=0)


@needs_compiler
def test_scores_of_any_size_give_finite_numbers():
    """Scores of some +-5000: the softmax is one token's, and its gradient is 0, not NaN."""
    cu_seqlens, group_bounds, seen = packed(GROUPS)
    *qkv, dout = draw(len(seen), 2, 1, 16, size=50.0)
    out = attention.attend_on_cpu(*qkv, cu_seqlens, group_bounds, 0.25)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out, qkv, dout))


@needs_compiler
def test_what_is_not_finite_shows_where_it_is_seen_and_nowhere_else():
    cu_seqlens, group_bounds, seen = packed([[4], [4], [4]])
    *qkv, _ = draw(12, 2, 1, 16)
    with torch.no_grad():
        qkv[1][5] = math.nan  # the second token of the second row
        out = attention.attend_on_cpu(*qkv, cu_seqlens, group_bounds, 0.25)
    assert out.isnan().flatten(1).any(1).tolist() == [5 in places for places in seen]


@needs_compiler
def test_a_row_has_the_same_bits_whatever_lies_beside_it():
    q, k, v, _ = draw(40, 4, 2, 16)
    together = attention.attend_on_cpu(q, k, v, *packed([[13], [27]])[:2], 0.25)
    alone = attention.attend_on_cpu(q[13:], k[13:], v[13:], *packed([[27]])[:2], 0.25)
    assert torch.equal(together[13:], alone)


@needs_compiler
def test_the_number_of_threads_does_not_show():
    cu_seqlens, group_bounds, seen = packed(5 * GROUPS)
    *qkv, dout = draw(len(seen), 4, 2, 16)
    before = torch.get_num_threads()
    results = []
    for num_threads in (1, 4):
        torch.set_num_threads(num_threads)
        out = attention.attend_on_cpu(*qkv, cu_seqlens, group_bounds, 0.25)
        results.append([out, *torch.autograd.grad(out, qkv, dout)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_heads_that_do_not_fill_vectors_and_other_types_are_not_for_the_compiled_one():
    assert not attention.supports(torch.zeros(3, 2, 8))
    assert not attention.supports(torch.zeros(3, 2, 16, dtype=torch.bfloat16))


BROKEN_WHEEL = """
import sys, torch
torch.cuda.is_available = lambda: True    # transformers looks for flash_attn only then
sys.path.insert(0, sys.argv[1])
import klear_core.train.kernels.attention
from transformers import Qwen3ForCausalLM
print("imported", sys.modules["flash_attn"])
"""


@pytest.mark.slow
def test_a_flash_attn_wheel_of_another_torch_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text(
        "raise ImportError('flash_attn_2_cuda.so: undefined symbol')\n"
    )
    info = tmp_path / "flash_attn-2.8.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    (info / "top_level.txt").write_text("flash_attn\n")
    (info / "RECORD").write_text("")
    run = [sys.executable, "-c", BROKEN_WHEEL, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "imported None", done.stderr[-2000:]
    assert (
        "flash_attn is installed, does not import and is left out: flash_attn_2_cuda.so: undefined symbol"
        in done.stderr
    )
