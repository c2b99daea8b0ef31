"""Define the records that are sent to MLflow about a run; those not received yet are files in the workspace."""

from __future__ import annotations

import logging
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from pydantic import ValidationError

from klear_core.artifacts.manifest import ArtifactRef, InputRecord
from klear_core.config.settings import Settings

log = logging.getLogger(__name__)

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
