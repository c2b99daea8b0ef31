"""The result that a pipeline run returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """Artifacts and ids of a finished run."""

    refs: Mapping[str, ArtifactRef]
    """Artifacts of the stages that ran or were reused, by stage name."""
    mlflow_run_id: str | None
    """MLflow's parent run; None if every stage was reused, because then nothing is tracked."""
    report: Path | None
    """The HTML file; None if the report stage was not chosen."""
    flow_run_id: str
    """Prefect's flow run id; empty if every stage was reused without Prefect."""


def page_of(stages: Sequence[Stage], refs: Mapping[str, ArtifactRef]) -> Path | None:
    """Return the HTML file among the artifacts of a run; None if it has none."""
    for stage in stages:
        if stage.job.page and stage.name in refs:
            return refs[stage.name].path / stage.job.page
    return None
