"""The fused head on a GPU at Qwen's vocabulary against float64; tests/train/test_logps.py checks the same claims on CPU."""

import pytest
import torch

from klear_core.train.logps import HeadKernels, fused_loss, head_kernels_on, token_logps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

VOCAB, HIDDEN, TOKENS, TEMPERATURE = 151_936, 256, 600, 0.7
CHUNKS = {"max_logits": 250 * VOCAB}  # three of 200 tokens
GRADIENT_ERROR = {torch.float32: 1e-4, torch.bfloat16: 4e-3}
"""Relative. In bf16 the gradient by the logits and the results are rounded to 8 bits once each; twice this if chunks were too."""


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def case(request):
    g = torch.Generator("cuda").manual_seed(0)
    h = torch.randn(TOKENS, HIDDEN, generator=g, device="cuda").to(request.param).requires_grad_()
    w = (0.4 * torch.randn(VOCAB, HIDDEN, generator=g, device="cuda")).to(request.param).requires_grad_()
    return (
        h,
        w,
        torch.randint(VOCAB, (TOKENS,), generator=g, device="cuda"),
        torch.linspace(-1, 2, TOKENS, device="cuda"),
    )


def exact(h, w, target, temperature=TEMPERATURE):
    logp = torch.log_softmax(h.double() @ w.double().T / temperature, dim=-1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def wavy(logp, entropy, weight):
    return weight * (torch.exp(0.3 * logp) - 0.1 * logp * entropy)


def check(got_loss, got_logp, got_entropy, case):
    h, w, target, weight = case
    logp, entropy = exact(h, w, target)
    torch.testing.assert_close(got_logp.double(), logp, atol=2e-4, rtol=0)
    torch.testing.assert_close(got_entropy.double(), entropy, atol=2e-4, rtol=0)
    want = torch.autograd.grad(wavy(logp, entropy, weight.double()).sum(), (h, w))
    for a, b in zip(torch.autograd.grad(got_loss, (h, w)), want, strict=True):
        assert (a.double() - b.double()).norm() <= GRADIENT_ERROR[h.dtype] * b.double().norm()


def test_the_loss_formed_with_its_gradient_equals_float64(case):
    h, w, target, weight = case
    how = {"temperature": TEMPERATURE, "need_entropy": True, **CHUNKS}
    out = fused_loss(h, w, target, lambda lp, e, at: wavy(lp, e, weight[at]), **how)
    check(out.loss, out.logp_N, out.entropy_N, case)
    assert head_kernels_on("cuda").is_compiled


def test_log_probs_with_a_gradient_of_their_own_equal_float64(case):
    h, w, target, weight = case
    out = token_logps(h, w, target, temperature=TEMPERATURE, **CHUNKS)
    check(wavy(*out, weight).sum(), out.logp_N.detach(), out.entropy_N.detach(), case)


def test_cross_entropy_without_entropies_equals_float64(case):
    h, w, target, weight = case
    out = fused_loss(h, w, target, lambda lp, _e, at: -weight[at] * lp, **CHUNKS)
    logp, _ = exact(h, w, target, 1.0)
    torch.testing.assert_close(out.logp_N.double(), logp, atol=2e-4, rtol=0)
    for a, b in zip(
        torch.autograd.grad(out.loss, (h, w)), torch.autograd.grad(-(weight * logp).sum(), (h, w)), strict=True
    ):
        assert (a.double() - b.double()).norm() <= GRADIENT_ERROR[h.dtype] * b.double().norm()


def test_these_tolerances_would_see_logits_rounded_to_half_precision(case):
    h, w, target, _ = case
    logp, _ = exact(h, w, target, 1.0)
    rounded = torch.log_softmax((h.detach() @ w.detach().T).bfloat16().float(), -1).gather(1, target[:, None])[:, 0]
    assert (rounded.double() - logp).abs().max() > 50 * 2e-4


def test_chunks_of_all_lengths_share_one_kernel_of_each_pass():
    from torch._inductor.compile_fx import compile_fx

    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return compile_fx(graph, inputs)

    kernels, plain = HeadKernels(counting), HeadKernels()
    for num_tokens in (200, 33, 7, 256, 100):
        z = 5 * torch.randn(num_tokens, 5000, device="cuda")
        target = torch.randint(5000, (num_tokens, 1), device="cuda")
        dlogp, dentropy = torch.randn(2, num_tokens, device="cuda")
        found = []
        for way in (kernels, plain):
            logps = way.read(mine := z.clone(), target, need_entropy=True)
            found.append(
                (
                    logps.logp_CJ,
                    logps.entropy_C,
                    way.grad(mine, logps, target, dlogp[:, None], dentropy, dtype=torch.float32),
                )
            )
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    assert len(graphs) == 2


def test_memory_holds_one_chunk_and_never_all_logits(case):
    h, w, target, _ = case

    def peak(run):
        run()  # compiles, and asks for what libraries keep
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before

    def step():
        return torch.autograd.grad(fused_loss(h, w, target, lambda lp, _e, _at: -lp, **CHUNKS).loss, (h, w))

    chunk, weight_gradients = 4 * 200 * VOCAB, (4 + w.element_size()) * w.numel()
    assert peak(step) < 2 * chunk + weight_gradients + 64e6
    with torch.no_grad():
        assert (
            peak(lambda: fused_loss(h, w, target, lambda lp, _e, _at: -lp, **CHUNKS)) < chunk + 64e6
        )  # no gradient of the weight
