"""What a run leaves, for whoever started it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.manifest import ArtifactRef


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """What a run leaves."""

    refs: Mapping[str, ArtifactRef]
    """By stage name, those of the stages that ran or were reused."""
    mlflow_run_id: str | None
    """The parent run; None if every stage was reused, for then nothing is tracked."""
    report: Path | None
    """The HTML file, if the report was among the stages."""
    flow_run_id: str
    """Empty if every stage was reused without Prefect."""
