"""Tell what is known about the training data behind models: what it was compared with, and what it looks like.

Models that a run trains are made from problems and traces that were compared with the benchmarks. The data behind a
given model was compared with those that the user declares, or that its lineage shows if an earlier run of ours made it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from klear_core.artifacts.files import content_digest
from klear_core.artifacts.manifest import MANIFEST, OUTSIDE_KINDS, Manifest, manifest_folder, read_manifest
from klear_core.artifacts.model_files import folder_of
from klear_core.config.curate import DecontaminateConfig
from klear_core.config.data import BenchmarkConfig, FileSource, GeneratedSource
from klear_core.config.data_jobs import BenchmarksJob, CurateJob, GivenModelJob, ServedModelJob
from klear_core.config.load import as_option
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import Stage
from klear_core.errors import ArtifactError, ConfigError
from klear_core.pipeline.graph import stages_of, workspace_root


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenContamination:
    """A given model, and the benchmarks that its training data was not compared with."""

    stage: Stage
    scored_by: tuple[str, ...]
    """Evaluations of it and of the models that are trained from it."""
    declared: tuple[str, ...]
    """Benchmarks that it was compared with, as the user says."""
    unknown: tuple[str, ...]
    """Benchmarks of which nothing is known."""
    missed: tuple[str, ...]
    """Benchmarks that its training data was not compared with, by its lineage."""
    seen: Mapping[str, int]
    """Number of each benchmark's questions that are in its training data, of those that were compared and have some."""

    @property
    def warning(self) -> str:
        """One or two sentences for plan and report."""
        behind = f"the training data behind {self.stage.name!r} ({self.stage.job.origin()})"
        counts = ", ".join(f"{num:,} question{'s' * (num != 1)} of {name}" for name, num in self.seen.items())
        found = f"{behind} holds {counts}: scores may be of memory"
        open_ = [*self.missed, *self.unknown]
        if not open_:
            return found
        names = ", ".join(open_)
        known = "was not compared" if self.missed else "is not known to have been compared"
        text = f"{behind} {known} with {names}: scores may be of memory"
        if isinstance(self.stage.job, ServedModelJob):
            return text  # nobody here can know
        declare = as_option(f"{self.stage.section}.decontaminated_against", [*self.declared, *open_])
        text += f". If it was, declare it: {declare}"
        return f"{found}. {text}" if self.seen else text


def given_contamination(config: PipelineConfig) -> list[GivenContamination]:
    """Return the given models whose training data was not compared with all benchmarks, as far as known."""
    stages = stages_of(config)
    found = []
    for stage in stages:
        if isinstance(stage.job, ServedModelJob) and config.benchmarks:
            names = tuple(b.name for b in config.benchmarks)
            scored_by = tuple(_evaluations_from(stages, stage.name))
            found.append(
                GivenContamination(stage=stage, scored_by=scored_by, declared=(), unknown=names, missed=(), seen={})
            )
        if not isinstance(stage.job, GivenModelJob):
            continue
        facts = stage.job.given_facts()
        declared = () if facts.decontaminated_against == "unknown" else facts.decontaminated_against
        open_ = [b for b in config.benchmarks if b.name not in declared]
        seen = {b.name: facts.questions_seen[b.name] for b in open_ if b.name in facts.questions_seen}
        missed, unknown = _by_lineage(stage.job, [b for b in open_ if b.name not in seen], config)
        scored_by = tuple(_evaluations_from(stages, stage.name))  # none for a tagger
        if scored_by and (missed or unknown or seen):
            found.append(
                GivenContamination(
                    stage=stage, scored_by=scored_by, declared=declared, unknown=unknown, missed=missed, seen=seen
                )
            )
    return found


def _evaluations_from(stages: Sequence[Stage], model: str) -> Iterator[str]:
    """Yield the stages that score a model, or a model trained from it."""
    models = {model}
    for stage in stages:
        if stage.inputs.get("model") not in models:
            continue
        if stage.job.makes_model:
            models.add(stage.name)
        elif stage.job.scores_model:
            yield stage.name


