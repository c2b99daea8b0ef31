"""Compare the variants of an ablation grid: read its runs, and compute the rows of its table.

The unit is the seed: one complete run, from data and SFT to the score. Variants of one seed share all artifacts that
they can. No interval over a handful of seeds is reliable if runs can collapse. So every row has its range, the number
of collapses, and the largest collapse rate that this number leaves possible. A row has an interval of the mean only if
none of its runs collapsed. One rule decides which differences are shown: scores are compared by Student's t where no
run of either side collapsed, numbers of collapses by Fisher's exact test where one did, and all p-values of a table
are corrected together by Holm's method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

from klear_core.artifacts.manifest import read_manifest
from klear_core.config.settings import Settings
from klear_core.errors import ArtifactError
from klear_core.evaluate.stats.intervals import SeedSpread, seed_spread, t_test_p
from klear_core.evaluate.stats.significance import fisher_exact_p, holm
from klear_core.metrics import METRICS_FILE, read_metrics
from klear_core.scores import EvalReport, read_reports

# ---- ablation runs ----
# Read the result of one run of an ablation grid from its artifacts.


TOKEN_SHARES = {
    "A<0, r low": "rl/clip/low_frac",
    "A>0, r high": "rl/clip/high_frac",
    "A>0, r low": "rl/outside/positive_below_frac",
    "A<0, r high": "rl/outside/negative_above_frac",
    "dual clip": "rl/clip/dual_frac",
}
"""Metrics with the share of trained tokens whose ratio r left the clip range, by sign of the advantage A and side of
the range. PPO's clip drops the gradient of the first two kinds."""

_MAX_RATIO, _ENTROPY, _INFORMATIVE = "rl/ratio/max", "rl/entropy/mean", "rl/groups/informative"


class RunResult(Settings):
    """The result of one run, from its training stage and the evaluations before and after it."""

    before: float | None
    """avg@n of the model that RL started from, averaged over benchmarks; None for SFT. Of SFT's model where grids
    compare the last one."""
    after: float
    """avg@n after training, averaged over benchmarks."""
    scores: dict[str, float] = {}
    """avg@n after training by benchmark; empty in files of earlier versions."""
    token_shares: dict[str, float]
    """Shares by the names of `TOKEN_SHARES`, averaged over the RL steps that trained; empty unless it was RL."""
    max_ratio: float | None = None
    """Largest ratio of new to old probability over all tokens and steps; None unless it was RL."""
    entropy: float | None = None
    """Mean entropy in nats per token, at the last step that trained; None unless it was RL."""
    num_steps: int = 0
    """Number of steps that trained, in SFT of updates."""
    num_tokens: int | None = None
    """Tokens that SFT trained on; None for others."""
    sampled_tokens: int | None = None
    """Tokens of all answers that RL sampled, and distillation before it; None for SFT and in files of earlier
    versions."""
    informative_groups: int | None = None
    """RL's groups with right and wrong answers, trained on or not; None for others and in files of earlier versions."""
    num_lacking: int = 0
    """Number of those steps that lack one of the metrics above (skipped updates, in files of earlier versions). Means
    are over the steps that have the metric."""
    greedy: float | None = None
    """Share of right greedy answers after RL, averaged over benchmarks; None if none were asked for."""
    commit: str | None = None
    """Git commit of the code that trained; None outside a git checkout."""

    @property
    def has_collapsed(self) -> bool:
        """Whether RL lost more than half of the score that it started from."""
        return self.before is not None and self.after < self.before / 2


def read_run(
    *,
    rl: Path,
    before: Path,
    after: Path,
    commit: str | None = None,
    sampled_tokens: int | None = None,
    scored_on: Collection[str] = (),
) -> RunResult:
    """Read a run's result from the artifact folders of its RL stage and of the evaluations before and after it.

    `commit` is that of the RL stage's manifest. Scores are means over the benchmarks `scored_on`, all if none. Raise
    ArtifactError if RL trained on no token.
    """
    rows = read_metrics(rl / METRICS_FILE)
    # only rows of steps that trained have the entropy
    steps = [row for row in rows if _ENTROPY in row]
    columns = {name: _numbers(steps, name) for name in (*TOKEN_SHARES.values(), _MAX_RATIO, _ENTROPY)}
    if not all(columns.values()):
        raise ArtifactError(
            f"{rl}: this RL stage trained on no token, or every update was skipped, so there is nothing to compare"
        )
    token_shares = {name: fmean(columns[metric]) for name, metric in TOKEN_SHARES.items()}
    num_complete = 0
    for row in steps:
        num_complete += all(row.get(name) is not None for name in columns)
    informative = _numbers(rows, _INFORMATIVE)
    scores = _scores(_reports(after, scored_on))
    return RunResult(
        before=fmean(_scores(_reports(before, scored_on)).values()),
        after=fmean(scores.values()),
        scores=scores,
        greedy=_greedy(_reports(after, scored_on)),
        commit=commit,
        token_shares=token_shares,
        max_ratio=max(columns[_MAX_RATIO]),
        entropy=columns[_ENTROPY][-1],
        num_steps=len(steps),
        sampled_tokens=sampled_tokens,
        informative_groups=int(sum(informative)) if informative else None,
        num_lacking=len(steps) - num_complete,
    )


