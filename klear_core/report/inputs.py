"""What a report is made of. The caller names the folders and the run; everything else is read from the folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from klear_core.config.pipeline import PipelineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFolder:
    """One planned stage of the run and the artifact folder it left, if it did."""

    name: str
    """Unique in the run: `curate`, `sft`, `rl_code`, `evaluate_base`."""
    folder: Path | None
    """The artifact folder (`manifest.json` inside); None if the stage has no artifact."""
    was_reused: bool = False
    """Taken from an earlier run with the same fingerprint."""
    trouble: str = ""
    """Why there is no artifact, in the words of the error; empty if it was never started."""
    workdir: Path | None = None
    """Where a failed attempt was at work: its metrics are shown too."""
    scores_model: str = ""
    """Evaluations only: the model that was scored (`base`, `sft`, `rl`, `rl_code`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """How much better `after` is than `before` on the same problems: a difference of fractions with its interval."""

    benchmark: str
    decoding: Literal["sampled", "greedy"]
    """Which answers: all samples (avg@n), or the one greedy answer a problem."""
    before: str
    """A `scores_model` label."""
    after: str
    value: float
    """In -1..1; positive is better."""
    low: float
    high: float
    confidence: float
    """Of the interval, 0.95 for 95 %."""
    num_problems: int
    """Problems that both have a score for; the interval counts these."""
    is_same_decoding: bool
    """Whether both were decoded alike; if not, the difference is not the training's alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What identifies the run to a person."""

    name: str
    profile: str
    """The profile's folder name: `laptop`."""
    started_at: str
    """ISO 8601 with a time zone."""
    git_commit: str
    """Empty if unknown."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Ids of the same run elsewhere by name, e.g. `Prefect flow run`, `MLflow run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportInputs:
    """A whole run. `stages` are in pipeline order and include the planned ones that never finished."""

    run: RunInfo
    config: PipelineConfig
    stages: tuple[StageFolder, ...]
    differences: tuple[PairedDifference, ...] = ()
    """Between consecutive evaluated models, and from the first to the last; one an entry of pair, benchmark and decoding."""