def _by_lineage(
    job: GivenModelJob, benchmarks: Sequence[BenchmarkConfig], config: PipelineConfig
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the benchmarks that the model's training data missed, and those of which nothing is known."""
    protected = _protected_by(folder_of(job.runtime.as_model()).resolve())
    if protected is None:
        return (), tuple(b.name for b in benchmarks)
    cache = workspace_root(config.workspace) / "file_hashes.json"
    missed = []
    for benchmark in benchmarks:
        # By every data set behind the model: one that was not compared is enough to have seen the questions.
        if not all(_protects(manifest, benchmark, cache) for manifest in protected):
            missed.append(benchmark.name)
    return tuple(missed), ()


def _protected_by(model: Path) -> list[Manifest] | None:
    """Return the manifests of all benchmarks that data behind the model was compared with, one for each such data set.

    None if the model is not in a store of artifacts, or its lineage cannot be followed to its beginning.
    """
    # A stage writes its model to the folder `model` of its artifact, `<store>/<kind>/<fingerprint>/model`.
    artifact = model.parent
    if not (artifact / MANIFEST).is_file():
        return None
    behind = _data_behind(artifact)
    if behind is None:
        return None
    try:
        return [read_manifest(folder) for folder in dict.fromkeys(behind.values())]
    except ArtifactError:
        return None


def _data_behind(artifact: Path) -> dict[Path, Path] | None:
    """Return the artifacts through which data came in behind a model, with the benchmarks that each was compared with.

    None if the model's lineage cannot be followed to its beginning.
    """
    store, found, ahead, seen = artifact.parents[1], {}, [artifact], {artifact}
    while ahead:
        made = ahead.pop()
        try:
            manifest = read_manifest(made)
        except ArtifactError:
            return None
        if manifest.given is not None and manifest.kind == GivenModelJob.kind:
            return None  # somebody else's model further back
        for record in manifest.inputs:
            if record.kind in OUTSIDE_KINDS:
                continue
            folder = manifest_folder(store, record)
            if folder is None:
                return None  # its manifest is not here, so what it was made from is not known
            # Every stage that takes data in has the benchmarks as an input, and compares the data with them.
            if record.role == BenchmarksJob.kind:
                found[made] = folder
            elif folder not in seen:
                seen.add(folder)
                ahead.append(folder)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOverlap:
    """Benchmark questions that are in the training data behind a model, by the rules that its data was kept by."""

    num_prompts: int
    num_questions: Mapping[str, int]
    """Questions of each benchmark."""
    found: Mapping[str, tuple[str, ...]]
    """Questions by benchmark; empty for one that has none there."""


def overlap_with_training(
    artifact: Path, benchmarks: Sequence[BenchmarkConfig], *, seed: int
) -> TrainingOverlap | None:
    """Compare benchmarks with the training data behind a model of ours. None if that data is not all here."""
    from klear_core.data.benchmarks import load_benchmark
    from klear_core.data.curation.decontaminate import Protected, questions_in

    behind = _data_behind(artifact)
    if behind is None:
        return None
    protected = [
        Protected(benchmark=benchmark.name, question_id=problem.problem_id, question=problem.question)
        for benchmark in benchmarks
        for problem in load_benchmark(benchmark, seed=seed)
    ]
    found: dict[str, dict[str, None]] = {benchmark.name: {} for benchmark in benchmarks}
    num_prompts = 0
    for data in behind:
        prompts = _prompts_in(data)
        if prompts is None:
            return None
        num_prompts += len(prompts)
        for question in questions_in(prompts, protected, _rules_of(read_manifest(data))):
            found[question.benchmark][question.question] = None
    texts_of = {name: tuple(texts) for name, texts in found.items()}
    return TrainingOverlap(
        num_prompts=num_prompts,
        num_questions=Counter(question.benchmark for question in protected),
        found=texts_of,
    )


def _rules_of(manifest: Manifest) -> DecontaminateConfig:
    """Return the rules by which data was kept apart from benchmarks."""
    settings: Any = manifest.config.get("curate", manifest.config)
    rules: Any = settings.get("decontaminate", {})
    return DecontaminateConfig.model_validate({**rules, "also": ()})


def _prompts_in(data: Path) -> list[str] | None:
    """Return the distinct questions of problems or traces that an artifact holds; None if its files are not here."""
    import pyarrow.dataset as ds

    for table in ("problems", "traces"):
        if (data / table).is_dir():
            column = ds.dataset(data / table, format="parquet").to_table(columns=["question"])["question"]
            return column.unique().to_pylist()  # type: ignore[no-any-return]
    return None


def _protects(manifest: Manifest, benchmark: BenchmarkConfig, cache: Path) -> bool:
    """Return whether a set of benchmarks holds the rows of this one."""
    source = benchmark.source
    if isinstance(source, GeneratedSource):
        return source.split == "heldout"  # a hash of the text keeps its problems out of every training split
    sources: Any = manifest.result_config["sources"]
    rows = _rows_of(source.model_dump(mode="json"))
    if not isinstance(source, FileSource):
        return any(_rows_of(other) == rows for other in sources.values())
    content = {record.role: record.fingerprint for record in manifest.inputs}
    try:
        own = content_digest(Path(source.path), cache=cache)
    except ConfigError:
        return False
    # A file is known by its content: its path may be another one on the machine of the earlier run.
    candidates = [other for other in sources.values() if content.get(other.get("path", "")) == own]
    return any({**_rows_of(other), "path": ""} == {**rows, "path": ""} for other in candidates)


def _rows_of(source: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a source that determine its rows."""
    return {key: value for key, value in source.items() if key not in ("name", "runtime")}


# ---- what a model was trained on ----


_GENERATED = {cls.model_fields["kind"].default for cls in get_args(GeneratedSource)}
_TOKEN = re.compile(r"[+*/-]?\d+|[^\W\d]+|[^\w\s]")
"""A number with the sign or operation before it, a word, or a mark: `mod`, `10`, `:`, `3`, `,`, `+4`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingQuestions:
    """Features shared by all questions that a model was trained on, if programs made them in a few forms."""

    num_questions: int
    tokens: frozenset[str]
    longest: int
    """Tokens of the longest question."""

    def why_unlike(self, question: str) -> str | None:
        """Return why a question is outside of what was trained; None if nothing tells it from the trained ones."""
        tokens = _TOKEN.findall(question)
        of_all = f"of the {self.num_questions:,} questions that this model was trained on"
        unknown = [token for token in dict.fromkeys(tokens) if token not in self.tokens]
        if unknown:
            shown = ", ".join(map(repr, unknown[:5]))
            return f"outside of what was trained: {shown} {'is' if len(unknown) == 1 else 'are'} in none {of_all}"
        if len(tokens) > self.longest:
            return f"outside of what was trained: longer than any {of_all}"
        return None


def questions_of_one_form(artifact: Path) -> TrainingQuestions | None:
    """Return what the training questions behind a model of ours have; None if not all of them were made by programs.

    Published questions are in no form that a new one could be outside of.
    """
    behind = _data_behind(artifact)
    if not behind:
        return None
    tokens: set[str] = set()
    num_questions = longest = 0
    for data in behind:
        prompts = _prompts_in(data) if _is_generated(read_manifest(data)) else None
        if prompts is None:
            return None
        for prompt in prompts:
            found = _TOKEN.findall(prompt)
            tokens.update(found)
            longest = max(longest, len(found))
        num_questions += len(prompts)
    return TrainingQuestions(num_questions=num_questions, tokens=frozenset(tokens), longest=longest)


def _is_generated(manifest: Manifest) -> bool:
    """Return whether a data artifact is a curation of problems that programs made."""
    if manifest.kind != CurateJob.kind:
        return False
    curate: Any = manifest.config["curate"]
    return {source["kind"] for source in curate["sources"]} <= _GENERATED
