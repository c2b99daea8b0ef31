"""Linear layers that multiply in bfloat16 on CPU, against float64 and as one rank trains with them."""

import pytest
import torch
from tiny_models import ONE, packed, random_rows, tiny_folder
from torch import nn

from klear_core.config.train import OptimConfig
from klear_core.products import instructions
from klear_core.sft.loop import sft_heads
from klear_core.train.distributed import parallelise
from klear_core.train.kernels import registry
from klear_core.train.kernels.half_linear import PRODUCTS, halve_products, linear
from klear_core.train.logps import fused_loss
from klear_core.train.model import load_model
from klear_core.train.step import Updater

pytestmark = pytest.mark.skipif(not instructions(), reason="this processor has neither AVX512_BF16 nor AMX")


def relative(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


def test_outputs_and_gradients_lose_what_bfloat16_inputs_lose_and_are_float32():
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 37, 50, generator=g), torch.randn(70, 50, generator=g)
    b, dy = torch.randn(70, generator=g), torch.randn(2, 37, 70, generator=g)
    layers = nn.Linear(50, 30), nn.Linear(50, 40)  # two layers are one product
    with torch.no_grad():
        for layer, weight, bias in zip(layers, w.split([30, 40]), b.split([30, 40]), strict=True):
            layer.weight.copy_(weight), layer.bias.copy_(bias)
    halve_products(nn.ModuleList(layers))
    leaves = [x.clone().requires_grad_(), *(p for layer in layers for p in layer.parameters())]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y = linear(leaves[0], *layers)
    wanted = torch.cat([nn.functional.linear(exact[0], *exact[i : i + 2]) for i in (1, 3)], dim=-1)
    found, grads = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(wanted, exact, dy.double())
    for a, e in zip((y, *found), (wanted, *grads), strict=True):
        assert a.dtype == torch.float32
        assert relative(a.detach(), e.detach()) < 4e-3  # two inputs, each rounded by up to 2^-9
    assert relative(y.detach(), wanted.detach()) > 1e-4  # and they were


def test_a_path_that_failed_its_trial_leaves_the_layer_in_float32():
    layer = nn.Sequential(nn.Linear(8, 8))
    x = torch.randn(3, 8)
    plain = layer(x)
    halve_products(layer)
    assert not torch.equal(layer(x), plain)
    with registry.replaced({}):
        registry.leave_out(PRODUCTS, "wrong")
        assert torch.equal(layer(x), plain)


def test_the_gradient_of_a_float32_head_is_not_rounded():
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, 24, generator=g).bfloat16(), torch.randn(300, 24, generator=g)
    target = torch.randint(0, 300, (40,), generator=g)
    leaf, exact = weight.clone().requires_grad_(), weight.double().requires_grad_()
    fused_loss(hidden, leaf, target, lambda logp, _entropy, _at: -logp).loss.backward()
    nn.functional.cross_entropy(hidden.double() @ exact.T, target, reduction="sum").backward()
    assert relative(leaf.grad, exact.grad) < 4e-3
    assert not torch.equal(leaf.grad, leaf.grad.bfloat16().float())


def losses(folder, dtype):
    policy = parallelise(load_model(folder, device="cpu"), ONE, dtype=dtype, activation_checkpointing=False)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    updater = Updater(policy, OptimConfig(lr=1e-2), ONE, num_steps=6)
    rows = random_rows([20, 31, 12])
    batch = packed(rows)
    heads = sft_heads(batch.micro_batches, rows, "token")
    return [updater.update(batch, heads, step=i).loss for i in range(6)]


def test_a_model_learns_as_in_float32(tmp_path):
    folder = tiny_folder(tmp_path)
    half, whole = losses(folder, "bfloat16"), losses(folder, "float32")
    assert half != whole
    assert half == pytest.approx(whole, rel=0.02)
    assert half[-1] < half[0]
