"""Rows as arrays say what the samples say; a rank has the tokens of its own, and plans with the counts of all."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from rl_builders import random_samples

from klear_core.rl.rows import counts_of, samples_here, tokens_of, with_tokens
from klear_core.types import TrainSample

SAMPLES = random_samples(6)


def shapes(sample: TrainSample) -> tuple[object, ...]:
    return sample.num_tokens, sample.num_loss_tokens, sample.num_prompt_tokens


def test_counts_are_known_without_any_token() -> None:
    counts = counts_of(SAMPLES)
    assert [(r.num_tokens, r.num_loss_tokens, r.num_prompt_tokens) for r in counts] == [shapes(s) for s in SAMPLES]
    assert [list(r.loss_mask) for r in counts] == [list(s.loss_mask) for s in SAMPLES]
    assert all(len(r.token_ids) == 0 for r in counts)


@pytest.mark.parametrize(
    ("mask", "runs"),
    [
        ((False, True, True), (1, 2)),
        ((False, True, False, True), (1, 1, 1, 1)),
        ((False, False, True, True, False), (2, 2, 1)),
        ((False, False), (2,)),
        ((True, False), (0, 1, 1)),
    ],
)
def test_a_mask_is_kept_as_the_lengths_of_its_runs(mask: tuple[bool, ...], runs: tuple[int, ...]) -> None:
    sample = replace(SAMPLES[0], loss_mask=mask, token_ids=tuple(range(len(mask))), old_logps=(0.0,) * len(mask))
    (row,) = counts_of([sample])
    assert row.runs == runs
    assert row.loss_mask.tolist() == list(mask)
    assert row.num_prompt_tokens == sample.num_prompt_tokens


def test_rows_with_equal_prompts_have_equal_keys_and_others_have_not() -> None:
    counts = counts_of(SAMPLES)
    for a, x in zip(SAMPLES, counts, strict=True):
        for b, y in zip(SAMPLES, counts, strict=True):
            assert (a.prompt_key == b.prompt_key) == (x.prompt_key == y.prompt_key)


def test_a_rank_has_views_of_the_tokens_of_its_own_rows() -> None:
    tokens = pickle.loads(pickle.dumps(tokens_of(SAMPLES, [4, 1])))
    rows = with_tokens(counts_of(SAMPLES), tokens)
    assert [i for i, row in enumerate(rows) if len(row.token_ids)] == [1, 4]
    for i in (1, 4):
        assert rows[i].token_ids.tolist() == list(SAMPLES[i].token_ids)
        assert rows[i].old_logps.tolist() == np.float32(SAMPLES[i].old_logps).tolist()
        assert np.shares_memory(rows[i].token_ids, tokens.ids)
    assert [row.problem_id for row in samples_here(rows)] == [SAMPLES[1].problem_id, SAMPLES[4].problem_id]
