"""Read a model's folder or GGUF file, without torch: its config, and its tokenizer's end tokens."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
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
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int
    num_hidden_layers: int = Field(ge=1)
    num_nextn_predict_layers: int | None = None
    """Further layers of the weights, which predict tokens after the next."""
    num_attention_heads: int = Field(ge=1)
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
    quantization_config: dict[str, Any] | None = None
    num_experts: int = 0
    """The most experts that any key of the file states, also within another such as `text_config`."""
    num_experts_per_tok: int | None = None
    """Experts that a token uses."""
    moe_intermediate_size: int | None = None
    """Width of an expert; None: `intermediate_size`, as in Mixtral."""
    num_shared_experts: int = 0
    """Experts that every token uses, beside those it chooses."""
    shared_expert_size: int = 0
    """Width of the shared expert, where it is stated in place of their number."""
    mamba_d_conv: int | None = None
    """Width of the convolution in state-space layers, which stand beside or in place of attention."""

    @model_validator(mode="before")
    @classmethod
    def _count_experts(cls, raw: object) -> object:
        if not isinstance(raw, dict):
            return raw
        experts = _experts_within(raw)
        # a mixture without dense layers may state the width of experts alone, as Qwen3.5 does
        if experts > 1 and raw.get("moe_intermediate_size"):
            raw = {"intermediate_size": raw["moe_intermediate_size"]} | raw
        return raw | {
            "num_experts": experts,
            "num_shared_experts": max(_stated(raw, _SHARED_EXPERTS), default=0),
            "shared_expert_size": max(_stated(raw, _SHARED_SIZES), default=0),
        }

    @property
    def rope(self) -> dict[str, Any]:
        """Settings of the rotary position encoding, besides `rope_theta`; the older name first, as in transformers."""
        return self.rope_scaling or self.rope_parameters or {}

    @property
    def rope_type(self) -> str:
        """Type of the rotary encoding; `default` is plain rotation."""
        return str(self.rope.get("rope_type", self.rope.get("type", "default")))

    @property
    def theta(self) -> float:
        """Base of the rotation's frequencies; 10,000 if the file does not say, as in transformers."""
        return float(self.rope.get("rope_theta") or self.rope_theta or 10_000.0)

    @property
    def expert_size(self) -> int:
        """Width of one expert of a mixture."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def mlp_size(self) -> int:
        """Width of a layer's MLP: of a mixture that of all experts, as if each layer were one."""
        if self.num_experts <= 1:
            return self.intermediate_size
        shared = self.shared_expert_size or self.num_shared_experts * self.expert_size
        return self.num_experts * self.expert_size + shared

    @property
    def idle_mlp_size(self) -> int:
        """Width of the experts that a token does not use; 0 if the file does not say how many it uses."""
        if self.num_experts <= 1 or not self.num_experts_per_tok:
            return 0
        return (self.num_experts - self.num_experts_per_tok) * self.expert_size

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
        return config_of_gguf(read_gguf_header(model))
    path = model / "config.json"
    raw = _read_raw(path)
    try:
        return HfConfig.model_validate(_with_text_keys(raw))
    except ValidationError as e:
        of_type = f" (model_type {raw.get('model_type')!r})" if isinstance(raw, dict) else ""
        wrong = "; ".join(_what_is_wrong(error) for error in e.errors())
        raise ConfigError(f"{path}: {wrong}{of_type}; Klear knows decoders with the keys of Qwen3 and Llama") from e


def _read_raw(path: Path) -> object:
    try:
        raw: object = json.loads(path.read_bytes())
    except OSError as e:
        raise ConfigError(
            f"{path}: cannot be read ({e.strerror}); a Hugging Face model folder on disk is needed"
        ) from e
    except ValueError as e:
        raise ConfigError(f"{path}: not JSON: {e}") from e
    return raw


