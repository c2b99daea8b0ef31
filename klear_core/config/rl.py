"""Settings of GPPO reinforcement learning. "Scripts" are those published with Klear-Reasoner, where they differ from the paper."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from klear_core.config.base import RareFloor, Settings
from klear_core.config.engine import LocalEngineConfig, SamplingConfig, TorchEngineConfig, VllmEngineConfig
from klear_core.config.train import CheckpointConfig, OptimConfig, TrainRuntime

GPPO_PRESETS: dict[str, dict[str, float]] = {
    "paper": {"beta_low": 1.0, "beta_high": 1.0},
    "ce_gppo": {"beta_low": 0.5, "beta_high": 1.0},
    "high_only": {"beta_low": 0.0, "beta_high": 1.0},
}
"""Klear-Reasoner equation 11, CE-GPPO section 5.1 (whose eps_high is 0.2, which no preset sets), and only positive tokens kept."""


class BetaSchedule(Settings):
    """From `start_step` the betas move in a straight line, and at `end_step` they are these; equal steps are a jump."""

    start_step: int = Field(ge=0)
    """The last RL step with the loss's own betas."""
    end_step: int = Field(ge=0)
    """The first RL step with these betas."""
    beta_low: float = Field(ge=0)
    """Weight of negative tokens below the range from `end_step` on (CE-GPPO: 0.5)."""
    beta_high: float = Field(ge=0)
    """Weight of positive tokens above the range from `end_step` on (CE-GPPO: 1)."""

    @model_validator(mode="after")
    def _ordered(self) -> BetaSchedule:
        if self.end_step < self.start_step:
            raise ValueError(f"end_step {self.end_step} lies before start_step {self.start_step}")
        return self


class GppoConfig(Settings):
    """Gradient-preserving clipping in its general form (Klear-Reasoner equations 11 and 17, CE-GPPO equation 8)."""

    kind: Literal["gppo"] = "gppo"
    preset: Literal["paper", "ce_gppo", "high_only", "custom"] = "paper"
    """A name for the betas, to give instead of them; given the betas, it follows from them."""
    eps_low: float = Field(default=0.2, ge=0, lt=1)
    """Paper section 4.1."""
    eps_high: float = Field(default=0.28, ge=0)
    """Paper section 4.1; CE-GPPO has 0.2."""
    beta_low: float = Field(default=1.0, ge=0)
    """Weight of negative tokens below the range; the paper has 1, the authors' later advice 0.25 to 0.5."""
    beta_high: float = Field(default=1.0, ge=0)
    """Weight of positive tokens above the range."""
    schedule: BetaSchedule | None = None
    """Betas that change during the run (CE-GPPO shows (0, 1), then (0.5, 1) from step 585)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Caps the loss of negative tokens at this many advantages, without gradient. Not in the paper; its scripts have 10."""

    @model_validator(mode="before")
    @classmethod
    def _preset_gives_betas(cls, values: Any) -> Any:
        betas = _betas_of(values.get("preset")) if isinstance(values, dict) else {}
        for key, beta in betas.items():
            if values.get(key, beta) != beta:
                raise ValueError(f"{key}={values[key]} contradicts preset {values['preset']!r}, where it is {beta}; use preset 'custom'")
        return values | betas if betas else values

    @model_validator(mode="after")
    def _betas_give_preset(self) -> GppoConfig:
        """Where none was given, and without counting as given: what is laid over these settings later need not contradict it."""
        if "preset" not in self.model_fields_set:
            betas = {"beta_low": self.beta_low, "beta_high": self.beta_high}
            self.__dict__["preset"] = next((name for name, known in GPPO_PRESETS.items() if known == betas), "custom")
        return self


def _betas_of(preset: object) -> dict[str, float]:
    """Empty for `custom` and for what is no preset."""
    return GPPO_PRESETS.get(preset, {}) if isinstance(preset, str) else {}


class ClipConfig(Settings):
    """PPO's clipped objective; with eps_high above eps_low it is clip-higher (DAPO)."""

    kind: Literal["clip"] = "clip"
    eps_low: float = Field(default=0.2, ge=0, lt=1)
    """Ratios below 1 - eps_low are clipped (PPO, DAPO)."""
    eps_high: float = Field(default=0.28, ge=0)
    """Ratios above 1 + eps_high are clipped (DAPO: 0.28; PPO has both at 0.2)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Caps the loss of negative tokens at this many advantages, without gradient (DAPO's code: 10)."""


