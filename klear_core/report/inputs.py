"""Inputs of a report. The caller names the run and its folders; everything else is read from the folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import Stage
from klear_core.evaluate.published import PublishedModel
from klear_core.scores import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFolder:
    """One planned stage of the run and its artifact folder, if it has one."""

    stage: Stage
    folder: Path | None
    """Artifact folder (holds `manifest.json`); None if the stage has no artifact."""
    was_reused: bool = False
    """Whether the artifact is from an earlier run with the same fingerprint."""
    trouble: str = ""
    """Error message if the stage failed; empty if it was never started."""
    workdir: Path | None = None
    """Work folder of a failed attempt, whose metrics are shown too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """Difference of two models' scores on the same problems, `after` minus `before`, with its intervals and test."""

    benchmark: str
    decoding: Literal["sampled", "greedy"]
    """Answers compared: all samples (avg@n), or the greedy answer per problem."""
    before: str
    """Name of the stage that made the earlier model: `sft`."""
    after: str
    value: float
    """Difference in -1..1; positive if `after` is better."""
    rerun: Range | None
    """Interval over other samples of the same problems; None for greedy answers."""
    new_problems: Range
    """Interval over other problems of this kind."""
    floor_binds: bool
    """Whether `new_problems` is as narrow as so few problems allow."""
    p_corrected: float
    """p-value of the sign-flip test, corrected for all differences of the report (Holm); it alone decides."""
    num_changed: int
    """Number of problems with different scores."""
    confidence: float
    """Confidence level of the intervals, 0.95 for 95 %."""
    num_problems: int
    """Number of problems scored for both models."""
    is_same_decoding: bool
    """Whether both models were decoded with the same settings; if not, these may explain part of the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Names, time and commit by which a person identifies the run."""

    name: str
    profile: str
    """Folder name of the profile: `laptop`."""
    started_at: str
    """Start time, ISO 8601 with a time zone."""
    git_commit: str
    """Git commit of the code; empty if unknown."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Ids of the run in other systems, by system: `Prefect flow run`, `MLflow run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreWarning:
    """A warning about scores, and the stages that made them."""

    where: str
    text: str
    scored_by: tuple[str, ...] = ()
    """Names of these stages."""
    benchmarks: tuple[str, ...] = ()
    """Benchmarks that it is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportInputs:
    """Inputs for one run. `stages` are in pipeline order and include planned stages that never finished."""

    run: RunInfo
    config: PipelineConfig
    pipeline: tuple[Stage, ...]
    """All stages of the pipeline, in order: they name the models."""
    stages: tuple[StageFolder, ...]
    differences: tuple[PairedDifference, ...] = ()
    """Differences between consecutive evaluated models and from first to last, per benchmark and decoding."""
    score_warnings: tuple[ScoreWarning, ...] = ()
    """Warnings about scores, from the lineage of the models."""
    published: tuple[PublishedModel, ...] = ()
    """Published scores to put beside those of the run."""
