"""The environment that Prefect reads when it is imported: call `prepare_environment` before anything that imports it.

Environment variables and not `prefect.toml`, because Prefect finds that file only from the folder it lies in, and a relative home
would be another one for every worker process.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from flows.own_server import OwnServer
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.pipeline.graph import workspace_root

LOGGERS = ("klear_core", "tasks", "flows")

_ALWAYS = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # one bar a stage, ours
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "true",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "600",  # the default of 20 is too short for a first start on a busy machine
    "PREFECT_LOGGING_EXTRA_LOGGERS": ",".join(LOGGERS),
}
_QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the terminal is ours; the run's own log has everything
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
}


def prefect_home(workspace: WorkspaceConfig) -> Path:
    """Where Prefect keeps its database for runs without a server."""
    return workspace_root(workspace) / "prefect"


def prepare_environment(workspace: WorkspaceConfig, *, is_quiet: bool = True) -> None:
    """Set what the user has not: Prefect in the workspace, in-process unless PREFECT_API_URL says otherwise, no telemetry."""
    assert "prefect" not in sys.modules, "prefect reads its settings when it is imported"
    settings = _ALWAYS | (_QUIET if is_quiet else {}) | {"PREFECT_HOME": str(prefect_home(workspace))}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)  # Prefect makes the last folder only
    show_core_logs()


def own_server(workspace: WorkspaceConfig) -> OwnServer | None:
    """A Prefect server for this process, on its way up; None where PREFECT_API_URL names one."""
    return None if os.environ.get("PREFECT_API_URL") else OwnServer(workspace_root(workspace) / "prefect-server.log")


def show_core_logs() -> None:
    """Let our INFO records through, so that they reach the run's log (Prefect attaches its handler, but sets no level)."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # logs, with a traceback, the errors that it raises anyway
