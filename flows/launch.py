"""Set the environment that Prefect reads on import: call `prepare_environment` before anything imports Prefect.

Settings are environment variables, not `prefect.toml`: Prefect finds that file only from its own folder, and a relative
home would be a different one for every worker process.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from flows.own_server import OwnServer
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.pipeline.workspace import workspace_root

LOGGERS = ("klear_core", "tasks", "flows")

_ALWAYS = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # our console shows one bar per stage
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "true",
    # The default of 20 s is too short for a first start on a busy machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "600",
    "PREFECT_LOGGING_EXTRA_LOGGERS": ",".join(LOGGERS),
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # what is logged before a run begins belongs to no run
}
_QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # our console has the terminal; the run's log has all
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
}


def prefect_home(workspace: WorkspaceConfig) -> Path:
    """Return the folder of Prefect's database for runs without a server."""
    return workspace_root(workspace) / "prefect"


def prepare_environment(workspace: WorkspaceConfig, *, is_quiet: bool = True) -> None:
    """Set the variables that the user has not set: Prefect's home in the workspace, no telemetry, and quiet logs."""
    assert "prefect" not in sys.modules, "prefect reads its settings when it is imported"
    settings = _ALWAYS | (_QUIET if is_quiet else {}) | {"PREFECT_HOME": str(prefect_home(workspace))}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)  # Prefect does not create parent folders
    show_core_logs()


def own_server(workspace: WorkspaceConfig) -> OwnServer | None:
    """Start a Prefect server for this process without waiting for it; None if PREFECT_API_URL names one already."""
    return None if os.environ.get("PREFECT_API_URL") else OwnServer(workspace_root(workspace) / "prefect-server.log")


def show_core_logs() -> None:
    """Set our loggers to INFO so that their records reach the run's log: Prefect adds a handler but sets no level."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    # MLflow logs, with a traceback, database errors that it raises anyway.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
