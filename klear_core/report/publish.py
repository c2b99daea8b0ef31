"""Write a model as a Hugging Face folder that others can use: weights, checked templates, a card, and its evidence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.manifest import MANIFEST
from klear_core.artifacts.model_files import CARD, check_folder
from klear_core.config.toml import profile_toml
from klear_core.errors import ConfigError
from klear_core.report.ancestry import Ancestor, ancestors, data_sources, own_licence, run_config
from klear_core.report.chosen import chosen_on
from klear_core.report.compared_runs import CountsBy, ScoredModel
from klear_core.report.model_card import PROFILE_FOLDER, CardFacts, model_card
from klear_core.scores import DecodingProfile, read_reports

GENERATION_CONFIG = "generation_config.json"
ADAPTER = "adapter"
_EVIDENCE = "klear"
"""Folder of the manifests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A folder that was written."""

    folder: Path
    num_bytes: int
    warnings: tuple[str, ...]


def write_model(
    artifact: Path,
    model: Path,
    evaluation: Path | None,
    folder: Path,
    *,
    name: str,
    licence: str = "",
    warnings: Sequence[str] = (),
) -> Published:
    """Write the model of an artifact, whose Hugging Face folder is `model`, with its card to a new `folder`.

    `evaluation` is the artifact of its scores. The folder appears when it is whole. Raise ConfigError if it exists, if
    a part of the model is missing, or if the chat template or the end token does not hold.
    """
    if not folder.name:
        raise ConfigError(f"--to {folder}: has no name of its own; name a new folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--to {folder}: exists and is not empty")
    lineage = ancestors(artifact)
    counts, decoding = _read_scores(evaluation)
    notes = [*warnings] if evaluation else [*warnings, "no evaluation of this model is known"]
    notes += [f"its score on {benchmark}: {reason}" for benchmark, reason in chosen_on(artifact).items()]
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for file in check_folder(model):
        # Both are written anew below: those in the folder know nothing of this model's scores.
        if file not in (CARD, GENERATION_CONFIG):
            shutil.copy2(model / file, temporary / file)
    if (artifact / ADAPTER).is_dir():
        shutil.copytree(artifact / ADAPTER, temporary / ADAPTER)
    _write_generation_config(model, temporary, decoding)
    has_profile = _write_evidence(lineage, artifact, temporary)
    facts = CardFacts(
        name=name,
        licence=licence or own_licence(lineage),
        lineage=lineage,
        sources=data_sources(lineage),
        counts=counts,
        decoding=decoding,
        warnings=notes,
        has_adapter=(temporary / ADAPTER).is_dir(),
        has_profile=has_profile,
    )
    (temporary / CARD).write_text(model_card(facts), encoding="utf-8")
    # The written folder is checked, because that is what others load.
    check_published(temporary)
    shutil.rmtree(folder, ignore_errors=True)  # at most an empty folder, as checked above
    temporary.rename(folder)
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Published(folder=folder, num_bytes=num_bytes, warnings=tuple(notes))


def check_published(folder: Path) -> None:
    """Raise ConfigError if a folder is not a whole model, or its template and generation config do not agree."""
    from klear_core.prompts import check_template, load_tokenizer

    check_folder(folder)
    tokenizer = load_tokenizer(folder)  # with the token that ends a turn as its eos
    check_template(tokenizer)
    stated = json.loads((folder / GENERATION_CONFIG).read_text())["eos_token_id"]
    ends = stated if isinstance(stated, list) else [stated]
    if tokenizer.eos_token_id not in ends:
        raise ConfigError(
            f"{folder / GENERATION_CONFIG}: eos_token_id {stated} lacks {tokenizer.eos_token_id}, which ends a turn of "
            "the chat template, so that answers would never stop"
        )


def _read_scores(evaluation: Path | None) -> tuple[CountsBy, dict[str, DecodingProfile]]:
    if evaluation is None:
        return {}, {}
    counts = ScoredModel(maker="", evaluation=evaluation).counts
    return counts, {report.benchmark: report.decoding for report in read_reports(evaluation)}


def _write_generation_config(model: Path, folder: Path, decoding: dict[str, DecodingProfile]) -> None:
    """Write the model's own generation config with the sampling of its scores and the token that ends a turn."""
    from transformers import GenerationConfig

    from klear_core.prompts import load_tokenizer

    tokenizer = load_tokenizer(folder)
    has_own = (model / GENERATION_CONFIG).is_file()
    config = GenerationConfig.from_pretrained(model) if has_own else GenerationConfig()
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    known = [token for token in ends if token is not None]
    config.eos_token_id = list(dict.fromkeys([tokenizer.eos_token_id, *known]))
    config.pad_token_id = tokenizer.pad_token_id
    if decoding:
        # All benchmarks of an evaluation are sampled with the same settings.
        sampling = next(iter(decoding.values())).sampling
        config.max_new_tokens = sampling.max_new_tokens
        config.do_sample = sampling.temperature > 0
        if config.do_sample:
            config.temperature, config.top_p, config.top_k = sampling.temperature, sampling.top_p, sampling.top_k
        config.repetition_penalty = sampling.repetition_penalty
    # with this key transformers would derive the settings from config.json again
    written = {key: value for key, value in config.to_dict().items() if key != "_from_model_config"}
    (folder / GENERATION_CONFIG).write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def _write_evidence(lineage: Sequence[Ancestor], artifact: Path, folder: Path) -> bool:
    """Copy the manifests, and write the run's settings as a profile; return whether they are known."""
    for ancestor in lineage:
        target = folder / _EVIDENCE / f"{ancestor.manifest.stage}-{ancestor.manifest.fingerprint[:8]}.json"
        target.parent.mkdir(exist_ok=True)
        shutil.copy2(ancestor.folder / MANIFEST, target)
    config = run_config(artifact)
    if config is None:
        return False
    (folder / PROFILE_FOLDER).mkdir()
    (folder / PROFILE_FOLDER / "config.toml").write_text(profile_toml(config), encoding="utf-8")
    return True
