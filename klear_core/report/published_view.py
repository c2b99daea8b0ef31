"""Prepare published scores for comparison with ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from klear_core.evaluate.published import Agreement, PublishedModel, agreement_with
from klear_core.report.facts import ModelFacts
from klear_core.report.text import NONE, percent, points


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One published score, and its comparison with each of our models."""

    model: str
    source: str
    score: str
    """The score with its n: `90.5 %, avg@64`."""
    bound: str
    """Largest difference to expect between two runs of one model with this score: `±1.9`."""
    ours: tuple[tuple[str, bool], ...]
    """For each of our models the difference to the published score, and whether two runs of one model may differ so."""


def published_rows(
    published: Sequence[PublishedModel], models: Sequence[ModelFacts], benchmark: str
) -> tuple[PublishedRow, ...]:
    """Return the published scores on a benchmark, in the order of the file."""
    rows = []
    for row in published:
        found = [_agreement(row, model, benchmark) for model in models]
        known = [agreement for agreement in found if agreement]
        if not known:
            continue
        first = known[0]
        rows.append(
            PublishedRow(
                model=row.model,
                source=row.source,
                score=f"{percent(first.published)}, avg@{first.num_samples}",
                bound=f"±{100 * first.bound:.1f}",
                ours=tuple(_cell(agreement) for agreement in found),
            )
        )
    return tuple(rows)


def _agreement(row: PublishedModel, model: ModelFacts, benchmark: str) -> Agreement | None:
    report = model.score(benchmark)
    return agreement_with(row, report) if report else None


def _cell(found: Agreement | None) -> tuple[str, bool]:
    if found is None:
        return NONE, False
    return f"{points(found.difference)}, {'agrees' if found.agrees else 'differs'}", found.agrees
