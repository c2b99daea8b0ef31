"""Check by its header that a folder with the same model can be made from a GGUF file; what would be lost is refused."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Container, Iterator, Sequence
from itertools import chain
from pathlib import Path

from klear_core.errors import ConfigError
from klear_core.gguf_header import GgufHeader, read_gguf_header
from klear_core.hf_config import PLAIN_FAMILIES, HfConfig, config_of_gguf

PRE_TOKENIZERS = ("llama-bpe", "qwen2", "deepseek-r1-qwen", "smollm", "gpt-2", "default")
"""Rules by which text is split before byte pairs are merged, as GGUF names them, that a folder's tokenizer gets."""
GGUF_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of the tokens that end a text, a turn and a message."""
_DEQUANTISED = {0, 1, 2, 3, 6, 7, 8, *range(10, 15), *range(16, 24), 29, 30, 34, 35, 39, 40}
"""Types of tensors that the library gguf dequantises, as ggml numbers them."""
_GIVE_A_FOLDER = "give the model by its Hub id or as a folder"


def check_gguf(path: Path) -> GgufHeader:
    """Return the header of a GGUF file; ConfigError if no folder with the same model can be made from it here."""
    header = read_gguf_header(path)
    for problem in chain(_family_problems(header), _tokenizer_problems(header)):
        raise ConfigError(f"{path}: {problem}")
    config = config_of_gguf(header)
    for problem in chain(_feature_problems(header, config), _tensor_problems(header, config)):
        raise ConfigError(f"{path}: {problem}")
    require_gguf()
    return header


def require_gguf() -> None:
    """Raise ConfigError if the library gguf is not installed."""
    found = importlib.util.find_spec("gguf")
    if found is None or found.origin is None:  # a folder of that name, such as one with models, is no library
        raise ConfigError("GGUF files need the library gguf, which is not installed here; pip install -e '.[gguf]'")


def _family_problems(header: GgufHeader) -> Iterator[str]:
    known = ", ".join(PLAIN_FAMILIES)
    if header.architecture not in PLAIN_FAMILIES:
        yield f"general.architecture = {header.architecture!r}; GGUF files of {known} are read; give it as a folder"
    if header.of_model("expert_count"):
        yield f"{header.of_model('expert_count')} experts; dense models are read from GGUF files; give it as a folder"
    scaling = header.of_model("rope.scaling.type")
    if "rope_freqs.weight" in header.tensors or scaling not in (None, "none"):
        yield (
            f"its positions are scaled (rope.scaling.type = {scaling!r} or rope_freqs), as in Llama 3.1 and 3.2, "
            f"which a GGUF file does not describe fully; {_GIVE_A_FOLDER}"
        )
    if header.metadata.get("split.count", 1) not in (0, 1):
        yield "a part of a model that is split over several files; join them with llama-gguf-split --merge"


def _tokenizer_problems(header: GgufHeader) -> Iterator[str]:
    metadata = header.metadata
    kind, num_tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind is None or num_tokens is None:
        yield "no tokenizer in it (tokenizer.ggml.tokens); convert the model again, with its tokenizer"
    if kind != "gpt2":
        yield (
            f"tokenizer.ggml.model = {kind!r}; known is 'gpt2', byte-level BPE. Of SentencePiece ('llama') a GGUF file "
            "does not state where spaces are added, so that prompts would have other tokens than in training; take a "
            f"model with byte-level BPE, or {_GIVE_A_FOLDER}"
        )
    if "tokenizer.ggml.merges" not in metadata:
        yield "no tokenizer.ggml.merges in it, which byte-level BPE needs; convert the model again"
    for key in ("tokens", "merges"):
        if not _is_count(metadata[f"tokenizer.ggml.{key}"]):
            yield f"tokenizer.ggml.{key} is no list of texts; convert the model again"
    rule = metadata.get("tokenizer.ggml.pre", "default")
    if rule not in PRE_TOKENIZERS:
        yield f"tokenizer.ggml.pre = {rule!r}; known are {', '.join(PRE_TOKENIZERS)}; give the model as a folder"
    if not any(f"tokenizer.ggml.{key}" in metadata for key in GGUF_ENDS):
        yield "no tokenizer.ggml.eos_token_id in it, so that no answer would ever stop; convert the model again"
    for key in (*GGUF_ENDS, "bos_token_id", "unknown_token_id", "padding_token_id"):
        number = metadata.get(f"tokenizer.ggml.{key}", 0)
        if not _is_count(number) or number >= num_tokens:
            yield f"tokenizer.ggml.{key} = {number!r}, but it has {num_tokens} tokens; convert the model again"
    template = metadata.get("tokenizer.chat_template")
    if not template or not isinstance(template, str):
        yield "no chat template in it, which every stage needs; take the file of its chat model, or give it as a folder"


def _is_count(value: object) -> bool:
    """Return whether a value is a whole number from 0 on. Of a list of texts a header has the length."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _feature_problems(header: GgufHeader, config: HfConfig) -> Iterator[str]:
    """Yield what a plain decoder computes otherwise, as `unusual_keys` does for a config.json."""
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    neutral: dict[str, Container[object]] = {
        # a window as long as the context hides nothing
        "attention.sliding_window": range(config.max_position_embeddings, sys.maxsize),
        "attention.value_length": (head_dim,),
        "attention.scale": (),
        "rope.dimension_count": (head_dim,),
        "rope.scaling.factor": (1,),  # without a type it is linear scaling
        "rope.scaling.attn_factor": (1,),
        "rope.scale_linear": (1,),
        "embedding_scale": (1,),
        "residual_scale": (1,),
        "logit_scale": (1,),
        "attn_logit_softcapping": (),
        "final_logit_softcapping": (),
    }
    for key, values in neutral.items():
        value = header.of_model(key)
        # llama.cpp takes 0 like a key that is not there
        if value and value not in values:
            family = header.architecture
            yield f"{family}.{key} = {value!r}, which a plain {family} of its sizes does not have; {_GIVE_A_FOLDER}"


