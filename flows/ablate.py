"""`klear ablate`: run every cell of a grid in turn, as `klear run` would run it, and compare the results in one table.

All state is in the artifacts: a grid that was interrupted or extended runs only the cells that are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from flows.grid import Cell, CellRun, Runs, plan_runs, require_distinct_runs, require_ready_runs, show_work
from flows.resolve import grid_file, profile_folder
from flows.reuse import intact_artifacts
from flows.watched import watched_if
from klear_core.artifacts.manifest import ArtifactRef, read_manifest
from klear_core.config.ablation import AblationConfig, load_ablation
from klear_core.config.load import extended_by
from klear_core.config.rl import RlConfig
from klear_core.errors import KlearError
from klear_core.evaluate.ablation import best_runs, rows_of
from klear_core.evaluate.ablation_runs import RunResult, read_run, read_sft_run
from klear_core.evaluate.ablation_table import AblationTable, as_markdown
from klear_core.evaluate.beside_paper import beside_paper
from klear_core.evaluate.cells import CellRecord, write_cells
from klear_core.pipeline.workspace import workspace_root
from klear_core.report.chosen import Choice, write_choice

Artifacts = Mapping[str, ArtifactRef]
"""The artifacts of one run, by stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridOptions:
    """The options of `klear ablate`."""

    file: Path
    """A grid's file, or its name under configs/ablations."""
    profile: str | None
    """Another profile that the grid has settings for; None: its own."""
    overrides: tuple[str, ...]
    is_dry_run: bool

    @property
    def name(self) -> str:
        """Return the name of the table's files."""
        return self.file.stem if self.profile is None else f"{self.file.stem}_{Path(self.profile).name}"

    @property
    def command(self) -> str:
        """Return the command in short, for records."""
        return f"klear ablate {self.file.stem}{'' if self.profile is None else f' --profile {self.profile}'}"


def ablate_grid(options: GridOptions) -> None:
    """Run the grid and show its table; a dry run only counts the work. Raise KlearError if a run fails."""
    extended = extended_by(profile_folder(options.profile)) if options.profile else ()
    cfg = load_ablation(grid_file(str(options.file)), options.profile, extended)
    runs = plan_runs(cfg, options.overrides)
    require_distinct_runs(runs)
    first = next(iter(runs.values())).config
    if not options.is_dry_run:
        require_ready_runs(runs)
    show_work(runs)
    if options.is_dry_run:
        return
    made = made_runs(runs)
    with watched_if(len(made) < len(runs), runs) as watcher:

        def run_cell(cell: Cell) -> RunResult:
            is_made = cell in made
            watcher.console.print(f"[bold]{escape(str(cell))}[/]{': reused' if is_made else ''}")
            try:
                refs = made[cell] if is_made else run_in_pipeline(runs[cell])
                return result_of(runs[cell], refs, cfg.scored_on)
            except KlearError as e:
                watcher.console.print(f"[red]error:[/] {escape(str(e))}", soft_wrap=True)  # run_grid continues
                raise

        names = cfg.scored_on or tuple(dict.fromkeys(b.name for run in runs.values() for b in run.config.benchmarks))
        table = run_grid(cfg, runs, run_cell, benchmarks=names)
    record_choice(table, runs, options.name, options.command)
    write_table(table, records_of(table, runs), workspace_root(first.workspace) / "ablations", options.name)
    require_complete(table, num_runs=len(runs))


def run_grid(
    cfg: AblationConfig, cells: Collection[Cell], run: Callable[[Cell], RunResult], *, benchmarks: Sequence[str] = ()
) -> AblationTable:
    """Run all cells and return the table. A run that ends in a KlearError is left out and listed under `failures`.

    `benchmarks` are the names of those that the cells are scored on.
    """
    runs: dict[str, dict[float, dict[int, RunResult]]] = {}
    for cell in cells:
        runs.setdefault(cell.variant, {}).setdefault(cell.rate, {})
    failures: dict[str, str] = {}
    for cell in cells:
        try:
            runs[cell.variant][cell.rate][cell.seed] = run(cell)
        except KlearError as e:  # a grid takes days: one run that diverges must not end the others
            failures[str(cell)] = str(e)
    rows = rows_of(runs, cfg.reference, cfg.references)
    references = {variant: cfg.references.get(variant, cfg.reference) for variant in cfg.variants}
    beside = beside_paper(cfg.paper, rows, references) if cfg.paper else None
    return AblationTable(
        reference=cfg.reference, benchmarks=tuple(benchmarks), rows=rows, beside=beside, failures=failures
    )


