"""Send runs to MLflow: one parent run per pipeline run, one child run per stage.

Only this module, `tasks.answer_traces`, `tasks.mlflow_database` and `tasks.model_registry` call MLflow's API.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from klear_core.artifacts.files import file_lock, says_disk_full
from klear_core.artifacts.manifest import OUTSIDE_KINDS, ArtifactRef, InputRecord
from klear_core.config.settings import Settings
from klear_core.errors import ConfigError, KlearError
from klear_core.stopping import signals_held
from tasks.answer_traces import answer_traces, send_traces
from tasks.mlflow_database import database_file, ensure_database

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

log = logging.getLogger(__name__)

EXPERIMENT = "klear"
REQUEST_TIMEOUT_S = 10
TRACKING_VARIABLE = "MLFLOW_TRACKING_URI"
"""Environment variable with the address of the user's server."""
_PARAMS_A_REQUEST = 100
"""MLflow's limit of params in a request."""
_DIGEST_CHARS = 36
"""MLflow's limit of a data set's digest, in characters; its source has the complete fingerprint."""
_ENDED: tuple[RunStatus, ...] = ("FINISHED", "FAILED", "KILLED")
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # MLflow's 7 with backoff take minutes; `tasks.delivery` retries instead
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(REQUEST_TIMEOUT_S),
}


# ---- records ----


RunStatus = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

MAX_POINTS_PER_REQUEST = 500  # MLflow takes up to 1000 metrics


class Unreachable(Exception):  # noqa: N818  a state of the server, not a mistake
    """Raised if MLflow does not answer, or answers with an error that a retry may solve."""


class Refused(Exception):  # noqa: N818
    """Raised if MLflow refuses a record for good: sending it again would not help."""


class TrackedRun(Settings):
    """All that MLflow is sent about one run except its metrics, which are in a file."""

    server: str
    """Host and port of the server, or the path of the database file."""
    run_id: str
    """Prefect's flow run id of the pipeline run."""
    run_name: str
    run_url: str = ""
    stage: str = ""
    """Stage name; empty for the pipeline run itself."""
    kind: str = ""
    fingerprint: str = ""
    params: dict[str, str] = {}
    inputs: tuple[InputRecord, ...] = ()
    git_commit: str = ""
    metrics_file: str = ""
    makes_model: bool = False
    scores_step: int | None = None
    """Step of the scores on the pipeline's run, higher for later models; None if the stage scores no model."""
    page: str = ""
    """File of the artifact for the pipeline's run page; empty if there is none."""
    ref: ArtifactRef | None = None
    """The stage's artifact; None until it exists."""
    status: RunStatus = "RUNNING"
    ended_ms: int = 0


class MetricPoint(NamedTuple):
    """One metric value at one step."""

    name: str
    value: float
    at_ms: int
    step: int


class OpenRun(NamedTuple):
    """MLflow's ids of a stage's run and its parent; `parent_ended` is the parent's status if it had to be reopened."""

    run_id: str
    parent_id: str
    parent_ended: RunStatus | None


def server_name(uri: str) -> str:
    """Return the part of a tracking URI that may be shown: host and port, or a file; never a user name or password."""
    parts = urlsplit(uri)
    if parts.scheme.startswith("sqlite"):
        return parts.path.removeprefix("/")
    return parts.netloc.rpartition("@")[2] or parts.path


def without_password(text: str) -> str:
    """Return the text with user names, passwords and the queries that may hold them removed from the URLs in it."""
    return re.sub(r"://[^/\s]+@", "://", re.sub(r"(://[^\s?]*)\?[^\s'\"]*", r"\1", text))


# ---- client ----


@cache
def mlflow_backend(uri: str, workspace: Path) -> MlflowBackend:
    """Return the backend of a tracking URI. ConfigError if it is a database that cannot be used."""
    # A server has its own place for artifacts; a database file needs one here.
    artifacts = (workspace / "mlflow" / "artifacts").as_uri() if database_file(uri) is not None else None
    return MlflowBackend(mlflow_client(uri), lock=lock_of(workspace), artifacts=artifacts)


