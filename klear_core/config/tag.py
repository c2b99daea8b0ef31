"""Define the settings of difficulty tags by sampling."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from klear_core.config.engine import LocalEngineConfig, TorchEngineConfig
from klear_core.config.evaluate import EvaluateConfig, EvaluateRuntime, EvaluateSamplingConfig, PoolRuntime
from klear_core.config.given import GivenModel
from klear_core.config.settings import Settings
from klear_core.types import Difficulty


class TagRuntime(PoolRuntime, EvaluateRuntime):
    """Settings that do not change the tags, but for the endpoints: they draw other samples."""


class TagConfig(Settings):
    """Difficulty tags from the share of a model's answers that are right; a tag never drops a problem."""

    model: GivenModel | None = None
    """The tagger, by folder or by Hub id; None: the base model of this pipeline. Paper: Qwen3-8B (section 3.1)."""
    samples_per_problem: int = Field(default=16, ge=1, le=1024)
    """Answers per problem. Undisclosed for tags; 16 is the number that the paper's RL prompts were filtered by
    (section 3.2.1)."""
    engine: LocalEngineConfig = TorchEngineConfig()
    sampling: EvaluateSamplingConfig = EvaluateSamplingConfig()
    """Sampling parameters of the tagger; undisclosed in the paper."""
    hard_below: float = Field(default=0.34, ge=0, le=1)
    """Pass rate below which a problem is hard. Thirds, because the paper's thresholds are undisclosed."""
    easy_from: float = Field(default=0.67, ge=0, le=1)
    """Pass rate from which a problem is easy; between the two it is medium."""
    max_unscored_rate: float = Field(default=0.02, ge=0, le=1)
    """The stage stops above this share of answers that could not be judged."""
    runtime: TagRuntime = TagRuntime()

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.hard_below > self.easy_from:
            raise ValueError(f"hard_below = {self.hard_below} is above easy_from = {self.easy_from}")
        return self

    def difficulty_at(self, pass_rate: float) -> Difficulty:
        """Return the tag of a problem with this pass rate."""
        if pass_rate >= self.easy_from:
            return Difficulty.EASY
        return Difficulty.HARD if pass_rate < self.hard_below else Difficulty.MEDIUM

    def as_evaluation(self) -> EvaluateConfig:
        """Return the settings of an evaluation that samples the same answers, without greedy ones."""
        return EvaluateConfig(
            engine=self.engine,
            sampling=self.sampling,
            greedy=False,
            max_unscored_rate=self.max_unscored_rate,
            runtime=self.runtime,
        )
