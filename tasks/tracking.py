"""MLflow: one parent run a pipeline run, one child a stage. The only import of mlflow.

What happens when tracking fails: a run that cannot be opened fails the stage before it has spent anything; later trouble never
stops a stage. It is said once, the stage's metrics go on into `metrics.jsonl` (which is the truth, MLflow a view of it), and the
manifest carries a note.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

from pydantic import JsonValue

from klear_core.artifacts import ArtifactRef, InputRecord
from klear_core.config.base import result_settings
from klear_core.config.jobs import Job
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.errors import ResourceError
from klear_core.files import file_lock
from klear_core.metrics import read_metrics
from klear_core.plan import workspace_root
from tasks.mlflow_database import database_file, ensure_database
from tasks.run_info import RunInfo

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

log = logging.getLogger(__name__)

EXPERIMENT = "klear"
FLUSH_EVERY_S = 1.0
_PARAM_CHARS = 6000  # MLflow's limit of a param's value
_BATCH = 500  # metrics a request; MLflow takes up to 1000

P = ParamSpec("P")
R = TypeVar("R")
RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
_parents: dict[tuple[str, str], str] = {}
"""Parent runs opened by this process, by tracking URI and pipeline run."""


def tracking_uri(workspace: WorkspaceConfig) -> str:
    """MLFLOW_TRACKING_URI, or a SQLite file in the workspace."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{workspace_root(workspace)}/mlflow/mlflow.db"


