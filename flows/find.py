"""Find the artifact that a name typed by the user means."""

from __future__ import annotations

from pathlib import Path

from klear_core.artifacts.manifest import MANIFEST, read_manifest
from klear_core.artifacts.store import LocalStore
from klear_core.errors import ArtifactError


def find_artifact(which: str, root: Path) -> Path:
    """Return an artifact's folder: `which` is that folder, a stage or kind (its newest), or the start of a fingerprint.

    ArtifactError lists the stages that have an artifact.
    """
    if (Path(which) / MANIFEST).is_file():
        return Path(which)
    folders = LocalStore(root / "artifacts").folders()
    if not folders:
        raise ArtifactError(
            f"no artifact {which!r}: there is none at all under {root}; --root names the workspace of a run"
        )
    stages = {folder: _stage_of(folder) for folder in folders}
    by_fingerprint = [f for f in folders if f.name.startswith(which)]
    by_stage = [f for f in folders if stages[f] == which]
    by_kind = [f for f in folders if f.parent.name == which]
    hits = by_stage or by_kind or by_fingerprint
    if not hits:
        there = ", ".join(sorted(set(stages.values())))
        raise ArtifactError(f"no artifact {which!r} under {root}; stages that have one there: {there}")
    if hits is by_fingerprint and len(hits) > 1:
        raise ArtifactError(
            f"{which!r} begins several fingerprints: {', '.join(f'{f.parent.name}/{f.name}' for f in hits)}"
        )
    return max(hits, key=lambda folder: (folder / MANIFEST).stat().st_mtime)


def name_of(folder: Path, stage: str, root: Path) -> str:
    """Return a short name by which `find_artifact` finds this artifact: its stage, or the start of its fingerprint.

    The stage is used only if this artifact is the stage's newest: a run with other settings may have made a newer one.
    """
    is_newest = find_artifact(stage, root.absolute()) == folder
    return stage if is_newest else folder.name[:8]


def _stage_of(folder: Path) -> str:
    """Return the stage that made an artifact, or its kind if the manifest is damaged (opening it reports that)."""
    try:
        return read_manifest(folder).stage
    except ArtifactError:
        return folder.parent.name
