"""Track runs in MLflow. Training never waits for it, and an outage of MLflow never ends a run.

`metrics.jsonl` is the source of truth, MLflow a view of it. While MLflow does not answer, a running stage keeps its
metrics in memory and an ended stage leaves a record on disk; this or a later stage or run sends them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import JsonValue

from klear_core.artifacts.manifest import InputRecord
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.config.settings import result_settings
from klear_core.config.stage import Job
from klear_core.errors import ConfigError
from klear_core.metrics import read_metrics
from klear_core.pipeline.workspace import workspace_root
from tasks.delivery import Connection, StageRun, now_ms
from tasks.mlflow_backend import EXPERIMENT, TRACKING_VARIABLE, mlflow_backend
from tasks.provenance import code_commit
from tasks.run_info import RunInfo
from tasks.tracked import RunStatus, TrackedRun, Undelivered, server_name

__all__ = ["EXPERIMENT", "StageRun", "end_pipeline", "parent_run_id", "stage_run", "status_now", "tracking_uri"]

log = logging.getLogger(__name__)

_PARAM_CHARS = 6000  # MLflow's limit of a param's value

_parents: dict[tuple[str, str], str] = {}
"""MLflow ids of the parent runs opened by this process, by tracking URI and pipeline run id."""


def tracking_uri(workspace: WorkspaceConfig) -> str:
    """Return MLFLOW_TRACKING_URI if it is set, else the URI of a SQLite file in the workspace."""
    return os.environ.get(TRACKING_VARIABLE) or f"sqlite:///{workspace_root(workspace)}/mlflow/mlflow.db"


@contextmanager
def stage_run(
    info: RunInfo, job: Job, fingerprint: str, inputs: Sequence[InputRecord], metrics_file: Path
) -> Iterator[StageRun]:
    """Yield the stage's run, new or reopened, and close it with the block's status; its records wait if MLflow is down.

    ConfigError if MLflow refuses the first stage of a pipeline run, so that wrong credentials show before work starts.
    """
    uri = tracking_uri(info.workspace)
    origin = job.origin()
    given = {"given": origin} if origin else {}
    record = _record_of(info).model_copy(
        update={
            "stage": info.stage,
            "kind": job.kind,
            "fingerprint": fingerprint,
            "makes_model": job.makes_model,
            "scores_step": info.position if job.scores_model else None,
            "page": job.page,
            "params": flat_params(result_settings(job)) | given,
            "inputs": tuple(inputs),
            "metrics_file": str(metrics_file),
        }
    )
    run = StageRun(_connection(info.workspace), record)
    run.start()
    # Once a stage was accepted the credentials are right; a later refusal must not end a run that has cost hours.
    if run.refusal and (uri, info.run_id) not in _parents:
        raise ConfigError(f"MLflow at {server_name(uri)} refuses this run: {run.refusal}")
    try:
        yield run
    finally:
        if run.parent_id:
            _parents[uri, info.run_id] = run.parent_id
        run.end(status_now())


def status_now() -> RunStatus:
    """Return the status of the block that is ending, for use in `finally`: KILLED for Ctrl-C and cancellation."""
    error = sys.exc_info()[1]
    if error is None:
        return "FINISHED"
    return "FAILED" if isinstance(error, Exception) else "KILLED"


def parent_run_id(info: RunInfo) -> str | None:
    """Return MLflow's id of the pipeline's run; None if no stage opened it: a run that only reuses is not tracked."""
    return _parents.get((tracking_uri(info.workspace), info.run_id))


def end_pipeline(info: RunInfo, status: RunStatus) -> None:
    """Close the pipeline's run if a stage opened it or left a record, and log what MLflow has not received."""
    record = _record_of(info).model_copy(update={"status": status, "ended_ms": now_ms()})
    undelivered = _undelivered(info.workspace)
    has_waiting_stage = any(r.run_id == info.run_id for r in undelivered.records(record.server))
    if parent_run_id(info) is None and not has_waiting_stage:
        return
    undelivered.save(record)
    connection = _connection(info.workspace)
    connection.allow_try()  # the last chance of this run, however recent a failure is
    connection.deliver_waiting(
        current_run=info.run_id, except_stage=None
    )  # the stages' records, and then the run's own
    left = undelivered.records(record.server)
    if left:
        num_rows = sum(len(read_metrics(Path(r.metrics_file))) for r in left if r.metrics_file)
        stages = ", ".join(dict.fromkeys(r.stage for r in left if r.stage)) or "the run's end"
        log.warning(
            "MLflow at %s has not received %d records (%s; %d rows of metrics): they wait in %s, "
            "and the next run that reaches MLflow sends them",
            record.server,
            len(left),
            stages,
            num_rows,
            undelivered.folder,
        )


def flat_params(settings: Mapping[str, JsonValue], prefix: str = "") -> dict[str, str]:
    """Return nested settings as dotted names with text values; a list is one value."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= flat_params(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            flat[f"{prefix}{key}"] = text[:_PARAM_CHARS]
    return flat


def _record_of(info: RunInfo) -> TrackedRun:
    """Return the record of the pipeline's run."""
    commit = code_commit()
    return TrackedRun(
        server=server_name(tracking_uri(info.workspace)),
        run_id=info.run_id,
        run_name=info.run_name,
        run_url=info.run_url,
        git_commit=commit.sha if commit else "",
    )


_connections: dict[tuple[str, Path], Connection] = {}


def _connection(workspace: WorkspaceConfig) -> Connection:
    uri, root = tracking_uri(workspace), workspace_root(workspace)
    if (uri, root) not in _connections:
        _connections[uri, root] = Connection(mlflow_backend(uri, root), _undelivered(workspace), server_name(uri))
    return _connections[uri, root]


def _undelivered(workspace: WorkspaceConfig) -> Undelivered:
    return Undelivered(workspace_root(workspace) / "mlflow" / "undelivered")
