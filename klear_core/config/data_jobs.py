"""Define the jobs of the stages that make problems or take what exists, and the sections of the config by stage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Self

from pydantic import Field, TypeAdapter

from klear_core.config.curate import (
    CurateConfig,
    CurateRuntime,
    DecontaminateConfig,
    DedupConfig,
    DifficultyConfig,
    NearConfig,
    ReadYieldLimits,
)
from klear_core.config.data import (
    BenchmarkConfig,
    DatasetsSource,
    FileSource,
    GeneratedSource,
    HubUse,
    Source,
    StoredSource,
)
from klear_core.config.evaluate import EvaluateConfig, ServedModelConfig
from klear_core.config.known_benchmarks import DateWindow
from klear_core.config.opd_jobs import OpdJob, OpdRolloutsJob, OpdScoresJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import Settings, YieldLimits
from klear_core.config.stage import BaseJob, EvaluateJob, Job, SourceUse
from klear_core.config.train import (
    GivenDataset,
    GivenFacts,
    GivenFiles,
    GivenFolder,
    GivenGguf,
    GivenLoaded,
    GivenModel,
    GivenRepo,
    HubModelConfig,
)
from klear_core.config.verify import VerifyConfig

# ---- data jobs ----
# Define the jobs of the stages that make problems: benchmarks and curation.


class BenchmarksRuntime(Settings):
    """Checks that do not change the benchmarks."""

    expected_rows: dict[str, int] = {}
    """Rows by benchmark name; a wrong count fails the stage."""
    known: dict[str, str] = {}
    """Published benchmarks that they are, by benchmark name; messages say what is known about these."""
    verify: VerifyConfig = VerifyConfig()
    """Settings of the judge, to check that it can read the references."""
    max_unscored_rate: float = EvaluateConfig().max_unscored_rate
    """Largest share of a benchmark's references that the judge cannot use; above it this stage fails, because
    evaluation would."""


class BenchmarksJob(Job):
    """Load the benchmarks. Sample counts belong to `EvaluateJob`, so that changing one does not rerun training."""

    kind = "benchmarks"
    code_version = 2

    seed: int
    sources: dict[str, Source]
    """Source of each benchmark, by benchmark name."""
    windows: dict[str, DateWindow] = Field(default={}, exclude_if=lambda windows: not windows)
    """Days of the contests that are read, by benchmark name; all days of the others."""
    parts: dict[str, int] = Field(default={}, exclude_if=lambda parts: not parts)
    """Number of problems that are drawn of a benchmark, by benchmark name; the others are whole."""
    runtime: BenchmarksRuntime = BenchmarksRuntime()

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """Return the job with the settings of a pipeline config that determine the benchmarks."""
        expected = {b.name: b.expected_rows for b in config.benchmarks if b.expected_rows is not None}
        sources = {b.name: b.source for b in config.benchmarks}
        runtime = BenchmarksRuntime(
            expected_rows=expected,
            known={b.name: b.known for b in config.benchmarks if b.known},
            verify=config.judge_of("evaluate"),
            max_unscored_rate=config.evaluate.max_unscored_rate,
        )
        windows = {b.name: b.window for b in config.benchmarks if b.window is not None}
        parts = {b.name: b.num_problems for b in config.benchmarks if b.num_problems is not None}
        return cls(seed=config.seed, sources=sources, windows=windows, parts=parts, runtime=runtime)

    def benchmarks(self) -> tuple[BenchmarkConfig, ...]:
        """Return the benchmark settings that `prepare_benchmarks` takes."""
        checks = self.runtime
        return tuple(
            BenchmarkConfig(
                name=name,
                known=checks.known.get(name, ""),
                source=source,
                expected_rows=checks.expected_rows.get(name),
                window=self.windows.get(name),
                num_problems=self.parts.get(name),
            )
            for name, source in self.sources.items()
        )

    def files(self) -> tuple[str, ...]:
        """Return the files of the benchmarks."""
        return _paths_of(self.sources.values())

    def sources_in(self, section: str) -> tuple[SourceUse, ...]:  # noqa: ARG002  messages name the benchmark
        """Return the source of each benchmark."""
        return tuple(SourceUse(key=f"benchmark {name!r}", source=source) for name, source in self.sources.items())


class CurateJobRuntime(Settings):
    """Settings of the check of published solutions, which drops no problem."""

    verify: VerifyConfig = VerifyConfig()


class CurateJob(Job):
    """Make the training problems."""

    kind = "curate"
    code_version = 10
    code_changes = {10: "encodings, copies in other words and unreadable references are recognised"}

    seed: int
    curate: CurateConfig
    runtime: CurateJobRuntime = CurateJobRuntime()

    @classmethod
    def of(cls, config: PipelineConfig, curate: CurateConfig) -> Self:
        """Return the job with the settings of a pipeline config that determine the problems of one curation."""
        return cls(seed=config.seed, curate=curate, runtime=CurateJobRuntime(verify=config.verify))

    def files(self) -> tuple[str, ...]:
        """Return the files of the sources, of question sets for decontamination alone, and of an embedding model."""
        files = _paths_of((*self.curate.sources, *self.curate.decontaminate.also))
        model = self.curate.select.model_folder
        return files if model is None else (*files, model)

    def sources_in(self, section: str) -> tuple[SourceUse, ...]:
        """Return the sources of the problems."""
        return tuple(SourceUse(key=f"{section}.sources", source=source) for source in self.curate.sources)


def _paths_of(sources: Iterable[Source]) -> tuple[str, ...]:
    paths: list[str] = []
    for source in sources:
        if isinstance(source, FileSource | DatasetsSource) and source.path:
            paths.append(source.path)
        if not isinstance(source, GeneratedSource):
            paths += source.lookup.values()
    return tuple(paths)


# ---- given jobs ----
# Define the jobs of given results: they check what exists and record it; they make nothing.


Rows = tuple[GivenFiles | GivenDataset | GivenLoaded, ...]
_STORED: TypeAdapter[StoredSource] = TypeAdapter(StoredSource)

_ANY_LENGTH = 10**9  # characters; a limit that no question reaches
_PLACE = {"kind", "path", "repo", "revision", "runtime", *GivenFacts.model_fields}
"""Settings that say where rows are and what is known about them; the others determine which rows are read, and how."""


class GivenRowsRuntime(Settings):
    """Places of the given rows, and limits that change no result."""

    sources: Rows
    read: YieldLimits = YieldLimits()
    """Share of the rows that must be usable."""
    complete: YieldLimits = YieldLimits()
    """Share of the traces that must be whole."""
    verify: VerifyConfig = VerifyConfig()
    """Settings of the check of published solutions."""


class GivenRowsJob(Job):
    """Take rows that exist. Their identity is their content or their commit, not the place where they are kept."""

    formats: tuple[dict[str, Any], ...]
    """The settings of each source that determine which rows are read, and how."""
    decontaminate: DecontaminateConfig
    runtime: GivenRowsRuntime

    def files(self) -> tuple[str, ...]:
        """Return the local files, those of a question lookup included, and question sets of decontamination."""
        local = [source for source in self.runtime.sources if isinstance(source, GivenFiles | GivenLoaded)]
        rows = [source.path for source in local if source.path]
        looked_up = [path for source in self.runtime.sources for path in source.lookup.values()]
        return (*rows, *looked_up, *(source.path for source in self.decontaminate.also))

    def repos(self) -> tuple[HubUse, ...]:
        """Return the repositories of the sources from the Hub."""
        hubs = [source for source in self.runtime.sources if not isinstance(source, GivenFiles) and source.repo]
        return tuple(HubUse(repo=source.repo, revision=source.revision) for source in hubs)

    def given_facts(self) -> GivenFacts:
        """Return what the user declared about the rows: the benchmarks that every source was compared with."""
        licences = dict.fromkeys(source.licence for source in self.runtime.sources if source.licence)
        return GivenFacts(licence=", ".join(licences))

    def origin(self) -> str:
        """Return the files and repositories that the rows come from."""
        return ", ".join(map(origin_of, self.runtime.sources))


class GivenTracesJob(GivenRowsJob):
    """Take published traces in place of distillation."""

    kind = "given_traces"
    code_version = 2

    keep_truncated: bool
    """Keep traces that ran out of tokens; `distill.select.keep_truncated`."""

    @classmethod
    def of(cls, config: PipelineConfig, sources: Rows) -> Self:
        """Return the job that takes given traces, with the settings of a pipeline config that determine them."""
        limits = GivenRowsRuntime(
            sources=sources, read=config.curate.runtime.read, complete=config.distill.runtime.complete
        )
        return cls(
            formats=_formats(sources),
            decontaminate=config.curate.decontaminate,
            keep_truncated=config.distill.select.keep_truncated,
            runtime=limits,
        )


class GivenProblemsJob(GivenRowsJob):
    """Take problems in place of a curation: not selected, but kept apart from the benchmarks.

    Of the same question letter for letter only the first stays.
    """

    kind = "given_problems"
    code_version = 1

    seed: int
    difficulty: DifficultyConfig

    @classmethod
    def of(cls, config: PipelineConfig, curate: CurateConfig, sources: Rows) -> Self:
        """Return the job that takes given problems, with the settings of a pipeline config that determine them."""
        return cls(
            formats=_formats(sources),
            decontaminate=curate.decontaminate,
            seed=config.seed,
            difficulty=curate.difficulty,
            runtime=GivenRowsRuntime(sources=sources, read=curate.runtime.read, verify=config.verify),
        )

    def sources_in(self, section: str) -> tuple[SourceUse, ...]:
        """Return the sources of the problems."""
        return tuple(SourceUse(key=section, source=source) for source in self.runtime.sources)

    def curation(self) -> CurateConfig:
        """Return the settings of a curation that only reads, keeps apart from benchmarks and tags."""
        facts = set(GivenFacts.model_fields)
        # Exact repeats cannot stay: a problem's id is a hash of its question.
        return CurateConfig(
            sources=tuple(_STORED.validate_python(given.model_dump(exclude=facts)) for given in self.runtime.sources),
            dedup=DedupConfig(normalise=False, near=NearConfig(enabled=False)),
            decontaminate=self.decontaminate,
            difficulty=self.difficulty,
            max_question_chars=_ANY_LENGTH,
            runtime=CurateRuntime(read=ReadYieldLimits.model_validate(self.runtime.read.model_dump())),
        )


def origin_of(source: GivenFiles | GivenDataset | GivenLoaded) -> str:
    """Return where rows come from, for people: a path, or `owner/name@0123456`."""
    if not isinstance(source, GivenDataset) and source.path:
        return source.path
    assert not isinstance(source, GivenFiles), "a file has a path"
    return str(HubUse(repo=source.repo, revision=source.revision))


def _formats(sources: Rows) -> tuple[dict[str, Any], ...]:
    # `lookup` names further files: like the rows' own, they enter the fingerprint by their content (see `files`).
    return tuple(source.model_dump(mode="json", exclude=_PLACE | {"lookup"}) for source in sources)


class GivenModelJob(Job):
    """Take a model that exists. Its identity is its content or its commit, not the place where it is kept."""

    kind = "given_model"
    code_version = 1
    makes_model = True

    max_position_embeddings: int | None = None
    """New value for the config of models trained from it."""
    runtime: GivenModel

    @classmethod
    def of(cls, given: GivenFolder | GivenRepo | GivenGguf) -> Self:
        """Return the job that takes a given model."""
        return cls(max_position_embeddings=given.max_position_embeddings, runtime=given)

    def files(self) -> tuple[str, ...]:
        """Return the model's folder or GGUF file if it is a local one."""
        return () if isinstance(self.runtime, GivenRepo) else (self.runtime.path,)

    def repos(self) -> tuple[HubUse, ...]:
        """Return the model's repository if it is from the Hub."""
        model = self.runtime.as_model()
        return (HubUse(repo=model.repo, revision=model.revision),) if isinstance(model, HubModelConfig) else ()

    def given_facts(self) -> GivenFolder | GivenRepo | GivenGguf:
        """Return what the user declared about the model."""
        return self.runtime


