"""The chat templates of published families: prompts, ends of turns and tags are what training and sampling take them for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf_models import bpe_tokenizer, write_model
from tokenizers import AddedToken

from klear_core.artifacts.model_files import check_folder
from klear_core.errors import ConfigError
from klear_core.hf_config import FolderTokenizer
from klear_core.prompts import (
    check_template,
    decode_response,
    encode_response,
    load_tokenizer,
    opening_of,
    prompt_text,
    render_prompt,
    render_response,
    split_response,
)

# HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0, as it is published.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)
# Written by us in the form of Qwen2.5's, without tools: a system prompt of its own, white space cut by dashes.
QWEN25 = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) or message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Written by us in the form of Qwen3's: thoughts of earlier turns are left out, the last answer gets an empty thought,
# and `enable_thinking = false` closes the thinking in the prompt.
QWEN3 = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
# Written by us in the form of Llama 3.2's: a token at the start, headers, the date, trimmed contents, no line break at
# the end of a turn.
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# Written by us in the form of Phi-3's: where no answer is to follow, the conversation ends in a token of its own.
PHI3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")
LLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
ASKED = "<|im_start|>user\n1+1 = ?<|im_end|>\n<|im_start|>assistant\n"

FAMILIES = {
    "smollm2": (
        SMOLLM2,
        "smollm",
        "<|im_end|>",
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n" + ASKED,
    ),
    "qwen2.5": (
        QWEN25,
        "qwen2",
        "<|im_end|>",
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + ASKED,
    ),
    "qwen3": (QWEN3, "qwen2", "<|im_end|>", ASKED),
    "llama3": (
        LLAMA3,
        "llama-bpe",
        "<|eot_id|>",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n1+1 = ?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "phi3": (PHI3, "gpt-2", "<|end|>", "<|user|>\n1+1 = ?<|end|>\n<|assistant|>\n"),
}
"""Template, rule of splitting, end of a turn, and the prompt of one question."""


def folder_of(family: str, folder: Path, *, tags_are_tokens: bool | None = None) -> Path:
    """A folder with the family's tokenizer; only Qwen3 has the tags as tokens, unless it is said otherwise."""
    template, rule, _, _ = FAMILIES[family]
    has_tags = family == "qwen3" if tags_are_tokens is None else tags_are_tokens
    tokenizer = bpe_tokenizer(rule, template=template, has_tags=has_tags)
    if family == "llama3":
        added = [AddedToken(text, special=True, normalized=False) for text in LLAMA_TOKENS]
        tokenizer.add_tokens(added, special_tokens=True)
        # As published: the declared end is that of a text, and turns end in another token.
        tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = LLAMA_TOKENS[0], LLAMA_TOKENS[1], None
    if family == "phi3":
        added = [AddedToken(text, special=True, normalized=False) for text in PHI_TOKENS]
        tokenizer.add_tokens(added, special_tokens=True)
        tokenizer.eos_token, tokenizer.pad_token = PHI_TOKENS[0], PHI_TOKENS[0]
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_is_what_the_family_was_trained_on(family, tmp_path):
    tokenizer = load_tokenizer(folder_of(family, tmp_path))
    expected = FAMILIES[family][3]
    assert prompt_text(tokenizer, "1+1 = ?") == expected
    ids = render_prompt(tokenizer, "1+1 = ?")
    assert tokenizer.decode(ids) == expected  # with one token at the start, and not two
    assert opening_of(tokenizer) == ""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tags_are_tokens", [True, False])
def test_answers_end_where_turns_end_and_come_back_with_their_tags(family, tags_are_tokens, tmp_path):
    folder = folder_of(family, tmp_path, tags_are_tokens=tags_are_tokens)
    tokenizer = load_tokenizer(folder)
    check_template(tokenizer)
    assert tokenizer.eos_token == FAMILIES[family][2]
    assert (len(tokenizer.encode("<think>", add_special_tokens=False)) == 1) == tags_are_tokens
    text = render_response("1+1=2", "\\boxed{2}")
    ids = encode_response(tokenizer, text)
    assert decode_response(tokenizer, ids) == text
    assert split_response(text) == split_response(FolderTokenizer(folder).decode(ids, "stop"))
    # cut off in the middle of a tag of several tokens, an answer has no end of thinking
    close = text.index("</think>") + 4
    cut = tokenizer.encode(text[:close], add_special_tokens=False)
    assert not split_response(FolderTokenizer(folder).decode(cut, "length")).is_closed


@pytest.mark.parametrize("family", FAMILIES)
def test_once_it_was_trained_a_model_stops_where_turns_end_whatever_was_declared(family, tmp_path):
    tokenizer = load_tokenizer(folder_of(family, tmp_path / "base"))
    tokenizer.save_pretrained(tmp_path / "trained")  # as a stage saves it
    end = tokenizer.convert_tokens_to_ids(FAMILIES[family][2])
    assert end in FolderTokenizer(tmp_path / "trained").stop_ids
    # another end that generation_config.json lists still stops, too
    (tmp_path / "trained" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    assert FolderTokenizer(tmp_path / "trained").stop_ids == (0, end)


def test_thoughts_that_a_template_leaves_out_of_earlier_turns_are_no_end_of_the_turn(tmp_path):
    """Qwen3 writes an empty thought before the answer, so that the end is what comes behind the answer alone."""
    tokenizer = load_tokenizer(folder_of("qwen3", tmp_path))
    messages = [{"role": "user", "content": "1+1 = ?"}, {"role": "assistant", "content": "2"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.endswith("<think>\n\n</think>\n\n2<|im_end|>\n")
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_model_without_a_template_is_refused_and_accepted_with_the_one_of_its_chat_model(family, tmp_path):
    folder = write_model("llama", tmp_path, FAMILIES[family][1])
    folder_of(family, folder)
    template = folder / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    with pytest.raises(ConfigError, match=r"no chat template.*save the template .* there as chat_template\.jinja"):
        check_folder(folder)
    template.write_text(text)
    check_folder(folder)
    check_template(load_tokenizer(folder))
