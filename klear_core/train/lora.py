"""Wrap a model's linear layers with LoRA adapters, name them and the weights under them, and save them for peft.

LoRA (arXiv 2106.09685) keeps a weight W and trains W + alpha / rank * B A. `peft` is imported nowhere else.
Axis letters: R rank, I and O inputs and outputs of a linear layer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from klear_core.config.train import LoraConfig
from klear_core.errors import ConfigError

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

FOLDER = "adapter"
"""Folder of the adapter in an artifact, beside the merged model."""
_NAME = "default"  # under which peft's layers keep their adapter
_BASE = ".base_layer."
_A, _B = f".lora_A.{_NAME}.", f".lora_B.{_NAME}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters of a model: their settings, and the seed of their initial weights."""

    cfg: LoraConfig
    seed: int

    @property
    def scale(self) -> float:
        """Return the factor of the product B A."""
        return self.cfg.alpha / self.cfg.rank


def add_adapters(hf: nn.Module, adapters: Adapters) -> None:
    """Wrap the target layers in place and freeze all other weights, which keep their dtype; adapters are float32.

    Raise ConfigError if a target names no linear layer of the blocks.
    """
    from peft import inject_adapter_in_model

    cfg = _peft_config(adapters.cfg, _targets_in(hf, adapters.cfg))
    # peft draws from the global generator: restore it afterwards, and draw the weights from our seed.
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(cfg, hf, _NAME)
    generator = torch.Generator().manual_seed(adapters.seed)
    for name, weight in hf.named_parameters():
        if is_adapter(name):
            # peft gives adapters the dtype of their layer: in bfloat16 small updates would be lost.
            weight.data = weight.data.float()
        # With B = 0 the first step sees the base model. The range of A is that of torch's linear layers and of peft.
        if _B in name:
            nn.init.zeros_(weight)
        # On `meta` there is no memory to draw into; the caller fills it in later.
        elif _A in name and not weight.is_meta:
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound, generator=generator)


def is_adapter(name: str) -> bool:
    """Return whether a weight of this name belongs to an adapter."""
    return _A in name or _B in name


def base_name(name: str) -> str:
    """Return the name of a weight in the model without adapters."""
    return name.replace(_BASE, ".")


def factor_names(name: str) -> tuple[str, str] | None:
    """Return the names of A and B by which the weight `name` is changed; None if it has no adapter."""
    # The bias of a wrapped layer stays as it is.
    if _BASE not in name or not name.endswith(".weight"):
        return None
    return name.replace(_BASE, _A), name.replace(_BASE, _B)


def merge(weight_OI: Tensor, factors: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """Return the weight with its adapter added, in float32 whatever the weight's own dtype is."""
    a_RI, b_OR = factors
    # The factors are float32, and torch widens the sum to it.
    return weight_OI + (b_OR @ a_RI) * scale


@contextmanager
def without_adapters(hf: nn.Module) -> Iterator[None]:
    """Make the model compute as its base model inside the context."""
    layers: list[Any] = [module for module in hf.modules() if hasattr(module, "lora_A")]
    scales = [layer.scaling[_NAME] for layer in layers]
    # A scale of 0 leaves the weights alone; peft's own switch would also freeze the adapters.
    for layer in layers:
        layer.scaling[_NAME] = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[_NAME] = scale


def save_adapter(weights: Mapping[str, Tensor], adapters: Adapters, target: Path) -> None:
    """Write adapter weights as a folder that `PeftModel.from_pretrained(base_model, folder)` loads."""
    from safetensors.torch import save_file

    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    renamed = {}
    for name, weight in weights.items():
        # peft's names in files: with the wrapper's prefix, and without the adapter's name.
        renamed["base_model.model." + name.replace(f".{_NAME}.", ".")] = weight.contiguous()
    save_file(renamed, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = {name.partition(_A)[0].rpartition(".")[2] for name in weights if _A in name}
    settings = _peft_config(adapters.cfg, sorted(targets)).to_dict() | {"inference_mode": True}
    # Sorted, because sets have another order in each process, and the same run must write the same file.
    text = json.dumps(settings, indent=2, sort_keys=True, default=sorted)
    (temporary / "adapter_config.json").write_text(text + "\n")
    # Left by a run that was killed after its rename; the rename below needs the name to be free.
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def _targets_in(hf: Any, cfg: LoraConfig) -> list[str]:
    """Return the last parts of the names of the layers to wrap."""
    # The LM head and the embedding lie outside the blocks: the fused head reads the plain weight.
    blocks = hf.base_model.layers.named_modules()
    linear = sorted({name.rpartition(".")[2] for name, module in blocks if isinstance(module, nn.Linear)})
    if cfg.targets == "all-linear":
        return linear
    unknown = sorted(set(cfg.targets) - set(linear))
    if unknown:
        raise ConfigError(f"lora.targets: this model's blocks have no linear layer {unknown[0]!r}; they have {linear}")
    return sorted(set(cfg.targets))


def _peft_config(cfg: LoraConfig, targets: list[str]) -> PeftConfig:
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=cfg.rank, lora_alpha=cfg.alpha, lora_dropout=cfg.dropout, target_modules=targets, task_type="CAUSAL_LM"
    )
