"""Compute an ablation's table: per variant the score over seeds, the difference from the reference, and token shares.

The unit is the seed: one complete run, from data and SFT to the score. Variants of one seed share everything but RL.
Runs that can collapse have no interval that holds over a handful of seeds, so every row has its range, the number of
collapses and the largest rate of them that it leaves possible; an interval of the mean stands only beside runs of which
none collapsed, and is about such runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from klear_core.config.settings import Settings
from klear_core.errors import ArtifactError
from klear_core.evaluate.stats import SeedSpread, largest_rate, seed_spread
from klear_core.metrics import METRICS_FILE, read_metrics
from klear_core.scores import read_reports

TOKEN_SHARES = {
    "A<0, r low": "rl/clip/low_frac",
    "A>0, r high": "rl/clip/high_frac",
    "A>0, r low": "rl/outside/positive_below_frac",
    "A<0, r high": "rl/outside/negative_above_frac",
    "dual clip": "rl/clip/dual_frac",
}
"""Metrics with the share of trained tokens whose ratio r left the clip range, by sign of the advantage A and side of
the range. PPO's clip drops the gradient of the first two kinds."""

_MAX_RATIO, _ENTROPY = "rl/ratio/max", "rl/entropy/mean"


class RunResult(Settings):
    """The result of one run, from its RL stage and the evaluations before and after it."""

    before: float
    """avg@n of the model that RL started from, averaged over benchmarks."""
    after: float
    """avg@n after RL, averaged over benchmarks."""
    token_shares: dict[str, float]
    """Shares by the names of `TOKEN_SHARES`, averaged over the RL steps that trained."""
    max_ratio: float
    """Largest ratio of new to old probability over all tokens and steps."""
    entropy: float
    """Mean entropy in nats per token, at the last step that trained."""
    num_steps: int = 0
    """Number of RL steps that trained."""
    num_lacking: int = 0
    """Number of those steps that lack one of the metrics above (an update skipped, in files of earlier versions).
    Means are over the steps that have the metric."""
    greedy: float | None = None
    """Share of right greedy answers after RL, averaged over benchmarks; None if none were asked for."""
    commit: str | None = None
    """Git commit of the code that trained; None outside a git checkout."""

    @property
    def has_collapsed(self) -> bool:
        """Whether RL lost more than half of the score that it started from."""
        return self.after < self.before / 2


Runs = Mapping[int, RunResult]
"""Results of one variant at one learning rate, by seed."""


class TableRow(Settings):
    """One row of the table: a variant at one learning rate, or at its own rates."""

    variant: str
    learning_rate: float | None
    """None: each seed uses the rate that scored best on the other seeds, so no seed helps to choose its rate."""
    score: SeedSpread
    """avg@n after RL, over seeds."""
    difference: SeedSpread | None
    """Difference from the reference, paired by seed, at the same rate; at the reference's own rates if it has no runs
    at this one or `learning_rate` is None. None for the reference itself."""
    against_own_rate: bool = False
    """Whether the reference in `difference` has its own rate and not this row's."""
    runs: dict[int, RunResult]


class AblationTable(Settings):
    """The table's rows, and the runs that gave no result."""

    reference: str
    benchmarks: tuple[str, ...] = ()
    """Benchmarks whose mean is the score; empty in tables of earlier versions."""
    rows: tuple[TableRow, ...]
    failures: dict[str, str]
    """Reasons by run, for the runs without a result."""


def read_run(*, rl: Path, before: Path, after: Path, commit: str | None = None) -> RunResult:
    """Read a run's result from the artifact folders of its RL stage and of the evaluations before and after it.

    Raise ArtifactError if RL trained on no token.
    """
    # only rows of steps that trained have the entropy
    steps = [row for row in read_metrics(rl / METRICS_FILE) if _ENTROPY in row]
    columns = {name: _numbers(steps, name) for name in (*TOKEN_SHARES.values(), _MAX_RATIO, _ENTROPY)}
    if not all(columns.values()):
        raise ArtifactError(
            f"{rl}: this RL stage trained on no token, or every update was skipped, so there is nothing to compare"
        )
    reports_before, reports_after = read_reports(before), read_reports(after)
    greedy = [report.greedy.value for report in reports_after if report.greedy is not None]
    mean_before = fmean(report.avg.value for report in reports_before)
    mean_after = fmean(report.avg.value for report in reports_after)
    token_shares = {name: fmean(columns[metric]) for name, metric in TOKEN_SHARES.items()}
    num_complete = 0
    for row in steps:
        num_complete += all(row.get(name) is not None for name in columns)
    return RunResult(
        before=mean_before,
        after=mean_after,
        greedy=fmean(greedy) if greedy else None,
        commit=commit,
        token_shares=token_shares,
        max_ratio=max(columns[_MAX_RATIO]),
        entropy=columns[_ENTROPY][-1],
        num_steps=len(steps),
        num_lacking=len(steps) - num_complete,
    )


