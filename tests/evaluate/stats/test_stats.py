from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations
from statistics import fmean

import pytest

from klear_core.evaluate.stats.intervals import (
    g_pass_at_k,
    largest_rate,
    maj_at_n,
    pass_at_k,
    seed_spread,
    t_test_p,
)
from klear_core.scores import Range

# ---- pass@k ----


def test_pass_at_1_is_the_share_of_right_samples() -> None:
    assert pass_at_k(8, 3, 1) == pytest.approx(3 / 8)


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    assert pass_at_k(10, 3, 4) == pytest.approx(1 - 35 / 210)


def test_pass_at_k_is_the_share_of_k_subsets_that_hold_a_right_one() -> None:
    for num_correct in range(7):
        right = [i < num_correct for i in range(6)]
        for k in range(1, 7):
            subsets = list(combinations(right, k))
            assert pass_at_k(6, num_correct, k) == Fraction(sum(map(any, subsets)), len(subsets))


def test_pass_at_k_is_0_without_a_right_one_and_1_if_k_cannot_miss() -> None:
    assert pass_at_k(64, 0, 64) == 0.0
    assert pass_at_k(64, 1, 64) == 1.0
    assert pass_at_k(5, 3, 3) == 1.0


def test_pass_at_k_of_many_samples() -> None:
    assert float(pass_at_k(10_000, 100, 300)) == pytest.approx(1 - math.comb(9_900, 300) / math.comb(10_000, 300))
    assert pass_at_k(10**6, 1, 10) == Fraction(10, 10**6)


def test_pass_at_k_is_refused_above_n() -> None:
    with pytest.raises(ValueError, match=r"pass@5 cannot be estimated from 4 samples: k must be in 1\.\.4"):
        pass_at_k(4, 2, 5)


# ---- G-Pass@k ----


def test_g_pass_at_k_is_the_share_of_k_subsets_with_enough_right_ones() -> None:
    for num_correct in range(7):
        right = [i < num_correct for i in range(6)]
        for k, threshold in ((2, 1.0), (4, 0.5), (4, 0.75), (3, 0.5), (6, 1.0)):
            subsets = list(combinations(right, k))
            enough = sum(sum(subset) >= threshold * k for subset in subsets)
            assert g_pass_at_k(6, num_correct, k, threshold=threshold) == Fraction(enough, len(subsets))


def test_g_pass_at_k_is_pass_at_k_for_one_right_answer() -> None:
    for threshold in (1e-6, 1e-12):
        assert g_pass_at_k(10, 3, 4, threshold=threshold) == pass_at_k(10, 3, 4)


def test_a_share_of_k_that_is_whole_is_not_rounded_up() -> None:
    """0.1 * 30 is 3.0000000000000004 in floats."""
    assert g_pass_at_k(30, 3, 30, threshold=0.1) == 1


def test_g_pass_at_k_is_refused_above_n() -> None:
    with pytest.raises(ValueError, match="G-Pass@16 cannot be estimated from 8 samples"):
        g_pass_at_k(8, 2, 16, threshold=0.5)


def test_scorio_agrees() -> None:
    """scorio's pass@k and G-Pass@k over 20 problems of 12 samples (`pip install scorio`)."""
    scorio = pytest.importorskip("scorio.eval", reason="the package scorio is not installed", exc_type=ImportError)
    import numpy as np

    answers = (np.random.default_rng(0).random((20, 12)) < np.linspace(0, 1, 20)[:, None]).astype(int)
    right = answers.sum(axis=1).tolist()
    for k in (1, 3, 12):
        assert scorio.pass_at_k(answers, k) == pytest.approx(float(fmean(pass_at_k(12, c, k) for c in right)))
        for tau in (0.5, 0.75, 1.0):
            ours = float(fmean(g_pass_at_k(12, c, k, threshold=tau) for c in right))
            assert scorio.g_pass_at_k_tau(answers, k, tau) == pytest.approx(ours)


# ---- maj@n ----


@pytest.mark.parametrize(
    ("answers", "right", "share"),
    [
        (["7", "7", "8"], "7", 1),
        (["7", "8", "8"], "7", 0),
        (["7", "8"], "7", Fraction(1, 2)),
        ([None, None, "7"], "7", 1),
        (["7", "8", None], "9", 0),
        ([None, None], "7", 0),
        (["7", "8", "9"], "8", Fraction(1, 3)),
    ],
)
def test_the_most_common_answer_counts(answers: list[str | None], right: str, share: Fraction) -> None:
    assert maj_at_n(answers, [answer == right for answer in answers]) == share


# ---- seeds ----


def test_the_interval_of_three_seeds_by_hand() -> None:
    # Mean .2, standard deviation .1, t(2) at 97.5 % is 4.302653
    spread = seed_spread([0.1, 0.2, 0.3], has_collapsed=False, bounds=(-1, 1))
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert spread.interval is not None
    ends = (spread.mean, spread.interval.low, spread.interval.high)
    assert ends == pytest.approx((0.2, 0.2 - half, 0.2 + half), abs=1e-6)
    assert (spread.least, spread.most, spread.num) == (0.1, 0.3, 3)


def test_runs_that_collapsed_have_a_range_and_no_interval() -> None:
    spread = seed_spread([0.0, 0.9, 0.91], has_collapsed=True, bounds=(0, 1))
    assert (spread.interval, spread.least, spread.most) == (None, 0.0, 0.91)


def test_the_t_test_of_seeds_by_hand_and_without_a_spread() -> None:
    """Mean .2, standard deviation .1: t = .2 / .1 * sqrt(3) = 3.464, p = 0.0742 with 2 degrees of freedom."""
    assert t_test_p([0.1, 0.2, 0.3]) == pytest.approx(0.0742, abs=1e-4)
    # two seeds that gained one answer of 512 each are no proof
    assert t_test_p([1 / 512, 1 / 512]) == 0.5
    assert t_test_p([0.3] * 6) == 2 / 2**6
    # the same difference at six levels: rounding makes them differ by 5e-17
    assert t_test_p([(0.3 + seed / 100) - (0.5 + seed / 100) for seed in range(6)]) == 2 / 2**6
    assert t_test_p([0.0, 0.0]) == 1


def test_one_run_has_no_spread() -> None:
    with pytest.raises(ValueError, match="one run has no spread"):
        seed_spread([0.5], has_collapsed=False, bounds=(0, 1))


def test_the_interval_of_seeds_ends_where_scores_end() -> None:
    spread = seed_spread([0.1, 0.9], has_collapsed=False, bounds=(0, 1))
    assert spread.interval == Range(low=0, high=1)


def test_the_rate_of_collapse_that_few_runs_leave_possible() -> None:
    """None of 5: (1 - r)^5 = 0.05 at r = 0.451; none of 59: 0.0495, the rule of three."""
    assert largest_rate(0, 5) == pytest.approx(1 - 0.05 ** (1 / 5))
    assert largest_rate(0, 59) == pytest.approx(0.0495, abs=1e-4)
    assert largest_rate(1, 5) == pytest.approx(0.657, abs=1e-3)  # Clopper and Pearson 1934
    assert largest_rate(5, 5) == 1
