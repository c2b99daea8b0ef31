"""Build the final table for the terminal, from the same facts as the page."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from klear_core.report.claims import Headline, headline
from klear_core.report.facts import Facts
from klear_core.report.notices import Notice, notices
from klear_core.report.scores_view import BenchmarkView, DifferenceRow, Mean, benchmark_views
from klear_core.report.text import NONE

_STYLES = {"better": "green", "worse": "red", "not_shown": "yellow", "incomplete": "red", "failed": "red"}


def score_table(facts: Facts, *, with_claims: bool = True) -> RenderableType:
    """Return scores with intervals, the change from model to model, the claims, and the failures and warnings.

    Pass `with_claims=False` for a part of a run: claims are about all its models.
    """
    parts: list[RenderableType] = []
    for bench in benchmark_views(facts):
        parts += [*([Text("")] if parts else []), _table(bench), *_unscored(bench)]
    if with_claims:
        parts += _claims(headline(facts))
    return Group(*parts, *(_line(n) for n in notices(facts)))


def _table(bench: BenchmarkView) -> Table:
    title = f"{bench.name}: {bench.num_problems:,} held-out problems, {bench.confidence} intervals"
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="dim",
        pad_edge=False,
        padding=(0, 1),
    )
    table.add_column("model", style="bold")
    for name in (f"avg@{bench.num_samples}", "greedy", f"pass@{bench.k}", "cut off", "change, points"):
        table.add_column(name, justify="right")
    for row in bench.rows:
        scores = (_mean(row.avg), _mean(row.greedy), _mean(row.pass_at_k))
        table.add_row(escape(row.model), *scores, row.truncated, _change(bench.step_to(row.model)))
    return table


def _unscored(bench: BenchmarkView) -> list[Text]:
    """Return a line per model with unscored answers; no column, because they are rare and a line has 80 characters."""
    return [
        Text(f"{row.model}: answers not judged, and in no score: {row.unscored}", style="yellow")
        for row in bench.rows
        if row.has_unscored
    ]


def _mean(mean: Mean | None) -> str:
    return f"{mean.value}\n[dim]{mean.interval}[/]" if mean else NONE


def _change(step: DifferenceRow | None) -> str:
    if step is None:
        return ""
    note = "\nnot shown" if step.standing == "not_shown" else ""
    return f"[{_STYLES[step.standing]}]{step.value}[/]\n[dim]{step.interval}{note}[/]"


def _claims(head: Headline) -> list[Text]:
    lines = [Text(""), Text(head.sentence, style=f"bold {_STYLES[head.standing]}")]
    return lines + [Text(claim.sentence, style=_STYLES[claim.standing]) for claim in head.claims]


def _line(notice: Notice) -> Text:
    style = "red" if notice.level == "failure" else "yellow"
    return Text.assemble((f"{notice.level} ", style), (f"{notice.where}: ", "bold"), notice.text)