class CispoConfig(Settings):
    """Clipped importance weights times log-probability (MiniMax-M1; as Klear-Reasoner equation 16 when two-sided)."""

    kind: Literal["cispo"] = "cispo"
    eps_low: float = Field(default=0.2, ge=0, lt=1)
    """Read only when two-sided."""
    eps_high: float = Field(default=0.28, ge=0)
    """Weights end at 1 + eps_high. Some codebases mean the bound itself by this name."""
    two_sided: bool = False
    """Also keep weights above 1 - eps_low; MiniMax and ScaleRL bound the upper side only."""


class GspoConfig(Settings):
    """PPO's clipped objective on the ratio of whole sequences, length-normalised (GSPO, arXiv 2507.18071, with `normalise = "sample"`)."""

    kind: Literal["gspo"] = "gspo"
    eps_low: float = Field(default=3e-4, ge=0, lt=1)
    """Below 1 - eps_low a whole sequence is clipped; GSPO section 5.1, far narrower than for tokens."""
    eps_high: float = Field(default=4e-4, ge=0)
    """Above 1 + eps_high a whole sequence is clipped; GSPO section 5.1."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Caps the loss of negative sequences at this many advantages, without gradient. Not in GSPO."""


LossConfig = Annotated[GppoConfig | ClipConfig | CispoConfig | GspoConfig, Field(discriminator="kind")]


class ErcConfig(Settings):
    """Tokens whose entropy moved out of (low, high) times the old one keep their value and lose their gradient (ERC, arXiv 2512.05591)."""

    low: float = Field(default=0.95, gt=0, lt=1)
    """Lower bound of new over old entropy; ERC's scripts (its code defaults to 0.8)."""
    high: float = Field(default=1.05, gt=1)
    """Upper bound; ERC's scripts (its code defaults to 1.2, its logs have 1.05 to 1.25)."""


class MismatchConfig(Settings):
    """What to do where sampler and learner disagree on the log-probs of the same weights. Needs `old_logps = "learner"`."""

    truncate_at: float | None = Field(default=None, ge=1)
    """Weigh tokens by learner over sampler probability, at most this (truncated importance sampling); None: no weight."""
    max_sequence_ratio: float | None = Field(default=None, gt=1)
    """Mask sequences whose geometric mean of that ratio, or its inverse, is above this; None keeps all."""


class GrpoAdvantage(Settings):
    """Reward minus the group's mean, over the group's standard deviation (paper equation 4)."""

    kind: Literal["grpo"] = "grpo"
    std: Literal["population", "sample", "none"] = "population"
    """The paper's equation has the population std, its code the sample std; `none` is Dr.GRPO (arXiv 2503.20783)."""


class RlooAdvantage(Settings):
    """Reward minus the mean of the group's other rewards (arXiv 2402.14740)."""

    kind: Literal["rloo"] = "rloo"


class BatchAdvantage(Settings):
    """Reward minus the group's mean, over the standard deviation of the whole batch (REINFORCE++-baseline, arXiv 2501.03262)."""

    kind: Literal["batch"] = "batch"


AdvantageConfig = Annotated[GrpoAdvantage | RlooAdvantage | BatchAdvantage, Field(discriminator="kind")]


class RewardConfig(Settings):
    """From a verdict to a reward; the numbers are those of the published code (`reward_config.py`)."""

    correct: float = Field(default=1.0, ge=-100, le=100)
    """Reward of the full score; paper section 3.2.4 and scripts."""
    wrong: float = Field(default=-1.0, ge=-100, le=100)
    """Reward of score 0; scores between go in a straight line. The paper's soft code reward is 0 to 1, its code has -1 to 1."""
    soft: bool = True
    """Reward a share of passed tests; False rewards only the full score."""
    missing_close: float | None = Field(default=-0.5, ge=-100, le=100)
    """Reward of an answer without `</think>`, whatever it says; None judges it like any other. Above `wrong`, it favours truncation."""
    missing_open: float | None = Field(default=-2.0, ge=-100, le=100)
    """Reward of an answer without `<think>` (checked second); None where the prompt opens it."""


class OverlongConfig(Settings):
    """Answers that ran out of tokens, by the sampler's finish reason. The authors advise `drop` below a 32K budget."""

    handling: Literal["keep", "drop", "mask"] = "keep"
    """`drop`: leave the group before advantages; `mask`: count in the group's advantages but carry no loss."""
    penalty_tokens: int = Field(default=0, ge=0)
    """The last this many tokens of the budget are penalised, growing in a straight line (DAPO: 4096); 0: no penalty."""
    penalty: float = Field(default=1.0, ge=0, le=100)
    """Taken off the reward of an answer that fills the budget (DAPO: 1)."""


