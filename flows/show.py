"""`klear show`: find the artifact that a name means, and print it, or the story of one problem."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import unquote, urlsplit

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from klear_core.artifacts.hub import commit_of
from klear_core.artifacts.index import Entry, catalog
from klear_core.artifacts.manifest import (
    MANIFEST,
    MANIFEST_SUM,
    OUTSIDE_KINDS,
    InputRecord,
    LedgerStep,
    Manifest,
    read_manifest,
)
from klear_core.artifacts.store import LocalStore
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import expanded
from klear_core.config.train import HubModelConfig
from klear_core.errors import ArtifactError, ConfigError, meant
from klear_core.gguf_checks import check_gguf
from klear_core.gguf_header import is_gguf
from klear_core.pipeline.graph import stages_of
from klear_core.scores import number, visible
from klear_core.train.base_model import model_folder, pointed_folder, wanted_window

_MAX_CELL_CHARS = 400


def show_artifact(which: str, *, root: Path, num_records: int) -> None:
    """Print the artifact that `which` names; see `find_artifact`."""
    folder = find_artifact(which, root)
    manifest = read_manifest(folder)
    console = Console(highlight=False)
    console.print(f"[bold]{manifest.kind}[/] {manifest.fingerprint}\n{escape(str(folder))}", soft_wrap=True)
    console.print(_facts(manifest))
    if manifest.ledger:
        console.print(ledger_table(manifest.ledger))
    for note in manifest.notes:
        console.print(f"[yellow]note[/] {escape(note)}")
    for table in _tables_in(folder):
        _print_records(console, folder, table, num_records)


def ledger_table(ledger: tuple[LedgerStep, ...]) -> Table:
    """Return a table with one row per step: counts in and out, and counts dropped and noted by reason.

    Reasons have the names of sources and benchmarks in them, which may look like Rich's markup.
    """
    table = Table("step", "unit", "in", "out", "dropped", "noted", box=None)
    for step in ledger:
        dropped = ", ".join(f"{reason} {n}" for reason, n in step.dropped.items())
        noted = ", ".join(f"{reason} {n}" for reason, n in step.noted.items())
        table.add_row(step.step, step.unit, str(step.num_in), str(step.num_out), escape(dropped), escape(noted))
    return table


def _facts(manifest: Manifest) -> Table:
    facts = Table.grid(padding=(0, 2))
    commit = manifest.git_commit or "not a git checkout"
    inputs = ", ".join(map(_input, manifest.inputs)) or "none"
    counts = ", ".join(f"{name} {number(value)}" for name, value in manifest.counts.items())
    seeds = ", ".join(f"{name} {seed}" for name, seed in manifest.seeds.items())
    given = manifest.given
    if given is not None:
        facts.add_row("[dim]given[/]", escape(f"{given.origin}, {len(given.files)} files"))
        facts.add_row("[dim]licence[/]", escape(given.licence))
    for name, value in (
        ("made", manifest.created_at),
        ("code", commit),
        ("inputs", inputs),
        ("counts", counts),
        ("seeds", seeds),
    ):
        facts.add_row(f"[dim]{name}[/]", escape(str(value)))
    return facts


def _input(record: InputRecord) -> str:
    name = PurePath(record.role).name if record.kind in OUTSIDE_KINDS else record.kind
    return f"{name} {record.fingerprint[:8]}"


def _tables_in(folder: Path) -> list[Path]:
    """Return the folders that hold Parquet shards, and Parquet files directly in the artifact's folder."""
    tables: set[Path] = set()
    for file in folder.rglob("*.parquet"):
        tables.add(file if file.parent == folder else file.parent)
    return sorted(tables)


def _print_records(console: Console, folder: Path, table: Path, num_records: int) -> None:
    import pyarrow.dataset as ds

    dataset = ds.dataset(table, format="parquet")
    console.print(f"\n[bold]{table.relative_to(folder)}[/]  {dataset.count_rows()} records")
    for row in dataset.head(num_records).to_pylist():
        grid = Table.grid(padding=(0, 2))
        for name, value in row.items():
            text = visible(str(value))  # written by a model: it must not steer the terminal
            shown = text if len(text) <= _MAX_CELL_CHARS else f"{text[:_MAX_CELL_CHARS]}… ({len(text)} characters)"
            grid.add_row(f"  [dim]{name}[/]", escape(shown))
        console.print(grid)


# ---- klear show problem ID ----


_KEY = "problem_id"
_MAX_CHARS = 160
"""Characters shown of a field; `klear show STAGE --records N` prints more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The rows on a problem in one table of one artifact."""

    manifest: Manifest
    table: str
    """Folder or file of the table below the artifact's folder: `traces`."""
    rows: tuple[Mapping[str, Any], ...]


