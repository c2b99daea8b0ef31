"""A tiny random decoder as a Hugging Face folder, with a byte-level tokenizer: what the engines' tests run on."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
END_ID = 258  # <|im_end|>
VOCAB_SIZE = 264
FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def build_model(
    *,
    seed: int = 0,
    num_layers: int = 2,
    hidden_size: int = 32,
    max_len: int = 256,
    head_dim: int = 16,
    is_tied: bool = True,
    family: str = "qwen3",
) -> Qwen3ForCausalLM:
    """Sharp enough that sampling, truncation and weight changes all show."""
    make_config, make_model = FAMILIES[family]
    config = make_config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_len,
        tie_word_embeddings=is_tied,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=256,
    )
    torch.manual_seed(seed)
    model: Qwen3ForCausalLM = make_model(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.3)
    return model


def write_folder(folder: Path, model: Qwen3ForCausalLM) -> Path:
    """Weights, configs and tokenizer, as `save_pretrained` writes them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder
