"""Read the shape of a Qwen3 model, and refuse models that the torch engine cannot run. Imported without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from klear_core.errors import ConfigError
from klear_core.hf_config import read_hf_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Shape:
    """The values of `config.json` that inference depends on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_len: int
    is_tied: bool


def read_shape(folder: Path, *, window: int | None = None) -> Qwen3Shape:
    """Read the shape of a plain Qwen3. Raise ConfigError for other models, which need vLLM.

    `window` raises the positions of `config.json`.
    """
    path, config = folder / "config.json", read_hf_config(folder)
    unsupported = {
        "model_type": config.model_type != "qwen3",
        "hidden_act": config.hidden_act != "silu",
        "attention_bias": bool(config.attention_bias),
        "use_sliding_window": bool(config.use_sliding_window),
        "rope_parameters": config.rope_type != "default",
    }
    for key, is_unsupported in unsupported.items():
        if is_unsupported:
            found = getattr(config, key)
            raise ConfigError(
                f'{path}: {key} = {found!r}: the torch engine runs plain Qwen3 models only; set engine.kind = "vllm"'
            )
    if config.head_dim is None or config.num_key_value_heads is None or config.rms_norm_eps is None:
        raise ConfigError(
            f"{path}: a Qwen3 has head_dim, num_key_value_heads and rms_norm_eps, of which something is missing here"
        )
    return Qwen3Shape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        norm_eps=config.rms_norm_eps,
        rope_theta=config.theta,
        max_len=config.window(window),
        is_tied=bool(config.tie_word_embeddings),
    )
