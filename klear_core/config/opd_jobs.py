"""Define the jobs of the stages of on-policy distillation."""

from __future__ import annotations

from typing import Self

from klear_core.config.evaluate import LocalEngineConfig, SamplingConfig
from klear_core.config.opd import GivenTeacher, OpdRolloutsConfig, OpdTeacherConfig, OpdTrainConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import EngineUse, Job, LearnerUse
from klear_core.types import Domain


class OpdRolloutsJob(Job):
    """Sample the answers of the fine-tuned model that a teacher is to score."""

    kind = "opd_rollouts"
    code_version = 1

    seed: int
    rollouts: OpdRolloutsConfig

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """Return the job with the settings of a pipeline config that determine the answers. `opd` must be set."""
        assert config.opd is not None
        return cls(seed=config.seed, rollouts=config.opd.rollouts)

    def engine_in(self, section: str) -> EngineUse:
        """Return the engine that samples."""
        return EngineUse(key=f"{section}.rollouts", engine=self.rollouts.engine, sampling=self.rollouts.sampling)


class OpdScoresJob(Job):
    """Ask a teacher for its log-probs of the answers' tokens."""

    kind = "opd_scores"
    code_version = 1

    engine: LocalEngineConfig
    sampling: SamplingConfig
    """Sampling of the answers, whose temperature the log-probs are of."""
    top_k: int
    """Likeliest tokens to store in place of each token."""
    domain: Domain | None = None
    """The teacher scores only answers to problems of this domain; None: all."""
    runtime: OpdTeacherConfig
    """Where the teacher is and runs; the model itself is an input."""

    as_before = {"domain": None}

    @classmethod
    def of(cls, config: PipelineConfig, domain: Domain | None = None) -> Self:
        """Return the job with the settings of a pipeline config that determine the scores of a domain's answers.
        `opd` must be set, for code its `code_teacher`, too."""
        assert config.opd is not None
        teacher = config.opd.code_teacher if domain is Domain.CODE else config.opd.teacher
        assert teacher is not None
        sampling = config.opd.rollouts.sampling
        return cls(engine=teacher.engine, sampling=sampling, top_k=teacher.top_k, domain=domain, runtime=teacher)

    @property
    def teacher(self) -> str:
        """Return the name of the teacher's settings in `opd`."""
        return "code_teacher" if self.domain is Domain.CODE else "teacher"

    def engine_in(self, section: str) -> EngineUse | None:
        """Return the engine of the teacher; None if only endpoints score."""
        if self.runtime.runtime.num_engines == 0:
            return None
        source = self.runtime.source
        model = source.model.as_model() if isinstance(source, GivenTeacher) else source.model
        return EngineUse(key=f"{section}.{self.teacher}", engine=self.engine, sampling=self.sampling, model=model)


class OpdJob(Job):
    """Train the fine-tuned model on the scored answers."""

    kind = "opd"
    code_version = 1
    makes_model = True

    seed: int
    train: OpdTrainConfig
    rollouts: OpdRolloutsConfig
    """Settings of the answers, whose temperature and budget the training uses."""

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """Return the job with the settings of a pipeline config that determine the model. `opd` must be set."""
        assert config.opd is not None
        return cls(seed=config.seed, train=config.opd.train, rollouts=config.opd.rollouts)

    def learner_in(self, section: str) -> LearnerUse:
        """Return the learner, that of RL without its engines."""
        return LearnerUse(key=f"{section}.train", training=self.train.as_rl(self.rollouts))

    def method(self) -> str:
        """Return `OPD`."""
        return "OPD"

    def training_signal(self) -> str:
        """Return the training signal, for the report's heading."""
        return "a teacher's log-probs of its own answers"
