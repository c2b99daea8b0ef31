"""Records that the report reads from a run's artifact folders. Everything shown is computed from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.manifest import Manifest
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import Stage
from klear_core.evaluate.decision import Decision
from klear_core.evaluate.published import PublishedModel
from klear_core.report.charts import Series
from klear_core.report.inputs import PairedDifference, RunInfo, ScoreWarning
from klear_core.scores import EvalReport
from klear_core.types import EvalSample


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """An evaluated model: its scores by benchmark, and its first sampled and its greedy answers."""

    maker: Stage
    """The stage that made the model; the model is called by its label."""
    stage: Stage
    """The stage that scored the model."""
    tone: int
    """Number of its colour: its place among all models of the pipeline."""
    scores: tuple[EvalReport, ...]
    samples: tuple[EvalSample, ...]

    def score(self, benchmark: str) -> EvalReport | None:
        """Return the report on a benchmark; None if this model was not evaluated on it."""
        return next((s for s in self.scores if s.benchmark == benchmark), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """A finished stage, from its manifest and its metrics file."""

    stage: Stage
    folder: Path
    """Artifact folder."""
    manifest: Manifest
    was_reused: bool
    metrics: tuple[Series, ...]

    @property
    def name(self) -> str:
        """Stage name, unique in the run."""
        return self.stage.name


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingStage:
    """A planned stage without an artifact; `trouble` is its error, empty if it was never started."""

    stage: Stage
    trouble: str
    metrics: tuple[Series, ...]
    """Metrics that the failed attempt logged until it stopped."""

    @property
    def name(self) -> str:
        """Stage name, unique in the run."""
        return self.stage.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts of a run. Stages and models are in pipeline order."""

    run: RunInfo
    config: PipelineConfig
    stages: tuple[StageFacts, ...]
    missing: tuple[MissingStage, ...]
    models: tuple[ModelFacts, ...]
    unscored_models: tuple[str, ...]
    """Labels of models whose evaluation is missing."""
    differences: tuple[PairedDifference, ...]
    score_warnings: tuple[ScoreWarning, ...] = ()
    published: tuple[PublishedModel, ...] = ()
    decision: Decision | None = None
    """The decision on the champion; None if none was asked for."""

    def model(self, maker: str) -> ModelFacts:
        """Return the evaluated model that the stage `maker` made."""
        return next(model for model in self.models if model.maker.name == maker)

    @property
    def benchmarks(self) -> tuple[str, ...]:
        """Names of the scored benchmarks: those of the config in its order, then any others in the order found."""
        met = [s.benchmark for m in self.models for s in m.scores]
        configured = [b.name for b in self.config.benchmarks if b.name in met]
        return tuple(dict.fromkeys([*configured, *met]))
