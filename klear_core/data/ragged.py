"""Hold lists of numbers of different lengths in flat arrays, which can be saved, mapped into memory and joined."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Lists of numbers, concatenated in one array."""

    values: Numbers
    ends: npt.NDArray[np.int64]
    """End of each list in `values`."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Numbers:
        start = self.ends[index - 1] if index else 0
        return self.values[start : self.ends[index]]

    def where(self, is_kept: npt.NDArray[np.bool_]) -> Ragged:
        """Return the lists with only the marked ones of their numbers."""
        num_kept = np.concatenate([[0], np.cumsum(is_kept, dtype=np.int64)])
        return Ragged(self.values[is_kept], num_kept[self.ends])

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the length of each list."""
        return np.diff(self.ends, prepend=0)


def ragged(lists: Sequence[Collection[int]], dtype: npt.DTypeLike) -> Ragged:
    """Return lists of numbers as flat arrays."""
    ends = np.cumsum([len(numbers) for numbers in lists], dtype=np.int64)
    # One array for all: an array for each list costs more than its numbers.
    return Ragged(np.fromiter(chain.from_iterable(lists), dtype=dtype), ends)


def joined_parts(parts: Sequence[Numbers], dtype: npt.DTypeLike) -> Ragged:
    """Return arrays as the lists of one Ragged."""
    values = np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
    return Ragged(values, np.cumsum([len(part) for part in parts], dtype=np.int64))


def joined(tables: Sequence[Ragged]) -> Ragged:
    """Return all lists of several tables, in order."""
    values = np.concatenate([table.values for table in tables])
    starts = np.cumsum([0, *(len(table.values) for table in tables[:-1])])
    return Ragged(values, np.concatenate([table.ends + start for table, start in zip(tables, starts, strict=True)]))


def distinct(values: Numbers) -> Numbers:
    """Return the distinct numbers, ascending. Several times as fast as `np.unique`, which hashes since numpy 2.3."""
    ordered = np.sort(values)
    return ordered[is_first(ordered)]


def is_first(values: Numbers) -> npt.NDArray[np.bool_]:
    """Return which numbers differ from the one before them; the first number does."""
    differs: npt.NDArray[np.bool_] = np.append(True, values[1:] != values[:-1])
    return differs[: len(values)]
