"""Takes records and numbers to MLflow from a thread of its own, and keeps them while MLflow is away."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.manifest import ArtifactRef
from klear_core.metrics import METRICS_FILE, read_metrics
from tasks.tracked import POINTS_A_REQUEST, Backend, MetricPoint, OpenRun, Refused, RunStatus, TrackedRun, Undelivered, Unreachable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long is waited for MLflow, and how much is kept for it."""

    flush_every_s: float = 1.0
    retry_every_s: float = 15.0
    close_s: float = 10.0
    """For a request that is on its way when a stage ends."""
    deliver_for_s: float = 20.0
    """For sending what earlier stages and runs left."""
    max_points: int = 200_000
    """Numbers kept in memory, some 50 MB; beyond that they are read again from the metrics file."""


class Connection:
    """A backend, shared by the stages of a process, and when it is worth the next try."""

    def __init__(self, backend: Backend, undelivered: Undelivered, server: str, *, limits: Limits = Limits()) -> None:
        self.backend = backend
        self.limits = limits
        self.undelivered = undelivered
        self.server = server
        self._retry_at = 0.0
        self._is_away = False

    @property
    def is_worth_a_try(self) -> bool:
        """False for a while after a failure."""
        return time.monotonic() >= self._retry_at

    def try_now(self) -> None:
        """Make the next try worth it, however recent the last failure is."""
        self._retry_at = 0.0

    def failed(self, why: str) -> None:
        """Note that MLflow does not answer; said once an outage."""
        if not self._is_away:
            log.warning("MLflow at %s does not answer (%s); the run goes on, and its records are sent later", self.server, why)
        self._is_away, self._retry_at = True, time.monotonic() + self.limits.retry_every_s

    def answered(self) -> None:
        """Note that it does."""
        if self._is_away:
            log.warning("MLflow at %s answers again", self.server)
        self._is_away, self._retry_at = False, 0.0

    def deliver_waiting(self, *, but: str) -> None:
        """Send the records of earlier stages and runs, oldest first, but not those of the stage `but`."""
        deadline = time.monotonic() + self.limits.deliver_for_s
        for record in self.undelivered.records(self.server):
            if time.monotonic() > deadline or not self.is_worth_a_try:
                return
            if f"{record.run_id}/{record.stage}" == but:
                continue
            try:
                _deliver(self.backend, record, current_run=but.partition("/")[0])
            except Unreachable as e:
                self.failed(str(e))
                return
            except Refused as e:
                log.warning("MLflow does not take the record of %s: %s", record.stage or record.run_name, e)
            self.undelivered.forget(record)