def lock_of(workspace: Path) -> Path:
    """Return the lock file that processes of a workspace hold while they change several things in MLflow."""
    return workspace / "mlflow" / ".lock"


@cache
def mlflow_client(uri: str) -> MlflowClient:
    """Return a client of tracking and registry. ConfigError if MLflow cannot use the URI."""
    os.environ.update({name: value for name, value in _SETTINGS.items() if name not in os.environ})
    with _refused(uri):
        file = database_file(uri)
        if file is not None:
            ensure_database(file)
        from mlflow import MlflowClient

        for noisy in ("mlflow", "alembic"):  # after the import, which sets levels itself
            logging.getLogger(noisy).setLevel(logging.WARNING)
        return MlflowClient(tracking_uri=uri, registry_uri=uri)


def check_client(uri: str) -> None:
    """Ask the server or database one question. ConfigError if MLflow cannot use the URI or is refused."""
    with _refused(uri):
        mlflow_client(uri).search_experiments(max_results=1)


@contextmanager
def _refused(uri: str) -> Iterator[None]:
    """Translate errors to ConfigError; a full disk and our own errors pass. Drivers of databases have own types."""
    try:
        yield
    except KlearError:
        raise
    except Exception as e:
        if says_disk_full(e):
            raise
        shown = without_password(uri)
        where = f"{TRACKING_VARIABLE} = {shown}" if os.environ.get(TRACKING_VARIABLE) else f"MLflow's database {shown}"
        raise ConfigError(f"{where}: cannot be used: {type(e).__name__}: {_first_line(e)}") from e


