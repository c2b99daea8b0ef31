"""Settings of evaluation."""

from __future__ import annotations

from pydantic import Field

from klear_core.config.base import Settings
from klear_core.config.engine import LocalEngineConfig, SamplingConfig, TorchEngineConfig


class EvaluateRuntime(Settings):
    """What does not change a score."""

    answers_per_shard: int = Field(default=256, ge=1)
    """A shard is the unit of resume: a killed evaluation loses what was in flight and the shards that waited for it."""
    max_in_flight: int = Field(default=1024, ge=1)
    """Answers being sampled or judged at a time; more than the engine's batch keeps both busy."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the sampler."""


class EvaluateSamplingConfig(SamplingConfig):
    """How benchmark answers are sampled (section 4.1)."""

    temperature: float = Field(default=0.6, ge=0, le=2)
    """0 is greedy. Section 4.1."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Smallest set of tokens whose probabilities add up to this; 1 is off. Section 4.1."""


class EvaluateConfig(Settings):
    """avg@n on every benchmark with its interval; numbers of Klear-Reasoner section 4.1."""

    engine: LocalEngineConfig = TorchEngineConfig()
    """Of kinds that load the model they are given: an endpoint serves one model, and every score would be that one's."""
    sampling: EvaluateSamplingConfig = EvaluateSamplingConfig()
    greedy: bool = True
    """Also answer once greedily and report it beside avg@n."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Of all intervals, over problems; 0.95 by convention. The paper gives none."""
    max_unscored_rate: float = Field(default=0.02, ge=0, le=1)
    """Above this share of judge failures the stage stops: the score would describe the judge."""
    runtime: EvaluateRuntime = EvaluateRuntime()
