"""Give processes on other nodes their own copies of artifacts and working folders, and bring results back.

The driver's paths mean nothing on a node with another disk. A process there asks for its own: an artifact is fetched
from the shared store, a working folder is created.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.files import file_lock, sha256_of
from klear_core.artifacts.garbage import Ages, age_of
from klear_core.artifacts.manifest import ArtifactId, FileRecord
from klear_core.artifacts.object_store import ObjectStore
from klear_core.artifacts.shared import shared_url, write_shared
from klear_core.artifacts.store import BUILDING, SHARED, LocalStore
from klear_core.metrics import made_progress

log = logging.getLogger(__name__)

NODE_ROOT = "KLEAR_NODE_ROOT"
"""Environment variable of a node: its folder for artifacts; by default the same path as the driver's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePaths:
    """The driver's folder of artifacts, and the store through which other nodes get at them."""

    root: Path
    url: str

    def local_store(self) -> ObjectStore:
        """Return the shared store with this node's own folder."""
        return ObjectStore(self._local_root(), self.url)

    def local_path(self, path: Path) -> Path:
        """Return this node's copy of an artifact or of a file in it, or its own working folder.

        Paths outside the driver's folder are returned as they are. ArtifactError if the store lacks the artifact.
        """
        if not path.is_relative_to(self.root):
            return path
        relative = path.relative_to(self.root)
        if relative.parts[0] == BUILDING:
            return self._own_workdir(relative)
        kind, fingerprint, *rest = relative.parts
        store = self.local_store()
        # ranks and engines of one node start together
        with file_lock(store.root / ".locks" / f"fetch-{kind}-{fingerprint}", on_wait=lambda _: None):
            found = store.find(kind, fingerprint)
            own = ArtifactId(kind=kind, fingerprint=fingerprint)
            folder = found.path if found is not None else store.fetch_given(own)
        return folder.joinpath(*rest)

    def _own_workdir(self, relative: Path) -> Path:
        root = self._local_root()
        # Code on this node that is only given the folder finds the store by this file, as on the driver's.
        if shared_url(root) != self.url:
            write_shared(root, self.url)
        if root != self.root:  # the driver's own is ended by whoever made the stage
            self._end_old_work(root, beside=relative.parts[1])
        workdir = root / relative
        workdir.mkdir(parents=True, exist_ok=True)
        return workdir

    def _end_old_work(self, root: Path, *, beside: str) -> None:
        """Delete this node's working folders of other stages that are complete, or that nobody has touched for a week.

        Their driver is elsewhere, or gone. What a stage needs to go on is in the store.
        """
        for folder in sorted((root / BUILDING).glob("*")):
            kind, _, fingerprint = folder.name.rpartition("-")
            if folder.name == beside or not kind:
                continue
            is_complete = self.local_store().exists(kind, fingerprint)
            if is_complete or age_of(folder) >= Ages().work:
                log.info(
                    "deleting %s: %s", folder, "the stage is complete" if is_complete else "nobody goes on with it"
                )
                shutil.rmtree(folder, ignore_errors=True)  # another rank of this node may do the same

    def _local_root(self) -> Path:
        return Path(os.environ.get(NODE_ROOT) or self.root)


def remote_paths_of(path: Path) -> RemotePaths | None:
    """Return the home of an artifact, a file in it, or a working folder; None without a shared store."""
    for parent in path.absolute().parents:
        if (parent / SHARED).is_file():
            return RemotePaths(root=parent, url=shared_url(parent))
    return None


def share_given(artifact: Path) -> None:
    """Send the files of a model that was given by its folder to the shared store, so that other nodes can fetch it."""
    remote = remote_paths_of(artifact)
    if remote is not None:
        own = ArtifactId(kind=artifact.parent.name, fingerprint=artifact.name)
        ObjectStore(remote.root, remote.url).share_given(own)


def send_results(remote: RemotePaths | None, workdir: Path, names: Sequence[str]) -> tuple[FileRecord, ...]:
    """Send what a process on this node has written below these names of its working folder, for `fetch_results`."""
    if remote is None:
        return ()
    files = [file for name in names for file in sorted((workdir / name).rglob("*")) if file.is_file()]
    records = []
    for file in files:
        size, name = file.stat().st_size, file.relative_to(workdir).as_posix()
        records.append(FileRecord(path=name, size=size, sha256=sha256_of(file)))
        made_progress(f"checksum of {name}")  # else the driver may take the rank for stuck
    remote.local_store().upload(records, workdir)
    return tuple(records)


def fetch_results(remote: RemotePaths | None, files: Sequence[FileRecord], workdir: Path) -> None:
    """Put the results of a process on another node into the driver's working folder, each folder in one step."""
    if remote is None:
        return
    by_name: dict[str, list[FileRecord]] = {}
    for file in files:
        by_name.setdefault(file.path.split("/")[0], []).append(file)
    incoming = workdir.parent / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    cache = ObjectStore(remote.root, remote.url).cache
    for name, records in by_name.items():
        # A process that shares the driver's disk has written it right here.
        if not (workdir / name).exists():
            cache.fetch(records, incoming)
            (incoming / name).rename(workdir / name)


def store_of(artifact: Path) -> LocalStore:
    """Return the store of an artifact's folder, with the shared store that its workspace was used with last."""
    root = artifact.absolute().parents[1]
    url = shared_url(root)
    if not url:
        return LocalStore(root)
    from klear_core.artifacts.object_store import ObjectStore

    return ObjectStore(root, url)
