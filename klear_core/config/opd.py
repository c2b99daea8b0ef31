"""Define the settings of offline on-policy distillation (Lightning OPD, arXiv 2604.13010).

The fine-tuned model answers prompts once, a teacher scores the tokens of these very answers once, and the model is
trained on the stored numbers.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from klear_core.config.evaluate import (
    EvaluateRuntime,
    LocalEngineConfig,
    PoolRuntime,
    SamplingConfig,
    TorchEngineConfig,
)
from klear_core.config.losses import GppoConfig, GspoConfig, LossConfig, TrmConfig
from klear_core.config.rl import RlConfig, RlOptimConfig, RlRuntime, RolloutConfig, TeacherTermConfig
from klear_core.config.settings import Precision, Settings
from klear_core.config.train import GivenModel, LoraConfig, ModelConfig, SftConfig, TinyModelConfig, TrainRuntime


class OpdRolloutsConfig(Settings):
    """The answers of the fine-tuned model that a teacher scores."""

    num_prompts: int | None = Field(default=None, ge=1)
    """Prompts to answer, the first in an order that the seed draws, of those of RL; None: all."""
    samples_per_prompt: int = Field(default=4, ge=1)
    """Answers to each prompt. Ours."""
    max_prompt_tokens: int = Field(default=4096, ge=1)
    """Longer prompts are left out and counted, as are those that fill the window."""
    sampling: SamplingConfig = SamplingConfig()
    engine: LocalEngineConfig = TorchEngineConfig()
    runtime: EvaluateRuntime = EvaluateRuntime()


class GivenTeacher(Settings):
    """A model that exists."""

    kind: Literal["given"] = "given"
    model: GivenModel


class TrainedTeacher(Settings):
    """A model fine-tuned here, on the traces that the student learns from: larger, or trained for longer."""

    kind: Literal["trained"] = "trained"
    model: ModelConfig = TinyModelConfig()
    sft: SftConfig = SftConfig()


class OpdTeacherRuntime(PoolRuntime, EvaluateRuntime):
    """Engines, or endpoints (vLLM servers) that serve the same model; they change no result."""


class OpdTeacherConfig(Settings):
    """The model whose log-probs the student learns. It must have the student's tokens."""

    source: Annotated[GivenTeacher | TrainedTeacher, Field(discriminator="kind")] = TrainedTeacher()
    engine: LocalEngineConfig = TorchEngineConfig()
    """Engine that scores. vLLM and endpoints score at temperature 1 alone."""
    top_k: int = Field(default=20, ge=0, le=20)
    """Likeliest tokens of the teacher that are stored in place of each token of an answer, and learnt by
    KL(teacher, student), with the teacher's probabilities of them scaled to 1 (GKD, arXiv 2306.13649). 20 is vLLM's
    limit, and as good as the whole vocabulary in SDFT's table. 0: the log-prob of the sampled token alone, whose
    log-ratio is the advantage (Lightning OPD)."""
    runtime: OpdTeacherRuntime = OpdTeacherRuntime()

    def check_temperature(self, temperature: float, key: str) -> None:
        """Raise ValueError if the teacher cannot score answers that were sampled at this temperature."""
        is_ours = isinstance(self.engine, TorchEngineConfig) and not self.runtime.endpoints
        if temperature != 1 and not is_ours:
            raise ValueError(
                f"{key} = {temperature:g}: vLLM and endpoints score given tokens at temperature 1 alone; set it to 1"
            )

    def check_scores_rl(self, rl: RlConfig, section: str) -> None:
        """Raise ValueError if this teacher cannot score the answers of an RL stage while it runs."""
        self.check_temperature(rl.rollout.sampling.temperature, f"{section}.rollout.sampling.temperature")
        num_engines = self.runtime.num_engines
        is_ours = isinstance(self.engine, TorchEngineConfig) and self.engine.runtime.device != "cuda"
        if num_engines != 0 and not (is_ours and num_engines in ("auto", 1)):
            raise ValueError(
                "rl_teacher has at most one engine, ours, on the CPU of the driver. For another, serve the model with "
                "vLLM, and set rl_teacher.runtime.num_engines = 0 and rl_teacher.runtime.endpoints"
            )
        if self.top_k and (isinstance(rl.loss, GspoConfig | TrmConfig) or rl.max_negative_kl is not None):
            cause = "max_negative_kl" if rl.max_negative_kl is not None else f'loss.kind = "{rl.loss.kind}"'
            raise ValueError(
                f"{section}.{cause} looks at whole answers, which the teacher's likeliest tokens are not learnt with: "
                "set rl_teacher.top_k = 0"
            )


