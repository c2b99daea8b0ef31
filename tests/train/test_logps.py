"""The fused head against hand values and against plain float64."""

import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from klear_core.products import instructions
from klear_core.train.logps import TopTokens, chunk_size, fused_loss, token_logps

F64 = torch.float64


def plain(hidden, weight, target, temperature):
    logp = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def inputs(num_tokens=13, hidden=5, vocab=11, dtype=F64, seed=0):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(num_tokens, hidden, generator=g, dtype=dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=g, dtype=dtype).requires_grad_()
    return h, w, torch.randint(vocab, (num_tokens,), generator=g)


def wavy(logp, entropy, weight):
    """A pointwise loss with curvature in both inputs."""
    return weight * (torch.exp(0.3 * logp) - 0.7 * logp * entropy)


def test_two_equal_logits_give_half_and_log_two():
    h, w = torch.tensor([[1.0]]), torch.tensor([[3.0], [3.0]])
    out = token_logps(h, w, torch.tensor([1]))
    assert out.logp_N.item() == pytest.approx(math.log(0.5))
    assert out.entropy_N.item() == pytest.approx(math.log(2))


def test_temperature_two_halves_the_logits():
    h, w = torch.tensor([[2.0]]), torch.tensor([[math.log(9.0) / 2], [0.0]])
    assert token_logps(h, w, torch.tensor([0])).logp_N.exp().item() == pytest.approx(0.9)
    assert token_logps(h, w, torch.tensor([0]), temperature=2.0).logp_N.exp().item() == pytest.approx(0.75)


def test_gradient_of_one_token_is_p_minus_onehot():
    h = torch.tensor([[1.0]], requires_grad=True)
    w = torch.tensor([[0.0], [math.log(3.0)]], requires_grad=True)  # p = 1/4, 3/4
    fused_loss(h, w, torch.tensor([0]), lambda logp, _e, _w: -logp).loss.backward()
    assert w.grad.flatten().tolist() == pytest.approx([-0.75, 0.75])
    assert h.grad.item() == pytest.approx(0.75 * math.log(3.0))


def test_a_top_token_pulls_like_a_target_of_its_weight():
    """p = 1/4, 3/4; the loss is -0.4 log p_1 beside -log p_0, so dz = 1.4 p - (1, 0.4)."""
    h = torch.tensor([[1.0]], requires_grad=True)
    w = torch.tensor([[0.0], [math.log(3.0)]], requires_grad=True)
    top_tokens = TopTokens(torch.tensor([[1]]), torch.tensor([[0.4]]))
    out = fused_loss(h, w, torch.tensor([0]), lambda logp, _e, _w: -logp, top_tokens=top_tokens)
    assert out.top_weighted_logp_N.tolist() == pytest.approx([0.4 * math.log(0.75)])
    assert out.loss.item() == pytest.approx(-math.log(0.25) - 0.4 * math.log(0.75))
    out.loss.backward()
    assert w.grad.flatten().tolist() == pytest.approx([1.4 / 4 - 1, 1.4 * 3 / 4 - 0.4])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tokens_per_chunk", [1, 4, 13])
def test_top_tokens_equal_plain_float64_also_where_the_target_is_one(temperature, tokens_per_chunk):
    h, w, target = inputs()
    ids = torch.stack([target, (target + 1) % 11, (target + 5) % 11], dim=1)
    ids[::2, 0] = (target[::2] + 3) % 11
    weights, weight = torch.rand(13, 3, dtype=F64), torch.linspace(-1, 2, 13, dtype=F64)
    logp_NV = torch.log_softmax(h @ w.T / temperature, dim=-1)
    want = wavy(*plain(h, w, target, temperature), weight).sum() - (weights * logp_NV.gather(1, ids)).sum()
    want_grads = torch.autograd.grad(want, (h, w))

    got = fused_loss(
        h,
        w,
        target,
        lambda lp, e, at: wavy(lp, e, weight[at]),
        need_entropy=True,
        temperature=temperature,
        max_logits=tokens_per_chunk * 11,
        top_tokens=TopTokens(ids, weights),
    )
    torch.testing.assert_close(got.loss, want)
    torch.testing.assert_close(torch.autograd.grad(got.loss, (h, w)), want_grads)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("tokens_per_chunk", [1, 4, 13])
