"""Read the shape of a decoder, and refuse models that the torch engine cannot run.

This is a file of its own because checks before a run need it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from klear_core.errors import ConfigError
from klear_core.hf_config import HfConfig, read_hf_config, unusual_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Features in which the families of decoders differ; they share everything else."""

    has_qk_norm: bool = False
    """Queries and keys of each head are normalised before their rotation."""
    has_qkv_bias: bool = False


FAMILIES = {"llama": Family(), "qwen2": Family(has_qkv_bias=True), "qwen3": Family(has_qk_norm=True)}
"""Families that the torch engine runs, by the `model_type` of config.json: those of `PLAIN_FAMILIES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The values of `config.json` that inference depends on."""

    family: Family
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


def read_shape(folder: Path, *, window: int | None = None) -> DecoderShape:
    """Read the shape of a Llama, Qwen2 or Qwen3. Raise ConfigError for other models, which need vLLM.

    `window` raises the positions of `config.json`.
    """
    path, config = folder / "config.json", read_hf_config(folder)
    for key in unusual_keys(config):
        raise ConfigError(
            f"{path}: {key} = {getattr(config, key)!r}: the torch engine runs plain {', '.join(FAMILIES)} models only; "
            'set engine.kind = "vllm"'
        )
    if config.rms_norm_eps is None:
        raise ConfigError(f"{path}: rms_norm_eps is missing")
    return DecoderShape(
        family=FAMILIES[config.model_type],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=_head_dim(path, config),
        norm_eps=config.rms_norm_eps,
        rope_theta=config.theta,
        max_len=config.window(window),
        is_tied=bool(config.tie_word_embeddings),
    )


def is_supported(folder: Path) -> bool:
    """Return whether the torch engine runs the model in a folder; vLLM runs the others, too."""
    return not any(unusual_keys(read_hf_config(folder)))


def _head_dim(path: Path, config: HfConfig) -> int:
    if config.head_dim is not None:
        return config.head_dim
    # transformers gives a Qwen3 without the key 128, whatever its width: better asked than guessed
    if config.model_type == "qwen3":
        raise ConfigError(f"{path}: head_dim is missing, which a Qwen3 states")
    return config.hidden_size // config.num_attention_heads
