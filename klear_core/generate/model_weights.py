"""Read the weights that engines load, and check names and shapes before any tensor is copied.

This is a file of its own because it is imported without torch.
"""

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
"""The output head. It may be present although weights are tied, and then repeats the embedding."""
_FREQUENCIES = ".rotary_emb.inv_freq"
"""Constants that old files of Llamas have in each layer; transformers and vLLM leave them out, too."""

Shapes = Mapping[str, tuple[int, ...]]


def tensor_shapes(weights: WeightSource) -> Shapes:
    """Return the shape of every weight by its Hugging Face name.

    Reads only the headers of a folder's files, and fetches nothing of an offer.
    """
    if isinstance(weights, WeightOffer):
        return {tensor.name: tensor.shape for tensor in weights.tensors}
    if not isinstance(weights, Path):
        return {name: tuple(tensor.shape) for name, tensor in weights.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _files(weights):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if not name.endswith(_FREQUENCIES)]  # noqa: SIM118
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes


def wanted_shapes(model_folder: Path) -> Shapes:
    """Return the shapes that new weights must have. A tied head is optional, even if the folder stores it."""
    is_tied = read_hf_config(model_folder).tie_word_embeddings
    return {name: shape for name, shape in tensor_shapes(model_folder).items() if not (is_tied and name == HEAD)}


def tensors(weights: WeightSource) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors, one at a time. An offer can be fetched once. Raise RuntimeError if the learner disappears."""
    if isinstance(weights, WeightOffer):
        from klear_core.generate.weight_transfer import fetch

        # rank 0 is the learner; an engine that reads here has one process
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
    """Raise ConfigError unless names and shapes are those expected; an extra head is allowed."""
    # missing ones too: an engine keeps its old tensor for each of them, and would answer from two policies
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(found.keys() - expected.keys() - {HEAD})
    if missing or unknown:
        raise ConfigError(
            f"weights do not fit the model: missing {missing[:3]} ({len(missing)}), "
            f"unknown {unknown[:3]} ({len(unknown)})"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ConfigError(f"weights do not fit the model: {name} has shape {found[name]}, expected {shape}")


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    # The single file comes first, as in transformers: learner and engine must read the same weights.
    if index.is_file() and not (folder / "model.safetensors").is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    paths = [folder / name for name in sorted(names)]
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path} is missing: engines read safetensors weights")
    return paths
