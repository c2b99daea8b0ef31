"""Store artifacts in local folders that become visible by one rename, under a lock that ends with its process."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from klear_core.artifacts.files import DiskErrors, file_lock, hash_all, sync_path, sync_tree
from klear_core.artifacts.manifest import (
    MANIFEST,
    MANIFEST_SUM,
    ArtifactRef,
    FileRecord,
    Manifest,
    read_manifest,
    write_manifest,
)
from klear_core.errors import ArtifactError

log = logging.getLogger(__name__)

SCRATCH = "scratch"
BUILDING = ".building"
"""Folder of unfinished work."""
ATTEMPTS = "attempts"
"""File beside a working folder with the number of builds that were started."""
TRASH = ".trash"
"""Folder of what was collected as garbage, by time, each thing at its path below the workspace: see `garbage`."""
SHARED = ".shared-store"
"""File with the URL of the shared store that the artifacts of a folder were last built with."""

CheckedBy = Literal["content", "size"]
"""The comparison of an artifact with its manifest: all bytes, or only names and sizes."""


@dataclass(slots=True)
class LocalSlot:
    """The right to build one artifact of a LocalStore, or the artifact that already exists."""

    store: LocalStore
    kind: str
    fingerprint: str
    workdir: Path
    """The folder to build in; holds what an earlier, interrupted attempt left."""
    ref: ArtifactRef | None
    """The finished artifact, if it existed already or another process built it while this one waited."""
    attempt: int
    """Number of this attempt: 1 for the first build of this artifact."""

    def publish(self, manifest: Manifest) -> ArtifactRef:
        """Delete `scratch/`, hash and sync all files, write the manifest, then rename the folder to its final place.

        ArtifactError for links and special files.
        """
        assert self.ref is None, "a slot is published once"
        self.store.end_copies(self.workdir)
        shutil.rmtree(self.workdir / SCRATCH, ignore_errors=True)
        write_manifest(self.workdir, manifest.model_copy(update={"files": _describe_files(self.workdir)}))
        # content is flushed before the rename and the folder's name after it: a power cut leaves all or nothing visible
        sync_tree(self.workdir)
        target = self.store.folder(self.kind, self.fingerprint)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.workdir.rename(target)
        sync_path(target.parent)
        shutil.rmtree(self.workdir.parent)  # the number of attempts, which the manifest has now
        self.ref = self.store.seal(_ref_of(manifest, target))
        return self.ref


class LocalStore:
    """Artifacts in a local folder: `<kind>/<fingerprint>/`; unfinished work, locks and damaged ones are in dot folders.

    Everything is on one file system, so that publishing is a rename.
    """

    def __init__(self, root: Path, *, checked_by: CheckedBy = "content") -> None:
        self.root = root.absolute()
        self.checked_by = checked_by

    def folder(self, kind: str, fingerprint: str) -> Path:
        """Return the folder where an artifact is, or would be."""
        return self.root / kind / fingerprint

    def exists(self, kind: str, fingerprint: str) -> bool:
        """Return whether there is an artifact, intact or not; one in the trash counts, for `find` takes it back."""
        return self.folder(kind, fingerprint).is_dir() or self._in_trash(kind, fingerprint) is not None

    def find(self, kind: str, fingerprint: str) -> ArtifactRef | None:
        """Return the artifact, if it exists, also from the trash. ArtifactError if its manifest cannot be trusted."""
        folder = self.folder(kind, fingerprint)
        self._take_back(kind, fingerprint)
        if not folder.is_dir():
            return None
        manifest = read_manifest(folder)
        if (manifest.kind, manifest.fingerprint) != (kind, fingerprint):
            raise ArtifactError(
                f"{folder / MANIFEST}: describes {manifest.kind} {manifest.fingerprint}, not {kind} {fingerprint}"
            )
        return _ref_of(manifest, folder)

    def find_intact(self, kind: str, fingerprint: str) -> ArtifactRef | None:
        """Return the artifact after verification; a damaged one is set aside with a warning, and None is returned."""
        try:
            ref = self.find(kind, fingerprint)
            if ref is not None:
                self.verify(ref)
        except ArtifactError as e:
            kept = self.set_aside(kind, fingerprint, why="corrupt")
            log.warning("a damaged artifact is not used and will be built again: %s; it was moved to %s", e, kept)
            return None
        return ref

    def damage(self, kind: str, fingerprint: str) -> str:
        """Return what is wrong with an artifact, paths relative to it; empty if it is intact or missing.

        One that is in the trash is taken out of it; nothing else changes.
        """
        try:
            ref = self.find(kind, fingerprint)
            if ref is not None:
                self.verify(ref)
        except ArtifactError as e:
            return str(e).replace(f"{self.folder(kind, fingerprint)}/", "")
        return ""

    def workdir(self, kind: str, fingerprint: str) -> Path:
        """Return the folder where an artifact is built until it is complete."""
        return self._building(kind, fingerprint) / "work"

    def folders(self, kind: str = "*") -> list[Path]:
        """Return the folders of all finished artifacts, or of one kind."""
        # `*` also matches `.aside`, whose folders have manifests as well.
        return sorted(
            f.parent for f in self.root.glob(f"{kind}/*/{MANIFEST}") if not f.parent.parent.name.startswith(".")
        )

    @contextmanager
    def create(self, kind: str, fingerprint: str) -> Iterator[LocalSlot]:
        """Hold the artifact's lock for the block.

        A second builder waits here and then finds the artifact in its slot.
        """
        lock = self.root / ".locks" / f"{kind}-{fingerprint}"
        earlier_holders: list[str] = []

        def warn(holder: str) -> None:
            earlier_holders.append(holder)
            # a warning, so that a terminal shows it
            log.warning("%s %s is being built by %s: waiting for it", kind, fingerprint, holder)

        with DiskErrors(self.root), file_lock(lock, on_wait=warn):
            self._note_shared()
            if earlier_holders:
                log.warning("%s %s: no longer held by %s", kind, fingerprint, earlier_holders[0])
            # look only after the wait, because another process may have built the artifact meanwhile
            ref = self.find_intact(kind, fingerprint)
            building = self._building(kind, fingerprint)
            attempt = 0 if ref else _begin_attempt(building)
            yield LocalSlot(self, kind, fingerprint, self.workdir(kind, fingerprint), ref, attempt)

    def verify(self, ref: ArtifactRef) -> None:
        """Compare an artifact with its manifest. ArtifactError names the first file that is missing, altered or extra.

        Every byte is read by default. That costs seconds for gigabytes, while the stage that made them took hours and
        the stage that uses them reads them anyway; `checked_by="size"` is for stores on slow networks.
        """
        manifest = read_manifest(ref.path)
        expected = {f.path: f for f in manifest.files}
        present = _list_files(ref.path)
        for name in sorted(expected.keys() ^ set(present)):
            raise ArtifactError(f"{ref.path / name}: {'missing' if name in expected else 'not in the manifest'}")
        for name, file in expected.items():
            size = (ref.path / name).stat().st_size
            if size != file.size:
                raise ArtifactError(f"{ref.path / name}: has {size} bytes, the manifest says {file.size}")
        if self.checked_by == "content":
            hashes = hash_all([ref.path / name for name in expected])
            for (name, file), sha in zip(expected.items(), hashes, strict=True):
                if sha != file.sha256:
                    raise ArtifactError(
                        f"{ref.path / name}: altered (SHA-256 {sha[:12]}…, the manifest says {file.sha256[:12]}…)"
                    )

    def set_aside(self, kind: str, fingerprint: str, *, why: str) -> Path | None:
        """Move an artifact out of use, keep it as evidence, and delete work begun on it; returns its new place."""
        self._take_back(kind, fingerprint)  # else a stage that is to be made again would find it in the trash
        shutil.rmtree(self._building(kind, fingerprint), ignore_errors=True)
        folder = self.folder(kind, fingerprint)
        return self._move_aside(folder, why=why) if folder.exists() else None

    def seal(self, ref: ArtifactRef) -> ArtifactRef:
        """Return the artifact as it is: in a local store the rename made it visible."""
        return ref

    def end_copies(self, workdir: Path) -> None:
        """Do nothing: a local store has no copies of unfinished work."""

    def _in_trash(self, kind: str, fingerprint: str) -> Path | None:
        """Return where the newest copy of an artifact is in the trash; None if there is none."""
        found = [path for path in self.root.glob(f"{TRASH}/*/artifacts/{kind}/{fingerprint}") if path.is_dir()]
        return max(found, default=None)

    def _take_back(self, kind: str, fingerprint: str) -> None:
        """Move an artifact from the trash to its place, unless it is there."""
        folder = self.folder(kind, fingerprint)
        trashed = None if folder.is_dir() else self._in_trash(kind, fingerprint)
        if trashed is None:
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # another process was first
            trashed.rename(folder)
            log.info("%s %s was taken back from the trash", kind, fingerprint)

    def _note_shared(self) -> None:
        """Note for code that is only given a folder that there is no shared store."""
        (self.root / SHARED).unlink(missing_ok=True)

    def _move_aside(self, folder: Path, *, why: str) -> Path:
        target = self.root / ".aside" / f"{why}-{folder.parent.name}-{folder.name}-{time.time_ns()}"
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(target)
        return target

    def _building(self, kind: str, fingerprint: str) -> Path:
        return self.root / BUILDING / f"{kind}-{fingerprint}"


def _begin_attempt(building: Path) -> int:
    """Count this attempt, and create the working folder if it is missing."""
    (building / "work").mkdir(parents=True, exist_ok=True)
    counter = building / ATTEMPTS
    # Empty if the process that wrote it was killed.
    attempt = int(counter.read_text() or 0) + 1 if counter.exists() else 1
    counter.write_text(str(attempt))
    return attempt


def _list_files(folder: Path) -> list[str]:
    """Return every file of an artifact except its manifest, relative, sorted.

    ArtifactError for anything that is neither file nor folder.
    """
    names = []
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ArtifactError(f"{path}: a link or special file; an artifact must hold its own content")
        if path.is_file():
            names.append(path.relative_to(folder).as_posix())
    return sorted(n for n in names if n not in (MANIFEST, MANIFEST_SUM))


def _describe_files(folder: Path) -> tuple[FileRecord, ...]:
    names = _list_files(folder)
    hashes = hash_all([folder / n for n in names])
    return tuple(
        FileRecord(path=n, size=(folder / n).stat().st_size, sha256=h) for n, h in zip(names, hashes, strict=True)
    )


def _ref_of(manifest: Manifest, folder: Path) -> ArtifactRef:
    return ArtifactRef(
        kind=manifest.kind,
        fingerprint=manifest.fingerprint,
        uri=folder.absolute().as_uri(),
        created_at=manifest.created_at,
        counts=manifest.counts,
    )
