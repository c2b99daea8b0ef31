"""What the report knows of a run, read from its artifact folders. Everything shown is computed from these records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.manifest import Manifest
from klear_core.config.pipeline import PipelineConfig
from klear_core.report.charts import Series
from klear_core.report.inputs import PairedDifference, RunInfo
from klear_core.scores import EvalReport
from klear_core.types import EvalSample


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """An evaluated model: its scores by benchmark, and its first sampled and its greedy answers."""

    label: str
    stage: str
    """The evaluation's stage name."""
    scores: tuple[EvalReport, ...]
    samples: tuple[EvalSample, ...]

    def score(self, benchmark: str) -> EvalReport | None:
        """The score on a benchmark, or None if this model was not asked."""
        return next((s for s in self.scores if s.benchmark == benchmark), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """A finished stage, from its manifest and its metrics file."""

    name: str
    folder: Path
    """The artifact's."""
    manifest: Manifest
    was_reused: bool
    metrics: tuple[Series, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingStage:
    """A planned stage without an artifact; `trouble` is its error, empty if it was never started."""

    name: str
    trouble: str
    metrics: tuple[Series, ...]
    """Of the attempt that failed, as far as it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The whole run. Stages and models are in pipeline order."""

    run: RunInfo
    config: PipelineConfig
    stages: tuple[StageFacts, ...]
    missing: tuple[MissingStage, ...]
    models: tuple[ModelFacts, ...]
    unscored_models: tuple[str, ...]
    """Labels of models whose evaluation is missing."""
    differences: tuple[PairedDifference, ...]

    @property
    def benchmarks(self) -> tuple[str, ...]:
        """Names in the order of the config, then any others as met."""
        met = [s.benchmark for m in self.models for s in m.scores]
        configured = [b.name for b in self.config.benchmarks if b.name in met]
        return tuple(dict.fromkeys([*configured, *met]))
