"""`klear show`: print an artifact's manifest, ledger and first records."""

from __future__ import annotations

from pathlib import Path, PurePath

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.find import find_artifact
from klear_core.artifacts.ledger import LedgerStep
from klear_core.artifacts.manifest import OUTSIDE_KINDS, InputRecord, Manifest, read_manifest
from klear_core.report.text import number

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
            text = str(value)
            shown = text if len(text) <= _MAX_CELL_CHARS else f"{text[:_MAX_CELL_CHARS]}… ({len(text)} characters)"
            grid.add_row(f"  [dim]{name}[/]", escape(shown))
        console.print(grid)
