"""The only module that talks to MLflow: one parent run a pipeline run, one child a stage."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klear_core.artifacts.files import file_lock
from klear_core.artifacts.manifest import ArtifactRef, InputRecord
from tasks.mlflow_database import database_file, ensure_database
from tasks.tracked import MetricPoint, OpenRun, Refused, RunStatus, TrackedRun, Unreachable, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

    _Found = tuple[Run, RunStatus | None]

log = logging.getLogger(__name__)

EXPERIMENT = "klear"
REQUEST_TIMEOUT_S = 10
_PARAMS_A_REQUEST = 100
_ENDED: tuple[RunStatus, ...] = ("FINISHED", "FAILED", "KILLED")
_SCORED_MODELS = ("base", "sft", "rl", "rl_code")
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # its own 7 with backoff last for minutes; what fails is kept here and sent again
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(REQUEST_TIMEOUT_S),
}


@cache
def mlflow_backend(uri: str, workspace: Path) -> MlflowBackend:
    """Return the connection to a tracking URI. ConfigError if it is a database that cannot be used."""
    os.environ.update({name: value for name, value in _SETTINGS.items() if name not in os.environ})
    file = database_file(uri)
    if file is not None:
        ensure_database(file)
    from mlflow import MlflowClient

    for noisy in ("mlflow", "alembic"):  # after the import, which sets its own levels
        logging.getLogger(noisy).setLevel(logging.WARNING)
    artifacts = (workspace / "mlflow" / "artifacts").as_uri() if file is not None else None  # a server keeps them where it was told to
    return MlflowBackend(MlflowClient(tracking_uri=uri, registry_uri=uri), lock=workspace / "mlflow" / ".lock", artifacts=artifacts)


class MlflowBackend:
    """A tracking server or database."""

    def __init__(self, client: MlflowClient, *, lock: Path, artifacts: str | None) -> None:
        self._client = client
        self._lock = lock
        self._artifacts = artifacts

    def open(self, record: TrackedRun) -> OpenRun:
        """Open the stage's run and its parent, or go on with those that are there, and log parameters and inputs."""
        with _translated(), file_lock(self._lock, on_wait=lambda who: log.info("waiting for MLflow: %s", who)):
            experiment_id = self._experiment()
            parent, parent_ended = self._parent(record, experiment_id)
            if record.status == "RUNNING":
                self._close_dead_runs(experiment_id, record)
            tags = {"klear.run": record.run_id, "klear.stage": record.stage}
            more = _links(record) | _source(record, f"tasks/{record.kind}.py")
            more |= {"mlflow.parentRunId": parent.info.run_id, "klear.fingerprint": record.fingerprint}
            child, _ = self._ensure_run(experiment_id, name=record.stage, tags=tags, more=more)
            prefix = "" if record.stage == record.kind else f"{record.stage}."
            self._log_params(child, record.params)
            self._log_params(parent, {f"{prefix}{name}": value for name, value in record.params.items()})
            self._client.log_inputs(child.info.run_id, _dataset_inputs(record.inputs))
        return OpenRun(child.info.run_id, parent.info.run_id, parent_ended)

    def last_step(self, run_id: str, name: str) -> int | None:
        """Return the last step at which a metric is known."""
        with _translated():
            return max((m.step for m in self._client.get_metric_history(run_id, name)), default=None)

    def log_metrics(self, run_id: str, points: list[MetricPoint]) -> None:
        """Send numbers, at most `POINTS_A_REQUEST`."""
        from mlflow.entities import Metric

        with _translated():
            self._client.log_batch(run_id, metrics=[Metric(p.name, p.value, p.at_ms, p.step) for p in points])

    def finish(self, run: OpenRun, record: TrackedRun) -> None:
        """Record what came out: counts here and on the parent, scores on the parent, a reference to the model or the report itself."""
        ref = record.ref
        assert ref is not None, "a stage that has not finished has no artifact"
        counts = [MetricPoint(f"{record.stage}/counts/{name}", value, record.ended_ms, 0) for name, value in ref.counts.items()]
        self.log_metrics(run.run_id, counts)
        self.log_metrics(run.parent_id, [*counts, *_scores(record, ref)])
        with _translated():
            self._client.set_tag(run.run_id, "klear.uri", ref.uri)
            if ref.kind in ("base", "sft", "rl"):
                self._reference_model(run, ref, record.stage)
            if ref.kind == "report":
                self._client.log_artifact(run.parent_id, str(ref.path / "report.html"))

    def end(self, run_id: str, status: RunStatus, at_ms: int) -> None:
        """Close a run."""
        with _translated():
            self._client.set_terminated(run_id, status=status, end_time=at_ms)

    def end_pipeline(self, record: TrackedRun) -> None:
        """Close the pipeline's run."""
        with _translated(), file_lock(self._lock, on_wait=lambda who: log.info("waiting for MLflow: %s", who)):
            parent, _ = self._parent(record, self._experiment())
            self._client.set_terminated(parent.info.run_id, status=record.status, end_time=record.ended_ms)

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        if found is None:
            from mlflow.exceptions import MlflowException

            try:
                return str(self._client.create_experiment(EXPERIMENT, artifact_location=self._artifacts))
            except MlflowException as e:
                if e.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            found = self._client.get_experiment_by_name(EXPERIMENT)  # another workspace has just made it on the same server
        return str(found.experiment_id)

    def _parent(self, record: TrackedRun, experiment_id: str) -> _Found:
        tags = {"klear.run": record.run_id, "klear.role": "pipeline"}
        more = _links(record) | _source(record, "flows/pipeline.py")
        return self._ensure_run(experiment_id, name=record.run_name, tags=tags, more=more)

    def _ensure_run(
        self, experiment_id: str, *, name: str, tags: Mapping[str, str], more: Mapping[str, str]
    ) -> tuple[Run, RunStatus | None]:
        """Return the run with these `tags`, re-opened, or a new one; and how it had ended, if it had."""
        wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        hits = self._client.search_runs([experiment_id], filter_string=wanted, max_results=1, order_by=["attributes.start_time ASC"])
        if not hits:
            return self._client.create_run(experiment_id, run_name=name, tags={**tags, **more}), None
        self._client.update_run(hits[0].info.run_id, status="RUNNING")
        return hits[0], next((status for status in _ENDED if status == hits[0].info.status), None)

    def _close_dead_runs(self, experiment_id: str, record: TrackedRun) -> None:
        """Whoever else was building this artifact is dead, for we hold its lock; MLflow would show it as running for ever."""
        wanted = f"tags.`klear.fingerprint` = '{record.fingerprint}' and attributes.status = 'RUNNING'"
        for run in self._client.search_runs([experiment_id], filter_string=wanted):
            if run.data.tags["klear.run"] != record.run_id:
                self._client.set_terminated(run.info.run_id, status="KILLED")
                self._client.set_terminated(run.data.tags["mlflow.parentRunId"], status="KILLED")

    def _log_params(self, run: Run, flat: Mapping[str, str]) -> None:
        """Params are write-once: a retry with other runtime settings must not trip over them."""
        from mlflow.entities import Param

        params = [Param(k, v) for k, v in flat.items() if k not in run.data.params]
        for start in range(0, len(params), _PARAMS_A_REQUEST):
            self._client.log_batch(run.info.run_id, params=params[start : start + _PARAMS_A_REQUEST])

    def _reference_model(self, run: OpenRun, ref: ArtifactRef, stage: str) -> None:
        """Log the model by its address, as an output of the stage and of the pipeline: nothing is uploaded."""
        import mlflow
        from mlflow.entities import LoggedModelOutput

        info = self._client.get_run(run.run_id)
        model_id = info.data.tags.get("klear.model_id")
        if model_id is None:
            mlflow.set_tracking_uri(self._client.tracking_uri)
            facts = {"klear.uri": ref.uri, "klear.fingerprint": ref.fingerprint}
            model = mlflow.create_external_model(
                name=stage, source_run_id=run.run_id, tags=facts, params=facts, experiment_id=info.info.experiment_id
            )
            model_id = model.model_id
            self._client.set_tag(run.run_id, "klear.model_id", model_id)
        for run_id in (run.run_id, run.parent_id):  # a run's page lists its outputs, not the models that name it as their source
            self._client.log_outputs(run_id, [LoggedModelOutput(model_id, step=0)])