class ServedModelJob(Job):
    """Name a model that is served elsewhere, by its addresses and its name there. Its weights are unknown.

    Other weights behind the same address and name are the same model to Klear.
    """

    kind = "served_model"
    code_version = 1
    makes_model = True

    model: str
    addresses: tuple[str, ...]

    @classmethod
    def of(cls, served: ServedModelConfig) -> Self:
        """Return the job that names a served model."""
        return cls(model=served.model, addresses=tuple(endpoint.base_url for endpoint in served.runtime.endpoints))

    def given_facts(self) -> GivenFacts:
        """Return no facts: nothing is declared about it."""
        return GivenFacts()

    def origin(self) -> str:
        """Return name and addresses, and that nothing more is known."""
        return f"{self.model} at {', '.join(self.addresses)}, weights unknown"


# ---- sections ----
# Tell which sections of the config stages use, to name overrides and differences that concern none of them.


_BEFORE_RL = ("curate", "curate_rl", "tag", "tag_rl", "model", "distill", "sft", "opd")
STAGE_SECTIONS = frozenset((*_BEFORE_RL, "rl_teacher", "rl", "rl_code", "evaluate", "promote"))
"""Sections that stages use; the others, such as `seed` and `verify`, concern the whole run."""


def section_of(key: str) -> str:
    """Return the stage's section that a dotted key of the config belongs to; empty if it concerns the whole run."""
    first, *others = key.split(".")
    if first == "judge" and others:  # judge settings of a single stage
        first = others[0]
    return first if first in STAGE_SECTIONS else ""


def unused_overrides(overrides: Sequence[str], used: Collection[str]) -> dict[str, str]:
    """Return the `key.path=value` overrides of stages' sections that are not among those used, with the section."""
    sections = {override: section_of(override.partition("=")[0].strip()) for override in overrides}
    return {override: section for override, section in sections.items() if section and section not in used}


def sections_used(stages: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Return the sections that stages use, each given by its name and kind."""
    return frozenset(section for name, kind in stages for section in _sections_of(name, kind))


def _sections_of(name: str, kind: str) -> tuple[str, ...]:
    if name.startswith("rl_teacher"):  # also if it is given
        return ("rl_teacher",)
    match kind:
        case BaseJob.kind:
            return ("model",)
        case EvaluateJob.kind | ServedModelJob.kind:
            return ("evaluate",)
        case GivenModelJob.kind:
            return ()
        case OpdRolloutsJob.kind | OpdScoresJob.kind | OpdJob.kind:
            return ("opd",)
        case GivenTracesJob.kind | GivenProblemsJob.kind:
            return ("curate", name)  # curation's rules keep their questions apart from the benchmarks
        case _:
            return (name,)
