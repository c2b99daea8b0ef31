"""Build the final table for the terminal, from the same facts as the page."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from klear_core.evaluate.compare.promotion import Decision
from klear_core.report.run.claims import Headline, Span, headline
from klear_core.report.run.facts import Facts
from klear_core.report.run.scores_view import BenchmarkView, benchmark_views
from klear_core.report.run.warnings import Notice, notices
from klear_core.scores import NONE

VERDICTS = {"better": "better", "worse": "worse", "not_shown": "not shown"}
_PLAIN: dict[str, Any] = {"box": None, "header_style": "dim", "pad_edge": False, "padding": (0, 1)}
_STYLES = {"better": "green", "worse": "red", "not_shown": "yellow", "incomplete": "red", "failed": "red"}


def score_table(facts: Facts, *, with_claims: bool = True) -> RenderableType:
    """Return scores with intervals, the change from model to model, the claims, and the failures and warnings.

    Pass `with_claims=False` for a part of a run: claims are about all its models.
    """
    parts: list[RenderableType] = []
    views = benchmark_views(facts)
    for bench in views:
        parts += [*([Text("")] if parts else []), _scores(bench), *_changes(bench), *_reservations(bench)]
    if views:
        parts.append(_legend(views[0]))
    if with_claims:
        parts += _claims(headline(facts))
    if facts.decision is not None:
        parts += decision_lines(facts.decision)
    return Group(*parts, *(_line(n) for n in notices(facts)))


def decision_lines(decision: Decision, *, with_all: bool = False) -> list[Text]:
    """Return the decision on the champion in a sentence, and the checks that failed, or all of them."""
    style = "green" if decision.is_passed else "yellow"
    lines = [Text(""), Text(f"{decision.sentence}.", style=f"bold {style}")]
    for check in decision.checks:
        if with_all or not check.is_passed:
            mark = ("✓ ", "green") if check.is_passed else ("✗ ", "red")
            lines.append(Text.assemble(mark, (f"{check.name}: ", "bold"), check.text))
    return lines


def _scores(bench: BenchmarkView) -> Table:
    """Return one line per model. Intervals are those of avg@n; the page has those of the other scores."""
    title = f"{bench.name}: {bench.num_problems:,} problems, {bench.confidence} intervals of avg@n"
    table = Table(title=title, title_justify="left", title_style="bold", **_PLAIN)
    table.add_column("model", style="bold")
    table.add_column(f"avg@{bench.num_samples}", justify="right")
    for name in ("re-run", "other problems"):
        table.add_column(name, justify="right", style="dim")
    for name in ("greedy", f"pass@{bench.k}", "cut off", "no answer"):
        table.add_column(name, justify="right")
    for row in bench.rows:
        greedy = row.greedy.value if row.greedy else NONE
        pass_at_k = row.pass_at_k.value if row.pass_at_k else NONE
        scores = (row.avg.value, _span(row.avg.rerun), row.avg.other.text, greedy, pass_at_k)
        table.add_row(escape(row.model), *scores, row.truncated, row.no_answer)
    return table


def _changes(bench: BenchmarkView) -> list[Table]:
    """Return the table of changes of avg@n from model to model; nothing for a single model."""
    table = Table(**_PLAIN)
    table.add_column("change", style="bold")
    table.add_column("points", justify="right")
    for name in ("re-run", "other problems"):
        table.add_column(name, justify="right", style="dim")
    for name in ("p", "verdict"):
        table.add_column(name, justify="right")
    for row in bench.rows:
        step = bench.step_to(row.model)
        if step is not None:
            verdict = f"[{_STYLES[step.standing]}]{VERDICTS[step.standing]}[/]"
            names = escape(f"{step.before} → {step.after}")
            table.add_row(names, step.value, _span(step.rerun), step.other.text, step.p, verdict)
    return [table] if table.row_count else []


def _span(span: Span | None) -> str:
    return span.text if span else NONE


def _legend(bench: BenchmarkView) -> Text:
    """Return the explanation of the two intervals and of p."""
    text = (
        "re-run: these problems, other samples (compare published scores with it); other problems: a new draw of such "
        "problems"
    )
    if bench.num_compared:
        text += f"; p: sign-flip test, corrected for {bench.num_compared} comparisons, gives the verdict on models"
    return Text(text, style="dim")


def _reservations(bench: BenchmarkView) -> list[Text]:
    """Return the lines with reservations about models' scores; no columns, because they are rare."""
    found: list[tuple[str, str]] = []
    found += [
        (row.model, f"answers not judged, and in no score: {row.unscored}") for row in bench.rows if row.has_unscored
    ]
    over = f"scores over fewer than all {bench.num_problems:,} problems"
    found += [(row.model, f"{over}: {row.partly}") for row in bench.rows if row.partly]
    for row in bench.rows:
        # Also a benchmark that the training data was not compared with.
        if not row.contaminated.startswith("0 "):
            found.append((row.model, f"problems that overlap with its training data: {row.contaminated}"))
    found += [(row.model, f"chosen on this benchmark: {row.chosen}") for row in bench.rows if row.chosen]
    return [Text(f"{model}: {text}", style="yellow") for model, text in found]


def _claims(head: Headline) -> list[Text]:
    lines = [Text(""), Text(head.sentence, style=f"bold {_STYLES[head.standing]}")]
    return lines + [Text(claim.sentence, style=_STYLES[claim.standing]) for claim in head.claims]


def _line(notice: Notice) -> Text:
    style = "red" if notice.level == "failure" else "yellow"
    return Text.assemble((f"{notice.level} ", style), (f"{notice.where}: ", "bold"), notice.text)
