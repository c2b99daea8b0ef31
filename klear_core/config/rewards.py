"""Define the settings of RL's rewards and advantages; `klear_core/rl/rewards.py` has the formulas in the same order.

Rewards are of verdicts, tags, functions of the user's own, and length. "Paper" is Klear-Reasoner (arXiv 2508.07629);
"scripts" are the training scripts published with it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from klear_core.config.settings import Settings
from klear_core.config.verify import UserFunction


class CustomReward(UserFunction):
    """A reward of the user's own, added to that of the verdict: a function of a `JudgedAnswer` that returns a number.

    An answer on which it fails, though it works on a trivial one to the same problem, gets `failed_value`. If it fails
    on that, too, the answer leaves its group and is counted.
    """

    name: str = Field(default="", pattern=r"^([A-Za-z][A-Za-z0-9_]*)?$")
    """Name in metrics and counts; empty: the function's."""
    weight: float = Field(default=1.0, ge=-100, le=100)
    """Factor on the value in the sum of all rewards; 0 only logs it."""
    min_value: float = Field(default=-100, ge=-1e6, le=1e6)
    """Smallest value that is accepted; one that is smaller is a failure."""
    max_value: float = Field(default=100, ge=-1e6, le=1e6)
    """Largest value that is accepted; one that is larger is a failure."""
    failed_value: float | None = Field(default=None, ge=-1e6, le=1e6)
    """Value of an answer on which the function fails; None: that of the answer in its group which gains least by this
    reward."""

    as_before = {"failed_value": None}

    @property
    def label(self) -> str:
        """Name in metrics and counts."""
        return self.name or self.function.partition(":")[2]

    @model_validator(mode="after")
    def _in_order(self) -> CustomReward:
        if self.min_value > self.max_value:
            raise ValueError(f"min_value = {self.min_value} is above max_value = {self.max_value}")
        if self.failed_value is not None and not self.min_value <= self.failed_value <= self.max_value:
            raise ValueError(
                f"failed_value = {self.failed_value} is not between min_value = {self.min_value} and "
                f"max_value = {self.max_value}"
            )
        return self


FormatReward = Annotated[
    Annotated[float, Field(ge=-100, le=100)] | None, BeforeValidator(lambda value: None if value == "none" else value)
]
"""Reward of a missing tag; None, which profiles write as `"none"` because TOML has no null, gives no such reward."""


class RewardConfig(Settings):
    """Mapping from verdicts to rewards; defaults from the published code (`reward_config.py`), but for
    `missing_close`."""

    correct: float = Field(default=1.0, ge=-100, le=100)
    """Reward of the full score; paper section 3.2.4 and scripts."""
    wrong: float = Field(default=-1.0, ge=-100, le=100)
    """Reward of score 0; scores between are interpolated linearly. The paper's soft code reward is 0 to 1, its code has
    -1 to 1."""
    soft: bool = True
    """Reward partial scores (the share of passed tests); False rewards only the full score."""
    missing_close: FormatReward = -1.0
    """Reward of an answer without `</think>`, whatever its content; `"none"` judges it like any other. Default: that of
    a wrong answer. The scripts have -0.5, for which a model that is often wrong learns to leave its tags out
    (docs/when_a_run_goes_wrong.md)."""
    missing_open: FormatReward = -2.0
    """Reward of an answer without `<think>` (checked second); `"none"` judges it like any other. A chat template that
    opens it in the prompt counts."""
    custom: tuple[CustomReward, ...] = ()
    """Functions of the user's own, whose weighted values are added for every answer, well-formed or not."""
    length_coef: float = Field(default=0.0, ge=0, le=100)
    """Times the answer's share of the token budget, times the share of positive answers in its group, is subtracted:
    easy problems are to be answered shortly (ALP, arXiv 2506.05256). The paper counts one answer as right in a group
    without any. Here such a group loses nothing, because a division by the standard deviation would make the smallest
    difference count fully. 0: off."""

    as_before = {"length_coef": 0.0}

    @property
    def loopholes(self) -> tuple[str, ...]:
        """Return a sentence for each malformed answer that is rewarded above a wrong one."""
        of_tags = {"missing_close": self.missing_close, "missing_open": self.missing_open}
        return tuple(
            f"reward.{name} = {value:g} is above reward.wrong = {self.wrong:g}: a model that is often wrong learns to "
            "leave its tags out, until no answer is well-formed and no gradient is left"
            for name, value in of_tags.items()
            if value is not None and value > self.wrong
        )

    @property
    def is_flat(self) -> bool:
        """Return whether right answers earn what wrong ones do, and no reward of the user's own tells them apart."""
        return self.correct == self.wrong and not self.custom

    @model_validator(mode="after")
    def _wrong_answers_earn_no_more(self) -> RewardConfig:
        if self.correct < self.wrong:
            raise ValueError(
                f"correct = {self.correct:g} is not above wrong = {self.wrong:g}: wrong answers would earn more"
            )
        return self

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


# ---- advantages ----
# Define how an answer's reward is compared with the others of its group.


class GrpoAdvantage(Settings):
    """Reward minus the group's mean, divided by the group's standard deviation (paper equation 4)."""

    kind: Literal["grpo"] = "grpo"
    std: Literal["population", "sample", "none"] = "population"
    """Standard deviation to divide by. The paper's equation has the population's, its code the sample's; `none` is
    Dr.GRPO (arXiv 2503.20783)."""


class RlooAdvantage(Settings):
    """Reward minus the mean of the group's other rewards (arXiv 2402.14740)."""

    kind: Literal["rloo"] = "rloo"


class BatchAdvantage(Settings):
    """Reward minus the group's mean, over the batch's standard deviation (REINFORCE++-baseline, arXiv 2501.03262)."""

    kind: Literal["batch"] = "batch"


class MaxRlAdvantage(Settings):
    """Accuracy minus the group's mean accuracy, over that mean (MaxRL, arXiv 2602.02710): with more samples its
    gradient approaches that of the log of the pass rate, so that rarely solved problems count most.

    An answer's accuracy is 1 if it is positive, else 0; no other reward counts.
    """

    kind: Literal["maxrl"] = "maxrl"


class PassAtKAdvantage(Settings):
    """Advantage for the best of k answers (Pass@k Training, arXiv 2508.10751, equations 14 and 15).

    The mean of the best reward over all subsets of k answers that contain this one, minus that over all subsets, over
    their standard deviation. With two different rewards this is the paper's formula, and with k = 1 it is `grpo`.
    """

    kind: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(default=4, ge=1)
    """Answers of which the best counts (the paper: 4); less than `rollout.samples_per_group`. In a group of fewer
    usable answers it is at most one less than their number."""


class GdpoAdvantage(Settings):
    """Each part of the reward is standardised over its group by itself; their weighted sum is divided by the standard
    deviation of the batch (GDPO, arXiv 2601.05242).

    The parts are the verdict (with the tags), each reward of the user's own, and what is subtracted for length. Their
    weights are 1, `weight`, and `overlong.penalty` plus `reward.length_coef`.
    """

    kind: Literal["gdpo"] = "gdpo"


AdvantageConfig = Annotated[
    GrpoAdvantage | RlooAdvantage | BatchAdvantage | MaxRlAdvantage | PassAtKAdvantage | GdpoAdvantage,
    Field(discriminator="kind"),
]
