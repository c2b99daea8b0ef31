"""Define stages and the jobs of those that make, sample or score models.

Everything that other modules need to know about a stage is a property of its job or of `Stage`; no module compares
names of stages. `klear_core.pipeline.graph.stages_of` lists the stages of a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import Field

from klear_core.config.curate import SampledModelRuntime, TagConfig
from klear_core.config.data import BenchmarkConfig, HubUse, Source
from klear_core.config.distill import DistillConfig, HttpTeacherConfig, LocalTeacherConfig
from klear_core.config.evaluate import (
    ChatUse,
    EngineConfig,
    EvaluateConfig,
    HardwareConfig,
    SamplingConfig,
    ServedModelConfig,
)
from klear_core.config.opd import OpdTeacherConfig, TrainedTeacher
from klear_core.config.pipeline import Champion, InlineEvalRuntime, PipelineConfig, PromoteConfig, WorkspaceConfig
from klear_core.config.rl import RlConfig
from klear_core.config.settings import Settings
from klear_core.config.train import GivenFacts, HubModelConfig, LocalModel, ModelConfig, SftConfig, TinyModelConfig
from klear_core.config.verify import VerifyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceUse:
    """A source that a stage reads."""

    key: str
    """Dotted key in the config, for messages: `curate.sources`."""
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """An engine that a stage samples with."""

    key: str
    """Dotted key of its settings in the config: `rl.rollout`."""
    engine: EngineConfig
    sampling: SamplingConfig
    model: ModelConfig | None = None
    """The model that it samples from; None: one that the pipeline makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerUse:
    """A learner that a stage trains with."""

    key: str
    """Dotted key of its settings in the config: `sft`, `opd.train`."""
    training: SftConfig | RlConfig
    """Its settings, in the form in which the learner takes them."""


class Job(Settings):
    """The settings of one stage; its result is a function of them, the input artifacts and the content of `files()`."""

    kind: ClassVar[str]
    """Kind of the stage and of its artifact. Stages of one kind share their code: the function `<kind>` in
    `tasks.stages`."""
    code_version: ClassVar[int]
    """Version of the kind's code. Raise it when a code change changes the result: the stage and all that follow run
    again."""
    code_changes: ClassVar[Mapping[int, str]] = {}
    """Changes by code version, as CHANGELOG and `klear plan` say them."""
    makes_model: ClassVar[bool] = False
    """Whether the artifact is a model."""
    scores_model: ClassVar[bool] = False
    """Whether the artifact holds the scores of the input `model`."""
    page: ClassVar[str] = ""
    """File of the artifact to open in a browser; empty if there is none."""
    asks_registry: ClassVar[bool] = False
    """Whether the result also depends on the present champion. Such a stage runs every time, and its artifact gets its
    fingerprint when it runs."""

    def files(self) -> tuple[str, ...]:
        """Return the local files and folders that the result depends on, as the settings name them."""
        return ()

    def repos(self) -> tuple[HubUse, ...]:
        """Return the repositories on the Hub that the result depends on."""
        return ()

    def given_facts(self) -> GivenFacts | None:
        """Return what the user declared about a given result; None if the stage makes its result."""
        return None

    def origin(self) -> str:
        """Return where a given result comes from, such as `owner/name@0123456`; empty if the stage makes its result."""
        if self.given_facts() is None:
            return ""
        return ", ".join([*self.files(), *map(str, self.repos())])

    def sources_in(self, section: str) -> tuple[SourceUse, ...]:  # noqa: ARG002  unused here, used by subclasses
        """Return the sources that the stage reads. `section` of the config holds the job's settings."""
        return ()

    def engine_in(self, section: str) -> EngineUse | None:  # noqa: ARG002  unused here, used by subclasses
        """Return the engine that the stage samples with; None if it samples with none."""
        return None

    def chat_in(self, section: str) -> ChatUse | None:  # noqa: ARG002  unused here, used by subclasses
        """Return the chat endpoints that the stage asks; None if it asks none."""
        return None

    def learner_in(self, section: str) -> LearnerUse | None:
        """Return the learner that the stage trains with; None if the stage trains nothing."""
        training = self.training()
        return None if training is None else LearnerUse(key=section, training=training)

    def scorer(self) -> EngineUse | None:
        """Return the engine that scores models while the stage trains; None if the stage's own does, or none."""
        return None

    def training(self) -> SftConfig | RlConfig | None:
        """Return the settings of SFT or RL; None for other stages."""
        return None

    def method(self) -> str:
        """Return the name of the training method, such as `GPPO`; empty if the stage trains nothing."""
        return ""

    def training_signal(self) -> str:
        """Return the training signal in words, for the report's heading; empty if the stage trains nothing."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One node of the pipeline graph: a job, its inputs, and its names."""

    name: str
    """Unique in the pipeline: `evaluate_rl`."""
    section: str
    """Section of the pipeline config that holds its settings: `evaluate`."""
    label: str
    """Display name, `RL (code)`; also that of the model which the stage makes."""
    job: Job
    inputs: Mapping[str, str]
    """The stage for each role: `{"model": "sft"}`."""

    @property
    def kind(self) -> str:
        """Kind of the stage and of its artifact: `evaluate`."""
        return self.job.kind

    @property
    def scored_model_stage(self) -> str:
        """Name of the stage whose model it scores: `rl`; empty if it scores none."""
        return self.inputs["model"] if self.job.scores_model else ""

    @property
    def method_or_label(self) -> str:
        """Training method, such as `GPPO`; the label if the stage trains nothing."""
        return self.job.method() or self.label

    @property
    def title(self) -> str:
        """Heading in the report: `SFT: learning from the teacher's solutions`."""
        signal = self.job.training_signal()
        return f"{self.label}: learning from {signal}" if signal else self.label

    def sources(self) -> tuple[SourceUse, ...]:
        """Return the sources that it reads."""
        return self.job.sources_in(self.section)

    def engine(self) -> EngineUse | None:
        """Return the engine that it samples with; None if it samples with none."""
        return self.job.engine_in(self.section)

    def learner(self) -> LearnerUse | None:
        """Return the learner that it trains with; None if it trains nothing."""
        return self.job.learner_in(self.section)


