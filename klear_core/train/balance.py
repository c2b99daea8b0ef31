"""Distribute rows over micro-batches and ranks so that ranks wait little for one another.

Sharded models make collective calls in every pass, so ranks run their micro-batches in lockstep: pass i of an update
lasts as long as its heaviest micro-batch, on whatever rank that is. The work of a row grows faster than its length,
because attention looks at pairs of tokens. Micro-batches with equally many tokens therefore take different times.

Pure Python; every rank computes the same plan from the same rows, without communication.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

_PASS_TOKENS = 300
"""Cost of a pass beyond its rows' work (launches, collective calls), in tokens. An assumption; it only decides between
plans with different numbers of passes."""
_EXTRA_PASSES = 3
"""Plans by levels are tried with the fewest possible passes and up to this many more. From 40 passes on all of them may
fail; an even spread is then best."""
_TOLERANCE = 1e-6
"""Relative slack of a level, because sums of work are rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """Work of a row by its length, in units of the matrix products of one token."""

    attention_len: float = math.inf
    """Length at which a row's attention costs as much as all its matrix products; infinite: attention is free."""

    def __call__(self, num_tokens: int) -> float:
        """Return the work of one row."""
        return num_tokens + num_tokens**2 / self.attention_len

    @classmethod
    def of(cls, *, product_flops: float, attention_width: int, recomputes: bool) -> RowWork:
        """Return the work from the FLOPs of a token's matrix products in an update, and the width of all query heads.

        With `recomputes` layers run forward twice (activation checkpointing).
        """
        # Causal attention of n tokens looks at n^2 / 2 pairs, and a product costs 2 FLOPs per channel and pair. There
        # are two products forward; five backward, because FlashAttention computes the scores again. So attention takes
        # num_products * width * n^2 FLOPs; divided by product_flops, that is n^2 / attention_len.
        num_products = 2 + 5 + (2 if recomputes else 0)
        return cls(attention_len=product_flops / (num_products * attention_width))


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Rows that stay together: one row, or several with a shared prompt."""

    num_tokens: int
    work: float


Bin = list[int]
"""Indices of the items of one micro-batch; an empty one is a rank without rows in a pass."""
Plan = list[list[Bin]]
"""Micro-batches of an update by pass and rank: `plan[i][rank]`."""


def distribute(items: Sequence[Item], *, capacity: int, num_ranks: int) -> Plan:
    """Return a plan in which every micro-batch has at most `capacity` tokens, or one longer item.

    One rank gets the fewest micro-batches that best fit finds. Several ranks get the fastest of a few plans; none is
    slower than best fit with the best order of its micro-batches.
    """
    fitted = best_fit([item.num_tokens for item in items], capacity)
    if num_ranks == 1:
        # Any order gives the same gradient up to rounding; a fixed one, so that a run can be repeated bit for bit.
        fitted.sort(key=lambda b: -_tokens_of(b, items))
        return [[b] for b in fitted]
    fewest = _fewest_passes(items, capacity, num_ranks)
    # More passes than needed leave room to even out the work. Two that succeed are enough: a third is hardly faster.
    counts = range(fewest, fewest + _EXTRA_PASSES + 1)
    levelled = (_by_levels(items, capacity, num_ranks, num_passes) for num_passes in counts)
    found = list(islice((bins for bins in levelled if bins is not None), 2))
    candidates = [fitted, _evenly(items, capacity, num_ranks, fewest), *found]
    plans = [_align(bins, items, num_ranks) for bins in candidates]
    # Of equal plans min() takes the first, which is the same on all ranks.
    return min(plans, key=lambda plan: lockstep_work(plan, items) + _PASS_TOKENS * len(plan))


def lockstep_work(plan: Plan, items: Sequence[Item]) -> float:
    """Return the work done one after the other: the sum over passes of the heaviest micro-batch."""
    total = 0.0
    for bins in plan:
        total += max(_work_of(b, items) for b in bins)
    return total


def busy_share(plan: Plan, items: Sequence[Item], num_ranks: int) -> float:
    """Return the mean share of an update in which a rank computes; the rest it waits for others."""
    total = sum(item.work for item in items)
    return total / (num_ranks * lockstep_work(plan, items)) if plan else 1.0


def busy_bound(items: Sequence[Item], *, capacity: int, num_ranks: int) -> float:
    """Return an upper bound on the busy share of any plan.

    Proof: some pass has the heaviest item, of work h, and so lasts M >= h. All ranks together do at most R * M in it,
    and at most D, the work of the densest R * capacity tokens there are. The other passes last at least the mean of
    what is left. The sum M + (total - min(D, R * M)) / R is smallest for M = h.
    """
    work = [item.work for item in items]
    total, heaviest = sum(work), max(work)
    longest = max(item.num_tokens for item in items)  # may be above the capacity, in a micro-batch of its own
    # D of the proof: fill the room of a pass with the items that have the most work per token.
    room, densest = num_ranks * max(capacity, longest), 0.0
    for item in sorted(items, key=lambda item: -item.work / item.num_tokens):
        taken = min(item.num_tokens, room)
        densest += item.work * taken / item.num_tokens
        room -= taken
    least = heaviest + (total - min(densest, num_ranks * heaviest)) / num_ranks
    # Rounding may put `least` below the mean work of a rank, and the share above 1.
    return total / (num_ranks * max(least, total / num_ranks))


def best_fit(lengths: Sequence[int], capacity: int) -> list[Bin]:
    """Put items into bins, longest first, each into the fullest bin with room; return the items of each bin.

    Ties go to the earlier item and bin, so that every rank finds the same bins.
    """
    bins: list[Bin] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [b for b in range(len(bins)) if room[b] >= lengths[item]]
        if fitting:
            best = min(fitting, key=lambda b: (room[b], b))
            bins[best].append(item)
            room[best] -= lengths[item]
        else:
            bins.append([item])
            room.append(capacity - lengths[item])
    return bins


def _tokens_of(chosen: Bin, items: Sequence[Item]) -> int:
    return sum(items[i].num_tokens for i in chosen)


def _work_of(chosen: Bin, items: Sequence[Item]) -> float:
    return sum(items[i].work for i in chosen)


def _align(bins: Sequence[Bin], items: Sequence[Item], num_ranks: int) -> Plan:
    """Put micro-batches of similar work into the same pass: for given bins no other order is faster."""
    ordered = sorted(bins, key=lambda b: (-_work_of(b, items), b))  # ties by content, alike on all ranks
    plan = []
    for first in range(0, len(ordered), num_ranks):
        bins_of_pass = ordered[first : first + num_ranks]
        idle: list[Bin] = [[] for _ in range(num_ranks - len(bins_of_pass))]
        plan.append(bins_of_pass + idle)
    return plan


def _fewest_passes(items: Sequence[Item], capacity: int, num_ranks: int) -> int:
    """Return a lower bound on the number of passes of any plan."""
    filled = sum(_room_for(item, capacity) for item in items)
    num_alone = sum(1 for item in items if 2 * item.num_tokens > capacity)  # no two of these share a micro-batch
    return max(1, math.ceil(filled / (capacity * num_ranks)), math.ceil(num_alone / num_ranks))


def _room_for(item: Item, capacity: int) -> int:
    # An item longer than a micro-batch is put into an empty one, which it fills.
    return min(item.num_tokens, capacity)


def _by_levels(items: Sequence[Item], capacity: int, num_ranks: int, num_passes: int) -> list[Bin] | None:
    """Fill pass after pass with the heaviest items left, up to a level that its micro-batches share.

    The level is the heaviest item left, which must go somewhere, or the mean of what is left if that is more. The last
    pass takes what is left; the result is None if that has no room.
    """
    left = sorted(range(len(items)), key=lambda i: (-items[i].work, i))
    work_left = sum(item.work for item in items)
    bins: list[Bin] = []
    for passes_left in range(num_passes, 1, -1):
        if not left:
            return bins
        heaviest, mean = items[left[0]].work, work_left / (num_ranks * passes_left)
        pass_ = _Pass(num_ranks, capacity)
        level = (1 + _TOLERANCE) * max(heaviest, mean)
        # In order of work, so that lighter items fill what the heavier ones leave below the level.
        left = [i for i in left if not pass_.add_below(level, i, items[i])]
        work_left -= pass_.work
        bins += pass_.bins
    last = _Pass(num_ranks, capacity)
    if not all(last.add_to_lightest(i, items[i]) for i in left):
        return None
    return [b for b in bins + last.bins if b]


def _evenly(items: Sequence[Item], capacity: int, num_ranks: int, fewest: int) -> list[Bin]:
    """Put the heaviest items first, each into the lightest micro-batch of all passes; as few passes as have room."""
    heaviest_first = sorted(range(len(items)), key=lambda i: (-items[i].work, i))
    for num_passes in range(fewest, len(items) + 1):
        all_passes = _Pass(num_ranks * num_passes, capacity)
        if all(all_passes.add_to_lightest(i, items[i]) for i in heaviest_first):
            return [b for b in all_passes.bins if b]
    return []  # there are no items: a micro-batch for each always has room


class _Pass:
    """The micro-batches of one pass while they are filled."""

    def __init__(self, num_ranks: int, capacity: int) -> None:
        self.bins: list[Bin] = [[] for _ in range(num_ranks)]
        self.work = 0.0
        self._capacity = capacity
        self._room = [capacity] * num_ranks
        self._by_work = [(0.0, b) for b in range(num_ranks)]
        """Work and index of each bin, lightest first."""

    def add_below(self, level: float, index: int, item: Item) -> bool:
        """Add an item to the heaviest bin with room that stays below the level; return whether there is one."""
        most, room = level - item.work, _room_for(item, self._capacity)
        # Most items are refused once a pass is full, so the two cheap tests come before the search.
        if self._by_work[0][0] > most or max(self._room) < room:
            return False
        # (most, len(bins)) sorts behind every bin of work `most`, so the bins before `above` stay below the level. The
        # heaviest of them is tried first: best fit by work, as `best_fit` is by tokens.
        above = bisect_right(self._by_work, (most, len(self.bins)))
        for at in range(above - 1, -1, -1):
            if self._room[self._by_work[at][1]] >= room:
                self._add(at, index, item)
                return True
        return False

    def add_to_lightest(self, index: int, item: Item) -> bool:
        """Add an item to the lightest bin with room; return whether there is one."""
        room = _room_for(item, self._capacity)
        for at, (_, b) in enumerate(self._by_work):
            if self._room[b] >= room:
                self._add(at, index, item)
                return True
        return False

    def _add(self, at: int, index: int, item: Item) -> None:
        load, b = self._by_work.pop(at)
        insort(self._by_work, (load + item.work, b))
        self._room[b] -= _room_for(item, self._capacity)
        self.bins[b].append(index)
        self.work += item.work
