"""Phrase the claims of a run. Unless the sign-flip test rejects chance, a sentence says that no effect is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from klear_core.evaluate.compare.paired import PairedComparison
from klear_core.evaluate.stats.significance import min_changed
from klear_core.report.charts import nice_ticks
from klear_core.report.run.facts import ComparedModels, Facts
from klear_core.scores import MINUS, NONE, Range, p_value, percent, points, range_text

Standing = Literal["better", "worse", "not_shown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One sentence about a difference and whether the data supports it, or about why there is none to report."""

    standing: Standing | Literal["incomplete"]
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The report's first line and the claims below it."""

    standing: Standing | Literal["incomplete", "failed"]
    sentence: str
    claims: tuple[Claim, ...]


def standing_of(scores: PairedComparison) -> Standing:
    """Return better or worse only if the corrected p-value is below 1 minus the confidence; never by an interval."""
    if scores.is_better:
        return "better"
    return "worse" if scores.is_worse else "not_shown"


def why_not_tested(scores: PairedComparison) -> str:
    """Return why the test could not have shown anything; empty if it could."""
    return too_few_changed(
        scores.num_changed, scores.num_problems, num_clusters=scores.num_clusters, confidence=scores.confidence
    )


def too_few_changed(num: int, num_problems: int, *, num_clusters: int | None, confidence: float) -> str:
    """Return the sentence that too few problems changed for the test to show anything; empty if they are enough.

    With clusters, `num` counts those of them that changed.
    """
    if num >= min_changed(confidence):
        return ""
    of = f"{num_clusters} clusters of problems" if num_clusters else f"{num_problems} problems"
    return f"only {num} of {of} changed, too few for a test"


def floor_note(num_problems: int) -> str:
    """Return the sentence for an interval over other problems that is as narrow as so few problems allow."""
    return (
        f"with {num_problems} problems a change in up to 2 of {num_problems} could go unseen; the interval over other "
        "problems is not narrower than that"
    )


def headline(facts: Facts) -> Headline:
    """Return a headline about the stage that failed, if one did; else the first claim about the scores."""
    first, *others = _what_scores_show(facts)
    failed = next((stage.name for stage in facts.missing if stage.trouble), None)
    if failed is None:
        return Headline(standing=first.standing, sentence=first.sentence, claims=tuple(others))
    num_done = len(facts.stages)
    sentence = f"This run failed in {failed}, with {num_done} of {num_done + len(facts.missing)} stages done."
    return Headline(standing="failed", sentence=sentence, claims=(first, *others))


def _what_scores_show(facts: Facts) -> tuple[Claim, ...]:
    """Return the claims, last training stage first. With several benchmarks, one sentence on all of them leads."""
    if len(facts.models) < 2:
        return (Claim(standing="incomplete", sentence=_why_nothing(facts)),)
    steps = list(zip(facts.models, facts.models[1:], strict=False))
    sampled = [d for d in facts.differences if d.scores.decoding == "sampled"]
    claims = {(d.before, d.after, d.scores.benchmark): _claim(d, facts) for d in sampled}
    ordered = tuple(
        claims[key]
        for before, after in reversed(steps)
        for benchmark in facts.benchmarks
        if (key := (before.maker.name, after.maker.name, benchmark)) in claims
    )
    *_, before_last, last_model = facts.models
    last = [d for d in sampled if (d.before, d.after) == (before_last.maker.name, last_model.maker.name)]
    if not last:
        pair = f"{before_last.maker.label} and {last_model.maker.label}"
        sentence = f"No paired comparison of {pair} was made, so nothing is claimed of the last step."
        return (Claim(standing="incomplete", sentence=sentence), *ordered)
    if len(last) == 1:
        return ordered
    return (Claim(standing=_overall(last), sentence=_tally(last, facts)), *ordered)


def _claim(difference: ComparedModels, facts: Facts) -> Claim:
    """Phrase it: `GPPO improved held-out avg@4 from 67.1 % to 97.8 % (+30.7 points; re-run of these problems: …).`"""
    found, who = difference.scores, facts.model(difference.after).maker.method_or_label
    metric = _metric(facts, difference)
    what = f"{metric} on {found.benchmark}" if len(facts.benchmarks) > 1 else f"held-out {metric}"
    from_to = _from_to(facts, difference)
    unlike = "" if found.is_same_decoding else "; the two were decoded differently"
    figures = f"({points(found.difference)} points; {_intervals(found)}; {_test(found, facts)}{unlike})"
    match standing := standing_of(found):
        case "better":
            sentence = f"{who} improved {what}{from_to} {figures}."
        case "worse":
            sentence = f"{who} made {what} worse:{from_to} {figures}."
        case "not_shown":
            sentence = f"An effect of {who} on {what} is not shown:{from_to} {figures}."
    return Claim(standing=standing, sentence=sentence)


def _metric(facts: Facts, difference: ComparedModels) -> str:
    score = facts.model(difference.after).score(difference.scores.benchmark)
    return f"avg@{score.num_samples}" if score else "score"


def _from_to(facts: Facts, difference: ComparedModels) -> str:
    before = facts.model(difference.before).score(difference.scores.benchmark)
    after = facts.model(difference.after).score(difference.scores.benchmark)
    return f" from {percent(before.avg.value)} to {percent(after.avg.value)}" if before and after else ""


