"""Prepare a model to start from: write a tiny random Qwen3, or a pointer to a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from klear_core.artifacts.files import hash_all, sha256_of
from klear_core.artifacts.hub import check_content
from klear_core.artifacts.manifest import POINTER, FileRecord, GivenRecord, StageSummary
from klear_core.artifacts.model_files import (
    SERVED,
    check_folder,
    check_whole,
    download,
    licence_in,
    origin_of,
    repo_of,
    weight_files,
)
from klear_core.config.evaluate import LocalEngineConfig, VllmEngineConfig
from klear_core.config.train import GgufModelConfig, HubModelConfig, ModelConfig, PublishedModel, TinyModelConfig
from klear_core.errors import ArtifactError, ConfigError
from klear_core.gguf_checks import check_gguf
from klear_core.hf_config import read_hf_config
from klear_core.metrics import Telemetry
from klear_core.seeding import seed_for

if TYPE_CHECKING:
    from torch import nn

    from klear_core.prompts import Tokenizer


_LOSS = "its weights differ a little from those that were published before they were quantised"


def prepare_base(cfg: ModelConfig, *, seed: int, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Write a model to `workdir/model`, or to `workdir/model.json` a pointer to a folder too big to copy."""
    if isinstance(cfg, TinyModelConfig):
        telemetry.progress(0, 1, "base model")
        summary = _make_tiny(cfg, seed=seed, folder=workdir / "model")
        telemetry.progress(1, 1, "base model")
        return summary
    return take_model(cfg, licence="", workdir=workdir, telemetry=telemetry)


def take_model(
    cfg: PublishedModel, *, licence: str, is_trained: bool = True, workdir: Path, telemetry: Telemetry
) -> StageSummary:
    """Write `workdir/model.json`, a pointer to a model that exists; download it first if it is from the Hub.

    A GGUF file is dequantised into `workdir/model`. ConfigError if the model has an architecture that cannot be trained
    and `is_trained`.

    The summary records where it is from, its licence (that of its card unless given) and a checksum of each of its
    files.
    """
    if isinstance(cfg, GgufModelConfig):
        return _take_gguf(cfg, licence=licence, workdir=workdir, telemetry=telemetry)
    if isinstance(cfg, HubModelConfig):
        folder = download(cfg, partial(_show_download, telemetry)).resolve()
        names = check_folder(folder, is_trained=is_trained)
        checksums = check_content(repo_of(cfg), names)
    else:
        folder = Path(cfg.path).resolve()
        names = check_folder(folder, is_trained=is_trained)
        check_whole(folder)
        checksums = dict(zip(names, hash_all([folder / name for name in names]), strict=True))
    summary = _point_to(folder, cfg.max_position_embeddings, workdir)
    files = [FileRecord(path=n, size=(folder / n).stat().st_size, sha256=checksums[n]) for n in names]
    given = GivenRecord(
        origin=origin_of(cfg), licence=licence or licence_in(folder) or "not stated", files=tuple(files)
    )
    return summary.model_copy(update={"given": given})


