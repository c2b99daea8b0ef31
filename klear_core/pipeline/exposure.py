"""Tell what is known about the training data behind given models: was it compared with the benchmarks that score them?

Models that a run trains are made from problems and traces that were. The data behind a given model was compared with
those that the user declares, or that its lineage shows if an earlier run of ours made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klear_core.artifacts.manifest import MANIFEST, OUTSIDE_KINDS, Manifest, file_ref, manifest_folder, read_manifest
from klear_core.artifacts.model_files import folder_of
from klear_core.config.benchmark import BenchmarkConfig
from klear_core.config.data import FileSource, GeneratedSource
from klear_core.config.data_jobs import BenchmarksJob
from klear_core.config.given_jobs import GivenModelJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import Stage
from klear_core.config.toml import as_option
from klear_core.errors import ArtifactError, ConfigError
from klear_core.pipeline.graph import stages_of
from klear_core.pipeline.workspace import workspace_root


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
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

    @property
    def warning(self) -> str:
        """A sentence for plan and report."""
        open_ = [*self.missed, *self.unknown]
        names = ", ".join(open_)
        declare = as_option(f"{self.stage.section}.decontaminated_against", [*self.declared, *open_])
        known = "was not compared" if self.missed else "is not known to have been compared"
        return (
            f"the training data behind {self.stage.name!r} ({self.stage.origin}) {known} with {names}: scores may be "
            f"of memory. If it was, declare it: {declare}"
        )


def exposures(config: PipelineConfig) -> list[Exposure]:
    """Return the given models whose training data was not compared with all benchmarks, as far as known."""
    stages = stages_of(config)
    found = []
    for stage in stages:
        if not isinstance(stage.job, GivenModelJob):
            continue
        facts = stage.job.given_facts()
        declared = () if facts.decontaminated_against == "unknown" else facts.decontaminated_against
        open_ = [b for b in config.benchmarks if b.name not in declared]
        missed, unknown = _by_lineage(stage.job, open_, config)
        scored_by = tuple(_evaluations_from(stages, stage.name))  # none for a tagger
        if scored_by and (missed or unknown):
            found.append(Exposure(stage=stage, scored_by=scored_by, declared=declared, unknown=unknown, missed=missed))
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
    protected = _protected_by(folder_of(job.model()).resolve())
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
    store, found, ahead, seen = artifact.parents[1], [], [artifact], {artifact}
    while ahead:
        try:
            manifest = read_manifest(ahead.pop())
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
                found.append(folder)
            elif folder not in seen:
                seen.add(folder)
                ahead.append(folder)
    try:
        return [read_manifest(folder) for folder in dict.fromkeys(found)]
    except ArtifactError:
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
        own = file_ref(source.path, cache=cache).fingerprint
    except ConfigError:
        return False
    # A file is known by its content: its path may be another one on the machine of the earlier run.
    candidates = [other for other in sources.values() if content.get(other.get("path", "")) == own]
    return any({**_rows_of(other), "path": ""} == {**rows, "path": ""} for other in candidates)


def _rows_of(source: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a source that determine its rows."""
    return {key: value for key, value in source.items() if key not in ("name", "runtime")}
