"""Define the settings of RL's rewards: verdicts, tags, functions of the user's own, answers that ran out of tokens.

"Paper" is Klear-Reasoner (arXiv 2508.07629); "scripts" are the training scripts published with it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from klear_core.config.settings import Settings
from klear_core.config.user_code import UserFunction


class CustomReward(UserFunction):
    """A reward of the user's own, added to that of the verdict: a function of a `JudgedAnswer` that returns a number.

    An answer on which it fails leaves its group and is counted.
    """

    name: str = Field(default="", pattern=r"^([A-Za-z][A-Za-z0-9_]*)?$")
    """Name in metrics and counts; empty: the function's."""
    weight: float = Field(default=1.0, ge=-100, le=100)
    """Factor on the value in the sum of all rewards; 0 only logs it."""
    min_value: float = Field(default=-100, ge=-1e6, le=1e6)
    """Smallest value that is accepted; an answer with a smaller one leaves its group and is counted."""
    max_value: float = Field(default=100, ge=-1e6, le=1e6)
    """Largest value that is accepted; an answer with a larger one leaves its group and is counted."""

    @property
    def label(self) -> str:
        """Name in metrics and counts."""
        return self.name or self.function.partition(":")[2]

    @model_validator(mode="after")
    def _in_order(self) -> CustomReward:
        if self.min_value > self.max_value:
            raise ValueError(f"min_value = {self.min_value} is above max_value = {self.max_value}")
        return self


FormatReward = Annotated[
    Annotated[float, Field(ge=-100, le=100)] | None, BeforeValidator(lambda value: None if value == "none" else value)
]
"""Reward of a missing tag; None, which profiles write as `"none"` because TOML has no null, gives no such reward."""


class RewardConfig(Settings):
    """Mapping from verdicts to rewards; defaults from the published code (`reward_config.py`)."""

    correct: float = Field(default=1.0, ge=-100, le=100)
    """Reward of the full score; paper section 3.2.4 and scripts."""
    wrong: float = Field(default=-1.0, ge=-100, le=100)
    """Reward of score 0; scores between are interpolated linearly. The paper's soft code reward is 0 to 1, its code has
    -1 to 1."""
    soft: bool = True
    """Reward partial scores (the share of passed tests); False rewards only the full score."""
    missing_close: FormatReward = -0.5
    """Reward of an answer without `</think>`, whatever its content; `"none"` judges it like any other. A value above
    `wrong` favours truncated answers."""
    missing_open: FormatReward = -2.0
    """Reward of an answer without `<think>` (checked second); `"none"` judges it like any other. A chat template that
    opens it in the prompt counts."""
    custom: tuple[CustomReward, ...] = ()
    """Functions of the user's own, whose weighted values are added for every answer, well-formed or not."""

    @model_validator(mode="after")
    def _custom_names_differ(self) -> RewardConfig:
        names = [reward.label for reward in self.custom]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"custom: two rewards have the name {name!r}; set another `name` for one of them")
            if name == "mean":
                raise ValueError("custom: the name 'mean' is taken by the metric rl/reward/mean; set another `name`")
        return self


class OverlongConfig(Settings):
    """Handling of answers that ran out of tokens (by finish reason). The authors advise `drop` below a 32K budget."""

    handling: Literal["keep", "drop", "mask"] = "keep"
    """`drop`: remove from the group before advantages; `mask`: count in the group's advantages, but without a loss."""
    penalty_tokens: int = Field(default=0, ge=0)
    """Length of the penalty zone at the end of the token budget, in which the penalty grows linearly (DAPO: 4096); 0:
    no penalty."""
    penalty: float = Field(default=1.0, ge=0, le=100)
    """Subtracted from the reward of an answer that fills the budget (DAPO: 1)."""