def _take_gguf(cfg: GgufModelConfig, *, licence: str, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Write the model of a GGUF file to `workdir/model`; a folder that is whole, of a killed run, stays."""
    from klear_core.train.gguf_files import quantisations, write_folder

    file, folder = Path(cfg.path).resolve(), workdir / "model"
    header = check_gguf(file)
    telemetry.progress(0, 1, f"{file.name} dequantised")
    if not folder.is_dir():
        temporary = folder.with_name("model.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        write_folder(file, temporary, window=cfg.max_position_embeddings)
        check_folder(temporary)
        temporary.rename(folder)
    tokenizer = _checked_tokenizer(folder)
    telemetry.progress(1, 1, f"{file.name} dequantised")
    record = FileRecord(path=file.name, size=file.stat().st_size, sha256=sha256_of(file))
    licence = licence or str(header.metadata.get("general.license", "")) or "not stated"
    return StageSummary(
        counts={"parameters": header.num_params},
        notes=(f"dequantised from {file.name} ({quantisations(header)}): {_LOSS}", *_end_notes(folder, tokenizer)),
        given=GivenRecord(origin=origin_of(cfg), licence=licence, files=(record,)),
    )


def _show_download(telemetry: Telemetry, done: int, total: int) -> None:
    megabytes = 2**20
    telemetry.progress(done // megabytes, max(total // megabytes, 1), "MiB of the model downloaded")


def model_folder(artifact: Path) -> Path:
    """Return the Hugging Face folder of a model artifact; one that is given stays as it is.

    Raise ArtifactError if the target of the artifact is gone or changed.
    """
    if (artifact / "config.json").is_file():
        return artifact
    folder = artifact / "model"
    if folder.is_dir():
        return folder
    if (artifact / SERVED).is_file():
        raise ArtifactError(f"{artifact}: is served elsewhere, so that it can be scored, and its weights are not here")
    pointer = artifact / POINTER
    if not pointer.is_file():
        raise ArtifactError(f"{artifact}: neither model/ nor {POINTER} is here")
    pointed = json.loads(pointer.read_text())
    folder = Path(pointed["path"])
    if not (folder / "config.json").is_file():
        raise ArtifactError(f"{pointer}: points to {folder}, which has no config.json any more")
    recorded: dict[str, int] = pointed["weights"]
    # A subset and not equality: older pointers also record safetensors that only lie beside the model's.
    is_whole = all((folder / name).is_file() for name in recorded)
    if not is_whole or not _weight_sizes(folder).items() <= recorded.items():
        raise ArtifactError(
            f"{pointer}: the weights in {folder} are not those that it was made for; run the base stage again"
        )
    return folder


def pointed_folder(artifact: Path) -> Path | None:
    """Return the folder that a model artifact points to; None if it holds its model, or its pointer is unreadable."""
    try:
        return Path(json.loads((artifact / POINTER).read_text())["path"])
    except (OSError, ValueError, KeyError):
        return None


def wanted_window(artifact: Path) -> int | None:
    """Return the `max_position_embeddings` for trained models, or None if the base model's config asked for none."""
    pointer = artifact / POINTER
    if not pointer.is_file():
        return None
    window: int | None = json.loads(pointer.read_text())["max_position_embeddings"]
    return window


def engine_window(artifact: Path, engine: LocalEngineConfig) -> int:
    """Return the positions that an engine has for a prompt and its answer with the model of an artifact."""
    window = read_hf_config(model_folder(artifact)).window(wanted_window(artifact))
    if not isinstance(engine, VllmEngineConfig):
        return window
    stretched = engine.stretched(window)
    return stretched if engine.max_model_len is None else min(engine.max_model_len, stretched)


def _make_tiny(cfg: TinyModelConfig, *, seed: int, folder: Path) -> StageSummary:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    from klear_core.prompts import build_byte_tokenizer, check_template, padded_vocab_size

    transformers_logging.disable_progress_bar()
    tokenizer = build_byte_tokenizer()
    check_template(tokenizer)
    config = Qwen3Config(
        vocab_size=padded_vocab_size(tokenizer),
        hidden_size=cfg.hidden_size,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_heads,
        num_key_value_heads=cfg.num_kv_heads,
        head_dim=cfg.head_dim,
        intermediate_size=cfg.intermediate_size,
        max_position_embeddings=cfg.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    init_seed = seed_for(seed, "base/init")
    # The constructor draws from the global generator: restore it afterwards, and draw all matrices from our seed.
    with torch.random.fork_rng(devices=[]):
        model = Qwen3ForCausalLM(config)
        _reset_weights(model, cfg, init_seed)
    temporary = folder.with_name("model.tmp")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    # Left by a run that was killed after its rename; the rename below needs the name to be free.
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return StageSummary(counts={"parameters": model.num_parameters()}, seeds={"base/init": init_seed})


def _reset_weights(model: nn.Module, cfg: TinyModelConfig, seed: int) -> None:
    """Draw normal weights with standard deviation `embedding_std` (embeddings) or 1/sqrt(fan_in) (matrices).

    Matrices that write to the residual stream get 1/sqrt(2L) of that, L being the number of layers.
    """
    import torch

    # One generator for all, so a weight depends on the order of the names, which the architecture fixes.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim < 2:
                continue  # norm weights keep their initial 1
            # Linear weights are [out, in], so shape[1] is the fan-in. The tied LM head is drawn as the embedding.
            std = cfg.embedding_std if "embed_tokens" in name else p.shape[1] ** -0.5
            # 2L matrices add to the residual stream: without this its variance would grow with depth.
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= (2 * cfg.num_layers) ** 0.5
            p.normal_(0.0, std, generator=generator)


def _checked_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model; ConfigError if its template or its size does not fit."""
    from klear_core.prompts import check_template, load_tokenizer

    tokenizer = load_tokenizer(folder)
    try:
        check_template(tokenizer)
    except ConfigError as e:
        raise ConfigError(f"{folder}: {e}") from e
    # Models round their vocabulary up, so that it may exceed the tokenizer's.
    vocab_size = read_hf_config(folder).vocab_size
    if vocab_size < len(tokenizer):
        raise ConfigError(f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model embeds only {vocab_size}")
    return tokenizer


def _point_to(folder: Path, max_position_embeddings: int | None, workdir: Path) -> StageSummary:
    weights, tokenizer = _weight_sizes(folder), _checked_tokenizer(folder)
    temporary = workdir / (POINTER + ".tmp")
    # Written under another name and renamed, so that a killed run leaves no half-written pointer.
    pointed = {"path": str(folder), "max_position_embeddings": max_position_embeddings, "weights": weights}
    temporary.write_text(json.dumps(pointed, indent=2))
    temporary.replace(workdir / POINTER)
    return StageSummary(counts={"weight_bytes": sum(weights.values())}, notes=_end_notes(folder, tokenizer))


def _end_notes(folder: Path, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return a note if engines would not stop where the chat template ends a turn: answers run on to their limit."""
    from klear_core.hf_config import FolderTokenizer

    if tokenizer.eos_token_id in FolderTokenizer(folder).stop_ids:
        return ()
    return (
        f"{folder}: its template ends a turn with {tokenizer.eos_token!r}, which neither tokenizer_config.json "
        "(eos_token) nor generation_config.json (eos_token_id) lists: its samples go on behind the end of the answer. "
        "If it was trained on that template, add the token there",
    )


def _weight_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file of the model's weights, to detect that the folder holds another model.

    A flipped bit is not detected: hashing 16 GB would cost every stage a minute.
    """
    names = weight_files([file.name for file in folder.iterdir()])
    return {name: (folder / name).stat().st_size for name in names}
