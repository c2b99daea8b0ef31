"""Admit requests to an engine so that none is left over for long when all others are done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class LongestFirst:
    """Limit the open requests. At the end of the queue, requests with the longest expected answers go first.

    Answers to one key (a problem) have similar lengths, so the first answer to each key predicts the others. Until the
    last request has come, requests go in order: reordered earlier, a few short answers would keep their shards open.
    """

    def __init__(self, limit: int, *, num_requests: int) -> None:
        """`num_requests` will come in all."""
        self._room = limit
        self._num_to_come = num_requests
        self._waiting: dict[asyncio.Future[None], Hashable] = {}
        """Requests in the order in which they came, with their keys."""
        self._asked: set[Hashable] = set()
        self._lengths: dict[Hashable, tuple[int, int]] = {}
        """Number of answers and of their tokens, by key."""
        self._num_answers = self._num_tokens = 0

    @asynccontextmanager
    async def slot(self, key: Hashable) -> AsyncIterator[None]:
        """Wait for room, and hold it during the block."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = key
        self._num_to_come -= 1
        self._admit()
        try:
            await turn
            yield
        finally:
            # A turn that waits no longer was admitted, and its room is free now.
            if self._waiting.pop(turn, None) is None:
                self._room += 1
            self._admit()

    def record(self, key: Hashable, num_tokens: int) -> None:
        """Note the length of an answer."""
        num_answers, total = self._lengths.get(key, (0, 0))
        self._lengths[key] = (num_answers + 1, total + num_tokens)
        self._num_answers += 1
        self._num_tokens += num_tokens

    def _admit(self) -> None:
        while self._room > 0 and self._waiting:
            turn = self._next()
            self._asked.add(self._waiting.pop(turn))
            self._room -= 1
            if turn.cancelled():  # its caller has yet to learn that, and to give the room back
                continue
            turn.set_result(None)

    def _next(self) -> asyncio.Future[None]:
        if self._num_to_come > 0:
            return next(iter(self._waiting))
        # Once for each key, not for each of its requests.
        expected = {key: self._expected(key) for key in set(self._waiting.values())}
        return max(self._waiting, key=lambda turn: expected[self._waiting[turn]])  # the first of equals

    def _expected(self, key: Hashable) -> float:
        """Return the expected length of an answer; a key that was never asked goes before all others."""
        if key not in self._asked:
            return float("inf")
        # Before the first answer to a key has come, the average of all other keys is expected.
        num_answers, num_tokens = self._lengths.get(key, (self._num_answers, self._num_tokens))
        return num_tokens / max(1, num_answers)