def show_problem(which: str, *, root: Path) -> None:
    """Print what the newest artifact of every stage holds about the problem whose id starts with `which`.

    ArtifactError if there is none, or if several ids start so.
    """
    found = list(rows_about(which, root))
    ids = sorted({str(row[_KEY]) for part in found for row in part.rows})
    if which in ids:  # the place of a row that could not be read begins others: rows.jsonl:1, rows.jsonl:12
        ids, found = [which], list(_only(which, found))
    if not ids:
        raise ArtifactError(
            f"no problem {which!r} in the newest artifacts under {root}; `klear show curate` shows some"
        )
    if len(ids) > 1:
        raise ArtifactError(f"{which!r} begins the ids of {len(ids)} problems: {', '.join(ids[:5])}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]problem {escape(visible(ids[0]))}[/]")
    questions = [row["question"] for part in found for row in part.rows if row.get("question")]
    if questions:
        console.print(escape(visible(str(questions[0]))))
    for part in found:
        console.print(
            f"\n[bold]{part.manifest.stage}[/]  {part.table}, {part.manifest.kind}/{part.manifest.fingerprint}"
        )
        for row in part.rows:
            console.print(f"  {_line(row)}")


def rows_about(which: str, root: Path) -> Iterator[Found]:
    """Yield the rows of the newest artifact of every stage whose problem id starts with `which`, oldest stage first.

    ConfigError if `which` is empty.
    """
    if not which:
        raise ConfigError("show problem: give the problem's id or its first digits")
    for folder, manifest in _newest_artifacts(root):
        by_table: dict[str, list[Mapping[str, Any]]] = {}
        for file in sorted(folder.rglob("*.parquet")):
            # the shards of a table are in a folder of their own
            table = file if file.parent == folder else file.parent
            by_table.setdefault(str(table.relative_to(folder)), []).extend(_matching(file, which))
        for name, rows in by_table.items():
            if rows:
                yield Found(manifest=manifest, table=name, rows=tuple(rows))


def _only(problem_id: str, found: Sequence[Found]) -> Iterator[Found]:
    for part in found:
        rows = tuple(row for row in part.rows if row[_KEY] == problem_id)
        if rows:
            yield replace(part, rows=rows)


def _newest_artifacts(root: Path) -> list[tuple[Path, Manifest]]:
    newest: dict[str, Entry] = {}
    for entry in catalog(LocalStore(root / "artifacts")).values():
        earlier = newest.get(entry.stage)
        if earlier is None or earlier.created_at < entry.created_at:
            newest[entry.stage] = entry
    folders = [root / "artifacts" / entry.name for entry in sorted(newest.values(), key=lambda own: own.created_at)]
    return [(folder, read_manifest(folder)) for folder in folders]


def _matching(file: Path, which: str) -> list[Mapping[str, Any]]:
    """Return the file's rows about the problem. A shard without rows may have no columns."""
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    shard = ds.dataset(file, format="parquet")
    if _KEY not in shard.schema.names:
        return []
    return list(shard.to_table(filter=pc.starts_with(ds.field(_KEY), which)).to_pylist())


def _line(row: Mapping[str, Any]) -> str:
    """Return the fields of a row on one line, without its id and question, which stand above."""
    parts = []
    for name, value in row.items():
        if name in (_KEY, "question"):
            continue
        text = " ".join(visible(str(value)).split())
        shown = text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}… ({len(text):,} characters)"
        parts.append(f"[dim]{name}[/] {escape(shown)}")
    return "  ".join(parts)


# ---- artifacts by name ----


def find_artifact(which: str, root: Path) -> Path:
    """Return an artifact's folder, named in any form that a command prints.

    `which` is that folder, a file or folder in it (a run's `model`), a folder that it points to, its URI, a stage or
    kind (its newest), the start of a fingerprint, with or without the kind (`rl/3f2a`, `rl 3f2a`), or the origin of a
    given model. ArtifactError lists the stages that have an artifact.
    """
    path = path_of(which)
    around = _artifact_around(path)
    if around is not None:
        return around
    stages = stages_by_folder(root)
    folders = list(stages)
    if not folders:
        raise ArtifactError(
            f"no artifact {which!r}: there is none at all under {root}; --root names the workspace of a run"
        )
    name = which.replace(" ", "/")
    by_fingerprint = [f for f in folders if name and (f.name.startswith(name) or _id_of(f).startswith(name))]
    by_stage = [f for f in folders if stages[f] == which]
    by_kind = [f for f in folders if f.parent.name == which]
    hits = by_stage or by_kind or by_fingerprint or [f for f in folders if _stands_for(f, path, which)]
    if not hits:
        raise ArtifactError(f"no artifact {which!r} under {root}; {meant(which, sorted(set(stages.values())), STAGES)}")
    if hits is by_fingerprint and len(hits) > 1:
        raise ArtifactError(f"{which!r} begins several fingerprints: {', '.join(map(_id_of, hits))}")
    return max(hits, key=lambda folder: (folder / MANIFEST).stat().st_mtime)