# ---- jobs ----
# Define the jobs of the stages that make, sample or score models, and of the report.
#
# The jobs that make problems and those of given results are in `data_jobs`.


class BaseJob(Job):
    """Build the base model, or take it from disk or the Hub; a model that exists does not depend on the seed."""

    kind = "base"
    code_version = 1
    makes_model = True

    seed: int = Field(ge=0)
    model: ModelConfig

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """Return the job with the settings of a pipeline config that determine the base model."""
        is_random = isinstance(config.model, TinyModelConfig)
        return cls(seed=config.seed if is_random else 0, model=config.model)

    def files(self) -> tuple[str, ...]:
        """Return the model's folder or GGUF file if the model is from disk."""
        return (self.model.path,) if isinstance(self.model, LocalModel) else ()

    def repos(self) -> tuple[HubUse, ...]:
        """Return the model's repository if it is from the Hub."""
        model = self.model
        return (HubUse(repo=model.repo, revision=model.revision),) if isinstance(model, HubModelConfig) else ()


class TagJob(Job):
    """Tag each problem with its difficulty, measured by sampling answers of a tagger model and judging them."""

    kind = "tag"
    code_version = 2
    code_changes = {2: "verdicts of math and of programs change"}

    seed: int
    tag: TagConfig
    """Settings without the tagger, which is the input `model`."""
    verify: VerifyConfig
    runtime: SampledModelRuntime = SampledModelRuntime()

    @classmethod
    def of(cls, config: PipelineConfig, section: Literal["tag", "tag_rl"]) -> Self:
        """Return the job with the settings of a pipeline config that determine the tags. The section must be set."""
        tag = config.tag if section == "tag" else config.tag_rl
        assert tag is not None, section
        settings = tag.model_copy(update={"model": None})
        verify = config.judge_of(section)
        return cls(seed=config.seed, tag=settings, verify=verify, runtime=SampledModelRuntime(model=tag.model))

    def files(self) -> tuple[str, ...]:
        """Return the sources of the user's judges."""
        return self.verify.files()

    def engine_in(self, section: str) -> EngineUse | None:
        """Return the engine of the tagger; None if only endpoints sample."""
        if self.tag.runtime.num_engines == 0:
            return None
        model = self.runtime.model.as_model() if self.runtime.model else None
        return EngineUse(key=section, engine=self.tag.engine, sampling=self.tag.sampling, model=model)


