"""Immutable, content-addressed results of stages, and what a store of them does (`store.py` has the local one).

An artifact is a folder that a stage wrote, with a manifest. It is addressed by its fingerprint: a hash of what it is made from
(kind, code version, settings that change the result, inputs), so that it can be computed before anything has run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlparse

from pydantic import JsonValue, ValidationError

from klear_core.artifacts.files import content_digest
from klear_core.artifacts.ledger import LedgerStep
from klear_core.config.base import Settings, result_settings
from klear_core.errors import ArtifactError

MANIFEST = "manifest.json"
MANIFEST_SUM = "manifest.json.sha256"


class ArtifactId(Settings):
    """What an artifact is called; enough to depend on it."""

    kind: str
    fingerprint: str


class ArtifactRef(ArtifactId):
    """A finished artifact: all that travels between tasks."""

    uri: str
    created_at: datetime
    counts: dict[str, int | float] = {}

    @property
    def path(self) -> Path:
        """The artifact's folder, for stores on a file system."""
        return Path(unquote(urlparse(self.uri).path))


class InputRecord(ArtifactId):
    """One input of an artifact, by the role it played (`model`, `traces`, or the path of a local file)."""

    role: str


class FileRecord(Settings):
    """One file of an artifact."""

    path: str
    """Relative to the artifact, with `/`."""
    size: int
    """Bytes."""
    sha256: str


class Manifest(Settings):
    """Everything one may want to know of an artifact years later, but its content."""

    kind: str
    fingerprint: str
    stage: str
    """The name of the stage in the pipeline that built it (`evaluate_rl`)."""
    code_version: int
    config: dict[str, JsonValue]
    """The stage's settings, all of them."""
    result_config: dict[str, JsonValue]
    """The settings that are part of the fingerprint."""
    inputs: tuple[InputRecord, ...]
    git_commit: str | None
    """None if the code does not come from a git checkout."""
    git_dirty: bool
    versions: dict[str, str]
    """Python and the libraries that matter."""
    seeds: dict[str, int]
    counts: dict[str, int | float]
    ledger: tuple[LedgerStep, ...]
    notes: tuple[str, ...]
    mlflow_run_id: str | None
    created_at: datetime
    attempts: int
    """Builds that were begun, the killed ones too."""
    wall_s: float
    """Seconds that the last attempt took."""
    files: tuple[FileRecord, ...] = ()
    """Filled in by the store."""


def fingerprint(kind: str, version: int, settings: Settings, inputs: Sequence[ArtifactId]) -> str:
    """20 hex digits over all that an artifact is made from; `runtime` settings do not count, the order of inputs does."""
    recipe = {
        "kind": kind,
        "version": version,
        "settings": result_settings(settings),
        "inputs": [[i.kind, i.fingerprint] for i in inputs],
    }
    text = json.dumps(recipe, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def file_ref(path: str, *, cache: Path | None = None) -> ArtifactId:
    """A local file or folder as an input, known by its content (see `content_digest`)."""
    return ArtifactId(kind="file", fingerprint=content_digest(Path(path), cache=cache))


class Slot(Protocol):
    """The right to build one artifact, or the artifact that is already there."""

    @property
    def ref(self) -> ArtifactRef | None:
        """The finished artifact, if there is one: it was there, or another process built it while we waited."""

    @property
    def workdir(self) -> Path:
        """Where to build; holds what an earlier, interrupted attempt left."""

    @property
    def attempt(self) -> int:
        """1 for the first build of this artifact."""

    def publish(self, manifest: Manifest) -> ArtifactRef:
        """Make the work visible, whole and at once."""


class ArtifactStore(Protocol):
    """Keeps artifacts by kind and fingerprint."""

    def find(self, kind: str, fingerprint: str) -> ArtifactRef | None:
        """The artifact, if it is there; whether its files are as they were is `verify`'s question."""

    def create(self, kind: str, fingerprint: str) -> AbstractContextManager[Slot]:
        """Take the right to build; without `publish` nothing becomes visible."""

    def verify(self, ref: ArtifactRef) -> None:
        """ArtifactError naming the file that is missing, altered or should not be there."""

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """The artifact's manifest."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an artifact's folder. ArtifactError if it is missing, altered or not a manifest."""
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        expected = (folder / MANIFEST_SUM).read_text().split()[:1]
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError) as e:
        raise ArtifactError(f"{path}: missing or unreadable, so this is not a finished artifact ({e})") from e
    if expected != [hashlib.sha256(content).hexdigest()]:
        raise ArtifactError(f"{path}: altered (its SHA-256 is not the one in {MANIFEST_SUM})")
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as e:
        raise ArtifactError(f"{path}: not a manifest of this version of Klear: {e}") from e


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and its checksum, in the format of `sha256sum`."""
    content = (manifest.model_dump_json(indent=2) + "\n").encode()
    (folder / MANIFEST).write_bytes(content)
    (folder / MANIFEST_SUM).write_text(f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n")
