from __future__ import annotations

import math
from itertools import combinations
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from klear_core.evaluate.stats import mean_interval, paired_interval, pass_at_k, seed_interval

AT_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

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
            assert pass_at_k(6, num_correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_is_0_without_a_right_one_and_1_if_k_cannot_miss() -> None:
    assert pass_at_k(64, 0, 64) == 0.0
    assert pass_at_k(64, 1, 64) == 1.0
    assert pass_at_k(5, 3, 3) == 1.0


def test_pass_at_k_agrees_with_exact_integers_where_factorials_overflow_floats() -> None:
    exact = 1 - math.comb(9_900, 300) / math.comb(10_000, 300)
    assert pass_at_k(10_000, 100, 300) == pytest.approx(exact, rel=1e-12)
    assert pass_at_k(10**6, 1, 10) == pytest.approx(1e-5, rel=1e-12)


# ---- intervals ----


def test_the_interval_of_four_problems_by_hand() -> None:
    # With 0 and 1 added: 0, 0, .5, .5, 1, 1; mean .5, squared deviations 4 * .25 = 1, variance 1/5, t(5) at 97.5 % = 2.5706
    interval = mean_interval([0.0, 0.5, 0.5, 1.0], confidence=0.95)
    half = 2.570582 * math.sqrt(1 / 5 / 6)
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=1e-6)


def test_the_interval_is_scipys_t_interval_of_the_padded_means() -> None:
    from scipy import stats

    rng = Random(0)
    means = [rng.random() for _ in range(30)]
    low, high = stats.t.interval(0.9, df=31, loc=sum([*means, 1]) / 32, scale=stats.sem([*means, 0, 1]))
    interval = mean_interval(means, confidence=0.9)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-12)


def test_the_paired_interval_is_scipys_paired_t_interval_with_one_win_and_one_loss_added() -> None:
    from scipy import stats

    rng = Random(1)
    before, after = [rng.random() for _ in range(40)], [rng.random() for _ in range(40)]
    expected = stats.ttest_rel([*after, 0, 1], [*before, 1, 0]).confidence_interval(0.95)
    interval = paired_interval(before, after, confidence=0.95)
    assert interval.value == pytest.approx(sum(after) / 40 - sum(before) / 40)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5])
def test_equal_problems_do_not_collapse_the_interval(value: float) -> None:
    interval = mean_interval([value] * 30, confidence=0.95)
    assert interval.value == value
    assert 0.05 < interval.high - interval.low < 0.15


def test_a_perfect_score_on_thirty_problems_leaves_room_below() -> None:
    interval = mean_interval([1.0] * 30, confidence=0.95)
    assert interval.high == 1.0
    assert interval.low == pytest.approx(0.905, abs=0.001)


def test_two_models_without_any_difference_are_not_certain_to_be_equal() -> None:
    interval = paired_interval([0.5] * 256, [0.5] * 256, confidence=0.95)
    assert interval.value == 0
    assert interval.low == -interval.high
    assert interval.high == pytest.approx(0.0108, abs=1e-4)


def test_pairing_removes_what_problems_have_in_common() -> None:
    before = [0.0, 0.2, 0.4, 0.6, 0.8] * 20
    after = [m + 0.2 for m in before]
    paired = paired_interval(before, after, confidence=0.95)
    alone = mean_interval(before, confidence=0.95)
    assert paired.low > 0.15
    assert paired.high - paired.low < (alone.high - alone.low) / 2


def test_swapping_before_and_after_turns_the_sign() -> None:
    there, back = (
        paired_interval([0.1, 0.9, 0.3], [0.5, 0.8, 0.4], confidence=0.9),
        paired_interval([0.5, 0.8, 0.4], [0.1, 0.9, 0.3], confidence=0.9),
    )
    assert (there.value, there.low, there.high) == pytest.approx((-back.value, -back.high, -back.low))


@AT_ANY_SPEED
@given(st.lists(st.floats(0, 1), min_size=1, max_size=200), st.floats(0.51, 0.999))
def test_the_interval_holds_its_value_and_stays_in_range(means: list[float], confidence: float) -> None:
    interval = mean_interval(means, confidence=confidence)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    assert interval.low < interval.high


