"""Geometry of line charts, in units of their own small canvas; the template draws it, so that themes and escaping stay there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from klear_core.report.text import MINUS, number

WIDTH, HEIGHT = 340, 196
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 10, 24
MAX_POINTS = 240
"""More steps than this are averaged in equal bins: a pixel cannot show more."""
SMOOTH_FROM = 30
"""Points from which a rolling mean may be drawn over the raw line."""
NOISE = 3.0
"""It is drawn where the line's way up and down is this many times its range: a smooth line needs no help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric by step; None where it was not a finite number."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    @property
    def finite(self) -> tuple[float, ...]:
        """The values that are numbers."""
        return tuple(v for v in self.values if v is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A labelled place on an axis, in canvas units."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One drawn metric: SVG path data of every step, and of its rolling mean where there are many steps."""

    label: str
    metric: str
    raw: str
    smooth: str
    dots: tuple[tuple[float, float], ...]
    """Single points that a line cannot show."""
    first: str
    last: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """A small chart of one or a few metrics over steps."""

    title: str
    note: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def line_chart(title: str, series: Sequence[tuple[str, Series]], *, note: str = "", is_share: bool = False) -> LineChart | None:
    """Labelled series on shared axes; shares are drawn in percent. None if no series has a finite value."""
    drawn = [(label, s) for label, s in series if s.finite]
    if not drawn:
        return None
    scale = 100.0 if is_share else 1.0
    suffix = "\u00a0%" if is_share else ""
    values = [v * scale for _, s in drawn for v in s.finite]
    y_marks = nice_ticks(*_padded(min(values), max(values)))
    steps = [t for _, s in drawn for t in s.steps]
    x_low, x_high = min(steps), max(steps)
    x_of = _axis(x_low, x_high, LEFT, WIDTH - RIGHT)
    y_of = _axis(y_marks[0], y_marks[-1], HEIGHT - BOTTOM, TOP)
    y_labels = _tick_labels(y_marks)
    y_labels[-1] += suffix
    x_marks = [m for m in nice_ticks(x_low, x_high) if x_low <= m <= x_high and float(m).is_integer()]
    return LineChart(
        title=title,
        note=note,
        lines=tuple(_line(label, s, x_of, lambda v: y_of(v * scale), lambda v: number(v * scale) + suffix) for label, s in drawn),
        x_ticks=tuple(Tick(at=x_of(m), label=f"{int(m):,}") for m in x_marks),
        y_ticks=tuple(Tick(at=y_of(m), label=label) for m, label in zip(y_marks, y_labels, strict=True)),
    )


def nice_ticks(low: float, high: float, target: int = 4) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten apart) that cover low..high with about `target` gaps."""
    if high <= low:
        return [low - 1, low, low + 1] if low else [0.0, 1.0]
    rough = (high - low) / target
    magnitude = 10 ** math.floor(math.log10(rough))
    gap = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return [float(f"{i * gap:.12g}") for i in range(first, last + 1)]  # 0.3, not 0.30000000000000004


def sparkline(series: Series, *, width: int = 96, height: int = 20) -> str:
    """SVG path data of the metric's shape alone, scaled to its own range."""
    binned = _binned(series)
    finite = binned.finite
    if not finite:
        return ""
    x_of = _axis(binned.steps[0], binned.steps[-1], 1, width - 1)
    return _path(binned, x_of, _axis(min(finite), max(finite), height - 2, 2))


def _padded(low: float, high: float) -> tuple[float, float]:
    """The range to show: from zero, unless the values sit far from it; then zero would flatten what one wants to see."""
    if low >= 0 and low < 0.6 * high:
        return 0.0, high
    if low == high:
        return (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    return low, high


def _axis(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    if high == low:
        return lambda _: round((start + end) / 2, 1)
    return lambda v: round(start + (v - low) / (high - low) * (end - start), 1)


def _line(label: str, series: Series, x_of: Callable[[float], float], y_of: Callable[[float], float], show: Callable[[float], str]) -> Line:
    binned = _binned(series)
    smooth = _rolling_mean(binned) if _is_noisy(binned.finite) else None
    return Line(
        label=label,
        metric=series.name,
        raw=_path(binned, x_of, y_of),
        smooth=_path(smooth, x_of, y_of) if smooth else "",
        dots=tuple((x_of(t), y_of(v)) for t, v in _lonely(binned)),
        first=show(series.finite[0]),
        last=show(series.finite[-1]),
    )


def _binned(series: Series) -> Series:
    """At most MAX_POINTS points, each the mean of its bin's finite values."""
    if len(series.steps) <= MAX_POINTS:
        return series
    size = math.ceil(len(series.steps) / MAX_POINTS)
    starts = range(0, len(series.steps), size)
    bins = [[v for v in series.values[i : i + size] if v is not None] for i in starts]
    return Series(
        name=series.name,
        steps=tuple(series.steps[i] for i in starts),
        values=tuple(sum(b) / len(b) if b else None for b in bins),
    )


def _is_noisy(values: Sequence[float]) -> bool:
    way = sum(abs(b - a) for a, b in pairwise(values))
    return len(values) >= SMOOTH_FROM and way > NOISE * (max(values) - min(values))


def _rolling_mean(series: Series) -> Series:
    """Centred mean over about a tenth of the line; gaps stay gaps."""
    reach = max(1, len(series.steps) // 20)

    def mean_at(i: int) -> float | None:
        if series.values[i] is None:
            return None
        near = [v for v in series.values[max(0, i - reach) : i + reach + 1] if v is not None]
        return sum(near) / len(near)

    return Series(name=series.name, steps=series.steps, values=tuple(mean_at(i) for i in range(len(series.steps))))


def _path(series: Series, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    """`M` starts a stretch, `L` goes on; a value that is no number breaks the line."""
    parts = []
    is_drawing = False
    for step, value in zip(series.steps, series.values, strict=True):
        if value is not None:
            parts.append(f"{'L' if is_drawing else 'M'}{x_of(step):g} {y_of(value):g}")
        is_drawing = value is not None
    return "".join(parts)


def _lonely(series: Series) -> list[tuple[int, float]]:
    """Points with no finite neighbour on either side."""
    values = (None, *series.values, None)
    return [
        (step, value)
        for step, before, value, after in zip(series.steps, values, values[1:], values[2:], strict=False)
        if value is not None and before is None and after is None
    ]


def _tick_labels(marks: Sequence[float]) -> list[str]:
    """With as many decimals as the gap needs, or as powers of ten where that would be too many digits."""
    gap = marks[1] - marks[0]
    if gap < 1e-4 or max(abs(m) for m in marks) >= 1e6:
        return next(labels for d in range(1, 13) if len(set(labels := [_power(m, d) for m in marks])) == len(marks))
    decimals = next((d for d in range(7) if abs(round(gap, d) - gap) < 1e-9), 6)
    return [f"{m:,.{decimals}f}".replace("-", MINUS) for m in marks]


def _power(value: float, decimals: int) -> str:
    mantissa, exponent = f"{value:.{decimals}e}".split("e")
    return f"{mantissa}e{int(exponent)}".replace("-", MINUS) if value else "0"
