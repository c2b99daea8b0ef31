import math

import pytest
import torch

from klear_core.generate.decoder.decode import Decoding, draw, penalise, truncate, uniforms


def decoding(num_rows: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Decoding:
    return Decoding(
        keys_B=torch.arange(num_rows) * 7919 + 1,
        temperature_B=torch.full((num_rows,), temperature),
        top_p_B=torch.full((num_rows,), top_p),
        top_k_B=torch.full((num_rows,), top_k),
    )


def splitmix64(key: int, position: int) -> int:
    """As published, in Python's own integers."""
    mask = (1 << 64) - 1
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_uniforms_are_splitmix64() -> None:
    keys, positions = [0, 1, 2**62 + 12345, 2**63 - 1], [0, 5, 31, 40_000]
    got = uniforms(torch.tensor(keys), torch.tensor(positions)).tolist()
    assert got == [(splitmix64(k, p) >> 12) / 2**52 for k, p in zip(keys, positions, strict=True)]


def test_uniforms_are_uniform() -> None:
    keys, positions = torch.arange(400).repeat_interleave(250), torch.arange(250).repeat(400)
    draws = uniforms(keys, positions)
    counts = torch.histc(draws.float(), bins=20, min=0, max=1)
    chi2 = ((counts - 5000) ** 2 / 5000).sum().item()
    assert chi2 < 43.8  # 99.9 % of chi-square with 19 degrees of freedom
    assert draws.min() >= 0
    assert draws.max() < 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_with_the_probability_of_their_softmax(temperature: float) -> None:
    logits_V = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    tokens_B, logps_B = draw(
        logits_V.repeat(40_000, 1),
        torch.zeros(40_000, dtype=torch.int64),
        decoding(40_000, temperature=temperature),
        is_truncated=False,
    )
    probs_V = torch.softmax(logits_V / temperature, -1)
    frequency_V = torch.bincount(tokens_B, minlength=5) / 40_000
    assert frequency_V.tolist() == pytest.approx(probs_V.tolist(), abs=4 * math.sqrt(0.25 / 40_000))
    assert torch.allclose(logps_B, probs_V.log()[tokens_B], atol=1e-6)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits_BV = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()

    def kept(top_p: float) -> list[int]:
        out_BV = truncate(logits_BV, torch.ones(1), torch.tensor([0]), torch.tensor([top_p]))
        return out_BV[0].isfinite().nonzero()[:, 0].tolist()

    assert [kept(p) for p in (0.4, 0.6, 0.9, 0.96, 1.0)] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_top_p_works_on_what_top_k_left() -> None:
    logits_BV = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    out_BV = truncate(logits_BV, torch.ones(1), torch.tensor([2]), torch.tensor([0.5]))  # 0.4 of 0.7 is more than half
    assert out_BV[0].isfinite().tolist() == [True, False, False, False]


def test_truncation_is_row_by_row_and_knows_off() -> None:
    logits_BV = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).repeat(3, 1)
    out_BV = truncate(logits_BV, torch.ones(3), torch.tensor([0, 1, 3]), torch.ones(3))
    assert out_BV.isfinite().tolist() == [[True] * 4, [False, True, False, False], [False, True, True, True]]
    assert torch.equal(out_BV[0], logits_BV[0])


def test_cut_tokens_are_never_drawn() -> None:
    logits_BV = torch.randn(5000, 50, generator=torch.Generator().manual_seed(0))
    tokens_B, logps_B = draw(
        logits_BV, torch.zeros(5000, dtype=torch.int64), decoding(5000, top_k=3), is_truncated=True
    )
    assert (logits_BV.topk(3).indices == tokens_B[:, None]).any(-1).all()
    assert logps_B.isfinite().all()


def test_top_k_keeps_the_largest_logits_where_their_probabilities_round_to_one_number() -> None:
    """Near 3e8 neighbouring float32 numbers are 32 apart, so that less 3e8 the other four are the same."""
    logits_BV = torch.tensor([[3e8, 1.0, 3.0, 2.0, 3.0]])
    for top_k, kept in ((2, [0, 2]), (3, [0, 2, 4]), (4, [0, 2, 3, 4])):
        out_BV = truncate(logits_BV, torch.ones(1), torch.tensor([top_k]), torch.ones(1))
        assert out_BV[0].isfinite().nonzero()[:, 0].tolist() == kept


def test_top_p_adds_up_a_large_vocabulary_exactly() -> None:
    """Of 2^18 equal tokens a quarter is 2^16, one more or less; in float32 the sum goes astray."""
    out_BV = truncate(torch.zeros(1, 1 << 18), torch.ones(1), torch.tensor([0]), torch.tensor([0.25]))
    assert int(out_BV.isfinite().sum()) == 1 << 16
    out_BV = truncate(torch.zeros(1, 200_000), torch.ones(1), torch.tensor([0]), torch.tensor([0.9]))
    assert int(out_BV.isfinite().sum()) == pytest.approx(180_000, abs=1)


def test_greedy_ignores_truncation_and_reports_temperature_one() -> None:
    logits_BV = torch.tensor([[1.0, 4.0, 2.0]])
    tokens_B, logps_B = draw(
        logits_BV, torch.tensor([0]), decoding(1, temperature=0.0, top_k=1, top_p=0.1), is_truncated=True
    )
    assert tokens_B.tolist() == [1]
    assert logps_B.item() == pytest.approx(torch.log_softmax(logits_BV[0], -1)[1].item())


def test_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    out_BV = penalise(torch.tensor([[2.0, -2.0, 2.0, -2.0]]), torch.tensor([[0, 1, 1, 0]]), torch.tensor([2.0]))
    assert out_BV.tolist() == [[1.0, -4.0, 2.0, -2.0]]
