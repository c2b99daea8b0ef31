"""Tiny random models whose tokenizer merges bytes, as GGUF files need it, and GGUF files with other contents.

Every weight is a float16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from family_models import write_family
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
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


def rewritten(
    source: Path,
    target: Path,
    *,
    without: Sequence[str] = (),
    keys: Mapping[str, object] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    types: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """A copy of a GGUF file without some keys and tensors, and with others; of those of `types`, blocks as bytes."""
    reader = GGUFReader(source)
    old_keys = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    new_keys = {key: value for key, value in old_keys.items() if key not in without} | dict(keys or {})
    writer = GGUFWriter(target, str(new_keys.pop("general.architecture")))
    for key, value in new_keys.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case list():
                writer.add_array(key, value)
            case _:
                writer.add_string(key, str(value))
    old_tensors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name not in without}
    for name, values in (old_tensors | dict(tensors or {})).items():
        writer.add_tensor(name, np.array(values), raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
