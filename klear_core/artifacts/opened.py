"""Open the store of an artifact's folder, with the URL that its workspace shares artifacts through."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.files import file_lock
from klear_core.artifacts.store import BUILDING, SHARED, LocalStore

WORK_KEYS = "work"
"""Prefix of the copies of unfinished work."""
_NODE = ".node-id"


def store_of(artifact: Path) -> LocalStore:
    """Return the store of an artifact's folder, with the shared store that its workspace was used with last."""
    root = artifact.absolute().parents[1]
    url = shared_url(root)
    if not url:
        return LocalStore(root)
    from klear_core.artifacts.object_store import ObjectStore

    return ObjectStore(root, url)


def shared_url(root: Path) -> str:
    """Return the URL of the shared store that artifacts below `root` were last built with; empty if none."""
    try:
        return (root / SHARED).read_text()
    except FileNotFoundError:
        return ""


def write_shared(root: Path, url: str) -> None:
    """Remember the URL of the shared store for code that is only given a folder."""
    root.mkdir(parents=True, exist_ok=True)
    # By a rename, because other processes may read the file at any time.
    temporary = root / f"{SHARED}.{os.getpid()}"
    temporary.write_text(url)
    temporary.replace(root / SHARED)


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
