"""Keep fetched objects on this node by their SHA-256, and delete unused artifacts beyond a size limit.

Files of fetched artifacts are hard links to the cached objects, so an object that two artifacts share exists once.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from klear_core.artifacts.bucket import Bucket, transfer_all
from klear_core.artifacts.files import file_lock, sha256_of
from klear_core.artifacts.manifest import FileRecord
from klear_core.errors import ArtifactError

log = logging.getLogger(__name__)

_in_use: dict[Path, int] = {}
"""Open markers of artifacts that this process has used, by path; the kernel closes them when the process ends."""


def object_key(sha256: str) -> str:
    """Return the key of a content-addressed object."""
    return f"objects/{sha256[:2]}/{sha256}"


def set_object_aside(bucket: Bucket, sha256: str) -> str:
    """Move an altered object to where no upload takes it for the true content; returns its new key."""
    kept = f"aside/objects/{sha256}-{time.time_ns()}"
    bucket.move(object_key(sha256), kept)
    return kept


class ObjectCache:
    """Objects below `<root>/.objects`, and markers of the artifacts that were fetched below `<root>/.fetched`."""

    def __init__(self, root: Path, bucket: Bucket, *, max_gb: float | None) -> None:
        self.root = root
        self.bucket = bucket
        self.max_gb = max_gb

    def fetch(self, files: Sequence[FileRecord], folder: Path) -> None:
        """Put the files into `folder` as hard links to cached objects; fetch what this node does not have.

        ArtifactError names an object that is missing or whose content is not what its name says.
        """
        transfer_all(lambda file: self._link(file, folder), files)

    def mark_used(self, folder: Path, *, is_fetched: bool = False) -> None:
        """Protect a fetched artifact from eviction until this process ends, and note that it was used now."""
        marker = self._marker(folder)
        if is_fetched:
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
            # an eviction may have replaced the marker that this process holds
            if marker in _in_use:
                os.close(_in_use.pop(marker))
        try:
            os.utime(marker)
            if marker not in _in_use:
                fd = os.open(marker, os.O_RDWR)
                fcntl.flock(fd, fcntl.LOCK_SH)  # shared by all that use it; an eviction takes it alone
                _in_use[marker] = fd
        except FileNotFoundError:
            return  # built here: never evicted; or evicted by another process just now

    def evict(self) -> None:
        """Delete fetched artifacts that no process uses, the longest unused first, until `max_gb` is kept."""
        if self.max_gb is None:
            return
        markers = sorted((self.root / ".fetched").glob("*"), key=_last_used)
        total = self._cached_gb()
        for marker in markers:
            if total <= self.max_gb:
                return
            if self._remove(marker):
                self._drop_unlinked()
                total = self._cached_gb()
        self._drop_unlinked()

    def _link(self, file: FileRecord, folder: Path) -> None:
        target = folder / file.path
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        cached = self.root / ".objects" / file.sha256[:2] / file.sha256
        with self._object_lock(file.sha256):
            # a cached file may have been altered through one of its links
            if not cached.exists() or cached.stat().st_size != file.size or sha256_of(cached) != file.sha256:
                self._download(file, cached)
            # Within the lock: an object without other links may be evicted at any time.
            os.link(cached, target)

    def _download(self, file: FileRecord, cached: Path) -> None:
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_name(f"{cached.name}.part")
        key, found = object_key(file.sha256), ""
        try:
            # a first mismatch may be a failed transfer; after a second one the object itself counts as altered
            for _ in range(2):
                if not self.bucket.download(key, partial):
                    raise ArtifactError(f"{self.bucket.url}/{key}: missing; it is the content of {file.path}")
                found = sha256_of(partial)
                if found == file.sha256:
                    partial.replace(cached)
                    return
        finally:
            partial.unlink(missing_ok=True)  # of a failed transfer, perhaps for lack of room
        kept = set_object_aside(self.bucket, file.sha256)
        raise ArtifactError(
            f"{self.bucket.url}/{key}: altered (SHA-256 {found[:12]}…), so it was moved to {kept}; it was the content "
            f"of {file.path}"
        )

    def _remove(self, marker: Path) -> bool:
        """Delete a fetched artifact unless a process uses it; returns whether it is gone."""
        if marker in _in_use:
            return False
        try:
            fd = os.open(marker, os.O_RDWR)
        except FileNotFoundError:
            return True  # another process of this node evicts, too
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            # The marker is deleted under its lock: a process that waits for it in `mark_used` then finds the folder
            # gone, and fetches the artifact again.
            kind, _, fingerprint = marker.name.rpartition("-")
            shutil.rmtree(self.root / kind / fingerprint, ignore_errors=True)
            marker.unlink(missing_ok=True)
            log.info("evicted %s %s from this node; the store still has it", kind, fingerprint)
            return True
        finally:
            os.close(fd)

    def _drop_unlinked(self) -> None:
        """Delete cached objects that no artifact on this node links to."""
        for path in (self.root / ".objects").glob("*/*"):
            if path.suffix != ".part" and _num_links(path) == 1:
                # another process may be about to link to it
                with self._object_lock(path.name):
                    if _num_links(path) == 1:
                        path.unlink()

    def _cached_gb(self) -> float:
        return sum(_size(path) for path in (self.root / ".objects").glob("*/*")) / 1e9

    def _object_lock(self, sha256: str) -> AbstractContextManager[None]:
        # One lock for many objects: lock files are never deleted, so there must not be one for each.
        lock = self.root / ".locks" / f"object-{sha256[:2]}"
        on_wait = partial(log.info, "another process on this node fetches the same file (%s): waiting for it")
        return file_lock(lock, on_wait=on_wait)

    def _marker(self, folder: Path) -> Path:
        return self.root / ".fetched" / f"{folder.parent.name}-{folder.name}"


def _last_used(marker: Path) -> float:
    found = _stat(marker)
    return found.st_mtime if found else 0.0


def _num_links(path: Path) -> int:
    found = _stat(path)
    return found.st_nlink if found else 0


def _size(path: Path) -> int:
    found = _stat(path)
    return found.st_size if found else 0


def _stat(path: Path) -> os.stat_result | None:
    """Return what is known of a file; None if another process has deleted it since it was listed."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