def read_offline_run(
    *,
    model: Path,
    before: Path | None,
    after: Path,
    sampled_tokens: int | None = None,
    scored_on: Collection[str] = (),
) -> RunResult:
    """Read the result of SFT or distillation, which sample nothing while they train, as `read_run` does that of RL.

    SFT has no evaluation `before`.
    """
    manifest, reports = read_manifest(model), _reports(after, scored_on)
    scores = _scores(reports)
    return RunResult(
        before=fmean(_scores(_reports(before, scored_on)).values()) if before else None,
        after=fmean(scores.values()),
        scores=scores,
        greedy=_greedy(reports),
        commit=manifest.git_commit,
        token_shares={},
        num_steps=int(manifest.counts.get("steps", 0)),
        num_tokens=None if before else int(manifest.counts.get("tokens", 0)),
        sampled_tokens=sampled_tokens,
    )


def _reports(evaluation: Path, scored_on: Collection[str]) -> list[EvalReport]:
    """Return the reports of the benchmarks `scored_on`, all if none. ArtifactError if one is missing."""
    reports = [report for report in read_reports(evaluation) if not scored_on or report.benchmark in scored_on]
    if not reports or len(reports) < len(scored_on):
        raise ArtifactError(f"{evaluation}: this evaluation lacks benchmarks of {', '.join(scored_on) or 'any name'}")
    return reports


def _scores(reports: Sequence[EvalReport]) -> dict[str, float]:
    """Return avg@n by benchmark."""
    return {report.benchmark: report.avg.value for report in reports}


def _greedy(reports: Sequence[EvalReport]) -> float | None:
    """Return the mean share of right greedy answers; None if none were asked for."""
    values = [report.greedy.value for report in reports if report.greedy is not None]
    return fmean(values) if values else None


def _numbers(steps: Sequence[Mapping[str, float | None]], name: str) -> list[float]:
    """Return the metric's values at the steps that have one."""
    return [value for row in steps if (value := row.get(name)) is not None]


# ---- ablation ----


Runs = Mapping[int, RunResult]
"""Results of one variant at one learning rate, by seed."""


class SeedTest(Settings):
    """The test of a row against its reference."""

    by: Literal["t", "collapses"]
    """Student's t test of the scores, paired by seed; Fisher's exact test of the numbers of collapses."""
    p: float
    """Two-sided p-value."""
    corrected: float
    """The same by Holm's method over the rows of the table, in which those at own rates are a family of their own."""


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
    test: SeedTest | None = None
    """Whether `difference` is shown; None where that is None, and in tables of earlier versions."""
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
    # Runs at own rates are runs of the other rows: they are tested again, not beside them.
    fixed = [row for row in rows if row.learning_rate is not None]
    return (*_corrected(fixed), *_corrected([row for row in rows if row.learning_rate is None]))


def _corrected(family: Sequence[TableRow]) -> Iterator[TableRow]:
    """Yield the rows with their p-values corrected for their number."""
    corrected = iter(holm([row.test.p for row in family if row.test is not None]))
    for row in family:
        test = None if row.test is None else row.test.model_copy(update={"corrected": next(corrected)})
        yield row.model_copy(update={"test": test})


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
    num_collapsed = sum(run.has_collapsed for run in runs.values())
    score = seed_spread(scores, has_collapsed=num_collapsed > 0, bounds=(0, 1))
    difference = test = None
    if variant != reference_name:
        differences = [runs[seed].after - reference[seed].after for seed in shared]
        # A collapse of either side is in the difference.
        collapses = num_collapsed, sum(run.has_collapsed for run in reference.values())
        has_collapsed = any(collapses)
        difference = seed_spread(differences, has_collapsed=has_collapsed, bounds=(-1, 1))
        p = fisher_exact_p(collapses, (len(runs), len(reference))) if has_collapsed else t_test_p(differences)
        test = SeedTest(by="collapses" if has_collapsed else "t", p=p, corrected=p)
    return TableRow(
        variant=variant,
        learning_rate=rate,
        score=score,
        reference=reference_name,
        difference=difference,
        test=test,
        runs=dict(runs),
    )
