"""Define the settings of scores during training: a small fixed set of problems, answered every few steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field

from klear_core.config.data import BenchmarkConfig
from klear_core.config.evaluate import EvaluateSamplingConfig
from klear_core.config.settings import Settings
from klear_core.config.verify import VerifyConfig

if TYPE_CHECKING:
    from klear_core.config.pipeline import PipelineConfig


class CurveConfig(Settings):
    """Scores of the model while it trains, for the curve in report and tracking; changes no weight."""

    benchmark: str = Field(min_length=1)
    """Name of the run's benchmark to take the problems from. It is kept out of the training data, as all benchmarks
    are."""
    num_problems: int = Field(default=32, ge=2)
    """Problems of the fixed set: the first in an order that the run's seed draws; at most all of the benchmark."""
    num_samples: int = Field(default=4, ge=1)
    """Answers to each problem; with 2 or more the curve has intervals over other samples of these problems."""
    every_steps: int = Field(default=10, ge=1)
    """Steps between two scores. The model before the first step and the one after the last are always scored."""


class CurveJob(Settings):
    """All that a stage needs to score its model while it trains; changes no result."""

    curve: CurveConfig
    source: BenchmarkConfig
    """The benchmark that the problems are from."""
    sampling: EvaluateSamplingConfig
    """Sampling of the answers, that of evaluation."""
    verify: VerifyConfig
    """Judge of evaluation."""
    confidence: float = Field(gt=0.5, lt=1)

    @classmethod
    def of(cls, curve: CurveConfig, config: PipelineConfig) -> Self:
        """Return the job with the pipeline's benchmark of that name, which the pipeline config has checked."""
        source = next(benchmark for benchmark in config.benchmarks if benchmark.name == curve.benchmark)
        evaluate = config.evaluate
        return cls(
            curve=curve,
            source=source,
            sampling=evaluate.sampling,
            verify=config.judge_of("evaluate"),
            confidence=evaluate.confidence,
        )


class CurveRuntime(Settings):
    """The scores that a training stage takes while it trains; they change no result."""

    curve: CurveJob | None = None

    @classmethod
    def of(cls, curve: CurveConfig | None, config: PipelineConfig) -> Self:
        """Return what a stage with these settings needs."""
        return cls(curve=None if curve is None else CurveJob.of(curve, config))