class MlflowBackend:
    """A tracking server or database. Every method may raise Unreachable or Refused; every call is idempotent."""

    def __init__(self, client: MlflowClient, *, lock: Path, artifacts: str | None) -> None:
        self._client = client
        self._lock = lock
        self._artifacts = artifacts

    def open(self, record: TrackedRun) -> OpenRun:
        """Open the stage's run and its parent, or reopen existing ones, and log parameters and inputs."""
        # Under a lock, because MLflow has no "create unless it exists": two processes would each make the parent run.
        with self._requests(is_exclusive=True):
            experiment_id = self._experiment()
            parent, parent_ended = self._parent(record, experiment_id)
            if record.status == "RUNNING":  # an ended stage's record is delivered without the artifact's lock
                self._close_dead_runs(experiment_id, record)
            tags = {"klear.run": record.run_id, "klear.stage": record.stage}
            more = _links(record) | _source(record, "tasks/stages.py")
            more |= {"mlflow.parentRunId": parent.info.run_id, "klear.fingerprint": record.fingerprint}
            child, _ = self._ensure_run(experiment_id, name=record.stage, tags=tags, more=more)
            # Stages of one kind (evaluate_sft, evaluate_rl) must not share the parent's write-once params.
            prefix = "" if record.stage == record.kind else f"{record.stage}."
            self._log_params(child, record.params)
            self._log_params(parent, {f"{prefix}{name}": value for name, value in record.params.items()})
            self._client.log_inputs(child.info.run_id, _dataset_inputs(record.inputs))
            if record.status == "RUNNING":
                self._watch_machine(child.info.run_id)
        return OpenRun(child.info.run_id, parent.info.run_id, parent_ended)

    @contextmanager
    def _requests(self, *, is_exclusive: bool = False) -> Iterator[None]:
        """Translate the errors of a block of requests; `is_exclusive` keeps other processes from theirs.

        A signal waits for the end of a block that writes to a file: an interrupted write would leave the file locked.
        """
        turn = file_lock(self._lock, on_wait=lambda who: log.info("waiting for MLflow: %s", who))
        is_file = self._artifacts is not None
        with translated(), turn if is_exclusive else nullcontext(), signals_held() if is_file else nullcontext():
            yield

    def last_step(self, run_id: str, name: str) -> int | None:
        """Return the last step with a value of the metric; None if there is none."""
        with self._requests():
            return max((m.step for m in self._client.get_metric_history(run_id, name)), default=None)

    def log_metrics(self, run_id: str, points: list[MetricPoint]) -> None:
        """Send metric values."""
        from mlflow.entities import Metric

        metrics = [Metric(p.name, p.value, p.at_ms, p.step) for p in points]
        with self._requests():
            for start in range(0, len(metrics), MAX_POINTS_PER_REQUEST):
                self._client.log_batch(run_id, metrics=metrics[start : start + MAX_POINTS_PER_REQUEST])

    def finish(self, run: OpenRun, record: TrackedRun) -> None:
        """Record the result: counts on both runs, scores on the parent, the model's URI or the report file."""
        ref = record.ref
        assert ref is not None, "a stage that has not finished has no artifact"
        # On the parent as well, whose row in the list of runs then shows what all stages made.
        counts = [
            MetricPoint(f"{record.stage}/counts/{name}", value, record.ended_ms, 0)
            for name, value in ref.counts.items()
        ]
        self.log_metrics(run.run_id, counts)
        scores = _scores(record, ref)
        self.log_metrics(run.parent_id, [*counts, *scores])
        # Alone: another process of the workspace may deliver the same record.
        with self._requests(is_exclusive=True):
            self._client.set_tag(run.run_id, "klear.uri", ref.uri)
            if record.makes_model:
                self._reference_model(run, ref, record.stage)
            if record.page:
                self._client.log_artifact(run.parent_id, str(ref.path / record.page))
        self._trace_answers(run, record)
        if scores:
            self._show_columns([point.name for point in scores], record.ended_ms)

    def _trace_answers(self, run: OpenRun, record: TrackedRun) -> None:
        """Send single answers of the artifact as traces, if the server takes them and the artifact has some."""
        assert record.ref is not None, "answers are in an artifact"
        traces = answer_traces(record.ref.path)
        if not traces:
            return
        try:
            with self._requests():
                send_traces(
                    traces,
                    tracking_uri=self._client.tracking_uri,
                    experiment_id=self._experiment(),
                    run_id=run.run_id,
                    stage=record.stage,
                    at_ms=record.ended_ms,
                )
        except (Refused, NotImplementedError) as e:  # the latter for a server before 3.4
            log.warning("MLflow takes no traces of %s, whose answers are in the artifact: %s", record.stage, e)

    def end(self, run_id: str, status: RunStatus, at_ms: int) -> None:
        """Close a run."""
        with self._requests():
            self._client.set_terminated(run_id, status=status, end_time=at_ms)

    def end_pipeline(self, record: TrackedRun) -> None:
        """Close the pipeline's run."""
        with self._requests(is_exclusive=True):
            parent, _ = self._parent(record, self._experiment())
            self._client.set_terminated(parent.info.run_id, status=record.status, end_time=record.ended_ms)

    def _watch_machine(self, run_id: str) -> None:
        """Log the use of this machine while the run is open, if MLflow's own variable asks for it."""
        from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING

        if MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get():
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            # A thread of MLflow's that ends with the run, or with the first request that fails.
            SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=self._client.tracking_uri).start()

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        if found is None:
            from mlflow.exceptions import MlflowException

            try:
                return str(self._client.create_experiment(EXPERIMENT, artifact_location=self._artifacts))
            except MlflowException as e:
                if e.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            # Another workspace has just created it on the same server.
            found = self._client.get_experiment_by_name(EXPERIMENT)
        return str(found.experiment_id)

    def _parent(self, record: TrackedRun, experiment_id: str) -> tuple[Run, RunStatus | None]:
        tags = {"klear.run": record.run_id, "klear.role": "pipeline"}
        more = _links(record) | _source(record, "flows/pipeline.py")
        return self._ensure_run(experiment_id, name=record.run_name, tags=tags, more=more)

    def _ensure_run(
        self, experiment_id: str, *, name: str, tags: Mapping[str, str], more: Mapping[str, str]
    ) -> tuple[Run, RunStatus | None]:
        """Return the run with these `tags`, reopened, or a new one; and the status with which it had ended, or None."""
        wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        hits = self._client.search_runs(
            [experiment_id], filter_string=wanted, max_results=1, order_by=["attributes.start_time ASC"]
        )
        if not hits:
            return self._client.create_run(experiment_id, run_name=name, tags={**tags, **more}), None
        # An earlier attempt, or the same run before a retry, may have ended it.
        self._client.update_run(hits[0].info.run_id, status="RUNNING")
        return hits[0], next((status for status in _ENDED if status == hits[0].info.status), None)

    def _close_dead_runs(self, experiment_id: str, record: TrackedRun) -> None:
        """Close other running runs for this artifact. This process holds the artifact's lock, so theirs are dead."""
        wanted = f"tags.`klear.fingerprint` = '{record.fingerprint}' and attributes.status = 'RUNNING'"
        for run in self._client.search_runs([experiment_id], filter_string=wanted):
            if run.data.tags["klear.run"] != record.run_id:
                self._client.set_terminated(run.info.run_id, status="KILLED")
                self._client.set_terminated(run.data.tags["mlflow.parentRunId"], status="KILLED")

    def _log_params(self, run: Run, flat: Mapping[str, str]) -> None:
        """Log the params that the run lacks: they are write-once, and a retry may have other runtime settings."""
        from mlflow.entities import Param

        params = [Param(k, v) for k, v in flat.items() if k not in run.data.params]
        for start in range(0, len(params), _PARAMS_A_REQUEST):
            self._client.log_batch(run.info.run_id, params=params[start : start + _PARAMS_A_REQUEST])

    def _show_columns(self, metrics: Sequence[str], at_ms: int) -> None:
        """Add columns for these metrics to the shared view of the runs, if the user may change the experiment."""
        try:
            with self._requests(is_exclusive=True):
                experiment_id = self._experiment()
                tag = self._client.get_experiment(experiment_id).tags.get(VIEW_TAG)
                view = scores_view(tag, metrics, at_ms=at_ms)
                if view is not None:
                    self._client.set_experiment_tag(experiment_id, VIEW_TAG, view)
        except Refused as e:
            log.warning("MLflow has the scores, but does not take a view that shows them: %s", e)

    def _reference_model(self, run: OpenRun, ref: ArtifactRef, stage: str) -> None:
        """Log the model by its URI as an output of the stage and of the pipeline; nothing is uploaded."""
        import mlflow
        from mlflow.entities import LoggedModelOutput

        info = self._client.get_run(run.run_id)
        model_id = info.data.tags.get("klear.model_id")
        if model_id is None:
            tags = {"klear.uri": ref.uri, "klear.fingerprint": ref.fingerprint}
            with _tracked_at(self._client.tracking_uri):
                model_id = mlflow.create_external_model(
                    name=stage, source_run_id=run.run_id, tags=tags, params=tags, experiment_id=info.info.experiment_id
                ).model_id
            self._client.set_tag(run.run_id, "klear.model_id", model_id)
        # A run's page lists its outputs, not the models whose `source_run_id` it is. MLflow refuses one that it has.
        for run_id in (run.run_id, run.parent_id):
            outputs = self._client.get_run(run_id).outputs
            known = outputs.model_outputs if outputs else []
            if all(output.model_id != model_id for output in known):
                self._client.log_outputs(run_id, [LoggedModelOutput(model_id, step=0)])


