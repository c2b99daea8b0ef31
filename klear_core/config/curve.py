"""Define the settings of scores during training: a small fixed set of problems, answered every few steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field

from klear_core.config.benchmark import BenchmarkConfig
from klear_core.config.engine import LocalEngineConfig
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

    def is_due(self, step: int, *, num_steps: int) -> bool:
        """Return whether the model after `step` steps of `num_steps` is scored."""
        return step % self.every_steps == 0 or step == num_steps

    def num_points(self, num_steps: int) -> int:
        """Return the number of models that are scored in `num_steps` steps."""
        # Steps 0, k, 2k, ... and the last, if it is none of these.
        return num_steps // self.every_steps + 1 + (num_steps % self.every_steps > 0)


class ScorerConfig(Settings):
    """An engine that scores the models of a training which samples with none itself."""

    engine: LocalEngineConfig
    """Engine of the answers, that of evaluation."""
    num_threads: int = Field(ge=1)
    """CPU threads of the sampler."""


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
    scorer: ScorerConfig | None = None
    """Engine that answers; None: the engines that sample in training."""

    @classmethod
    def of(cls, curve: CurveConfig, config: PipelineConfig, *, has_engines: bool) -> Self:
        """Return the job with the pipeline's benchmark of that name, which the pipeline config has checked.

        `has_engines` says that the stage samples with engines of its own, which then answer.
        """
        source = next(benchmark for benchmark in config.benchmarks if benchmark.name == curve.benchmark)
        evaluate = config.evaluate
        scorer = ScorerConfig(engine=evaluate.engine, num_threads=evaluate.runtime.num_threads)
        return cls(
            curve=curve,
            source=source,
            sampling=evaluate.sampling,
            verify=config.judge_of("evaluate"),
            confidence=evaluate.confidence,
            scorer=None if has_engines else scorer,
        )


class CurveRuntime(Settings):
    """The scores that a training stage takes while it trains; they change no result."""

    curve: CurveJob | None = None

    @classmethod
    def of(cls, curve: CurveConfig | None, config: PipelineConfig, *, has_engines: bool) -> Self:
        """Return what a stage with these settings needs; see `CurveJob.of`."""
        return cls(curve=None if curve is None else CurveJob.of(curve, config, has_engines=has_engines))
