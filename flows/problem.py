"""`klear show problem ID`: all that a workspace's artifacts hold about one problem, from source row to last score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from klear_core.artifacts.manifest import Manifest, read_manifest
from klear_core.artifacts.store import LocalStore
from klear_core.errors import ArtifactError, ConfigError
from klear_core.report.text import visible

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
    newest: dict[str, tuple[Path, Manifest]] = {}
    for folder in LocalStore(root / "artifacts").folders():
        try:
            manifest = read_manifest(folder)
        except ArtifactError:
            continue  # damaged: a run sets it aside, with a message
        earlier = newest.get(manifest.stage)
        if earlier is None or earlier[1].created_at < manifest.created_at:
            newest[manifest.stage] = (folder, manifest)
    return sorted(newest.values(), key=lambda found: found[1].created_at)


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
