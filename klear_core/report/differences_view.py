"""Prepare the paired differences between models on one benchmark, as text and as positions on an axis."""

from __future__ import annotations

from dataclasses import dataclass

from klear_core.report.charts import nice_ticks
from klear_core.report.claims import Standing, floor_note, standing_of, why_not_tested
from klear_core.report.facts import Facts
from klear_core.report.inputs import PairedDifference
from klear_core.report.text import MINUS, NONE, p_value, points, range_text
from klear_core.scores import Range


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


def axis_of(differences: list[PairedDifference]) -> Axis:
    """Return an axis in percentage points that covers zero and every interval."""
    ends = [d.new_problems for d in differences]
    ends += [d.rerun for d in differences if d.rerun]
    low = min((100 * e.low for e in ends), default=0.0)
    high = max((100 * e.high for e in ends), default=0.0)
    return Axis(marks=tuple(nice_ticks(min(low, 0.0), max(high, 0.0))))


def difference_row(facts: Facts, d: PairedDifference, axis: Axis, *, num_samples: int) -> DifferenceRow:
    """Return one difference with its intervals placed on the axis."""
    rerun = _difference_span(d.rerun, axis) if d.rerun else None
    p = p_value(d.p_corrected).removeprefix("p ").removeprefix("= ")
    score = "greedy" if d.decoding == "greedy" else f"avg@{num_samples}"
    return DifferenceRow(
        before=facts.model(d.before).maker.label,
        after=facts.model(d.after).maker.label,
        score=score,
        value=points(d.value),
        at=axis.place(d.value * 100),
        other=_difference_span(d.new_problems, axis),
        rerun=rerun,
        p=NONE if why_not_tested(d) else p,
        notes=_difference_notes(d),
        standing=standing_of(d),
        num_problems=d.num_problems,
    )


def _difference_span(ends: Range, axis: Axis) -> Span:
    return Span(text=range_text(ends), low=axis.place(ends.low * 100), high=axis.place(ends.high * 100))


def _difference_notes(d: PairedDifference) -> tuple[str, ...]:
    notes = [why_not_tested(d)] if why_not_tested(d) else []
    if d.floor_binds:
        notes.append(floor_note(d.num_problems))
    return tuple(notes)


def _signed(value: float) -> str:
    return f"{value:+g}".replace("-", MINUS) if value else "0"
