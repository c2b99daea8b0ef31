"""Tiny random models whose tokenizer merges bytes, as GGUF files need it; every weight is a float16."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from family_models import write_family
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from klear_core.prompts import CHAT_TEMPLATE

TEXT = ["the answer is 12 and the 120 others are there", "what is the sum of 345 and 1200?  it is 1545", "naïve café"]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def splitting(rule: str) -> pre_tokenizers.PreTokenizer:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == "gpt-2":
        return plain
    if rule == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[rule]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def bpe_tokenizer(
    rule: str = "gpt-2", *, template: str = CHAT_TEMPLATE, has_tags: bool = True
) -> PreTrainedTokenizerFast:
    """A tokenizer of about 300 tokens that was trained on TEXT; `<think>` tags are tokens of their own if it `has_tags`."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = splitting(rule), decoders.ByteLevel()
    if rule == "qwen2":
        inner.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=308, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXT * 3, trainer)
    if has_tags:
        inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


def write_model(family: str, folder: Path, rule: str = "gpt-2", **sizes: int) -> Path:
    tokenizer = bpe_tokenizer(rule)
    write_family(family, folder, **sizes)
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | ends))
    weights = folder / "model.safetensors"
    rounded = {name: w.to(torch.float16).float() for name, w in load_file(weights).items()}
    save_file(rounded, weights, metadata={"format": "pt"})
    return folder
