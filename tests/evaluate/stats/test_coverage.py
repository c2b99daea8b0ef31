"""A short version of `klear bench intervals`, whose tables are in docs/data/intervals.md."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from klear_core.evaluate.stats.significance import detectable


@pytest.fixture(scope="module")
def bench() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[2] / "bench" / "evaluate" / "bench_intervals.py"))


@pytest.mark.parametrize(
    "cell",
    [
        {"num_problems": 10, "num_samples": 8, "shape": "uniform", "change": "none"},
        {"num_problems": 30, "num_samples": 64, "shape": "u_shaped", "change": "flips"},
        {"num_problems": 30, "num_samples": 1, "shape": "hard", "change": "smooth"},
        {"num_problems": 30, "num_samples": 8, "shape": "u_shaped", "change": "uneven", "missing_frac": 0.3},
        {"num_problems": 30, "num_samples": 8, "shape": "uniform", "change": "mixture", "k": 4},
    ],
    ids=lambda cell: "-".join(map(str, cell.values())),
)
def test_the_intervals_hold_the_truth(bench: dict[str, Any], cell: dict[str, Any]) -> None:
    found = bench["coverage"](bench["Cell"](**cell), num_runs=300)
    assert min(found.values()) >= 0.9, found  # at least 0.93 in long runs; the standard error is 0.014


def test_pairing_is_part_of_the_simulation(bench: dict[str, Any]) -> None:
    """Two independent draws of 30 uniform problems would differ by 0.07 or more in a third of the runs."""
    import numpy as np

    draw = np.random.default_rng(0)
    before, after = bench["CHANGES"]["smooth"](draw, bench["SHAPES"]["uniform"](draw, 1000))
    assert np.corrcoef(before, after)[0, 1] > 0.95


def test_the_test_has_the_power_of_students_t(bench: dict[str, Any]) -> None:
    """A gain of 6.2 points on 30 problems at n = 64, which the paper's AIME25 gain is like."""
    test, student = bench["power"](30, 64, 0.062, shape="uniform", num_runs=200)
    assert test >= student - 0.05
    assert test > 0.6


def test_the_smallest_detectable_gain_is_seen_four_times_in_five(bench: dict[str, Any]) -> None:
    for num_problems, num_samples in ((30, 1), (30, 8), (131, 4)):
        gain = detectable(num_problems, num_samples, confidence=0.95).gain
        assert gain is not None
        test, _ = bench["power"](num_problems, num_samples, gain, shape="uniform", num_runs=200)
        assert 0.68 <= test <= 0.92


def test_one_answer_to_each_of_ten_problems_can_show_no_gain_four_times_in_five() -> None:
    """A model that solves all of them is shown to be better only if six or more were unsolved: 386 of 1,024 times."""
    assert detectable(10, 1, confidence=0.95).gain is None


def test_more_samples_and_more_problems_show_smaller_gains() -> None:
    gains = [detectable(p, n, confidence=0.95).gain for p, n in ((30, 1), (30, 64), (279, 8))]
    assert None not in gains
    assert gains == sorted(gains, reverse=True)
    assert detectable(5, 64, confidence=0.95).gain is None  # fewer than six can change
    # sqrt(2 * 1/6 / (64 * 30)) * 1.96
    assert detectable(30, 64, confidence=0.95).rerun == pytest.approx(0.0258, abs=1e-4)