@AT_ANY_SPEED
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=200))
def test_the_paired_interval_holds_its_value_and_stays_in_range(pairs: list[tuple[float, float]]) -> None:
    interval = paired_interval([b for b, _ in pairs], [a for _, a in pairs], confidence=0.95)
    assert -1 <= interval.low <= interval.value <= interval.high <= 1


# ---- coverage, by simulation: problems drawn from a population, samples drawn from each problem ----


def draw_means(rng: Random, *, num_problems: int, num_samples: int, mean: float, correlation: float) -> list[float]:
    """Beta-binomial problem means; `correlation` is that of two samples of one problem (0: all problems are alike)."""

    def chance() -> float:
        if correlation == 0:
            return mean
        if correlation == 1:
            return float(rng.random() < mean)
        scale = 1 / correlation - 1
        return rng.betavariate(mean * scale, (1 - mean) * scale)

    chances = [chance() for _ in range(num_problems)]
    return [sum(rng.random() < c for _ in range(num_samples)) / num_samples for c in chances]


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("num_problems", "num_samples", "mean"), [(30, 4, 0.5), (30, 8, 0.05), (30, 1, 0.9), (100, 4, 0.99), (12, 4, 0.2)]
)
def test_at_least_93_of_100_intervals_hold_the_truth(
    num_problems: int, num_samples: int, mean: float, correlation: float
) -> None:
    rng = Random(f"{num_problems} {num_samples} {mean} {correlation}")
    num_runs, hits = 600, 0
    for _ in range(num_runs):
        means = draw_means(rng, num_problems=num_problems, num_samples=num_samples, mean=mean, correlation=correlation)
        interval = mean_interval(means, confidence=0.95)
        hits += interval.low <= mean <= interval.high
    assert hits / num_runs >= 0.93  # 0.941 at worst in long runs; 600 runs have a standard error of 0.009


@pytest.mark.parametrize(("gain", "correlation"), [(0.0, 0.5), (0.0, 1.0), (0.1, 0.0), (0.1, 0.9)])
def test_at_least_93_of_100_paired_intervals_hold_the_true_difference(gain: float, correlation: float) -> None:
    rng = Random(f"{gain} {correlation}")
    num_runs, hits = 600, 0
    for _ in range(num_runs):
        draws = [
            draw_means(rng, num_problems=40, num_samples=4, mean=m, correlation=correlation) for m in (0.4, 0.4 + gain)
        ]
        interval = paired_interval(draws[0], draws[1], confidence=0.95)
        hits += interval.low <= gain <= interval.high
    assert hits / num_runs >= 0.93


def test_more_samples_narrow_the_interval_and_more_problems_narrow_it_more() -> None:
    rng = Random(2)

    def width(num_problems: int, num_samples: int) -> float:
        means = draw_means(rng, num_problems=num_problems, num_samples=num_samples, mean=0.5, correlation=0.3)
        interval = mean_interval(means, confidence=0.95)
        return interval.high - interval.low

    assert width(400, 1) > width(400, 16) > width(1600, 16)


# ---- seeds ----


def test_the_interval_of_three_seeds_by_hand() -> None:
    # Mean .2, standard deviation .1, t(2) at 97.5 % is 4.302653
    interval = seed_interval([0.1, 0.2, 0.3], bounds=(-1, 1), confidence=0.95)
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.2, 0.2 - half, 0.2 + half), abs=1e-6)


def test_equal_seeds_have_an_interval_of_no_width() -> None:
    interval = seed_interval([0.5, 0.5], bounds=(0, 1), confidence=0.95)
    assert (interval.low, interval.high) == (0.5, 0.5)


def test_the_interval_of_seeds_ends_where_scores_end() -> None:
    interval = seed_interval([0.1, 0.9], bounds=(0, 1), confidence=0.95)
    assert (interval.value, interval.low, interval.high) == (0.5, 0, 1)