@dataclass(slots=True)
class StageRun:
    """An open MLflow run of one stage. After the first trouble it stays silent, and `trouble` says why."""

    client: MlflowClient
    run_id: str
    parent_id: str
    is_resumed: bool
    trouble: str = ""
    _rows: list[tuple[dict[str, float], int, int]] = field(default_factory=list)
    _flushed_at: float = field(default_factory=time.monotonic)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Numbers at one step; sent at most every second, for a request costs milliseconds."""
        self._rows.append((dict(metrics), step, _now_ms()))
        if time.monotonic() - self._flushed_at > FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Send what waits."""
        from mlflow.entities import Metric

        rows, self._rows = self._rows, []
        self._flushed_at = time.monotonic()
        entities = [Metric(name, value, at_ms, step) for metrics, step, at_ms in rows for name, value in metrics.items()]
        for start in range(0, len(entities), _BATCH):
            self._do(self.client.log_batch, self.run_id, metrics=entities[start : start + _BATCH])

    def catch_up(self, metrics_file: Path) -> None:
        """Send the rows of the file that MLflow does not have: those of an attempt under another run, or lost in a kill."""
        rows = read_metrics(metrics_file)
        if not rows:
            return
        last = self._do(self._last_step, [name for name in rows[0] if name != "step"])
        for row in rows:
            step = int(row["step"])
            if last is None or step > last:
                self.log({k: v for k, v in row.items() if k != "step" and v is not None}, step=step)
        self.flush()

    def finish(self, ref: ArtifactRef, stage: str) -> None:
        """Record what came out: counts here and on the parent, and a reference to the model or the report itself."""
        from mlflow.entities import Metric

        self.flush()
        counts = [Metric(f"{stage}/counts/{name}", value, _now_ms(), 0) for name, value in ref.counts.items()]
        for run_id in (self.run_id, self.parent_id):
            self._do(self.client.log_batch, run_id, metrics=counts)
        self._do(self.client.set_tag, self.run_id, "klear.uri", ref.uri)
        if ref.kind in ("base", "sft", "rl"):
            self._do(_reference_model, self.client, self.run_id, ref, stage)
        if ref.kind == "report":
            self._do(self.client.log_artifact, self.parent_id, str(ref.path / "report.html"))

    def end(self, status: RunStatus) -> None:
        """Close the run."""
        self.flush()
        self._do(self.client.set_terminated, self.run_id, status=status)

    def _last_step(self, names: Sequence[str]) -> int | None:
        steps = [m.step for name in names[:1] for m in self.client.get_metric_history(self.run_id, name)]
        return max(steps, default=None)

    def _do(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.trouble:
            return None
        try:
            return call(*args, **kwargs)
        except _troubles() as e:
            self.trouble = f"MLflow stopped taking records ({_first_line(e)}); the metrics are all in metrics.jsonl"
            log.warning("%s", self.trouble)
            return None


@contextmanager
def stage_run(info: RunInfo, job: Job, fingerprint: str, inputs: Sequence[InputRecord], metrics_file: Path) -> Iterator[StageRun]:
    """The stage's run, opened or gone on with, and closed with the right status. ResourceError if MLflow cannot be reached."""
    try:
        run = _open_stage(info, job, fingerprint, inputs)
    except _troubles() as e:
        raise ResourceError(
            f"MLflow at {tracking_uri(info.workspace)} cannot be used: {_first_line(e)}. Start it, or unset MLFLOW_TRACKING_URI "
            f"to track in a file of the workspace"
        ) from e
    run.catch_up(metrics_file)
    try:
        yield run
    finally:
        run.end(status_now())


def status_now() -> RunStatus:
    """How a block that is being left ends, for use in `finally`: Ctrl-C and a cancellation are no failures."""
    error = sys.exc_info()[1]
    return "FINISHED" if error is None else "FAILED" if isinstance(error, Exception) else "KILLED"


def parent_run_id(info: RunInfo) -> str | None:
    """The pipeline's run, if a stage has opened it: a run that only reuses leaves no trace in MLflow."""
    return _parents.get((tracking_uri(info.workspace), info.run_id))


def end_pipeline(info: RunInfo, status: RunStatus) -> None:
    """Close the pipeline's run, if a stage has opened it."""
    parent = parent_run_id(info)
    if parent is None:
        return
    try:
        _client(tracking_uri(info.workspace)).set_terminated(parent, status=status)
    except _troubles() as e:
        log.warning("the MLflow run of the pipeline could not be closed: %s", _first_line(e))


def _open_stage(info: RunInfo, job: Job, fingerprint: str, inputs: Sequence[InputRecord]) -> StageRun:
    uri = tracking_uri(info.workspace)
    with file_lock(workspace_root(info.workspace) / "mlflow" / ".lock", on_wait=lambda who: log.info("waiting for MLflow: %s", who)):
        client = _client(uri)
        experiment_id = _experiment(client, info.workspace)
        links = {"prefect.flow_run_id": info.run_id} | ({"prefect.flow_run_url": info.run_url} if info.run_url else {})
        links |= {"mlflow.note.content": f"[Prefect run]({info.run_url})"} if info.run_url else {}
        parent, _ = _ensure_run(client, experiment_id, name=info.run_name, tags={"klear.run": info.run_id}, more=links)
        tags = {"klear.run": info.run_id, "klear.stage": info.stage}
        more = links | {"mlflow.parentRunId": parent.info.run_id, "klear.fingerprint": fingerprint}
        _close_dead_runs(client, experiment_id, fingerprint, info.run_id)
        child, is_new = _ensure_run(client, experiment_id, name=info.stage, tags=tags, more=more)
    _parents[uri, info.run_id] = parent.info.run_id
    params = flat_params(result_settings(job))
    _log_params(client, child, params)
    _log_params(client, parent, params if info.stage == job.kind else {f"{info.stage}.{k}": v for k, v in params.items()})
    _log_inputs(client, child.info.run_id, inputs)
    return StageRun(client, child.info.run_id, parent.info.run_id, is_resumed=not is_new)


@cache
def _client(uri: str) -> MlflowClient:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # its own 7 with backoff would hold a training step for minutes
    from mlflow import MlflowClient

    for noisy in ("mlflow", "alembic"):  # after the import, which sets its own levels
        logging.getLogger(noisy).setLevel(logging.WARNING)

    file = database_file(uri)
    if file is not None:
        ensure_database(file)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _experiment(client: MlflowClient, workspace: WorkspaceConfig) -> str:
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        return str(found.experiment_id)
    is_local = tracking_uri(workspace).startswith("sqlite:")  # a server keeps artifacts where it was told to
    location = (workspace_root(workspace) / "mlflow" / "artifacts").as_uri() if is_local else None
    return str(client.create_experiment(EXPERIMENT, artifact_location=location))


def _ensure_run(client: MlflowClient, experiment_id: str, *, name: str, tags: dict[str, str], more: dict[str, str]) -> tuple[Run, bool]:
    """The run with exactly these `tags` of ours, re-opened, or a new one; and whether it is new."""
    wanted = [f"tags.`{key}` = '{value}'" for key, value in tags.items()]
    if "klear.stage" not in tags:
        wanted.append("tags.`klear.role` = 'pipeline'")
        tags = tags | {"klear.role": "pipeline"}
    hits = client.search_runs([experiment_id], filter_string=" and ".join(wanted), max_results=1, order_by=["attributes.start_time ASC"])
    if not hits:
        return client.create_run(experiment_id, run_name=name, tags=tags | more), True
    client.update_run(hits[0].info.run_id, status="RUNNING")
    return hits[0], False


def _close_dead_runs(client: MlflowClient, experiment_id: str, fingerprint: str, run_id: str) -> None:
    """Whoever else was building this artifact is dead, for we hold its lock; MLflow would show it as running for ever."""
    wanted = f"tags.`klear.fingerprint` = '{fingerprint}' and attributes.status = 'RUNNING'"
    for run in client.search_runs([experiment_id], filter_string=wanted):
        if run.data.tags["klear.run"] != run_id:
            client.set_terminated(run.info.run_id, status="KILLED")
            client.set_terminated(run.data.tags["mlflow.parentRunId"], status="KILLED")


def _log_params(client: MlflowClient, run: Run, flat: Mapping[str, str]) -> None:
    """Params are write-once: a retry with other runtime settings must not trip over them."""
    from mlflow.entities import Param

    params = [Param(k, v) for k, v in flat.items() if k not in run.data.params]
    for start in range(0, len(params), 100):
        client.log_batch(run.info.run_id, params=params[start : start + 100])


def flat_params(settings: Mapping[str, JsonValue], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names and text; lists stay whole."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= flat_params(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = (value if isinstance(value, str) else json.dumps(value))[:_PARAM_CHARS]
    return flat


def _log_inputs(client: MlflowClient, run_id: str, inputs: Sequence[InputRecord]) -> None:
    """Our fingerprints as MLflow's data set digests, so that lineage can be walked there; the same input twice is one."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    client.log_inputs(
        run_id,
        [
            DatasetInput(
                Dataset(
                    name=i.role if i.kind == "file" else i.kind,
                    digest=i.fingerprint,
                    source_type="klear",
                    source=json.dumps(i.model_dump()),
                ),
                [InputTag("mlflow.data.context", i.role[-255:])],
            )
            for i in inputs
        ],
    )


def _reference_model(client: MlflowClient, run_id: str, ref: ArtifactRef, stage: str) -> None:
    """The model under its own name in MLflow, by address: nothing is uploaded."""
    import mlflow

    known = client.get_run(run_id).data.tags.get("klear.model_id")
    if known is None:
        mlflow.set_tracking_uri(client.tracking_uri)
        tags = {"klear.uri": ref.uri, "klear.fingerprint": ref.fingerprint}
        experiment_id = client.get_run(run_id).info.experiment_id
        model = mlflow.create_external_model(name=stage, source_run_id=run_id, tags=tags, experiment_id=experiment_id)
        client.set_tag(run_id, "klear.model_id", model.model_id)


@cache
def _troubles() -> tuple[type[Exception], ...]:
    """What a tracking backend can raise: MLflow's own, the network's and the database's."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return (MlflowException, OSError, SQLAlchemyError)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
