"""Choose and check the files of a Hugging Face model: config, safetensors weights and tokenizer, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from klear_core.artifacts.hub import HubFile, HubFiles, Progress, fetch, published_files
from klear_core.artifacts.manifest import Manifest
from klear_core.config.train import GgufModelConfig, HubModelConfig, PublishedModel
from klear_core.errors import ConfigError
from klear_core.gguf_checks import check_gguf
from klear_core.hf_config import check_architecture, check_model_type, read_hf_config

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
CARD = "README.md"
SERVED = "served.json"
"""File of an artifact that stands for a model served elsewhere: its name and addresses."""
_CONFIG = "config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENIZER = "tokenizer.json"
_TEMPLATE = "chat_template.jinja"
_OPTIONAL = (
    CARD,
    "generation_config.json",
    _TEMPLATE,
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    _TOKENIZER,
    "tokenizer.model",
    "vocab.json",
)
_ADAPTER = "adapter_config.json"
_LFS = b"version https://git-lfs"


def repo_of(model: HubModelConfig) -> HubFiles:
    """Return the repository that a model is downloaded from."""
    return HubFiles(type="model", repo=model.repo, revision=model.revision, runtime=model.runtime)


def folder_of(model: PublishedModel) -> Path:
    """Return the model's folder, or its GGUF file; for a model of the Hub, the folder where its files are or will
    be."""
    return repo_of(model).folder if isinstance(model, HubModelConfig) else Path(model.path)


def is_same_model(one: Manifest, other: Manifest) -> bool:
    """Return whether two artifacts of models hold or point to the same files; their cards may differ.

    A model that is scored by its folder, as a given one, is then known as the model of the stage that made it.
    """
    if (one.kind, one.fingerprint) == (other.kind, other.fingerprint):
        return True
    files = [_content_of(manifest) for manifest in (one, other)]
    smaller, larger = sorted(files, key=len)  # an artifact's folder may have files beside those of the model
    return bool(smaller) and smaller <= larger


def _content_of(model: Manifest) -> set[tuple[str, str]]:
    """Return name and checksum of the files of a model's artifact, or of those that it points to, without the card."""
    files = model.files if model.given is None else model.given.files
    prefix = "model/" if model.given is None else ""
    found = {(f.path.removeprefix(prefix), f.sha256) for f in files if f.path.startswith(prefix)}
    return {(name, checksum) for name, checksum in found if name != CARD}


def origin_of(model: PublishedModel) -> str:
    """Return where a model comes from, for people: its folder or file, or `owner/name@0123456`."""
    return f"{model.repo}@{model.revision[:7]}" if isinstance(model, HubModelConfig) else model.path


def is_here(model: PublishedModel) -> bool:
    """Return whether all files of a model are on this machine. Nothing is downloaded."""
    folder = folder_of(model)
    try:
        names = model_files(_names_in(folder), at=str(folder))
        return not _missing_shards(folder, names)
    except ConfigError:
        return False


def model_files(names: Collection[str], *, at: str) -> list[str]:
    """Return which of a folder's files make up the model, sorted; weights in other formats are left out.

    Raise ConfigError if the config, the weights or the tokenizer is missing.
    """
    if _CONFIG not in names:
        what = "an adapter without its base model; merge the two first" if _ADAPTER in names else "not a model"
        raise ConfigError(f"{at}: no {_CONFIG} there, so this is {what}")
    weights = weight_files(names)
    if not weights:
        others = sorted(name for name in names if name.endswith((".bin", ".pth", ".pt", ".gguf", ".safetensors")))
        there = f"there are {', '.join(others[:4])}; convert them with transformers" if others else "there are none"
        raise ConfigError(f"{at}: no {WEIGHTS} and no shards model-*.safetensors there; weights: {there}")
    # Loaders find the shard of a weight by the index.
    if weights != [WEIGHTS]:
        if WEIGHTS_INDEX not in names:
            raise ConfigError(f"{at}: has {len(weights)} shards of weights and no {WEIGHTS_INDEX}")
        weights.append(WEIGHTS_INDEX)
    # Engines read tokenizer.json alone; transformers writes it if it can make one of the other forms.
    if _TOKENIZER_CONFIG not in names or _TOKENIZER not in names:
        raise ConfigError(f"{at}: no tokenizer there: {_TOKENIZER_CONFIG} and tokenizer.json are needed")
    return sorted([_CONFIG, _TOKENIZER_CONFIG, *weights, *(name for name in _OPTIONAL if name in names)])


