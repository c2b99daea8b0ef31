"""Publish a model as a Hugging Face folder with its card: weights, checked templates, and its evidence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.garbage import bytes_in
from klear_core.artifacts.manifest import MANIFEST, ArtifactId, Manifest, parse_manifest, read_manifest
from klear_core.artifacts.model_files import CARD, check_folder
from klear_core.config.load import profile_toml
from klear_core.errors import ConfigError
from klear_core.evaluate.counts import AnswerCounts, CountsBy, Decoding, count_stored
from klear_core.gguf_checks import require_gguf
from klear_core.gguf_header import SUFFIX
from klear_core.report.cards import PROFILE_FOLDER, CardFacts, data_card, model_card
from klear_core.report.run.lineage import Ancestor, ancestors, data_sources, own_licence, run_config
from klear_core.report.run.warnings import chosen_on
from klear_core.scores import DecodingProfile, read_reports
from klear_core.train.gguf_files import GgufDtype, check_writable, write_gguf

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
    evaluations: Sequence[Path],
    folder: Path,
    *,
    name: str,
    licence: str = "",
    warnings: Sequence[str] = (),
    gguf: GgufDtype | None = None,
) -> Published:
    """Write the model of an artifact, whose Hugging Face folder is `model`, with its card to a new `folder`.

    `evaluations` are the artifacts of its scores: the first that has a benchmark counts for it, and the sampling of the
    first becomes the model's. `gguf` asks for a GGUF file of this type, too. The folder appears when it is whole, in
    the place of an earlier one of the same model. Raise ConfigError if another one or files of the user's are there, if
    a part of the model is missing, or if the chat template or the end token does not hold.
    """
    if not folder.name:
        raise ConfigError(f"--to {folder}: has no name of its own; name a new folder")
    _require_own_place(folder, read_manifest(artifact))
    if gguf is not None:
        require_gguf()
        check_writable(model)
    lineage = ancestors(artifact)
    counts, decoding = _read_scores(evaluations)
    notes = [*warnings] if evaluations else [*warnings, "no evaluation of this model is known"]
    notes += [f"its score on {benchmark}: {reason}" for benchmark, reason in chosen_on(artifact).items()]
    temporary = folder.with_name(f".{folder.name}.klear-unfinished")  # a name that is nobody's own
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
    licence = licence or own_licence(lineage)
    gguf_file = f"{name}-{gguf.upper()}{SUFFIX}" if gguf else ""
    if gguf is not None:
        write_gguf(temporary, temporary / gguf_file, gguf, name=name, licence=licence)
    facts = CardFacts(
        name=name,
        licence=licence,
        lineage=lineage,
        sources=data_sources(lineage),
        counts=counts,
        decoding=decoding,
        warnings=notes,
        has_adapter=(temporary / ADAPTER).is_dir(),
        has_profile=has_profile,
        gguf_file=gguf_file,
    )
    (temporary / CARD).write_text(model_card(facts), encoding="utf-8")
    # The written folder is checked, because that is what others load.
    check_published(temporary)
    _replace(folder, temporary)
    return Published(folder=folder, num_bytes=bytes_in(folder), warnings=tuple(notes))


def _require_own_place(folder: Path, own: Manifest) -> None:
    """Raise ConfigError unless `folder` is new, empty, or an earlier publication of this artifact."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    there = published_artifact(folder)
    if there is None:
        raise ConfigError(f"--to {folder}: exists and is not empty")
    if there.fingerprint != own.fingerprint:
        raise ConfigError(
            f"--to {folder}: holds another published model, {there.kind}/{there.fingerprint[:8]}; name a new folder"
        )


def published_artifact(folder: Path) -> ArtifactId | None:
    """Return the artifact whose model a folder holds, by its evidence; None if `klear publish` did not write it."""
    manifests = [parse_manifest(file.read_bytes(), str(file)) for file in sorted((folder / _EVIDENCE).glob("*.json"))]
    used = {record.fingerprint for manifest in manifests for record in manifest.inputs}
    own = [manifest for manifest in manifests if manifest.fingerprint not in used]
    return ArtifactId(kind=own[0].kind, fingerprint=own[0].fingerprint) if len(own) == 1 else None


def _replace(folder: Path, new: Path) -> None:
    """Put a written folder in its place. ConfigError if the earlier one there has files that would be lost."""
    written = {file.relative_to(new) for file in new.rglob("*")}
    others = [str(path) for file in folder.rglob("*") if (path := file.relative_to(folder)) not in written]
    if others:
        shutil.rmtree(new)
        raise ConfigError(
            f"--to {folder}: has files that publishing does not write ({', '.join(sorted(others)[:3])}); move them away"
        )
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


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


