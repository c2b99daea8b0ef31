"""The commands of `klear` that run until Ctrl-C: serve the UIs, and restart crashed runs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer


def ui(
    root: Annotated[Path, typer.Option(help="Workspace whose runs to look at.")] = Path("runs"),
    prefect_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the Prefect UI.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the MLflow UI.")] = 5000,
) -> None:
    """Serve the Prefect and MLflow UIs of a workspace, until Ctrl-C.

    klear ui

    klear ui --root /data/klear --prefect-port 4201
    """
    from flows.ui import serve_uis

    serve_uis(root, prefect_port=prefect_port, mlflow_port=mlflow_port)


def sweep(
    pool: Annotated[str, typer.Option(help="Work pool whose crashed runs to restart.")] = "klear",
) -> None:
    """Restart crashed runs of a work pool until Ctrl-C. Start it beside the worker; the server is at PREFECT_API_URL.

    klear sweep --pool klear
    """
    from flows.sweep import sweep_until_interrupted

    sweep_until_interrupted(pool, lambda line: typer.echo(f"{datetime.now():%H:%M:%S} {line}"))
