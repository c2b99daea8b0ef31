"""Records of what MLflow is told about a run, and those that it could not be told yet, as files of the workspace."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from pydantic import ValidationError

from klear_core.artifacts.manifest import ArtifactRef, InputRecord
from klear_core.config.base import Settings

log = logging.getLogger(__name__)

RunStatus = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

POINTS_A_REQUEST = 500  # MLflow takes up to 1000 metrics
MAX_WAITING = 500
"""Records that wait on disk, one a stage; beyond that the oldest are dropped."""


class Unreachable(Exception):  # noqa: N818  a state of the server, not a mistake
    """MLflow gives no answer, or one that says to come again."""


class Refused(Exception):  # noqa: N818
    """MLflow answers that it will not take this record, however often it is sent."""


class TrackedRun(Settings):
    """What MLflow is told about one run, but for its metrics, which are in a file."""

    server: str
    """Host and port, or the database's file."""
    run_id: str
    """Prefect's id of the pipeline run."""
    run_name: str
    run_url: str = ""
    stage: str = ""
    """Empty for the pipeline itself."""
    kind: str = ""
    fingerprint: str = ""
    params: dict[str, str] = {}
    inputs: tuple[InputRecord, ...] = ()
    git_commit: str = ""
    metrics_file: str = ""
    ref: ArtifactRef | None = None
    """The artifact, once there is one."""
    status: RunStatus = "RUNNING"
    ended_ms: int = 0


class MetricPoint(NamedTuple):
    """One number at one step."""

    name: str
    value: float
    at_ms: int
    step: int


class OpenRun(NamedTuple):
    """MLflow's ids of a stage's run and of its parent, and how the parent had ended before it was opened again, if it had."""

    run_id: str
    parent_id: str
    parent_ended: RunStatus | None


class Backend(Protocol):
    """Takes records to MLflow. Every method raises Unreachable or Refused; repeating a call changes nothing more."""

    def open(self, record: TrackedRun) -> OpenRun:
        """Open the stage's run and its parent, or go on with those that are there, and log parameters and inputs."""
        ...

    def last_step(self, run_id: str, name: str) -> int | None:
        """Return the last step at which a metric is known."""
        ...

    def log_metrics(self, run_id: str, points: list[MetricPoint]) -> None:
        """Send numbers, at most `POINTS_A_REQUEST`."""
        ...

    def finish(self, run: OpenRun, record: TrackedRun) -> None:
        """Record what came out of the stage."""
        ...

    def end(self, run_id: str, status: RunStatus, at_ms: int) -> None:
        """Close a run."""
        ...

    def end_pipeline(self, record: TrackedRun) -> None:
        """Close the pipeline's run."""
        ...


class Undelivered:
    """A folder of records that MLflow could not be told yet, one file a run; safe to use by several processes."""

    def __init__(self, folder: Path, *, max_records: int = MAX_WAITING) -> None:
        self.folder = folder
        self._max_records = max_records

    def save(self, record: TrackedRun) -> None:
        """Keep a record, in place of an earlier one of the same run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = self._file(record).with_suffix(f".{time.time_ns()}.tmp")
        beside.write_text(record.model_dump_json())
        beside.replace(self._file(record))
        files = sorted(self.folder.glob("*.json"), key=lambda f: f.stat().st_mtime)
        for file in files[: -self._max_records]:
            file.unlink(missing_ok=True)
            log.warning("%s: dropped, for more than %d records wait for MLflow; its metrics stay in metrics.jsonl", file, self._max_records)

    def forget(self, record: TrackedRun) -> None:
        """Drop the record of this run, if there is one."""
        self._file(record).unlink(missing_ok=True)

    def records(self, server: str) -> list[TrackedRun]:
        """Those for one server, oldest first, a pipeline's after those of its stages."""
        found = []
        for file in self.folder.glob("*.json"):
            try:
                record = TrackedRun.model_validate_json(file.read_text())
            except FileNotFoundError:
                continue  # another process has just delivered it
            except ValidationError as e:
                log.warning("%s: not a record of this version of Klear, set aside: %s", file, str(e).splitlines()[0])
                file.rename(file.with_suffix(".unreadable"))
                continue
            if record.server == server:
                found.append(record)
        return sorted(found, key=lambda r: (r.ended_ms, not r.stage))

    def _file(self, record: TrackedRun) -> Path:
        name = f"{record.run_id}-{record.stage}" if record.stage else record.run_id
        return self.folder / f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)}.json"


def server_name(uri: str) -> str:
    """Return what may be shown of a tracking URI: host and port, or a file; never a user's name or password."""
    parts = urlsplit(uri)
    if parts.scheme.startswith("sqlite"):
        return parts.path.removeprefix("/")
    return parts.netloc.rpartition("@")[2] or parts.path


def without_password(text: str) -> str:
    """Return a message of a library without the user names and passwords of the addresses in it."""
    return re.sub(r"://[^/@\s]+@", "://", text)
