"""Put the results of an ablation beside published ones of the same comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from klear_core.config.ablation import PaperRows
from klear_core.config.settings import Settings
from klear_core.evaluate.ablation import TableRow
from klear_core.evaluate.sign_flip import holm
from klear_core.evaluate.stats import SeedSpread, t_test_p

CAUTION = "Scale and task differ: only the direction of a difference can be compared, not its size."


ALPHA = 0.05
"""Corrected p-value below which a difference of ours is shown."""


class BesideRow(Settings):
    """One variant: our score and the published ones, each with the difference from the same reference."""

    variant: str
    reference: str
    ours: SeedSpread | None = None
    """avg@n over seeds, in 0..1; None without a result."""
    our_difference: SeedSpread | None = None
    """Difference from the reference, paired by seed; None for the reference itself, and without a result."""
    p: float | None = None
    """Holm-corrected p-value of our difference, by Student's t test over seeds; None without one, or with collapses."""
    our_scores: dict[str, float]
    """Our mean scores on those of the published benchmarks that we have, in percent."""
    paper: dict[str, float]
    """Published scores by benchmark, in percent."""
    paper_difference: dict[str, float]
    """Published differences by benchmark, in points; empty for the reference itself."""

    @property
    def direction(self) -> str:
        """Compare the signs of our difference and the published ones, in words; empty for the reference."""
        if not self.paper_difference:
            return ""
        if self.our_difference is None or self.p is None or self.p >= ALPHA:
            return "not shown by ours"
        same = [name for name, points in self.paper_difference.items() if points * self.our_difference.mean > 0]
        return f"same in {len(same)} of {len(self.paper_difference)}"


class BesidePaper(Settings):
    """Published results of the same comparison beside ours."""

    source: str
    about: str
    """Scale and scoring of the published runs, in words."""
    caution: str = CAUTION
    """What can be compared."""
    rows: tuple[BesideRow, ...]


def beside_paper(paper: PaperRows, rows: Sequence[TableRow], references: Mapping[str, str]) -> BesidePaper:
    """Return the published rows with ours. `references` names the reference of each variant.

    Of a variant with several rates, ours is the row at its own rates.
    """
    ours: dict[str, TableRow] = {}
    for row in rows:
        # The row at own rates comes last and replaces the first of the others.
        if row.learning_rate is None or row.variant not in ours:
            ours[row.variant] = row
    found = [_beside(paper, variant, references[variant], ours.get(variant)) for variant in paper.scores]
    p_values = {row.variant: p for row in found if (p := _p_value(row, ours)) is not None}
    corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return BesidePaper(
        source=paper.source,
        about=paper.about,
        rows=tuple(row.model_copy(update={"p": corrected.get(row.variant)}) for row in found),
    )


def _p_value(row: BesideRow, ours: Mapping[str, TableRow]) -> float | None:
    """Return the p-value of our difference; None if there is none, or a run collapsed."""
    # Without an interval a run collapsed, and then a t test over so few seeds is as misleading.
    if row.our_difference is None or row.our_difference.interval is None:
        return None
    runs, reference = ours[row.variant].runs, ours[row.reference].runs
    return t_test_p([run.after - reference[seed].after for seed, run in runs.items() if seed in reference])


def _beside(paper: PaperRows, variant: str, reference: str, row: TableRow | None) -> BesideRow:
    scores, base = paper.scores[variant], paper.scores.get(reference, {})
    difference: dict[str, float] = {}
    our_scores: dict[str, float] = {}
    for name, score in scores.items():
        if name in base and variant != reference:
            difference[name] = round(score - base[name], 2)  # published scores have two decimals at most
        runs = row.runs.values() if row else ()
        ours = [run.scores[name] for run in runs if name in run.scores]
        if ours:
            our_scores[name] = 100 * fmean(ours)
    result = {"ours": row.score, "our_difference": row.difference} if row else {}
    return BesideRow(
        variant=variant,
        reference=reference,
        our_scores=our_scores,
        paper=scores,
        paper_difference=difference,
        **result,
    )
