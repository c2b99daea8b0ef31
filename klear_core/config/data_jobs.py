"""Define the jobs of the stages that make problems: benchmarks and curation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from pydantic import Field

from klear_core.config.benchmark import BenchmarkConfig
from klear_core.config.curate import CurateConfig
from klear_core.config.data import FileSource, GeneratedSource, Source
from klear_core.config.evaluate import EvaluateConfig
from klear_core.config.known_benchmarks import DateWindow
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import Settings
from klear_core.config.stage import Job, SourceUse
from klear_core.config.verify import VerifyConfig


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
        return cls(seed=config.seed, sources=sources, windows=windows, runtime=runtime)

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
            )
            for name, source in self.sources.items()
        )

    def files(self) -> tuple[str, ...]:
        """Return the files of the benchmarks."""
        return _paths_of(self.sources.values())

    def sources_in(self, section: str) -> tuple[SourceUse, ...]:  # noqa: ARG002  messages name the benchmark
        """Return the source of each benchmark."""
        return tuple(SourceUse(key=f"benchmark {name!r}", source=source) for name, source in self.sources.items())


class CurateJob(Job):
    """Make the training problems."""

    kind = "curate"
    code_version = 9

    seed: int
    curate: CurateConfig

    @classmethod
    def of(cls, config: PipelineConfig, curate: CurateConfig) -> Self:
        """Return the job with the settings of a pipeline config that determine the problems of one curation."""
        return cls(seed=config.seed, curate=curate)

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
        if isinstance(source, FileSource):
            paths.append(source.path)
        if not isinstance(source, GeneratedSource):
            paths += source.lookup.values()
    return tuple(paths)
