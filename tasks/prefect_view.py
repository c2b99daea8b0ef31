"""Show a finished stage on its page in Prefect: counts, ledger and a link to MLflow."""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING

from klear_core.artifacts.manifest import ArtifactRef, Manifest
from tasks.prefect_client import fail_fast_client
from tasks.run_info import RunInfo
from tasks.tracked import without_password

if TYPE_CHECKING:
    from prefect.client.schemas.actions import ArtifactCreate

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_undelivered: list[ArtifactCreate] = []
"""Summaries that the server has not accepted yet; they are sent again with the next one and at the run's end."""


def show_in_prefect(info: RunInfo, manifest: Manifest, ref: ArtifactRef) -> None:
    """Send a Markdown artifact and, if there is a ledger, a table. Outside a Prefect run, do nothing.

    The next stage does not wait for a server that is down: what it does not accept now waits for `deliver_summaries`.
    """
    from prefect.client.schemas.actions import ArtifactCreate
    from prefect.context import TaskRunContext

    context = TaskRunContext.get()
    if context is None:
        return
    key = f"klear-{info.stage.replace('_', '-')}"
    run = {"flow_run_id": context.task_run.flow_run_id, "task_run_id": context.task_run.id}
    summary = {
        "type": "markdown",
        "data": summary_markdown(manifest, ref),
        "description": f"{info.stage} of {info.run_name}",
    }
    # Made here, with the ids of this task run: sent later from elsewhere, they still are on its page.
    _undelivered.append(ArtifactCreate.model_validate({"key": key} | summary | run))
    if manifest.ledger:
        ledger = {"type": "table", "data": json.dumps(ledger_rows(manifest)), "description": "where everything went"}
        _undelivered.append(ArtifactCreate.model_validate({"key": f"{key}-ledger"} | ledger | run))
    deliver_summaries()


def deliver_summaries() -> None:
    """Send the waiting summaries in order until one cannot be sent, which is logged; drop one that Prefect refuses."""
    import httpx

    if not _undelivered:
        return
    try:
        with fail_fast_client(timeout_s=_TIMEOUT_S) as client:
            while _undelivered:
                client.create_artifact(_undelivered[0])
                _undelivered.pop(0)
    except httpx.HTTPError as e:
        if isinstance(e, httpx.HTTPStatusError) and e.response.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
            refused = _undelivered.pop(0)  # else it would hold up all that come after it
            log.warning("Prefect refuses the summary %s: %s", refused.key, e)
        else:
            log.info(
                "%d summaries wait for Prefect, which cannot take them now: %s", len(_undelivered), type(e).__name__
            )


def summary_markdown(manifest: Manifest, ref: ArtifactRef) -> str:
    """Return a stage's counts (scores among them), notes and provenance as Markdown."""
    lines = [f"# {manifest.stage}", "", "| | |", "|---|---|"]
    for name, value in manifest.counts.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        lines.append(f"| {name} | {shown} |")
    lines += ["", *(f"- **Note:** {note}" for note in manifest.notes)]
    commit = "not from git"
    if manifest.git_commit:
        commit = manifest.git_commit[:12] + (" with local changes" if manifest.git_dirty else "")
    lines += [
        "",
        f"Artifact `{manifest.kind}/{manifest.fingerprint}` in `{ref.path}`, code {commit}, "
        f"made in {manifest.wall_s:.1f} s (attempt {manifest.attempts}).",
        "",
        f"MLflow: {mlflow_link(manifest.mlflow_run_id)}",
    ]
    return "\n".join(lines)


def mlflow_link(run_id: str | None) -> str:
    """Return a Markdown link to the run if MLflow is a server, otherwise the run's id."""
    server = without_password(os.environ.get("MLFLOW_TRACKING_URI", ""))
    if run_id is None:
        return "not sent yet"
    return f"[{run_id}]({server.rstrip('/')}/#/runs/{run_id})" if server.startswith("http") else f"run `{run_id}`"


def ledger_rows(manifest: Manifest) -> list[dict[str, str | int]]:
    """Return one row per step and reason."""
    rows: list[dict[str, str | int]] = []
    for step in manifest.ledger:
        rows.append({"step": step.step, "unit": step.unit, "what": "in", "count": step.num_in})
        for reason, n in step.dropped.items():
            rows.append({"step": step.step, "unit": step.unit, "what": f"dropped: {reason}", "count": n})
        for reason, n in step.noted.items():
            rows.append({"step": step.step, "unit": step.unit, "what": f"noted: {reason}", "count": n})
        rows.append({"step": step.step, "unit": step.unit, "what": "out", "count": step.num_out})
    return rows
