"""Read a model's folder or GGUF file, without torch: its config, and its tokenizer's end tokens."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Container, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from tokenizers import Tokenizer

from klear_core.errors import ConfigError
from klear_core.gguf_header import GgufHeader, read_gguf_header
from klear_core.types import FinishReason


class HfConfig(BaseModel):
    """The keys of a config.json that Klear uses, under their published names.

    None or the default: the file has no such key.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    architectures: tuple[str, ...] | None = None
    """Names of the classes in transformers that load the model."""
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float | None = None
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    """The older name of `rope_parameters`."""
    layer_types: tuple[str, ...] | None = None
    use_sliding_window: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: float | None = None
    logit_scale: float | None = None
    logits_scaling: float | None = None
    num_experts: int = 0
    """The most experts that any key of the file states, also within another such as `text_config`."""
    num_experts_per_tok: int | None = None
    """Experts that a token uses."""
    moe_intermediate_size: int | None = None
    """Width of an expert; None: `intermediate_size`, as in Mixtral."""
    mamba_d_conv: int | None = None
    """Width of the convolution in state-space layers, which stand beside or in place of attention."""

    @model_validator(mode="before")
    @classmethod
    def _count_experts(cls, raw: object) -> object:
        return raw | {"num_experts": _experts_within(raw)} if isinstance(raw, dict) else raw

    @property
    def rope(self) -> dict[str, Any]:
        """Settings of the rotary position encoding, besides `rope_theta`."""
        return self.rope_parameters or self.rope_scaling or {}

    @property
    def rope_type(self) -> str:
        """Type of the rotary encoding; `default` is plain rotation."""
        return str(self.rope.get("rope_type", self.rope.get("type", "default")))

    @property
    def theta(self) -> float:
        """Base of the rotation's frequencies; 10,000 if the file does not say, as in transformers."""
        return float(self.rope.get("rope_theta") or self.rope_theta or 10_000.0)

    @property
    def mlp_size(self) -> int:
        """Width of a layer's MLP: of a mixture that of all experts, as if each layer were one."""
        if self.num_experts <= 1:
            return self.intermediate_size
        return self.num_experts * (self.moe_intermediate_size or self.intermediate_size)

    @property
    def idle_mlp_size(self) -> int:
        """Width of the experts that a token does not use; 0 if the file does not say how many it uses."""
        if self.num_experts <= 1 or not self.num_experts_per_tok:
            return 0
        return self.mlp_size * (self.num_experts - self.num_experts_per_tok) // self.num_experts

    @property
    def num_params(self) -> int:
        """Number of weights in all matrices; the norms, a hundred-thousandth, are left out."""
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads or heads
        head_dim = self.head_dim or self.hidden_size // heads
        layer = head_dim * (2 * heads + 2 * kv_heads) * self.hidden_size + 3 * self.hidden_size * self.mlp_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * layer

    def window(self, wanted: int | None) -> int:
        """Return the positions of the trained model: its own, or `model.max_position_embeddings` if that is more."""
        return max(self.max_position_embeddings, wanted or 0)