def test_both_forms_equal_plain_float64(temperature, tokens_per_chunk):
    h, w, target = inputs()
    how = {"temperature": temperature, "max_logits": tokens_per_chunk * 11}
    weight = torch.linspace(-1, 2, 13, dtype=F64)
    want = wavy(*plain(h, w, target, temperature), weight).sum()
    want_h, want_w = torch.autograd.grad(want, (h, w))

    fused = fused_loss(h, w, target, lambda lp, e, at: wavy(lp, e, weight[at]), need_entropy=True, **how)
    got = torch.autograd.grad(fused.loss, (h, w))
    torch.testing.assert_close(fused.loss, want)
    torch.testing.assert_close(got, (want_h, want_w))

    joined = wavy(*token_logps(h, w, target, **how), weight).sum()
    torch.testing.assert_close(joined, want)
    torch.testing.assert_close(torch.autograd.grad(joined, (h, w)), (want_h, want_w))


def test_second_factor_scales_the_gradient():
    h, w, target = inputs()
    loss = fused_loss(h, w, target, lambda lp, _e, _at: -lp).loss
    once = torch.autograd.grad(loss, h, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(3 * loss, h)[0], 3 * once)


def test_float32_agrees_with_float64_on_a_large_vocabulary():
    h, w, target = inputs(num_tokens=7, hidden=16, vocab=50_000, dtype=torch.float32)
    logp, entropy = plain(h.double(), w.double(), target, 1.0)
    out = token_logps(h, w, target)
    torch.testing.assert_close(out.logp_N.double(), logp, atol=2e-5, rtol=0)
    torch.testing.assert_close(out.entropy_N.double(), entropy, atol=2e-5, rtol=0)


