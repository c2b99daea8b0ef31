"""Open the store of an artifact's folder, with the URL that its workspace shares artifacts through."""

from __future__ import annotations

import uuid
from pathlib import Path

from klear_core.artifacts.files import file_lock
from klear_core.artifacts.store import LocalStore

_SHARED = ".shared-store"
_NODE = ".node-id"


def store_of(artifact: Path) -> LocalStore:
    """Return the store of an artifact's folder, with the shared store that its workspace was used with last."""
    root = artifact.absolute().parents[1]
    try:
        url = (root / _SHARED).read_text()
    except FileNotFoundError:
        return LocalStore(root)
    from klear_core.artifacts.object_store import ObjectStore

    return ObjectStore(root, url)


def write_shared(root: Path, url: str) -> None:
    """Remember the URL of the shared store for commands that are only given a folder."""
    root.mkdir(parents=True, exist_ok=True)
    (root / _SHARED).write_text(url)


def node_id(root: Path) -> str:
    """Return a name of this folder that no other has; processes that have the same folder see each other's locks."""
    path = root / _NODE
    with file_lock(root / ".locks" / "node-id", on_wait=lambda _: None):
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        return path.read_text()
