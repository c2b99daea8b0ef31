"""Choose the rows of each training step: held-out problems, source weights, a new permutation every epoch.

The choice depends on the seed and the step only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from klear_core.errors import DataError
from klear_core.seeding import seed_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Row numbers for training and for validation. All rows of a problem are in the same part."""

    train: tuple[int, ...]
    validation: tuple[int, ...]


def split_rows(problem_ids: Sequence[str], *, frac: float, max_rows: int, seed: int) -> Split:
    """Hold out about `frac` of the problems, at most `max_rows` rows: complete problems, lowest id hash first."""
    # Draw in [0, 1) from the id alone, so that a problem's draw does not change when others are added.
    draws = {p: seed_for(seed, "sft/validation", p) / 2**63 for p in set(problem_ids)}
    # Complete problems: with one trace of a problem in training, its other traces would validate too well.
    rows_of: dict[str, list[int]] = {}
    for row, problem_id in enumerate(problem_ids):
        rows_of.setdefault(problem_id, []).append(row)
    validation: list[int] = []
    drawn = [p for p in draws if draws[p] < frac]
    # By draw, so that a lower `max_rows` holds out a subset, whatever the order of the rows.
    for problem_id in sorted(drawn, key=lambda p: draws[p]):
        if len(validation) + len(rows_of[problem_id]) > max_rows:
            break
        validation += rows_of[problem_id]
    held_out = set(validation)
    train = [r for r in range(len(problem_ids)) if r not in held_out]
    return Split(train=tuple(train), validation=tuple(sorted(validation)))


class RowOrder:
    """Cuts the stream of training rows into steps; epochs follow without a gap.

    Raise DataError if there are no rows.
    """

    def __init__(
        self,
        rows: Sequence[int],
        sources: Sequence[str],
        *,
        weights: Mapping[str, float],
        num_epochs: int,
        rows_per_step: int,
        seed: int,
    ) -> None:
        by_source: dict[str, list[int]] = {}
        for row in rows:
            by_source.setdefault(sources[row], []).append(row)
        # Sort by name, because `_epoch` draws from one generator source by source.
        self._by_source = {source: np.array(by_source[source]) for source in sorted(by_source)}
        self._weights = weights
        self._rows_per_step = rows_per_step
        self._seed = seed
        self.rows_per_epoch = len(self._epoch(0)) if rows else 0
        if not self.rows_per_epoch:
            raise DataError(
                f"nothing to train on: source_weights {dict(weights)} leave none of {len(rows)} rows "
                f"that are not held out"
            )
        self.num_rows = self.rows_per_epoch * num_epochs
        self.num_steps = -(-self.num_rows // rows_per_step)  # rounded up: the last step takes what is left
        self._cached_epoch = lru_cache(maxsize=2)(self._epoch)  # a step can span two epochs

    def step(self, step: int) -> list[int]:
        """Return the row numbers of one step; the last step may be smaller."""
        places = range(step * self._rows_per_step, min((step + 1) * self._rows_per_step, self.num_rows))
        return [int(self._cached_epoch(i // self.rows_per_epoch)[i % self.rows_per_epoch]) for i in places]

    def num_distinct(self, num_steps: int) -> int:
        """Return the number of rows that occur at least once in the first `num_steps` steps."""
        end = min(num_steps * self._rows_per_step, self.num_rows)
        seen: set[int] = set()
        # A row can occur several times: in other epochs, or in one by its source's weight.
        for first in range(0, end, self.rows_per_epoch):
            seen.update(self._cached_epoch(first // self.rows_per_epoch)[: end - first].tolist())
        return len(seen)

    def _epoch(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return each source's rows as often as its weight says, shuffled together. All epochs have the same length."""
        # Seeded by epoch, so that a resumed run finds its place without drawing the epochs before.
        rng = np.random.default_rng(seed_for(self._seed, "sft/order", epoch))
        parts = []
        for source, rows in self._by_source.items():
            weight = self._weights.get(source, 1.0)
            # A weight of 2.3 takes all rows twice, and a random 30 % of them once more.
            parts += [rows] * int(weight)
            parts.append(rng.permutation(rows)[: round((weight - int(weight)) * len(rows))])
        return rng.permutation(np.concatenate(parts))
