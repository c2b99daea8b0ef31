"""List all artifacts or runs of a folder or shared store from one small index, instead of reading every manifest.

The index is a cache: each entry has the stamp of the file that it was read from, so what is new, changed or gone is
seen by listing names. Whoever reads many files that it lacks writes it anew; a lost index costs time only.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from klear_core.artifacts.bucket import Bucket
from klear_core.artifacts.files import write_whole
from klear_core.artifacts.manifest import MANIFEST, ArtifactId, Manifest, read_manifest
from klear_core.artifacts.object_store import seal_key, sealed_manifest
from klear_core.artifacts.store import LocalStore
from klear_core.errors import ArtifactError, reporting

_VERSION = 1
_SLACK = 16
"""Files that may be read each time because the index lacks them; with more of them it is written anew."""


class IndexedFiles(Protocol):
    """Named small files at one place, and a place for their index."""

    def stamps(self) -> Mapping[str, str]:
        """Return all names, each with a text that changes whenever the file does."""

    def read(self, name: str) -> dict[str, Any] | None:
        """Return what the index keeps of a file; None if it is gone or damaged."""

    def read_index(self) -> bytes | None:
        """Return the index; None if there is none."""

    def write_index(self, content: bytes) -> None:
        """Replace the index as a whole."""


def indexed(files: IndexedFiles) -> dict[str, dict[str, Any]]:
    """Return the entry of every readable file; only files that the index lacks are read."""
    stamps = files.stamps()
    known = _entries(files.read_index())
    found: dict[str, dict[str, Any]] = {}
    num_read = 0
    for name, stamp in stamps.items():
        if name in known and known[name][0] == stamp:
            found[name] = known[name][1]
            continue
        num_read += 1
        entry = files.read(name)
        if entry is not None:
            found[name] = entry
    if num_read > _SLACK:
        entries = {name: [stamps[name], entry] for name, entry in found.items()}
        content = json.dumps({"version": _VERSION, "entries": entries}, separators=(",", ":")).encode()
        with reporting("the index could not be written, so that the next look takes as long", level=logging.DEBUG):
            files.write_index(content)
    return found


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """The files of a folder, with the index beside them; a subclass lists and reads them."""

    root: Path

    @property
    def _index(self) -> Path:
        return self.root / ".index.json"

    def read_index(self) -> bytes | None:
        """Return the index; None if there is none."""
        try:
            return self._index.read_bytes()
        except FileNotFoundError:
            return None

    def write_index(self, content: bytes) -> None:
        """Replace the index as a whole."""
        write_whole(self._index, content)


@dataclass(frozen=True, slots=True)
class BucketFiles:
    """The objects of a shared store whose keys have one prefix; a subclass reads them."""

    bucket: Bucket
    prefix: str

    def stamps(self) -> dict[str, str]:
        """Return the stamps of the objects by the rest of their keys."""
        keys = f"{self.prefix}/"
        return {key.removeprefix(keys): stamp for key, stamp in self.bucket.stamps(keys).items()}

    def read_index(self) -> bytes | None:
        """Return the index; None if there is none."""
        return self.bucket.read(f"index/{self.prefix}")

    def write_index(self, content: bytes) -> None:
        """Replace the index as a whole."""
        self.bucket.write(f"index/{self.prefix}", content)


def _entries(content: bytes | None) -> Mapping[str, tuple[str, dict[str, Any]]]:
    """Return stamp and entry by name; nothing for an index that is damaged or of another version."""
    try:
        index = json.loads(content or b"{}")
        entries: dict[str, tuple[str, dict[str, Any]]] = index["entries"] if index["version"] == _VERSION else {}
    except (ValueError, KeyError, TypeError):
        return {}
    return entries


# ---- artifacts ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An artifact as the index knows it, without opening it."""

    kind: str
    fingerprint: str
    stage: str
    created_at: datetime
    size: int
    """Bytes of its files, without the manifest."""
    counts: Mapping[str, float]
    inputs: tuple[str, ...]
    """The artifacts that it was made from, as `kind/fingerprint`."""
    files: tuple[str, ...] = ()
    """SHA-256 of its objects in a shared store, the manifest among them; empty in a folder."""

    @property
    def name(self) -> str:
        """The artifact as `kind/fingerprint`."""
        return f"{self.kind}/{self.fingerprint}"


def catalog(store: LocalStore | Bucket) -> dict[str, Entry]:
    """Return the intact artifacts of a store's folder on this machine, or those that are sealed in a shared store.

    Their keys are `kind/fingerprint`.
    """
    files: IndexedFiles = _Folder(store.root) if isinstance(store, LocalStore) else _Seals(store, "artifacts")
    return {
        name: Entry(
            **fields
            | {
                "created_at": datetime.fromisoformat(fields["created_at"]),
                "inputs": tuple(fields["inputs"]),
                "files": tuple(fields["files"]),
            }
        )
        for name, fields in indexed(files).items()
    }


def _entry(manifest: Manifest, *, files: tuple[str, ...] = ()) -> dict[str, Any]:
    given = manifest.given.files if manifest.given and files else ()
    entry = Entry(
        kind=manifest.kind,
        fingerprint=manifest.fingerprint,
        stage=manifest.stage,
        created_at=manifest.created_at,
        size=sum(file.size for file in manifest.files),
        counts=manifest.counts,
        inputs=tuple(f"{i.kind}/{i.fingerprint}" for i in manifest.inputs),
        files=(*files, *(file.sha256 for file in given)),
    )
    return asdict(entry) | {"created_at": entry.created_at.isoformat()}


class _Folder(FolderFiles):
    """The manifests of a local store's folder."""

    def stamps(self) -> dict[str, str]:
        stamps = {}
        # `os.scandir` and one `stat` an artifact: pathlib's glob takes three times as long.
        for kind in _folders(self.root):
            for folder in _folders(Path(kind.path)):
                try:
                    found = os.stat(f"{folder.path}/{MANIFEST}")
                except OSError:
                    continue  # no artifact, or moved meanwhile
                stamps[f"{kind.name}/{folder.name}"] = f"{found.st_mtime_ns}-{found.st_size}-{found.st_ino}"
        return stamps

    def read(self, name: str) -> dict[str, Any] | None:
        try:
            return _entry(read_manifest(self.root / name))
        except (ArtifactError, OSError):
            return None  # damaged: a run sets it aside, with a message


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted((e for e in found if not e.name.startswith(".") and e.is_dir()), key=lambda e: e.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


class _Seals(BucketFiles):
    """The sealed manifests of a shared store."""

    def read(self, name: str) -> dict[str, Any] | None:
        kind, _, fingerprint = name.partition("/")
        own = ArtifactId(kind=kind, fingerprint=fingerprint)
        key = seal_key(own.kind, own.fingerprint)
        seal = self.bucket.read(key)
        if seal is None:
            return None
        try:
            manifest, _ = sealed_manifest(self.bucket, kind, fingerprint, seal, f"{self.bucket.url}/{key}")
        except ArtifactError:
            return None  # damaged: the run that fetches it sets it aside, with a message
        own_object = seal.split()[0].decode()
        return _entry(manifest, files=(own_object, *(file.sha256 for file in manifest.files)))
