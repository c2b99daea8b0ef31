"""Judge many answers at a time and return their verdicts in the order of the answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from klear_core.types import Verdict
from klear_core.verify.health import JudgeHealth

_IN_FLIGHT = 512
"""Answers submitted at a time: bounds how many responses are in memory."""
_IN_FLIGHT_CHARS = 64 << 20
"""Characters of responses and tests submitted at a time: tests of one problem may have hundreds of kilobytes."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted(Generic[T]):
    """An answer whose judging has begun."""

    answer: T
    verdict: Future[Verdict]
    num_chars: int
    """Characters of its response and tests that are in memory until it is judged."""


def verdicts_in_order(submitted: Iterable[Submitted[T]], health: JudgeHealth) -> Iterator[tuple[T, Verdict]]:
    """Yield every answer with its verdict, in order, and count the verdict in `health`.

    Memory stays bounded if `submitted` is a generator that submits an answer when it is asked for the next one.
    """
    waiting: deque[Submitted[T]] = deque()
    chars_in_flight = 0
    for item in submitted:
        waiting.append(item)
        chars_in_flight += item.num_chars
        # Take from the front only, so that the order is kept.
        # Limits make the loop wait for the oldest answer; one that is judged already is passed on without a wait.
        while waiting and (
            len(waiting) >= _IN_FLIGHT or chars_in_flight > _IN_FLIGHT_CHARS or waiting[0].verdict.done()
        ):
            oldest = waiting.popleft()
            chars_in_flight -= oldest.num_chars
            yield _counted(oldest, health)
    while waiting:
        yield _counted(waiting.popleft(), health)


def _counted(item: Submitted[T], health: JudgeHealth) -> tuple[T, Verdict]:
    verdict = item.verdict.result()
    health.record(verdict)
    return item.answer, verdict
