"""Compute the geometry of line charts, in canvas units of WIDTH x HEIGHT, and of timelines.

The template draws it, so that themes and escaping stay in the template.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from klear_core.scores import MINUS, duration, number, percent
from klear_core.waits import Span

WIDTH, HEIGHT = 340, 196
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 10, 24
MAX_POINTS = 240
"""Longer series are averaged in bins of equal size, because the chart has no more pixels to show them."""
SMOOTH_FROM = 30
"""Minimum number of points for a rolling mean over the raw line."""
NOISE = 3.0
"""A rolling mean is drawn if the sum of absolute changes exceeds the range this many times, that is for noisy lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric by step; None at steps where it was not a finite number."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    @property
    def finite(self) -> tuple[float, ...]:
        """The values that are not None."""
        return tuple(v for v in self.values if v is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A labelled position on an axis, in canvas units."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One drawn metric: SVG path data of the raw line, and of its rolling mean if the line is long and noisy."""

    label: str
    metric: str
    raw: str
    smooth: str
    dots: tuple[tuple[float, float], ...]
    """Points without a neighbour, which a path would not show."""
    first: str
    last: str
    band: str = ""
    """Path of the area between the ends of its intervals; empty if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """A small chart of one or a few metrics over steps."""

    title: str
    note: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def line_chart(
    title: str,
    series: Sequence[tuple[str, Series]],
    *,
    note: str = "",
    is_share: bool = False,
    bands: Mapping[str, tuple[Series, Series]] = MappingProxyType({}),
) -> LineChart | None:
    """Lay out labelled series on shared axes; shares are shown in percent. Return None if no value is finite.

    `bands` has the lower and upper ends of intervals by label.
    """
    drawn = [(label, s) for label, s in series if s.finite]
    if not drawn:
        return None
    scale = 100.0 if is_share else 1.0
    suffix = "\u00a0%" if is_share else ""
    ends = [end for label, _ in drawn for end in bands.get(label, ())]
    all_series = [*(s for _, s in drawn), *ends]
    values = [v * scale for s in all_series for v in s.finite]
    y_marks = nice_ticks(*_padded(min(values), max(values)))
    steps = [t for _, s in drawn for t in s.steps]
    x_low, x_high = min(steps), max(steps)
    x_of = _axis(x_low, x_high, LEFT, WIDTH - RIGHT)
    # SVG's y axis points down, so the lowest value lies at the bottom of the canvas
    y_of = _axis(y_marks[0], y_marks[-1], HEIGHT - BOTTOM, TOP)
    y_labels = _tick_labels(y_marks)
    y_labels[-1] += suffix
    # Steps are whole numbers, so ticks at halves would stand for nothing.
    x_marks = [m for m in nice_ticks(x_low, x_high) if x_low <= m <= x_high and float(m).is_integer()]

    def place(value: float) -> float:
        return y_of(value * scale)

    def show(value: float) -> str:
        return number(value * scale) + suffix

    lines = []
    for label, one in drawn:
        line = _line(label, one, x_of, place, show)
        lines.append(replace(line, band=_area(bands[label], x_of, place)) if label in bands else line)
    x_ticks = [Tick(at=x_of(m), label=f"{int(m):,}") for m in x_marks]
    y_ticks = [Tick(at=y_of(m), label=label) for m, label in zip(y_marks, y_labels, strict=True)]
    return LineChart(title=title, note=note, lines=tuple(lines), x_ticks=tuple(x_ticks), y_ticks=tuple(y_ticks))


def nice_ticks(low: float, high: float, target: int = 4) -> list[float]:
    """Return round numbers, 1, 2, 2.5 or 5 times a power of ten apart, that cover low..high in about `target` gaps."""
    if high <= low:
        return [low - 1, low, low + 1] if low else [0.0, 1.0]
    rough = (high - low) / target
    magnitude = 10 ** math.floor(math.log10(rough))
    # 0.999 and 1e-9 absorb rounding errors, which would pick the next larger gap or add a tick
    gap = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return [float(f"{i * gap:.12g}") for i in range(first, last + 1)]  # 0.3, not 0.30000000000000004


def sparkline(series: Series, *, width: int = 96, height: int = 20) -> str:
    """Return SVG path data of the series without axes, scaled to its range."""
    binned = _binned(series)
    finite = binned.finite
    if not finite:
        return ""
    x_of = _axis(binned.steps[0], binned.steps[-1], 1, width - 1)
    return _path(binned, x_of, _axis(min(finite), max(finite), height - 2, 2))


def _padded(low: float, high: float) -> tuple[float, float]:
    """Return the range to show: from zero, unless the values vary so little that this would flatten the line."""
    if low >= 0 and low < 0.6 * high:
        return 0.0, high
    if low == high:
        return (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    return low, high


def _axis(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    if high == low:
        return lambda _: round((start + end) / 2, 1)
    return lambda v: round(start + (v - low) / (high - low) * (end - start), 1)


def _line(
    label: str,
    series: Series,
    x_of: Callable[[float], float],
    y_of: Callable[[float], float],
    show: Callable[[float], str],
) -> Line:
    binned = _binned(series)
    # A smooth line needs no second one over it.
    smooth = _path(_rolling_mean(binned), x_of, y_of) if _is_noisy(binned.finite) else ""
    return Line(
        label=label,
        metric=series.name,
        raw=_path(binned, x_of, y_of),
        smooth=smooth,
        dots=tuple((x_of(t), y_of(v)) for t, v in _lonely(binned)),
        first=show(series.finite[0]),
        last=show(series.finite[-1]),
    )


def _binned(series: Series) -> Series:
    """Return at most MAX_POINTS points, each the mean of the finite values in its bin."""
    if len(series.steps) <= MAX_POINTS:
        return series
    size = math.ceil(len(series.steps) / MAX_POINTS)
    starts = range(0, len(series.steps), size)
    means: list[float | None] = []
    for start in starts:
        finite = [v for v in series.values[start : start + size] if v is not None]
        means.append(sum(finite) / len(finite) if finite else None)
    return Series(name=series.name, steps=tuple(series.steps[start] for start in starts), values=tuple(means))


def _is_noisy(values: Sequence[float]) -> bool:
    total_change = sum(abs(b - a) for a, b in pairwise(values))
    return len(values) >= SMOOTH_FROM and total_change > NOISE * (max(values) - min(values))


def _rolling_mean(series: Series) -> Series:
    """Return the centred mean over about a tenth of the line; gaps stay gaps."""
    reach = max(1, len(series.steps) // 20)

    def mean_at(i: int) -> float | None:
        if series.values[i] is None:
            return None
        near = [v for v in series.values[max(0, i - reach) : i + reach + 1] if v is not None]
        return sum(near) / len(near)

    return Series(name=series.name, steps=series.steps, values=tuple(mean_at(i) for i in range(len(series.steps))))


def _path(series: Series, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    """Return SVG path data: `M` starts a segment, `L` continues it, and None ends it."""
    parts = []
    is_drawing = False
    for step, value in zip(series.steps, series.values, strict=True):
        if value is not None:
            parts.append(f"{'L' if is_drawing else 'M'}{x_of(step):g} {y_of(value):g}")
        is_drawing = value is not None
    return "".join(parts)


def _area(ends: tuple[Series, Series], x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    """Return SVG path data of the area between two series of the same steps, where both are finite."""
    low, high = map(_binned, ends)
    points = [
        (x_of(step), y_of(below), y_of(above))
        for step, below, above in zip(low.steps, low.values, high.values, strict=True)
        if below is not None and above is not None
    ]
    there = [f"{x:g} {y:g}" for x, y, _ in points]
    back = [f"{x:g} {y:g}" for x, _, y in reversed(points)]
    return f"M{'L'.join(there + back)}z" if points else ""


def _lonely(series: Series) -> list[tuple[int, float]]:
    """Return points with no finite neighbour on either side."""
    values = (None, *series.values, None)
    return [
        (step, value)
        for step, before, value, after in zip(series.steps, values, values[1:], values[2:], strict=False)
        if value is not None and before is None and after is None
    ]


def _tick_labels(marks: Sequence[float]) -> list[str]:
    """Return labels with as many decimals as the gap needs, or in exponent form if that takes too many digits."""
    gap = marks[1] - marks[0]
    if gap < 1e-4 or max(abs(m) for m in marks) >= 1e6:
        for num_decimals in range(1, 13):
            labels = [_power(m, num_decimals) for m in marks]
            if len(set(labels)) == len(marks):  # the fewest decimals that make all labels differ
                return labels
    decimals = next((d for d in range(7) if abs(round(gap, d) - gap) < 1e-9), 6)
    return [f"{m:,.{decimals}f}".replace("-", MINUS) for m in marks]


def _power(value: float, decimals: int) -> str:
    mantissa, exponent = f"{value:.{decimals}e}".split("e")
    return f"{mantissa}e{int(exponent)}".replace("-", MINUS) if value else "0"


# ---- timeline ----
# Show what driver, learner and engines of RL did in the last steps, so that one sees who waited for whom.


_STEPS_SHOWN = 3
_TRACKS_SHOWN = 16
_MOST_WAITS = 5
KINDS = ("sampling", "updates", "weights", "other")
"""What is done, by tone."""
_KIND_OF = {
    "sample": "sampling",
    "learn": "updates",
    "do the updates of an RL step": "updates",
    "hand over": "weights",
    "gather the weights": "weights",
    "offer its weights": "weights",
    "send its weights": "weights",
}
_SHORTEST_WAIT_S = 0.05
"""Shorter ones in all would read "0.0 s"."""
_NARROWEST = 0.1
"""Percent of the width below which a gap is not seen, so that the blocks around it are one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Work of one kind without a gap; place and width in percent."""

    kind: str
    left: float
    width: float

    @property
    def tone(self) -> int:
        """The colour."""
        return KINDS.index(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Work of the driver, learner or an engine, and its share of the time; none for the driver, which waits too."""

    name: str
    blocks: tuple[Block, ...]
    busy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The last steps of a stage."""

    num_steps: int
    seconds: str
    tracks: tuple[Track, ...]
    num_left_out: int
    """Engines and ranks beyond those that are shown."""
    waits: tuple[tuple[str, str], ...]
    """Whom the driver waited for, and how long in all, the longest first. Waits at the same time count each."""


def timeline(spans: Sequence[Span]) -> Timeline | None:
    """Lay out the last steps of a trace; None if it has no step."""
    starts = [span.start for span in spans if (span.track, span.name) == ("driver", "sample")][-_STEPS_SHOWN:]
    if not starts:
        return None
    low, high = starts[0], max(span.end for span in spans if span.track == "driver")
    cut = [
        Span(track=span.track, name=span.name, start=max(low, span.start), end=min(high, span.end))
        for span in spans
        if span.start < high and span.end > low
    ]
    others = {span.track for span in cut if not span.waited_for} - {"driver", "learner"}
    names = sorted(others, key=lambda name: (name.startswith("learner"), name))  # engines, then the learner's ranks
    tracks = {span.track for span in cut}
    rows = [name for name in ("driver", "learner") if name in tracks] + names
    waits: dict[str, float] = {}
    for span in cut:
        if span.waited_for:
            waits[span.waited_for] = waits.get(span.waited_for, 0.0) + span.end - span.start
    noticed = [wait for wait in waits.items() if wait[1] >= _SHORTEST_WAIT_S]
    longest = sorted(noticed, key=lambda wait: -wait[1])[:_MOST_WAITS]
    return Timeline(
        num_steps=len(starts),
        seconds=duration(high - low),
        tracks=tuple(_track(name, [s for s in cut if s.track == name], low, high) for name in rows[:_TRACKS_SHOWN]),
        num_left_out=max(0, len(rows) - _TRACKS_SHOWN),
        waits=tuple((whom, duration(seconds)) for whom, seconds in longest),
    )


def _track(name: str, spans: Sequence[Span], low: float, high: float) -> Track:
    place = _axis(low, high, 0, 100)
    blocks: list[Block] = []
    busy_s, until = 0.0, low
    for span in sorted(spans, key=lambda s: s.start):
        busy_s += max(0.0, span.end - max(until, span.start))  # spans may overlap
        until = max(until, span.end)
        kind, left, right = _KIND_OF.get(span.name, "other"), place(span.start), place(span.end)
        last = blocks[-1] if blocks else None
        if last is not None and last.kind == kind and left - last.left - last.width <= _NARROWEST:
            left, right = last.left, max(right, last.left + last.width)
            blocks.pop()
        blocks.append(Block(kind=kind, left=left, width=round(right - left, 1)))
    return Track(name=name, blocks=tuple(blocks), busy="" if name == "driver" else percent(busy_s / (high - low)))
