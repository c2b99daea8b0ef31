"""Samples as arrays say what the records say; a rank has the tokens of its own, and plans with the counts of all."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from rl_builders import random_samples, scored_samples

from klear_core.rl.sample_arrays import samples_here, tokens_of, with_tokens, without_tokens
from klear_core.types import TrainSample

SAMPLES = random_samples(6)


def shapes(sample: TrainSample) -> tuple[object, ...]:
    return sample.num_tokens, sample.num_loss_tokens, sample.num_prompt_tokens


def test_counts_are_known_without_any_token() -> None:
    counts = without_tokens(SAMPLES)
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
    sample = replace(SAMPLES[0], loss_mask=mask, token_ids=tuple(range(len(mask))), sampler_logps=(0.0,) * len(mask))
    (found,) = without_tokens([sample])
    assert found.runs == runs
    assert found.loss_mask.tolist() == list(mask)
    assert found.num_prompt_tokens == sample.num_prompt_tokens


def test_samples_with_equal_prompts_have_equal_keys_and_others_have_not() -> None:
    counts = without_tokens(SAMPLES)
    for a, x in zip(SAMPLES, counts, strict=True):
        for b, y in zip(SAMPLES, counts, strict=True):
            assert (a.prompt_key == b.prompt_key) == (x.prompt_key == y.prompt_key)


def test_a_rank_has_views_of_the_tokens_of_its_own_samples() -> None:
    tokens = pickle.loads(pickle.dumps(tokens_of(SAMPLES, [4, 1])))
    own = with_tokens(without_tokens(SAMPLES), tokens)
    assert [i for i, sample in enumerate(own) if len(sample.token_ids)] == [1, 4]
    for i in (1, 4):
        assert own[i].token_ids.tolist() == list(SAMPLES[i].token_ids)
        assert own[i].sampler_logps.tolist() == np.float32(SAMPLES[i].sampler_logps).tolist()
        assert np.shares_memory(own[i].token_ids, tokens.ids)
    assert [s.problem_id for s in samples_here(own)] == [SAMPLES[1].problem_id, SAMPLES[4].problem_id]


def test_only_samples_with_a_teacher_bring_teacher_log_probs() -> None:
    samples = scored_samples(4)
    counts, tokens = without_tokens(samples), tokens_of(samples, [3, 2, 0])
    assert [s.has_teacher for s in counts] == [True, True, False, True]
    assert len(tokens.teacher_logps) == samples[3].num_tokens + samples[0].num_tokens
    own = with_tokens(counts, tokens)
    for i in (0, 2, 3):
        assert own[i].teacher_logps.tolist() == np.float32(samples[i].teacher_logps).tolist()
    assert len(own[1].teacher_logps) == 0
    assert [len(s.teacher_logps) for s in samples_here(own)] == [samples[0].num_tokens, 0, samples[3].num_tokens]
    assert len(tokens_of(random_samples(3), [0, 1, 2]).teacher_logps) == 0


def test_a_rank_has_the_likeliest_tokens_of_its_own_samples() -> None:
    samples = []
    for i, sample in enumerate(scored_samples(4)):
        num = 2 * sample.num_loss_tokens if sample.has_teacher else 0
        samples.append(replace(sample, top_ids=tuple(range(i, i + num)), top_logps=(-float(i),) * num))
    own = with_tokens(without_tokens(samples), tokens_of(samples, [3, 2, 0]))
    for i in (0, 2, 3):
        assert tuple(own[i].top_ids.tolist()) == samples[i].top_ids
        assert own[i].record().top_logps == samples[i].top_logps
    assert (own[1].num_tops, len(own[1].top_ids)) == (len(samples[1].top_ids), 0)
