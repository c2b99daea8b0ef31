"""Define the context of a stage: workspace, pipeline run, and name in it. None of it changes a result."""

from __future__ import annotations

from datetime import datetime

from klear_core.config.pipeline import WorkspaceConfig
from klear_core.config.settings import Settings


class RunInfo(Settings):
    """Context that is passed to every task and is not part of its fingerprint."""

    workspace: WorkspaceConfig
    run_id: str
    """Prefect's flow run id: the same for all stages of a pipeline run and for its retries."""
    run_name: str
    stage: str
    """The stage's name in the pipeline, such as `evaluate_rl`."""
    position: int = 0
    """Number of stages before this one in the pipeline. A later model's scores have a higher one."""
    started_at: datetime
    """Start of the pipeline run, with a time zone."""
    run_url: str = ""
    """The flow run's page in Prefect's UI; empty without a server."""
