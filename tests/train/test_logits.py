"""The passes over a chunk of logits: compiled and not, they say the same; the fused head's own tests check what they say."""

import pytest
import torch

from klear_core.train.logps import HeadKernels


def chunk(num_tokens, vocab, *, seed=0):
    g = torch.Generator().manual_seed(seed)
    z = 5 * torch.randn(num_tokens, vocab, generator=g)
    target = torch.randint(vocab, (num_tokens, 1), generator=g)
    return z, target, torch.randn(num_tokens, generator=g), torch.randn(num_tokens, generator=g)


def both_passes(kernels, z, target, dlogp, dentropy=None, *, need_entropy=True, dtype=torch.float32):
    logps = kernels.read(z := z.clone(), target, need_entropy=need_entropy)
    return (
        logps.logp_CJ[:, 0],
        logps.entropy_C,
        kernels.grad(z, logps, target, dlogp[:, None], dentropy, dtype=dtype),
    )


class Backend:
    """Compiles nothing, but counts how often it was asked to."""

    def __init__(self):
        self.num_graphs = 0

    def __call__(self, graph, _inputs):
        self.num_graphs += 1
        return graph.forward


def test_chunks_of_all_lengths_share_one_compilation_of_each_pass():
    backend = Backend()
    kernels = HeadKernels(backend)
    for num_tokens in (7, 64, 3, 2, 65, 1000, 7):  # full chunks and last ones, of one micro-batch and of the next
        for a, b in zip(
            both_passes(kernels, *chunk(num_tokens, 50)),
            both_passes(HeadKernels(), *chunk(num_tokens, 50)),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
    assert backend.num_graphs == 2
    for _ in range(3):
        both_passes(kernels, *chunk(1, 50))  # torch treats a length of 1 as a shape of its own
    assert backend.num_graphs == 4


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 0), (torch.bfloat16, 2**-8)])
def test_compiled_passes_equal_those_that_are_not(dtype, rounding):
    """The compiler is that of CUDA; its kernels for CPU stand in for Triton's."""
    compiled = HeadKernels("inductor")
    for num_tokens in (33, 12):
        z, target, dlogp, dentropy = chunk(num_tokens, 1003)
        z[0, 5], z[1] = -torch.inf, 1e4 * z[1]  # a forbidden token, and logits far from 0
        z[2] += 1e4
        want = both_passes(HeadKernels(), z, target, dlogp, dentropy, dtype=dtype)
        got = both_passes(compiled, z, target, dlogp, dentropy, dtype=dtype)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-6 + rounding)
        assert got[2].dtype == dtype
    assert compiled.is_compiled


def ours(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("klear_core")]


def test_where_the_compiler_fails_it_is_said_once_and_the_passes_run_without(caplog):
    def broken(graph, _inputs):
        raise OSError("no C compiler here")

    kernels = HeadKernels(broken)
    for _ in range(2):
        for a, b in zip(both_passes(kernels, *chunk(5, 20)), both_passes(HeadKernels(), *chunk(5, 20)), strict=True):
            assert torch.equal(a, b)
    assert not kernels.is_compiled
    (message,) = ours(caplog)
    assert "no C compiler here" in message


def test_a_compiler_that_fails_between_the_passes_loses_nothing(caplog):
    calls = []

    def broken_later(graph, _inputs):
        calls.append(graph)
        if len(calls) == 2:
            raise OSError("disk full")
        return graph.forward

    for a, b in zip(
        both_passes(HeadKernels(broken_later), *chunk(5, 20)), both_passes(HeadKernels(), *chunk(5, 20)), strict=True
    ):
        torch.testing.assert_close(a, b)
    assert len(ours(caplog)) == 1