def _intervals(scores: PairedComparison) -> str:
    rerun = ""
    if scores.rerun is not None:
        rerun = f"re-run of these problems: {range_text(scores.rerun)}; "
    return f"{rerun}other such problems: {range_text(scores.new_problems)}"


def _test(scores: PairedComparison, facts: Facts) -> str:
    """Return the p-value, said to be corrected where several differences were compared, or why there is none."""
    reason = why_not_tested(scores)
    if reason:
        return reason
    corrected = f", corrected for {facts.num_compared} comparisons" if facts.num_compared > 1 else ""
    return f"sign-flip {p_value(scores.p_corrected)}{corrected}"


def _overall(differences: list[ComparedModels]) -> Standing:
    standings = {standing_of(d.scores) for d in differences}
    # One benchmark that got worse decides the tone, because a headline must not hide it.
    if "worse" in standings:
        return "worse"
    return "better" if "better" in standings else "not_shown"


def _tally(differences: list[ComparedModels], facts: Facts) -> str:
    """Phrase all benchmarks: `Of 3 benchmarks, GPPO improved a (67.1 % to 97.8 %) and b (…), and has no shown …`."""
    said: dict[Standing, str] = {
        "better": "improved {}",
        "worse": "made {} worse",
        "not_shown": "has no shown effect on {}",
    }
    parts = []
    for standing, words in said.items():
        names = [_with_scores(d, facts) for d in differences if standing_of(d.scores) == standing]
        if names:
            parts.append(words.format(_listed(names)))
    method = facts.model(differences[0].after).maker.method_or_label
    return f"Of {len(differences)} benchmarks, {method} {', and '.join(parts)}."


def _with_scores(difference: ComparedModels, facts: Facts) -> str:
    scores = _from_to(facts, difference).removeprefix(" from ")
    return f"{difference.scores.benchmark} ({scores})" if scores else difference.scores.benchmark


def _listed(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _why_nothing(facts: Facts) -> str:
    if not facts.models:
        return "No model was evaluated, so this run claims nothing."
    return f"Only {facts.models[0].maker.label} was evaluated, so there is nothing to compare and nothing is claimed."


# ---- differences view ----
# Prepare the paired differences between models on one benchmark, as text and as positions on an axis.


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An interval as text, and its ends in percent of the axis for drawing."""

    text: str
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis from the first to the last of its marks, which are round numbers."""

    marks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Return a value's position in percent of the axis length."""
        return round(100 * (value - self.marks[0]) / (self.marks[-1] - self.marks[0]), 2)

    @property
    def labels(self) -> tuple[tuple[float, str], ...]:
        """Position and signed number of each mark."""
        return tuple((self.place(mark), _signed(mark)) for mark in self.marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceRow:
    """A paired difference as text, and as positions for drawing."""

    before: str
    after: str
    score: str
    """Name of the score: `avg@4` or `greedy`."""
    value: str
    at: float
    """Position on `BenchmarkView.difference_axis` in percent of its length."""
    other: Span
    """Interval over other problems of this kind."""
    rerun: Span | None
    """Interval over other samples of these problems; None for greedy answers."""
    p: str
    """Corrected p-value: `< 0.0001`, or why there is none."""
    notes: tuple[str, ...]
    """Reservations about the interval and the test."""
    standing: Standing
    num_problems: int


def axis_of(differences: list[ComparedModels]) -> Axis:
    """Return an axis in percentage points that covers zero and every interval."""
    ends = [d.scores.new_problems for d in differences]
    ends += [d.scores.rerun for d in differences if d.scores.rerun]
    low = min((100 * e.low for e in ends), default=0.0)
    high = max((100 * e.high for e in ends), default=0.0)
    return Axis(marks=tuple(nice_ticks(min(low, 0.0), max(high, 0.0))))


def difference_row(facts: Facts, d: ComparedModels, axis: Axis, *, num_samples: int) -> DifferenceRow:
    """Return one difference with its intervals placed on the axis."""
    scores = d.scores
    rerun = _difference_span(scores.rerun, axis) if scores.rerun else None
    p = p_value(scores.p_corrected).removeprefix("p ").removeprefix("= ")
    score = "greedy" if scores.decoding == "greedy" else f"avg@{num_samples}"
    return DifferenceRow(
        before=facts.model(d.before).maker.label,
        after=facts.model(d.after).maker.label,
        score=score,
        value=points(scores.difference),
        at=axis.place(scores.difference * 100),
        other=_difference_span(scores.new_problems, axis),
        rerun=rerun,
        p=NONE if why_not_tested(scores) else p,
        notes=_difference_notes(scores),
        standing=standing_of(scores),
        num_problems=scores.num_problems,
    )


def _difference_span(ends: Range, axis: Axis) -> Span:
    return Span(text=range_text(ends), low=axis.place(ends.low * 100), high=axis.place(ends.high * 100))


def _difference_notes(d: PairedComparison) -> tuple[str, ...]:
    notes = [why_not_tested(d)] if why_not_tested(d) else []
    if d.floor_binds:
        notes.append(floor_note(d.num_problems))
    return tuple(notes)


def _signed(value: float) -> str:
    return f"{value:+g}".replace("-", MINUS) if value else "0"
