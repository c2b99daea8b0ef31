"""Define the settings of evaluation."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from klear_core.config.engine import HttpEngineConfig, LocalEngineConfig, SamplingConfig, TorchEngineConfig
from klear_core.config.settings import Settings


class EnginesRuntime(Settings):
    """Number and threads of a stage's engines."""

    num_engines: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Engines that sample. `auto`: as many as the GPUs of this machine, or of the Ray cluster at RAY_ADDRESS, have room
    for, at `tensor_parallel` GPUs each; one on CPU. One engine runs in the process of the stage, several as Ray
    actors."""
    max_restarts: int = Field(default=10, ge=0)
    """Engines that may die and be replaced within an hour; with one more the stage stops."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the sampler."""


class EvaluateRuntime(EnginesRuntime):
    """Settings that do not change a score."""

    answers_per_shard: int = Field(default=256, ge=1)
    """Answers per shard, the unit of resume: a killed evaluation loses its unfinished shards."""
    max_in_flight: int = Field(default=1024, ge=1)
    """Answers sampled or judged at a time for each engine; with more than the engine's batch, engine and judge are both
    kept busy."""


class PoolRuntime(EnginesRuntime):
    """Engines of stages that may also sample through endpoints, of servers that Klear did not start."""

    num_engines: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Engines that sample, as in evaluation. 0 starts none: the `endpoints` alone sample."""
    endpoints: tuple[HttpEngineConfig, ...] = ()
    """OpenAI-compatible endpoints that serve the same model and share the work with the engines. A server draws other
    samples from the same seed than an engine does, so an answer depends on which of them gave it."""

    @model_validator(mode="after")
    def _has_a_member(self) -> Self:
        if self.num_engines == 0 and not self.endpoints:
            raise ValueError("num_engines = 0 needs endpoints: nothing else would sample")
        return self


QUESTION = "{question}"
"""Placeholder of the question in a prompt template."""
PLAIN_TEMPLATE = "plain"
"""Name of the question as it stands, without a template."""

TemplateName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$")]


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
    templates: dict[TemplateName, str] = Field(default={}, exclude_if=lambda templates: not templates)
    """Other wordings of every question, by name, to see how much the score depends on the wording:
    `boxed = "{question} Put your final answer within \\boxed{}."`. Each is sampled n times a problem, too. The score is
    that of the question as it stands, the paper's protocol; empty: it alone."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence level of all intervals, over problems; 0.95 by convention. The paper gives no intervals."""
    max_unscored_rate: float = Field(default=0.02, ge=0, le=1)
    """The stage stops above this share of judge failures, because the score would then measure the judge."""
    runtime: EvaluateRuntime = EvaluateRuntime()

    @field_validator("templates")
    @classmethod
    def _have_the_question_once(cls, templates: dict[str, str]) -> dict[str, str]:
        texts: dict[str, str] = {}
        for name, text in templates.items():
            if text.count(QUESTION) != 1:
                raise ValueError(f"template {name!r} has {QUESTION} {text.count(QUESTION)} times, not once: {text!r}")
            if name == PLAIN_TEMPLATE or text == QUESTION:
                raise ValueError(f"template {name!r}: the question as it stands is always asked, as {PLAIN_TEMPLATE!r}")
            if text in texts:
                raise ValueError(f"templates {texts[text]!r} and {name!r} are the same text")
            texts[text] = name
        return templates
