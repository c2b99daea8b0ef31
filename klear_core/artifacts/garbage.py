"""Find what nothing needs in a workspace, move it to a trash on the same disk, and take it back or delete it later.

An artifact is kept if a root reaches it: a root, what that was made from, and so on. A collection holds a lock that
every beginning run takes for its first record, so the run's artifacts are either roots, or were moved before the run
looked for them. A store finds what is in the trash and takes it back, so nothing in the trash is made again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from klear_core.artifacts.index import Entry
from klear_core.artifacts.store import BUILDING, TRASH
from klear_core.errors import reporting

log = logging.getLogger(__name__)

STAMP = "%Y%m%dT%H%M%S%fZ"
"""Name of a folder in the trash: the time in UTC when it was filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A file or folder of a workspace that may go."""

    what: str
    """Kind of thing, for people: `artifact`, `unfinished work`."""
    path: Path
    size: int
    """Bytes."""
    why: str
    name: str = ""
    """Artifact that it is, or is work on, as `kind/fingerprint`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """Ages below which things are kept, whatever else holds."""

    artifact: timedelta = timedelta(days=1)
    """Long enough for work that keeps no record of its run, such as `klear rejudge`."""
    work: timedelta = timedelta(days=7)
    """Age of unfinished work, set-aside artifacts and reports of failed runs; also the time in the trash."""


def reached(entries: Mapping[str, Entry], roots: Mapping[str, str]) -> dict[str, str]:
    """Return all artifacts that the roots (with the reasons to keep them) need, each with its first reason."""
    kept: dict[str, str] = {}
    for root, why in roots.items():
        todo = [root]
        while todo:
            name = todo.pop()
            if name not in kept:
                kept[name] = why
                todo += entries[name].inputs if name in entries else ()
    return kept


def unreached(root: Path, entries: Mapping[str, Entry], kept: Mapping[str, str], ages: Ages) -> Iterator[Item]:
    """Yield the artifacts of a workspace that nothing reaches and that are not young."""
    now = datetime.now(UTC)
    for name, entry in entries.items():
        if name not in kept and now - entry.created_at >= ages.artifact:
            path = root / "artifacts" / name
            why = f"{entry.stage} of {entry.created_at:%Y-%m-%d}; no kept run needs it"
            yield Item(what="artifact", path=path, size=entry.size, why=why, name=name)


def leftovers(root: Path, entries: Mapping[str, Entry], roots: Mapping[str, str], ages: Ages) -> Iterator[Item]:
    """Yield what is no artifact and of no use: work on finished or given-up stages, and what was set aside long ago."""
    artifacts = root / "artifacts"
    for path in _in(artifacts / BUILDING):
        kind, _, fingerprint = path.name.rpartition("-")
        name = f"{kind}/{fingerprint}"
        if name in entries:
            yield _item("unfinished work", path, "its artifact is complete", name=name)
        elif name not in roots and age_of(path) >= ages.work:
            yield _item("unfinished work", path, f"untouched for {age_of(path).days} days, and no kept run", name=name)
    for folder, what in ((".aside", "set aside"), (".fetching", "partial copy")):
        for path in _in(artifacts / folder):
            if age_of(path) >= ages.work:
                yield _item(what, path, f"{age_of(path).days} days old")


def reports_of_failures(root: Path, kept_runs: Sequence[str], ages: Ages) -> Iterator[Item]:
    """Yield the reports of failed runs, without those of kept runs and young ones."""
    for path in _in(root / "failed"):
        if path.name not in kept_runs and age_of(path) >= ages.work:
            yield _item("failed report", path, f"{age_of(path).days} days old")


def results_without_artifact(root: Path, going: Sequence[Item], entries: Mapping[str, Entry]) -> Iterator[Item]:
    """Yield Prefect's cached results of artifacts that are gone or go now."""
    left = entries.keys() - {item.name for item in going}
    for path in _in(root / "prefect-results"):
        kind, _, fingerprint = path.name.rpartition("-")
        if f"{kind}/{fingerprint}" not in left and age_of(path) >= timedelta(days=1):
            yield _item("cached result", path, "its artifact is gone", name=f"{kind}/{fingerprint}")


