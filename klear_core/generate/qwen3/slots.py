"""Who reads which slot of the cache that rows share."""

from __future__ import annotations


class PrefixSlots:
    """Which slot holds the keys and values of which tokens, and how many rows read it."""

    def __init__(self) -> None:
        self.num_slots = 0
        """As many as were ever held at once."""
        self._held: dict[tuple[int, ...], int] = {}
        self._num_readers: dict[tuple[int, ...], int] = {}
        self._free: list[int] = []

    def __contains__(self, ids: tuple[int, ...]) -> bool:
        return ids in self._held

    def take(self, ids: tuple[int, ...]) -> int:
        """The slot of these tokens, for one more reader. If none holds them yet, it is a free one, which the caller fills."""
        if ids not in self._held:
            if not self._free:
                self._free.append(self.num_slots)
                self.num_slots += 1
            self._held[ids], self._num_readers[ids] = self._free.pop(), 0
        self._num_readers[ids] += 1
        return self._held[ids]

    def release(self, ids: tuple[int, ...]) -> None:
        """One reader less; with the last, the slot becomes free."""
        self._num_readers[ids] -= 1
        if not self._num_readers[ids]:
            del self._num_readers[ids]
            self._free.append(self._held.pop(ids))
