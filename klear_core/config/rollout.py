"""Define the settings of sampling in RL: which problems are asked, how answers are sampled, which groups are kept.

"Paper" is Klear-Reasoner (arXiv 2508.07629); "scripts" are the training scripts published with it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from klear_core.config.engine import LocalEngineConfig, SamplingConfig, TorchEngineConfig, VllmEngineConfig
from klear_core.config.settings import Settings


class PromptFilterConfig(Settings):
    """Selection of the problems to train on, before the first step. The released subsets are filtered already."""

    min_tests: int = Field(default=0, ge=0)
    """Code problems with fewer tests are left out; 0 leaves none out. Paper: 16 (section 3.2.1)."""
    min_pass_rate: float = Field(default=0.0, ge=0, le=1)
    """Problems that the tagger solves less often are left out. Paper: 0.5, by DeepSeek-R1's 16 answers (section 3.2.1,
    which has "above" for code, and "a majority" for math)."""
    max_pass_rate: float = Field(default=1.0, ge=0, le=1)
    """Problems that the tagger solves more often are left out; the paper has no such bound."""

    @property
    def needs_pass_rates(self) -> bool:
        """Whether the filter compares pass rates, which a `tag` stage measures."""
        return self.min_pass_rate > 0 or self.max_pass_rate < 1

    @model_validator(mode="after")
    def _in_order(self) -> PromptFilterConfig:
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError(f"min_pass_rate = {self.min_pass_rate} is above max_pass_rate = {self.max_pass_rate}")
        return self


class RolloutConfig(Settings):
    """Sampling of prompts into judged groups of answers."""

    groups_per_step: int = Field(default=128, ge=1)
    """Maximum number of groups to train on in one RL step (section 4.1)."""
    samples_per_group: int = Field(default=8, ge=2)
    """Answers sampled per prompt (section 4.1)."""
    oversample: float = Field(default=1.0, ge=1, le=16)
    """Prompts sampled in a round, as a multiple of `groups_per_step` (scripts: 2, that is 256 for 128)."""
    max_rounds: int = Field(default=1, ge=1, le=100)
    """Maximum rounds of prompts to fill a step with informative groups; 1 never refills (scripts), more is DAPO's
    dynamic sampling. With mode `continuous` a step uses fewer groups after as many finished prompts."""
    mode: Literal["rounds", "continuous"] = "rounds"
    """`rounds`: all answers of a round are waited for (scripts). `continuous`: a set number of requests is always at
    the engines; each step trains on the oldest groups that are finished, within `max_staleness`, and no informative
    group is thrown away. Which groups a step has then depends on timing."""
    surplus: Literal["drop", "cancel"] = "drop"
    """Informative groups beyond `groups_per_step`, with mode `rounds`. `drop`: the first in prompt order are trained
    on, the others thrown away finished (scripts); `cancel`: once enough are finished the others are given up, which is
    faster and prefers short answers."""
    max_prompt_tokens: int = Field(default=4096, ge=1)
    """Longer prompts are left out and counted; the scripts cut off their beginning."""
    sampling: SamplingConfig = SamplingConfig()
    engine: LocalEngineConfig = TorchEngineConfig()

    @property
    def prompts_per_round(self) -> int:
        """Return the number of prompts asked in a round."""
        return round(self.groups_per_step * self.oversample)

    @property
    def sleeps_between_rollouts(self) -> bool:
        """Return whether engines release their GPU memory to the learner between rollouts."""
        return isinstance(self.engine, VllmEngineConfig) and self.engine.runtime.sleep_mode


class GroupFilterConfig(Settings):
    """Selection of the groups to train on."""

    zero_advantage: Literal["reward", "accuracy", "off"] = "reward"
    """Drop groups whose rewards (the paper) or 0/1 accuracies (its code, for code problems too) are all equal."""
    min_accuracy: float = Field(default=0.0, ge=0, le=1)
    """Groups with a lower mean accuracy are dropped; 0 drops none. An accurate answer is correct and has the tags that
    `reward` requires."""
    max_accuracy: float = Field(default=1.0, ge=0, le=1)
    """Groups with a higher mean accuracy are dropped; 1 drops none."""

    @model_validator(mode="after")
    def _in_order(self) -> GroupFilterConfig:
        if self.min_accuracy > self.max_accuracy:
            raise ValueError(
                f"min_accuracy = {self.min_accuracy} is above max_accuracy = {self.max_accuracy}: "
                "every group would be dropped"
            )
        return self