def _item(what: str, path: Path, why: str, *, name: str = "") -> Item:
    return Item(what=what, path=path, size=bytes_in(path), why=why, name=name)


def _in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def age_of(path: Path) -> timedelta:
    """Return the time since anything in a file or folder was written last."""
    newest = max((_mtime(Path(parent)) for parent, _, _ in os.walk(path)), default=_mtime(path))
    for parent, _, names in os.walk(path):
        newest = max([newest, *(_mtime(Path(parent, name)) for name in names)])
    return datetime.now(UTC) - datetime.fromtimestamp(newest, UTC)


def _mtime(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def bytes_in(path: Path) -> int:
    """Return the bytes of a file or of all files below a folder; hard links count once, what is gone counts nothing."""
    seen: dict[tuple[int, int], int] = {}
    files = [Path(parent, name) for parent, _, names in os.walk(path) for name in names]
    if path.is_file():
        files = [path]
    for file in files:
        try:
            found = file.lstat()
        except FileNotFoundError:
            continue
        seen[found.st_dev, found.st_ino] = found.st_size
    return sum(seen.values())


# ---- the trash ----


def move_to_trash(root: Path, items: Sequence[Item], *, now: datetime) -> list[Item]:
    """Move items to the trash and return those that were moved; an artifact that a process builds stays.

    The caller holds `collection_lock`, and has looked for roots since it took it.
    """
    stamp = root / "artifacts" / TRASH / now.strftime(STAMP)
    moved = []
    for item in items:
        target = stamp / item.path.relative_to(root)
        with _free(root, item.name) as is_free, reporting(f"{item.path} could not be moved to the trash"):
            if is_free and item.path.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                item.path.rename(target)
                moved.append(item)
    return moved


@contextmanager
def _free(root: Path, name: str) -> Iterator[bool]:
    """Yield whether no other process holds an artifact's lock, which is held for the block then."""
    if not name:
        yield True
        return
    lock = root / "artifacts" / ".locks" / name.replace("/", "-")
    lock.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)


def in_trash(root: Path) -> list[tuple[datetime, Path]]:
    """Return the folders of the trash, oldest first, each with the time when it was filled."""
    found = []
    for path in _in(root / "artifacts" / TRASH):
        try:
            found.append((datetime.strptime(path.name, STAMP).replace(tzinfo=UTC), path))
        except ValueError:
            continue  # not ours
    return sorted(found)


def take_back(root: Path, which: str) -> list[Path]:
    """Move things from the trash to where they were, and return their places; `which` begins their path or fingerprint.

    An empty `which` means all. What has been made again meanwhile stays in the trash.
    """
    restored = []
    for _, stamp in reversed(in_trash(root)):
        for path in _things(stamp):
            place = root / path.relative_to(stamp)
            name = place.relative_to(root).as_posix()
            is_meant = name.startswith(which) or place.name.startswith(which) or name.startswith(f"artifacts/{which}")
            if is_meant and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                path.rename(place)
                restored.append(place)
    return restored


def _things(stamp: Path) -> list[Path]:
    """Return what was moved to a folder of the trash: `artifacts/KIND/FINGERPRINT`, `failed/RUN`, and so on."""
    artifacts = [path for kind in _in(stamp / "artifacts") for path in _in(kind)]
    others = [path for folder in _in(stamp) if folder.name != "artifacts" for path in _in(folder)]
    return [*artifacts, *others]


def empty_trash(root: Path, *, older_than: timedelta) -> int:
    """Delete what has been in the trash for so long; return its bytes."""
    freed = 0
    for filled_at, path in in_trash(root):
        if datetime.now(UTC) - filled_at >= older_than:
            freed += bytes_in(path)
            shutil.rmtree(path, ignore_errors=True)
    return freed