def _read_scores(evaluations: Sequence[Path]) -> tuple[CountsBy, dict[str, DecodingProfile]]:
    """Return counts and sampling of each benchmark, from the first evaluation that has it."""
    counts: dict[tuple[str, Decoding], AnswerCounts] = {}
    decoding: dict[str, DecodingProfile] = {}
    for evaluation in evaluations:
        new = {r.benchmark: r.decoding for r in read_reports(evaluation) if r.benchmark not in decoding}
        if new:
            counts |= {key: found for key, found in count_stored(evaluation).items() if key[0] in new}
            decoding |= new
    return counts, decoding


def _write_generation_config(model: Path, folder: Path, decoding: dict[str, DecodingProfile]) -> None:
    """Write the sampling of the model's scores, or its own without any, with the token that ends a turn."""
    from transformers import GenerationConfig

    from klear_core.prompts import load_tokenizer

    tokenizer = load_tokenizer(folder)
    has_own = (model / GENERATION_CONFIG).is_file()
    own = GenerationConfig.from_pretrained(model) if has_own else GenerationConfig()
    # Its own way of sampling (min_p, or a temperature beside greedy scores) would be another than that of the scores.
    config = GenerationConfig(bos_token_id=own.bos_token_id) if decoding else own
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    known = [token for token in ends if token is not None]
    config.eos_token_id = list(dict.fromkeys([tokenizer.eos_token_id, *known]))
    config.pad_token_id = tokenizer.pad_token_id
    if decoding:
        # That of the first evaluation, whose benchmarks are all sampled with the same settings.
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


# ---- data set ----
# Write problems and traces that a model learned from as a data set with its card, in the layout of the Hub.


DATA_TABLES = ("problems", "traces")
"""Tables that are published. Others name places of rows in files of this machine."""


def write_data(model: Path, stages: Sequence[str], folder: Path, *, name: str) -> Published:
    """Write what stages behind a model's artifact made for it, as a data set of one config a stage, to `folder`.

    It appears when it is whole, in the place of an earlier one of the same artifacts. Raise ConfigError if another one
    or files of the user's are there, if a stage is not behind the model or made no problems or traces, or if their
    files are on another machine.
    """
    if not folder.name:
        raise ConfigError(f"--to {folder}: has no name of its own; name a new folder")
    lineage = ancestors(model)
    tables = {stage: _table_of(lineage, stage) for stage in stages}
    _require_own_data(folder, [source.manifest for source, _ in tables.values()])
    temporary = folder.with_name(f".{folder.name}.klear-unfinished")  # a name that is nobody's own
    shutil.rmtree(temporary, ignore_errors=True)
    configs: list[dict[str, str]] = []
    behind: dict[Path, Ancestor] = {}
    for stage, (source, table) in tables.items():
        shutil.copytree(source.folder / table, temporary / stage / table)
        configs.append({"config_name": stage, "data_files": f"{stage}/{table}/*.parquet"})
        behind |= {ancestor.folder: ancestor for ancestor in ancestors(source.folder)}
    data_lineage = list(behind.values())
    (temporary / CARD).write_text(data_card(name, configs, data_lineage), encoding="utf-8")
    _replace(folder, temporary)
    return Published(folder=folder, num_bytes=bytes_in(folder), warnings=())


def _table_of(lineage: Sequence[Ancestor], stage: str) -> tuple[Ancestor, str]:
    """Return the artifact of a stage behind a model, and its table of problems or traces."""
    tables = {
        ancestor.manifest.stage: (ancestor, table)
        for ancestor in lineage
        for table in DATA_TABLES
        if any((ancestor.folder / table).glob("*.parquet"))
    }
    if stage not in tables:
        there = ", ".join(tables) or "none; their files may be on another machine"
        raise ConfigError(
            f"--data {stage}: no stage of that name made problems or traces for this model; there: {there}"
        )
    return tables[stage]


def _require_own_data(folder: Path, sources: Sequence[Manifest]) -> None:
    """Raise ConfigError unless `folder` is new, empty, or has a card that names all these artifacts."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    card = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else ""
    if not all(f"`{source.kind}/{source.fingerprint}`" in card for source in sources):
        raise ConfigError(f"--to {folder}: exists and is not empty")