class DistillJob(Job):
    """Request solutions of the problems from the teacher, and judge them."""

    kind = "distill"
    code_version = 3
    code_changes = {3: "verdicts of math and of programs change"}

    seed: int
    distill: DistillConfig
    """Settings without a local teacher's model, which is the input `teacher`."""
    verify: VerifyConfig
    runtime: SampledModelRuntime = SampledModelRuntime()

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """Return the job with the settings of a pipeline config that determine the traces."""
        distill, verify = config.distill, config.judge_of("distill")
        if not isinstance(distill.teacher, LocalTeacherConfig):
            return cls(seed=config.seed, distill=distill, verify=verify)
        runtime = SampledModelRuntime(model=distill.teacher.model)
        teacher = distill.teacher.model_copy(update={"model": None})
        distill = distill.model_copy(update={"teacher": teacher})
        return cls(seed=config.seed, distill=distill, verify=verify, runtime=runtime)

    def files(self) -> tuple[str, ...]:
        """Return the sources of the user's judges."""
        return self.verify.files()

    def engine_in(self, section: str) -> EngineUse | None:
        """Return the engine of a local teacher; None if only endpoints sample."""
        teacher = self.distill.teacher
        if not isinstance(teacher, LocalTeacherConfig) or teacher.runtime.num_engines == 0:
            return None
        model = self.runtime.model.as_model() if self.runtime.model else None
        return EngineUse(key=f"{section}.teacher", engine=teacher.engine, sampling=teacher.sampling, model=model)

    def chat_in(self, section: str) -> ChatUse | None:
        """Return the endpoints of a teacher over HTTP."""
        teacher = self.distill.teacher
        return (
            ChatUse(key=f"{section}.teacher", runtime=teacher.runtime)
            if isinstance(teacher, HttpTeacherConfig)
            else None
        )


class SftJob(Job):
    """Fine-tune the base model on traces."""

    kind = "sft"
    code_version = 3
    makes_model = True

    seed: int
    sft: SftConfig
    runtime: InlineEvalRuntime = InlineEvalRuntime()

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """Return the job with the settings of a pipeline config that determine the fine-tuned model."""
        runtime = InlineEvalRuntime.of(config.sft.runtime.curve, config, has_engines=False)
        return cls(seed=config.seed, sft=config.sft, runtime=runtime)

    def scorer(self) -> EngineUse | None:
        """Return the engine of evaluation if the run has a curve of SFT."""
        curve = self.runtime.curve
        if curve is None or curve.scorer is None:
            return None
        return EngineUse(key="evaluate", engine=curve.scorer.engine, sampling=curve.sampling)

    def training(self) -> SftConfig:
        """Return the settings of the fine-tuning."""
        return self.sft

    def method(self) -> str:
        """Return `SFT`."""
        return "SFT"

    def training_signal(self) -> str:
        """Return the training signal, for the report's heading."""
        return "the teacher's solutions"


class RlJob(Job):
    """One RL stage, math or code."""

    kind = "rl"
    code_version = 7
    code_changes = {7: "verdicts of math and of programs change"}
    makes_model = True

    seed: int
    rl: RlConfig
    verify: VerifyConfig
    teacher: OpdTeacherConfig | None = None
    """How a teacher scores the answers of each step; the model itself is the input `teacher`."""
    runtime: InlineEvalRuntime = InlineEvalRuntime()

    as_before = {"teacher": None}

    @classmethod
    def of(cls, config: PipelineConfig, section: Literal["rl", "rl_code"]) -> Self:
        """Return the job with the settings of a pipeline config that determine the result of this RL stage."""
        rl = config.rl if section == "rl" else config.rl_code
        assert rl is not None, section
        runtime = InlineEvalRuntime.of(rl.runtime.curve, config, has_engines=True)
        teacher = config.rl_teacher if rl.distill is not None else None
        if teacher is not None:  # its source says no more than the input does
            teacher = teacher.model_copy(update={"source": TrainedTeacher()})
        return cls(seed=config.seed, rl=rl, verify=config.judge_of(section), teacher=teacher, runtime=runtime)

    def files(self) -> tuple[str, ...]:
        """Return the sources of the user's rewards and judges. Raise ConfigError if one is missing or broken."""
        files = [path for reward in self.rl.reward.custom for path in reward.all_files()]
        return tuple(dict.fromkeys([*files, *self.verify.files()]))

    def engine_in(self, section: str) -> EngineUse:
        """Return the engine of the rollouts."""
        rollout = self.rl.rollout
        return EngineUse(key=f"{section}.rollout", engine=rollout.engine, sampling=rollout.sampling)

    def training(self) -> RlConfig:
        """Return the settings of the RL training."""
        return self.rl

    def method(self) -> str:
        """Return the name of the loss: `GPPO`, `Code GPPO`, `Clipped PPO`."""
        kind = self.rl.loss.kind
        loss = "Clipped PPO" if kind == "clip" else kind.upper()
        return f"Code {loss}" if self.rl.domain == "code" else loss

    def training_signal(self) -> str:
        """Return the training signal, for the report's heading."""
        return "test results of its programs" if self.rl.domain == "code" else "judged answers"


