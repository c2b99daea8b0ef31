"""Weights as engines get them: names and shapes checked before the first tensor is touched."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from klear_core.errors import ConfigError
from klear_core.generate.engine import WeightOffer, WeightSource
from klear_core.hf_config import read_hf_config

if TYPE_CHECKING:
    from torch import Tensor

HEAD = "lm_head.weight"
"""May come along with tied weights, where it is the embedding once more."""

Shapes = Mapping[str, tuple[int, ...]]


def tensor_shapes(weights: WeightSource) -> Shapes:
    """The shape of every tensor, by its Hugging Face name; of a folder only the headers are read, of an offer nothing is fetched."""
    if isinstance(weights, WeightOffer):
        return {tensor.name: tensor.shape for tensor in weights.tensors}
    if not isinstance(weights, Path):
        return {name: tuple(tensor.shape) for name, tensor in weights.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _files(weights):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def wanted_shapes(model_folder: Path) -> Shapes:
    """What new weights for this folder's model must hold. A tied head need not come, also if the folder stores it."""
    is_tied = read_hf_config(model_folder).tie_word_embeddings
    return {name: shape for name, shape in tensor_shapes(model_folder).items() if not (is_tied and name == HEAD)}


def tensors(weights: WeightSource) -> Iterator[tuple[str, Tensor]]:
    """All tensors, one at a time. An offer can be fetched once; RuntimeError if the learner goes away meanwhile."""
    if isinstance(weights, WeightOffer):
        from klear_core.generate.transfer import fetch

        yield from fetch(weights, rank=1)
        return
    if not isinstance(weights, Path):
        yield from weights.items()
        return
    for path in _files(weights):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def check_shapes(found: Shapes, expected: Shapes) -> None:
    """ConfigError unless the names and shapes are those expected, give or take a tied head."""
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(found.keys() - expected.keys() - {HEAD})
    if missing or unknown:
        raise ConfigError(f"weights do not fit the model: missing {missing[:3]} ({len(missing)}), unknown {unknown[:3]} ({len(unknown)})")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ConfigError(f"weights do not fit the model: {name} has shape {found[name]}, expected {shape}")


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    paths = [folder / name for name in sorted(names)]
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path} is missing: engines read safetensors weights")
    return paths
