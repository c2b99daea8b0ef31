"""Choose a subset of vectors by K-center greedy: each centre is the vector farthest from all centres before it.

It minimises the largest distance of a vector to its nearest centre to within a factor of 2 (Gonzalez 1985, "Clustering
to minimize the maximum intercluster distance"); as a choice of training data: Sener and Savarese 2018, "Active learning
for convolutional neural networks: a core-set approach". Its known defect: outliers are the farthest vectors, so it
chooses them first, and the mean distance is larger than that of a random choice. `refined` moves the centres inwards.

Vectors are 8-bit integers, made by `quantised`. Sums of their products are whole numbers of at most 2^24, which float32
represents exactly, so the result does not depend on the number of threads or on the processor.
Axis letters: N vectors, D dimensions, B rows of a block, C new centres, P candidates of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.int8]
Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_EXACT_UP_TO = 1 << 24
"""float32 represents every whole number up to this one."""
_NUM_CANDIDATES = 2048
"""Number of farthest vectors that are compared with each other in a batch, to find the next centres among them."""
_ROWS_PER_BLOCK = 8192
"""Number of vectors compared with the new centres at a time; they take 64 MB at most."""
_LENGTH = 1024
"""Length to which vectors are scaled before they are summed to the middle of a cell."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Centres:
    """The chosen vectors, and the distance of every vector to them."""

    chosen: Indices
    """The centres in the order in which they were chosen."""
    nearest_N: Indices
    """The nearest centre of each vector; of equally near centres the one chosen first. A centre is its own."""
    similarity_N: Floats
    """Cosine similarity to it."""


