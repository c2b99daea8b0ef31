"""Define the settings of a pipeline run; its fields are the stages, in the order in which they run."""

from __future__ import annotations

from collections import Counter
from datetime import date
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from klear_core.config.curate import CurateConfig, TagConfig
from klear_core.config.data import BenchmarkConfig
from klear_core.config.distill import DistillConfig
from klear_core.config.evaluate import (
    EvaluateConfig,
    EvaluateSamplingConfig,
    HardwareConfig,
    InlineEvalConfig,
    LocalEngineConfig,
    ServedModelConfig,
)
from klear_core.config.opd import OpdConfig, OpdTeacherConfig
from klear_core.config.rl import RlConfig
from klear_core.config.settings import Settings, VariableName
from klear_core.config.submit import SubmitConfig
from klear_core.config.train import GivenConfig, ModelConfig, SftConfig, TinyModelConfig
from klear_core.config.verify import JudgedStage, StageJudges, VerifyConfig, judge_of

# ---- promote ----
# Define the settings of promotion: the rule by which a model becomes champion.


DEFAULT_MARGIN = 4.5
"""Points: what RL gains on average in Klear-Reasoner's Table 1 at 32K (7.6, 5.5, 2.7, 3.1 and 3.5 points), so that a
larger loss would undo a training stage."""


class PromoteConfig(Settings):
    """Rule by which the last model of a run takes the champion's place; every part of it must be passed."""

    registered_model: str = Field(default="klear", min_length=1, pattern=r"^[^/:]+$")
    """Name of the registered model in MLflow whose alias `champion` moves. Runs that compete have the same name."""
    margin: float = Field(default=DEFAULT_MARGIN, ge=0, le=100)
    """Points (of 100) that the new model may be worse than the champion on a benchmark, by the lower end of the paired
    interval over other problems."""
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

    def margin_of(self, benchmark: str) -> float:
        """Return the points that the new model may be worse on a benchmark."""
        return self.margins.get(benchmark, self.margin)


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


# ---- pipeline ----


NotifyEvent = Literal["failed", "waiting", "promoted", "refused", "disk", "budget", "score_fell"]
"""Events that somebody may be told of. `waiting`: it ended with an error that only a person can mend."""


class NotifyConfig(Settings):
    """Receivers of a run's events, each told with the line that matters and a link."""

    webhook_env: VariableName = ""
    """Name of the environment variable with the URL of a webhook, which gets JSON; never the URL, which may hold a
    key."""
    blocks: tuple[Annotated[str, Field(pattern=r"^[a-z0-9-]+/[a-z0-9-]+$")], ...] = ()
    """Prefect's notification blocks, such as `slack-webhook/ops`."""
    events: tuple[NotifyEvent, ...] = ("failed", "waiting", "promoted", "refused", "disk", "budget", "score_fell")
    """Events that somebody is told of; default: all."""
    disk_above: float = Field(default=0.85, gt=0, lt=1)
    """Used share of the workspace's disk above which somebody is told, once a run. Default: a checkpoint of an 8B
    model with its optimizer still fits on a disk of 1 TB."""
    max_gpu_hours: float | None = Field(default=None, gt=0)
    """GPU-hours of a run after which somebody is told, once; None: never."""


class WorkspaceConfig(Settings):
    """Storage, retries, timeouts and notifications; never changes a result."""

    root: str = Field(default="runs", min_length=1)
    """Folder for artifacts, tracking and logs; relative paths start at the working directory."""
    store: str = ""
    """URL of an object store or shared folder (`s3://bucket/prefix`, `file:///shared/klear`) through which nodes share
    artifacts; empty: `root` alone holds them."""
    cache_gb: float | None = Field(default=None, gt=0)
    """Gigabytes of artifacts fetched from `store` to keep on this node; unused ones are deleted above it. None: all."""
    lease_s: float = Field(default=60.0, ge=1)
    """Seconds without a heartbeat after which another node takes over the building of an artifact in `store`."""
    share_work_s: float = Field(default=60.0, gt=0)
    """Seconds between copies of a stage's unfinished work to `store`; checkpoints are copied once they are written."""
    retries: int = Field(default=2, ge=0)
    """Retries of a failed stage, with exponential backoff; an invalid config is never retried."""
    timeout_s: int | None = Field(default=None, ge=1)
    """Seconds after which one attempt of a stage times out; None: never."""
    check_artifacts: Literal["content", "size"] = "content"
    """Check before an artifact is reused: every byte, or only file names and sizes (for stores on slow networks)."""
    log_format: Literal["text", "json"] = "text"
    """Form of the log that each run keeps in the workspace: lines of text, or one JSON object a line."""

    notify: NotifyConfig = Field(default=NotifyConfig(), exclude_if=lambda notify: notify == NotifyConfig())
    """Receivers of news: a run failed, waits for a person, was promoted or refused, and so on."""

    submit: SubmitConfig = Field(default=SubmitConfig(), exclude_if=lambda submit: submit == SubmitConfig())
    """How `klear submit` starts the run on a cluster."""

    as_before = {"log_format": "text"}


