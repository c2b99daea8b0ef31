"""Send records and metrics to MLflow from a background thread, and store them on disk while it is unreachable."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from pydantic import ValidationError

from klear_core.artifacts.manifest import ArtifactRef, InputRecord
from klear_core.config.settings import Settings
from klear_core.metrics import METRICS_FILE, read_metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Timeouts in seconds, and the size of the buffer of metrics."""

    flush_every_s: float = 1.0
    retry_every_s: float = 15.0
    close_timeout_s: float = 10.0
    """Wait for a request that is in flight when a stage ends."""
    backlog_timeout_s: float = 20.0
    """Time for sending the records that earlier stages and runs left."""
    max_points: int = 200_000
    """Metric values kept in memory, some 50 MB; beyond that they are read again from the metrics file."""


class Connection:
    """A backend that the stages of a process share, with the time of the next attempt after a failure."""

    def __init__(self, backend: Backend, undelivered: Undelivered, server: str, *, limits: Limits = Limits()) -> None:
        self.backend = backend
        self.limits = limits
        self.undelivered = undelivered
        self.server = server
        self._retry_at = 0.0
        self._is_down = False

    @property
    def may_try(self) -> bool:
        """False for `retry_every_s` seconds after a failure."""
        return time.monotonic() >= self._retry_at

    def allow_try(self) -> None:
        """Allow the next attempt, however recent the last failure is."""
        self._retry_at = 0.0

    def mark_unreachable(self, why: str) -> None:
        """Record that MLflow does not answer, and warn once per outage."""
        if not self._is_down:
            log.warning(
                "MLflow at %s does not answer (%s); the run goes on, and its records are sent later", self.server, why
            )
        self._is_down, self._retry_at = True, time.monotonic() + self.limits.retry_every_s

    def mark_reachable(self) -> None:
        """Record that MLflow answers."""
        if self._is_down:
            log.warning("MLflow at %s answers again", self.server)
        self._is_down, self._retry_at = False, 0.0

    def deliver_waiting(self, *, current_run: str, except_stage: str | None) -> None:
        """Send undelivered records, oldest first; skip that of `except_stage` of the current run, which is still
        running."""
        deadline = time.monotonic() + self.limits.backlog_timeout_s
        for record in self.undelivered.records(self.server):
            if time.monotonic() > deadline or not self.may_try:
                return
            if (record.run_id, record.stage) == (current_run, except_stage):
                continue
            try:
                _deliver(self.backend, record, current_run=current_run)
            except Unreachable as e:
                self.mark_unreachable(str(e))
                return
            except Refused as e:
                # It is dropped below, because it would be refused each time.
                log.warning("MLflow rejected the record of %s: %s", record.stage or record.run_name, e)
            self.undelivered.forget(record)


