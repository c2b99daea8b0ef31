"""What a trace becomes: its tokens, its mask, or a counted reason."""

import pytest
from sft_traces import sums, trace

from klear_core.config.settings import YieldLimits
from klear_core.errors import DataError
from klear_core.prompts import build_byte_tokenizer
from klear_core.sft.examples import Unusable, build_store, check_store, make_examples


@pytest.fixture(scope="module")
def tokenizer():
    return build_byte_tokenizer()


def make(tokenizer, t, *, max_tokens=1000, overlong="drop"):
    return make_examples([t], tokenizer, max_tokens=max_tokens, overlong=overlong)[0]


def learnt(tokenizer, example):
    return tokenizer.decode([t for t, m in zip(example.token_ids, example.loss_mask, strict=True) if m])


def given(tokenizer, example):
    return tokenizer.decode([t for t, m in zip(example.token_ids, example.loss_mask, strict=True) if not m])


def test_loss_is_on_thinking_answer_and_end_of_turn_and_not_on_the_prompt(tokenizer):
    example = make(tokenizer, trace("1+1 = ?"))
    assert given(tokenizer, example) == "<|im_start|>user\n1+1 = ?<|im_end|>\n<|im_start|>assistant\n"
    assert learnt(tokenizer, example) == "<think>\n1+1=2\n</think>\n\n\\boxed{2}<|im_end|>"


@pytest.mark.parametrize("opening", ["<think>\\n", "<think>"])
def test_thinking_that_the_prompt_opens_is_not_learnt_twice(opening):
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\\n", f"assistant\\n{opening}")
    whole = (
        "<|im_start|>user\n1+1 = ?<|im_end|>\n<|im_start|>assistant\n<think>\n1+1=2\n</think>\n\n\\boxed{2}<|im_end|>"
    )
    begun = opening.replace("\\n", "\n")
    example = make(tokenizer, trace("1+1 = ?"))
    assert given(tokenizer, example) == whole.partition("<think>")[0] + begun
    assert given(tokenizer, example) + learnt(tokenizer, example) == whole
    cut = make(tokenizer, trace("1+1 = ?", "so far", "", finish_reason="length"))
    assert begun + learnt(tokenizer, cut) == "<think>\nso far"


def test_a_row_as_long_as_allowed_is_kept_whole(tokenizer):
    whole = make(tokenizer, trace("1+1 = ?"))
    assert make(tokenizer, trace("1+1 = ?"), max_tokens=len(whole.token_ids)) == whole


def test_an_overlong_row_is_dropped_or_cut_without_an_end(tokenizer):
    whole = make(tokenizer, trace("1+1 = ?"))
    most = len(whole.token_ids) - 1
    assert make(tokenizer, trace("1+1 = ?"), max_tokens=most) == Unusable(reason="overlong")
    cut = make(tokenizer, trace("1+1 = ?"), max_tokens=most, overlong="cut")
    assert cut.token_ids == whole.token_ids[:-1]
    assert len(cut.loss_mask) == most


def test_a_prompt_that_fills_the_row_is_never_cut(tokenizer):
    assert make(tokenizer, trace("1" * 100), max_tokens=60, overlong="cut") == Unusable(reason="overlong")


def test_a_truncated_trace_is_taught_without_closing_or_ending(tokenizer):
    example = make(tokenizer, trace("1+1 = ?", "so far", "", finish_reason="length"))
    assert learnt(tokenizer, example) == "<think>\nso far"
    example = make(tokenizer, trace("1+1 = ?", "done", "The ans", finish_reason="length"))
    assert learnt(tokenizer, example) == "<think>\ndone\n</think>\n\nThe ans"


@pytest.mark.parametrize(
    ("reasoning", "answer", "reason"),
    [("", "  ", "empty"), ("a<|im_end|>b", "c", "end_token_in_text")],
)
def test_what_cannot_be_taught_has_a_reason(tokenizer, reasoning, answer, reason):
    assert make(tokenizer, trace("q", reasoning, answer)) == Unusable(reason=reason)


def test_the_store_gives_back_every_row_and_a_ledger_that_adds_up(tokenizer, tmp_path):
    traces = [
        *sums(5),
        trace("q", "", ""),
        trace("long", "x" * 500),
        trace("cut off", "hm", "", finish_reason="length"),
    ]
    store = build_store(traces, tokenizer, tmp_path, max_tokens=200, overlong="drop")
    assert [store[i] for i in range(len(store))] == [make(tokenizer, t) for t in (*traces[:5], traces[-1])]
    assert store.sources == ["chain"] * 6
    assert (store.ledger.num_in, store.ledger.num_out) == (8, 6)
    assert store.ledger.dropped == {"empty": 1, "overlong": 1}
    assert store.ledger.noted == {"cut": 0, "taught_without_end": 1}


def test_cut_rows_are_noted(tokenizer, tmp_path):
    store = build_store([trace("long", "x" * 500)], tokenizer, tmp_path, max_tokens=200, overlong="cut")
    assert store.ledger.noted["cut"] == 1
    assert len(store[0].token_ids) == 200


def test_a_finished_store_is_reused_and_an_unfinished_one_is_not(tokenizer, tmp_path):
    (tmp_path / "tokens.bin").write_bytes(b"left by a kill")
    build_store(sums(3), tokenizer, tmp_path, max_tokens=200, overlong="drop")
    again = build_store(iter(()), tokenizer, tmp_path, max_tokens=200, overlong="drop")
    assert len(again) == 3


@pytest.mark.parametrize("stop_below", [0.0, 0.5])
def test_no_usable_trace_is_an_error_that_says_why_whatever_the_floor(tokenizer, tmp_path, stop_below):
    store = build_store(sums(2), tokenizer, tmp_path, max_tokens=20, overlong="drop")
    with pytest.raises(
        DataError, match=r"^0 of 2 traces give .*max_tokens = 20.*2 overlong; the first: problem .*raise sft.max"
    ):
        check_store(store, YieldLimits(stop_below=stop_below), max_tokens=20)


def test_traces_that_are_mostly_overlong_stop_training_and_some_are_a_warning(tokenizer, tmp_path):
    traces = [*sums(2), trace("a", "x" * 500), trace("b", "x" * 500), trace("c", "x" * 500)]
    build_store(traces, tokenizer, tmp_path, max_tokens=200, overlong="drop")
    store = build_store(iter(()), tokenizer, tmp_path, max_tokens=200, overlong="drop")  # as a rerun finds it
    with pytest.raises(
        DataError, match=r"2 of 5 traces .*3 overlong.*40\.0%, less than sft\.runtime\.rows\.stop_below = 0\.5"
    ):
        check_store(store, YieldLimits(), max_tokens=200)
    (warning,) = check_store(store, YieldLimits(stop_below=0.4), max_tokens=200)
    assert "2 of 5 traces" in warning
    assert check_store(store, YieldLimits(stop_below=0.1, warn_below=0.4), max_tokens=200) == ()
