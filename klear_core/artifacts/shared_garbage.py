"""Collect garbage in a shared store: seals of artifacts go to its trash, and a week later the objects of theirs alone.

Nodes may use the store meanwhile. A seal in the trash is taken back by whoever looks for the artifact. An object is
moved before it is deleted: a writer that relied on it notices after its seal and sends it again (`ObjectStore.seal`),
and the collector takes back what a new seal names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from klear_core.artifacts.bucket import Bucket
from klear_core.artifacts.garbage import STAMP, Ages
from klear_core.artifacts.index import Entry, catalog
from klear_core.artifacts.object_cache import object_key
from klear_core.artifacts.object_store import pointer_manifests, seal_key, trash_keys
from klear_core.errors import ArtifactError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedItem:
    """An object, or all objects below a prefix that ends at a `/`, that may go from a store."""

    what: str
    key: str
    size: int
    """Bytes that this item alone frees; of a seal those of its artifact, once its time in the trash is over."""
    why: str


def unreached_seals(entries: Mapping[str, Entry], kept: Mapping[str, str], ages: Ages) -> Iterator[SharedItem]:
    """Yield the seals of artifacts that nothing reaches and that are not young."""
    for name, entry in entries.items():
        if name not in kept and datetime.now(UTC) - entry.created_at >= ages.artifact:
            why = f"{entry.stage} of {entry.created_at:%Y-%m-%d}; no kept run needs it"
            yield SharedItem(what="artifact", key=seal_key(entry.kind, entry.fingerprint), size=entry.size, why=why)


def finished_work(bucket: Bucket, entries: Mapping[str, Entry]) -> Iterator[SharedItem]:
    """Yield copies of unfinished work, checkpoints included, whose artifact is sealed."""
    sizes: dict[str, int] = {}
    for key, about in bucket.facts("work/").items():
        folder = key.split("/")[1]
        sizes[folder] = sizes.get(folder, 0) + about.size
    for folder, size in sizes.items():
        kind, _, fingerprint = folder.rpartition("-")
        if f"{kind}/{fingerprint}" in entries:
            why = "its artifact is complete"
            yield SharedItem(what="unfinished work", key=f"work/{folder}/", size=size, why=why)


def unreferenced_objects(bucket: Bucket, entries: Mapping[str, Entry], ages: Ages) -> Iterator[SharedItem]:
    """Yield objects that no artifact, pointer or seal in the trash names, and that were written long ago.

    None while a seal cannot be read, such as one of a later version of Klear: its objects are not known.
    """
    try:
        named = _named(bucket, entries)
    except ArtifactError as e:
        log.warning("no object of %s is collected: %s", bucket.url, e)
        return
    for key, about in bucket.facts("objects/").items():
        is_old = about.written_at is not None and datetime.now(UTC) - about.written_at >= ages.work
        if is_old and key.rpartition("/")[2] not in named:
            yield SharedItem(what="object", key=key, size=about.size, why="no artifact has it")


def _named(bucket: Bucket, entries: Mapping[str, Entry]) -> set[str]:
    """Return the SHA-256 of all objects that are needed. ArtifactError if that is not known."""
    unread = {key.removeprefix("artifacts/") for key in bucket.keys("artifacts/")} - entries.keys()
    if unread:
        raise ArtifactError(f"{len(unread)} seals cannot be read, the first is {min(unread)}")
    named = {sha256 for entry in entries.values() for sha256 in entry.files}
    for manifest, own in pointer_manifests(bucket, ("pointers/", "trash/artifacts/")):
        given = manifest.given.files if manifest.given else ()
        named |= {own, *(file.sha256 for file in (*manifest.files, *given))}
    return named


def collect(bucket: Bucket, items: list[SharedItem], *, now: datetime) -> int:
    """Carry out a collection; return the number of objects that a writer needed meanwhile and that were taken back."""
    # Those of a collection that was killed before it deleted them or took them back are decided about now.
    moved = [key.rpartition("/")[2] for key in bucket.keys(_object_in_trash(""))]
    for item in items:
        match item.what:
            case "artifact":
                kind, fingerprint = item.key.split("/")[1:]
                seal = bucket.read(item.key)
                if seal is not None:
                    # In this order: a process that is killed in between leaves the artifact as it was.
                    bucket.write(f"{trash_keys(kind, fingerprint)}{now.strftime(STAMP)}", seal)
                    bucket.delete(item.key)
            case "unfinished work":
                for key in bucket.keys(item.key):
                    bucket.delete(key)
            case _:
                sha256 = item.key.rpartition("/")[2]
                moved.append(sha256)
                bucket.move(item.key, _object_in_trash(sha256))
    if not moved:
        return 0
    try:
        needed = _named(bucket, catalog(bucket)) & {*moved}
    except ArtifactError as e:
        log.warning("all objects are taken back: %s", e)
        needed = {*moved}
    for sha256 in needed:
        bucket.move(_object_in_trash(sha256), object_key(sha256))
    for sha256 in {*moved} - needed:
        bucket.delete(_object_in_trash(sha256))
    return len(needed)


def _object_in_trash(sha256: str) -> str:
    return f"trash/objects/{sha256}"


def empty_shared_trash(bucket: Bucket, *, older_than: timedelta) -> int:
    """Delete seals that have been in the trash for so long; return how many. A later collection takes their objects."""
    num = 0
    for key in bucket.keys("trash/artifacts/"):
        try:
            filled_at = datetime.strptime(key.rpartition("/")[2], STAMP).replace(tzinfo=UTC)
        except ValueError:
            continue  # nothing of ours
        if datetime.now(UTC) - filled_at >= older_than:
            bucket.delete(key)
            num += 1
    return num
