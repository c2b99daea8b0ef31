"""Convert models between GGUF files, which llama.cpp and Ollama use, and Hugging Face folders."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from klear_core.artifacts.model_files import weight_files
from klear_core.errors import ConfigError
from klear_core.gguf_checks import GGUF_ENDS, check_gguf
from klear_core.gguf_header import SUFFIX, GgufHeader, read_gguf_header
from klear_core.hf_config import HfConfig, read_hf_config, unusual_keys

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from klear_core.prompts import Tokenizer

GgufDtype = Literal["f16", "q8_0"]
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Types of tokens, as GGUF counts."""
_NFC_RULES = ("qwen2", "deepseek-r1-qwen")
"""Rules of tokenizers that bring text into Unicode's composed form first; neither GGUF nor transformers says so."""


def quantisations(header: GgufHeader) -> str:
    """Return the types of the file's matrices, the most frequent first: `Q4_1, Q8_0`."""
    from gguf import GGMLQuantizationType

    types = Counter(tensor.type for tensor in header.tensors.values() if len(tensor.shape) > 1)
    return ", ".join(GGMLQuantizationType(kind).name for kind, _ in types.most_common())


# ---- from GGUF ----


def write_folder(file: Path, folder: Path, *, window: int | None = None) -> None:
    """Write the model of a GGUF file as a new folder: weights in float32, config, tokenizer, template and end tokens.

    `window` replaces the positions in its config. ConfigError if the file is cut off or of types unknown here.
    """
    from transformers import PreTrainedTokenizerFast

    header = read_gguf_header(file)
    with TemporaryDirectory() as empty:
        # transformers would also read files beside it, such as a tokenizer of another model
        alone = Path(empty, f"model{SUFFIX}")
        alone.symlink_to(file.absolute())
        try:
            model = _dequantised(alone, window)
        except (ValueError, KeyError, OSError) as e:
            raise ConfigError(f"{file}: its weights cannot be read ({e}); fetch the file again") from e
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(**_where(alone))
        except (MemoryError, ImportError):  # no fault of the file
            raise
        except Exception as e:  # tokenizers raises no other class for a merge of unknown tokens
            raise ConfigError(f"{file}: its tokenizer cannot be read ({e}); convert the model again") from e
    _complete_rules(tokenizer, header)
    # Turns may end in another token than texts (Llama 3): samplers stop at each.
    ends = [header.metadata.get(f"tokenizer.ggml.{key}") for key in GGUF_ENDS]
    model.generation_config.eos_token_id = list(dict.fromkeys(end for end in ends if end is not None)) or None
    model.generation_config._from_model_config = False  # or loaders would take the ends from config.json again
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dequantised(file: Path, window: int | None) -> Any:
    """Return the model of a GGUF file, as transformers has it, with float32 weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    where = _where(file)
    ours, config = read_hf_config(file), AutoConfig.from_pretrained(**where)
    config.max_position_embeddings = window or ours.max_position_embeddings
    # transformers reads it for Llama alone, and takes 128 for Qwen3
    config.head_dim = ours.head_dim or ours.hidden_size // ours.num_attention_heads
    # transformers has a bar of its own here, which would run through ours
    with redirect_stderr(StringIO()):
        model, loaded = AutoModelForCausalLM.from_pretrained(
            **where,
            config=config,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            output_loading_info=True,
        )
    assert not loaded["missing_keys"], loaded["missing_keys"]  # they would be random
    # The values are plain numbers now; with these marks they could not be saved.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    return model


def _where(file: Path) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` by which transformers reads a GGUF file."""
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "local_files_only": True}


def _complete_rules(tokenizer: Tokenizer, header: GgufHeader) -> None:
    """Add to the tokenizer of a GGUF file what transformers leaves out of its rules."""
    from tokenizers import normalizers, pre_tokenizers

    inner, rule = tokenizer.backend_tokenizer, header.metadata.get("tokenizer.ggml.pre")
    if rule == "smollm":
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif rule in _NFC_RULES:
        inner.normalizer = normalizers.NFC()
    elif rule == "llama-bpe":
        inner.model.ignore_merges = True  # a word of the vocabulary is one token, whether its merges lead there or not


