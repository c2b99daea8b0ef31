from itertools import pairwise

import numpy as np
import pytest

from klear_core.data.curation import kcenter
from klear_core.data.curation.kcenter import k_center, quantised, refined


def one_by_one(vectors, size, first, groups, quotas):
    """Return the centres by the definition, with exact fractions in float64."""
    vectors = vectors.astype(np.float64)
    norms = np.linalg.norm(vectors, axis=1).astype(np.float32)
    norms[norms == 0] = 1

    def similar_to(i):
        return (vectors @ vectors[i]).astype(np.float32) / (norms * norms[i])

    chosen, left, similar = [first], list(quotas), similar_to(first)
    left[groups[first]] -= 1
    while len(chosen) < size:
        open_ = np.array([left[g] > 0 for g in groups])
        open_[chosen] = False
        chosen.append(int(np.where(open_, similar, np.inf).argmin()))
        left[groups[chosen[-1]]] -= 1
        similar = np.maximum(similar, similar_to(chosen[-1]))
    return chosen


def angles(*degrees):
    return quantised(np.array([[np.cos(np.radians(d)), np.sin(np.radians(d))] for d in degrees]))


def test_each_centre_is_the_farthest_from_those_before():
    centres = k_center(angles(0, 10, 100, 170, 50), 4, first=0)
    assert centres.chosen.tolist() == [0, 3, 2, 4]  # 170 degrees away, then 70 of 170, then 50 of 0 and 100
    assert centres.nearest_N.tolist() == [0, 0, 2, 3, 4]
    assert centres.similarity_N[1] == pytest.approx(np.cos(np.radians(10)), abs=0.01)


def test_of_equally_far_vectors_the_lower_index_is_chosen():
    assert k_center(angles(0, 90, 180, 180, 90), 3, first=0).chosen.tolist() == [0, 2, 1]


@pytest.mark.parametrize("seed", range(20))
def test_batches_choose_what_one_at_a_time_chooses(seed, monkeypatch):
    monkeypatch.setattr(kcenter, "_NUM_CANDIDATES", 16)
    draw = np.random.default_rng(seed)
    vectors = draw.integers(-4, 5, (150, 3)).astype(np.int8)  # many are equal, many are equally far
    vectors[draw.integers(0, 150, 10)] = 0
    groups, quotas = draw.integers(0, 3, 150), [15, 150, 20]
    expected = one_by_one(vectors, 70, 7, groups, quotas)
    assert k_center(vectors, 70, first=7, groups_N=groups, quotas=quotas).chosen.tolist() == expected
    assert k_center(vectors, 150, first=7).chosen.tolist() == one_by_one(vectors, 150, 7, groups, [150] * 3)


def test_the_largest_distance_only_falls_with_more_centres():
    vectors = quantised(np.random.default_rng(0).standard_normal((500, 16)))
    least = [k_center(vectors, size, first=0).similarity_N.min() for size in (1, 5, 25, 125)]
    assert all(one < other for one, other in pairwise(least))


@pytest.mark.parametrize("dimensions", [8, 256, 1024, 2560, 4096])
def test_products_are_exact_in_float32(dimensions):
    vectors = quantised(np.ones((2, dimensions)))
    product = int(vectors[0].astype(np.int64) @ vectors[1].astype(np.int64))
    assert product <= 2**24
    assert vectors.min() > 60
    assert quantised(np.zeros((1, dimensions))).max() == 0


def test_refined_centres_are_in_the_middle():
    vectors = angles(0, 20, 10, 170, 130, 150)
    centres = k_center(vectors, 2, first=0)
    assert centres.chosen.tolist() == [0, 3]
    moved = refined(vectors, centres)
    assert moved.chosen.tolist() == [2, 5]
    assert moved.nearest_N.tolist() == [2, 2, 2, 5, 5, 5]
    assert moved.similarity_N.min() > centres.similarity_N.min()


def test_a_refined_centre_stays_in_its_group():
    vectors = angles(0, 20, 10, 170, 130, 150)
    groups = np.array([0, 0, 1, 1, 1, 0])
    centres = k_center(vectors, 2, first=0, groups_N=groups, quotas=[1, 1])
    moved = refined(vectors, centres, groups).chosen
    assert groups[moved].tolist() == groups[centres.chosen].tolist() == [0, 1]
    assert moved[1] == 4  # 150 degrees is the middle, and of the other group
