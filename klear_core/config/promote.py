"""Define the settings of promotion: the rule by which a model becomes champion."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from klear_core.config.settings import Settings


class PromoteConfig(Settings):
    """Rule by which the last model of a run takes the champion's place; every part of it must be passed."""

    registered_model: str = Field(default="klear", min_length=1, pattern=r"^[^/:]+$")
    """Name of the registered model in MLflow whose alias `champion` moves. Runs that compete have the same name."""
    margin: float = Field(default=4.5, ge=0, le=100)
    """Points (of 100) that the new model may be worse than the champion on a benchmark, by the lower end of the paired
    interval over other problems. Default: what RL gains on average in Klear-Reasoner's Table 1 at 32K (7.6, 5.5, 2.7,
    3.1 and 3.5 points): a larger loss would undo a training stage."""
    margins: dict[str, Annotated[float, Field(ge=0, le=100)]] = {}
    """Margin of single benchmarks, in points, in place of `margin`. The interval over P problems is never narrower than
    200/P points to each side."""
    max_contaminated: float = Field(default=0.0, ge=0, le=1)
    """Largest share of a benchmark's problems that overlap with the model's training data. If that is not known, the
    model is refused unless this is 1."""
    max_truncated: float = Field(default=0.1, ge=0, le=1)
    """Largest share of a benchmark's samples that ran out of tokens. Default: above a tenth, the score says
    more about the budget than about the model."""
    max_no_answer: float = Field(default=0.1, ge=0, le=1)
    """Largest share of a benchmark's samples in which the judge found no answer; default as for `max_truncated`."""
    max_judge_failed: float = Field(default=0.01, ge=0, le=1)
    """Largest share of a benchmark's samples that could not be judged. Default: half of what stops an evaluation."""
    score_champion: bool = False
    """Score the champion again, which costs an evaluation, if its scores cannot be compared with those of the new
    model, because benchmarks, their seed, decoding or judge have changed."""
    first: Literal["better_than_first_model", "any"] = "better_than_first_model"
    """Rule where there is no champion yet: the model has to pass the comparison with the first model that its run
    scored, its base; `any` leaves the comparison out."""


class Champion(Settings):
    """The model that a new one is compared with, as the registry describes it."""

    version: int = Field(ge=1)
    """Version of the registered model."""
    model: str
    """Artifact of the model, `kind/fingerprint`."""
    model_uri: str
    """Address of that artifact."""
    evaluation: str
    """Artifact of the scores by which it became champion."""
    evaluation_uri: str
    """Address of that artifact."""
    run: str
    """Flow run that made it champion."""
