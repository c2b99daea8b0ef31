"""Compute the rows of an ablation's table: per variant the score over seeds and the difference from the reference.

The unit is the seed: one complete run, from data and SFT to the score. Variants of one seed share all artifacts that
they can. No interval over a handful of seeds is reliable if runs can collapse. So every row has its range, the number
of collapses, and the largest collapse rate that this number leaves possible. A row has an interval of the mean only if
none of its runs collapsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from klear_core.config.settings import Settings
from klear_core.evaluate.ablation_runs import RunResult
from klear_core.evaluate.stats import SeedSpread, seed_spread

Runs = Mapping[int, RunResult]
"""Results of one variant at one learning rate, by seed."""


class TableRow(Settings):
    """One row of the table: a variant at one learning rate, or at its own rates."""

    variant: str
    learning_rate: float | None
    """None: each seed uses the rate that scored best on the other seeds, so no seed helps to choose its rate."""
    score: SeedSpread
    """avg@n after training, over seeds."""
    reference: str = ""
    """The variant that this one is compared with; empty: that of the table."""
    difference: SeedSpread | None
    """Difference from the reference, paired by seed, at the same rate; at the reference's own rates if it has no runs
    at this one or `learning_rate` is None. None for the reference itself."""
    against_own_rate: bool = False
    """Whether the reference in `difference` has its own rate and not this row's."""
    runs: dict[int, RunResult]


def rows_of(
    runs: Mapping[str, Mapping[float, Runs]], reference: str, references: Mapping[str, str] | None = None
) -> tuple[TableRow, ...]:
    """Return a row per variant and learning rate, plus one at the variant's own rates if one has several rates.

    `runs` maps variant and rate to runs, `references` variants to other references than the common one. A row needs
    two seeds that its reference has as well, else it is left out. A variant at a rate that the reference does not have
    is compared with the reference at its own rate.
    """
    by_rate: dict[float | None, dict[str, Runs]] = {}
    for variant, runs_by_rate in runs.items():
        for rate, runs_by_seed in runs_by_rate.items():
            by_rate.setdefault(rate, {})[variant] = runs_by_seed
    own = {variant: at_own_rate(runs_by_rate) for variant, runs_by_rate in runs.items()}
    # With one rate each, rows at own rates would only repeat the others.
    if any(len(runs_by_rate) > 1 for runs_by_rate in runs.values()):
        by_rate[None] = own
    rows: list[TableRow] = []
    for learning_rate, runs_by_variant in by_rate.items():
        for variant, runs_by_seed in runs_by_variant.items():
            compared_with = (references or {}).get(variant, reference)
            # Without runs of the reference at this rate nothing can be paired; its own rate stands in, and is named.
            is_elsewhere = compared_with not in runs_by_variant
            source = own if is_elsewhere else runs_by_variant
            row = _row(variant, learning_rate, runs_by_seed, compared_with, source.get(compared_with, {}))
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


def best_runs(rows: Sequence[TableRow]) -> list[tuple[TableRow, int]]:
    """Return the runs that a reader would choose by these scores, each as its row and seed.

    These are the runs of the row with the best mean, and the best run of each seed. Empty if there is only one row.
    """
    # A row at own rates holds runs of the other rows, and would offer each of them twice.
    rows = [row for row in rows if row.learning_rate is not None]
    if len(rows) < 2:
        return []
    best_row = max(rows, key=lambda row: row.score.mean)
    found = [(best_row, seed) for seed in best_row.runs]
    # Who has one seed only would take its best run, so those runs are marked as well.
    for seed in sorted({seed for row in rows for seed in row.runs}):
        best = max((row for row in rows if seed in row.runs), key=lambda row: row.runs[seed].after)
        if best is not best_row:
            found.append((best, seed))
    return found


def _row(variant: str, rate: float | None, runs: Runs, reference_name: str, reference: Runs) -> TableRow | None:
    """Return the row of these runs; None if fewer than two of its seeds have a run of the reference."""
    shared = [seed for seed in runs if seed in reference]
    if len(shared) < 2:
        return None
    scores = [run.after for run in runs.values()]
    own_collapsed = any(run.has_collapsed for run in runs.values())
    score = seed_spread(scores, has_collapsed=own_collapsed, bounds=(0, 1))
    difference = None
    if variant != reference_name:
        differences = [runs[seed].after - reference[seed].after for seed in shared]
        # A collapse of either side is in the difference.
        has_collapsed = own_collapsed or any(reference[seed].has_collapsed for seed in shared)
        difference = seed_spread(differences, has_collapsed=has_collapsed, bounds=(-1, 1))
    return TableRow(
        variant=variant,
        learning_rate=rate,
        score=score,
        reference=reference_name,
        difference=difference,
        runs=dict(runs),
    )