def made_runs(runs: Runs) -> dict[Cell, Artifacts]:
    """Return the artifacts of the runs that have nothing left to make."""
    found: dict[Cell, Artifacts] = {}
    for cell, run in runs.items():
        artifacts = intact_artifacts(run.config, run.compared.chosen)
        if artifacts is not None:
            found[cell] = artifacts
    return found


def run_in_pipeline(run: CellRun) -> Artifacts:
    """Run the evaluations and what they depend on, reusing existing artifacts."""
    from flows.pipeline import run_pipeline

    return run_pipeline(run.config, needed_by=run.compared.chosen).refs


def result_of(run: CellRun, refs: Artifacts, scored_on: Collection[str] = ()) -> RunResult:
    """Return the result of a run from its artifacts: the mean over the benchmarks `scored_on`, all if none."""
    compared = run.compared
    if compared.before is None:
        return read_sft_run(sft=refs[compared.model].path, after=refs[compared.after].path, scored_on=scored_on)
    rl = refs[compared.model].path
    return read_run(
        rl=rl,
        before=refs[compared.before].path,
        after=refs[compared.after].path,
        commit=read_manifest(rl).git_commit,
        scored_on=scored_on,
    )


def records_of(table: AblationTable, runs: Runs) -> list[CellRecord]:
    """Return the table's single runs, each once."""
    return [
        _record_of(Cell(variant=row.variant, rate=row.learning_rate, seed=seed), result, runs)
        for row in table.rows
        if row.learning_rate is not None  # a row without a rate repeats runs of other rows
        for seed, result in row.runs.items()
    ]


def _record_of(cell: Cell, result: RunResult, runs: Runs) -> CellRecord:
    training = runs[cell].training
    minibatches, steps = None, result.num_steps
    if isinstance(training, RlConfig):
        minibatches, steps = training.minibatches_per_step, training.num_steps
    return CellRecord(
        variant=cell.variant,
        learning_rate=cell.rate,
        seed=cell.seed,
        minibatches_per_step=minibatches,
        steps=steps,
        collapsed=result.has_collapsed,
        result=result,
    )


def record_choice(table: AblationTable, runs: Runs, name: str, command: str) -> None:
    """Record under `name` the models with the best scores of the grid, which are marked wherever they are shown.

    The best of several scores is biased upwards.
    """
    best = best_runs(table.rows)
    if not best:
        return
    models: dict[str, None] = {}
    for row, seed in best:
        assert row.learning_rate is not None, row.variant
        run = runs[Cell(variant=row.variant, rate=row.learning_rate, seed=seed)]
        own = run.fingerprints()[run.compared.model]
        models[f"{own.kind}/{own.fingerprint}"] = None
    choice = Choice(by=command, among=len(runs), benchmarks=table.benchmarks, models=tuple(models))
    write_choice(workspace_root(run.config.workspace), name, choice)


def write_table(table: AblationTable, cells: Sequence[CellRecord], folder: Path, name: str) -> None:
    """Write the table as JSON and as Markdown and its single runs as JSON lines, and show it on the terminal."""
    folder.mkdir(parents=True, exist_ok=True)
    write_cells(cells, folder / f"{name}.jsonl")
    (folder / f"{name}.json").write_text(table.model_dump_json(indent=2) + "\n")
    (folder / f"{name}.md").write_text(as_markdown(table))
    Console(highlight=False, soft_wrap=True).print(
        f"{escape(as_markdown(table))}\ntable    {folder / name}.md and .json; its single runs: .jsonl"
    )


def require_complete(table: AblationTable, *, num_runs: int) -> None:
    """Raise KlearError if a run failed, so that a script waiting for the grid sees that the table is incomplete."""
    if table.failures:
        raise KlearError(
            f"{len(table.failures)} of {num_runs} runs failed; the table names them, "
            "and the same command runs only these"
        )
