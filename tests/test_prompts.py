"""Questions in, token ids out, and back again without loss."""

from pathlib import Path

import pytest

from klear_core.errors import ConfigError
from klear_core.prompts import (
    CHAT_TEMPLATE,
    build_byte_tokenizer,
    check_template,
    completed,
    continuation,
    decode_response,
    encode_response,
    load_tokenizer,
    opening_of,
    padded_vocab_size,
    render_prompt,
    render_response,
    split_response,
)
from klear_core.types import Completion


@pytest.fixture(scope="module")
def tokenizer():
    return build_byte_tokenizer()


@pytest.mark.parametrize(
    "text", ["3+4*7-2 mod 10 = ?", "π ≈ 3,14 — naïve 你好 🙂", "", "  two  spaces\n\ttab\x00", "\u200d\ufeff<|not|>"]
)
def test_any_text_comes_back_from_its_bytes(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert decode_response(tokenizer, ids) == text


@pytest.mark.parametrize("tag", ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"])
def test_every_special_token_is_one_token(tokenizer, tag):
    assert len(tokenizer.encode(f"a{tag}b", add_special_tokens=False)) == 3


def test_vocabulary_is_256_bytes_and_5_tags_padded_to_320(tokenizer):
    assert len(tokenizer) == 261
    assert padded_vocab_size(tokenizer) == 320


def test_prompt_is_one_user_turn_and_the_opening_of_the_answer(tokenizer):
    ids = render_prompt(tokenizer, "1+1 = ?")
    assert tokenizer.decode(ids) == "<|im_start|>user\n1+1 = ?<|im_end|>\n<|im_start|>assistant\n"


def test_response_ends_with_the_end_of_turn_and_decodes_without_it(tokenizer):
    text = render_response("1+1=2", "\\boxed{2}")
    ids = encode_response(tokenizer, text)
    assert text == "<think>\n1+1=2\n</think>\n\n\\boxed{2}"
    assert ids[-1] == tokenizer.eos_token_id
    assert decode_response(tokenizer, ids) == text


@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "is_closed"),
    [
        ("<think>\na\n</think>\n\nb", "a", "b", True),
        ("<think>\na", "a", "", False),
        ("a</think>b", "a", "b", True),
        ("<think>a</think>x</think>b", "a</think>x", "b", True),
        ("<think>a</think>", "a", "", True),
        ("just text", "just text", "", False),
        ("", "", "", False),
    ],
)
def test_a_response_splits_at_its_last_closing_tag(text, reasoning, answer, is_closed):
    split = split_response(text)
    assert (split.reasoning, split.answer, split.is_closed) == (reasoning, answer, is_closed)


def test_a_saved_tokenizer_loads_as_it_was(tokenizer, tmp_path: Path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    check_template(loaded)
    assert render_prompt(loaded, "2*3 = ?") == render_prompt(tokenizer, "2*3 = ?")
    assert loaded.eos_token_id == tokenizer.eos_token_id == 258
    assert loaded.pad_token_id == tokenizer.pad_token_id == 256


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"{tmp_path}.*tokenizer_config.json"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path):
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no chat template"):
        load_tokenizer(tmp_path)


def test_the_end_token_is_what_ends_a_turn_even_if_the_folder_names_the_end_of_a_document(tmp_path: Path):
    tokenizer = build_byte_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"  # as Qwen3-8B-Base has it
    with pytest.raises(
        ConfigError, match=r"ends in '<\|im_end\|>', but the tokenizer's eos_token is '<\|endoftext\|>'"
    ):
        check_template(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    check_template(loaded)
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_a_template_that_writes_the_date_gives_the_same_prompt_on_every_day(tokenizer):
    """Llama 3.2, SmolLM3 and others do: a run that goes on after midnight must train on the prompts it sampled from."""
    dated = build_byte_tokenizer()
    dated.chat_template = "Today is {{ strftime_now('%d %b %Y %H:%M:%S.%f') }}.\n" + CHAT_TEMPLATE
    text = dated.decode(render_prompt(dated, "2*3 = ?"))
    assert text.startswith("Today is 26 Jul 2024 00:00:00.000000.\n")
    assert text.endswith(tokenizer.decode(render_prompt(tokenizer, "2*3 = ?")))


R1_TEMPLATE = (
    "{{ '<|endoftext|>' }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<|im_start|>' + message['content'] }}{% else %}"
    "{{ '\\n\\n' + message['content'].split('</think>')[-1] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\n<think>\\n' }}{% endif %}"
)
"""As DeepSeek-R1-Distill has it: a token at the start, turns without names, thoughts left out, and thinking opened."""


def opened(template: str):
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        (CHAT_TEMPLATE, ""),
        (CHAT_TEMPLATE.replace("assistant\\n", "assistant\\n<think>\\n"), "<think>\n"),
        (CHAT_TEMPLATE.replace("assistant\\n", "assistant\\n<think>"), "<think>"),
        (CHAT_TEMPLATE.replace("assistant\\n", "assistant\\n<think>\\n\\n"), "<think>\n\n"),
        (R1_TEMPLATE, "<think>\n"),
    ],
)
def test_prompt_and_continuation_are_one_response_whatever_the_template_opens(template, opening):
    tokenizer = opened(template)
    check_template(tokenizer)
    assert opening_of(tokenizer) == opening
    rest = continuation(render_response("1+1=2", "\\boxed{2}"), opening)
    whole = tokenizer.decode(render_prompt(tokenizer, "1+1 = ?")) + rest
    assert whole.count("<think>") == 1
    assert split_response(opening + rest) == split_response(render_response("1+1=2", "\\boxed{2}"))


def test_what_the_prompt_opened_is_part_of_the_completions_text():
    sampled = Completion(
        text="a</think>b", token_ids=(1, 2), logps=(0.0, 0.0), finish_reason="stop", policy_versions=(0, 0)
    )
    assert completed(sampled, "<think>\n").text == "<think>\na</think>b"
    assert completed(sampled, "<think>\n").token_ids == (1, 2)
    assert completed(sampled, "") is sampled


def test_a_template_that_ends_the_thinking_opens_none():
    without = CHAT_TEMPLATE.replace("assistant\\n", "assistant\\n<think>\\n\\n</think>\\n\\n")
    assert opening_of(opened(without)) == ""


def test_a_question_about_tags_opens_nothing():
    tokenizer = build_byte_tokenizer()
    assert opening_of(tokenizer) == ""
    assert render_prompt(tokenizer, "What is <think>\n")[-1] == ord("\n")


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (CHAT_TEMPLATE.replace("message['content']", "'Hi'"), "not in the prompt"),
        (CHAT_TEMPLATE.replace("assistant\\n", "assistant\\n<think>\\nOkay,"), "thinking and goes on with 'Okay,'"),
        (CHAT_TEMPLATE.replace(" + '<|im_end|>'", ""), "ends in '', which is not one token"),
    ],
)
def test_a_template_that_would_teach_the_wrong_thing_is_refused(template, complaint):
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=complaint):
        check_template(tokenizer)
