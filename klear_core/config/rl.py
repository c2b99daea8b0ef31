"""Define the settings of GPPO reinforcement learning: the training, and the sampling of its answers.

"Paper" is Klear-Reasoner (arXiv 2508.07629); "scripts" are the training scripts published with it, cited where they
differ from the paper or say more.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from klear_core.config.evaluate import (
    InlineEvalConfig,
    LocalEngineConfig,
    SamplingConfig,
    TorchEngineConfig,
    VllmEngineConfig,
)
from klear_core.config.losses import ErcConfig, GppoConfig, LossConfig
from klear_core.config.rewards import (
    AdvantageConfig,
    GrpoAdvantage,
    MaxRlAdvantage,
    OverlongConfig,
    PassAtKAdvantage,
    RewardConfig,
)
from klear_core.config.settings import Precision, RareYieldLimits, Settings
from klear_core.config.train import CheckpointConfig, LoraConfig, OptimConfig, TrainRuntime, check_moments

# ---- rollout ----
# Define the settings of sampling in RL: which problems are asked, how answers are sampled, which groups are kept.


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


class CurriculumConfig(Settings):
    """Drawing of prompts by the probability that the answers of their group will be right and wrong. The values are
    ours; the grid `curriculum` shows no gain where three quarters of uniformly drawn groups are informative."""

    half_life_steps: float = Field(default=20.0, gt=0)
    """RL steps after which a remembered answer counts half, because the policy has changed since."""
    admit: float = Field(default=0.25, ge=0, lt=1)
    """Problems with a smaller probability are drawn as revisits only, until memory of them has faded."""
    revisit_frac: float = Field(default=0.1, ge=0, le=1)
    """Share of the prompts drawn from the problems below `admit`, longest unasked first."""


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
    mode: Literal["rounds", "continuous", "delayed"] = "rounds"
    """`rounds`: all answers of a round are waited for (scripts). `continuous`: a set number of requests is always at
    the engines; each step trains on the oldest groups that are finished, within `max_staleness`, and no informative
    group is thrown away. Which groups a step has then depends on timing. `delayed`: rounds that are sampled exactly
    `max_staleness` steps before they are trained on, to compare losses on stale samples; nothing is sampled while the
    learner works, so an undisturbed run repeats bit for bit."""
    surplus: Literal["drop", "cancel"] = "drop"
    """Informative groups beyond `groups_per_step`, with mode `rounds`. `drop`: the first in prompt order are trained
    on, the others thrown away finished (scripts); `cancel`: once enough are finished the others are given up, which is
    faster and prefers short answers."""
    max_prompt_tokens: int = Field(default=4096, ge=1)
    """Longer prompts, and those that fill the window, are left out and counted; the scripts cut off their beginning."""
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

    @property
    def drops_weights(self) -> bool:
        """Return whether engines have no weights when they wake."""
        engine = self.engine
        return isinstance(engine, VllmEngineConfig) and engine.runtime.sleep_mode and engine.runtime.sleep_level == 2


class GroupFilterConfig(Settings):
    """Selection of the groups to train on."""

    zero_advantage: Literal["reward", "accuracy", "off"] = "reward"
    """Drop groups whose rewards (paper; without `rl.distill`) or 0/1 accuracies (its code, code, too) are all equal."""
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


# ---- rl ----


_TRUNCATE_VLLM_AT = 2.0
"""Value of the report on truncated importance sampling (fengyao.notion.site/off-policy-rl); 1.5 to 10 did alike."""


_STALE, _VERY_STALE = 4, 16
"""Ages of samples, in versions of 16 updates, at which GPPO collapsed on 3 and on 8 of 8 seeds
(docs/data/stale_others.jsonl, stale.jsonl)."""
_STEADY_BETA_LOW = 0.5
"""The weight of CE-GPPO, which collapsed on none there."""


class MismatchConfig(Settings):
    """Corrections where sampler and learner log-probs of the same weights differ. Needs `old_logps = "learner"`."""

    truncate_at: Annotated[float, Field(ge=1)] | Literal["auto", "off"] | None = "auto"
    """Weight tokens by learner over sampler probability, at most this (truncated importance sampling). `auto`: 2
    wherever vLLM samples, whose kernels round in other places, else off; None: off."""
    max_sequence_ratio: float | None = Field(default=None, gt=1)
    """Mask sequences whose geometric mean of that ratio, or its inverse, is above this; None masks none."""


class RlCheckpointConfig(CheckpointConfig):
    """Checkpoints of RL."""

    every_steps: int = Field(default=10, ge=1)
    """RL steps between checkpoints, the most that a killed stage loses. One step takes minutes at 8B."""


class BadAnswerLimits(Settings):
    """Shares of the answers of the last five steps above which the stage stops, if they have risen by 0.2 since the
    first five. Default one half: the collapse that we let go on past it (docs/when_a_run_goes_wrong.md, without tags)
    did not come back. 1 never stops."""

    malformed: float = Field(default=0.5, ge=0, le=1)
    """Answers that lack a tag for which `reward` has a value."""
    truncated: float = Field(default=0.5, ge=0, le=1)
    """Answers that ran out of tokens."""
    repeated: float = Field(default=0.5, ge=0, le=1)
    """Answers that end in a loop: the last 32 tokens or more are one piece, four times or more."""
    empty: float = Field(default=0.5, ge=0, le=1)
    """Answers with nothing after the thinking."""
    warn_above: float = Field(default=0.25, ge=0, le=1)
    """A larger share causes a warning on the terminal and in the report."""


class RlRuntime(TrainRuntime):
    """Processes, GPUs and timeouts of RL."""

    checkpoint: RlCheckpointConfig = RlCheckpointConfig()
    save_steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """RL steps, as logged from 1, that are kept in the artifact for `klear rl replay`: samples, weights and optimizer
    state, 12 bytes per parameter for each."""
    curve: InlineEvalConfig | None = None
    """Scores on a small fixed set of problems while training goes on, by the engines that sample; None: none."""
    num_rollout_actors: int = Field(default=2, ge=1)
    """Rollout actors (sampling processes), each with its own engine."""
    requests_per_actor: int = Field(default=256, ge=1)
    """Requests kept at each rollout actor with `rollout.mode = "continuous"`; vLLM decodes `max_num_seqs` of them
    together, by default as many."""
    rollout_threads: int = Field(default=1, ge=1)
    """CPU threads of one rollout actor. With `max_staleness = 0` they and the learner's threads work in turn, so that
    each may have all cores."""
    rollout_gpus: float | None = Field(default=None, ge=0)
    """GPUs of a rollout actor; None: as many as its engine needs, of those there are; none with `device = "cpu"`."""
    learner_gpus: float | None = Field(default=None, ge=0)
    """GPUs of a learner process; None: one, if there are any; none with `device = "cpu"`. Fractions share a GPU."""
    weight_sync: Literal["auto", "store", "direct"] = "auto"
    """Route of new weights to the engines. `store`: through Ray's object store and host memory; `direct`: from the
    learner (NCCL between GPUs, CUDA's handles of memory on a shared GPU, gloo between CPUs); `auto`: direct if learner
    and engines have separate GPUs."""
    engine_check: Literal["warn", "refuse", "off"] = "warn"
    """Reaction if engine and learner give different log-probs to an answer sampled before the first step: `warn`,
    with a note in the manifest, or `refuse` to train. The tolerances are in klear_core/rl/interfaces.py."""
    max_restarts: int = Field(default=8, ge=0)
    """Maximum number of lost actors to restart in one run."""
    informative: RareYieldLimits = RareYieldLimits()
    """Share of the sampled prompts whose group was trained on; checked from step 20 on and at the end."""
    bad_answers: BadAnswerLimits = BadAnswerLimits()
    """Limits on answers that cannot be right; checked from step 10 on."""


class TeacherTermConfig(Settings):
    """On-policy distillation: the advantage of a token is the log-ratio of teacher and policy, whose mean under the
    policy is minus KL(policy, teacher). Added to the advantage of the rewards. Where samples bring the teacher's
    likeliest tokens, the term is KL(teacher, policy) over these instead, a loss beside that of the rewards."""

    coef: float = Field(default=1.0, gt=0)
    """Weight beside the rewards' advantage; slime's `--opd-kl-coef` has 1."""
    normalise: Literal["token", "sample", "budget"] = "token"
    """Divisor of the term, as `rl.normalise`, of the answers that a teacher scored."""


class EntropyTargetConfig(Settings):
    """Entropy bonus whose weight adapts (Skywork-OR1, arXiv 2505.22312, adaptive entropy control; defaults are its)."""

    target: float = Field(default=0.2, ge=0)
    """Mean entropy per token, in nats, below which the coefficient rises and at or above which it falls."""
    delta: float = Field(default=0.005, gt=0, le=1)
    """Change of the coefficient per RL step."""
    max_coef: float = Field(default=0.1, gt=0, le=1)
    """Largest coefficient; ours."""


class RlOptimConfig(OptimConfig):
    """AdamW for RL, at a constant rate after warm-up."""

    lr: float = Field(default=1e-6, gt=0, le=1)
    """Peak learning rate; section 4.1 (code RL: 5e-7)."""
    warmup_steps: int = Field(default=10, ge=0)
    """RL steps in which the rate rises linearly to its peak (scripts)."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Applied to matrices only, not to norms and embeddings (scripts)."""


class RlConfig(Settings):
    """Reinforcement learning with verifiable rewards."""

    domain: Literal["math", "code"] = "math"
    """Domain of the problems to train on; others are left out and counted. Paper: math first, then code."""
    prompts: PromptFilterConfig = PromptFilterConfig()
    curriculum: CurriculumConfig | None = None
    """Draw prompts by what their pass rates say; None takes each problem once an epoch, as the scripts."""
    num_steps: int = Field(default=500, ge=1)
    """RL steps. Undisclosed in the paper, whose plots end at 240; the scripts have 5 epochs, up to 585 steps."""
    minibatches_per_step: int = Field(default=8, ge=1)
    """Updates per RL step (scripts: 8 math, 4 code). With 1, and the learner's old log-probs, every ratio is 1."""
    optim: RlOptimConfig = RlOptimConfig()
    lora: LoraConfig | None = None
    """Train LoRA adapters instead of all weights; None trains all, as the paper."""
    keep_optimizer: bool = False
    """Save the optimizer state with the model, for a later stage that continues with it."""
    continue_optimizer: bool = False
    """Start with the optimizer state (and float32 weights) saved with the input model; undisclosed in the paper."""
    loss: LossConfig = GppoConfig()
    erc: ErcConfig | None = None
    """Entropy-ratio clipping on top of the loss; None: off."""
    mismatch: MismatchConfig = MismatchConfig()
    old_logps: Literal["learner", "sampler"] = "learner"
    """Source of the old log-probs: the learner in an extra forward pass (scripts), or the sampler at no extra cost."""
    normalise: Literal["token", "sample", "budget"] = "token"
    """`token`: divide by all loss tokens (paper equation 11; the scripts: by those of each micro-batch); `sample`:
    average within rows first (GRPO, GSPO); `budget`: divide by rows x token budget (Dr.GRPO)."""
    max_log_ratio: float = Field(default=20.0, gt=0, le=30)
    """Bound on |log ratio|, so that no weight overflows (ERC's code: 20); tokens beyond it are counted."""
    max_negative_kl: float | None = Field(default=None, gt=0)
    """Mask tokens with a negative advantage in rows whose mean of log(sampler / policy), in nats, is above this
    (off-policy sequence masking, DeepSeek-V3.2 section 3.1, which states no value; TRL's documentation suggests
    0.5)."""
    lm_coef: float = Field(default=0.1, ge=0)
    """Alpha, the weight of the language-model loss on positive samples: correct ones with the tags that `reward`
    requires. Equation 13 prints a mean probability; the scripts and we use the log-probability."""
    distill: TeacherTermConfig | None = None
    """Learn from a teacher's log-probs of the answers as well: those of `rl_teacher`, which scores the answers of each
    step. None: from rewards alone."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 estimate of KL(policy, initial model); the paper has none. Above 0 a frozen copy is kept;
    with `lora` it is the policy without its adapters."""
    entropy_coef: float = Field(default=0.0, ge=0, le=1)
    """Weight of an entropy bonus; the paper has none, and in CE-GPPO a weight of 0.003 exploded."""
    entropy_target: EntropyTargetConfig | None = None
    """Adapt that weight, starting from `entropy_coef`; None: it is constant."""
    advantage: AdvantageConfig = GrpoAdvantage()
    reward: RewardConfig = RewardConfig()
    overlong: OverlongConfig = OverlongConfig()
    group_filter: GroupFilterConfig = GroupFilterConfig()
    rollout: RolloutConfig = RolloutConfig()
    max_staleness: int = Field(default=0, ge=0, le=64)
    """Weight versions that a sample may lag behind the learner: 0 is synchronous, 1 is one step off-policy, more is
    asynchronous. With `rollout.mode = "delayed"` every sample lags by as many, in the first steps by fewer."""
    dtype: Precision = "bfloat16"
    """Data type of forward and backward pass and of the saved model; weights that train and the optimizer are always
    float32. `auto` chooses by the processor, for a CPU. Scripts: bfloat16."""
    runtime: RlRuntime = RlRuntime()

    as_before = {"max_negative_kl": None, "distill": None, "curriculum": None, "entropy_target": None}

    @property
    def truncate_at(self) -> float | None:
        """Return the cap of a token's mismatch correction; None without one."""
        cap = self.mismatch.truncate_at
        if cap == "auto":
            needs_it = self.old_logps == "learner" and isinstance(self.rollout.engine, VllmEngineConfig)
            return _TRUNCATE_VLLM_AT if needs_it else None
        return None if cap == "off" else cap

    @property
    def samples_while_learning(self) -> bool:
        """Whether engines sample for later steps while the learner updates."""
        return self.max_staleness > 0 and self.rollout.mode != "delayed"

    def stale_risk(self, age: int, *, can_correct: bool = True) -> str:
        """Return a sentence if samples `age` weight versions old are as old as those on which the loss collapsed, or if
        nobody tried these settings on them; else nothing. `can_correct`: `mismatch` is a setting of the user's."""
        loss = self.loss
        if age < _STALE or not isinstance(loss, GppoConfig):
            return ""
        beta_low = max(loss.beta_low, loss.schedule.beta_low if loss.schedule else 0.0)
        if beta_low <= _STEADY_BETA_LOW:
            return ""
        of = f'loss.kind = "gppo" with beta_low = {beta_low:g} and old_logps = "{self.old_logps}"'
        remedies = 'loss.kind = "m2po", or loss.preset = "ce_gppo"'
        collapse_age, num_seeds = (_VERY_STALE, 8) if age >= _VERY_STALE else (_STALE, 3)
        if self.old_logps == "sampler":
            if age < _VERY_STALE and can_correct:
                remedies += ', or old_logps = "learner" with mismatch.truncate_at = 2'
            return (
                f"{of}: on samples {collapse_age} versions old, of 16 updates each, a tiny model collapsed with it on "
                f"{num_seeds} of 8 seeds, at a rate at which it did on none with {remedies}; take one of these "
                "(docs/ablations.md)"
            )
        if age >= _VERY_STALE:
            return f"{of} gained nothing on samples that old; take {remedies} (docs/ablations.md)"
        if self.truncate_at is None:
            return f"{of} was not tried without mismatch.truncate_at on samples that old; set it to 2"
        return ""

    @property
    def num_cpus(self) -> int:
        """Return the CPUs of learner and engines: one per thread that works at a time."""
        runtime = self.runtime
        learning = runtime.num_workers * runtime.num_threads
        sampling = runtime.num_rollout_actors * runtime.rollout_threads
        # Scores during training are sampled while the learner works.
        is_in_turn = not self.samples_while_learning and runtime.curve is None
        return max(learning, sampling) if is_in_turn else learning + sampling

    @model_validator(mode="after")
    def _moments_are_on_the_device(self) -> RlConfig:
        check_moments(self.optim, self.runtime)
        return self

    @model_validator(mode="after")
    def _entropy_bonus_starts_within_its_bound(self) -> RlConfig:
        target = self.entropy_target
        if target is not None and self.entropy_coef > target.max_coef:
            raise ValueError(
                f"entropy_coef = {self.entropy_coef:g} is above entropy_target.max_coef = {target.max_coef:g}"
            )
        return self

    @model_validator(mode="after")
    def _mismatch_needs_learner_logps(self) -> RlConfig:
        corrects = isinstance(self.mismatch.truncate_at, float) or self.mismatch.max_sequence_ratio is not None
        if corrects and self.old_logps != "learner":
            raise ValueError("mismatch correction compares learner with sampler log-probs: set old_logps to 'learner'")
        return self

    @model_validator(mode="after")
    def _samplers_log_probs_are_of_the_policy(self) -> RlConfig:
        changes = self.rollout.sampling.changes_of_policy
        if self.old_logps == "sampler" and changes:
            raise ValueError(
                f"old_logps = 'sampler' with rollout.sampling.{changes}: the sampler's log-probs are then "
                "of another distribution than the learner's, and no ratio would be 1 before the first update; "
                "set old_logps to 'learner'"
            )
        return self

    @model_validator(mode="after")
    def _engines_have_the_learners_positions(self) -> RlConfig:
        engine = self.rollout.engine
        if isinstance(engine, VllmEngineConfig) and engine.yarn_factor is not None:
            raise ValueError(
                f"rollout.engine.yarn_factor = {engine.yarn_factor:g}: the learner's positions are not stretched, "
                "and no ratio would be 1 before the first update; YaRN is for evaluation"
            )
        return self

    @model_validator(mode="after")
    def _fast_paths_of_engines_are_proved(self) -> RlConfig:
        engine = self.rollout.engine
        if isinstance(engine, VllmEngineConfig) and engine.must_be_proved and self.runtime.engine_check == "off":
            raise ValueError(
                'runtime.engine_check = "off" with rollout.engine.kv_cache_dtype, engine_args or sleep_level: '
                "nothing would tell whether their log-probs are the policy's; set it to 'warn' or 'refuse'"
            )
        return self

    @model_validator(mode="after")
    def _engines_sleep_only_between_rollouts(self) -> RlConfig:
        if self.rollout.sleeps_between_rollouts and self.samples_while_learning:
            raise ValueError(
                f"rollout.engine.runtime.sleep_mode with max_staleness = {self.max_staleness}: engines that sample "
                "while the learner works cannot give it their memory; set one of them to 0 or false"
            )
        return self

    @model_validator(mode="after")
    def _continuous_rollouts_are_stale(self) -> RlConfig:
        if self.rollout.mode == "continuous" and self.max_staleness == 0:
            raise ValueError(
                'rollout.mode = "continuous" with max_staleness = 0: answers are sampled while the learner works, '
                "with the weights before its step; set max_staleness to 1 or more"
            )
        if self.rollout.mode == "continuous" and self.rollout.surplus != "drop":
            raise ValueError(
                f'rollout.surplus = "{self.rollout.surplus}" with mode = "continuous", which trains on every '
                "informative group: leave surplus out"
            )
        return self

    @model_validator(mode="after")
    def _penalty_fits_the_budget(self) -> RlConfig:
        buffer, budget = self.overlong.penalty_tokens, self.rollout.sampling.max_new_tokens
        if buffer > budget:
            raise ValueError(
                f"overlong.penalty_tokens = {buffer} exceeds max_new_tokens = {budget}: every answer would be penalised"
            )
        return self

    @model_validator(mode="after")
    def _advantage_fits_the_rewards(self) -> RlConfig:
        if self.reward.is_flat and self.distill is None:
            raise ValueError("reward.correct = reward.wrong: no answer would earn more; set them apart, or use distill")
        num_samples = self.rollout.samples_per_group
        if isinstance(self.advantage, PassAtKAdvantage) and self.advantage.k >= num_samples:
            raise ValueError(
                f"advantage.k = {self.advantage.k} with rollout.samples_per_group = {num_samples}: no two subsets of "
                "k answers would differ, and no answer would have an advantage; set k to less"
            )
        ignored = {
            "reward.custom": any(reward.weight != 0 for reward in self.reward.custom),
            "reward.length_coef": self.reward.length_coef > 0,
            "overlong.penalty_tokens": self.overlong.penalty_tokens > 0,
        }
        names = [name for name, is_set in ignored.items() if is_set]
        if isinstance(self.advantage, MaxRlAdvantage) and names:
            raise ValueError(
                f'advantage.kind = "maxrl" compares right with wrong answers alone, and would ignore '
                f"{', '.join(names)}: leave them out, or take another advantage"
            )
        return self

    @model_validator(mode="after")
    def _adapters_fit_rl(self) -> RlConfig:
        if self.lora is None:
            return self
        if self.lora.dropout > 0:
            raise ValueError(
                f"lora.dropout = {self.lora.dropout:g}: the log-probs of the policy would differ from those that its "
                "answers were sampled with, and no ratio would be 1 before the first update; RL allows only 0"
            )
        if self.keep_optimizer or self.continue_optimizer:
            raise ValueError(
                "lora with keep_optimizer or continue_optimizer: a stage starts from the merged model with new "
                "adapters, which the moments of others do not fit; set them to false"
            )
        return self

    @model_validator(mode="after")
    def _saves_steps_that_it_takes(self) -> RlConfig:
        beyond = [step for step in self.runtime.save_steps if step > self.num_steps]
        if beyond:
            raise ValueError(f"runtime.save_steps: {beyond} are beyond num_steps = {self.num_steps}")
        return self

    @model_validator(mode="after")
    def _samples_at_a_temperature(self) -> RlConfig:
        if self.rollout.sampling.temperature == 0:
            raise ValueError("rollout.sampling.temperature = 0 is greedy: all answers of a group would be the same")
        return self
