"""Define the jobs of given results: they check what exists and record it; they make nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from klear_core.config.curate import (
    CurateConfig,
    CurateRuntime,
    DecontaminateConfig,
    DedupConfig,
    DifficultyConfig,
    NearConfig,
    ReadFloor,
)
from klear_core.config.given import GivenDataset, GivenFacts, GivenFiles, GivenFolder, GivenModel, GivenRepo
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import Floor, Settings
from klear_core.config.stage import HubUse, Job, SourceUse
from klear_core.config.train import HubModelConfig, PublishedModel

Rows = tuple[GivenFiles | GivenDataset, ...]

_ANY_LENGTH = 10**9  # characters; a limit that no question reaches
_PLACE = {"kind", "path", "repo", "revision", "runtime", *GivenFacts.model_fields}
"""Settings that say where rows are and what is known about them; the others determine which rows are read, and how."""


class GivenRowsRuntime(Settings):
    """Places of the given rows, and limits that change no result."""

    sources: Rows
    read: Floor = Floor()
    """Share of the rows that must be usable."""
    complete: Floor = Floor()
    """Share of the traces that must be whole."""


class GivenRowsJob(Job):
    """Take rows that exist. Their identity is their content or their commit, not the place where they are kept."""

    formats: tuple[dict[str, Any], ...]
    """The settings of each source that determine which rows are read, and how."""
    decontaminate: DecontaminateConfig
    runtime: GivenRowsRuntime

    def files(self) -> tuple[str, ...]:
        """Return the local files, those of a question lookup included, and question sets of decontamination."""
        rows = [source.path for source in self.runtime.sources if isinstance(source, GivenFiles)]
        looked_up = [path for source in self.runtime.sources for path in source.lookup.values()]
        return (*rows, *looked_up, *(source.path for source in self.decontaminate.also))

    def repos(self) -> tuple[HubUse, ...]:
        """Return the repositories of the sources from the Hub."""
        hubs = [source for source in self.runtime.sources if isinstance(source, GivenDataset)]
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
            runtime=GivenRowsRuntime(sources=sources, read=curate.runtime.read),
        )

    def sources_in(self, section: str) -> tuple[SourceUse, ...]:
        """Return the sources of the problems."""
        return tuple(SourceUse(key=section, source=source) for source in self.runtime.sources)

    def curation(self) -> CurateConfig:
        """Return the settings of a curation that only reads, keeps apart from benchmarks and tags."""
        # Exact repeats cannot stay: a problem's id is a hash of its question.
        return CurateConfig(
            sources=tuple(source.as_source() for source in self.runtime.sources),
            dedup=DedupConfig(normalise=False, near=NearConfig(enabled=False)),
            decontaminate=self.decontaminate,
            difficulty=self.difficulty,
            max_question_chars=_ANY_LENGTH,
            runtime=CurateRuntime(read=ReadFloor.model_validate(self.runtime.read.model_dump())),
        )


def origin_of(source: GivenFiles | GivenDataset) -> str:
    """Return where rows come from, for people: a path, or `owner/name@0123456`."""
    if isinstance(source, GivenFiles):
        return source.path
    return str(HubUse(repo=source.repo, revision=source.revision))


def _formats(sources: Sequence[GivenFiles | GivenDataset]) -> tuple[dict[str, Any], ...]:
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
    def of(cls, given: GivenFolder | GivenRepo) -> Self:
        """Return the job that takes a given model."""
        return cls(max_position_embeddings=given.max_position_embeddings, runtime=given)

    def model(self) -> PublishedModel:
        """Return the model that is taken."""
        return self.runtime.as_model()

    def files(self) -> tuple[str, ...]:
        """Return the model's folder if it is a local one."""
        return (self.runtime.path,) if isinstance(self.runtime, GivenFolder) else ()

    def repos(self) -> tuple[HubUse, ...]:
        """Return the model's repository if it is from the Hub."""
        model = self.model()
        return (HubUse(repo=model.repo, revision=model.revision),) if isinstance(model, HubModelConfig) else ()

    def given_facts(self) -> GivenFolder | GivenRepo:
        """Return what the user declared about the model."""
        return self.runtime
