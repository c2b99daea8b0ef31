"""The kernels of a Qwen3's elementwise parts, compiled for CPU: `tests/gpu` has them on CUDA, inside a model."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from klear_core.train.kernels.fused import Kernels

B, T, HEADS, KV_HEADS, D, HIDDEN = 1, 37, 4, 2, 16, 48
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
"""Relative: transformers rounds between its operations, the kernels once."""


@pytest.fixture(scope="module", params=["eager", "inductor"])
def kernels(request) -> Kernels:
    if request.param == "inductor":
        pytest.importorskip("torch._inductor")
    return Kernels(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request) -> torch.dtype:
    return request.param


def draw(dtype, *shapes):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g).to(dtype).requires_grad_() for shape in shapes]


def same_with_gradients(found, wanted, leaves, dtype):
    """Values, and gradients of a weighted sum of them."""
    g = torch.Generator().manual_seed(1)
    seeds = [torch.randn(w.shape, generator=g).to(w.dtype) for w in wanted]
    gradients = [torch.autograd.grad(outs, leaves, seeds) for outs in (found, wanted)]
    for a, b in zip((*found, *gradients[0]), (*wanted, *gradients[1]), strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).norm() <= ROUNDING[dtype] * b.double().norm()


def rms_norm(weight):
    module = Qwen3RMSNorm(len(weight), eps=1e-5)
    module.weight = torch.nn.Parameter(weight)
    return module


@pytest.mark.slow
def test_the_norm_is_that_of_transformers(kernels, dtype):
    x, weight = draw(dtype, (B, T, HIDDEN), (HIDDEN,))
    module = rms_norm(weight.detach())
    found = kernels.norm(x, module.weight, 1e-5)
    same_with_gradients([found], [module(x)], [x, module.weight], dtype)
    assert kernels.norm.is_compiled


@pytest.mark.slow
def test_the_gate_is_silu_times_the_other_half(kernels, dtype):
    gate, up = draw(dtype, (B, T, HIDDEN), (B, T, HIDDEN))
    same_with_gradients([kernels.gate(gate, up)], [torch.nn.functional.silu(gate) * up], [gate, up], dtype)
    assert kernels.gate.is_compiled


@pytest.mark.slow
def test_heads_are_normed_and_turned_as_transformers_does(kernels, dtype):
    q, k, q_weight, k_weight = draw(dtype, (B, T, HEADS, D), (B, T, KV_HEADS, D), (D,), (D,))
    angle = torch.arange(T)[:, None] * 0.1 ** torch.arange(D // 2)
    cos, sin = (f(torch.cat((angle, angle), dim=-1))[None].to(dtype) for f in (torch.cos, torch.sin))
    q_norm, k_norm = rms_norm(q_weight.detach()), rms_norm(k_weight.detach())
    wanted = apply_rotary_pos_emb(q_norm(q), k_norm(k), cos, sin, unsqueeze_dim=2)
    found = kernels.rotate(q, k, q_norm.weight, k_norm.weight, cos, sin, 1e-5)
    same_with_gradients(found, wanted, [q, k, q_norm.weight, k_norm.weight], dtype)
    assert kernels.rotate.is_compiled


def test_lines_of_all_lengths_share_a_few_compilations(dtype):
    class Backend:
        num_graphs = 0

        def __call__(self, graph, _inputs):
            self.num_graphs += 1
            return graph.forward

    backend = Backend()
    kernels = Kernels(backend)
    for num_tokens in (7, 64, 3, 2, 65, 1000, 7):
        x, weight = draw(dtype, (B, num_tokens, HIDDEN), (HIDDEN,))
        kernels.norm(x, weight, 1e-5)
    assert 1 <= backend.num_graphs <= 2  # at most the first length's own, then one for all


def test_what_cannot_be_compiled_runs_as_it_is_and_says_so_once(caplog):
    def broken(_graph, _inputs):
        raise RuntimeError("no compiler here")

    kernels = Kernels(broken)
    x, weight = draw(torch.float32, (3, HIDDEN), (HIDDEN,))
    for _ in range(2):
        torch.testing.assert_close(kernels.norm(x, weight, 1e-5), rms_norm(weight.detach())(x), atol=1e-5, rtol=0)
    assert not kernels.norm.is_compiled
    assert len([r for r in caplog.records if "runs uncompiled" in r.message]) == 1
