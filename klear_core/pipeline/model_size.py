"""Read the sizes of a model that its memory and its arithmetic follow from, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from klear_core.artifacts.model_files import folder_of
from klear_core.config.train import HfModelConfig, HubModelConfig, ModelConfig, TinyModelConfig
from klear_core.errors import ConfigError
from klear_core.hf_config import HfConfig, read_hf_config

_BYTE_VOCAB = 320
"""Vocabulary of the tiny model's tokenizer: 256 bytes and 5 special tokens, padded to a multiple of 64
(`prompts.padded_vocab_size`; building the tokenizer here would load transformers)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes of a dense decoder."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    is_tied: bool
    """The LM head is the embedding's tensor."""
    is_fused: bool
    """Its norms, rotations and gates run as one compiled pass each (`train/kernels/fused.py`)."""

    @property
    def query_size(self) -> int:
        """Return the width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Return the width of all key heads, which is also that of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_params(self) -> int:
        """Return the weights of a layer's matrices."""
        return self.hidden_size * (2 * self.query_size + 2 * self.kv_size + 3 * self.mlp_size)

    @property
    def embedding_params(self) -> int:
        """Return the weights of embedding and LM head, one matrix if they are tied."""
        return self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)

    def adapter_params(self, rank: int) -> int:
        """Return the weights of LoRA adapters of this rank on all linear layers; fewer layers have fewer."""
        h, a, g, i = self.hidden_size, self.query_size, self.kv_size, self.mlp_size
        # Inputs and outputs of q, o, then k, v, then gate, up and down.
        return self.num_layers * rank * (2 * (h + a) + 2 * (h + g) + 3 * (h + i))

    @property
    def num_params(self) -> int:
        """Return the number of weights in all matrices; the norms, a hundred-thousandth, are left out."""
        return self.embedding_params + self.num_layers * self.layer_params


def model_size(model: ModelConfig) -> ModelSize | None:
    """Return the size from a tiny model's settings or a Hugging Face config.json; None if that cannot be read."""
    match model:
        case TinyModelConfig() as m:
            return ModelSize(
                vocab_size=_BYTE_VOCAB,
                hidden_size=m.hidden_size,
                num_layers=m.num_layers,
                num_heads=m.num_heads,
                num_kv_heads=m.num_kv_heads,
                head_dim=m.head_dim,
                mlp_size=m.intermediate_size,
                is_tied=True,
                is_fused=True,
            )
        case HfModelConfig() | HubModelConfig():
            try:
                return size_of_hf(read_hf_config(folder_of(model)))
            except ConfigError:
                return None  # not downloaded yet, or the preflight says why
        case _:
            assert_never(model)


def size_of_hf(config: HfConfig) -> ModelSize:
    """Return the size that a config.json describes."""
    return ModelSize(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        mlp_size=config.intermediate_size,
        is_tied=bool(config.tie_word_embeddings),
        is_fused=config.model_type == "qwen3",
    )
