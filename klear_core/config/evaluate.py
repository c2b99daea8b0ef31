"""Define the settings of evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from klear_core.config.engine import LocalEngineConfig, SamplingConfig, TorchEngineConfig
from klear_core.config.settings import Settings


class EvaluateRuntime(Settings):
    """Settings that do not change a score."""

    answers_per_shard: int = Field(default=256, ge=1)
    """Answers per shard, the unit of resume: a killed evaluation loses its unfinished shards."""
    max_in_flight: int = Field(default=1024, ge=1)
    """Answers sampled or judged at a time for each engine; with more than the engine's batch, engine and judge are both
    kept busy."""
    num_engines: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Engines that sample. `auto`: as many as the GPUs of this machine, or of the Ray cluster at RAY_ADDRESS, have room
    for, at `tensor_parallel` GPUs each; one on CPU. One engine runs in the process of the stage, several as Ray
    actors."""
    max_restarts: int = Field(default=10, ge=0)
    """Engines that may die and be replaced within an hour; with one more the stage stops."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the sampler."""


class EvaluateSamplingConfig(SamplingConfig):
    """Sampling parameters for benchmark answers (section 4.1)."""

    temperature: float = Field(default=0.6, ge=0, le=2)
    """Sampling temperature; 0 is greedy. Section 4.1."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Sample from the smallest set of tokens whose probabilities add up to this; 1 is off. Section 4.1."""


class EvaluateConfig(Settings):
    """avg@n on every benchmark with a confidence interval; defaults from Klear-Reasoner section 4.1."""

    engine: LocalEngineConfig = TorchEngineConfig()
    """Engine that loads the model to score. HTTP endpoints are excluded: one serves a fixed model, so all scores would
    be that model's."""
    sampling: EvaluateSamplingConfig = EvaluateSamplingConfig()
    greedy: bool = True
    """Also decode one greedy answer per problem and report its score next to avg@n."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence level of all intervals, over problems; 0.95 by convention. The paper gives no intervals."""
    max_unscored_rate: float = Field(default=0.02, ge=0, le=1)
    """The stage stops above this share of judge failures, because the score would then measure the judge."""
    runtime: EvaluateRuntime = EvaluateRuntime()
