"""Find what would stop a run, in the first second instead of the third hour.

Only stages that would run are checked: an artifact that exists is reused, even if its teacher or sandbox is gone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from klear_core.artifacts.manifest import MANIFEST, OUTSIDE_KINDS, Manifest, file_ref, manifest_folder, read_manifest
from klear_core.artifacts.model_files import folder_of
from klear_core.config.curate import DecontaminateConfig
from klear_core.config.data import BenchmarkConfig, FileSource, GeneratedSource
from klear_core.config.data_jobs import BenchmarksJob, GivenModelJob
from klear_core.config.distill import HttpTeacherConfig
from klear_core.config.load import as_option
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import DistillJob, Stage
from klear_core.distill.teachers.fleet import MAKE_BLOCK, NO_KEYS, BlockKeys
from klear_core.errors import ArtifactError, ConfigError
from klear_core.pipeline.graph import stages_of, workspace_root
from klear_core.pipeline.plan import PendingWork
from klear_core.pipeline.preflight.capacity import disk_problem, machine_problems, memory_problems, pool_problems
from klear_core.pipeline.preflight.data_checks import (
    benchmark_problems,
    error_messages,
    file_problems,
    given_trace_problems,
    judge_problems,
    prompt_filter_problems,
    reference_problems,
    reward_problems,
    sandbox_problems,
    source_problems,
    unjudged_rl_problems,
    weight_problems,
)
from klear_core.pipeline.preflight.model_checks import (
    context_problems,
    cuda_problems,
    engine_problems,
    length_problems,
    model_problems,
    placement_problems,
)


def require_ready(
    config: PipelineConfig,
    chosen: Collection[str] | None = None,
    *,
    again: Collection[str] = (),
    keys: BlockKeys | None = None,
) -> None:
    """Raise ConfigError with everything that would stop the run, before anything is spent."""
    problems = problems_with(config, chosen, again=again, keys=keys)
    if problems:
        raise ConfigError("\n       ".join(["this profile cannot run here yet:", *problems]))


def problems_with(
    config: PipelineConfig,
    chosen: Collection[str] | None = None,
    *,
    again: Collection[str] = (),
    keys: BlockKeys | None = None,
) -> list[str]:
    """Return everything known to be missing or contradictory, each with its key, value and fix; empty if nothing is.

    `chosen` names the stages to run (None: all of them), `again` those to build even if they exist. `keys` are the
    teachers' API keys by Prefect block; None leaves those unchecked.
    """
    work = replace(PendingWork.of(config, chosen, again), keys=keys)
    # Several stages may lack the same thing, such as the base model: it is said once.
    return list(dict.fromkeys(problem for check in _CHECKS for problem in check(work)))


def _input_problems(work: PendingWork) -> Iterator[str]:
    for stage, missing in work.unmade_inputs:
        named = " and ".join(map(repr, missing))
        yield (
            f"stage {stage!r} needs {named}, not there or not whole for these settings: "
            f"run up to that first, with --until {missing[-1]}"
        )


def _exposure_problems(work: PendingWork) -> Iterator[str]:
    """Refuse scores on benchmarks that the lineage of a given model shows to be left out of decontamination."""
    if not work.evaluates:
        return
    despite = work.config.given.score_despite
    for exposure in given_contamination(work.config):
        refused = [name for name in exposure.missed if name not in despite]
        if refused:
            yield (
                f"{exposure.stage.section}: {exposure.warning}; to score it all the same: "
                f"{as_option('given.score_despite', [*despite, *refused])}"
            )


def _teacher_problems(work: PendingWork) -> Iterator[str]:
    for stage, job in work.pending(DistillJob):
        teacher, key = job.distill.teacher, f"{stage.section}.teacher"
        if not isinstance(teacher, HttpTeacherConfig):
            continue
        keys = [endpoint.api_key_env for endpoint in teacher.runtime.endpoints if endpoint.api_key_env]
        missing = [name for name in keys if not os.environ.get(name)]
        for name in missing:
            yield f"{key}.api_key_env = {name!r}: this environment variable is not set"
        blocks = [endpoint.api_key_block for endpoint in teacher.runtime.endpoints if endpoint.api_key_block]
        unmade = [name for name in blocks if work.keys is not None and name not in work.keys]
        for name in unmade:
            yield f"{key}.api_key_block = {name!r}: Prefect has no such block; {MAKE_BLOCK}"
        # A request to an endpoint needs its key.
        if missing or unmade or (blocks and work.keys is None):
            continue
        from klear_core.distill.teachers.http_teacher import check_endpoints

        yield from error_messages(key, partial(check_endpoints, keys=work.keys or NO_KEYS), teacher)


def _workspace_problems(work: PendingWork) -> Iterator[str]:
    where = work.config.workspace.root
    root = Path(where).expanduser().absolute()
    # The workspace is made by the run: until then the nearest folder above it tells disk and permissions.
    existing = next(p for p in (root, *root.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield f"workspace.root = {where!r}: {existing} is not a folder that can be written to"
        return
    free_gb = shutil.disk_usage(existing).free / 1e9
    problem = disk_problem(work, free_gb=free_gb)
    if problem is not None:
        yield problem


# In the order of the messages: inputs and data first, then models and settings, then this machine.
_CHECKS = (
    _input_problems,
    file_problems,
    source_problems,
    given_trace_problems,
    unjudged_rl_problems,
    benchmark_problems,
    reference_problems,
    model_problems,
    _exposure_problems,
    _teacher_problems,
    length_problems,
    engine_problems,
    context_problems,
    weight_problems,
    prompt_filter_problems,
    reward_problems,
    judge_problems,
    cuda_problems,
    machine_problems,
    pool_problems,
    memory_problems,
    placement_problems,
    sandbox_problems,
    _workspace_problems,
)


# ---- contamination ----
# Tell what is known about the training data behind given models: was it compared with the benchmarks that score them?
#
# Models that a run trains are made from problems and traces that were. The data behind a given model was compared with
# those that the user declares, or that its lineage shows if an earlier run of ours made it.


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


def given_contamination(config: PipelineConfig) -> list[GivenContamination]:
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
            found.append(
                GivenContamination(stage=stage, scored_by=scored_by, declared=declared, unknown=unknown, missed=missed)
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
    behind = _data_behind(artifact)
    try:
        return None if behind is None else [read_manifest(folder) for folder in dict.fromkeys(behind.values())]
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
    return TrainingOverlap(num_prompts=num_prompts, found={name: tuple(texts) for name, texts in found.items()})


def _rules_of(manifest: Manifest) -> DecontaminateConfig:
    """Return the rules by which data was kept apart from benchmarks."""
    settings = manifest.config.get("curate", manifest.config)
    rules = settings.get("decontaminate", {}) if isinstance(settings, dict) else {}
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
        own = file_ref(source.path, cache=cache).fingerprint
    except ConfigError:
        return False
    # A file is known by its content: its path may be another one on the machine of the earlier run.
    candidates = [other for other in sources.values() if content.get(other.get("path", "")) == own]
    return any({**_rows_of(other), "path": ""} == {**rows, "path": ""} for other in candidates)


def _rows_of(source: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a source that determine its rows."""
    return {key: value for key, value in source.items() if key not in ("name", "runtime")}
