"""Show an ablation's table as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from klear_core.config.settings import Settings
from klear_core.evaluate.ablation import TableRow
from klear_core.evaluate.ablation_runs import TOKEN_SHARES
from klear_core.evaluate.beside_paper import BesidePaper, BesideRow
from klear_core.evaluate.stats import SeedSpread, largest_rate


class AblationTable(Settings):
    """The rows of the table, and the runs without a result."""

    reference: str
    benchmarks: tuple[str, ...] = ()
    """Benchmarks whose mean is the score; empty in tables of earlier versions."""
    rows: tuple[TableRow, ...]
    beside: BesidePaper | None = None
    """Published results of the same comparison beside ours."""
    failures: dict[str, str]
    """Reasons by run, for the runs without a result."""


def as_markdown(table: AblationTable) -> str:
    """Format the table as Markdown: scores and token shares in per cent, differences in percentage points.

    Behind each mean is the range over seeds. The columns `95 %` hold Student's t intervals of the mean.
    """
    is_rl = any(run.token_shares for row in table.rows for run in row.runs.values())
    others = [row for row in table.rows if row.reference not in ("", table.reference, row.variant)]
    minus = "minus its reference" if others else f"minus {table.reference}"
    head = ["variant", "lr", "avg@n (range)", "95 %", f"{minus} (range)", "95 %"]
    head += ["collapsed (at most)", *TOKEN_SHARES, "max r", "entropy"] if is_rl else ["updates", "tokens"]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in table.rows:
        lines.append(_line([*_cells(row), *(_rl_cells(row) if is_rl else _sft_cells(row))]))
    lines.append("")
    for row in table.rows:
        if row.learning_rate is not None:  # a row without a rate repeats runs of other rows
            lines += _lines_of_missing_metrics(row)
    # Once for each variant, which has a row at each of its rates.
    lines += dict.fromkeys(f"- {row.variant} is compared with {row.reference}" for row in others)
    lines += _lines_of_other_rates(table)
    lines += _lines_of_choice(table)
    lines += [f"- no result: {run}: {why}" for run, why in table.failures.items()]
    if table.beside:
        lines += ["", *_lines_beside(table.beside, table.benchmarks)]
    return "\n".join(lines).rstrip() + "\n"


def _lines_of_choice(table: AblationTable) -> list[str]:
    """Return the note that the best row was chosen by its score; none if there is only one row."""
    if len(table.rows) < 2 or not table.benchmarks:
        return []
    names = ", ".join(table.benchmarks)
    chosen = (
        f"- chosen on this benchmark: whatever row is best here was chosen by its score on {names}, which is too high "
        "by that"
    )
    has_own = any(row.learning_rate is None for row in table.rows)
    return [f"{chosen}; the rates of `own` were chosen on the same problems, by other seeds" if has_own else chosen]


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
    lines = []
    for row in table.rows:
        if not row.against_own_rate:
            continue
        reference = row.reference or table.reference
        rates = [other.learning_rate for other in table.rows if other.variant == reference and other.learning_rate]
        own = f"its rate, {rates[0]:g}" if len(rates) == 1 else "the rate that was best for it on the other seeds"
        lines.append(f"- {row.variant} at lr {row.learning_rate:g} is compared with {reference} at {own}")
    return lines


def _cells(row: TableRow) -> list[str]:
    """Return the cells that every table has."""
    rate = "own" if row.learning_rate is None else f"{row.learning_rate:g}"
    difference = ["", ""] if row.difference is None else _spread_cells(row.difference, sign="+")
    return [row.variant, rate, *_spread_cells(row.score), *difference]


def _sft_cells(row: TableRow) -> list[str]:
    """Return the mean numbers of updates and of tokens that were trained on."""
    runs = row.runs.values()
    num_tokens = fmean(run.num_tokens or 0 for run in runs)
    return [f"{fmean(run.num_steps for run in runs):.0f}", f"{num_tokens:,.0f}"]


def _rl_cells(row: TableRow) -> list[str]:
    """Return collapses, token shares, the largest ratio and the entropy."""
    runs = list(row.runs.values())
    num_collapsed = sum(run.has_collapsed for run in runs)
    at_most = f"{100 * largest_rate(num_collapsed, len(runs)):.0f} %"
    cells = [f"{num_collapsed} of {len(runs)} ({at_most})"]
    for name in TOKEN_SHARES:
        share = fmean(run.token_shares[name] for run in runs)
        cells.append(f"{100 * share:.2f}")
    max_ratio = max(run.max_ratio or 0 for run in runs)
    entropy = fmean(run.entropy or 0 for run in runs)
    return [*cells, f"{max_ratio:.3g}", f"{entropy:.3f}"]


def _lines_beside(beside: BesidePaper, benchmarks: Sequence[str]) -> list[str]:
    """Return the published results beside ours. `benchmarks` are those of our score."""
    head = ["variant", f"ours: {', '.join(benchmarks) or 'avg@n'} (range)", "minus", "ours (range)", "95 %", "p"]
    names = list(beside.rows[0].paper)
    ours = {name for row in beside.rows for name in row.our_scores}
    for name in names:
        head += [f"ours: {name}"] if name in ours else []
        head += [f"paper: {name}", "difference"]
    head.append("direction")
    lines = [f"Beside {beside.source}: {beside.about}. {beside.caution}", ""]
    lines += [_line(head), _line(["---"] * len(head))]
    for row in beside.rows:
        cells = [row.variant, *_our_cells(row)]
        for name in names:
            points, score = row.paper_difference.get(name), row.our_scores.get(name)
            if name in ours:
                cells.append("no result" if score is None else f"{score:.1f}")
            cells += [f"{row.paper[name]:g}", "" if points is None else f"{points:+g}"]
        lines.append(_line([*cells, row.direction]))
    return lines


def _our_cells(row: BesideRow) -> list[str]:
    """Return our score, the reference, and our difference from it with its interval and corrected p-value."""
    score = "no result" if row.ours is None else _spread_cells(row.ours)[0]
    if row.variant == row.reference:
        return [score, "", "", "", ""]
    if row.our_difference is None:
        return [score, row.reference, "no result", "none", ""]
    p = "none" if row.p is None else f"{row.p:.3f}"
    return [score, row.reference, *_spread_cells(row.our_difference, sign="+"), p]


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
