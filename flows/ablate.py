"""`klear ablate`: run every cell of a grid in turn, as `klear run` would run it, and compare the results in one table.

All state is in the artifacts: a grid that was interrupted or extended runs only the cells that are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from flows.environment import StageSelection, grid_file, profile_folder, resolve
from flows.run import RunConsole, intact_artifacts, prefect_run, runs_rl
from klear_core.artifacts.manifest import ArtifactId, ArtifactRef, read_manifest
from klear_core.config.grids import AblationConfig, ComparedStage, load_ablation
from klear_core.config.load import extended_by
from klear_core.config.opd import OpdTrainConfig
from klear_core.config.opd_jobs import OpdJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.stage import RlJob, SftJob
from klear_core.config.train import SftConfig
from klear_core.errors import ConfigError, KlearError
from klear_core.evaluate.compare.ablation import RunResult, best_runs, read_offline_run, read_run, rows_of
from klear_core.evaluate.compare.published import AblationTable, CellRecord, as_markdown, beside_paper, write_cells
from klear_core.pipeline.graph import evaluation_of, fingerprints_of, open_store, stages_of, with_inputs, workspace_root
from klear_core.pipeline.preflight.checks import require_ready
from klear_core.report.run.warnings import Choice, write_choice

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
    made = {cell: refs for cell, run in runs.items() if (refs := intact_artifacts(run.config, run.compared.chosen))}
    # Comparing artifacts that exist needs no Prefect.
    needs_ray = any(runs_rl(run.config, run.compared.chosen) for run in runs.values())
    terminal = prefect_run(first.workspace, needs_ray=needs_ray) if len(made) < len(runs) else closing(RunConsole())
    with terminal as shown:

        def run_cell(cell: Cell) -> RunResult:
            is_made = cell in made
            shown.console.print(f"[bold]{escape(str(cell))}[/]{': reused' if is_made else ''}")
            try:
                refs = made[cell] if is_made else run_in_pipeline(runs[cell])
                return result_of(runs[cell], refs, cfg.scored_on)
            except KlearError as e:
                shown.console.print(f"[red]error:[/] {escape(str(e))}", soft_wrap=True)  # run_grid continues
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


def run_in_pipeline(run: CellRun) -> Artifacts:
    """Run the evaluations and what they depend on, reusing existing artifacts."""
    from flows.pipeline import run_pipeline

    return run_pipeline(run.config, StageSelection(needed_by=run.compared.chosen)).refs


def result_of(run: CellRun, refs: Artifacts, scored_on: Collection[str] = ()) -> RunResult:
    """Return the result of a run from its artifacts: the mean over the benchmarks `scored_on`, all if none."""
    compared = run.compared
    model, after = refs[compared.model].path, refs[compared.after].path
    before = refs[compared.before].path if compared.before else None
    # Of RL, and of the answers that a teacher scored before it.
    sampling = [read_manifest(refs[name].path) for name in (compared.model, "opd_rollouts") if name in refs]
    sampled_tokens = sum(int(manifest.counts.get("sampled_tokens", 0)) for manifest in sampling) or None
    if not isinstance(run.training, RlConfig):
        return read_offline_run(
            model=model, before=before, after=after, sampled_tokens=sampled_tokens, scored_on=scored_on
        )
    assert before is not None
    return read_run(
        rl=model,
        before=before,
        after=after,
        commit=read_manifest(model).git_commit,
        sampled_tokens=sampled_tokens,
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


# ---- the runs of a grid ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Names of the stages that a grid compares."""

    model: str
    """The stage whose models are compared."""
    before: str | None
    """The evaluation of the model that RL starts from, of SFT's if `last` is compared; None for SFT, before which there
    is no skill to lose."""
    after: str
    """The evaluation of the compared model."""
    chosen: tuple[str, ...]
    """All stages to run: the evaluations and what they depend on."""

    @classmethod
    def of(cls, config: PipelineConfig, model: ComparedStage) -> Compared:
        """Return the names in this config's pipeline. ConfigError if it does not train the model."""
        stages = stages_of(config)
        trained = [stage for stage in stages if isinstance(stage.job, SftJob | OpdJob | RlJob)]
        found = trained[-1:] if model == "last" else [stage for stage in trained if stage.name == model]
        if not found:
            names = ", ".join(stage.name for stage in trained) or "nothing"
            raise ConfigError(f"compare = {model!r}: profile {config.name} trains only {names}")
        stage = found[0]
        start = "sft" if model == "last" else stage.inputs["model"]
        before = None if isinstance(stage.job, SftJob) else evaluation_of(stages, start).name
        after = evaluation_of(stages, stage.name).name
        chosen = tuple(stage.name for stage in with_inputs(stages, [after, before or after]))
        return cls(model=stage.name, before=before, after=after, chosen=chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the grid."""

    variant: str
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.variant}, lr {self.rate:g}, seed {self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRun:
    """The settings of one run and the stages that it compares."""

    config: PipelineConfig
    compared: Compared

    @property
    def training(self) -> SftConfig | OpdTrainConfig | RlConfig:
        """Return the settings of the compared training."""
        if self.compared.model == "opd":
            assert self.config.opd is not None
            return self.config.opd.train
        training = getattr(self.config, self.compared.model)
        assert isinstance(training, SftConfig | RlConfig), self.compared.model
        return training

    @property
    def rate(self) -> float:
        """Return the learning rate of the compared training."""
        return self.training.optim.lr

    def fingerprints(self) -> dict[str, ArtifactId]:
        """Return the artifacts of the stages that the comparison needs, by stage."""
        stages = with_inputs(stages_of(self.config), self.compared.chosen)
        return fingerprints_of(stages, self.config.workspace)


Runs = Mapping[Cell, CellRun]
"""The runs of a grid, in order."""


def plan_runs(cfg: AblationConfig, overrides: Sequence[str]) -> dict[Cell, CellRun]:
    """Return the runs by learning rate, seed, then variant: an unfinished grid has all variants of some seeds.

    Variants whose rates differ run at their first rate first, then at their second. `overrides` take precedence over
    the grid's. ConfigError if settings are not valid.
    """
    rates = {variant: cfg.rates.get(variant, cfg.learning_rates) or (None,) for variant in cfg.variants}
    most_rates = max(map(len, rates.values()))
    runs = {}
    for turn, seed, variant in product(range(most_rates), cfg.seeds, cfg.variants):
        if turn < len(rates[variant]):
            cell, run = _plan_run(cfg, variant, seed, rates[variant][turn], overrides)
            runs[cell] = run
    return runs


def _plan_run(
    cfg: AblationConfig, variant: str, seed: int, rate: float | None, overrides: Sequence[str]
) -> tuple[Cell, CellRun]:
    """Return one run. A rate of None is that of its settings."""
    of_grid = [*cfg.overrides, *cfg.variants[variant]]
    of_cell: dict[str, object] = {"seed": seed}
    if rate is not None:
        of_cell[f"{cfg.compare}.optim.lr"] = rate
    if replaced := [override for override in of_grid if override.partition("=")[0].strip() in of_cell]:
        raise ConfigError(f"{variant}: {replaced[0]!r} has no effect: seeds and learning_rates of the grid replace it")
    own = [*of_grid, *(f"{key}={value}" for key, value in of_cell.items())]
    # The user's overrides come last and win, so the check below finds one that replaces the cell's seed or rate.
    config = resolve(cfg.profile, [*own, *overrides], None)
    run = CellRun(config=config, compared=Compared.of(config, cfg.compare))
    cell = Cell(variant=variant, rate=run.rate, seed=config.seed)
    if cell.seed != seed or rate not in (None, cell.rate):
        raise ConfigError(f"{cell}: the grid's own seeds and learning rates may not be overridden")
    names = [benchmark.name for benchmark in config.benchmarks]
    if unknown := [name for name in cfg.scored_on if name not in names]:
        raise ConfigError(f"{cell}: scored_on: {unknown[0]!r} is none of the benchmarks {', '.join(names)}")
    return cell, run


def require_distinct_runs(runs: Runs) -> None:
    """Raise ConfigError if two variants are one run, such as one with a setting of a stage that the grid does not run.

    Their table would show a difference of nothing. Does nothing where input files are missing.
    """
    variants: dict[tuple[float, int, str], str] = {}
    for cell, run in runs.items():
        try:
            scored = run.fingerprints()[run.compared.after].fingerprint
        except (ConfigError, OSError):
            return  # the checks before the first run name what is missing
        first = variants.setdefault((cell.rate, cell.seed, scored), cell.variant)
        if first != cell.variant:
            raise ConfigError(
                f"variants {first!r} and {cell.variant!r} are the same runs: none of the settings in which they differ "
                f"is used in {', '.join(run.compared.chosen)}"
            )


def require_ready_runs(runs: Runs) -> None:
    """Check every run before the first one starts; ConfigError names the first run that cannot succeed."""
    for cell, run in runs.items():
        try:
            require_ready(run.config, run.compared.chosen)
        except ConfigError as e:
            raise ConfigError(f"{cell}: {e}") from e


def show_work(runs: Runs) -> None:
    """Print the number of runs and, by kind, how many of the artifacts they need are still to be made.

    Where input files are missing, print the stages of a run instead.
    """
    console = Console(highlight=False, soft_wrap=True)
    try:
        counts = [f"{kind} {count}" for kind, count in _artifacts_to_make(runs).items()]
    except (ConfigError, OSError) as e:
        stages = ", ".join(next(iter(runs.values())).compared.chosen)
        console.print(f"{len(runs)} runs of {stages}; what is to be made cannot be counted: {escape(str(e))}")
        return
    console.print(f"{len(runs)} runs; artifacts to make: {', '.join(counts) or 'none'}")


def _artifacts_to_make(runs: Runs) -> Counter[str]:
    """Return by kind how many artifacts of the runs are to be made. Raise if files that they need are missing."""
    needed: dict[tuple[str, str], bool] = {}
    for run in runs.values():
        store = open_store(run.config.workspace)
        for own in run.fingerprints().values():
            # Runs share stages, such as one SFT before many RL runs: each artifact counts once.
            needed[own.kind, own.fingerprint] = store.exists(own.kind, own.fingerprint)
    return Counter(kind for (kind, _), is_there in needed.items() if not is_there)