class OpdTrainConfig(Settings):
    """Training on the scored answers: forward KL over the teacher's likeliest tokens or, without them, RL with the
    teacher's log-ratio as advantage."""

    num_steps: int = Field(default=150, ge=1)
    """Steps; 150 in the published continuation of Klear-Reasoner-8B-SFT (arXiv 2607.28449)."""
    rows_per_step: int = Field(default=256, ge=1)
    """Answers in a step. Ours: the paper's text that we have states no number."""
    minibatches_per_step: int = Field(default=1, ge=1)
    """Updates in a step."""
    optim: RlOptimConfig = RlOptimConfig()
    lora: LoraConfig | None = None
    """Train LoRA adapters instead of all weights."""
    loss: LossConfig = GppoConfig()
    """Clip or mask of the ratio of the trained policy to the old one."""
    old_logps: Literal["learner", "sampler"] = "sampler"
    """The old policy: the model that sampled the answers, so that the ratio corrects for what was learned since, or the
    learner before each step."""
    distill: TeacherTermConfig = TeacherTermConfig()
    max_log_ratio: float = Field(default=20.0, gt=0, le=30)
    """Bound on the log-ratios, of new to old policy and of teacher to policy."""
    dtype: Precision = "bfloat16"
    """Data type of forward and backward pass and of the saved model."""
    runtime: TrainRuntime = TrainRuntime()

    def as_rl(self, rollouts: OpdRolloutsConfig) -> RlConfig:
        """Return the settings of the learner, for answers that were sampled so."""
        sampling = rollouts.sampling
        of_learner = SamplingConfig(temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens)
        return RlConfig(
            num_steps=self.num_steps,
            minibatches_per_step=self.minibatches_per_step,
            optim=self.optim,
            lora=self.lora,
            loss=self.loss,
            old_logps=self.old_logps,
            lm_coef=0.0,
            distill=self.distill,
            max_log_ratio=self.max_log_ratio,
            dtype=self.dtype,
            rollout=RolloutConfig(
                max_prompt_tokens=rollouts.max_prompt_tokens, sampling=of_learner, engine=rollouts.engine
            ),
            runtime=RlRuntime.model_validate(self.runtime.model_dump()),
        )


class OpdConfig(Settings):
    """Offline on-policy distillation, a stage between SFT and RL."""

    rollouts: OpdRolloutsConfig = OpdRolloutsConfig()
    teacher: OpdTeacherConfig = OpdTeacherConfig()
    code_teacher: OpdTeacherConfig | None = None
    """Another teacher for the answers to code problems; None: `teacher` scores these, too."""
    train: OpdTrainConfig = OpdTrainConfig()
    then_rl: bool = True
    """Go on with RL; false ends the pipeline with the distilled model."""

    @property
    def stale_risk(self) -> str:
        """Return `RlConfig.stale_risk` for the last step, whose answers are as old as the training; nothing where the
        learner's log-probs before each step are the old ones, or a teacher's likeliest tokens are learnt, without a
        ratio."""
        if self.teacher.top_k or self.train.old_logps == "learner":
            return ""
        return self.train.as_rl(self.rollouts).stale_risk(self.train.num_steps, can_correct=False)

    @model_validator(mode="after")
    def _whole_distributions_have_no_ratio(self) -> Self:
        default = OpdTrainConfig()
        for name in ("loss", "old_logps"):
            if self.teacher.top_k and getattr(self.train, name) != getattr(default, name):
                raise ValueError(
                    f"opd.train.{name} changes nothing with opd.teacher.top_k = {self.teacher.top_k}: the teacher's "
                    "likeliest tokens are learnt without a ratio; leave it out, or set top_k = 0"
                )
        return self

    @model_validator(mode="after")
    def _the_learner_takes_them(self) -> Self:
        self.train.as_rl(self.rollouts)  # has the rules
        return self

    @model_validator(mode="after")
    def _samplers_log_probs_are_of_the_policy(self) -> Self:
        changes = self.rollouts.sampling.changes_of_policy
        if changes and self.teacher.top_k == 0 and self.train.old_logps == "sampler":
            raise ValueError(
                f"opd.rollouts.sampling.{changes}: the sampler's log-probs are then of another distribution than the "
                "learner's, and no ratio would be 1 before the first update; set opd.train.old_logps to 'learner', or "
                "opd.teacher.top_k above 0, which needs no ratio"
            )
        return self

    @model_validator(mode="after")
    def _teacher_scores_at_the_temperature(self) -> Self:
        for teacher in (self.teacher, self.code_teacher):
            if teacher is not None:
                teacher.check_temperature(self.rollouts.sampling.temperature, "opd.rollouts.sampling.temperature")
        return self

    @model_validator(mode="after")
    def _teachers_score_alike(self) -> Self:
        if self.code_teacher is not None and self.code_teacher.top_k != self.teacher.top_k:
            raise ValueError(
                f"opd.code_teacher.top_k = {self.code_teacher.top_k} and opd.teacher.top_k = {self.teacher.top_k}: one "
                "training learns from likeliest tokens or from sampled ones; set both to the same"
            )
        return self
