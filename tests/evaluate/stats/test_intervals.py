from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from klear_core.evaluate.stats.intervals import (
    ProblemScores,
    new_problems_interval,
    paired_new_problems_interval,
    paired_rerun_interval,
    problem_scores,
    rerun_interval,
)


def same_n(counts: list[int], n: int) -> ProblemScores:
    return problem_scores([(c, n) for c in counts])


# Vectors of intervals.py: before, after, n
VECTORS = {
    "V1": ([20 + i for i in range(30)], [24 + i + (i % 3 - 1) for i in range(30)], 64),
    "V2": ([0] * 10 + [64] * 10 + [32] * 10, [0] * 10 + [64] * 10 + [32] * 10, 64),
    "V3": ([0] * 12 + [8] * 18, [8] * 2 + [0] * 10 + [8] * 18, 8),
    "V4": ([1] * 8 + [0] * 12, [1] * 7 + [0] + [1] * 6 + [0] * 6, 1),
    "V5": ([0] * 10, [0] * 9 + [1], 4),
    "V6": ([0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8], [1, 1, 4, 3, 6, 6, 8, 7, 8, 7, 8, 8], 8),
}
PAIRED = {
    "V1": (0.0625, (-0.00416667, 0.129167), (0.0321861, 0.0928139)),
    "V2": (0, (-0.0666667, 0.0666667), (-0.0184618, 0.0184618)),
    "V3": (0.0666667, (-0.0280695, 0.206498), (0.0551175, 0.0782159)),
    "V4": (0.25, (-0.0074639, 0.512769), (-0.0439946, 0.543995)),
    "V5": (0.025, (-0.175, 0.262449), (-0.0598689, 0.109869)),
    "V6": (0.0729167, (-0.09375, 0.245556), (-0.0309, 0.176733)),
}
SINGLE = {
    "V1": (0.601562, (0.53864, 0.661301), (0.580181, 0.622607)),
    "V2": (0.5, (0.3509, 0.6491), (0.486947, 0.513053)),
    "V3": (0.666667, (0.479016, 0.813527), (0.650661, 0.682673)),
    "V4": (0.65, (0.417622, 0.828473), (0.391146, 0.851232)),
    "V5": (0.025, (0, 0.363352), (0, 0.117614)),
    "V6": (0.697917, (0.453185, 0.867086), (0.622834, 0.769021)),
}
# D with Wilson's interval for that of Agresti and Coull, which has the same centre
WILSON = {
    "V1": (0.53866, 0.661281),
    "V2": (0.3509, 0.6491),
    "V3": (0.480111, 0.812432),
    "V4": (0.419078, 0.827018),
    "V5": (0.0013588, 0.325782),
    "V6": (0.455994, 0.864277),
}


@pytest.mark.parametrize("name", VECTORS)
def test_the_paired_vectors(name: str) -> None:
    x, y, n = VECTORS[name]
    value, new, rerun = PAIRED[name]
    before, after = same_n(x, n), same_n(y, n)
    b = paired_new_problems_interval(before, after, confidence=0.95).range
    a = paired_rerun_interval(before, after, confidence=0.95)
    assert after.mean - before.mean == pytest.approx(value, rel=1e-5, abs=1e-9)
    assert (b.low, b.high) == pytest.approx(new, rel=1e-5)
    assert (a.low, a.high) == pytest.approx(rerun, rel=1e-5)


@pytest.mark.parametrize("name", VECTORS)
def test_the_single_vectors(name: str) -> None:
    _, y, n = VECTORS[name]
    value, new, rerun = SINGLE[name]
    scores = same_n(y, n)
    d = new_problems_interval(scores, confidence=0.95)
    c = rerun_interval(scores, confidence=0.95)
    assert scores.mean == pytest.approx(value, rel=1e-5)
    assert (d.low, d.high) == pytest.approx(new, rel=1e-5)
    assert (c.low, c.high) == pytest.approx(rerun, rel=1e-5)


@pytest.mark.parametrize("name", VECTORS)
def test_interval_d_holds_wilsons_and_has_its_centre(name: str) -> None:
    _, y, n = VECTORS[name]
    d = new_problems_interval(same_n(y, n), confidence=0.95)
    low, high = WILSON[name]
    assert d.low <= low + 1e-6 < high - 1e-6 <= d.high
    if d.low > 0:
        assert (d.low + d.high) / 2 == pytest.approx((low + high) / 2, abs=2e-6)


def test_interval_d_is_that_of_agresti_and_coull_for_problems_solved_always_or_never() -> None:
    """6 of 20, t = 2.093024: (6 + t^2/2) / (20 + t^2) = 0.335936, -+ t sqrt(0.335936 * 0.664064 / 24.38075)."""
    d = new_problems_interval(same_n([1] * 6 + [0] * 14, 1), confidence=0.95)
    assert (d.low, d.high) == pytest.approx((0.135727, 0.536145), abs=2e-6)