def read_hf_config(model: Path) -> HfConfig:
    """Read the config.json of a model's folder, or what is the same in the header of a GGUF file.

    ConfigError if there is none, or if it is not that of a decoder with the keys of Qwen3, Llama and related models.
    """
    if model.is_file():
        return _config_of_gguf(read_gguf_header(model))
    path = model / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except OSError as e:
        raise ConfigError(
            f"{path}: cannot be read ({e.strerror}); a Hugging Face model folder on disk is needed"
        ) from e
    except ValueError as e:
        raise ConfigError(f"{path}: not JSON: {e}") from e
    try:
        return HfConfig.model_validate(raw)
    except ValidationError as e:
        of_type = f" (model_type {raw.get('model_type')!r})" if isinstance(raw, dict) else ""
        if (experts := _experts_within(raw)) > 1:  # such as those of Llama 4 and Qwen3.5, whose keys are in another one
            raise _mixture_refused(path, raw.get("model_type"), experts) from e
        wrong = "; ".join(_what_is_wrong(error) for error in e.errors())
        raise ConfigError(f"{path}: {wrong}{of_type}; Klear knows decoders with the keys of Qwen3 and Llama") from e


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Number of experts of a mixture, by the names of Qwen, of Mixtral and gpt-oss, of DeepSeek, and of ERNIE."""


def _experts_within(raw: object) -> int:
    """Return the number of experts that a config.json, or an object within it, states; 0 for none."""
    if not isinstance(raw, dict):
        return 0
    own: list[object] = []
    for name in _EXPERTS:
        stated = raw.get(name)
        own += stated if isinstance(stated, list) else [stated]  # ERNIE VL: of text and of pictures
    return max([*(n for n in own if isinstance(n, int)), *map(_experts_within, raw.values())], default=0)


def _mixture_refused(path: Path, model_type: object, experts: int) -> ConfigError:
    return ConfigError(
        f"{path}: {model_type} is a mixture of {experts} experts; Klear trains dense models only, because engines and "
        "learner would choose other experts for the same token, and nothing replays the engine's choice"
    )


PLAIN_FAMILIES = ("llama", "qwen2", "qwen3")
"""Families of decoders that our sampler runs and GGUF files are converted of, by `model_type`."""


def unusual_keys(config: HfConfig) -> Iterator[str]:
    """Yield the keys of a config.json with which a plain decoder would compute something else."""
    unusual = {
        "model_type": config.model_type not in PLAIN_FAMILIES,
        "hidden_act": config.hidden_act != "silu",
        "attention_bias": bool(config.attention_bias),
        "mlp_bias": bool(config.mlp_bias),
        "use_sliding_window": bool(config.use_sliding_window),
        "layer_types": bool(set(config.layer_types or ()) - {"full_attention"}),
        "rope_parameters": config.rope_type != "default" or config.rope.get("partial_rotary_factor", 1) != 1,
    }
    yield from (key for key, is_unusual in unusual.items() if is_unusual)


# ---- GGUF ----
# Describe the model in a GGUF file as a config.json would, and refuse what would be lost in a folder made from it.


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
    config = _config_of_gguf(header)
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
    if header.metadata.get("split.count", 1) > 1:
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
    rule = metadata.get("tokenizer.ggml.pre", "default")
    if rule not in PRE_TOKENIZERS:
        yield f"tokenizer.ggml.pre = {rule!r}; known are {', '.join(PRE_TOKENIZERS)}; give the model as a folder"
    if not any(f"tokenizer.ggml.{key}" in metadata for key in GGUF_ENDS):
        yield "no tokenizer.ggml.eos_token_id in it, so that no answer would ever stop; convert the model again"
    for key in (*GGUF_ENDS, "bos_token_id", "unknown_token_id", "padding_token_id"):
        number = metadata.get(f"tokenizer.ggml.{key}", 0)
        if not 0 <= number < num_tokens:
            yield f"tokenizer.ggml.{key} = {number}, but it has {num_tokens} tokens; convert the model again"
    if not metadata.get("tokenizer.chat_template"):
        yield "no chat template in it, which every stage needs; take the file of its chat model, or give it as a folder"


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


def _config_of_gguf(header: GgufHeader) -> HfConfig:
    vocab_size = header.of_model("vocab_size") or header.metadata.get("tokenizer.ggml.tokens")
    raw = {
        "model_type": header.architecture,
        "vocab_size": vocab_size,
        "hidden_size": header.of_model("embedding_length"),
        "intermediate_size": header.of_model("feed_forward_length"),
        "num_hidden_layers": header.of_model("block_count"),
        "num_attention_heads": header.of_model("attention.head_count"),
        "max_position_embeddings": header.of_model("context_length"),
        "num_key_value_heads": header.of_model("attention.head_count_kv"),
        "head_dim": header.of_model("attention.key_length"),
        "rms_norm_eps": header.of_model("attention.layer_norm_rms_epsilon"),
        "rope_theta": header.of_model("rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    try:
        return HfConfig.model_validate({key: value for key, value in raw.items() if value is not None})
    except ValidationError as e:
        wrong = "; ".join(_what_is_wrong(error) for error in e.errors())
        raise ConfigError(f"{header.path}: {wrong} (architecture {header.architecture!r})") from e


# ---- checks ----


def check_architecture(folder: Path) -> None:
    """Raise ConfigError for features that Klear's packed forward pass would silently leave out of a trained model.

    They are scaled logits or attention, attention other than full or sliding, state-space layers, and positions that
    depend on the batch.
    """
    path, config = folder / "config.json", read_hf_config(folder)
    # A config without `architectures` is accepted: transformers chooses the class by `model_type`.
    classes = config.architectures or ()
    if classes and not any(name.endswith("ForCausalLM") for name in classes):
        raise ConfigError(f"{path}: architectures = {list(classes)}; Klear trains causal language models, …ForCausalLM")
    # A value that changes nothing is accepted: some configs state a scale of 1.
    neutral = {"final_logit_softcapping": None, "attn_logit_softcapping": None, "logit_scale": 1, "logits_scaling": 1}
    for key, value in neutral.items():
        found = getattr(config, key)
        if found not in (value, None):
            raise ConfigError(f"{path}: {key}={found!r}; Klear trains models without it")
    if config.mamba_d_conv is not None:
        raise ConfigError(
            f"{path}: mamba_d_conv={config.mamba_d_conv}; "
            "state-space layers carry a state from one packed row to the next"
        )
    if config.num_experts > 1:
        raise _mixture_refused(path, config.model_type, config.num_experts)
    odd = sorted(set(config.layer_types or ()) - {"full_attention", "sliding_attention"})
    if odd:
        raise ConfigError(f"{path}: layers with {', '.join(odd)}; Klear trains full and sliding attention only")
    if config.rope_type in ("dynamic", "longrope"):
        raise ConfigError(
            f"{path}: {config.rope_type} positions change with the longest row in a batch, "
            "so packed rows are not the rows alone"
        )


def check_model_type(folder: Path) -> None:
    """Raise ConfigError if the installed transformers has no model of this type. Does not import it: that takes 3 s."""
    model_type = read_hf_config(folder).model_type
    found = importlib.util.find_spec("transformers")
    assert found is not None, "transformers is a dependency"
    assert found.origin is not None, found
    models = Path(found.origin).parent / "models"
    # Its folders are Python packages, whose names have no hyphens.
    if (models / model_type.replace("-", "_")).is_dir():
        return
    # some types are defined in the folder of another, such as gemma3_text in gemma3
    declaration = f'model_type = "{model_type}"'
    if not any(declaration in file.read_text() for file in models.glob("*/configuration_*.py")):
        raise ConfigError(
            f"{folder / 'config.json'}: model_type = {model_type!r} is unknown to the transformers that is installed"
        )


def _what_is_wrong(error: Any) -> str:
    key = ".".join(map(str, error["loc"]))
    return f"no {key}" if error["type"] == "missing" else f"{key or 'its content'} = {error['input']!r}: {error['msg']}"


# ---- text ----
# Decode token ids and find the end tokens of a model folder, for the engines.


class FolderTokenizer:
    """The `tokenizer.json` of a Hugging Face folder.

    Raise ConfigError if it is missing, or if no end token is declared.
    """

    def __init__(self, model_folder: Path) -> None:
        path = model_folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} is missing: engines need a fast tokenizer")
        self._tokenizer = Tokenizer.from_file(str(path))
        self.stop_ids = self._stop_ids(model_folder)

    def decode(self, token_ids: Sequence[int], finish_reason: FinishReason) -> str:
        """Return the text with special tokens shown (think tags may be some), except the end token that stopped it."""
        # a completion that stopped ends with its end token, one that ran out of tokens has none
        shown_ids = token_ids[:-1] if finish_reason == "stop" else token_ids
        text: str = self._tokenizer.decode(list(shown_ids), skip_special_tokens=False)
        return text

    def _stop_ids(self, model_folder: Path) -> tuple[int, ...]:
        """Return the tokenizer's eos and every eos of `generation_config.json`, in ascending order."""
        # a chat model may end its turns with another token than the tokenizer's eos: any token in either file stops
        listed = _read_json(model_folder / "generation_config.json").get("eos_token_id")
        stop_ids = set(listed if isinstance(listed, list) else [listed])
        eos = _read_json(model_folder / "tokenizer_config.json").get("eos_token")
        if eos:
            stop_ids.add(self._tokenizer.token_to_id(eos["content"] if isinstance(eos, dict) else eos))
        stop_ids.discard(None)  # not listed, or not in the vocabulary
        if not stop_ids:
            raise ConfigError(
                f"{model_folder}: no end token in tokenizer_config.json or generation_config.json: "
                "no answer would ever stop"
            )
        return tuple(sorted(stop_ids))


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text()) if path.is_file() else {}
    assert isinstance(content, dict), path
    return content