class StageRun:
    """One stage's run in MLflow. A background thread sends, so that `log` never blocks."""

    def __init__(self, connection: Connection, record: TrackedRun) -> None:
        self._connection = connection
        self._limits = connection.limits
        self._record = record
        self._opened: OpenRun | None = None
        self._refusal = ""
        self._points: deque[MetricPoint] = deque()
        self._must_reread_file = True  # the metrics file may have rows that MLflow lacks
        self._may_have_backlog = True  # records of other stages may be waiting
        self._sending = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send_until_stopped, name="klear-mlflow", daemon=True)

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until the run could be opened."""
        return self._opened.run_id if self._opened else None

    @property
    def parent_id(self) -> str | None:
        """MLflow's id of the pipeline's run."""
        return self._opened.parent_id if self._opened else None

    @property
    def num_waiting(self) -> int:
        """Number of metric values in memory that MLflow does not have yet."""
        return len(self._points)

    @property
    def refusal(self) -> str:
        """The error with which MLflow refused this run's records; empty if it accepts them."""
        return self._refusal

    @property
    def trouble(self) -> str:
        """A message that says which records MLflow lacks, and why; empty if it has all of them."""
        if self._refusal:
            return f"MLflow rejects further records ({self._refusal}); all metrics are in {METRICS_FILE}"
        if self._opened is not None and not self.num_waiting and not self._must_reread_file:
            return ""
        unsent = f"{self.num_waiting} metric values" if self.num_waiting else "the records of this stage"
        return (
            f"MLflow at {self._connection.server} did not answer: a later run sends {unsent}; "
            f"all metrics are in {METRICS_FILE}"
        )

    def start(self) -> None:
        """Try once to open the run, so that a refusal is known on return; then start the sending thread."""
        self.flush()
        self._thread.start()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Queue the metrics of one step; the thread sends the queue about every second."""
        # The file has every row, so that the queue can be dropped and read again from there.
        if len(self._points) >= self._limits.max_points:
            self._points.clear()
            self._must_reread_file = True
        at_ms = now_ms()
        self._points.extend(MetricPoint(name, value, at_ms, step) for name, value in metrics.items())

    def flush(self) -> None:
        """Try once to send the queue; do nothing shortly after a failure."""
        # The thread may be in a request that MLflow does not answer; the stage does not wait for it without end.
        if self._sending.acquire(timeout=self._limits.close_timeout_s):
            try:
                self._send()
            finally:
                self._sending.release()

    def set_artifact(self, ref: ArtifactRef) -> None:
        """Set the stage's artifact, which `end` sends."""
        self._record = self._record.model_copy(update={"ref": ref, "metrics_file": str(ref.path / METRICS_FILE)})

    def end(self, status: RunStatus) -> None:
        """Close the run in MLflow, or keep its record on disk for a later run."""
        self._stop.set()
        self._thread.join(self._limits.close_timeout_s)
        record = self._record.model_copy(update={"status": status, "ended_ms": now_ms()})
        self._connection.undelivered.save(record)  # save before sending: a kill from here on loses nothing
        if self._thread.is_alive():
            return  # the thread still waits for a request that MLflow has not answered
        self.flush()
        if self._opened is None or self.trouble or not self._connection.may_try:
            return
        try:
            _end_run(self._connection.backend, self._opened, record)
        except Unreachable as e:
            self._connection.mark_unreachable(str(e))
        except Refused as e:
            log.warning("MLflow could not mark the run of %s as ended: %s", record.stage, e)
        else:
            self._connection.undelivered.forget(record)

    def _send_until_stopped(self) -> None:
        while not self._stop.wait(self._limits.flush_every_s):
            with self._sending:
                has_sent = self._send()
            if has_sent and self._may_have_backlog:
                self._may_have_backlog = False
                self._connection.deliver_waiting(current_run=self._record.run_id, except_stage=self._record.stage)

    def _send(self) -> bool:
        """Send everything in the queue; return whether MLflow took it."""
        if self._refusal or not self._connection.may_try:
            return False
        try:
            run = self._open()
            while self._points:
                self._send_batch(run)
        except Unreachable as e:
            self._connection.mark_unreachable(str(e))
            self._may_have_backlog = True
            return False
        except Refused as e:
            self._refusal = str(e)
            log.warning("%s", self.trouble)
            return False
        self._connection.mark_reachable()
        return True

    def _send_batch(self, run: OpenRun) -> None:
        batch: list[MetricPoint] = []
        while self._points and len(batch) < MAX_POINTS_PER_REQUEST:
            batch.append(self._points.popleft())  # one at a time, because `log` appends from another thread meanwhile
        try:
            self._connection.backend.log_metrics(run.run_id, batch)
        except (Unreachable, Refused):
            self._points.extendleft(reversed(batch))
            raise

    def _open(self) -> OpenRun:
        """Open the run if it is not open, and send the rows of the metrics file that MLflow lacks."""
        if self._opened is None:
            opened = self._connection.backend.open(self._record)
            # The record that an earlier attempt at this stage left is obsolete: this attempt continues its run.
            self._connection.undelivered.forget(self._record)
            self._opened = opened
        if self._must_reread_file:
            # Reset before reading the file: `log` may overflow the buffer meanwhile, and set it again.
            self._must_reread_file = False
            self._points.clear()  # the file has them too
            try:
                _catch_up(self._connection.backend, self._opened, Path(self._record.metrics_file))
            except (Unreachable, Refused):
                self._must_reread_file = True
                raise
        return self._opened


def _deliver(backend: Backend, record: TrackedRun, *, current_run: str) -> None:
    """Send a complete record, but not what MLflow already has."""
    if not record.stage:
        backend.end_pipeline(record)
        return
    run = backend.open(record)
    _catch_up(backend, run, Path(record.metrics_file))
    _end_run(backend, run, record)
    if record.run_id != current_run:  # `open` has reopened the parent, whose pipeline run is over: close it again
        backend.end(run.parent_id, run.parent_ended or record.status, record.ended_ms)


def _catch_up(backend: Backend, run: OpenRun, metrics_file: Path) -> None:
    """Send the rows of the metrics file that MLflow lacks after an earlier attempt, an outage, or a kill."""
    rows = read_metrics(metrics_file)
    if not rows:
        return
    steps: list[int] = []
    metrics_of_steps: list[dict[str, float]] = []
    for row in rows:
        metrics = {name: value for name, value in row.items() if value is not None}
        steps.append(int(metrics.pop("step")))
        metrics_of_steps.append(metrics)
    # Rows of other metrics are sent in an order of their own: a point of a curve comes some steps late.
    sent = {name: backend.last_step(run.run_id, name) for name in _covering_names(metrics_of_steps)}
    at_ms = now_ms()  # the file has steps and no times
    points: list[MetricPoint] = []
    for step, metrics in zip(steps, metrics_of_steps, strict=True):
        last = next((sent[name] for name in sent if name in metrics), None)
        if last is None or step > last:
            points += [MetricPoint(name, value, at_ms, step) for name, value in metrics.items()]
    for start in range(0, len(points), MAX_POINTS_PER_REQUEST):
        backend.log_metrics(run.run_id, points[start : start + MAX_POINTS_PER_REQUEST])


