"""Assign slots of the shared KV cache to prefixes, and count their readers."""

from __future__ import annotations


class PrefixSlots:
    """Maps a prefix's token ids to the slot with its keys and values, with a count of the rows that read it."""

    def __init__(self) -> None:
        self.num_slots = 0
        """Number of slots that exist: the most that were ever in use at once."""
        self._held: dict[tuple[int, ...], int] = {}
        self._num_readers: dict[tuple[int, ...], int] = {}
        self._free: list[int] = []

    def __contains__(self, ids: tuple[int, ...]) -> bool:
        return ids in self._held

    def acquire(self, ids: tuple[int, ...]) -> int:
        """Return the slot of these tokens and add a reader. If no slot holds them, return a free one, to be filled."""
        if ids not in self._held:
            # one row more in the shared cache, for which the caller makes room
            if not self._free:
                self._free.append(self.num_slots)
                self.num_slots += 1
            self._held[ids], self._num_readers[ids] = self._free.pop(), 0
        self._num_readers[ids] += 1
        return self._held[ids]

    def release(self, ids: tuple[int, ...]) -> None:
        """Remove a reader; the last one frees the slot."""
        self._num_readers[ids] -= 1
        if not self._num_readers[ids]:
            del self._num_readers[ids]
            self._free.append(self._held.pop(ids))