def _numbers(steps: Sequence[Mapping[str, float | None]], name: str) -> list[float]:
    """Return the metric's values at the steps that have one."""
    return [value for row in steps if (value := row.get(name)) is not None]


def rows_of(runs: Mapping[str, Mapping[float, Runs]], reference: str) -> tuple[TableRow, ...]:
    """Return a row per variant and learning rate, plus one at the variant's own rates if one has several rates.

    `runs` maps variant and rate to runs. A row needs two seeds that the reference has as well, else it is left out.
    A variant at a rate that the reference does not have is compared with the reference at its own rate.
    """
    by_rate: dict[float | None, dict[str, Runs]] = {}
    for variant, runs_by_rate in runs.items():
        for rate, runs_by_seed in runs_by_rate.items():
            by_rate.setdefault(rate, {})[variant] = runs_by_seed
    own = {variant: at_own_rate(runs_by_rate) for variant, runs_by_rate in runs.items()}
    if any(len(runs_by_rate) > 1 for runs_by_rate in runs.values()):
        by_rate[None] = own
    rows: list[TableRow] = []
    for learning_rate, runs_by_variant in by_rate.items():
        is_elsewhere = reference not in runs_by_variant
        reference_runs = own.get(reference, {}) if is_elsewhere else runs_by_variant[reference]
        for variant, runs_by_seed in runs_by_variant.items():
            row = _row(variant, learning_rate, runs_by_seed, reference_runs, is_reference=variant == reference)
            if row is not None:
                rows.append(row.model_copy(update={"against_own_rate": is_elsewhere}))
    return tuple(rows)


def at_own_rate(runs_by_rate: Mapping[float, Runs]) -> Runs:
    """Return each seed's run at the rate with the best mean score on all other seeds; a tie goes to the smaller rate.

    Seeds that lack a run at some rate are left out.
    """
    seeds = sorted(set.intersection(*(set(runs) for runs in runs_by_rate.values())))
    chosen = {}
    for seed in seeds:
        others = [other for other in seeds if other != seed]
        means: dict[float, float] = {}
        for rate, runs in runs_by_rate.items():
            scores = [runs[other].after for other in others]
            # with a single seed there are no others: all means are 0, and the smallest rate is chosen
            means[rate] = fmean(scores) if scores else 0.0
        best_rate = min(means, key=lambda rate: (-means[rate], rate))
        chosen[seed] = runs_by_rate[best_rate][seed]
    return chosen


def best_runs(table: AblationTable) -> list[tuple[TableRow, int]]:
    """Return the runs that the table's scores put first, each as its row and seed: those of the row with the best mean,
    and the best run of each seed. Empty if there is only one row."""
    rows = [row for row in table.rows if row.learning_rate is not None]
    if len(rows) < 2:
        return []
    best_row = max(rows, key=lambda row: row.score.mean)
    found = [(best_row, seed) for seed in best_row.runs]
    for seed in sorted({seed for row in rows for seed in row.runs}):
        best = max((row for row in rows if seed in row.runs), key=lambda row: row.runs[seed].after)
        if best is not best_row:
            found.append((best, seed))
    return found


