"""Convert models between GGUF files, which Ollama and llama.cpp use, and Hugging Face folders."""

from __future__ import annotations

from collections import Counter
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from klear_core.errors import ConfigError
from klear_core.gguf_header import GgufHeader, read_gguf_header
from klear_core.hf_config import read_hf_config

if TYPE_CHECKING:
    from klear_core.prompts import Tokenizer

_GENERATION_CONFIG = "generation_config.json"
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of the tokens that end a text, a turn and a message."""


def quantisations(header: GgufHeader) -> str:
    """Return the types of the file's tensors with more than one dimension, the most frequent first: `Q4_1, Q8_0`."""
    from gguf import GGMLQuantizationType

    types = Counter(tensor.type for tensor in header.tensors.values() if len(tensor.shape) > 1)
    return ", ".join(GGMLQuantizationType(kind).name for kind, _ in types.most_common())


# ---- from GGUF ----


def write_folder(file: Path, folder: Path, *, window: int | None = None) -> None:
    """Write the model of a GGUF file as a new folder: weights in float32, config, tokenizer, template and end tokens.

    `window` replaces the positions in its config. ConfigError if the file is cut off or of types unknown here.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    header, ours = read_gguf_header(file), read_hf_config(file)
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(**where)
    config.name_or_path = ""  # a title of the file, which transformers would take for a path
    config.max_position_embeddings = window or ours.max_position_embeddings
    if ours.head_dim is not None:  # transformers reads it for Llama alone
        config.head_dim = ours.head_dim
    try:
        # transformers has a bar of its own here, which would run through ours
        with redirect_stderr(StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                **where, config=config, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
            )
    except (ValueError, KeyError, OSError) as e:
        raise ConfigError(f"{file}: its weights cannot be read ({e}); fetch the file again") from e
    # The values are plain numbers now; with these marks they could not be saved.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    tokenizer = _tokenizer_of(file, header)
    # Turns may end in another token than texts (Llama 3): samplers stop at each.
    ends = [header.metadata.get(f"tokenizer.ggml.{key}") for key in _ENDS]
    model.generation_config.eos_token_id = list(dict.fromkeys(end for end in ends if end is not None)) or None
    model.generation_config._from_model_config = False  # or loaders would take the ends from config.json again
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer_of(file: Path, header: GgufHeader) -> Tokenizer:
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    if header.metadata.get("tokenizer.ggml.pre") == "smollm":  # which transformers would split as GPT-2 does
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer
