from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, fisher_exact, norm
from test_intervals import VECTORS

from klear_core.evaluate.stats.significance import (
    corrected_by_question,
    fisher_exact_p,
    holm,
    min_changed,
    sign_flip_test,
    unseen_loss,
)

P_VALUES = {"V1": 1.86265e-09, "V2": 1, "V3": 0.5, "V4": 0.125, "V5": 1, "V6": 0.125}


def by_hand(differences: list[Fraction]) -> float:
    seen = abs(sum(differences))
    flips = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    return sum(f >= seen for f in flips) / len(flips)


@pytest.mark.parametrize("name", VECTORS)
def test_the_vectors(name: str) -> None:
    x, y, n = VECTORS[name]
    found = sign_flip_test([Fraction(b - a, n) for a, b in zip(x, y, strict=True)])
    assert found.p == pytest.approx(P_VALUES[name], rel=1e-5)
    assert found.is_exact


def test_it_counts_all_sign_choices() -> None:
    rng = Random(0)
    for _ in range(20):
        differences = [Fraction(rng.randint(-8, 8), rng.choice((6, 7, 8))) for _ in range(9)]
        assert sign_flip_test(differences).p == pytest.approx(by_hand(differences))


def test_fewer_than_six_changed_problems_can_show_nothing() -> None:
    for num in range(1, 8):
        found = sign_flip_test([Fraction(1)] * num + [Fraction(0)] * 20)
        assert found.num_changed == num
        assert (found.p < 0.05) == (num >= 6)


def test_fishers_worked_example() -> None:
    """Darwin's maize, 15 pairs in eighths of an inch (Fisher 1935, section 21): 1,726 of 32,768 sign choices."""
    darwin = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    found = sign_flip_test([Fraction(d) for d in darwin])
    assert found.p == pytest.approx(1726 / 32768)


def test_unlike_denominators_are_counted_one_by_one_or_drawn() -> None:
    """Primes have no small common denominator."""
    few = [Fraction(1, p) for p in (4999, 5003, 5009, 5011, 5021, 5023, 5039, 5051)]
    assert sign_flip_test(few).p == pytest.approx(2 / 2**8)
    primes = [p for p in range(5000, 5400) if all(p % q for q in range(2, 74))][:30]
    many = [Fraction(1 if i % 3 else -1, p) for i, p in enumerate(primes)]
    drawn = sign_flip_test(many)
    assert not drawn.is_exact
    # almost equal sizes: a binomial with 20 of 30 positive
    alike = sign_flip_test([Fraction(1 if i % 3 else -1) for i in range(30)]).p
    assert drawn.p == pytest.approx(alike, abs=0.05)
    assert sign_flip_test(many) == drawn


def test_twenty_thousand_changed_problems_are_the_exact_binomial() -> None:
    """One answer each: 10,140 of 20,000 are fixed; p = 2 P(Binomial(20000, 1/2) >= 10140)."""
    found = sign_flip_test([Fraction(1)] * 10_140 + [Fraction(-1)] * 9_860)
    assert found.is_exact
    assert found.p == pytest.approx(2 * float(binom.sf(10_139, 20_000, 0.5)), rel=1e-6)
    even = sign_flip_test([Fraction(1, 4)] * 10_000 + [Fraction(-1, 4)] * 10_000)
    assert (even.p, even.is_exact) == (1.0, True)


def test_many_changed_problems_of_several_samples_are_counted_as_few_are() -> None:
    """The two ways of counting on both sides of their limit; p of the second is that of a normal sum within 1 %."""
    rng = Random(1)
    for num in (9_000, 20_000):
        differences = [Fraction(rng.choice((-4, -3, -2, -1, 1, 2, 3, 4)), 4) for _ in range(num)]
        differences += [Fraction(1, 4)] * 300
        found = sign_flip_test(differences)
        assert found.is_exact
        z = (abs(sum(differences)) - Fraction(1, 4)) / Fraction(math.sqrt(sum(d * d for d in differences)))
        assert found.p == pytest.approx(2 * float(norm.sf(float(z))), rel=0.01)


def test_a_gain_of_twenty_thousand_problems_has_a_small_p_and_never_zero() -> None:
    found = sign_flip_test([Fraction(1)] * 20_000)
    assert 0 < found.p < 1e-9