def weight_files(names: Collection[str]) -> list[str]:
    """Return which of a folder's files hold its model's weights: a single file, else the shards; empty if none does."""
    if WEIGHTS in names:
        return [WEIGHTS]
    return sorted(name for name in names if name.startswith("model") and name.endswith(".safetensors"))


def check_model(model: PublishedModel, *, is_trained: bool = True) -> None:
    """Raise ConfigError if a model cannot be used, before anything is spent. One that is not trained here may have
    what only vLLM computes, such as experts.

    Of a model of the Hub that is not here, the names of its files and its config.json are fetched.
    """
    if isinstance(model, GgufModelConfig):
        check_gguf(Path(model.path))
    elif isinstance(model, HubModelConfig) and not is_here(model):
        repo = repo_of(model)
        _published(repo)  # for its errors: no such repository, or files missing in it
        fetch_small(repo)
        check_architecture(repo.folder, is_trained=is_trained)
        check_model_type(repo.folder)
    else:
        check_folder(folder_of(model), is_trained=is_trained)
        check_whole(folder_of(model))


def check_whole(folder: Path) -> None:
    """Raise ConfigError for a file of a model that git-lfs has not fetched, or that is cut off, and for weights of
    another size than config.json's."""
    names = model_files(_names_in(folder), at=str(folder))
    for name in names:
        if fault := _fault_of(folder / name):
            raise ConfigError(f"{folder / name}: {fault}")
    shapes: dict[str, list[int]] = {}
    for name in weight_files(names):
        with (folder / name).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {key: tensor["shape"] for key, tensor in header.items() if key != "__metadata__"}
    _check_sizes(folder, shapes)


def _check_sizes(folder: Path, shapes: Mapping[str, list[int]]) -> None:
    config = read_hf_config(folder)
    stated = [config.vocab_size, config.hidden_size]
    found = shapes.get("model.embed_tokens.weight", stated)
    if found != stated:
        raise ConfigError(
            f"{folder}: config.json has vocab_size = {stated[0]} and hidden_size = {stated[1]}, but the embedding of "
            f"its weights is {' x '.join(map(str, found))}; is it the config of another model?"
        )
    # transformers would leave out further layers without a word.
    numbers = {int(name.split(".")[2]) for name in shapes if name.startswith("model.layers.")}
    num_layers = config.num_hidden_layers + (config.num_nextn_predict_layers or 0)
    if numbers and max(numbers) >= num_layers:
        raise ConfigError(
            f"{folder}: config.json has {num_layers} layers, but its weights have {max(numbers) + 1}; is it the config "
            "of another model?"
        )


def _fault_of(path: Path) -> str:
    """Return why a file cannot be used; empty if its beginning and size, or its JSON, show nothing."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            return "a pointer of git-lfs, and not the file itself; run `git lfs pull` in its folder"
        file.seek(0)
        try:
            if path.suffix == ".json":
                json.loads(file.read())
            elif path.suffix == ".safetensors":
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, size)))
                ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
                whole = 8 + length + max(ends, default=0)
                if size < whole:
                    return f"cut off: it has {size:,} bytes of {whole:,}; fetch it again"
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            return f"cut off or damaged ({type(e).__name__}: {e}); fetch it again"
    return ""


def check_folder(folder: Path, *, is_trained: bool = True) -> list[str]:
    """Return the names of the files that make up the model in a folder; raise ConfigError if it is none, or if it is
    to be trained and cannot be."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; relative paths are taken from {Path.cwd()}")
    present = _names_in(folder)
    if _CONFIG in present:  # what it says comes first: other kinds of models have other files
        check_architecture(folder, is_trained=is_trained)
        check_model_type(folder)
    names = model_files(present, at=str(folder))
    missing = _missing_shards(folder, names)
    if missing:
        raise ConfigError(f"{folder}: {len(missing)} of its weight files are missing ({', '.join(missing[:4])})")
    if not _has_template(folder):
        raise ConfigError(
            f"{folder}: the tokenizer has no chat template, which every stage needs; base models often lack one: save "
            f"the template that it is to learn, or that of its chat model, there as {_TEMPLATE}"
        )
    return names


