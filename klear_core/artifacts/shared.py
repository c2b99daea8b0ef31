"""Know the shared store of a workspace, keep sets of files in it, and copy a stage's unfinished work to it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.bucket import Bucket, transfer_all
from klear_core.artifacts.files import file_lock, sha256_of, write_whole
from klear_core.artifacts.store import BUILDING, SCRATCH, SHARED
from klear_core.errors import ArtifactError, reporting

log = logging.getLogger(__name__)

WORK_KEYS = "work"
"""Prefix of the copies of unfinished work."""
_NODE = ".node-id"


def shared_url(root: Path) -> str:
    """Return the URL of the shared store that artifacts below `root` were last built with; empty if none."""
    try:
        return (root / SHARED).read_text()
    except FileNotFoundError:
        return ""


def write_shared(root: Path, url: str) -> None:
    """Remember the URL of the shared store for code that is only given a folder."""
    root.mkdir(parents=True, exist_ok=True)
    write_whole(root / SHARED, url.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPlace:
    """The place in the shared store for copies of a working folder, or of a part of it."""

    url: str
    prefix: str
    root: Path
    """Folder of the artifacts on this node."""


def work_place(folder: Path) -> WorkPlace | None:
    """Return the place of the copies of a working folder or of a part of it; None without a shared store."""
    parts = folder.absolute().parts
    if BUILDING not in parts:
        return None
    index = parts.index(BUILDING)
    root = Path(*parts[:index])
    url = shared_url(root)
    if not url:
        return None
    return WorkPlace(url=url, prefix="/".join((WORK_KEYS, *parts[index + 1 :])), root=root)


def node_id(root: Path) -> str:
    """Return a unique name for this folder; processes that share the folder also share its locks."""
    path = root / _NODE
    with file_lock(root / ".locks" / "node-id", on_wait=lambda _: None):
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        return path.read_text()


class SealedFiles:
    """Files below one prefix of a store. They count once their seal is there, the object that names them.

    The seal is written last and deleted first, so what it names is complete.
    """

    def __init__(self, bucket: Bucket, prefix: str, *, seal: str) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._seal = self.key(seal)

    def key(self, name: str) -> str:
        """Return the key of a file."""
        return f"{self._prefix}/{name}"

    def seal(self) -> bytes | None:
        """Return the seal; None if the files do not count."""
        return self._bucket.read(self._seal)

    def write_seal(self, content: bytes) -> None:
        """Make the files count, after all were sent."""
        self._bucket.write(self._seal, content)

    def send(self, files: Iterable[Path]) -> None:
        """Send files under their own names."""
        transfer_all(lambda file: self._bucket.upload(file, self.key(file.name)), files)

    def fetch(self, files: Iterable[tuple[str, Path]]) -> None:
        """Fetch files by name, each to its path. ArtifactError if one is missing."""
        transfer_all(self._fetch_one, files)

    def delete(self) -> None:
        """Delete all files, their seal first."""
        # A deletion that is cut short then leaves nothing that looks complete.
        self._bucket.delete(self._seal)
        for key in self._bucket.keys(f"{self._prefix}/"):
            self._bucket.delete(key)

    def _fetch_one(self, file: tuple[str, Path]) -> None:
        name, path = file
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self._bucket.download(self.key(name), path):
            raise ArtifactError(f"{self._bucket.url}/{self.key(name)}: missing")


# ---- unfinished work ----


_INDEX = "index"
_MARKER = "shared"
"""File beside a working folder, with the URL of the store that an index of the folder was last written to or fetched
from; empty if an earlier version wrote it."""
_BEGAN = "began"
"""File beside a working folder, touched when a pass begins: older files are complete. It gives the time by the clock
of the file system, which also stamps the other files; that of this machine may be another."""
_TICK_S, _MOST_TICKS = 0.002, 1000
_SENT_SCRATCH = "shown"
"""The only scratch folder that is sent: answers of earlier RL steps, which no input or checkpoint can restore."""
_NOT_SENT = ("model", "adapter", "optimizer", "state", "unfinished")
"""Folders that are not sent: results written from the last checkpoint, and checkpoints, which their ranks send."""


@dataclass(frozen=True, slots=True)
class _Seen:
    size: int
    mtime_ns: int
    sha256: str


class WorkdirSync:
    """The copy in the store of one stage's working folder, so that another node can go on.

    A pass sends the files that are new or have changed, each named by its SHA-256, then the index that names all of
    them. Other nodes see only what the index names, so an interrupted pass changes nothing.
    """

    def __init__(self, bucket: Bucket, workdir: Path, *, node: str) -> None:
        self._bucket = bucket
        self._workdir = workdir
        self._marker = workdir.parent / _MARKER
        self._files = SealedFiles(bucket, f"{WORK_KEYS}/{workdir.parent.name}", seal=_INDEX)
        self._node = node
        self._seen: dict[str, _Seen] = {}
        """Files of the last index that this process has written."""
        self._attempt = 1
        self._stop = threading.Event()
        self._sending = threading.Lock()  # the timer's thread and the stage's both send

    def restore(self, attempt: int) -> int:
        """Put the newest work into the working folder, this node's or another's; return this attempt's number.

        If the store has no copy of work that this node once sent to it, the work was discarded because the stage is to
        be built again: the folder is emptied.
        """
        self._attempt = attempt
        content = self._files.seal()
        if content is None:
            # Work that went to another store was not discarded: the workspace has got a new one.
            if self._marker.exists() and self._marker.read_text() in ("", self._bucket.url):
                self._empty()
            return attempt
        index = json.loads(content)
        # No other node has worked on it since this one sent its work, so the folder here is at least as new.
        if index["node"] == self._node and self._marker.exists():
            return attempt
        self._empty()
        try:
            self._fetch({name: sha256 for name, (_size, sha256) in index["files"].items()})
        except ArtifactError as e:
            log.warning("unfinished work of another node cannot be used, so the stage begins anew: %s", e)
            self._empty()
            return attempt
        self._marker.write_text(self._bucket.url)
        self._attempt = index["attempt"] + 1
        log.info("going on with the unfinished work of attempt %d on another node", index["attempt"])
        return self._attempt

    @contextmanager
    def kept(self, every_s: float) -> Iterator[None]:
        """Send passes during the block, and a last one after it, unless the folder is published by then."""

        def keep() -> None:
            while not self._stop.wait(every_s):
                self._try_send()

        thread = threading.Thread(target=keep, name="unfinished work to the store", daemon=True)
        _kept[self._workdir] = self
        thread.start()
        try:
            yield
        finally:
            self._try_send()
            self._stop.set()
            thread.join()
            _kept.pop(self._workdir, None)

    def finish(self) -> None:
        """Send nothing from now on; return after a pass that is under way."""
        with self._sending:
            self._stop.set()

    def send(self) -> None:
        """Send what was written since the last pass.

        If a stage writes one file after another, the copy never has the later one alone: files that are written during
        a pass are left to the next pass. All that was written before the call is sent.
        """
        with self._sending:
            if self._workdir.is_dir() and not self._stop.is_set():
                self._send()

    def _send(self) -> None:
        before_ns = self._begin()
        found: dict[str, _Seen] = {}
        # `os.walk` passes over folders that are deleted meanwhile.
        walked = os.walk(self._workdir)
        for path in sorted(Path(parent, file) for parent, _, files in walked for file in files):
            name = path.relative_to(self._workdir).as_posix()
            if _is_sent(name) and path.is_file():
                seen = self._send_file(path, name, before_ns)
                if seen is not None:
                    found[name] = seen
        if not self._workdir.is_dir() or found == self._seen:
            return
        files = {name: (seen.size, seen.sha256) for name, seen in found.items()}
        index = {"node": self._node, "attempt": self._attempt, "files": files}
        self._files.write_seal(json.dumps(index).encode())
        self._marker.write_text(self._bucket.url)
        # Only now: until the new index is there, the former one needs the old files.
        needed = {seen.sha256 for seen in found.values()}
        for sha256 in {seen.sha256 for seen in self._seen.values()} - needed:
            self._bucket.delete(self._file_key(sha256))
        self._seen = found

    def clear(self) -> None:
        """Delete the copy, checkpoints included."""
        self._files.delete()

    def _try_send(self) -> None:
        # the stage itself can continue, and the next pass sends these files
        with reporting("unfinished work could not be copied to the store"):
            self.send()

    def _begin(self) -> int:
        """Return a time by the file system's clock, later than that of any file written before."""
        began = self._workdir.parent / _BEGAN
        began.touch()
        called_ns = began.stat().st_mtime_ns
        for _ in range(_MOST_TICKS):
            if began.stat().st_mtime_ns > called_ns:
                break
            time.sleep(_TICK_S)  # the clock goes in steps of some milliseconds
            began.touch()
        return began.stat().st_mtime_ns

    def _send_file(self, path: Path, name: str, before_ns: int) -> _Seen | None:
        """Send a file unless the last pass did; None if it is too new or gone, its former version if it is too new."""
        former = self._seen.get(name)
        try:
            stat = path.stat()
            if former is not None and (former.size, former.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
                return former
            if stat.st_mtime_ns >= before_ns:
                return former
            with path.open("rb") as f:
                content = f.read(stat.st_size)  # not more, if the stage appends to the file meanwhile
        except FileNotFoundError:
            return None
        sha256 = hashlib.sha256(content).hexdigest()
        self._bucket.write(self._file_key(sha256), content)
        return _Seen(size=len(content), mtime_ns=stat.st_mtime_ns, sha256=sha256)

    def _fetch(self, files: Mapping[str, str]) -> None:
        """Fetch files by name, each with its SHA-256."""
        self._files.fetch((f"files/{sha256}", self._workdir / name) for name, sha256 in files.items())
        for name, sha256 in files.items():
            if sha256_of(self._workdir / name) != sha256:
                raise ArtifactError(f"{self._bucket.url}/{self._file_key(sha256)} ({name}): altered")

    def _empty(self) -> None:
        shutil.rmtree(self._workdir)
        self._workdir.mkdir()
        self._marker.unlink(missing_ok=True)

    def _file_key(self, sha256: str) -> str:
        return self._files.key(f"files/{sha256}")


_kept: dict[Path, WorkdirSync] = {}
"""Copies of the working folders of the stages that run in this process."""


def send_work(path: Path) -> None:
    """Send the working folder that has `path` to the shared store, if there is one and the stage runs in this process.

    A loop calls this before a checkpoint: whoever continues from it has the metrics and answers of all steps it counts.
    """
    for workdir, work in list(_kept.items()):
        if path.absolute().is_relative_to(workdir):
            work.send()


def finish_work(workdir: Path) -> None:
    """Send nothing of a working folder from now on: it is about to be published."""
    if workdir.absolute() in _kept:
        _kept[workdir.absolute()].finish()


def _is_sent(name: str) -> bool:
    parts = name.split("/")
    if parts[0] == SCRATCH:
        return len(parts) > 2 and parts[1] == _SENT_SCRATCH
    return not any(part in _NOT_SENT for part in parts)
