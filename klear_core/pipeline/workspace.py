"""Open the workspace of a run: its folder, and the store of its artifacts."""

from __future__ import annotations

from pathlib import Path

from klear_core.artifacts.store import CheckedBy, LocalStore
from klear_core.config.pipeline import WorkspaceConfig


def workspace_root(workspace: WorkspaceConfig) -> Path:
    """Return the workspace as an absolute path."""
    return Path(workspace.root).expanduser().absolute()


def open_store(workspace: WorkspaceConfig, *, checked_by: CheckedBy | None = None) -> LocalStore:
    """Return the store of the workspace's artifacts; `checked_by` replaces `workspace.check_artifacts`."""
    root, checked_by = workspace_root(workspace) / "artifacts", checked_by or workspace.check_artifacts
    if not workspace.store:
        return LocalStore(root, checked_by=checked_by)
    from klear_core.artifacts.lease import LeaseTimes
    from klear_core.artifacts.object_store import ObjectStore

    times = LeaseTimes(expiry_s=workspace.lease_s)
    return ObjectStore(
        root,
        workspace.store,
        checked_by=checked_by,
        cache_gb=workspace.cache_gb,
        times=times,
        share_work_s=workspace.share_work_s,
    )
