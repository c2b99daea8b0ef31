"""Draw distinct problems from numbered spaces, without those of the other split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random
from typing import Literal

HELD_OUT_ONE_IN = 8


def is_held_out(question: str) -> bool:
    """Return whether a question is in the held-out split: one in eight is, by a hash of its text alone."""
    digest = hashlib.blake2b(question.encode(), digest_size=8, person=b"heldout").digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The problems that one level of difficulty contributes to a source."""

    split: Literal["train", "heldout"]
    num_problems: int
    """Problems wanted."""
    size: int
    """Problems of this level, of both splits; they are numbered from 0."""
    question: Callable[[int], str | None]
    """Returns the text of a number's question; None if the number stands for no usable problem."""

    @property
    def is_small(self) -> bool:
        """Return whether the space is small enough to enumerate; in a larger one rejection sampling ends soon."""
        return self.size <= 4 * HELD_OUT_ONE_IN * self.num_problems

    def available(self) -> int | None:
        """Return how many problems the split has; None if they are too many to count."""
        if not self.is_small:
            return None
        return sum(self._usable(index) is not None for index in range(self.size))

    def draw(self, rng: Random) -> Iterator[str]:
        """Yield questions of the split in random order, none twice."""
        for index in self._indices(rng):
            question = self._usable(index)
            if question is not None:
                yield question

    def _usable(self, index: int) -> str | None:
        question = self.question(index)
        if question is None or is_held_out(question) != (self.split == "heldout"):
            return None
        return question

    def _indices(self, rng: Random) -> Iterator[int]:
        if self.is_small:  # a random permutation: rejection would be slow once most indices are seen
            yield from rng.sample(range(self.size), self.size)
            return
        seen: set[int] = set()
        while True:
            index = rng.randrange(self.size)
            if index not in seen:
                seen.add(index)
                yield index


def problems_by_level(levels: tuple[int, ...], num_problems: int) -> dict[int, int]:
    """Return the number of problems of each level, as equal as possible; the first levels may have one more."""
    return {level: len(range(i, num_problems, len(levels))) for i, level in enumerate(levels)}


def questions_in_turn(shares: Mapping[int, Share], rng_of: Callable[[int], Random]) -> Iterator[tuple[int, str]]:
    """Yield level and question of all problems, cycling through the levels; each level has a random generator."""
    drawn = {level: share.draw(rng_of(level)) for level, share in shares.items()}
    num_problems = sum(share.num_problems for share in shares.values())
    for level in islice(cycle(drawn), num_problems):
        yield level, next(drawn[level])
