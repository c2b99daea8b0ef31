"""Coverage and power of the intervals in klear_core/evaluate/stats/intervals.py, by simulation: `klear bench intervals`.

A replication draws problems from a difficulty shape, changes each of them (the pairing: after is a function of the
same problem's before), samples n answers of both, and asks whether the intervals hold the true values: the mean over the
drawn problems for a re-run, the mean of the shape for new problems.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy.stats import ttest_rel

from klear_core.evaluate.stats.intervals import (
    ProblemScores,
    new_problems_interval,
    paired_new_problems_interval,
    paired_rerun_interval,
    problem_scores,
    rerun_interval,
)
from klear_core.evaluate.stats.significance import sign_flip_test
from klear_core.seeding import seed_for

Floats = npt.NDArray[np.float64]
Draw = np.random.Generator

SHAPES: dict[str, Callable[[Draw, int], Floats]] = {
    "uniform": lambda draw, num: draw.beta(1, 1, num),
    "u_shaped": lambda draw, num: draw.beta(0.3, 0.3, num),
    "hard": lambda draw, num: draw.beta(0.5, 4, num),
    "middle": lambda draw, num: draw.beta(10, 10, num),
}


def _logit_shift(draw: Draw, p: Floats, mean: float, spread: float) -> Floats:
    odds = p / np.maximum(1 - p, 1e-300) * np.exp(draw.normal(mean, spread, len(p)))
    return np.where(p >= 1, 1.0, odds / (1 + odds))


def _flips(draw: Draw, before: Floats, after: Floats, *, up: bool) -> tuple[Floats, Floats]:
    """Let 5 % of the problems go from never to always, or back."""
    flipped = draw.random(len(before)) < 0.05
    ends = (0.0, 1.0) if up else (1.0, 0.0)
    return np.where(flipped, ends[0], before), np.where(flipped, ends[1], after)


CHANGES: dict[str, Callable[[Draw, Floats], tuple[Floats, Floats]]] = {
    "none": lambda _draw, p: (p, p),
    "smooth": lambda draw, p: (p, _logit_shift(draw, p, 0.5, 0.0)),
    "uneven": lambda draw, p: (p, _logit_shift(draw, p, 0.5, 1.0)),
    "flips": lambda draw, p: _flips(draw, p, p, up=True),
    "mixture": lambda draw, p: _flips(draw, p, _logit_shift(draw, p, 0.3, 0.5), up=True),
    "adverse": lambda draw, p: _flips(draw, p, _logit_shift(draw, p, 0.5, 0.0), up=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One setting of the simulation."""

    num_problems: int
    num_samples: int
    shape: str
    change: str
    k: int = 1
    confidence: float = 0.95
    missing_frac: float = 0.0
    """Share of answers that could not be judged, so that problems have unequal numbers."""


def coverage(cell: Cell, *, num_runs: int) -> Mapping[str, float]:
    """Return the share of replications in which each interval holds its true value.

    A and B are of a difference, C and D of a score; A and C for a re-run, B and D over new problems.
    """
    draw = np.random.default_rng(seed_for(0, "bench/intervals", str(cell)))
    many = CHANGES[cell.change](draw, SHAPES[cell.shape](draw, 400_000))
    truth = [float(np.mean(_pass_rate(p, cell.k))) for p in many]
    hits = dict.fromkeys("ABCD", 0)
    for _ in range(num_runs):
        chances = CHANGES[cell.change](draw, SHAPES[cell.shape](draw, cell.num_problems))
        x, y = (_sample(draw, p, cell) for p in chances)
        drawn = [float(np.mean(_pass_rate(p, cell.k))) for p in chances]
        level = cell.confidence
        a, b = (
            paired_rerun_interval(x, y, confidence=level),
            paired_new_problems_interval(x, y, confidence=level).range,
        )
        c, d = rerun_interval(y, confidence=level), new_problems_interval(y, confidence=level)
        hits["A"] += a.low <= drawn[1] - drawn[0] <= a.high
        hits["B"] += b.low <= truth[1] - truth[0] <= b.high
        hits["C"] += c.low <= drawn[1] <= c.high
        hits["D"] += d.low <= truth[1] <= d.high
    return {letter: num / num_runs for letter, num in hits.items()}


def power(num_problems: int, num_samples: int, gain: float, *, shape: str, num_runs: int) -> tuple[float, float]:
    """Return how often the sign-flip test and Student's t see a gain: a logit shift that differs between problems."""
    draw = np.random.default_rng(seed_for(0, "bench/power", num_problems, num_samples, shape, str(gain)))
    shift = _shift_for(draw, shape, gain)
    cell = Cell(num_problems=num_problems, num_samples=num_samples, shape=shape, change="none")
    seen = [0, 0]
    for _ in range(num_runs):
        before = SHAPES[shape](draw, num_problems)
        x, y = _sample(draw, before, cell), _sample(draw, _logit_shift(draw, before, shift, 0.5), cell)
        seen[0] += sign_flip_test([b - a for a, b in zip(x.exact, y.exact, strict=True)]).p < 0.05
        seen[1] += float(ttest_rel(y.value, x.value).pvalue) < 0.05
    return seen[0] / num_runs, seen[1] / num_runs