def _with_text_keys(raw: object) -> object:
    """Return a config.json with the keys of its `text_config` beside the others, if it is of a mixture that has them
    there, such as Llama 4 and Qwen3.5."""
    if not isinstance(raw, dict) or "hidden_size" in raw or not isinstance(raw.get("text_config"), dict):
        return raw
    return raw["text_config"] | raw if _experts_within(raw) > 1 else raw


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Number of experts of a mixture, by the names of Qwen, of Mixtral and gpt-oss, of DeepSeek, and of ERNIE."""
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
"""Number of shared experts, by the names of DeepSeek and GLM, of Hunyuan and EXAONE, and of ERNIE."""
_SHARED_SIZES = ("shared_expert_intermediate_size", "shared_intermediate_size")
"""Width of the shared expert, by the names of Qwen and of Granite."""


def _experts_within(raw: object) -> int:
    """Return the number of experts that a config.json, or an object within it, states; 0 for none."""
    if not isinstance(raw, dict):
        return 0
    return max([*_stated(raw, _EXPERTS), *map(_experts_within, raw.values())], default=0)


def _stated(raw: dict[str, Any], names: Iterable[str]) -> list[int]:
    """Return the numbers under these keys."""
    found: list[object] = []
    for name in names:
        value = raw.get(name)
        found += value if isinstance(value, list) else [value]  # ERNIE VL: of text and of pictures
    return [number for number in found if isinstance(number, int)]


PLAIN_FAMILIES = ("llama", "qwen2", "qwen3")
"""Families of decoders that our sampler runs and GGUF files are converted of, by `model_type`."""


def unusual_keys(config: HfConfig) -> Iterator[str]:
    """Yield the keys of a config.json with which a plain decoder would compute something else."""
    rope_key = "rope_scaling" if config.rope_scaling else "rope_parameters"  # as the file has it
    unusual = {
        "model_type": config.model_type not in PLAIN_FAMILIES,
        "hidden_act": config.hidden_act != "silu",
        "attention_bias": bool(config.attention_bias),
        "mlp_bias": bool(config.mlp_bias),
        "use_sliding_window": bool(config.use_sliding_window),
        "layer_types": bool(set(config.layer_types or ()) - {"full_attention"}),
        "quantization_config": bool(config.quantization_config),
        rope_key: config.rope_type != "default" or config.rope.get("partial_rotary_factor", 1) != 1,
    }
    yield from (key for key, is_unusual in unusual.items() if is_unusual)


_GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
"""Keys of a GGUF file, without the family in front, by those of a config.json."""


def config_of_gguf(header: GgufHeader) -> HfConfig:
    """Return what a config.json would say of the model; ConfigError with GGUF's own key for a value that it cannot."""
    vocab_size = header.of_model("vocab_size") or header.metadata.get("tokenizer.ggml.tokens")
    raw = {ours: header.of_model(key) for ours, key in _GGUF_KEYS.items()}
    raw |= {
        "model_type": header.architecture,
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    try:
        stated = {key: value for key, value in raw.items() if value is not None}
        return HfConfig.model_validate(stated, strict=True)
    except ValidationError as e:
        family = header.architecture
        names = {ours: f"{family}.{key}" for ours, key in (_GGUF_KEYS | {"vocab_size": "vocab_size"}).items()}
        wrong = "; ".join(_what_is_wrong(error, names) for error in e.errors())
        raise ConfigError(f"{header.path}: {wrong}; take another conversion of the model") from e


# ---- checks ----


def check_architecture(folder: Path, *, is_trained: bool = True) -> None:
    """Raise ConfigError for a model that generates no text, and, if it is trained, for features that Klear's packed
    forward pass would silently leave out.

    They are scaled logits or attention, attention other than full or sliding, state-space layers, experts, and
    positions that depend on the batch.
    """
    path = folder / "config.json"
    raw = _read_raw(path)
    if is_trained and isinstance(raw, dict) and (experts := _experts_within(raw)) > 1:
        raise ConfigError(
            f"{path}: {raw.get('model_type')} is a mixture of {experts} experts; Klear trains dense models only, "
            "because engines and learner would choose other experts for the same token, and nothing replays the "
            "engine's choice"
        )
    config = read_hf_config(folder)
    base = (config.rope_parameters or {}).get("rope_theta")
    if config.rope_scaling and base not in (None, config.theta):
        raise ConfigError(
            f"{path}: rope_scaling takes the place of rope_parameters, so that their rope_theta = {base} is not read "
            f"and {config.theta:g} is; write it into rope_scaling, too, or keep one of the two"
        )
    # A config without `architectures` is accepted: transformers chooses the class by `model_type`.
    classes = config.architectures or ()
    # vLLM also samples text from models that read pictures, …ForConditionalGeneration.
    accepted = ("ForCausalLM",) if is_trained else ("ForCausalLM", "ForConditionalGeneration")
    if classes and not any(name.endswith(accepted) for name in classes):
        verb, known = "trains" if is_trained else "samples from", " or ".join(f"…{name}" for name in accepted)
        raise ConfigError(f"{path}: architectures = {list(classes)}; Klear {verb} causal language models, {known}")
    if is_trained:
        _check_forward_pass(path, config)


def _check_forward_pass(path: Path, config: HfConfig) -> None:
    if config.quantization_config:
        method = config.quantization_config.get("quant_method", "a method that it does not name")
        raise ConfigError(f"{path}: the weights are quantised ({method}); train the model that was quantised")
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


def _what_is_wrong(error: Any, names: Mapping[str, str] | None = None) -> str:
    """Return an error of pydantic in words, with the key that is wrong, or what `names` calls it."""
    key = ".".join(map(str, error["loc"]))
    key = (names or {}).get(key, key)
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
