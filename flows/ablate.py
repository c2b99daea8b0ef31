"""`klear ablate`: run every cell of a grid in turn, as `klear run` would run it, and compare the results in one table.

All state is in the artifacts: a grid that was interrupted or extended runs only the cells that are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from flows.resolve import resolve
from flows.reuse import intact_artifacts
from klear_core.artifacts.manifest import ArtifactRef, read_manifest
from klear_core.config.ablation import AblationConfig
from klear_core.config.jobs import RlJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.errors import ConfigError, KlearError
from klear_core.evaluate.ablation import AblationTable, RunResult, as_markdown, best_runs, read_run, rows_of
from klear_core.evaluate.cells import CellRecord, write_cells
from klear_core.pipeline.graph import (
    evaluation_of,
    fingerprints_of,
    open_store,
    stages_of,
    with_inputs,
    workspace_root,
)
from klear_core.pipeline.preflight import require_ready
from klear_core.report.chosen import Choice, write_choice

Artifacts = Mapping[str, ArtifactRef]
"""The artifacts of one run, by stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Names of the stages that a grid compares."""

    rl: str
    """The first RL stage."""
    before: str
    """The evaluation of the model that RL starts from."""
    after: str
    """The evaluation of the model that RL makes."""
    chosen: tuple[str, ...]
    """All stages to run: the two evaluations and what they depend on."""

    @classmethod
    def of(cls, config: PipelineConfig) -> Compared:
        """Return the names in this config's pipeline."""
        stages = stages_of(config)
        rl = next(stage for stage in stages if isinstance(stage.job, RlJob))
        before = evaluation_of(stages, rl.inputs["model"]).name
        after = evaluation_of(stages, rl.name).name
        chosen = tuple(stage.name for stage in with_inputs(stages, [before, after]))
        return cls(rl=rl.name, before=before, after=after, chosen=chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the grid."""

    variant: str
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.variant}, lr {self.rate:g}, seed {self.seed}"


def cells_of(cfg: AblationConfig) -> list[Cell]:
    """Return the cells by learning rate, seed, then variant: an unfinished grid has all variants of some seeds.

    Variants whose rates differ run at their first rate first, then at their second.
    """
    rates = {variant: cfg.rates_of(variant) for variant in cfg.variants}
    grid = product(range(max(map(len, rates.values()))), cfg.seeds, cfg.variants)
    return [
        Cell(variant=variant, rate=rates[variant][turn], seed=seed)
        for turn, seed, variant in grid
        if turn < len(rates[variant])
    ]


def config_of(cfg: AblationConfig, cell: Cell, overrides: Sequence[str]) -> PipelineConfig:
    """Return the config of one cell; `overrides` take precedence over the grid's. ConfigError if it is not valid."""
    own = (*cfg.overrides, *cfg.variants[cell.variant], f"rl.optim.lr={cell.rate}", f"seed={cell.seed}")
    return resolve(cfg.profile, [*own, *overrides], None)


def require_ready_cells(configs: Mapping[Cell, PipelineConfig]) -> None:
    """Check every run before the first one starts; ConfigError names the first run that cannot succeed."""
    for cell, config in configs.items():
        try:
            require_ready(config, Compared.of(config).chosen)
        except ConfigError as e:
            raise ConfigError(f"{cell}: {e}") from e


def run_grid(cfg: AblationConfig, run: Callable[[Cell], RunResult], *, benchmarks: Sequence[str] = ()) -> AblationTable:
    """Run all cells and return the table. A run that ends in a KlearError is left out and listed under `failures`.

    `benchmarks` are the names of those that the cells are scored on.
    """
    runs: dict[str, dict[float, dict[int, RunResult]]] = {}
    for variant in cfg.variants:
        runs[variant] = {rate: {} for rate in cfg.rates_of(variant)}
    failures: dict[str, str] = {}
    for cell in cells_of(cfg):
        try:
            runs[cell.variant][cell.rate][cell.seed] = run(cell)
        except KlearError as e:
            failures[str(cell)] = str(e)
    return AblationTable(
        reference=cfg.reference, benchmarks=tuple(benchmarks), rows=rows_of(runs, cfg.reference), failures=failures
    )


def made_runs(configs: Mapping[Cell, PipelineConfig]) -> dict[Cell, Artifacts]:
    """Return the artifacts of the runs that have nothing left to make."""
    found: dict[Cell, Artifacts] = {}
    for cell, config in configs.items():
        artifacts = intact_artifacts(config, Compared.of(config).chosen)
        if artifacts is not None:
            found[cell] = artifacts
    return found


def run_in_pipeline(config: PipelineConfig) -> Artifacts:
    """Run the two evaluations and what they depend on, reusing existing artifacts."""
    from flows.pipeline import run_pipeline

    compared = Compared.of(config)
    return run_pipeline(config, needed_by=(compared.before, compared.after)).refs


def result_of(config: PipelineConfig, refs: Artifacts) -> RunResult:
    """Return the result of a run from its artifacts."""
    compared = Compared.of(config)
    rl = refs[compared.rl].path
    return read_run(
        rl=rl,
        before=refs[compared.before].path,
        after=refs[compared.after].path,
        commit=read_manifest(rl).git_commit,
    )


def records_of(table: AblationTable, configs: Mapping[Cell, PipelineConfig]) -> list[CellRecord]:
    """Return the table's single runs, each once."""
    return [
        _record_of(Cell(variant=row.variant, rate=row.learning_rate, seed=seed), run, configs)
        for row in table.rows
        if row.learning_rate is not None  # a row without a rate repeats runs of other rows
        for seed, run in row.runs.items()
    ]


def _record_of(cell: Cell, run: RunResult, configs: Mapping[Cell, PipelineConfig]) -> CellRecord:
    rl = configs[cell].rl
    return CellRecord(
        variant=cell.variant,
        learning_rate=cell.rate,
        seed=cell.seed,
        minibatches_per_step=rl.minibatches_per_step,
        steps=rl.num_steps,
        collapsed=run.has_collapsed,
        result=run,
    )


def record_choice(table: AblationTable, configs: Mapping[Cell, PipelineConfig], name: str) -> None:
    """Record which models the grid's scores put first: their scores are marked wherever they are shown."""
    best = best_runs(table)
    if not best:
        return
    models: dict[str, None] = {}
    for row, seed in best:
        assert row.learning_rate is not None, row.variant
        config = configs[Cell(variant=row.variant, rate=row.learning_rate, seed=seed)]
        rl = Compared.of(config).rl
        own = fingerprints_of(with_inputs(stages_of(config), [rl]), config.workspace)[rl]
        models[f"{own.kind}/{own.fingerprint}"] = None
    choice = Choice(by=f"klear ablate {name}", among=len(configs), benchmarks=table.benchmarks, models=tuple(models))
    write_choice(workspace_root(next(iter(configs.values())).workspace), name, choice)


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


def show_work(configs: Collection[PipelineConfig]) -> None:
    """Print the number of runs and, by kind, how many of the artifacts they need are still to be made."""
    needed: dict[tuple[str, str], bool] = {}
    for config in configs:
        stages, store = stages_of(config), open_store(config.workspace)
        ids = fingerprints_of(stages, config.workspace)
        for name in Compared.of(config).chosen:
            own = ids[name]
            needed[own.kind, own.fingerprint] = store.exists(own.kind, own.fingerprint)
    to_make = Counter(kind for (kind, _), is_there in needed.items() if not is_there)
    Console(highlight=False, soft_wrap=True).print(
        f"{len(configs)} runs; artifacts to make: {', '.join(f'{kind} {n}' for kind, n in to_make.items()) or 'none'}"
    )