def _shift_for(draw: Draw, shape: str, gain: float) -> float:
    """Return the mean logit shift that raises the mean of the shape by `gain`, by bisection."""
    before = SHAPES[shape](draw, 100_000)
    low, high = 0.0, 10.0
    for _ in range(30):
        middle = (low + high) / 2
        found = float(np.mean(_logit_shift(draw, before, middle, 0.5) - before))
        low, high = (middle, high) if found < gain else (low, middle)
    return (low + high) / 2


def _pass_rate(chances: Floats, k: int) -> Floats:
    return 1 - (1 - chances) ** k


def _sample(draw: Draw, chances: Floats, cell: Cell) -> ProblemScores:
    num = np.full(len(chances), cell.num_samples)
    if cell.missing_frac:
        num = np.maximum(draw.binomial(num, 1 - cell.missing_frac), cell.k)
    right = draw.binomial(num, chances)
    rows = [_row(n, r, cell.k) for n, r in zip(num.tolist(), right.tolist(), strict=True)]
    return ProblemScores(
        value=np.array([row.value[0] for row in rows]),
        variance=np.array([row.variance[0] for row in rows]),
        step=np.array([row.step[0] for row in rows]),
        exact=tuple(row.exact[0] for row in rows),
    )


_ROWS: dict[tuple[int, int, int], ProblemScores] = {}


def _row(num: int, right: int, k: int) -> ProblemScores:
    key = (num, right, k)
    if key not in _ROWS:
        _ROWS[key] = problem_scores([(right, num)], k=k)
    return _ROWS[key]


def grid() -> list[Cell]:
    """Return the cells of the coverage tables: the main grid, other levels, unequal n and pass@k."""
    main = [
        Cell(num_problems=num, num_samples=n, shape=shape, change=change)
        for num, n, shape, change in product((10, 30, 131), (1, 8, 64), SHAPES, CHANGES)
    ]
    small = list(product((30, 131), ("uniform", "u_shaped"), ("none", "uneven", "flips")))
    levels = [
        Cell(num_problems=num, num_samples=8, shape=shape, change=change, confidence=level)
        for level in (0.8, 0.9, 0.99)
        for num, shape, change in small
    ]
    uneven = [
        Cell(num_problems=num, num_samples=8, shape=shape, change=change, missing_frac=0.3)
        for num, shape, change in small
    ]
    pass_at = [
        Cell(num_problems=num, num_samples=n, shape=shape, change=change, k=k)
        for n, k in ((8, 4), (16, 4), (64, 16), (64, 32), (8, 8))
        for num, shape, change in small
    ]
    return main + levels + uneven + pass_at


def group_of(cell: Cell) -> str:
    """Return the row of the table that a cell belongs to."""
    if cell.k > 1:
        return f"pass@{cell.k} of {cell.num_samples}"
    if cell.missing_frac:
        return "unequal n"
    if cell.confidence != 0.95:
        return f"level {cell.confidence:g}"
    return cell.change


def measure() -> list[dict[str, object]]:
    """Return least and median coverage of each interval by kind of change, and power beside Student's t."""
    by_group: dict[str, list[tuple[float, Mapping[str, float]]]] = {}
    cells = grid()
    for i, cell in enumerate(cells):
        by_group.setdefault(group_of(cell), []).append((cell.confidence, coverage(cell, num_runs=NUM_RUNS)))
        if i % 50 == 49:
            print(f"{i + 1} of {len(cells)} cells", file=sys.stderr)
    measures: list[dict[str, object]] = []
    for group, found in by_group.items():
        for letter in "ABCD":
            shares = [shares[letter] for _, shares in found]
            target = round(found[0][0] - SLACK[letter], 3)
            measures += [
                _measure(f"{group}: {letter}, least of {len(shares)} cells", min(shares), target),
                _measure(f"{group}: {letter}, median", float(np.median(shares)), target),
            ]
    for num, n, gain in ((30, 64, 0.03), (30, 64, 0.06), (30, 64, 0.1), (131, 8, 0.06), (279, 8, 0.06)):
        test, student = power(num, n, gain, shape="uniform", num_runs=500)
        name = f"power at a gain of {100 * gain:g} points, {num} problems, n {n}"
        measures += [_measure(f"{name}: sign-flip", test, student - 0.03), _measure(f"{name}: Student's t", student, 0)]
    return measures


NUM_RUNS = 2000
SLACK = {"A": 0.03, "B": 0.03, "C": 0.02, "D": 0.02}
"""Least coverage below the level: 0.02 of differences (A, B), 0.01 of scores (C, D), and 0.01 for the least of many
cells, each of which has a standard error of 0.005."""


def _measure(name: str, value: float, target: float) -> dict[str, object]:
    return {
        "name": name,
        "value": value,
        "unit": "share",
        "target": f">= {target:.3g}",
        "ok": value >= target,
        "versions": {"numpy": np.__version__},
    }
