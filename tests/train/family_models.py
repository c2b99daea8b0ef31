"""Tiny random models of the families that train, as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from klear_core.prompts import build_byte_tokenizer

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2 with a window": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral with a window": (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 6, "layer_types": _SLIDING}),
}


def write_family(name: str, target: Path, **sizes: int) -> Path:
    """A random model of the family, with a tokenizer; `sizes` replace those of its config."""
    model_class, config_class, own = FAMILIES[name]
    tokenizer = build_byte_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model_class(config_class(**(_SIZES | own | sizes), **ends)).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target
