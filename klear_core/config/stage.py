"""Define stages and jobs. A job has the settings of a stage; all but `runtime` are hashed into its fingerprint.

Everything that other modules need to know about a stage is a property of its job or of `Stage`; no module compares
names of stages. `klear_core.pipeline.graph.stages_of` lists the stages of a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from klear_core.config.data import Source
from klear_core.config.engine import EngineConfig, SamplingConfig
from klear_core.config.given import GivenFacts
from klear_core.config.rl import RlConfig
from klear_core.config.settings import Settings
from klear_core.config.sft import SftConfig
from klear_core.config.train import ModelConfig


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
class HubUse:
    """A repository on the Hub whose files a stage's result depends on."""

    repo: str
    revision: str

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision[:7]}"


class Job(Settings):
    """The settings of one stage; its result is a function of them, the input artifacts and the content of `files()`."""

    kind: ClassVar[str]
    """Kind of the stage and of its artifact. Stages of one kind share their code: the task `<kind>` in the module
    `tasks.<kind>`."""
    code_version: ClassVar[int]
    """Version of the kind's code. Raise it when a code change changes the result: the stage and all that follow run
    again."""
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

    def scorer(self) -> EngineUse | None:
        """Return the engine that scores models while the stage trains; None if the stage's own does, or none."""
        return None

    def training(self) -> SftConfig | RlConfig | None:
        """Return the settings of the training; None if the stage trains nothing."""
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
    def origin(self) -> str:
        """Origin of a given result; empty if the stage makes its result."""
        return self.job.origin()

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