def _covering_names(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Return metric names that cover every non-empty row: a single metric need not be in all rows."""
    names: list[str] = []
    for row in rows:
        if row and not any(name in row for name in names):
            names.append(next(iter(row)))
    return names


def _end_run(backend: Backend, run: OpenRun, record: TrackedRun) -> None:
    if record.ref is not None:
        backend.finish(run, record)
    backend.end(run.run_id, record.status, record.ended_ms)


def now_ms() -> int:
    """Return the time in milliseconds since 1970, MLflow's unit."""
    return time.time_ns() // 1_000_000


# ---- tracked ----
# Define the records that are sent to MLflow about a run; those not received yet are files in the workspace.


RunStatus = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

MAX_POINTS_PER_REQUEST = 500  # MLflow takes up to 1000 metrics
MAX_WAITING = 500
"""Most undelivered records on disk, one per stage; beyond it the oldest are dropped."""


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


class Backend(Protocol):
    """Sends records to MLflow. Every method may raise Unreachable or Refused; every call is idempotent."""

    def open(self, record: TrackedRun) -> OpenRun:
        """Open the stage's run and its parent, or reopen existing ones, and log parameters and inputs."""
        ...

    def last_step(self, run_id: str, name: str) -> int | None:
        """Return the last step with a value of the metric; None if there is none."""
        ...

    def log_metrics(self, run_id: str, points: list[MetricPoint]) -> None:
        """Send metric values, at most `MAX_POINTS_PER_REQUEST`."""
        ...

    def finish(self, run: OpenRun, record: TrackedRun) -> None:
        """Record the stage's artifact."""
        ...

    def end(self, run_id: str, status: RunStatus, at_ms: int) -> None:
        """Close a run."""
        ...

    def end_pipeline(self, record: TrackedRun) -> None:
        """Close the pipeline's run."""
        ...


class Undelivered:
    """A folder of records that MLflow has not received yet, one file per run; several processes can use it."""

    def __init__(self, folder: Path, *, max_records: int = MAX_WAITING) -> None:
        self.folder = folder
        self._max_records = max_records

    def save(self, record: TrackedRun) -> None:
        """Save a record, replacing an earlier one of the same run; drop the oldest records beyond the limit."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self._file(record).with_suffix(f".{time.time_ns()}.tmp")
        temporary.write_text(record.model_dump_json())
        temporary.replace(self._file(record))
        files = sorted(self.folder.glob("*.json"), key=_changed_at)
        for file in files[: -self._max_records]:
            file.unlink(missing_ok=True)
            log.warning(
                "%s: dropped, for more than %d records wait for MLflow; its metrics stay in metrics.jsonl",
                file,
                self._max_records,
            )

    def forget(self, record: TrackedRun) -> None:
        """Delete the record of this run, if there is one."""
        self._file(record).unlink(missing_ok=True)

    def records(self, server: str) -> list[TrackedRun]:
        """Return the records for one server, oldest first, a pipeline's after those of its stages."""
        found = []
        for file in self.folder.glob("*.json"):
            try:
                record = TrackedRun.model_validate_json(file.read_text())
            except FileNotFoundError:
                continue  # another process has just delivered it
            except ValidationError as e:
                log.warning("%s: not a record of this version of Klear, set aside: %s", file, str(e).splitlines()[0])
                with suppress(FileNotFoundError):  # another process has just done so
                    file.rename(file.with_suffix(".unreadable"))
                continue
            if record.server == server:
                found.append(record)
        return sorted(found, key=lambda r: (r.ended_ms, not r.stage))

    def _file(self, record: TrackedRun) -> Path:
        name = f"{record.run_id}-{record.stage}" if record.stage else record.run_id
        return self.folder / f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)}.json"


def _changed_at(file: Path) -> float:
    """Return a file's time of change; 0 if another process has delivered the record since the folder was listed."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def server_name(uri: str) -> str:
    """Return the part of a tracking URI that may be shown: host and port, or a file; never a user name or password."""
    parts = urlsplit(uri)
    if parts.scheme.startswith("sqlite"):
        return parts.path.removeprefix("/")
    return parts.netloc.rpartition("@")[2] or parts.path


def without_password(text: str) -> str:
    """Return the text with user names and passwords removed from the URLs in it."""
    return re.sub(r"://[^/@\s]+@", "://", text)