class EvaluateJob(Job):
    """Score one model on all benchmarks."""

    kind = "evaluate"
    code_version = 7
    code_changes = {7: "verdicts of math and of programs change"}
    scores_model = True

    seed: int
    evaluate: EvaluateConfig
    verify: VerifyConfig
    benchmarks: tuple[BenchmarkConfig, ...]
    """Benchmarks, for their names and sample counts; without what was checked when they were loaded."""

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """Return the job with the settings of a pipeline config that determine the scores of a model."""
        # These say which problems there are, or check them: the input `benchmarks` has another fingerprint if the
        # problems change, and if they do not, neither do the scores.
        without = {"expected_rows": None, "known": "", "window": None, "num_problems": None, "published": None}
        benchmarks = tuple(b.model_copy(update=without) for b in config.benchmarks)
        return cls(
            seed=config.seed, evaluate=config.evaluate, verify=config.judge_of("evaluate"), benchmarks=benchmarks
        )

    def files(self) -> tuple[str, ...]:
        """Return the sources of the user's judges."""
        return self.verify.files()

    def engine_in(self, section: str) -> EngineUse | None:
        """Return the engine that samples the answers, the same for all models; None for a served model."""
        engine = self.evaluate.engine
        if isinstance(engine, ServedModelConfig):
            return None
        return EngineUse(key=section, engine=engine, sampling=self.evaluate.sampling)

    def chat_in(self, section: str) -> ChatUse | None:
        """Return the endpoints of a model that is served elsewhere."""
        engine = self.evaluate.engine
        return (
            ChatUse(key=f"{section}.engine", runtime=engine.runtime) if isinstance(engine, ServedModelConfig) else None
        )


class PromoteRuntime(Settings):
    """Config of the run, with what is known about the training data of given models."""

    config: PipelineConfig = PipelineConfig()


class PromoteJob(Job):
    """Decide whether the last model becomes champion."""

    kind = "promote"
    code_version = 3
    code_changes = {
        2: "a gain must be shown on other problems, too, and the best champion so far is compared with",
        3: "the problems of all benchmarks together may show a gain",
    }
    asks_registry = True

    promote: PromoteConfig
    champion: Champion | None = None
    """The champion to compare with; filled in when the stage runs. None compares with the first model of the run."""
    best: Champion | None = None
    """The best champion before that one, if it scored more; filled in when the stage runs."""
    withdrawn: str = ""
    """Why the model was rolled back earlier; filled in when the stage runs. Empty if it was not."""
    chosen_on: dict[str, str] = {}
    """Why the model counts as chosen by its score, by benchmark; filled in when the stage runs."""
    runtime: PromoteRuntime = PromoteRuntime()

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """Return the job with the rule of a pipeline config. The section must be set."""
        assert config.promote is not None
        return cls(promote=config.promote, runtime=PromoteRuntime(config=config))


class ReportRuntime(Settings):
    """Settings that the report shows; changing them does not rerun the report stage."""

    workspace: WorkspaceConfig = WorkspaceConfig()


class ReportJob(Job):
    """Write the report on a run from its config and artifacts."""

    kind = "report"
    code_version = 3
    page = "report.html"

    config: PipelineConfig
    """The pipeline config with the default workspace and hardware, which do not change the fingerprint."""
    runtime: ReportRuntime = ReportRuntime()

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """Return the job with the complete config, which the report shows."""
        # Neither workspace nor hardware changes what is reported.
        without = {"workspace": WorkspaceConfig(), "hardware": HardwareConfig()}
        return cls(config=config.model_copy(update=without), runtime=ReportRuntime(workspace=config.workspace))
