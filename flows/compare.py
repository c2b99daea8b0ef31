"""`klear compare`: find the reports of runs, compare the runs, and print the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.find import find_artifact
from flows.out_place import check_folder_place, folder_name
from klear_core.errors import ConfigError
from klear_core.report.compared_runs import read_run
from klear_core.report.comparison import (
    COMPARISON_PAGE,
    Comparison,
    DifferenceCell,
    ScoreRow,
    compare_runs,
)

_STYLES = {"better": "green", "worse": "red"}
_MAX_SETTINGS = 12


def compare(which: Sequence[str], *, root: Path, out: Path | None) -> None:
    """Compare runs, each named by the fingerprint or folder of its report, or by its workspace (the newest run)."""
    if len(which) < 2:
        raise ConfigError(f"klear compare {' '.join(which)}: name at least two runs")
    if out is not None:
        check_folder_place("--out", out)  # first: it reads nothing
    folders = [_find_report(name, root) for name in which]
    repeated = [folder for i, folder in enumerate(folders) if folder in folders[:i]]
    if repeated:
        raise ConfigError(f"klear compare {' '.join(which)}: two of these are one run, {repeated[0].name}")
    folder = out or root / "compared" / folder_name([folder.name[:8] for folder in folders])
    check_folder_place("--out", folder)
    comparison = compare_runs([read_run(report) for report in folders], folder)
    console = Console(highlight=False, soft_wrap=True)
    show_comparison(console, comparison)
    console.print(f"\npage     {folder / COMPARISON_PAGE}", markup=False)
    if comparison.viewer is not None:
        console.print(f"answers  {comparison.viewer.page}#show=flipped", markup=False)


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print scores of sampled answers with their differences, and the settings that differ; the page has all."""
    for row in comparison.rows:
        if row.decoding == "sampled":
            console.print(_comparison_table(row, comparison))
            for run, cell in zip(comparison.runs, row.cells, strict=True):
                if cell is not None and cell.templates:
                    console.print(f"  templates, {escape(run.label)}: {cell.templates}")
                if cell is not None and cell.chosen:
                    console.print(f"  [yellow]chosen on this benchmark[/], {escape(run.label)}: {escape(cell.chosen)}")
    if comparison.stages_of_some:
        console.print(
            f"[dim]stages that not all runs have, without their settings:[/] {escape(comparison.stages_of_some)}"
        )
    for setting in comparison.settings[:_MAX_SETTINGS]:
        console.print(f"[dim]{escape(setting.key)}[/] {escape(' | '.join(setting.values))}")
    if len(comparison.settings) > _MAX_SETTINGS:
        console.print(f"and {len(comparison.settings) - _MAX_SETTINGS} more settings that differ; the page has all")


def _find_report(which: str, root: Path) -> Path:
    """Return the folder of the report's artifact that `which` names."""
    workspace = Path(which)
    if (workspace / "artifacts").is_dir():
        return find_artifact("report", workspace).absolute()
    return find_artifact(which, root).absolute()


def _comparison_table(row: ScoreRow, comparison: Comparison) -> Table:
    title = f"{row.benchmark}, {row.maker}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1))
    table.add_column("run")
    for name in ("score", "cut off", "no answer", "not judged", "change, points"):
        table.add_column(name, justify="right")
    differences = {d.run: d for d in row.differences}
    for i, (run, cell) in enumerate(zip(comparison.runs, row.cells, strict=True)):
        if cell is not None:
            score = f"{cell.value}\n[dim]{cell.interval}[/]"
            change = _change(differences.get(i))
            table.add_row(escape(run.label), score, cell.cut_off, cell.no_answer, cell.not_judged, change)
    return table


def _change(difference: DifferenceCell | None) -> str:
    if difference is None:
        return ""
    if not difference.is_paired:
        return f"[dim]{difference.standing}[/]"
    style = _STYLES.get(difference.standing, "yellow")
    note = ", not shown" if difference.standing == "not_shown" else ""
    on = f"{difference.num_problems:,} shared problems"  # runs of other seeds may share a few of many
    notes = "".join(f"\n{each}" for each in difference.notes)
    return f"[{style}]{difference.value}[/]\n[dim]{difference.interval}{note}\n{on}{notes}[/]"
