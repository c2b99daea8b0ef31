"""The SFT loss by hand: its value, its mask, its two normalisations."""

import math

import pytest
import torch

from klear_core.sft.loop import row_scales, sft_heads
from klear_core.train.packing import pack
from klear_core.types import SftExample


def row(*tokens: int, prompt: int) -> SftExample:
    return SftExample(problem_id="p", token_ids=tokens, loss_mask=(False,) * prompt + (True,) * (len(tokens) - prompt))


LONG, SHORT = row(0, 1, 1, 1, prompt=1), row(0, 0, 1, prompt=2)  # three loss tokens and one


def loss_of(rows, normalise, tokens_per_microbatch=100):
    """Token 1 has probability 1/2 after a 0 and 1/4 after a 1: hidden states are one-hot, the head holds the logits."""
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    hidden = torch.eye(2)
    micro_batches = pack(rows, tokens_per_microbatch=tokens_per_microbatch).micro_batches
    total = 0.0
    for micro, head in zip(micro_batches, sft_heads(micro_batches, rows, normalise), strict=True):
        before = micro.token_ids_1T.flatten()[micro.predictor_N]
        total += head(hidden[before], logits.T).loss.item()
    return total


def test_token_normalisation_is_the_mean_over_all_loss_tokens():
    want = (math.log(2) + 2 * math.log(4) + math.log(2)) / 4
    assert loss_of([LONG, SHORT], "token") == pytest.approx(want)


def test_sample_normalisation_is_the_mean_of_row_means():
    want = ((math.log(2) + 2 * math.log(4)) / 3 + math.log(2)) / 2
    assert loss_of([LONG, SHORT], "sample") == pytest.approx(want)


@pytest.mark.parametrize("normalise", ["token", "sample"])
def test_micro_batches_of_one_row_add_up_to_the_whole(normalise):
    assert loss_of([LONG, SHORT, LONG], normalise, 1) == pytest.approx(loss_of([LONG, SHORT, LONG], normalise))


@pytest.mark.parametrize("normalise", ["token", "sample"])
def test_weights_of_all_loss_tokens_sum_to_one(normalise):
    scales = row_scales([LONG, SHORT, SHORT], normalise)
    assert (scales * torch.tensor([3, 1, 1])).sum().item() == pytest.approx(1.0)


def test_prompt_tokens_do_not_count():
    assert loss_of([row(0, 1, 1, 0, 1, prompt=4)], "token") == pytest.approx(math.log(2))
