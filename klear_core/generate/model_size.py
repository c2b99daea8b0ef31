"""Read or look up the sizes of a model, and estimate from them what an engine holds and how fast it samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from klear_core.artifacts.model_files import folder_of
from klear_core.config.evaluate import HardwareConfig, VllmEngineConfig
from klear_core.config.train import GgufModelConfig, HfModelConfig, HubModelConfig, ModelConfig, TinyModelConfig
from klear_core.errors import ConfigError
from klear_core.hf_config import HfConfig, read_hf_config

_BYTE_VOCAB = 320
"""Vocabulary of the tiny model's tokenizer: 256 bytes and 5 special tokens, padded to a multiple of 64
(`prompts.padded_vocab_size`; building the tokenizer here would load transformers)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes of a decoder."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    """Width of the MLP, or of all experts of a mixture."""
    is_tied: bool
    """The LM head is the embedding's tensor."""
    is_fused: bool
    """On a GPU its norms, rotations and gates run as one compiled pass each (`train/kernels/fused.py`)."""
    idle_mlp_size: int = 0
    """Width of the experts that a token does not use."""

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

    @property
    def active_layer_params(self) -> int:
        """Return the weights of a layer that a token uses."""
        return self.layer_params - 3 * self.hidden_size * self.idle_mlp_size

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
        case HfModelConfig() | HubModelConfig() | GgufModelConfig():
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
        mlp_size=config.mlp_size,
        is_tied=bool(config.tie_word_embeddings),
        is_fused=config.model_type == "qwen3",
        idle_mlp_size=config.idle_mlp_size,
    )


# ---- known models ----
# List the sizes of well-known models, so that a plan can estimate for a model that is not on this machine yet.


def _size(
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    heads: tuple[int, int, int],
    mlp_size: int,
    *,
    is_tied: bool,
    is_fused: bool,
    idle_mlp_size: int = 0,
) -> ModelSize:
    """Return a size; `heads` are query heads, key heads, and the size of a head."""
    return ModelSize(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        mlp_size=mlp_size,
        is_tied=is_tied,
        is_fused=is_fused,
        idle_mlp_size=idle_mlp_size,
    )


_QWEN3_8B = _size(151_936, 4096, 36, (32, 8, 128), 12_288, is_tied=False, is_fused=True)
_QWEN3_30B_A3B = _size(
    151_936, 2048, 48, (32, 4, 128), 128 * 768, is_tied=False, is_fused=False, idle_mlp_size=120 * 768
)
_QWEN25_7B = _size(152_064, 3584, 28, (28, 4, 128), 18_944, is_tied=False, is_fused=False)

# From the config.json of each model's repository.
_SIZES = {
    "qwen3-0.6b": _size(151_936, 1024, 28, (16, 8, 128), 3072, is_tied=True, is_fused=True),
    "qwen3-1.7b": _size(151_936, 2048, 28, (16, 8, 128), 6144, is_tied=True, is_fused=True),
    "qwen3-4b": _size(151_936, 2560, 36, (32, 8, 128), 9728, is_tied=True, is_fused=True),
    "qwen3-8b": _QWEN3_8B,
    "qwen3-14b": _size(151_936, 5120, 40, (40, 8, 128), 17_408, is_tied=False, is_fused=True),
    "qwen3-32b": _size(151_936, 5120, 64, (64, 8, 128), 25_600, is_tied=False, is_fused=True),
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "qwen3-30b-a3b-thinking-2507": _QWEN3_30B_A3B,
    "klear-reasoner-8b": _QWEN3_8B,
    "klear-reasoner-8b-sft": _QWEN3_8B,
    "qwen2.5-1.5b": _size(151_936, 1536, 28, (12, 2, 128), 8960, is_tied=True, is_fused=False),
    "qwen2.5-7b": _QWEN25_7B,
    "qwen2.5-math-7b": _QWEN25_7B,
    "deepseek-r1-distill-qwen-7b": _QWEN25_7B,
    "llama-3.1-8b": _size(128_256, 4096, 32, (32, 8, 128), 14_336, is_tied=False, is_fused=False),
    "llama-3.2-1b": _size(128_256, 2048, 16, (32, 8, 64), 8192, is_tied=True, is_fused=False),
    "llama-3.2-3b": _size(128_256, 3072, 28, (24, 8, 128), 8192, is_tied=True, is_fused=False),
}


