"""What a finished stage shows on its page in Prefect: its numbers, its ledger, and the way to MLflow."""

from __future__ import annotations

import logging
import os

from klear_core.artifacts import ArtifactRef, Manifest
from tasks.run_info import RunInfo
from tasks.tracked import without_password

log = logging.getLogger(__name__)


def show_in_prefect(info: RunInfo, manifest: Manifest, ref: ArtifactRef) -> None:
    """A Markdown artifact and, where there is a ledger, a table. Outside a Prefect run nothing happens; API trouble is logged."""
    import httpx
    from prefect.artifacts import create_markdown_artifact, create_table_artifact
    from prefect.context import TaskRunContext

    if TaskRunContext.get() is None:
        return
    key = f"klear-{info.stage.replace('_', '-')}"
    try:
        create_markdown_artifact(summary_markdown(manifest, ref), key=key, description=f"{info.stage} of {info.run_name}", _sync=True)  # type: ignore[call-arg]
        if manifest.ledger:
            create_table_artifact(ledger_rows(manifest), key=f"{key}-ledger", description="where everything went", _sync=True)  # type: ignore[call-arg]
    except httpx.HTTPError as e:
        log.warning("%s: its summary could not be shown in Prefect: %s", info.stage, e)


def summary_markdown(manifest: Manifest, ref: ArtifactRef) -> str:
    """Counts (scores among them), notes and origin, for a person."""
    lines = [f"# {manifest.stage}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value:g} |" if isinstance(value, float) else f"| {name} | {value} |" for name, value in manifest.counts.items()]
    lines += ["", *(f"- **Note:** {note}" for note in manifest.notes)]
    commit = f"{manifest.git_commit[:12]}{' with local changes' if manifest.git_dirty else ''}" if manifest.git_commit else "not from git"
    lines += [
        "",
        f"Artifact `{manifest.kind}/{manifest.fingerprint}` in `{ref.path}`, code {commit}, "
        f"made in {manifest.wall_s:.1f} s (attempt {manifest.attempts}).",
        "",
        f"MLflow: {mlflow_link(manifest.mlflow_run_id)}",
    ]
    return "\n".join(lines)


def mlflow_link(run_id: str | None) -> str:
    """A link where MLflow is a server, the run's id otherwise."""
    server = without_password(os.environ.get("MLFLOW_TRACKING_URI", ""))
    if run_id is None:
        return "not told yet"
    return f"[{run_id}]({server.rstrip('/')}/#/runs/{run_id})" if server.startswith("http") else f"run `{run_id}`"


def ledger_rows(manifest: Manifest) -> list[dict[str, str | int]]:
    """One row a step and reason."""
    rows: list[dict[str, str | int]] = []
    for step in manifest.ledger:
        rows.append({"step": step.step, "unit": step.unit, "what": "in", "count": step.num_in})
        rows += [{"step": step.step, "unit": step.unit, "what": f"dropped: {reason}", "count": n} for reason, n in step.dropped.items()]
        rows += [{"step": step.step, "unit": step.unit, "what": f"noted: {reason}", "count": n} for reason, n in step.noted.items()]
        rows.append({"step": step.step, "unit": step.unit, "what": "out", "count": step.num_out})
    return rows
