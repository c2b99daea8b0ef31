"""List the sizes of well-known models, so that a plan can estimate for a model that is not on this machine yet."""

from __future__ import annotations

from klear_core.config.train import HfModelConfig, HubModelConfig, ModelConfig
from klear_core.pipeline.model_size import ModelSize, model_size


def _size(
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    heads: tuple[int, int, int],
    mlp_size: int,
    *,
    is_tied: bool,
    is_fused: bool,
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
    )


_QWEN3_8B = _size(151_936, 4096, 36, (32, 8, 128), 12_288, is_tied=False, is_fused=True)
_QWEN25_7B = _size(152_064, 3584, 28, (28, 4, 128), 18_944, is_tied=False, is_fused=False)

# From the config.json of each model's repository.
_SIZES = {
    "qwen3-0.6b": _size(151_936, 1024, 28, (16, 8, 128), 3072, is_tied=True, is_fused=True),
    "qwen3-1.7b": _size(151_936, 2048, 28, (16, 8, 128), 6144, is_tied=True, is_fused=True),
    "qwen3-4b": _size(151_936, 2560, 36, (32, 8, 128), 9728, is_tied=True, is_fused=True),
    "qwen3-8b": _QWEN3_8B,
    "qwen3-14b": _size(151_936, 5120, 40, (40, 8, 128), 17_408, is_tied=False, is_fused=True),
    "qwen3-32b": _size(151_936, 5120, 64, (64, 8, 128), 25_600, is_tied=False, is_fused=True),
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
