"""The share of an update in which a plan expects learner ranks to compute."""

import pytest

from klear_core.config.rl import RlConfig
from klear_core.config.train import SftConfig
from klear_core.generate.model_size import known_size
from klear_core.pipeline.costs.throughput import ENOUGH, estimate_busy, row_work

QWEN3_8B = known_size("Qwen/Qwen3-8B")


def sft(num_rows, num_workers, context=1):
    runtime = {"num_workers": num_workers, "context_parallel": context, "activation_checkpointing": True}
    runtime["tokens_per_microbatch"] = 32768 * context
    return SftConfig.model_validate({"rows_per_step": num_rows, "max_tokens": 32768, "runtime": runtime})


def test_a_row_of_qwen3_8b_costs_what_the_learner_counts():
    assert row_work(QWEN3_8B, recomputes=True).attention_len == pytest.approx(44_684, abs=1)


def test_enough_rows_need_no_advice():
    busy = estimate_busy(sft(128, 8), QWEN3_8B)
    assert busy.share >= 0.97
    assert busy.better is None


def test_too_few_rows_for_32_ranks_are_named_with_the_bound_and_the_context_that_helps():
    busy = estimate_busy(sft(128, 32), QWEN3_8B)
    assert busy.share <= busy.bound < ENOUGH
    assert busy.better is not None
    assert (busy.better.context_parallel, busy.better.tokens_per_microbatch) == (2, 65536)
    assert busy.better_share >= 0.97
    # It is what a plan of the advised settings says.
    assert estimate_busy(sft(128, 32, context=2), QWEN3_8B).share == busy.better_share


def test_rows_of_an_rl_update_are_the_answers_of_its_mini_batch():
    cfg = RlConfig.model_validate({"minibatches_per_step": 4, "runtime": {"num_workers": 8, "context_parallel": 4}})
    busy = estimate_busy(cfg, QWEN3_8B)
    assert (busy.num_ranks, busy.num_rows) == (2, 128 * 8 // 4)
