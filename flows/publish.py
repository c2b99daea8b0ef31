"""`klear publish`: write a model as a Hugging Face folder with its card, and upload it if asked to."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from flows.find import find_artifact
from flows.out_place import check_folder_place
from flows.stored_answers import newest_evaluation
from klear_core.artifacts.hub import require_token, upload
from klear_core.artifacts.manifest import read_manifest
from klear_core.errors import ArtifactError, ConfigError
from klear_core.report.publish import write_model
from klear_core.train.base import model_folder

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def publish(which: str, to: str, *, root: Path, licence: str, is_private: bool) -> None:
    """Write the model that `which` names to a folder; upload it if `to` is a name on the Hub."""
    repo = _hub_id(to)  # first, like the checks of token and folder: nothing has been read or written yet
    if repo:
        require_token(repo)
    else:
        check_folder_place("--to", Path(to).expanduser())
    artifact = find_artifact(which, root).absolute()
    try:
        model = model_folder(artifact)
    except ArtifactError as e:
        raise ArtifactError(f"{e}; name a stage that makes a model, or its fingerprint") from e
    folder = root / "published" / repo.replace("/", "--") if repo else Path(to).expanduser()
    if repo and folder.exists():
        raise ConfigError(f"{folder}: exists, from an earlier upload; remove it first, or upload it as it is")
    console = Console(highlight=False, soft_wrap=True)
    published = write_model(
        artifact,
        model,
        _evaluation(artifact),
        folder,
        name=repo.partition("/")[2] or folder.name,
        licence=licence,
    )
    for warning in published.warnings:
        console.print(f"[yellow]warning[/] {escape(warning)}")
    size = f"{published.num_bytes / 1e6:,.1f} MB"
    console.print(f"folder   {folder}  ({size})\ncard     {folder / 'README.md'}", markup=False)
    if repo:
        fingerprint = read_manifest(artifact).fingerprint
        address = upload(folder, repo, is_private=is_private, message=f"Klear {artifact.parent.name}/{fingerprint}")
        console.print(f"uploaded {address}")


def _evaluation(artifact: Path) -> Path | None:
    try:
        return newest_evaluation(artifact)
    except ArtifactError:
        return None  # the card says that there are no scores


def _hub_id(to: str) -> str:
    """Return `to` if it is a name on the Hub, `owner/name`; empty if it is a folder, which may be `./owner/name`."""
    if not _HUB_ID.fullmatch(to):
        return ""
    if Path(to).parent.exists():
        raise ConfigError(
            f"--to {to}: a name on the Hub, or a folder in {Path(to).parent}/? For a folder, write ./{to}"
        )
    return to
