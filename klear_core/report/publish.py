"""Publish a model as a Hugging Face folder with its card: weights, checked templates, and its evidence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.manifest import MANIFEST, ArtifactId, Manifest, parse_manifest, read_manifest
from klear_core.artifacts.model_files import CARD, check_folder
from klear_core.config.load import profile_toml
from klear_core.errors import ConfigError
from klear_core.evaluate.counts import AnswerCounts, CountsBy, count_stored
from klear_core.gguf_header import SUFFIX
from klear_core.hf_config import require_gguf
from klear_core.report.run.lineage import (
    NO_LICENCE_NEEDED,
    NOT_STATED,
    Ancestor,
    DataSource,
    ancestors,
    data_sources,
    own_licence,
    run_config,
)
from klear_core.report.run.scores_view import decoding_text
from klear_core.report.run.warnings import chosen_on
from klear_core.scores import NBSP, NONE, DecodingProfile, interval_text, number, percent, read_reports
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
    evaluation: Path | None,
    folder: Path,
    *,
    name: str,
    licence: str = "",
    warnings: Sequence[str] = (),
    gguf: GgufDtype | None = None,
) -> Published:
    """Write the model of an artifact, whose Hugging Face folder is `model`, with its card to a new `folder`.

    `evaluation` is the artifact of its scores; `gguf` asks for a GGUF file of this type, too. The folder appears when
    it is whole, in the place of an earlier one of the same model. Raise ConfigError if another one or files of the
    user's are there, if a part of the model is missing, or if the chat template or the end token does not hold.
    """
    if not folder.name:
        raise ConfigError(f"--to {folder}: has no name of its own; name a new folder")
    _require_own_place(folder, read_manifest(artifact))
    if gguf is not None:
        require_gguf()
        check_writable(model)
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
    return Published(folder=folder, num_bytes=_num_bytes(folder), warnings=tuple(notes))


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


def _read_scores(evaluation: Path | None) -> tuple[CountsBy, dict[str, DecodingProfile]]:
    if evaluation is None:
        return {}, {}
    return count_stored(evaluation), {report.benchmark: report.decoding for report in read_reports(evaluation)}


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


# ---- data set ----
# Write problems and traces that a model learned from as a data set with its card, in the layout of the Hub.


DATA_TABLES = ("problems", "traces")
"""Tables that are published. Others name places of rows in files of this machine."""


def write_data(model: Path, stages: Sequence[str], folder: Path, *, name: str) -> Published:
    """Write what stages behind a model's artifact made for it, as a data set of one config a stage, to a new `folder`.

    It appears when it is whole. Raise ConfigError if it exists, if a stage is not behind the model or made no problems
    or traces, or if their files are on another machine.
    """
    _require_new(folder)
    lineage = ancestors(model)
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    configs: list[dict[str, str]] = []
    behind: dict[Path, Ancestor] = {}
    for stage in stages:
        source, table = _table_of(lineage, stage)
        shutil.copytree(source.folder / table, temporary / stage / table)
        configs.append({"config_name": stage, "data_files": f"{stage}/{table}/*.parquet"})
        behind |= {ancestor.folder: ancestor for ancestor in ancestors(source.folder)}
    data_lineage = list(behind.values())
    (temporary / CARD).write_text(_data_card(name, configs, data_lineage), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)  # at most an empty folder, as checked above
    temporary.rename(folder)
    return Published(folder=folder, num_bytes=_num_bytes(folder), warnings=())


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


def _data_card(name: str, configs: Sequence[Mapping[str, str]], lineage: Sequence[Ancestor]) -> str:
    sources = data_sources(lineage)
    licences = dict.fromkeys(s.licence for s in sources if s.licence not in (NOT_STATED, NO_LICENCE_NEEDED))
    header = {"license": _licences(", ".join(licences)), "tags": ["reasoning", "klear"], "configs": configs}
    load = f'datasets.load_dataset("FOLDER OR NAME ON THE HUB", "{configs[0]["config_name"]}", split="train")'
    sections = [
        _yaml(header),
        f"# {name}",
        "Problems and traces that a model of [Klear](https://arxiv.org/abs/2508.07629) learned from.",
        f"```python\n{load}\n```",
        "## Sources",
        _table(["part", "source", "licence"], [[s.what, s.name, s.licence] for s in sources]),
        "## What was kept and dropped",
        _ledger(lineage),
        "## Lineage",
        _lineage(lineage),
    ]
    return "\n\n".join(sections) + "\n"


def _require_new(folder: Path) -> None:
    if not folder.name:
        raise ConfigError(f"--to {folder}: has no name of its own; name a new folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--to {folder}: exists and is not empty")


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


# ---- model card ----
# Write the card of a published model: scores with intervals, data, licences, lineage, and how to make it again.


CONFIDENCE = 0.95
PROFILE_FOLDER = "profile"
"""Folder of the settings of the run that made the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """All that a card says."""

    name: str
    licence: str
    """Licence of the model; empty if none was stated."""
    lineage: Sequence[Ancestor]
    """Sources first; the model itself is the last."""
    sources: Sequence[DataSource]
    counts: CountsBy
    """Counts of its judged answers; empty if it was not evaluated."""
    decoding: Mapping[str, DecodingProfile]
    """Settings of sampling by benchmark."""
    warnings: Sequence[str]
    has_adapter: bool
    has_profile: bool
    gguf_file: str
    """Name of its GGUF file; empty if there is none."""