def test_bfloat16_weights_give_float32_logps_and_bfloat16_gradients():
    h, w, target = inputs(dtype=torch.bfloat16)
    out = fused_loss(h, w, target, lambda lp, _e, _at: -lp / 13)
    out.loss.backward()
    assert out.logp_N.dtype == torch.float32
    assert w.grad.dtype == torch.bfloat16
    want_h, want_w = torch.autograd.grad(-plain(h.double(), w.double(), target, 1.0)[0].mean(), (h, w))
    torch.testing.assert_close(w.grad, want_w, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(h.grad, want_h, atol=2e-2, rtol=2e-2)


def test_half_precision_is_rounded_where_it_comes_in_and_nowhere_else():
    g = torch.Generator().manual_seed(0)
    h = torch.randn(64, 128, generator=g).bfloat16().requires_grad_()
    w = (torch.randn(5000, 128, generator=g) / 2).bfloat16().requires_grad_()  # logits of standard deviation 5.7
    target = torch.randint(5000, (64,), generator=g)
    logp, entropy = plain(h.double(), w.double(), target, 1.0)
    fused = fused_loss(h, w, target, lambda lp, _e, _at: -lp, need_entropy=True, max_logits=4 * 5000)
    joined = token_logps(h, w, target, max_logits=4 * 5000)
    for out in (fused, joined):
        torch.testing.assert_close(
            out.logp_N.double(), logp, atol=5e-5, rtol=0
        )  # 0.06 if logits were rounded before the softmax
        torch.testing.assert_close(out.entropy_N.double(), entropy, atol=5e-5, rtol=0)
    want = torch.autograd.grad(-logp.sum(), (h, w), retain_graph=True)
    for loss in (fused.loss, -joined.logp_N.sum()):
        for got, exact in zip(torch.autograd.grad(loss, (h, w)), want, strict=True):
            assert torch.equal(got, exact) or (got - exact).norm() <= 2.5e-3 * exact.norm()  # bf16's own rounding, once


def product_flop(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_a_training_step_of_the_head_is_three_products_and_no_logits_are_computed_twice():
    h, w, target = inputs(num_tokens=13, hidden=5, vocab=11, dtype=torch.float32)
    one = 2 * 13 * 5 * 11
    how = {"max_logits": 4 * 11}  # chunks of 4, 4, 4 and 1

    def step(weight):
        fused_loss(h, weight, target, lambda lp, _e, _at: -lp, **how).loss.backward()

    assert product_flop(lambda: step(w)) == 3 * one
    assert product_flop(lambda: step(w.detach())) == 2 * one
    assert product_flop(lambda: token_logps(h, w, target, **how).logp_N.sum().backward()) == 4 * one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gradients_there_is_one_product_and_nothing_the_size_of_the_weight_in_float32(dtype):
    h, w, target = inputs(num_tokens=4, hidden=64, vocab=100, dtype=dtype)
    is_half = dtype == torch.bfloat16
    if is_half and instructions():
        pytest.skip("this processor multiplies bfloat16 without torch, whose products are counted here")
    weight_in_float32 = 100 * 64 * 4 if is_half else 0  # what comes in half is computed in float32 here
    with torch.no_grad():
        for run in (lambda: fused_loss(h, w, target, lambda lp, _e, _at: -lp), lambda: token_logps(h, w, target)):
            assert product_flop(run) == 2 * 4 * 64 * 100
            assert peak_bytes(run, h, w, target) < weight_in_float32 + 100 * 64 * 4


class LiveTensors(TorchDispatchMode):
    """Bytes of all that operations have made and that is still there, at its highest."""

    def __init__(self, *known):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.live = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if storage._cdata not in self.known and storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def peak_bytes(run, *known):
    with LiveTensors(*known) as tensors:
        run()
    return tensors.peak


def test_a_chunk_of_logits_is_all_that_is_ever_held_and_two_with_entropies():
    num_tokens, hidden, vocab, tokens_per_chunk = 64, 4, 3000, 8
    h, w, target = inputs(num_tokens, hidden, vocab, dtype=torch.float32)
    chunk, whole = 4 * tokens_per_chunk * vocab, 4 * num_tokens * vocab
    gradients = 2 * 4 * (vocab + num_tokens) * hidden  # formed, and scaled by what comes from above
    weight = torch.linspace(-1, 2, num_tokens)

    def fused(loss_fn, **how):
        fused_loss(h, w, target, loss_fn, max_logits=tokens_per_chunk * vocab, **how).loss.backward()

    def joined():
        wavy(*token_logps(h, w, target, max_logits=tokens_per_chunk * vocab), weight).sum().backward()

    def unfused():
        torch.nn.functional.cross_entropy(h @ w.T, target).backward()

    runs = (
        (1, lambda: fused(lambda lp, _e, _at: -lp)),
        (2, lambda: fused(lambda lp, _e, _at: -lp, need_entropy=True, temperature=0.7)),
        (2, lambda: fused(lambda lp, e, at: wavy(lp, e, weight[at]), need_entropy=True)),
        (2, joined),
    )
    for num_chunks, run in runs:
        assert num_chunks * chunk <= peak_bytes(run, h, w, target) < num_chunks * chunk + gradients + 0.1 * chunk
    assert peak_bytes(unfused, h, w, target) > 2 * whole  # the meter sees whole logits where there are some


def test_extreme_logits_stay_finite():
    h = torch.tensor([[1.0], [1.0]], requires_grad=True)
    w = torch.tensor([[3e4], [-3e4], [0.0]], requires_grad=True)
    out = token_logps(h, w, torch.tensor([0, 1]))
    assert out.logp_N.tolist() == [0.0, -6e4]
    assert out.entropy_N.tolist() == [0.0, 0.0]
    (out.logp_N.sum() + out.entropy_N.sum()).backward()
    assert torch.isfinite(w.grad).all()
    assert torch.isfinite(h.grad).all()


def test_a_loss_that_ignores_its_tokens_has_zero_gradient():
    h, w, target = inputs()
    fused_loss(h, w, target, lambda lp, _e, _at: torch.zeros_like(lp)).loss.backward()
    assert h.grad.abs().max() == 0
    assert w.grad.abs().max() == 0


def test_no_tokens_give_no_loss_and_zero_gradients():
    h, w, target = inputs(num_tokens=0)
    out = fused_loss(h, w, target, lambda lp, _e, _at: -lp)
    out.loss.backward()
    assert out.loss == 0
    assert w.grad.abs().max() == 0


def test_entropy_is_nan_where_nobody_asked_for_it():
    h, w, target = inputs()
    assert fused_loss(h, w, target, lambda lp, _e, _at: -lp).entropy_N.isnan().all()


def test_chunks_are_even_and_within_the_budget():
    assert chunk_size(torch.empty(10, 1), 9, 40) == 3  # at most 4 at once: 3 chunks of 3, not 4 + 4 + 1
    assert chunk_size(torch.empty(100, 1), 9, 40) == 1
    assert chunk_size(torch.empty(320, 1), 4096, None) == 4096  # a tiny vocabulary is one chunk