@contextmanager
def _tracked_at(uri: str) -> Iterator[None]:
    """Set the address that functions of MLflow without a client use.

    MLflow also writes it to the environment, where another workspace of this process would take it for the user's.
    """
    import mlflow

    before = os.environ.get(TRACKING_VARIABLE)
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(TRACKING_VARIABLE, None)
        else:
            os.environ[TRACKING_VARIABLE] = before


def _scores(record: TrackedRun, ref: ArtifactRef) -> list[MetricPoint]:
    """Return a model's scores under names that all models share, so that the run list has one column for each."""
    if record.scores_step is None:
        return []
    scores = {name: value for name, value in ref.counts.items() if isinstance(value, float)}
    # The run list shows the value of the last step: the score of the last model.
    step = record.scores_step
    return [MetricPoint(f"score/{name}", value, record.ended_ms, step) for name, value in scores.items()]


def _links(record: TrackedRun) -> dict[str, str]:
    if not record.run_url:
        return {"prefect.flow_run_id": record.run_id}
    note = f"[Prefect run]({record.run_url})"
    return {"prefect.flow_run_id": record.run_id, "prefect.flow_run_url": record.run_url, "mlflow.note.content": note}


def _source(record: TrackedRun, file: str) -> dict[str, str]:
    """Return the tags that fill MLflow's column Source."""
    commit = {"mlflow.source.git.commit": record.git_commit} if record.git_commit else {}
    return {"mlflow.source.name": f"klear/{file}", "mlflow.source.type": "LOCAL"} | commit