class GroupFilterConfig(Settings):
    """Which groups are worth a gradient."""

    zero_advantage: Literal["reward", "accuracy", "off"] = "reward"
    """Drop groups whose rewards (the paper) or 0/1 accuracies (its code, for code problems too) are all equal."""
    min_accuracy: float = Field(default=0.0, ge=0, le=1)
    """Groups with a lower mean accuracy are dropped; 0 drops none. Accurate is right, with the tags that `reward` asks for."""
    max_accuracy: float = Field(default=1.0, ge=0, le=1)
    """Groups with a mean accuracy outside these bounds are dropped."""

    @model_validator(mode="after")
    def _in_order(self) -> GroupFilterConfig:
        if self.min_accuracy > self.max_accuracy:
            raise ValueError(
                f"min_accuracy = {self.min_accuracy} is above max_accuracy = {self.max_accuracy}: every group would be dropped"
            )
        return self


class RolloutConfig(Settings):
    """How prompts become judged groups."""

    groups_per_step: int = Field(default=128, ge=1)
    """Groups to train on in one RL step, at most (section 4.1)."""
    samples_per_group: int = Field(default=8, ge=2)
    """Section 4.1."""
    oversample: float = Field(default=1.0, ge=1, le=16)
    """Prompts asked in a round, as a multiple of `groups_per_step` (scripts: 2, that is 256 for 128)."""
    max_rounds: int = Field(default=1, ge=1, le=100)
    """Rounds of prompts to fill a step with informative groups; 1 never refills (scripts), more is DAPO's dynamic sampling."""
    max_prompt_tokens: int = Field(default=4096, ge=1)
    """Longer prompts are left out and counted; the scripts cut their beginning off."""
    sampling: SamplingConfig = SamplingConfig()
    engine: LocalEngineConfig = TorchEngineConfig()

    @property
    def is_asleep_between(self) -> bool:
        """Whether engines give their GPU memory to the learner between rollouts."""
        return isinstance(self.engine, VllmEngineConfig) and self.engine.runtime.sleep_mode


class RlCheckpointConfig(CheckpointConfig):
    """How often RL saves."""

    every_steps: int = Field(default=10, ge=1)
    """RL steps that a killed stage loses at most. One takes minutes at 8B: ten are what one may lose."""


class RlRuntime(TrainRuntime):
    """Where RL runs."""

    checkpoint: RlCheckpointConfig = RlCheckpointConfig()
    num_rollout_actors: int = Field(default=2, ge=1)
    """Processes that sample, each with an engine of its own."""
    rollout_threads: int = Field(default=1, ge=1)
    """CPU threads of one rollout actor."""
    rollout_gpus: float | None = Field(default=None, ge=0)
    """GPUs of one rollout actor; None: what its engine needs, if there are GPUs. Fractions share one."""
    learner_gpus: float | None = Field(default=None, ge=0)
    """GPUs of one learner process; None: one, if there are GPUs."""
    weight_sync: Literal["auto", "store", "direct"] = "auto"
    """How new weights reach the engines: through Ray's object store and host memory, or straight from the learner (NCCL between
    GPUs, gloo between CPUs). auto: straight where learner and engines have GPUs of their own."""
    stall_timeout_s: float = Field(default=1800, gt=0)
    """No progress for this long is an error that names who waits for what."""
    step_timeout_s: float = Field(default=3600, gt=0, le=604_800)
    """The learner has this long for all updates of one RL step, of which it says nothing until they are done."""
    max_restarts: int = Field(default=8, ge=0)
    """Lost actors to replace in one run before giving up."""
    taught: RareFloor = RareFloor()
    """Of the prompts asked: those whose group was trained on. Looked at from step 20 on, and at the end."""


class RlOptimConfig(OptimConfig):
    """AdamW for RL, at a constant rate after warm-up."""

    lr: float = Field(default=1e-6, gt=0, le=1)
    """Peak learning rate; section 4.1 (code RL: 5e-7)."""
    warmup_steps: int = Field(default=10, ge=0)
    """RL steps in which the rate climbs in a straight line to its peak (scripts)."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Applied to matrices only, not to norms and embeddings (scripts)."""


