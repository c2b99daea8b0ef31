"""Share what the driver needs for both kinds of actors: calls with a timeout, a limit on restarts, stored weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from klear_core.cluster.actors import Arrays, to_tensors
from klear_core.errors import KlearError, TrainingError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")
RemoteCall = Callable[[Any], Awaitable[Any]]
"""Function of an actor's handle that starts a call, such as `lambda actor: actor.sleep.remote()`."""

LOST = (RayActorError, OutOfMemoryError)
"""Errors of a call whose actor is gone. OutOfMemoryError, no RayActorError, means Ray killed it to free memory."""
START_S = 300.0  # least timeout for starting a process and loading a model, even if `stall_timeout_s` is shorter


class StoredWeights(Mapping[str, "Tensor"]):
    """Weights in Ray's object store, in parts, fetched only if this process reads them."""

    def __init__(self, parts: Sequence[ray.ObjectRef]) -> None:
        self.parts = parts

    def __getitem__(self, name: str) -> Tensor:
        return to_tensors({name: self._arrays()[name]})[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays())

    def __len__(self) -> int:
        return len(self._arrays())

    def _arrays(self) -> Arrays:
        found: list[Arrays] = ray.get(list(self.parts))
        return {name: array for part in found for name, array in part.items()}


class Restarts:
    """Count lost actors against the number of allowed restarts."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.used = 0

    def count(self, who: str, error: BaseException) -> None:
        """Count one more lost actor. Raise TrainingError if that exceeds the limit."""
        self.used += 1
        lost = f"{who} was lost ({error})" if isinstance(error, KlearError) else f"{who} was lost"
        if self.used > self.allowed:
            raise TrainingError(f"{lost}; runtime.max_restarts = {self.allowed} allows no more") from error
        log.warning("%s (%s); starting another", lost, type(error).__name__)


async def within(awaitable: Awaitable[T], timeout_s: float, who: str, what: str) -> T:
    """Return a remote call's result or raise its original error; on a timeout TrainingError names `who` and `what`."""
    try:
        return await asyncio.wait_for(awaited(awaitable), timeout_s)
    except RayTaskError as e:
        raise cause_of(e) from e
    except TimeoutError:
        raise TrainingError(f"stalled: waited {timeout_s:g} s for {who} to {what}") from None


def cause_of(error: BaseException) -> BaseException:
    """Return the error raised in the actor, without Ray's wrapper."""
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error


def rollout_name(index: int) -> str:
    """Return a rollout actor's name for messages."""
    return f"rollout actor {index}"


async def awaited(awaitable: Awaitable[T]) -> T:
    """Return the result of any awaitable as a coroutine's: asyncio makes tasks of coroutines only."""
    return await awaitable