def _has_template(folder: Path) -> bool:
    """Return False if a tokenizer has no chat template; a file that is no JSON is refused where it is loaded."""
    template = folder / _TEMPLATE
    if template.is_file():  # it has priority over the one in the config
        return bool(template.read_bytes().strip())
    if (folder / "additional_chat_templates").is_dir():
        return True
    try:
        declared = json.loads((folder / _TOKENIZER_CONFIG).read_text(encoding="utf-8"))
    except ValueError:
        return True
    return not isinstance(declared, dict) or bool(declared.get("chat_template"))


def download(model: HubModelConfig, progress: Progress) -> Path:
    """Return the folder of a model in the Hub's cache, after fetching what is not there yet."""
    repo = repo_of(model)
    if not is_here(model):
        wanted = _published(repo)
        fetch(repo, [file.name for file in wanted], progress)
    return repo.folder


def download_gb(model: PublishedModel) -> float | None:
    """Return the gigabytes that are still to be downloaded; None if the Hub does not say."""
    return gigabytes_of(files_to_fetch(model)) if isinstance(model, HubModelConfig) else 0.0


def files_to_fetch(model: HubModelConfig) -> dict[str, int | None]:
    """Return the files that are still to be downloaded with their bytes; None if the Hub does not say."""
    return {} if is_here(model) else {file.name: file.size for file in _published(repo_of(model))}


def gigabytes_of(files: Mapping[str, int | None]) -> float | None:
    """Return the gigabytes of these files; None if the size of one is not known."""
    known = [size for size in files.values() if size is not None]
    return sum(known) / 1e9 if len(known) == len(files) else None


def fetch_small(repo: HubFiles) -> None:
    """Fetch a repository's config.json, from which its size and architecture follow."""
    if _CONFIG not in _names_in(repo.folder):
        fetch(repo, [_CONFIG])


def token_ids(model: PublishedModel) -> dict[str, int] | None:
    """Return the id of each token of a model, by its tokenizer.json, which is fetched if the model is not here.

    None of a GGUF file, or if the vocabulary is no plain table.
    """
    if isinstance(model, GgufModelConfig):
        return None
    if isinstance(model, HubModelConfig) and _TOKENIZER not in _names_in(folder_of(model)):
        fetch(repo_of(model), [_TOKENIZER])
    try:
        tokenizer = json.loads((folder_of(model) / _TOKENIZER).read_text())
    except (OSError, ValueError):
        return None
    vocabulary = tokenizer.get("model", {}).get("vocab")
    if not isinstance(vocabulary, dict):
        return None
    return vocabulary | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}


def licence_in(folder: Path) -> str:
    """Return the licence that a model or dataset card states in its header, several with commas; empty if none."""
    try:
        lines = (folder / CARD).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    if not lines or lines[0].strip() != "---":
        return ""
    header = list(takewhile(lambda line: line.strip() != "---", lines[1:]))
    for number, line in enumerate(header):
        key, _, value = line.partition(":")
        if key.strip() == "license":
            stated = value.strip().strip("[]").split(",") if value.strip() else _items(header[number + 1 :])
            return ", ".join(licence.strip().strip("'\"") for licence in stated)
    return ""


def _items(lines: Sequence[str]) -> list[str]:
    """Return the items of the YAML list that these lines begin with, one a line."""
    items = takewhile(lambda line: line.lstrip().startswith("- "), lines)
    return [item.lstrip().removeprefix("- ") for item in items]


def _published(repo: HubFiles) -> list[HubFile]:
    files = {file.name: file for file in published_files(repo)}
    return [files[name] for name in model_files(files, at=str(repo))]


def _names_in(folder: Path) -> set[str]:
    if not folder.is_dir():
        return set()
    return {file.name for file in folder.iterdir() if file.is_file()}


def _missing_shards(folder: Path, names: Iterable[str]) -> list[str]:
    if WEIGHTS_INDEX not in names:
        return []
    path = folder / WEIGHTS_INDEX
    try:
        shards = json.loads(path.read_text())["weight_map"].values()
    except (ValueError, KeyError, AttributeError, OSError) as e:
        raise ConfigError(f"{path}: not an index of weights ({type(e).__name__}: {e})") from e
    return sorted(name for name in set(shards) if not (folder / name).is_file())