class RlConfig(Settings):
    """Reinforcement learning with verifiable rewards."""

    domain: Literal["math", "code"] = "math"
    """Which of the curated problems this stage trains on; the others are counted and left out. Paper: math first, then code."""
    num_steps: int = Field(default=500, ge=1)
    """Undisclosed; the paper's plots end at 240, the scripts have 5 epochs, up to 585 steps."""
    minibatches_per_step: int = Field(default=8, ge=1)
    """Optimizer steps per RL step (scripts: 8 math, 4 code); with 1 every ratio is 1 and all clip losses are the same."""
    optim: RlOptimConfig = RlOptimConfig()
    keep_optimizer: bool = False
    """Leave the optimizer's state beside the model, for a later stage that continues with it."""
    continue_optimizer: bool = False
    """Start with the optimizer state (and float32 weights) that the input model's stage kept; undisclosed in the paper."""
    loss: LossConfig = GppoConfig()
    erc: ErcConfig | None = None
    """Entropy-ratio masking on top of the loss."""
    mismatch: MismatchConfig = MismatchConfig()
    old_logps: Literal["learner", "sampler"] = "learner"
    """Who gives the old log-probs: the learner in a pass of its own (scripts), or the sampler for free."""
    normalise: Literal["token", "sample", "budget"] = "token"
    """Divide by all loss tokens (paper equation 11; the scripts: by those of each micro-batch), average rows first (GRPO, GSPO), or
    divide by rows x token budget (Dr.GRPO)."""
    max_log_ratio: float = Field(default=20.0, gt=0, le=30)
    """Bound of |log ratio|, so that no weight can overflow (ERC's code: 20); tokens beyond are counted."""
    lm_coef: float = Field(default=0.1, ge=0)
    """Alpha of the language-model loss on positive samples: right, and with the tags that `reward` asks for. Equation 13 prints a mean
    probability; the scripts and we take the log."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 estimate of KL(policy, initial model); the paper has none. Above 0 a frozen copy is kept."""
    entropy_coef: float = Field(default=0.0, ge=0, le=1)
    """Weight of an entropy bonus; the paper has none, CE-GPPO saw 0.003 explode."""
    advantage: AdvantageConfig = GrpoAdvantage()
    reward: RewardConfig = RewardConfig()
    overlong: OverlongConfig = OverlongConfig()
    group_filter: GroupFilterConfig = GroupFilterConfig()
    rollout: RolloutConfig = RolloutConfig()
    max_staleness: int = Field(default=0, ge=0, le=16)
    """Versions that a sample may lag behind the learner; 0 is synchronous, 1 is one step off, more is asynchronous."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the forward and backward pass and of the saved model; weights and optimizer are float32 either way. Scripts: bfloat16."""
    runtime: RlRuntime = RlRuntime()

    @model_validator(mode="after")
    def _mismatch_needs_learner_logps(self) -> RlConfig:
        corrects = self.mismatch.truncate_at is not None or self.mismatch.max_sequence_ratio is not None
        if corrects and self.old_logps != "learner":
            raise ValueError("mismatch correction compares learner with sampler log-probs: set old_logps to 'learner'")
        return self

    @model_validator(mode="after")
    def _samplers_log_probs_are_of_the_policy(self) -> RlConfig:
        sampling = self.rollout.sampling
        cut = {"top_p": sampling.top_p != 1, "top_k": sampling.top_k != 0, "repetition_penalty": sampling.repetition_penalty != 1}
        if self.old_logps == "sampler" and any(cut.values()):
            found = ", ".join(f"{name} = {getattr(sampling, name):g}" for name, is_cut in cut.items() if is_cut)
            raise ValueError(
                f"old_logps = 'sampler' with rollout.sampling.{found}: the sampler's log-probs are then of another distribution than "
                f"the learner's, and no ratio would be 1 before the first update; set old_logps to 'learner'"
            )
        return self

    @model_validator(mode="after")
    def _engines_have_the_learners_positions(self) -> RlConfig:
        engine = self.rollout.engine
        if isinstance(engine, VllmEngineConfig) and engine.yarn_factor is not None:
            raise ValueError(
                f"rollout.engine.yarn_factor = {engine.yarn_factor:g}: the learner's positions are not stretched, and no ratio would be 1 "
                f"before the first update; YaRN is for evaluation"
            )
        return self

    @model_validator(mode="after")
    def _engines_sleep_only_between_rollouts(self) -> RlConfig:
        if self.rollout.is_asleep_between and self.max_staleness > 0:
            raise ValueError(
                f"rollout.engine.runtime.sleep_mode with max_staleness = {self.max_staleness}: engines that sample while the learner works "
                f"cannot give it their memory; set one of them to 0 or false"
            )
        return self

    @model_validator(mode="after")
    def _penalty_fits_the_budget(self) -> RlConfig:
        buffer, budget = self.overlong.penalty_tokens, self.rollout.sampling.max_new_tokens
        if buffer > budget:
            raise ValueError(f"overlong.penalty_tokens = {buffer} exceeds max_new_tokens = {budget}: every answer would be penalised")
        return self

    @model_validator(mode="after")
    def _samples_at_a_temperature(self) -> RlConfig:
        if self.rollout.sampling.temperature == 0:
            raise ValueError("rollout.sampling.temperature = 0 is greedy: all answers of a group would be the same; RL needs more than 0")
        return self
