"""Send metrics files and records to MLflow from a background thread; they wait on disk while it is unreachable."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from klear_core.artifacts.files import says_disk_full
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.errors import reporting
from klear_core.metrics import METRICS_FILE, parse_row
from klear_core.waits import waiting
from tasks.mlflow_backend import (
    MAX_POINTS_PER_REQUEST,
    MetricPoint,
    MlflowBackend,
    OpenRun,
    Refused,
    RunStatus,
    TrackedRun,
    Unreachable,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Timeouts in seconds."""

    flush_every_s: float = 1.0
    retry_every_s: float = 15.0
    close_timeout_s: float = 10.0
    """Wait for a request that is in flight when a stage ends."""
    backlog_timeout_s: float = 20.0
    """Time for sending the records that earlier stages and runs left."""


class Connection:
    """A backend that the stages of a process share, with the time of the next attempt after a failure."""

    def __init__(
        self, backend: MlflowBackend, undelivered: Undelivered, server: str, *, limits: Limits = Limits()
    ) -> None:
        self.backend = backend
        self.limits = limits
        self.undelivered = undelivered
        self.server = server
        self.failure = "did not answer"
        """The last failure in a few words, for a note on what MLflow lacks."""
        self._retry_at = 0.0
        self._is_down = False

    @property
    def may_try(self) -> bool:
        """False for `retry_every_s` seconds after a failure."""
        return time.monotonic() >= self._retry_at

    def allow_try(self) -> None:
        """Allow the next attempt, however recent the last failure is."""
        self._retry_at = 0.0

    def mark_unreachable(self, error: Unreachable | OSError) -> None:
        """Record that MLflow does not answer or cannot be written to, and warn once per outage."""
        # A file does not answer either; what fails there is this machine's disk.
        is_full = says_disk_full(error)
        is_local = is_full or self.server.startswith("/")
        self.failure = "could not be written to" if is_local else "did not answer"
        if not self._is_down:
            state = "cannot be written to" if is_local else "does not answer"
            reason = "no space left on the disk" if is_full else error
            log.warning(
                "MLflow at %s %s (%s); the run goes on, and its records are sent later", self.server, state, reason
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
                self.mark_unreachable(e)
                return
            except Refused as e:
                # It is dropped below, because it would be refused each time.
                log.warning("MLflow rejected the record of %s: %s", record.stage or record.run_name, e)
            self.undelivered.forget(record)


class StageRun:
    """One stage's run in MLflow. A background thread sends what the stage writes to its metrics file."""

    def __init__(self, connection: Connection, record: TrackedRun) -> None:
        self._connection = connection
        self._limits = connection.limits
        self._record = record
        self._metrics = UnsentMetrics(Path(record.metrics_file))
        self._opened: OpenRun | None = None
        self._refusal = ""
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
    def refusal(self) -> str:
        """The error with which MLflow refused this run's records; empty if it accepts them."""
        return self._refusal

    @property
    def trouble(self) -> str:
        """A message that says which records MLflow lacks, and why; empty if it has all of them."""
        if self._refusal:
            return f"MLflow rejects further records ({self._refusal}); all metrics are in {METRICS_FILE}"
        num_unsent = self._metrics.count()
        if self._opened is not None and not num_unsent:
            return ""
        unsent = f"{num_unsent} metric values" if num_unsent else "the records of this stage"
        return (
            f"MLflow at {self._connection.server} {self._connection.failure}: a later run sends {unsent}; "
            f"all metrics are in {METRICS_FILE}"
        )

    def start(self) -> None:
        """Try once to open the run, so that a refusal is known on return; then start the sending thread."""
        self.flush()
        self._thread.start()

    def flush(self) -> None:
        """Try once to send what the metrics file has and MLflow lacks; do nothing shortly after a failure."""
        # The thread may be in a request that MLflow does not answer; the stage does not wait for it without end.
        if self._sending.acquire(timeout=self._limits.close_timeout_s):
            try:
                with reporting("MLflow lacks records of this stage"):
                    self._send()
            finally:
                self._sending.release()

    def set_artifact(self, ref: ArtifactRef) -> None:
        """Set the stage's artifact, which `end` sends. Publishing it has moved the metrics file."""
        self._metrics.file = ref.path / METRICS_FILE
        self._record = self._record.model_copy(update={"ref": ref, "metrics_file": str(ref.path / METRICS_FILE)})

    def end(self, status: RunStatus) -> None:
        """Close the run in MLflow, or keep its record on disk for a later run."""
        self._stop.set()
        self._thread.join(self._limits.close_timeout_s)
        record = self._record.model_copy(update={"status": status, "ended_ms": now_ms()})
        with reporting(f"the record of {record.stage} is not kept for a later run"):
            self._connection.undelivered.save(record)  # save before sending: a kill from here on loses nothing
        if self._thread.is_alive():
            return  # the thread still waits for a request that MLflow has not answered
        self.flush()
        if self._opened is None or self.trouble or not self._connection.may_try:
            return
        try:
            _end_run(self._connection.backend, self._opened, record)
        except Unreachable as e:
            self._connection.mark_unreachable(e)
        except Refused as e:
            log.warning("MLflow could not mark the run of %s as ended: %s", record.stage, e)
        else:
            self._connection.undelivered.forget(record)

    def _send_until_stopped(self) -> None:
        while not self._stop.wait(self._limits.flush_every_s):
            with reporting("MLflow lacks records of this stage"):
                self._send_all()

    def _send_all(self) -> None:
        with self._sending:
            has_sent = self._send()
        if has_sent and self._may_have_backlog:
            self._may_have_backlog = False
            self._connection.deliver_waiting(current_run=self._record.run_id, except_stage=self._record.stage)

    def _last_sent(self) -> str:
        return f"{'opened the run' if self._opened else 'nothing yet'}; {self._metrics.count()} values are unsent"

    def _send(self) -> bool:
        """Open the run if it is not open, and send the metrics that MLflow lacks; return whether MLflow took them."""
        if self._refusal or not self._connection.may_try:
            return False
        backend = self._connection.backend
        try:
            with waiting(f"MLflow at {self._connection.server}", "take the records of a stage", self._last_sent):
                if self._opened is None:
                    opened = backend.open(self._record)
                    # The record that an earlier attempt at this stage left is obsolete: this attempt continues its run.
                    self._connection.undelivered.forget(self._record)
                    self._metrics.skip_known(backend, opened.run_id)
                    self._opened = opened
                self._metrics.send(backend, self._opened.run_id)
        except (Unreachable, OSError) as e:  # an OSError is one of reading the metrics file, which the message names
            self._connection.mark_unreachable(e)
            self._may_have_backlog = True
            return False
        except Refused as e:
            self._refusal = str(e)
            log.warning("%s", self.trouble)
            return False
        self._connection.mark_reachable()
        return True


class UnsentMetrics:
    """The rows of a metrics file that MLflow lacks. The stage may still append to the file, and rewind it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._last = _Row(inode=0, end=0, line=b"", points=[])
        """The last row that was sent or skipped."""
        self._sent: set[int] = set()
        """Hashes of the lines that MLflow has. A stage that goes back to an earlier step has a new file, in which the
        rows that stay are not sent again, and new values of a step are."""

    def count(self) -> int:
        """Return the number of metric values that MLflow lacks."""
        return sum(len(row.points) for row in self._rows())

    def skip_known(self, backend: MlflowBackend, run_id: str) -> None:
        """Skip the rows that an earlier attempt has sent: up to the last step that MLflow has of their metrics."""
        known: set[int] = set()
        # One metric of each row is asked for. Rows of other metrics are sent in an order of their own: a point of a
        # curve comes some steps late.
        last_steps: dict[str, int | None] = {}
        for row in self._rows():
            names = [point.name for point in row.points]
            if not names:
                continue
            name = next((name for name in last_steps if name in names), names[0])
            if name not in last_steps:
                last_steps[name] = backend.last_step(run_id, name)
            last = last_steps[name]
            if last is not None and row.points[0].step <= last:
                known.add(hash(row.line))
        self._sent |= known

    def send(self, backend: MlflowBackend, run_id: str) -> None:
        """Send the rows in the order of the file. After an error the next call goes on where this one ended."""
        batch: list[_Row] = []
        size = 0
        for row in self._rows():
            size += max(1, len(row.points))
            if size > MAX_POINTS_PER_REQUEST:
                self._send_batch(backend, run_id, batch)
                batch, size = [], len(row.points)
            batch.append(row)
        self._send_batch(backend, run_id, batch)

    def _send_batch(self, backend: MlflowBackend, run_id: str, batch: Sequence[_Row]) -> None:
        points = [point for row in batch for point in row.points]
        if points:
            backend.log_metrics(run_id, points)
        self._sent.update(hash(row.line) for row in batch)
        self._last = batch[-1] if batch else self._last

    def _rows(self) -> Iterator[_Row]:
        """Yield the rows after the last one; all rows if the file is a new one."""
        try:
            f = self.file.open("rb")
        except FileNotFoundError:
            return  # no metric yet, or publishing is moving it
        at_ms = now_ms()  # the file has steps and no times
        with f:
            inode, end = os.fstat(f.fileno()).st_ino, self._last.end
            f.seek(end - len(self._last.line))
            # The line is compared as well, because a file system gives the inode of a deleted file to a new one.
            if inode != self._last.inode or f.read(len(self._last.line)) != self._last.line:
                f.seek(0)
                self._sent.intersection_update(map(hash, f))
                end = f.seek(0)
            for line in f:
                if not line.endswith(b"\n"):
                    return  # the stage is writing it
                end += len(line)
                yield _Row(inode, end, line, [] if hash(line) in self._sent else _points(line, at_ms))


class _Row(NamedTuple):
    """A line of a metrics file, where it ends, and its values; without any if MLflow has them."""

    inode: int
    end: int
    line: bytes
    points: list[MetricPoint]


def _points(line: bytes, at_ms: int) -> list[MetricPoint]:
    row = parse_row(line)
    step = int(row.pop("step", None) or 0)
    return [MetricPoint(name, value, at_ms, step) for name, value in row.items() if value is not None]


def _deliver(backend: MlflowBackend, record: TrackedRun, *, current_run: str) -> None:
    """Send a complete record, but not what MLflow already has."""
    if not record.stage:
        backend.end_pipeline(record)
        return
    run = backend.open(record)
    metrics = UnsentMetrics(Path(record.metrics_file))
    metrics.skip_known(backend, run.run_id)
    metrics.send(backend, run.run_id)
    _end_run(backend, run, record)
    if record.run_id != current_run:  # `open` has reopened the parent, whose pipeline run is over: close it again
        backend.end(run.parent_id, run.parent_ended or record.status, record.ended_ms)


def _end_run(backend: MlflowBackend, run: OpenRun, record: TrackedRun) -> None:
    if record.ref is not None:
        backend.finish(run, record)
    backend.end(run.run_id, record.status, record.ended_ms)


def now_ms() -> int:
    """Return the time in milliseconds since 1970, MLflow's unit."""
    return time.time_ns() // 1_000_000


# ---- records that wait ----


MAX_WAITING = 500
"""Most undelivered records on disk, one per stage; beyond it the oldest are dropped."""


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