@pytest.mark.parametrize(("confidence", "least"), [(0.9, 0.87), (0.95, 0.94), (0.99, 0.985)])
@pytest.mark.parametrize("num", [10, 20, 30, 60, 131, 256])
def test_interval_d_holds_the_share_of_solved_problems_however_rare(num: int, confidence: float, least: float) -> None:
    """Problems are solved always or never, a share p of them: the coverage is a sum of binomial chances, exactly.

    Wilson's interval holds p in 86 of 100 cases at worst for 30 problems at 95 %.
    """
    samples = [same_n([1] * right + [0] * (num - right), 1) for right in range(num + 1)]
    ranges = [new_problems_interval(sample, confidence=confidence) for sample in samples]
    low = np.array([r.low for r in ranges])
    high = np.array([r.high for r in ranges])
    shares = np.linspace(0.002, 0.998, 499)[:, None]
    chances = binom.pmf(np.arange(num + 1), num, shares)
    holds = (low <= shares) & (shares <= high)
    assert (chances * holds).sum(axis=1).min() >= least


def test_the_floor_of_new_problems_is_said_to_bind_where_it_does() -> None:
    x, y, n = VECTORS["V1"]
    assert paired_new_problems_interval(same_n(x, n), same_n(y, n), confidence=0.95).floor_binds
    x, y, n = VECTORS["V4"]
    assert not paired_new_problems_interval(same_n(x, n), same_n(y, n), confidence=0.95).floor_binds


def test_the_floor_scales_with_the_level() -> None:
    still = same_n([4] * 20, 8)
    widths = {}
    for confidence in (0.8, 0.95, 0.99):
        found = paired_new_problems_interval(still, still, confidence=confidence).range
        widths[confidence] = found.high - found.low
    assert widths[0.95] == pytest.approx(2 * 2 / 20, rel=1e-6)
    assert widths[0.99] / widths[0.95] == pytest.approx(2.575829 / 1.959964, rel=1e-5)
    assert widths[0.8] / widths[0.95] == pytest.approx(1.281552 / 1.959964, rel=1e-5)


def test_one_answer_a_problem_that_is_always_wrong_leaves_room_above() -> None:
    """0 of 20: z^2 / N = 3.8415 / 20."""
    found = rerun_interval(same_n([0] * 20, 1), confidence=0.95)
    assert (found.low, found.high) == pytest.approx((0, 0.192073), abs=1e-6)


def test_one_problem_says_nothing_of_others() -> None:
    one = same_n([3], 8)
    new = new_problems_interval(one, confidence=0.95)
    paired = paired_new_problems_interval(one, one, confidence=0.95).range
    assert (new.low, new.high, paired.low, paired.high) == (0, 1, -1, 1)


def test_a_rerun_of_aime_at_90_points_moves_by_under_two() -> None:
    """The paper's 90.5 at avg@64: half width under 2 points for any problems with that mean; 1.9 for two runs."""
    rerun = rerun_interval(same_n([58] * 30, 64), confidence=0.95)
    assert 0.005 < (rerun.high - rerun.low) / 2 < 0.02


def test_unequal_numbers_of_answers_agree_with_equal_ones_in_the_limit() -> None:
    x, _, n = VECTORS["V6"]
    even = rerun_interval(same_n(x, n), confidence=0.95)
    # one answer in 96 could not be judged
    uneven = rerun_interval(problem_scores([(c, n) for c in x[:-1]] + [(7, 7)]), confidence=0.95)
    assert (uneven.low, uneven.high) == pytest.approx((even.low, even.high), abs=2e-3)


def test_a_problem_with_one_scored_answer_widens_a_rerun() -> None:
    many = [(4, 8)] * 10
    all_eight = paired_rerun_interval(problem_scores(many), problem_scores(many), confidence=0.95)
    with_one = paired_rerun_interval(
        problem_scores([*many[1:], (1, 1)]), problem_scores([*many[1:], (0, 1)]), confidence=0.95
    )
    assert with_one.high - with_one.low > all_eight.high - all_eight.low


def test_the_noise_of_pass_at_k_is_unbiased() -> None:
    """Over all outcomes of 8 samples at p = 0.3, weighted by their chance."""
    n, k, p = 8, 2, 0.3
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    found = problem_scores([(c, n) for c in range(n + 1)], k=k)
    mean = sum(w * v for w, v in zip(chances, found.value, strict=True))
    variance = sum(w * (v - mean) ** 2 for w, v in zip(chances, found.value, strict=True))
    assert mean == pytest.approx(1 - (1 - p) ** k)
    assert sum(w * s for w, s in zip(chances, found.variance, strict=True)) == pytest.approx(variance)


