"""Define the settings of advantages: how an answer's reward is compared with the others of its group.

`klear_core/rl/rewards.py` has the formulas in the same order.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from klear_core.config.settings import Settings


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