def model_card(facts: CardFacts) -> str:
    """Return the card in Markdown, with the header that the Hub reads."""
    sections = [
        _header(facts),
        f"# {facts.name}",
        _intro(facts),
        "## Scores",
        _scores_section(facts),
        "## How to use it",
        _usage(facts),
        "## Data",
        _table(["part", "source", "licence"], [[s.what, s.name, s.licence] for s in facts.sources]),
        "### What was kept and dropped",
        _ledger(facts.lineage),
        "## Lineage",
        _lineage(facts.lineage),
        "## How to make it again",
        _reproduction(facts),
    ]
    return "\n\n".join(sections) + "\n"


def _header(facts: CardFacts) -> str:
    """Return the YAML header."""
    header: dict[str, object] = {
        "license": _licences(facts.licence),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reasoning", "klear"],
    }
    # The Hub reads these as the data that the model was trained on, so benchmarks are not among them.
    datasets = sorted({repo for source in facts.sources for repo in source.datasets})
    if datasets:
        header["datasets"] = datasets
    results = _results(facts)
    if results:
        header["model-index"] = [{"name": facts.name, "results": results}]
    return _yaml(header)


def _yaml(header: Mapping[str, object]) -> str:
    """Return the header of a card; JSON is YAML, so every value is written as JSON."""
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in header.items()]
    return "\n".join(["---", *lines, "---"])


def _licences(licence: str) -> str | list[str]:
    """Return the licence as the Hub reads it: several are a list, an unknown one is `other`."""
    # `licence_in` joins the licences of a card in this way.
    several = licence.split(", ")
    return several if len(several) > 1 else licence or "other"


def _results(facts: CardFacts) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for (benchmark, decoding), counts in facts.counts.items():
        score = counts.shares(confidence=CONFIDENCE).score
        if decoding == "sampled" and score is not None:
            name = _score_name(counts)
            metric = {"type": "accuracy", "name": name, "value": round(100 * score.value, 2)}
            task = {"type": "text-generation"}
            results.append({"task": task, "dataset": {"name": benchmark, "type": benchmark}, "metrics": [metric]})
    return results


def _intro(facts: CardFacts) -> str:
    model = facts.lineage[-1].manifest
    by = f"the stage `{model.stage}` of [Klear](https://arxiv.org/abs/2508.07629)"
    lines = [f"Made by {by} on {model.created_at:%Y-%m-%d}."]
    if facts.has_adapter:
        lines.append("The weights are merged; the LoRA adapter that was trained is in `adapter/`, in peft's format.")
    if not facts.licence:
        lines.append("No licence of the model was stated: see those of its sources below.")
    lines += [f"**Warning:** {warning}" for warning in facts.warnings]
    return "\n".join(lines)


def _scores_section(facts: CardFacts) -> str:
    if not facts.counts:
        return "This model was not evaluated."
    rows = [_score_row(*key, counts) for key, counts in facts.counts.items()]
    head = ["benchmark", "score", "value", "re-run", "other problems", "problems", "cut off", "no answer", "not judged"]
    table = _table(head, rows)
    decodings = [f"- {benchmark}: {decoding_text(profile)}." for benchmark, profile in facts.decoding.items()]
    said = (
        "avg@n is the share of right answers in n samples per problem, averaged over problems. The two columns after "
        f"the value are {percent(CONFIDENCE, 0)} intervals: re-run, for these problems and other samples (compare "
        "published scores with it); other problems, for a new draw of such problems (compare models with it). Cut off: "
        "the answer ran out of tokens. No answer: the judge found none. Not judged: the judge failed; those are in no "
        "score."
    )
    return "\n".join([table, "", said, "", "Decoding:", "", *decodings])


