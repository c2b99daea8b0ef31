"""Read the seals of artifacts in an object store, and the manifests that they name.

A seal is one small object with the SHA-256 of the manifest, which is an object itself.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from klear_core.artifacts.bucket import Bucket
from klear_core.artifacts.manifest import (
    MANIFEST,
    MANIFEST_SUM,
    OUTSIDE_KINDS,
    ArtifactId,
    Manifest,
    lineage_folder,
    parse_manifest,
)
from klear_core.artifacts.object_cache import object_key, set_object_aside
from klear_core.errors import ArtifactError

log = logging.getLogger(__name__)


def seal_key(kind: str, fingerprint: str) -> str:
    """Return the key of an artifact's seal."""
    return f"artifacts/{kind}/{fingerprint}"


def pointer_key(kind: str, fingerprint: str) -> str:
    """Return the key of the seal of an artifact that only points to a model of one machine."""
    return f"pointers/{kind}/{fingerprint}"


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