def test_many_changed_problems_with_unlike_denominators_are_drawn_as_bits() -> None:
    rng = Random(2)
    primes = [p for p in range(5000, 9000) if all(p % q for q in range(2, 95))][:400]
    differences = [Fraction(rng.choice((-1, 1)) if i % 12 else 1, p) for i, p in enumerate(primes)]
    found = sign_flip_test(differences)
    assert not found.is_exact
    assert sign_flip_test(differences) == found
    z = float(sum(differences)) / math.sqrt(sum(float(d) ** 2 for d in differences))
    assert found.p == pytest.approx(2 * float(norm.sf(abs(z))), abs=0.01)


def test_holm_by_hand() -> None:
    """0.01 * 4, 0.02 * 3, 0.03 * 2, and 0.04 * 1 raised to the one before it."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx((0.06, 0.04, 0.06, 0.06))
    assert holm([0.6, 0.5]) == (1.0, 1.0)
    assert holm([0.2]) == (0.2,)
    assert holm([]) == ()


@pytest.mark.parametrize("confidence", [0.6, 0.8, 0.9, 0.95, 0.99])
def test_the_fewest_changed_problems_of_a_test_depend_on_the_level(confidence: float) -> None:
    fewest = min_changed(confidence)
    assert sign_flip_test([Fraction(1)] * fewest).p + confidence < 1
    assert sign_flip_test([Fraction(1)] * (fewest - 1)).p + confidence >= 1


@pytest.mark.parametrize(
    ("events", "runs", "p"),
    [
        ((5, 0), (5, 5), 2 / 252),  # of the 252 ways to choose 5 of 10 runs, all on one side or all on the other
        ((3, 1), (4, 4), 34 / 70),  # Fisher's lady with her tea: 1, 16, 36, 16 and 1 ways
        ((1, 0), (2, 2), 1.0),
        ((0, 0), (3, 8), 1.0),
        ((4, 4), (4, 4), 1.0),
        ((0, 5), (8, 8), 2 * 56 / 4368),  # 56 ways on each side of the 4,368 ways to choose 5 of 16 runs
    ],
)
def test_fishers_exact_test_by_hand(events: tuple[int, int], runs: tuple[int, int], p: float) -> None:
    assert fisher_exact_p(events, runs) == pytest.approx(p, rel=1e-12)


@given(st.integers(1, 30), st.integers(1, 30), st.data())
def test_fishers_exact_test_is_that_of_scipy(first: int, second: int, data: st.DataObject) -> None:
    a, b = data.draw(st.integers(0, first)), data.draw(st.integers(0, second))
    expected = fisher_exact([[a, first - a], [b, second - b]]).pvalue
    assert fisher_exact_p((a, b), (first, second)) == pytest.approx(expected, abs=1e-9)


def test_the_signs_of_a_cluster_flip_together() -> None:
    """Eight problems of two clusters that all gained: 2 of 4 choices of two signs are as extreme, not 2 of 256."""
    found = sign_flip_test([Fraction(1, 4)] * 8, [0, 0, 0, 0, 1, 1, 1, 1])
    assert (found.p, found.num_changed) == (0.5, 2)


def test_a_second_answer_to_one_question_costs_the_others_nothing() -> None:
    """Two questions: sampled .01 and .04 by Holm .02 and .04; greedy .001 of the first is 2 x .001, not below .02."""
    corrected = corrected_by_question([0.01, 0.001, 0.04], ["a", "a", "b"])
    assert corrected == pytest.approx((0.02, 0.02, 0.04))
    assert corrected_by_question([0.01, 0.03], ["a", "a"]) == pytest.approx((0.01, 0.03))


def test_a_gain_on_few_problems_must_exceed_what_a_rare_loss_that_was_not_drawn_explains() -> None:
    """A model that loses 5 % of all problems may gain 5/95 on the others; 69 draws miss them in .95^69 = .029 of cases."""
    assert unseen_loss(np.full(30, 0.04)) == pytest.approx(5 / 95)
    assert unseen_loss(np.full(69, 0.04)) == 0
    spread = np.array([0.0, 0.2] * 30)  # P = 60: the level is .03 / .95^60 = .65, whose t is -.387
    assert unseen_loss(spread) == pytest.approx(5 / 95 - 0.387 * spread.std(ddof=1) / 60**0.5, abs=1e-4)