def _score_row(benchmark: str, decoding: str, counts: AnswerCounts) -> list[str]:
    shares = counts.shares(confidence=CONFIDENCE)
    score, num = shares.score, shares.num_answers
    value = percent(score.value) if score else NONE
    rerun = interval_text(score.rerun) if score and score.rerun else NONE
    other = interval_text(score.new_problems) if score else NONE
    name = "greedy" if decoding == "greedy" else _score_name(counts)
    cut = NONE if shares.num_truncated is None else percent(shares.num_truncated / num)
    other_shares = [cut, percent(shares.num_no_answer / num), percent(shares.num_unscored / num)]
    return [benchmark, name, value, rerun, other, f"{shares.num_problems:,}", *other_shares]


def _score_name(counts: AnswerCounts) -> str:
    # Not whole if problems have different numbers of answers.
    num_samples = counts.num_answers / len(counts.problems)
    return f"avg@{num_samples:g}"


def _usage(facts: CardFacts) -> str:
    return "\n".join(
        [
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'folder = "."  # this folder, or its name on the Hub',
            "tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)",
            'messages = [{"role": "user", "content": "your question"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
            ")",
            "print(tokenizer.decode(model.generate(**inputs)[0]))",
            "```",
            "",
            "`generation_config.json` has the sampling of the scores above. There is no system prompt."
            if facts.counts
            else "There is no system prompt.",
            *([_GGUF_USAGE.format(file=facts.gguf_file)] if facts.gguf_file else []),
        ]
    )


_GGUF_USAGE = """
`{file}` is the same model for llama.cpp (`llama-cli -m {file}`) and, by a Modelfile with the line `FROM ./{file}`, for
Ollama."""


def _ledger(lineage: Sequence[Ancestor]) -> str:
    rows = []
    for ancestor in lineage:
        for step in ancestor.manifest.ledger:
            dropped = ", ".join(f"{reason.replace('_', ' ')} {n:,}" for reason, n in step.dropped.items())
            rows.append(
                [
                    ancestor.manifest.stage,
                    step.step,
                    step.unit,
                    f"{step.num_in:,}",
                    f"{step.num_out:,}",
                    dropped or NONE,
                ]
            )
    return _table(["stage", "step", "unit", "in", "out", "dropped"], rows) if rows else "No ledger."


def _lineage(lineage: Sequence[Ancestor]) -> str:
    rows = []
    for ancestor in lineage:
        manifest = ancestor.manifest
        commit = manifest.git_commit[:12] if manifest.git_commit else NONE
        dirty = " (with changes)" if manifest.git_dirty else ""
        counts = ", ".join(f"{name} {number(value)}" for name, value in list(manifest.counts.items())[:4])
        rows.append([manifest.stage, f"`{manifest.kind}/{manifest.fingerprint}`", commit + dirty, counts])
    return _table(["stage", "artifact", "commit", "counts"], rows)


def _reproduction(facts: CardFacts) -> str:
    model = facts.lineage[-1].manifest
    commit = model.git_commit or "the version of Klear named by its release"
    versions = ", ".join(f"{name} {version}" for name, version in model.versions.items())
    lines = [f"Code: commit `{commit}`. Versions: {versions or NONE}."]
    if facts.has_profile:
        lines += ["", "```", f"klear run {PROFILE_FOLDER} --until {model.stage}", "```", ""]
        lines.append("The folder has every setting of the run. Paths of local files are those of the run's machine.")
    else:
        lines.append("The run's report is not in the workspace, so that its settings cannot be given as one profile.")
    lines.append("`klear/` holds the manifest of every artifact above, with its settings, inputs and checksums.")
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    rendered = []
    for line in lines:
        cells = [_cell(cell) for cell in line]
        rendered.append(f"| {' | '.join(cells)} |")
    return "\n".join(rendered)


def _cell(text: str) -> str:
    return " ".join(text.replace(NBSP, " ").replace("|", "\\|").split())