def _row(variant: str, rate: float | None, runs: Runs, reference: Runs, *, is_reference: bool) -> TableRow | None:
    shared = [seed for seed in runs if seed in reference]
    if len(shared) < 2:
        return None
    scores = [run.after for run in runs.values()]
    own_collapsed = any(run.has_collapsed for run in runs.values())
    score = seed_spread(scores, has_collapsed=own_collapsed, bounds=(0, 1))
    difference = None
    if not is_reference:
        differences = [runs[seed].after - reference[seed].after for seed in shared]
        has_collapsed = own_collapsed or any(reference[seed].has_collapsed for seed in shared)
        difference = seed_spread(differences, has_collapsed=has_collapsed, bounds=(-1, 1))
    return TableRow(variant=variant, learning_rate=rate, score=score, difference=difference, runs=dict(runs))


def as_markdown(table: AblationTable) -> str:
    """Format the table as Markdown: scores and token shares in per cent, differences in percentage points.

    Behind each mean is the range over seeds. The columns `95 %` hold Student's t intervals of the mean.
    """
    head = [
        "variant",
        "lr",
        "avg@n (range)",
        "95 %",
        f"minus {table.reference} (range)",
        "95 %",
        "collapsed (at most)",
        *TOKEN_SHARES,
        "max r",
        "entropy",
    ]
    lines = [_line(head), _line(["---"] * len(head)), *(_line(_cells(row)) for row in table.rows), ""]
    for row in table.rows:
        if row.learning_rate is not None:  # a row without a rate repeats runs of other rows
            lines += _lines_of_missing_metrics(row)
    lines += _lines_of_other_rates(table)
    if len(table.rows) > 1 and table.benchmarks:
        names = ", ".join(table.benchmarks)
        lines.append(
            f"- chosen on this benchmark: whatever row is best here was chosen by its score on {names}, which is too "
            "high by that; the rates of `own` were chosen on the same problems, by other seeds"
        )
    lines += [f"- no result: {run}: {why}" for run, why in table.failures.items()]
    return "\n".join(lines).rstrip() + "\n"


def _lines_of_missing_metrics(row: TableRow) -> list[str]:
    """Return a line for each run with steps that lack metrics."""
    lines: list[str] = []
    for seed, run in row.runs.items():
        if run.num_lacking:
            lines.append(
                f"- numbers are missing at {run.num_lacking} of {run.num_steps} steps: "
                f"{row.variant}, lr {row.learning_rate:g}, seed {seed}"
            )
    return lines


def _lines_of_other_rates(table: AblationTable) -> list[str]:
    """Return a line for each row whose difference is from the reference at another rate."""
    rows = [row for row in table.rows if row.variant == table.reference and row.learning_rate is not None]
    rates = [f"{row.learning_rate:g}" for row in rows]
    own = f"its rate, {rates[0]}" if len(rates) == 1 else "the rate that was best for it on the other seeds"
    return [
        f"- {row.variant} at lr {row.learning_rate:g} is compared with {table.reference} at {own}"
        for row in table.rows
        if row.against_own_rate
    ]


def _cells(row: TableRow) -> list[str]:
    runs = list(row.runs.values())
    rate = "own" if row.learning_rate is None else f"{row.learning_rate:g}"
    difference = ["", ""] if row.difference is None else _spread_cells(row.difference, sign="+")
    num_collapsed = sum(run.has_collapsed for run in runs)
    at_most = f"{100 * largest_rate(num_collapsed, len(runs)):.0f} %"
    cells = [row.variant, rate, *_spread_cells(row.score), *difference, f"{num_collapsed} of {len(runs)} ({at_most})"]
    for name in TOKEN_SHARES:
        share = fmean(run.token_shares[name] for run in runs)
        cells.append(f"{100 * share:.2f}")
    max_ratio = max(run.max_ratio for run in runs)
    entropy = fmean(run.entropy for run in runs)
    return [*cells, f"{max_ratio:.3g}", f"{entropy:.3f}"]


def _spread_cells(spread: SeedSpread, *, sign: str = "") -> list[str]:
    """Return the mean with its range, and the interval of the mean."""
    mean, least, most = (format(100 * x, f"{sign}.1f") for x in (spread.mean, spread.least, spread.most))
    interval = "none"
    if spread.interval is not None:
        low, high = (format(100 * x, f"{sign}.1f") for x in (spread.interval.low, spread.interval.high))
        interval = f"{low} to {high}"
    return [f"{mean} ({least} to {most})", interval]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
