"""Who runs a stage: the workspace, the pipeline run it belongs to, and its name there. Nothing here changes a result."""

from __future__ import annotations

from datetime import datetime

from klear_core.config.base import Settings
from klear_core.config.pipeline import WorkspaceConfig


class RunInfo(Settings):
    """Travels with every task, and is no part of its fingerprint."""

    workspace: WorkspaceConfig
    run_id: str
    """The same for all stages of a pipeline run, and for its retries: Prefect's flow run id."""
    run_name: str
    stage: str
    """The stage's name in the pipeline: `evaluate_rl`."""
    started_at: datetime
    """Of the pipeline run, with a time zone."""
    run_url: str = ""
    """The flow run's page in Prefect's UI; empty without a server."""