def known_size(path: str) -> ModelSize | None:
    """Return the size of a model by the last part of its path or repository (`Qwen/Qwen3-8B-Base`); None if unknown."""
    name = path.rstrip("/").rsplit("/", 1)[-1].lower()
    # Training on chats changes no size.
    for suffix in ("-base", "-instruct"):
        name = name.removesuffix(suffix)
    return _SIZES.get(name)


def planned_size(model: ModelConfig) -> ModelSize | None:
    """Return a model's size from its files, or from the list if it is not here; None if it is neither."""
    size = model_size(model)
    if size is not None:
        return size
    match model:
        case HfModelConfig(path=name) | HubModelConfig(repo=name):
            return known_size(name)
        case _:
            return None


# ---- engines ----
# Estimate what an inference engine holds and how fast it samples, from sizes and a GPU's memory and bandwidth.


VALUE_BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes of a weight, or of a number in the KV cache, by the engine's dtype."""
_DECODING_PRODUCTS = 0.4
"""Share of the peak that the products of a large decoding batch reach. Ours; not measured on a GPU."""
_WORKSPACE_GB = 3.0
"""Memory per GPU for activations of the largest batch, CUDA graphs and NCCL. Ours; not measured on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFit:
    """A vLLM engine on GPUs of a given memory."""

    weights_gb: float
    """Gigabytes of weights per GPU."""
    cache_tokens: int
    """Tokens that fit into the KV cache of all its GPUs; 0 if not even the weights fit."""
    longest: int
    """Tokens of the longest prompt with its answer."""
    tokens_per_s: float
    """Estimated speed when it is full, over all its GPUs; 0 if nothing fits."""

    @property
    def sequences(self) -> int:
        """Return the number of answers of full length that fit at once."""
        return self.cache_tokens // self.longest


def engine_fit(size: ModelSize, engine: VllmEngineConfig, hardware: HardwareConfig, *, longest: int) -> EngineFit:
    """Return what fits, and the speed of decoding as the time to read weights and cache once per token.

    The answers are on average half as long as the longest. `hardware.gpu_memory_gb` must be known.
    """
    assert hardware.gpu_memory_gb is not None
    ranks, value_bytes = engine.runtime.tensor_parallel, VALUE_BYTES[engine.dtype]
    weights = size.num_params * value_bytes
    token_bytes = _token_bytes(size, engine)
    usable = engine.runtime.gpu_memory_utilization * hardware.gpu_memory_gb * 1e9 * ranks
    free = usable - weights - _WORKSPACE_GB * 1e9 * ranks
    if engine.runtime.kv_cache_mb is not None:
        free = min(free, (engine.runtime.kv_cache_mb << 20) * ranks)
    cache_tokens = max(0, int(free / token_bytes))
    # Twice as many answers as of full length, for on average they are half as long.
    batch = min(engine.runtime.max_num_seqs, 2 * cache_tokens // longest)
    speed = 0.0
    if batch:
        speed = batch / step_seconds(size, engine, hardware, batch=batch, cached_tokens=batch * longest / 2)
    return EngineFit(weights_gb=weights / ranks / 1e9, cache_tokens=cache_tokens, longest=longest, tokens_per_s=speed)


def step_seconds(
    size: ModelSize, engine: VllmEngineConfig, hardware: HardwareConfig, *, batch: int, cached_tokens: float
) -> float:
    """Return the seconds of one decoding step: a token for each of `batch` answers, with so many tokens cached."""
    ranks = engine.runtime.tensor_parallel
    bandwidth = hardware.memory_tb_per_s * 1e12 * hardware.decoding_efficiency * ranks
    weights = size.num_params * VALUE_BYTES[engine.dtype]
    reading_s = (weights + cached_tokens * _token_bytes(size, engine)) / bandwidth
    # A large batch is bound by arithmetic: two operations per weight and token.
    active = size.embedding_params + size.num_layers * size.active_layer_params
    computing_s = 2 * active * batch / (hardware.peak_tflops * 1e12 * _DECODING_PRODUCTS * ranks)
    return max(reading_s, computing_s)


def _token_bytes(size: ModelSize, engine: VllmEngineConfig) -> int:
    # Key heads are split over the ranks, or copied where there are more ranks than heads.
    copies = max(1, engine.runtime.tensor_parallel // size.num_kv_heads)
    # 2: a key and a value for each layer and key head.
    return 2 * size.num_layers * size.kv_size * copies * VALUE_BYTES[engine.dtype]