def _tensor_problems(header: GgufHeader, config: HfConfig) -> Iterator[str]:
    # before names are made for so many layers
    if config.num_hidden_layers > len(header.tensors):
        yield (
            f"{header.architecture}.block_count = {config.num_hidden_layers}, but it has {len(header.tensors)} tensors"
            "; fetch the file again, or take another conversion of the model"
        )
    shapes, found = _tensor_shapes(config), header.tensors
    missing = [name for name in shapes if name not in found]
    if missing:
        yield f"no {_first_of(missing)} in it; fetch the file again, or take another conversion of the model"
    further = [name for name in found if name not in shapes]
    if further:
        yield f"{_first_of(further)} in it, which a plain {header.architecture} does not have; {_GIVE_A_FOLDER}"
    for name, tensor in found.items():
        if tensor.shape != shapes[name]:
            yield (
                f"{name} has the shape {tensor.shape}, and not {shapes[name]} as its keys state; "
                "take another conversion of the model"
            )
        if tensor.type not in _DEQUANTISED:
            yield (
                f"{name} is of ggml's type {tensor.type}, which the library gguf does not dequantise (Q8_1 is 9, "
                "Q8_K is 15); quantise the model again, for example as Q8_0"
            )


def _tensor_shapes(config: HfConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a plain decoder, by its name in a GGUF file."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    head_dim = config.head_dim or hidden // heads
    queries, keys = heads * head_dim, (config.num_key_value_heads or heads) * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (queries, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_output.weight": (hidden, queries),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    if config.model_type == "qwen2":
        layer |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    if config.model_type == "qwen3":
        layer |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    embeddings = ["token_embd.weight"] if config.tie_word_embeddings else ["token_embd.weight", "output.weight"]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(embeddings, (config.vocab_size, hidden))
    shapes["output_norm.weight"] = (hidden,)
    for i in range(config.num_hidden_layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _first_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