@pytest.mark.parametrize(("n", "k"), [(4, 2), (8, 4), (8, 3), (5, 5)])
def test_the_shared_variance_of_pass_at_k_is_never_too_small(n: int, k: int) -> None:
    """With too few samples for a variance of its own, a problem gets k/n of that of one choice of k samples."""
    for p in (0.02, 0.2, 0.5, 0.8):
        chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        value = problem_scores([(c, n) for c in range(n + 1)], k=k).value
        mean = sum(w * v for w, v in zip(chances, value, strict=True))
        variance = sum(w * (v - mean) ** 2 for w, v in zip(chances, value, strict=True))
        assert variance <= k / n * mean * (1 - mean) + 1e-12


def test_a_rerun_of_pass_at_4_of_8_counts_8_samples() -> None:
    """20 problems, each with 1 of 8 right: pass@4 = 1/2, and sqrt(20 * 1/4 * 4/8 + (z/2)^2 / 4) z / 20 to each side."""
    found = rerun_interval(problem_scores([(1, 8)] * 20, k=4), confidence=0.95)
    half = 1.959964 * math.sqrt(20 / 4 / 2 + (1.959964 / 2) ** 2 / 4) / 20
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)


def test_pass_at_k_is_refused_for_more_samples_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"pass@8 needs at least 8 scored answers of every problem; one has 4"):
        problem_scores([(1, 8), (1, 4)], k=8)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 8)), min_size=1, max_size=40),
    st.floats(0.51, 0.999),
)
def test_every_interval_holds_its_value_and_stays_in_range(rows: list[tuple[int, int, int]], confidence: float) -> None:
    x = problem_scores([(min(a, n), n) for a, _, n in rows])
    y = problem_scores([(min(b, n), n) for _, b, n in rows])
    difference = y.mean - x.mean
    for found in (rerun_interval(x, confidence=confidence), new_problems_interval(x, confidence=confidence)):
        assert 0 <= found.low <= x.mean <= found.high <= 1
        assert found.low < found.high
    for found in (
        paired_rerun_interval(x, y, confidence=confidence),
        paired_new_problems_interval(x, y, confidence=confidence).range,
    ):
        assert -1 <= found.low <= difference + 1e-12
        assert difference - 1e-12 <= found.high <= 1


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=2, max_size=30))
def test_swapping_before_and_after_turns_the_sign(rows: list[tuple[int, int]]) -> None:
    x, y = same_n([a for a, _ in rows], 8), same_n([b for _, b in rows], 8)
    there = paired_new_problems_interval(x, y, confidence=0.95).range
    back = paired_new_problems_interval(y, x, confidence=0.95).range
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-9)


# ---- clusters ----


def test_clusters_of_one_problem_change_no_interval() -> None:
    names = [f"contest {i}" for i in range(30)]
    found = []
    for clusters in (None, names):
        before = problem_scores([(2, 4)] * 30, clusters=clusters)
        after = problem_scores([(i % 5, 4 + i % 3) for i in range(30)], clusters=clusters)
        b = paired_new_problems_interval(before, after, confidence=0.95).range
        d = new_problems_interval(after, confidence=0.95)
        found.append((b.low, b.high, d.low, d.high))
    assert found[0] == pytest.approx(found[1])


def test_problems_that_change_together_are_as_many_as_their_clusters() -> None:
    """Ten problems in five clusters of two alike: the interval is Student's t of five differences."""
    after = [2, 2, 1, 1, 2, 2, 3, 3, 2, 2]
    names = [f"contest {i // 2}" for i in range(10)]
    before = problem_scores([(0, 4)] * 10, clusters=names)
    found = paired_new_problems_interval(
        before, problem_scores([(c, 4) for c in after], clusters=names), confidence=0.95
    )
    # five values of mean 0.5, symmetric, so without skewness; their standard deviation is sqrt(0.125 / 4)
    half = 2.776445 * math.sqrt(0.125 / 4 / 5)  # t of 4 degrees of freedom
    assert (found.range.low, found.range.high) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-6)


def test_a_problem_without_a_cluster_is_one_of_its_own_and_one_cluster_is_none() -> None:
    assert problem_scores([(1, 2)] * 4, clusters=["a", "", "a", ""]).num_clusters == 3
    assert problem_scores([(1, 2)] * 4, clusters=["a"] * 4).num_clusters is None
    assert problem_scores([(1, 2)] * 4, clusters=[""] * 4).num_clusters is None
