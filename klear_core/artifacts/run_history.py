"""Keep a record of every run in its workspace, and in the shared store, so that runs can be listed without a server.

A run writes `history/<run>/record.json` as it proceeds, and holds a lock beside it until its process ends. Nodes that
share only a store see `runs/<run>` there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue, ValidationError

from klear_core.artifacts.bucket import Bucket
from klear_core.artifacts.files import file_lock, is_locked, write_whole
from klear_core.artifacts.index import BucketFiles, FolderFiles, indexed
from klear_core.artifacts.shared import shared_url
from klear_core.config.settings import Settings
from klear_core.errors import ConfigError, meant, reporting

RUNS = "history"
"""Folder of a workspace with a folder for each run."""
RECORD, CONFIG, LOG, LOCK = "record.json", "config.json", "log", "lock"
SILENT_AFTER = timedelta(minutes=5)
"""Time without a sign of life of a run on another machine, which writes one every minute."""
GIVEN_UP_AFTER = timedelta(days=1)
"""Time after which a silent run on another machine counts as dead, whatever the clocks of the two machines say."""

RunState = Literal["running", "done", "failed", "cancelled", "killed", "silent"]
"""`killed`: its process ended without saying so; `silent`: on another machine, without a sign of life."""


class RunStage(Settings):
    """One stage that a run was asked for."""

    name: str
    kind: str
    fingerprint: str = ""
    """Its artifact; empty if that is only known once the stage runs."""
    num_gpus: int = Field(default=0, ge=0)
    """GPUs that the stage is configured to hold."""
    state: Literal["open", "made", "reused"] = "open"
    wall_s: float = Field(default=0.0, ge=0)
    """Seconds that this run spent on it; of one that runs those so far, counted once a minute."""


class RunScore(Settings):
    """avg@n of one benchmark, with its interval over other problems of the kind."""

    model: str
    """Stage that made the model."""
    benchmark: str
    num_samples: int
    value: float
    low: float
    high: float


class RunRecord(Settings):
    """The record that a run keeps of itself while it runs, and at its end."""

    run_id: str
    """Prefect's flow run id."""
    name: str
    profile: str
    state: RunState = "running"
    started_at: datetime
    updated_at: datetime
    host: str
    pid: int
    run_url: str = ""
    """Page on the Prefect server that the run is recorded on; empty without a server that outlives it."""
    has_worker: bool = False
    """Whether a worker of that server started it, which can cancel it and start it again."""
    selection: dict[str, JsonValue] = {}
    """The part of the pipeline that was asked for; empty for all of it."""
    settings: dict[str, str] = {}
    """Settings that are not the defaults, by dotted key, as JSON."""
    stages: tuple[RunStage, ...] = ()
    stage: str = ""
    """Stage that runs, or ran last."""
    done: int = 0
    total: int = 0
    """Units of that stage; 0 if not known."""
    note: str = ""
    left_s: float | None = None
    """Seconds left for that stage, by its pace."""
    scores: tuple[RunScore, ...] = ()
    """Scores so far, of the model that was scored last."""
    gpu_busy: float | None = None
    """Mean share of time in which the GPUs of the run's first machine computed; None without a GPU there."""
    price_per_gpu_hour: float | None = None
    why: str = ""
    """Reason why it waits or ended: the last warning, or the error."""
    report: str = ""
    """Path of its page."""

    @property
    def gpu_hours(self) -> float:
        """GPU-hours that its stages have held so far."""
        return sum(stage.num_gpus * stage.wall_s for stage in self.stages) / 3600

    @property
    def silence(self) -> timedelta:
        """Time since it wrote something."""
        return datetime.now(UTC) - self.updated_at

    @property
    def is_live(self) -> bool:
        """Whether it may still need its artifacts now: a silent one counts for a day."""
        return self.state == "running" or (self.state == "silent" and self.silence < GIVEN_UP_AFTER)


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The records of a workspace's runs, and of all nodes' runs if it has a shared store."""

    root: Path
    """The workspace."""
    bucket: Bucket | None = None

    @classmethod
    def of(cls, root: Path, *, store: str | None = None) -> RunHistory:
        """Return the history of a workspace and its shared store: by default the one that it was last used with."""
        url = shared_url(root / "artifacts") if store is None else store
        return cls(root.absolute(), Bucket(url) if url else None)

    def folder(self, run_id: str) -> Path:
        """Return the folder of a run on this machine."""
        return self.root / RUNS / run_id

    @contextmanager
    def begun(self, record: RunRecord, config: str) -> Iterator[None]:
        """Write the record and the complete config, and hold the run's lock for the block.

        A collection of garbage that starts later sees the artifacts that this run needs; an earlier one has ended.
        """
        folder = self.folder(record.run_id)
        with file_lock(folder / LOCK, on_wait=lambda _: None):
            with collection_lock(self.root):
                write_whole(folder / CONFIG, config.encode())
                self.write(record)
                self.share(record)
            yield

    def write(self, record: RunRecord) -> None:
        """Replace the record on this machine."""
        write_whole(self.folder(record.run_id) / RECORD, record.model_dump_json().encode())

    def share(self, record: RunRecord) -> None:
        """Replace the record in the shared store, if there is one."""
        if self.bucket is not None:
            with reporting("other machines do not see how far this run is"):
                self.bucket.write(f"runs/{record.run_id}", record.model_dump_json().encode())

    def records(self) -> list[RunRecord]:
        """Return all runs, newest first; a run of this machine whose process is gone is `killed`."""
        records = [self._now(record) for record in self._parsed().values() if record is not None]
        return sorted(records, key=lambda record: record.started_at, reverse=True)

    def unreadable(self) -> list[str]:
        """Return the ids of runs whose record this version of Klear cannot read."""
        return sorted(name for name, record in self._parsed().items() if record is None)

    def _parsed(self) -> dict[str, RunRecord | None]:
        found = {name: _parsed(content) for name, content in indexed(_Local(self.root / RUNS)).items()}
        if self.bucket is not None:
            shared = {name: _parsed(content) for name, content in indexed(_Shared(self.bucket, "runs")).items()}
            found = shared | found  # this machine knows more of its own
        return found

    def find(self, which: str) -> RunRecord:
        """Return the run whose id starts with `which`, or the newest of that name. ConfigError if there is none."""
        records = self.records()
        by_id = [record for record in records if which and record.run_id.startswith(which)]
        if len(by_id) > 1:
            raise ConfigError(f"{which!r} begins the ids of {len(by_id)} runs; give more of it")
        hits = by_id or [record for record in records if record.name == which]
        if not hits:
            names = [record.run_id[:8] for record in records[:20]]
            raise ConfigError(f"no run {which!r} in {self.root}; {meant(which, names, 'runs')}")
        return hits[0]

    def _now(self, record: RunRecord) -> RunRecord:
        if record.state != "running":
            return record
        if record.host == os.uname().nodename and self.folder(record.run_id).is_dir():
            if is_locked(self.folder(record.run_id) / LOCK):
                return record
            # Read again: it may have ended well between the two looks, and says so before it gives the lock back.
            latest = _parsed(_Local(self.root / RUNS).read(record.run_id) or {}) or record
            return latest.model_copy(update={"state": "killed"}) if latest.state == "running" else latest
        return record.model_copy(update={"state": "silent"}) if record.silence > SILENT_AFTER else record

    # ---- pins ----

    def pin(self, run_id: str, tag: str) -> None:
        """Keep all artifacts of a run from being collected, under a tag such as `paper`."""
        self._pins.mkdir(parents=True, exist_ok=True)
        write_whole(self._pins / run_id, tag.encode())
        if self.bucket is not None:
            self.bucket.write(f"pins/{run_id}", tag.encode())

    def unpin(self, run_id: str) -> None:
        """Let the artifacts of a run be collected again."""
        (self._pins / run_id).unlink(missing_ok=True)
        if self.bucket is not None:
            self.bucket.delete(f"pins/{run_id}")

    def pins(self) -> Mapping[str, str]:
        """Return the tags of pinned runs by run id."""
        found: dict[str, str] = {}
        if self._pins.is_dir():
            found = {path.name: path.read_text() for path in self._pins.iterdir() if not path.name.startswith(".")}
        if self.bucket is not None:
            keys = self.bucket.keys("pins/")
            found |= {key.removeprefix("pins/"): (self.bucket.read(key) or b"").decode() for key in keys}
        return found

    @property
    def _pins(self) -> Path:
        return self.root / RUNS / ".pins"


@contextmanager
def collection_lock(root: Path) -> Iterator[None]:
    """Keep runs of this workspace from beginning while garbage is moved, and the other way round."""
    with file_lock(root / "artifacts" / ".locks" / "collection", on_wait=lambda _: None):
        yield


def _parsed(fields: Mapping[str, Any]) -> RunRecord | None:
    try:
        return RunRecord.model_validate(fields)
    except ValidationError:
        return None  # of another version of Klear


class _Local(FolderFiles):
    """The records in a workspace's folder of runs."""

    def stamps(self) -> dict[str, str]:
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return {}
        found = {}
        for name in names:
            if name.startswith("."):
                continue
            try:
                about = os.stat(f"{self.root}/{name}/{RECORD}")
            except (FileNotFoundError, NotADirectoryError):
                continue  # its first record is being written, or this is no run
            found[name] = f"{about.st_mtime_ns}-{about.st_ino}"
        return found

    def read(self, name: str) -> dict[str, Any] | None:
        try:
            return _json((self.root / name / RECORD).read_bytes())
        except FileNotFoundError:
            return None  # its folder was deleted since it was listed


class _Shared(BucketFiles):
    """The records in a shared store."""

    def read(self, name: str) -> dict[str, Any] | None:
        return _json(self.bucket.read(f"runs/{name}") or b"")


def _json(content: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(content)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