STAGES = "stages that have one there"


def path_of(which: str) -> Path:
    """Return the path that a word may be; a manifest and MLflow write it as a URI."""
    return Path(unquote(urlsplit(which).path)) if which.startswith("file:") else expanded(which)


def _artifact_around(path: Path) -> Path | None:
    """Return the artifact that a path is, or is in; None if it is in none, or does not exist."""
    if not path.exists():
        return None
    # A manifest alone may be one of another program.
    around = (folder for folder in (path, *path.absolute().parents) if (folder / MANIFEST_SUM).is_file())
    return path if (path / MANIFEST).is_file() else next(around, None)


def _id_of(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def _stands_for(folder: Path, path: Path, which: str) -> bool:
    """Return whether an artifact only points to the model in this folder, or was taken from this origin."""
    pointed = pointed_folder(folder)
    if pointed is not None and path.is_dir() and pointed.resolve() == path.resolve():
        return True
    try:
        given = read_manifest(folder).given
    except ArtifactError:
        return False
    return given is not None and given.origin == which


def name_of(folder: Path, stage: str, root: Path) -> str:
    """Return a short name by which `find_artifact` finds this artifact: its stage, or the start of its fingerprint.

    The stage is used only if this artifact is the stage's newest: a run with other settings may have made a newer one.
    """
    is_newest = find_artifact(stage, root.absolute()) == folder
    return stage if is_newest else folder.name[:8]


def stages_by_folder(root: Path) -> dict[Path, str]:
    """Return the folders of all artifacts of a workspace, each with the stage that made it.

    Of one whose manifest is damaged it is the kind; opening it reports the damage.
    """
    store = LocalStore(root / "artifacts")
    entries = catalog(store)
    found: dict[Path, str] = {}
    for folder in store.folders():
        entry = entries.get(_id_of(folder))
        found[folder] = folder.parent.name if entry is None else entry.stage
    return found


# ---- models by name ----


_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+?)(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model that a word names: a folder, a GGUF file, or a repository of the Hub."""

    folder: Path | None = None
    gguf: Path | None = None
    artifact: Path | None = None
    """The artifact of a workspace that holds the folder, or points to it."""
    published: HubModelConfig | None = None

    @property
    def window(self) -> int | None:
        """Return the positions that the model was trained with, if its config states less."""
        return None if self.artifact is None else wanted_window(self.artifact)

    def as_given(self) -> dict[str, Any]:
        """Return the settings of a run that name the model."""
        if self.published is not None:
            return {"kind": "hub", "repo": self.published.repo, "revision": self.published.revision}
        if self.gguf is not None:
            return {"kind": "gguf", "path": str(self.gguf)}
        given = {"kind": "folder", "path": str(self.folder)}
        return given if self.window is None else given | {"max_position_embeddings": self.window}


def find_model(which: str, root: Path, console: Console) -> FoundModel:
    """Return the model that a word names, in any form that a command prints: see `find_artifact`.

    It may also be a folder of any model, a GGUF file, or `owner/name` on the Hub. ArtifactError or ConfigError if it is
    none.
    """
    path = path_of(which)
    if is_gguf(path) and not path.is_dir():
        check_gguf(path)
        return FoundModel(gguf=path.resolve())
    try:
        artifact = find_artifact(which, root).absolute()
    except ArtifactError as not_here:
        if path.is_dir():
            return FoundModel(folder=path.resolve())
        try:
            published = on_hub(which, console)
        except ConfigError as e:
            raise ConfigError(f"{not_here}; and as a model of the Hub: {e}") from e
        if published is None:
            raise
        return FoundModel(published=published)
    try:
        folder = model_folder(artifact)
    except ArtifactError as e:
        makers = [stage.name for stage in stages_of(PipelineConfig()) if stage.job.makes_model]
        raise ArtifactError(f"{e}; models are made by the stages {', '.join(makers)}") from e
    return FoundModel(folder=folder, artifact=artifact)


def on_hub(model: str, console: Console) -> HubModelConfig | None:
    """Return the model of the Hub that `owner/name` or `owner/name@revision` names, pinned to a commit.

    None for other words. The commit of a branch or tag is asked of the Hub, and printed.
    """
    named = _HUB_ID.fullmatch(model)
    if named is None:
        return None
    repo, revision = named["repo"], named["revision"] or "main"
    if not _COMMIT.fullmatch(revision):
        commit = commit_of(repo, revision)
        console.print(f"[dim]{repo}@{revision} is commit {commit}[/]")
        revision = commit
    return HubModelConfig(repo=repo, revision=revision)