def _scores(record: TrackedRun, ref: ArtifactRef) -> list[MetricPoint]:
    """A model's scores under names that all models share, so that the list of runs has one column of them, with the last model's."""
    model = record.stage.removeprefix("evaluate_")
    if ref.kind != "evaluate" or model not in _SCORED_MODELS:
        return []
    step = _SCORED_MODELS.index(model)
    scores = {name: value for name, value in ref.counts.items() if isinstance(value, float)}
    return [MetricPoint(f"score/{name}", value, record.ended_ms, step) for name, value in scores.items()]


def _links(record: TrackedRun) -> dict[str, str]:
    if not record.run_url:
        return {"prefect.flow_run_id": record.run_id}
    note = f"[Prefect run]({record.run_url})"
    return {"prefect.flow_run_id": record.run_id, "prefect.flow_run_url": record.run_url, "mlflow.note.content": note}


def _source(record: TrackedRun, file: str) -> dict[str, str]:
    """MLflow's own tags for the column Source."""
    commit = {"mlflow.source.git.commit": record.git_commit} if record.git_commit else {}
    return {"mlflow.source.name": f"klear/{file}", "mlflow.source.type": "LOCAL"} | commit


def _dataset_inputs(inputs: Sequence[InputRecord]) -> list[Any]:
    """Our fingerprints as MLflow's data set digests, so that lineage can be walked there; the same input twice is one."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    found = []
    for i in inputs:
        name = i.role if i.kind == "file" else i.kind
        dataset = Dataset(name=name, digest=i.fingerprint, source_type="klear", source=json.dumps(i.model_dump()))
        found.append(DatasetInput(dataset, [InputTag("mlflow.data.context", i.role[-255:])]))
    return found


@contextmanager
def _translated() -> Iterator[None]:
    """Errors of MLflow, of the network and of the database, as Unreachable or Refused."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except MlflowException as e:
        status = e.get_http_status_code()
        # ENDPOINT_NOT_FOUND comes from proxies while the server behind them restarts
        is_final = 400 <= status < 500 and status not in (408, 409, 429) and e.error_code != "ENDPOINT_NOT_FOUND"
        raise (Refused if is_final else Unreachable)(_first_line(e)) from e
    except (OSError, SQLAlchemyError) as e:
        raise Unreachable(_first_line(e)) from e


def _first_line(error: Exception) -> str:
    text = without_password(str(error)).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
