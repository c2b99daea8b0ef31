"""Plan the runs of an ablation grid: the cells, their settings, and the stages that a comparison needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from rich.console import Console
from rich.markup import escape

from flows.resolve import resolve
from klear_core.artifacts.manifest import ArtifactId
from klear_core.config.ablation import AblationConfig, ComparedStage
from klear_core.config.jobs import RlJob, SftJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.sft import SftConfig
from klear_core.errors import ConfigError
from klear_core.pipeline.fingerprints import fingerprints_of
from klear_core.pipeline.graph import evaluation_of, stages_of, with_inputs
from klear_core.pipeline.preflight import require_ready
from klear_core.pipeline.workspace import open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Names of the stages that a grid compares."""

    model: ComparedStage
    """The stage whose models are compared."""
    before: str | None
    """The evaluation of the model that RL starts from; None for SFT, before which there is no skill to lose."""
    after: str
    """The evaluation of the compared model."""
    chosen: tuple[str, ...]
    """All stages to run: the evaluations and what they depend on."""

    @classmethod
    def of(cls, config: PipelineConfig, model: ComparedStage) -> Compared:
        """Return the names in this config's pipeline. ConfigError if it does not train the model."""
        stages = stages_of(config)
        stage = next((stage for stage in stages if stage.name == model), None)
        if stage is None or not isinstance(stage.job, SftJob | RlJob):
            trained = [stage.name for stage in stages if isinstance(stage.job, SftJob | RlJob)]
            raise ConfigError(
                f"compare = {model!r}: profile {config.name} trains only {', '.join(trained) or 'nothing'}"
            )
        is_rl = isinstance(stage.job, RlJob)
        before = evaluation_of(stages, stage.inputs["model"]).name if is_rl else None
        after = evaluation_of(stages, model).name
        chosen = tuple(stage.name for stage in with_inputs(stages, [after, before or after]))
        return cls(model=model, before=before, after=after, chosen=chosen)


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
    def training(self) -> SftConfig | RlConfig:
        """Return the settings of the compared training."""
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
    rates = {variant: cfg.rates_of(variant) or (None,) for variant in cfg.variants}
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
    own = [f"seed={seed}"]
    if rate is not None:
        own.append(f"{cfg.compare}.optim.lr={rate}")
    taken = {_key(override) for override in own}
    if replaced := [override for override in of_grid if _key(override) in taken]:
        raise ConfigError(f"{variant}: {replaced[0]!r} has no effect: seeds and learning_rates of the grid replace it")
    own = [*of_grid, *own]
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


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


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