class PipelineConfig(Settings):
    """One pipeline run."""

    name: str = Field(default="klear", pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """Name of the run in tracking and reports."""
    seed: int = Field(default=0, ge=0)
    """Seed from which every random draw of the run is derived."""
    workspace: WorkspaceConfig = WorkspaceConfig()
    hardware: HardwareConfig = HardwareConfig()
    """GPUs for the estimates of `klear plan`; never changes a result."""
    verify: VerifyConfig = VerifyConfig()
    """Judge settings that all stages have in common."""
    judge: StageJudges = StageJudges()
    """Judge settings of single stages, which override the common ones."""
    benchmarks: tuple[BenchmarkConfig, ...] = ()
    """Problem sets to evaluate on; decontamination keeps them out of training."""
    data_until: date | None = Field(default=None, exclude_if=lambda day: day is None)
    """Last day of the texts that the models of this run learned from, those of the base model included: benchmarks that
    were published later are named as fresh. None: unknown, so no benchmark is named as fresh."""
    curate: CurateConfig = CurateConfig()
    curate_rl: CurateConfig | None = None
    """Separate prompts for RL (the paper's MathSub and CodeSub); None trains RL on the problems of `curate`."""
    tag: TagConfig | None = None
    """Difficulty tags of `curate`'s problems by sampling; None keeps the tags from the sources' ratings."""
    tag_rl: TagConfig | None = None
    """Pass rates of RL's problems, which `rl.prompts` can select by; None measures none but those of `tag`."""
    model: ModelConfig = TinyModelConfig()
    given: GivenConfig = GivenConfig()
    """Models that exist and take the place of the stage that would make them."""
    distill: DistillConfig = DistillConfig()
    sft: SftConfig = SftConfig()
    opd: OpdConfig | None = Field(default=None, exclude_if=lambda opd: opd is None)
    """On-policy distillation of the fine-tuned model, before RL; None: none."""
    rl: RlConfig = RlConfig()
    """Math RL, the first RL stage."""
    rl_code: RlConfig | None = None
    """Code RL, run after math RL by the same code; None skips it."""
    rl_teacher: OpdTeacherConfig | None = Field(default=None, exclude_if=lambda teacher: teacher is None)
    """Teacher of the RL stages with `distill`: it scores the answers that each step trains on. One engine in the
    process of the driver, on its CPU, or endpoints; None: none."""
    evaluate: EvaluateConfig = EvaluateConfig()
    promote: PromoteConfig | None = Field(default=None, exclude_if=lambda promote: promote is None)
    """Rule by which the last model becomes champion in MLflow's model registry; None promotes none. It is left out of
    configs without it, so that reports of those keep their fingerprint."""

    @property
    def start_model(self) -> ModelConfig:
        """The model that is trained further or scored: the last given one, else `model`."""
        given = list(self.given.models().values())
        return given[-1].as_model() if given else self.model

    def judge_of(self, stage: JudgedStage) -> VerifyConfig:
        """Return the complete judge settings of a stage, by its section."""
        return judge_of(stage, self.verify, self.judge)

    @field_validator("benchmarks")
    @classmethod
    def _have_different_names(cls, benchmarks: tuple[BenchmarkConfig, ...]) -> tuple[BenchmarkConfig, ...]:
        counts = Counter(b.name for b in benchmarks)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise ValueError(
                f"several benchmarks are called {', '.join(map(repr, twice))}: their scores could not be told apart"
            )
        return benchmarks

    @model_validator(mode="after")
    def _score_despite_names_benchmarks(self) -> PipelineConfig:
        names = [b.name for b in self.benchmarks]
        unknown = [name for name in self.given.score_despite if name not in names]
        if unknown:
            there = ", ".join(names) or "none"
            raise ValueError(
                f"given.score_despite: {', '.join(map(repr, unknown))} is none of the benchmarks, which are: {there}"
            )
        return self

    @model_validator(mode="after")
    def _greedy_answers_are_one(self) -> PipelineConfig:
        several = [b.name for b in self.benchmarks if b.num_samples > 1]
        if self.evaluate.sampling.temperature == 0 and several:
            raise ValueError(
                f"evaluate.sampling.temperature = 0: all answers to a problem of {', '.join(several)} would be the "
                "same one; set num_samples = 1, or sample, and have evaluate.greedy add a greedy answer"
            )
        return self

    @model_validator(mode="after")
    def _served_model_is_alone(self) -> PipelineConfig:
        engine, sampling = self.evaluate.engine, self.evaluate.sampling
        if not isinstance(engine, ServedModelConfig):
            return self
        beside = [f"given.{name}" for name in {**self.given.models(), **self.given.rows()}]
        beside += ["promote"] if self.promote is not None else []
        if beside:
            raise ValueError(
                f"evaluate.engine.kind = 'served' scores {engine.model} alone and takes nothing else; leave out "
                f"{', '.join(beside)}"
            )
        if sampling.top_k or sampling.repetition_penalty != 1.0:
            raise ValueError(
                "evaluate.sampling: chat endpoints take temperature, top_p and a number of tokens; top_k = "
                f"{sampling.top_k} and repetition_penalty = {sampling.repetition_penalty:g} would have no effect"
            )
        return self

    @model_validator(mode="after")
    def _promotion_names_benchmarks(self) -> PipelineConfig:
        if self.promote is None:
            return self
        names = [b.name for b in self.benchmarks]
        if not names:
            raise ValueError("promote: there are no benchmarks to compare models on")
        unknown = [name for name in self.promote.margins if name not in names]
        if unknown:
            raise ValueError(
                f"promote.margins: {', '.join(map(repr, unknown))} is none of the benchmarks, which are: "
                f"{', '.join(names)}"
            )
        return self

    @model_validator(mode="after")
    def _curves_name_benchmarks(self) -> PipelineConfig:
        names = [b.name for b in self.benchmarks]
        for section, training in (("sft", self.sft), ("rl", self.rl), ("rl_code", self.rl_code)):
            curve = training.runtime.curve if training else None
            if curve is not None and curve.benchmark not in names:
                there = ", ".join(names) or "none"
                raise ValueError(
                    f"{section}.runtime.curve.benchmark = {curve.benchmark!r} is none of the benchmarks, which are: "
                    f"{there}"
                )
        return self

    @model_validator(mode="after")
    def _no_term_without_its_numbers(self) -> PipelineConfig:
        sections = (("rl", self.rl), ("rl_code", self.rl_code))
        learning = {name: rl for name, rl in sections if rl is not None and rl.distill is not None}
        if self.rl_teacher is None:
            if learning:
                raise ValueError(
                    f"{next(iter(learning))}.distill is set, but no teacher: set rl_teacher, or leave it out"
                )
            return self
        if not learning:
            raise ValueError("rl_teacher is set, but no RL stage learns from it: set rl.distill, or leave it out")
        for name, training in learning.items():
            self.rl_teacher.check_scores_rl(training, name)
        return self

    @model_validator(mode="after")
    def _pipelines_that_end_with_distillation_have_no_rl(self) -> PipelineConfig:
        if self.opd is not None and not self.opd.then_rl and self.rl_code is not None:
            raise ValueError("opd.then_rl = false with rl_code: there is no RL after distillation; leave rl_code out")
        return self

    @model_validator(mode="after")
    def _optimizer_can_continue(self) -> PipelineConfig:
        if self.rl.continue_optimizer:
            raise ValueError(
                "rl.continue_optimizer = true: SFT keeps no optimizer that math RL could go on with; set it to false"
            )
        if self.rl_code is not None and self.rl_code.continue_optimizer and not self.rl.keep_optimizer:
            raise ValueError(
                "rl_code.continue_optimizer = true needs the optimizer of math RL: set rl.keep_optimizer = true"
            )
        return self


class ScorerConfig(Settings):
    """An engine that scores the models of a training which samples with none itself."""

    engine: LocalEngineConfig
    """Engine of the answers, that of evaluation."""
    num_threads: int = Field(ge=1)
    """CPU threads of the sampler."""


class InlineEvalJob(Settings):
    """All that a stage needs to score its model while it trains; changes no result."""

    curve: InlineEvalConfig
    source: BenchmarkConfig
    """The benchmark that the problems are from."""
    sampling: EvaluateSamplingConfig
    """Sampling of the answers, that of evaluation."""
    verify: VerifyConfig
    """Judge of evaluation."""
    confidence: float = Field(gt=0.5, lt=1)
    scorer: ScorerConfig | None = None
    """Engine that answers; None: the engines that sample in training."""

    @classmethod
    def of(cls, curve: InlineEvalConfig, config: PipelineConfig, *, has_engines: bool) -> Self:
        """Return the job with the pipeline's benchmark of that name, which the pipeline config has checked.

        `has_engines` says that the stage samples with engines of its own, which then answer.
        """
        source = next(benchmark for benchmark in config.benchmarks if benchmark.name == curve.benchmark)
        evaluate = config.evaluate
        assert not isinstance(evaluate.engine, ServedModelConfig), "a run with a served model trains nothing"
        scorer = ScorerConfig(engine=evaluate.engine, num_threads=evaluate.runtime.num_threads)
        return cls(
            curve=curve,
            source=source,
            sampling=evaluate.sampling,
            verify=config.judge_of("evaluate"),
            confidence=evaluate.confidence,
            scorer=None if has_engines else scorer,
        )


class InlineEvalRuntime(Settings):
    """The scores that a training stage takes while it trains; they change no result."""

    curve: InlineEvalJob | None = None

    @classmethod
    def of(cls, curve: InlineEvalConfig | None, config: PipelineConfig, *, has_engines: bool) -> Self:
        """Return what a stage with these settings needs; see `InlineEvalJob.of`."""
        return cls(curve=None if curve is None else InlineEvalJob.of(curve, config, has_engines=has_engines))