def _dataset_inputs(inputs: Sequence[InputRecord]) -> list[Any]:
    """Return the inputs as MLflow data sets with our fingerprints as digests: MLflow shows lineage, duplicates once."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    found = []
    for i in inputs:
        name = i.role if i.kind in OUTSIDE_KINDS else i.kind
        digest = i.fingerprint[:_DIGEST_CHARS]
        dataset = Dataset(name=name, digest=digest, source_type="klear", source=json.dumps(i.model_dump()))
        found.append(DatasetInput(dataset, [InputTag("mlflow.data.context", i.role[-255:])]))
    return found


@contextmanager
def translated() -> Iterator[None]:
    """Translate errors of MLflow, of the network and of the database to Unreachable or Refused."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except MlflowException as e:
        status = e.get_http_status_code()
        # Proxies answer ENDPOINT_NOT_FOUND while the server behind them restarts.
        is_final = 400 <= status < 500 and status not in (408, 409, 429) and e.error_code != "ENDPOINT_NOT_FOUND"
        raise (Refused if is_final else Unreachable)(_first_line(e)) from e
    except (OSError, SQLAlchemyError) as e:
        raise Unreachable(_first_line(e)) from e


def _first_line(error: Exception) -> str:
    text = without_password(str(error)).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


# ---- the view that begins with the scores ----
# MLflow has no setting for the columns that the table shows at first. It keeps a view that users share as a tag of the
# experiment, and a URL that names the view opens it.


VIEW_TAG = "mlflow.sharedViewState.scores"
VIEW_PARAMETER = "viewStateShareKey=scores"

_MAX_CHARS = 5000
"""MLflow's limit of a tag's value; some 30 columns."""
_WIDTH_PX = 190
"""Enough for `score/longer_avg_at_64`; by default MLflow cuts names after some ten characters."""


def scores_view(tag: str | None, metrics: Collection[str], *, at_ms: int) -> str | None:
    """Return the new value of VIEW_TAG, where `tag` is the present one: columns for these metrics, then earlier ones.

    None if nothing must change: the columns are there, or a user has saved a view of their own under this name.
    """
    known = _columns(tag)
    if known is None:
        return None
    wanted = [f"metrics.`{name}`" for name in metrics]
    missing = [column for column in wanted if column not in known]
    if not missing:
        return None
    columns = [*missing, *known]
    while len(view := _view(columns, at_ms)) > _MAX_CHARS:
        columns.pop()
    return view


def _view(columns: Sequence[str], at_ms: int) -> str:
    state = {
        "selectedColumns": [*columns, "attributes.`Source`"],
        "columnOrder": columns,
        "columnWidths": dict.fromkeys(columns, _WIDTH_PX),
    }
    return json.dumps({"name": "Scores", "createdAt": at_ms, "state": json.dumps(state)})


def _columns(tag: str | None) -> list[str] | None:
    """Return the score columns of a view that `scores_view` made; None for another, which MLflow has compressed."""
    if tag is None:
        return []
    try:
        return list(json.loads(json.loads(tag)["state"])["columnOrder"])
    except (ValueError, KeyError, TypeError):
        return None