class StageRun:
    """One stage's run in MLflow. A thread sends, so that `log` costs nothing; `trouble` says what MLflow does not have."""

    def __init__(self, connection: Connection, record: TrackedRun) -> None:
        self._connection = connection
        self._limits = connection.limits
        self._record = record
        self._opened: OpenRun | None = None
        self._refusal = ""
        self._points: deque[MetricPoint] = deque()
        self._is_behind = True  # rows of the metrics file have to be looked at
        self._has_others = True  # records of other stages may wait
        self._sending = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send_until_stopped, name="klear-mlflow", daemon=True)

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None if it could not be opened yet."""
        return self._opened.run_id if self._opened else None

    @property
    def parent_id(self) -> str | None:
        """MLflow's id of the pipeline's run."""
        return self._opened.parent_id if self._opened else None

    @property
    def num_waiting(self) -> int:
        """Numbers in memory that MLflow does not have yet."""
        return len(self._points)

    @property
    def refusal(self) -> str:
        """Why MLflow takes no more records of this run; empty if it does."""
        return self._refusal

    @property
    def trouble(self) -> str:
        """What MLflow does not have, and why; empty if it has everything."""
        if self._refusal:
            return f"MLflow stopped taking records ({self._refusal}); the metrics are all in {METRICS_FILE}"
        if self._opened is not None and not self.num_waiting and not self._is_behind:
            return ""
        count = f"{self.num_waiting} numbers wait" if self.num_waiting else "its records wait"
        return f"MLflow at {self._connection.server} did not answer: {count} to be sent by a later run; all are in {METRICS_FILE}"

    def start(self) -> None:
        """Open the run, in one try, and send from now on."""
        self.flush()
        self._thread.start()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Numbers at one step; sent about every second."""
        if len(self._points) >= self._limits.max_points:
            self._points.clear()
            self._is_behind = True
        at_ms = now_ms()
        self._points.extend(MetricPoint(name, value, at_ms, step) for name, value in metrics.items())

    def flush(self) -> None:
        """Send what waits, in one try; nothing where MLflow has just been found away."""
        if self._sending.acquire(timeout=self._limits.close_s):
            try:
                self._send()
            finally:
                self._sending.release()

    def finish(self, ref: ArtifactRef, stage: str) -> None:  # noqa: ARG002  the record has it
        """Note what came out; it is told when the run ends."""
        self._record = self._record.model_copy(update={"ref": ref, "metrics_file": str(ref.path / METRICS_FILE)})

    def end(self, status: RunStatus) -> None:
        """Close the run, or leave its record for later."""
        self._stop.set()
        self._thread.join(self._limits.close_s)
        record = self._record.model_copy(update={"status": status, "ended_ms": now_ms()})
        self._connection.undelivered.save(record)  # first of all: a kill from here on loses nothing
        if self._thread.is_alive():
            return  # in a request that is not answered
        self.flush()
        if self._opened is None or self.trouble or not self._connection.is_worth_a_try:
            return
        try:
            _close(self._connection.backend, self._opened, record)
        except Unreachable as e:
            self._connection.failed(str(e))
        except Refused as e:
            log.warning("MLflow does not take the end of %s: %s", record.stage, e)
        else:
            self._connection.undelivered.forget(record)

    def _send_until_stopped(self) -> None:
        while not self._stop.wait(self._limits.flush_every_s):
            with self._sending:
                is_told = self._send()
            if is_told and self._has_others:
                self._has_others = False
                own = f"{self._record.run_id}/{self._record.stage}"
                self._connection.deliver_waiting(but=own)

    def _send(self) -> bool:
        """Send everything that waits; whether it was possible."""
        if self._refusal or not self._connection.is_worth_a_try:
            return False
        try:
            run = self._open()
            while self._points:
                self._send_some(run)
        except Unreachable as e:
            self._connection.failed(str(e))
            self._has_others = True
            return False
        except Refused as e:
            self._refusal = str(e)
            log.warning("%s", self.trouble)
            return False
        self._connection.answered()
        return True

    def _send_some(self, run: OpenRun) -> None:
        batch: list[MetricPoint] = []
        while self._points and len(batch) < POINTS_A_REQUEST:
            batch.append(self._points.popleft())  # one by one: `log` appends meanwhile, in another thread
        try:
            self._connection.backend.log_metrics(run.run_id, batch)
        except (Unreachable, Refused):
            self._points.extendleft(reversed(batch))
            raise

    def _open(self) -> OpenRun:
        """Open the run if it is not, and send the rows of the file that MLflow lacks."""
        if self._opened is None:
            opened = self._connection.backend.open(self._record)
            self._connection.undelivered.forget(self._record)  # of an earlier attempt at this stage, which goes on here
            self._opened = opened
        if self._is_behind:
            self._is_behind = False  # before the file is read, for `log` may find that there are too many again
            self._points.clear()  # they are in the file as well
            try:
                _catch_up(self._connection.backend, self._opened, Path(self._record.metrics_file))
            except (Unreachable, Refused):
                self._is_behind = True
                raise
        return self._opened


def _deliver(backend: Backend, record: TrackedRun, *, current_run: str) -> None:
    """Tell all of a record, from the beginning: what MLflow has of it already is not told twice."""
    if not record.stage:
        backend.end_pipeline(record)
        return
    run = backend.open(record)
    _catch_up(backend, run, Path(record.metrics_file))
    _close(backend, run, record)
    if record.run_id != current_run:  # `open` has re-opened the parent of a run that is over
        backend.end(run.parent_id, run.parent_ended or record.status, record.ended_ms)


def _catch_up(backend: Backend, run: OpenRun, metrics_file: Path) -> None:
    """Send the rows of the file that MLflow does not have: those of an attempt under another run, of an outage, or lost in a kill."""
    rows = read_metrics(metrics_file)
    if not rows:
        return
    known = [{name: value for name, value in row.items() if value is not None} for row in rows]
    steps = [int(numbers.pop("step")) for numbers in known]
    sent = [backend.last_step(run.run_id, name) for name in _names_over(known)]
    last = max((step for step in sent if step is not None), default=None)
    at_ms = now_ms()
    points = []
    for step, numbers in zip(steps, known, strict=True):
        if last is None or step > last:
            points += [MetricPoint(name, value, at_ms, step) for name, value in numbers.items()]
    for start in range(0, len(points), POINTS_A_REQUEST):
        backend.log_metrics(run.run_id, points[start : start + POINTS_A_REQUEST])


def _names_over(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """A few names of which every row that is not empty has one: no metric need be in all."""
    names: list[str] = []
    for row in rows:
        if row and not any(name in row for name in names):
            names.append(next(iter(row)))
    return names


def _close(backend: Backend, run: OpenRun, record: TrackedRun) -> None:
    if record.ref is not None:
        backend.finish(run, record)
    backend.end(run.run_id, record.status, record.ended_ms)


def now_ms() -> int:
    """Milliseconds since 1970, as MLflow counts time."""
    return time.time_ns() // 1_000_000
