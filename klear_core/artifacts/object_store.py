"""Share artifacts among nodes by an object store; each node reads them from its own disk.

In the store, every file is an object named by its SHA-256 (`objects/`), the manifest too. `artifacts/<kind>/
<fingerprint>` is the seal: one small object with the SHA-256 of the manifest, written last and only if there is none.
An artifact exists if its seal does, so half-uploaded ones are never visible, and of two writers one wins. A seal that
was set aside is kept in `aside/`: copies on other nodes that have it are out of use as well.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from klear_core.artifacts.bucket import Bucket, LeaseTimes, lease, transfer_all
from klear_core.artifacts.files import DiskErrors, sha256_of
from klear_core.artifacts.manifest import (
    MANIFEST,
    MANIFEST_SUM,
    OUTSIDE_KINDS,
    POINTER,
    ArtifactId,
    ArtifactRef,
    FileRecord,
    Manifest,
    lineage_folder,
    parse_manifest,
    read_manifest,
)
from klear_core.artifacts.object_cache import ObjectCache, object_key, set_object_aside
from klear_core.artifacts.shared import WorkdirSync, finish_work, node_id, write_shared
from klear_core.artifacts.store import ATTEMPTS, CheckedBy, LocalSlot, LocalStore
from klear_core.errors import ArtifactError

log = logging.getLogger(__name__)

_CORRUPT = "corrupt"
"""Why an artifact was set aside: it is damaged, and an intact copy on a node may replace it."""


class ObjectStore(LocalStore):
    """Artifacts in a bucket, with a folder of this node for those that it built or fetched.

    Stages are built in the local folder and read from it.
    """

    def __init__(
        self,
        root: Path,
        url: str,
        *,
        checked_by: CheckedBy = "content",
        cache_gb: float | None = None,
        times: LeaseTimes | None = None,
        share_work_s: float = 60.0,
    ) -> None:
        super().__init__(root, checked_by=checked_by)
        self.bucket = Bucket(url)
        self.cache = ObjectCache(self.root, self.bucket, max_gb=cache_gb)
        self._times = times or LeaseTimes()
        self._share_work_s = share_work_s

    def exists(self, kind: str, fingerprint: str) -> bool:
        """Return whether the artifact is sealed in the store, without fetching it."""
        if self._is_pointer(kind, fingerprint):
            return True
        is_sealed = self.bucket.read(seal_key(kind, fingerprint)) is not None
        return is_sealed or bool(self.bucket.keys(trash_keys(kind, fingerprint)))

    def find(self, kind: str, fingerprint: str) -> ArtifactRef | None:
        """Return the artifact, fetched to this node if it is not there yet; None if it is not sealed in the store."""
        if self._is_pointer(kind, fingerprint):
            return super().find(kind, fingerprint)
        seal = self.bucket.read(seal_key(kind, fingerprint)) or self._seal_from_trash(kind, fingerprint)
        if seal is None:
            return None
        folder = self.folder(kind, fingerprint)
        self._take_back(kind, fingerprint)
        found = None
        while found is None:  # another process of this node may evict it before it is marked as used
            self.cache.mark_used(folder)  # before the folder is read, because another process may be evicting it
            if folder.is_dir() and not has_seal(folder, seal):
                # another node sealed its own build, first or after a rerun, and all nodes must use the same one
                self._move_aside(folder, why="replaced")
            if not folder.is_dir():
                with DiskErrors(self.root):
                    self._fetch(kind, fingerprint, seal)
            found = super().find(kind, fingerprint)
        return found

    def find_intact(self, kind: str, fingerprint: str) -> ArtifactRef | None:
        """Return the verified artifact; a damaged copy on this node is fetched again, a damaged one in the store is
        set aside there."""
        if self._is_pointer(kind, fingerprint):
            return super().find_intact(kind, fingerprint)
        folder = self.folder(kind, fingerprint)
        if self.damage(kind, fingerprint):
            kept = self._move_aside(folder, why="corrupt")
            log.warning("a damaged copy of %s %s is fetched again; it was moved to %s", kind, fingerprint, kept)
        if folder.is_dir() and not self.exists(kind, fingerprint):
            return self._seal_or_move_aside(kind, fingerprint)
        try:
            # the copy on this node is intact or was moved away, and fetched files are compared with their hashes
            return self.find(kind, fingerprint)
        except ArtifactError as e:
            self.set_aside(kind, fingerprint, why=_CORRUPT)
            log.warning("a damaged artifact is not used and will be built again: %s", e)
            return None

    def damage(self, kind: str, fingerprint: str) -> str:
        """Return what is wrong with this node's copy; empty if it is intact or would be fetched."""
        folder = self.folder(kind, fingerprint)
        if not folder.is_dir():
            return ""
        try:
            super().verify(self._local(kind, fingerprint))
        except ArtifactError as e:
            return str(e).replace(f"{folder}/", "")
        return ""

    def verify(self, ref: ArtifactRef) -> None:
        """Compare an artifact with its manifest, and with the one that is sealed in the store.

        ArtifactError also if another node has made the artifact again or has set it aside.
        """
        super().verify(ref)
        if self._is_pointer(ref.kind, ref.fingerprint):
            return
        seal = self.bucket.read(seal_key(ref.kind, ref.fingerprint))
        if seal is None or not has_seal(ref.path, seal):
            raise ArtifactError(f"{ref.path}: no longer the artifact that is sealed in {self.bucket.url}")

    @contextmanager
    def create(self, kind: str, fingerprint: str) -> Iterator[LocalSlot]:
        """Hold the artifact's lock on this node and its lease in the store for the block.

        A second builder, on this node or another, waits here and then finds the artifact in its slot.
        """
        with super().create(kind, fingerprint) as slot:
            if slot.ref is not None:
                yield slot
                return
            warn = partial(log.warning, "%s %s is being built by %s: waiting for it", kind, fingerprint)
            with self.held(f"{kind}-{fingerprint}", on_wait=warn):
                # look only after the wait, because another node may have built the artifact meanwhile
                slot.ref = self.find_intact(kind, fingerprint)
                if slot.ref is not None:
                    shutil.rmtree(self._building(kind, fingerprint), ignore_errors=True)
                    yield slot
                    return
                work = WorkdirSync(self.bucket, self.workdir(kind, fingerprint), node=node_id(self.root))
                # The work of another node is continued, and so is its count of attempts.
                slot.attempt = work.restore(slot.attempt)
                (slot.workdir.parent / ATTEMPTS).write_text(str(slot.attempt))
                with work.kept(self._share_work_s):
                    yield slot
                # Without an artifact, the copy stays for the next attempt, on this node or another.
                if slot.ref is not None:
                    work.clear()

    def held(self, name: str, *, on_wait: Callable[[str], None]) -> AbstractContextManager[None]:
        """Hold the lease `name` among all nodes; the caller excludes other processes of this node by a lock."""
        return lease(self.bucket, f"leases/{name}", self._times, node=node_id(self.root), on_wait=on_wait)

    def seal(self, ref: ArtifactRef) -> ArtifactRef:
        """Upload an artifact and make it visible to all nodes; returns the one that is sealed, which may be another
        node's.

        Objects that are already there are not sent again, so an interrupted upload resumes. If the artifact only points
        to a model of this machine, its manifest is sent, from which other nodes read the lineage of later artifacts.
        """
        manifest, folder = read_manifest(ref.path), ref.path
        seal = (folder / MANIFEST_SUM).read_bytes()
        if self._is_pointer(ref.kind, ref.fingerprint):
            self._upload(manifest, folder)
            self.bucket.write(pointer_key(ref.kind, ref.fingerprint), seal)
            return ref
        # The seal comes last, so what it names is complete. If another node was first, its artifact is used here too.
        self._upload(manifest, folder)
        self.bucket.create(seal_key(ref.kind, ref.fingerprint), seal)
        self._upload(manifest, folder)  # objects that were there before may have been collected before the seal
        sealed = self.find(ref.kind, ref.fingerprint)
        assert sealed is not None, "a seal was written or found"
        return sealed

    def set_aside(self, kind: str, fingerprint: str, *, why: str) -> Path | None:
        """Move an artifact out of use in the store and on this node; returns its new place on this node."""
        key = seal_key(kind, fingerprint)
        seal = self.bucket.read(key) or self._seal_from_trash(kind, fingerprint)
        if seal is not None:
            # In this order: a process that is killed in between leaves the artifact as it was.
            self.bucket.write(f"{aside_keys(kind, fingerprint)}{why}-{time.time_ns()}", seal)
            self.bucket.delete(key)
        WorkdirSync(self.bucket, self.workdir(kind, fingerprint), node=node_id(self.root)).clear()
        return super().set_aside(kind, fingerprint, why=why)

    def upload(self, files: Iterable[FileRecord], folder: Path) -> int:
        """Send files of a folder as objects, those that are not there yet; returns the bytes sent."""
        # equal files are one object
        unique = {file.sha256: file for file in files}
        return sum(transfer_all(lambda file: self._send(file, folder), unique.values()))

    def share_given(self, own: ArtifactId) -> None:
        """Send the files of a model that this node's artifact points to; nothing for any other artifact."""
        folder = self.folder(own.kind, own.fingerprint)
        given = read_manifest(folder).given
        if self._is_pointer(own.kind, own.fingerprint) and given is not None:
            self.upload(given.files, Path(json.loads((folder / POINTER).read_text())["path"]))

    def fetch_given(self, own: ArtifactId) -> Path:
        """Return a folder of this node with a model that is given on another; ArtifactError if the store lacks it."""
        # Not in the artifact's own folder: there a pointer counts as a model of this machine (`_is_pointer`).
        folder = self.root / ".given" / own.kind / own.fingerprint
        found = manifest_in_store(self.bucket, own)
        if found is None or found[0].given is None:
            raise ArtifactError(f"{own.kind}/{own.fingerprint}: not in {self.bucket.url}, and not on this node")
        manifest, given = found[0], found[0].given
        self.cache.fetch(manifest.files, folder)  # the pointer, with its settings
        self.cache.fetch(given.files, folder / "model")
        return folder

    def _seal_or_move_aside(self, kind: str, fingerprint: str) -> ArtifactRef | None:
        """Seal this node's artifact, which is not sealed in the store, unless it was set aside there.

        Such an artifact was built here before the workspace had a store, its upload was interrupted, its objects were
        corrupted, or it is a copy of an artifact that another node builds again.
        """
        folder = self.folder(kind, fingerprint)
        withdrawn = [key for key in self.bucket.keys(aside_keys(kind, fingerprint)) if f"/{_CORRUPT}-" not in key]
        if any(has_seal(folder, self.bucket.read(key) or b"") for key in withdrawn):
            kept = self._move_aside(folder, why="replaced")
            log.warning("%s %s is made again: the old one of this node was moved to %s", kind, fingerprint, kept)
            return None
        return self.seal(self._local(kind, fingerprint))

    def _seal_from_trash(self, kind: str, fingerprint: str) -> bytes | None:
        """Seal an artifact again that is in the store's trash; return its seal, None if it is not there."""
        keys = self.bucket.keys(trash_keys(kind, fingerprint))
        seal = self.bucket.read(keys[-1]) if keys else None
        if seal is not None:
            self.bucket.create(seal_key(kind, fingerprint), seal)
            for key in keys:
                self.bucket.delete(key)
            log.info("%s %s was taken back from the trash of the store", kind, fingerprint)
        return seal

    def end_copies(self, workdir: Path) -> None:
        """Copy nothing more of the folder, whose files are about to move."""
        finish_work(workdir)

    def _note_shared(self) -> None:
        write_shared(self.root, self.bucket.url)

    def _is_pointer(self, kind: str, fingerprint: str) -> bool:
        """Return whether this node's artifact only points to files of this machine, which means nothing on another."""
        return (self.folder(kind, fingerprint) / POINTER).exists()

    def _local(self, kind: str, fingerprint: str) -> ArtifactRef:
        ref = super().find(kind, fingerprint)
        assert ref is not None, "the caller has seen its folder"
        return ref

    def _upload(self, manifest: Manifest, folder: Path) -> None:
        started, path = time.monotonic(), folder / MANIFEST
        own = FileRecord(path=MANIFEST, size=path.stat().st_size, sha256=sha256_of(path))
        sent = self.upload((*manifest.files, own), folder)
        log.info(
            "uploaded %s %s: %.1f MB sent in %.1f s",
            manifest.kind,
            manifest.fingerprint,
            sent / 1e6,
            time.monotonic() - started,
        )

    def _send(self, file: FileRecord, folder: Path) -> int:
        """Upload one file unless its object is there; returns the bytes sent.

        The size is compared too, because an upload may be cut short in stores whose uploads are not atomic.
        """
        key = object_key(file.sha256)
        if self.bucket.size(key) == file.size:
            return 0
        self.bucket.upload(folder / file.path, key)
        return file.size

    def _fetch(self, kind: str, fingerprint: str, seal: bytes) -> None:
        """Fetch an artifact's files, and the manifests of all that it was made from, to this node."""
        write_shared(self.root, self.bucket.url)
        place = f"{self.bucket.url}/{seal_key(kind, fingerprint)}"
        manifest, content = sealed_manifest(self.bucket, kind, fingerprint, seal, place)
        fetch_lineage(self.bucket, self.root, manifest, set())
        started = time.monotonic()
        # Each process fetches into a folder of its own; the first to finish renames it to the artifact's place.
        partial = self.root / ".fetching" / f"{kind}-{fingerprint}-{time.time_ns()}"
        partial.mkdir(parents=True)
        try:
            self.cache.fetch(manifest.files, partial)
            (partial / MANIFEST).write_bytes(content)
            (partial / MANIFEST_SUM).write_bytes(seal)
            self._move_into_place(partial, self.folder(kind, fingerprint))
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        megabytes = sum(file.size for file in manifest.files) / 1e6
        log.info("fetched %s %s: %.1f MB in %.1f s", kind, fingerprint, megabytes, time.monotonic() - started)
        self.cache.mark_used(self.folder(kind, fingerprint), is_fetched=True)
        self.cache.evict()

    @staticmethod
    def _move_into_place(partial: Path, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            # another process of this node fetched the same artifact meanwhile


# ---- seals ----
# Read the seals of artifacts in an object store, and the manifests that they name.
#
# A seal is one small object with the SHA-256 of the manifest, which is an object itself.


def seal_key(kind: str, fingerprint: str) -> str:
    """Return the key of an artifact's seal."""
    return f"artifacts/{kind}/{fingerprint}"


def pointer_key(kind: str, fingerprint: str) -> str:
    """Return the key of the seal of an artifact that only points to a model of one machine."""
    return f"pointers/{kind}/{fingerprint}"


def trash_keys(kind: str, fingerprint: str) -> str:
    """Return the prefix of the seals of an artifact that was collected as garbage, each under the time."""
    return f"trash/artifacts/{kind}/{fingerprint}/"


def pointer_manifests(bucket: Bucket, prefixes: Iterable[str]) -> Iterator[tuple[Manifest, str]]:
    """Yield the manifests that the seals below these prefixes name, each with the SHA-256 of its object."""
    for key in [key for prefix in prefixes for key in bucket.keys(prefix)]:
        kind, fingerprint = [part for part in key.split("/") if part not in ("pointers", "trash", "artifacts")][:2]
        seal = bucket.read(key)
        if seal is not None:
            manifest, content = sealed_manifest(bucket, kind, fingerprint, seal, f"{bucket.url}/{key}")
            yield manifest, hashlib.sha256(content).hexdigest()


def aside_keys(kind: str, fingerprint: str) -> str:
    """Return the prefix of the seals that were set aside, each under the reason and the time."""
    return f"aside/{kind}/{fingerprint}/"


def has_seal(folder: Path, seal: bytes) -> bool:
    """Return whether the artifact in this folder is the one that was sealed.

    The seal is a copy of the manifest's checksum file; its first word is the checksum.
    """
    try:
        return (folder / MANIFEST_SUM).read_bytes().split()[:1] == seal.split()[:1]
    except FileNotFoundError:
        return False


def sealed_manifest(bucket: Bucket, kind: str, fingerprint: str, seal: bytes, place: str) -> tuple[Manifest, bytes]:
    """Return the manifest that the seal at `place` names, parsed and as it is."""
    sha256 = (seal.split() or [b""])[0].decode(errors="replace")
    content = bucket.read(object_key(sha256)) if len(sha256) == 64 else None
    if content is None:
        raise ArtifactError(f"{place}: names no manifest that is in the store")
    if hashlib.sha256(content).hexdigest() != sha256:
        kept = set_object_aside(bucket, sha256)
        raise ArtifactError(
            f"{bucket.url}/{object_key(sha256)}: altered, so it was moved to {kept}; it was the manifest of {place}"
        )
    manifest = parse_manifest(content, place)
    if (manifest.kind, manifest.fingerprint) != (kind, fingerprint):
        raise ArtifactError(f"{place}: describes {manifest.kind} {manifest.fingerprint}, not {kind} {fingerprint}")
    return manifest, content


def manifest_in_store(bucket: Bucket, record: ArtifactId) -> tuple[Manifest, bytes, bytes] | None:
    """Return the manifest of an artifact or of a pointer to a model, parsed and as it is, and its seal."""
    # A model that is given by its folder has no seal, only the pointer of the node that has the folder.
    for key in (seal_key(record.kind, record.fingerprint), pointer_key(record.kind, record.fingerprint)):
        seal = bucket.read(key)
        if seal is not None:
            place = f"{bucket.url}/{key}"
            return *sealed_manifest(bucket, record.kind, record.fingerprint, seal, place), seal
    return None


def fetch_lineage(bucket: Bucket, root: Path, manifest: Manifest, seen: set[Path]) -> None:
    """Fetch the manifests of an artifact's ancestors to this node, as far as they are in the store.

    `seen` holds the folders of those that were fetched already.
    """
    for record in manifest.inputs:
        folder = lineage_folder(root, record)
        if record.kind in OUTSIDE_KINDS or folder in seen:
            continue
        seen.add(folder)
        try:
            found = manifest_in_store(bucket, record)
        except ArtifactError as e:
            # The artifact itself is whole. Whoever follows the lineage finds this ancestor missing.
            log.warning("%s %s, from which an artifact was made, is damaged: %s", record.kind, record.fingerprint, e)
            continue
        if found is None:
            continue
        parent, content, seal = found
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST_SUM).write_bytes(seal)
        (folder / MANIFEST).write_bytes(content)
        fetch_lineage(bucket, root, parent, seen)
