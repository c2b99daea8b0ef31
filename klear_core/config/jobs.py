"""The hashed unit of each stage: everything in a pipeline's config that changes that stage's result, and nothing more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Self

from pydantic import Field

from klear_core.config.base import Settings
from klear_core.config.data import BenchmarkConfig, CurateConfig, FileSource, Source
from klear_core.config.distill import DistillConfig
from klear_core.config.evaluate import EvaluateConfig
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.config.rl import RlConfig
from klear_core.config.sft import SftConfig
from klear_core.config.train import HfModelConfig, ModelConfig
from klear_core.config.verify import VerifyConfig


class Job(Settings):
    """What one stage is asked to do; its result is a function of this, of the input artifacts and of `files()`."""

    kind: ClassVar[str]
    """What the stage makes; the same for all stages that do the same."""

    def files(self) -> tuple[str, ...]:
        """Local files and folders whose content the result depends on, as the settings name them."""
        return ()


class BenchmarksRuntime(Settings):
    """What is checked, not made."""

    expected_rows: dict[str, int] = {}
    """Rows by benchmark name; a wrong count fails the stage."""


class BenchmarksJob(Job):
    """Load the benchmarks. How often each is sampled belongs to evaluation, so that changing it retrains nothing."""

    kind = "benchmarks"

    seed: int
    sources: dict[str, Source]
    """By benchmark name."""
    runtime: BenchmarksRuntime = BenchmarksRuntime()

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """The part of a pipeline's config that decides the benchmarks."""
        expected = {b.name: b.expected_rows for b in config.benchmarks if b.expected_rows is not None}
        sources = {b.name: b.source for b in config.benchmarks}
        return cls(seed=config.seed, sources=sources, runtime=BenchmarksRuntime(expected_rows=expected))

    def benchmarks(self) -> tuple[BenchmarkConfig, ...]:
        """The benchmarks as the core's loader takes them."""
        expected = self.runtime.expected_rows
        return tuple(BenchmarkConfig(name=n, source=s, expected_rows=expected.get(n)) for n, s in self.sources.items())

    def files(self) -> tuple[str, ...]:
        """The benchmarks' own files."""
        return _paths_of(self.sources.values())


class CurateJob(Job):
    """Make the training problems."""

    kind = "curate"

    seed: int
    curate: CurateConfig

    @classmethod
    def of(cls, config: PipelineConfig, curate: CurateConfig) -> Self:
        """The part of a pipeline's config that decides the problems of one curation."""
        return cls(seed=config.seed, curate=curate)

    def files(self) -> tuple[str, ...]:
        """The sources' own files, and those of questions that are only kept out."""
        return _paths_of((*self.curate.sources, *self.curate.decontaminate.also))


class BaseJob(Job):
    """Make or find the base model. A model from disk does not depend on the seed."""

    kind = "base"

    seed: int = Field(ge=0)
    model: ModelConfig

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """The part of a pipeline's config that decides the base model."""
        is_from_disk = isinstance(config.model, HfModelConfig)
        return cls(seed=0 if is_from_disk else config.seed, model=config.model)

    def files(self) -> tuple[str, ...]:
        """The model folder, if it is one."""
        return (self.model.path,) if isinstance(self.model, HfModelConfig) else ()


class DistillJob(Job):
    """Collect teacher traces."""

    kind = "distill"

    seed: int
    distill: DistillConfig
    verify: VerifyConfig

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """The part of a pipeline's config that decides the traces."""
        return cls(seed=config.seed, distill=config.distill, verify=config.verify)


class SftJob(Job):
    """Fine-tune the base model on traces."""

    kind = "sft"

    seed: int
    sft: SftConfig

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """The part of a pipeline's config that decides the fine-tuned model."""
        return cls(seed=config.seed, sft=config.sft)


class RlJob(Job):
    """One RL stage, math or code."""

    kind = "rl"

    seed: int
    rl: RlConfig
    verify: VerifyConfig

    @classmethod
    def of(cls, config: PipelineConfig, rl: RlConfig) -> Self:
        """The part of a pipeline's config that decides what this RL stage makes of a model."""
        return cls(seed=config.seed, rl=rl, verify=config.verify)


class EvaluateJob(Job):
    """Score one model on all benchmarks."""

    kind = "evaluate"

    seed: int
    evaluate: EvaluateConfig
    verify: VerifyConfig
    benchmarks: tuple[BenchmarkConfig, ...]
    """For their names and sample counts; row counts are checked where benchmarks are loaded, and left out here."""

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """The part of a pipeline's config that decides the scores of a model."""
        benchmarks = tuple(b.model_copy(update={"expected_rows": None}) for b in config.benchmarks)
        return cls(seed=config.seed, evaluate=config.evaluate, verify=config.verify, benchmarks=benchmarks)


class ReportRuntime(Settings):
    """Shown in the report, but no reason to write it again."""

    workspace: WorkspaceConfig = WorkspaceConfig()


class ReportJob(Job):
    """Tell the story of a run: its config and what is in its artifacts."""

    kind = "report"

    config: PipelineConfig
    """With the default workspace: where things are kept is not part of the story's address."""
    runtime: ReportRuntime = ReportRuntime()

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """The whole config, for the report shows it."""
        config_elsewhere = config.model_copy(update={"workspace": WorkspaceConfig()})
        return cls(config=config_elsewhere, runtime=ReportRuntime(workspace=config.workspace))

    def pipeline_config(self) -> PipelineConfig:
        """The config as the user gave it."""
        return self.config.model_copy(update={"workspace": self.runtime.workspace})


def _paths_of(sources: Iterable[Source]) -> tuple[str, ...]:
    return tuple(s.path for s in sources if isinstance(s, FileSource))
