"""`klear champion` and `klear rollback`: show the champion with its evidence, and go back to the former one."""

from __future__ import annotations

import getpass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flows.reachable import check_tracking
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.errors import ArtifactError, ConfigError
from klear_core.evaluate.decision import Decision, read_decision, short_name
from klear_core.report.terminal import decision_lines
from tasks.mlflow_database import database_file
from tasks.registry import Registry, folder_of, open_registry
from tasks.registry_records import Version
from tasks.tracking import tracking_uri


def show_champion(name: str, *, root: Path) -> None:
    """Print the champion, the decision that made it so, and all versions. ConfigError if there is none."""
    registry = _registry(name, root)
    champion = registry.champion()
    if champion is None:
        raise ConfigError(
            f"{name!r} has no champion: a run whose profile has [promote] makes one, if its model passes the rule"
        )
    console = Console(highlight=False, soft_wrap=True)
    promotion = champion.promotion
    console.print(f"[bold]{name}, version {champion.number}[/]  {short_name(promotion.model)}", highlight=False)
    if champion.rollback is not None:
        console.print("[yellow]a rollback of this version was begun and not finished: repeat `klear rollback`[/]")
    model, scores = folder_of(promotion.model_uri), folder_of(promotion.evaluation_uri)
    console.print(f"model    {model}\nscores   {scores}", markup=False)
    decision = folder_of(promotion.decision_uri)
    console.print(f"decided  {champion.promoted_at} in run {promotion.run}, {decision}", markup=False)
    for line in _evidence(folder_of(promotion.decision_uri)):
        console.print(line)
    console.print()
    for version in registry.versions():
        console.print(_line(version, champion))


def roll_back(name: str, *, root: Path, why: str, by: str) -> None:
    """Give the alias back to the former champion and say so. ConfigError if there is none, or no reason is given."""
    if not why.strip():
        raise ConfigError('klear rollback --why "": a reason is needed, for the record')
    lost, has = _registry(name, root).roll_back(by=by or getpass.getuser(), why=why.strip())
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"version {has.number} ({short_name(has.promotion.model)}) is champion of {name!r} again; "
        f"version {lost.number} ({short_name(lost.promotion.model)}) was rolled back"
    )


def _registry(name: str, root: Path) -> Registry:
    workspace = WorkspaceConfig(root=str(root))
    file = database_file(tracking_uri(workspace))
    if file is not None and not file.is_file():
        raise ConfigError(
            f"{file}: no such database, so {name!r} has no champion; --root names the workspace of a run, or "
            "MLFLOW_TRACKING_URI the server that it was tracked by"
        )
    check_tracking(workspace)
    return open_registry(workspace, name)


def _evidence(folder: Path) -> list[Text]:
    try:
        decision: Decision = read_decision(folder)
    except ArtifactError as e:
        return [Text(f"the evidence is gone: {e}", style="yellow")]
    return decision_lines(decision, with_all=True)


def _line(version: Version, champion: Version) -> Text:
    """Describe a version: its model, when it became champion in whose place, and what came of it."""
    promotion = version.promotion
    over = "" if promotion.over is None else f" in place of version {promotion.over}"
    text = f"version {version.number}  {short_name(promotion.model)}  "
    text += (
        f"promoted {version.promoted_at}{over}" if version.promoted_at else "never promoted: its run was ended before"
    )
    if version.rollback is not None:
        text += f"; {version.rollback.sentence}"
    return Text(text, style="bold" if version.number == champion.number else "dim")