# ---- to GGUF ----


def write_gguf(folder: Path, file: Path, dtype: GgufDtype, *, name: str, licence: str) -> None:
    """Write the model of a folder as a GGUF file: matrices in `dtype`, vectors in float32, tokenizer, template, ends.

    Weights are read and written one by one. ConfigError if a GGUF file could not hold the same model.
    """
    from gguf import GGUFWriter, LlamaFileType

    config, vocab = check_writable(folder)
    writer = GGUFWriter(file, config.model_type)
    writer.add_name(name)
    if licence:
        writer.add_license(licence)
    writer.add_file_type(LlamaFileType.MOSTLY_F16 if dtype == "f16" else LlamaFileType.MOSTLY_Q8_0)
    _add_sizes(writer, config)
    _add_tokenizer(writer, folder, config, vocab)
    weights = {weight.name: weight for weight in _weights(folder, config, dtype)}
    for weight in weights.values():
        writer.add_tensor_info(weight.name, weight.stored_shape, weight.stored_dtype, weight.num_bytes, weight.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for weight in weights.values():
        writer.write_tensor_data(weight.read())
    writer.close()
    check_gguf(file)


def check_writable(folder: Path) -> tuple[HfConfig, Vocabulary]:
    """Return config and vocabulary of a folder whose model a GGUF file can hold; ConfigError for another."""
    config = read_hf_config(folder)
    for key in unusual_keys(config):
        raise ConfigError(
            f"{folder / 'config.json'}: {key} = {getattr(config, key)!r}: only plain Llama, Qwen2 and Qwen3 models are "
            "written as GGUF; llama.cpp's convert_hf_to_gguf.py knows more"
        )
    return config, _vocabulary(folder)


def _add_sizes(writer: GGUFWriter, config: HfConfig) -> None:
    heads = config.num_attention_heads
    head_dim = config.head_dim or config.hidden_size // heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps or 1e-6)  # transformers' default


# ---- tokenizer ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The fields of a byte-level BPE tokenizer in GGUF."""

    rule: str
    """Name of the rule by which text is split first."""
    merges: tuple[str, ...]
    tokens: Mapping[int, str]
    types: Mapping[int, int]
    """Types of the tokens that are not normal."""


def _vocabulary(folder: Path) -> Vocabulary:
    """Read a folder's tokenizer.json; ConfigError if it is of another kind, or GGUF has no name for its rule."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    model = content["model"]
    unlike = ""
    if model.get("type") != "BPE":
        unlike = f"its model is {model.get('type')!r}"
    elif model.get("byte_fallback"):
        unlike = "its BPE has bytes for unknown letters only (byte_fallback)"
    elif not model.get("merges"):
        unlike = "its BPE has no merges: each token is a byte, as in the demo's model"
    if unlike:
        raise ConfigError(f"{path}: only byte-level BPE with merges is written as GGUF; {unlike}")
    rule = _rule_of(content.get("pre_tokenizer"))
    if rule is None:
        raise ConfigError(f"{path}: GGUF has no name that is known here for its rule of splitting (pre_tokenizer)")
    merges = tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
    added = {token["id"]: token for token in content.get("added_tokens", ())}
    tokens = {number: text for text, number in model["vocab"].items()}
    tokens |= {number: token["content"] for number, token in added.items()}
    types = {number: _CONTROL if token["special"] else _USER_DEFINED for number, token in added.items()}
    return Vocabulary(rule=rule, merges=merges, tokens=tokens, types=types)


def _rule_of(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """Return GGUF's name of a rule by which text is split; None if it has none."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    parts = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    match [part["type"] for part in parts]:
        case ["ByteLevel"] if parts[0]["use_regex"]:
            return "gpt-2"
        case ["Digits", "ByteLevel"] if parts[0]["individual_digits"] and parts[1]["use_regex"]:
            return "smollm"
        case ["Split", "ByteLevel"]:
            regex = parts[0]["pattern"].get("Regex")
            return next((rule for rule in ("llama-bpe", "qwen2") if GGUF_PRE_TOKENIZER_SPLITS[rule] == regex), None)
        case _:
            return None


def _add_tokenizer(writer: GGUFWriter, folder: Path, config: HfConfig, vocab: Vocabulary) -> None:
    from klear_core.hf_config import FolderTokenizer
    from klear_core.prompts import load_tokenizer

    tokenizer = load_tokenizer(folder)  # with the token that ends a turn as its eos
    ids = range(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocab.rule)
    # Models round their vocabulary up; the tokens without a text are never sampled.
    writer.add_token_list([vocab.tokens.get(number, f"[PAD{number}]") for number in ids])
    writer.add_token_types([vocab.types.get(number, _NORMAL if number in vocab.tokens else _UNUSED) for number in ids])
    writer.add_token_merges(vocab.merges)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    others = [end for end in FolderTokenizer(folder).stop_ids if end != tokenizer.eos_token_id]
    if others:
        writer.add_eot_token_id(others[0])
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    text = tokenizer.encode("1")
    writer.add_add_bos_token(bool(text) and text[0] == tokenizer.bos_token_id)
    writer.add_chat_template(tokenizer.get_chat_template())


# ---- weights ----


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """One tensor of a folder, and how it is stored in a GGUF file."""

    name: str
    """Its name there: `blk.0.attn_q.weight`."""
    file: Path
    key: str
    """Its name in the folder."""
    shape: tuple[int, ...]
    type: Any
    """gguf's GGMLQuantizationType."""
    num_heads: int
    """Heads whose halves are interleaved there, as GGUF has it for Llama's queries and keys; 0: the rows stay."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        from gguf import GGMLQuantizationType, quant_shape_to_byte_shape

        is_blocks = self.type == GGMLQuantizationType.Q8_0
        return tuple(quant_shape_to_byte_shape(self.shape, self.type)) if is_blocks else self.shape

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        from gguf import GGMLQuantizationType

        types = {GGMLQuantizationType.F16: np.float16, GGMLQuantizationType.F32: np.float32}
        return np.dtype(types.get(self.type, np.uint8))

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.stored_shape)) * self.stored_dtype.itemsize

    def read(self) -> np.ndarray[Any, Any]:
        """Return the values as they are stored; ConfigError for one that float16 cannot hold."""
        from gguf import quantize
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as tensors:
            values = tensors.get_tensor(self.key).float().numpy()
        if self.num_heads:
            halves = values.reshape(self.num_heads, 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        largest = float(np.abs(values).max())
        if self.stored_dtype != np.float32 and not largest <= np.finfo(np.float16).max:
            raise ConfigError(f"{self.file}: {self.key} has a value of {largest:g}, which float16 cannot hold")
        stored: np.ndarray[Any, Any] = quantize(values, self.type)
        return stored


def _weights(folder: Path, config: HfConfig, dtype: GgufDtype) -> Iterator[_Weight]:
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
    from safetensors import safe_open

    arch = next(number for number, name in MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = get_tensor_name_map(MODEL_ARCH(arch), config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads or config.num_attention_heads}
    for file in weight_files([file.name for file in folder.iterdir()]):
        with safe_open(folder / file, framework="pt") as tensors:
            shapes = {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
        for key, shape in shapes.items():
            if config.tie_word_embeddings and key == "lm_head.weight":
                continue
            name = names.get_name(key, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise ConfigError(f"{folder / file}: {key} is no weight of a {config.model_type}")
            kind = GGMLQuantizationType.F32 if len(shape) == 1 else GGMLQuantizationType.F16
            if dtype == "q8_0" and len(shape) > 1 and shape[-1] % 32 == 0:  # blocks of 32 values
                kind = GGMLQuantizationType.Q8_0
            permuted = heads.get(key.split(".")[-2], 0) if config.model_type == "llama" else 0
            yield _Weight(name=name, file=folder / file, key=key, shape=shape, type=kind, num_heads=permuted)