def quantised(vectors_BD: npt.NDArray[np.floating]) -> Vectors:
    """Return vectors of (nearly) the same directions, with whole numbers small enough for exact products in float32."""
    dimensions = vectors_BD.shape[1]
    level = min(127, math.isqrt(_EXACT_UP_TO // dimensions))
    largest_B = np.abs(vectors_BD).max(axis=1, keepdims=True)
    scaled_BD = vectors_BD * (level / np.where(largest_B == 0, 1, largest_B))
    return np.rint(scaled_BD).astype(np.int8)


def k_center(
    vectors_ND: Vectors, size: int, *, first: int, groups_N: Indices | None = None, quotas: Sequence[int] = ()
) -> Centres:
    """Return `size` centres by cosine similarity, beginning with `first`; of equally far vectors the lower index wins.

    With `groups_N`, group g gives at most `quotas[g]` centres. Memory beyond the vectors is 24 bytes a vector and
    about 100 MB.
    """
    N = len(vectors_ND)
    groups_N = np.zeros(N, dtype=np.int64) if groups_N is None else groups_N
    left = np.array(quotas or [N], dtype=np.int64)
    assert 0 < size <= np.minimum(left, np.bincount(groups_N, minlength=len(left))).sum(), (size, left)
    search = _Search(vectors_ND)
    left[groups_N[first]] -= 1  # `left` counts down the centres that each group may still give
    search.add(np.array([first]))
    while search.num_chosen < size:
        open_N = search.is_free_N & (left[groups_N] > 0)
        search.add(_next_centres(search, open_N, size - search.num_chosen, groups_N, left))
    return search.result()


def refined(vectors_ND: Vectors, centres: Centres, groups_N: Indices | None = None) -> Centres:
    """Move each centre to the middle of its cell, the vectors that are nearest to it (one k-medoids step).

    A centre moves to the vector of its own group that is most similar to the mean direction of the cell.
    """
    N, D = vectors_ND.shape
    groups_N = np.zeros(N, dtype=np.int64) if groups_N is None else groups_N
    search = _Search(vectors_ND)
    place_of_N = np.zeros(N, dtype=np.int64)
    place_of_N[centres.chosen] = np.arange(len(centres.chosen))
    cells_N = place_of_N[centres.nearest_N]  # the number of each vector's centre, in the order of choice
    sums_CD = np.zeros((len(centres.chosen), D), dtype=np.int64)
    for rows in search.blocks():
        np.add.at(sums_CD, cells_N[rows], search.directions(rows))
    fit_N = np.empty(N)
    for rows in search.blocks():
        fit_N[rows] = np.einsum("bd,bd->b", vectors_ND[rows], sums_CD[cells_N[rows]]) / search.norms_N[rows]
    fit_N[groups_N != groups_N[centres.nearest_N]] = -np.inf  # a centre of another group would break the quotas
    # Sort by cell, then by fit, the best first. The sort is stable, so the lower index wins among equals.
    order_N = np.lexsort((-fit_N, cells_N))
    is_first_N = np.diff(cells_N[order_N], prepend=-1) > 0
    search.add(order_N[is_first_N])  # each cell's best vector, in the order of the old centres
    return search.result()


class _Search:
    """The state of a search: the centres so far, and the nearest of them to each vector."""

    def __init__(self, vectors_ND: Vectors) -> None:
        N = len(vectors_ND)
        self._vectors_ND = vectors_ND
        self.norms_N: Floats = np.empty(N, dtype=np.float32)
        """Length of each vector; 1 for a zero vector, which is similar to nothing."""
        for rows in self.blocks():
            block_BD = vectors_ND[rows].astype(np.float32)
            self.norms_N[rows] = np.sqrt(np.einsum("bd,bd->b", block_BD, block_BD))
        self.norms_N[self.norms_N == 0] = 1
        self.chosen: list[Indices] = []
        self.num_chosen = 0
        self.is_free_N = np.ones(N, dtype=np.bool_)
        self.nearest_N: Indices = np.full(N, -1, dtype=np.int64)
        self.similarity_N: Floats = np.full(N, -2, dtype=np.float32)

    def add(self, centres_C: Indices) -> None:
        """Make these vectors centres."""
        for start in range(0, len(centres_C), _NUM_CANDIDATES):
            self._compare(centres_C[start : start + _NUM_CANDIDATES])
        self.nearest_N[centres_C] = centres_C
        self.is_free_N[centres_C] = False
        self.chosen.append(centres_C)
        self.num_chosen += len(centres_C)

    def _compare(self, centres_C: Indices) -> None:
        for rows in self.blocks():
            similar_BC = self.similarities(rows, centres_C)
            best_B = similar_BC.argmax(axis=1)  # among equals the centre chosen first
            values_B = similar_BC[np.arange(len(rows)), best_B]
            better_B = values_B > self.similarity_N[rows]
            self.similarity_N[rows[better_B]] = values_B[better_B]
            self.nearest_N[rows[better_B]] = centres_C[best_B[better_B]]

    def blocks(self) -> Iterator[Indices]:
        """Yield the indices of all vectors, a block at a time."""
        num_vectors = len(self._vectors_ND)
        for start in range(0, num_vectors, _ROWS_PER_BLOCK):
            yield np.arange(start, min(start + _ROWS_PER_BLOCK, num_vectors))

    def directions(self, rows: Indices) -> Indices:
        """Return the vectors scaled to one length and rounded to whole numbers, whose sums are exact."""
        unit_BD = self._vectors_ND[rows] / self.norms_N[rows, None]
        return np.rint(unit_BD * _LENGTH).astype(np.int64)

    def result(self) -> Centres:
        """Return the centres so far."""
        chosen = np.concatenate(self.chosen)
        return Centres(chosen=chosen, nearest_N=self.nearest_N, similarity_N=self.similarity_N)

    def similarities(self, rows: Indices, others: Indices) -> Floats:
        """Return the cosine similarities of all pairs of rows of the two lists."""
        products = self._vectors_ND[rows].astype(np.float32) @ self._vectors_ND[others].astype(np.float32).T
        products /= self.norms_N[rows, None] * self.norms_N[others]
        return products


def _next_centres(
    search: _Search, open_N: npt.NDArray[np.bool_], most: int, groups_N: Indices, left: Indices
) -> Indices:
    """Return at least one next centre, and subtract the centres from their groups' counts in `left`.

    Candidates are the farthest vectors, those least similar to their nearest centre. Only they are compared with the
    batch's new centres. The other vectors keep their old similarity, which a new centre can only raise. So while the
    least similar candidate is below `bound`, the smallest old similarity of the others, it is the farthest of all.
    """
    candidates_P, bound = _farthest(search.similarity_N, open_N)
    similar_PP = search.similarities(candidates_P, candidates_P)
    similarity_P = search.similarity_N[candidates_P]
    groups_P = groups_N[candidates_P]
    chosen: list[int] = []
    while len(chosen) < most:
        place = int(similarity_P.argmin())  # candidates ascend, so the lower index wins
        if (float(similarity_P[place]), int(candidates_P[place])) > bound:
            break
        chosen.append(int(candidates_P[place]))
        np.maximum(similarity_P, similar_PP[place], out=similarity_P)
        similarity_P[place] = np.inf
        group = groups_P[place]
        left[group] -= 1
        if not left[group]:
            break  # the group is full, so its other vectors are no candidates any more
    return np.array(chosen)


def _farthest(similarity_N: Floats, open_N: npt.NDArray[np.bool_]) -> tuple[Indices, tuple[float, int]]:
    """Return the indices of the least similar open vectors, ascending, and similarity and index of the next vector."""
    open_M = np.flatnonzero(open_N)
    if len(open_M) <= _NUM_CANDIDATES:
        return open_M, (np.inf, 0)
    similarity_M = similarity_N[open_M]
    bound = np.partition(similarity_M, _NUM_CANDIDATES)[_NUM_CANDIDATES]
    below_M = open_M[similarity_M < bound]
    equal_M = open_M[similarity_M == bound]
    num_equal = _NUM_CANDIDATES - len(below_M)
    candidates_P = np.sort(np.concatenate([below_M, equal_M[:num_equal]]))
    return candidates_P, (float(bound), int(equal_M[num_equal]))
