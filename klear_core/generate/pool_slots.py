"""Define the engines of a pool and the requests that each of them has."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from klear_core.errors import ResourceError
from klear_core.generate.engine import SamplingParams
from klear_core.types import Completion


class EngineLost(ResourceError):  # noqa: N818  # it is an event to recover from before it is an error
    """An engine died. Its requests can be asked again elsewhere."""


class PooledEngine(Protocol):
    """One engine of a pool."""

    name: str
    """Name for messages: `engine 3`."""

    @property
    def limit(self) -> int:
        """Return the number of requests to send it at a time; it may change."""
        ...

    @property
    def is_queued(self) -> bool:
        """Return whether its start waits for GPUs that other work holds."""
        ...

    async def start(self) -> None:
        """Start the engine, or another in place of one that died or was closed.

        Raise EngineLost if it dies meanwhile.
        """
        ...

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Sample; see `InferenceEngine.generate`. A ResourceError says that the engine can do nothing more."""
        ...

    async def close(self) -> None:
        """Stop the engine."""
        ...


# eq=False: requests and slots are compared and hashed by identity; equal requests may be open at once.
@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """A request to a pool."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    answer: asyncio.Future[list[Completion]]
    asking: asyncio.Task[None] | None = None
    lost_on: list[Slot] = field(default_factory=list)
    """Engines that died while they had this request; one that died twice is in it twice."""


@dataclass(eq=False, slots=True, kw_only=True)
class Slot:
    """The place of an engine in a pool."""

    engine: PooledEngine
    running: dict[Request, None] = field(default_factory=dict)
    """Requests that the engine has, in the order in which they were sent."""
    is_up: bool = False
    starting: asyncio.Task[None] | None = None
    closing: asyncio.Task[None] | None = None
    """The last task that closed the engine; another start waits for it."""
    num_in_vain: int = 0
    """Starts since the last answer."""

    @property
    def is_away(self) -> bool:
        """Return whether the engine neither runs nor starts."""
        return not self.is_up and self.starting is None

    @property
    def comes_soon(self) -> bool:
        """Return whether the engine is up or will be, without a wait for GPUs of others."""
        return self.is_up or (self.starting is not None and not self.engine.is_queued)

    @property
    def load(self) -> float:
        """Return the share of the engine's limit in use; infinite if it does not run."""
        # Above 1 if the limit, which may change, has fallen below the requests that it has.
        return len(self.running) / max(1, self.engine.limit) if self.is_up else math.inf

    def begin_close(self) -> None:
        """Close the engine, or end its start."""
        # `_close_after` waits for both, because a start and a close of one engine must not overlap.
        before = [task for task in (self.starting, self.closing) if task is not None]
        if self.starting is not None:
            self.starting.cancel()
        self.starting, self.is_up = None, False
        self.closing = asyncio.create_task(_close_after(before, self.engine))


def least_busy(slots: Sequence[Slot]) -> Slot | None:
    """Return the engine with the smallest share of its limit in use, the first of equals; None if none has room."""
    best: Slot | None = None
    best_load = 1.0  # at this load an engine is full
    for slot in slots:
        load = slot.load
        if load < best_load:
            best, best_load = slot, load
    return best


def poison_error(request: Request, name: str, error: BaseException) -> ResourceError:
    """Return the error of a request whose engines keep dying."""
    failure = ResourceError(
        f"the request with seed {request.params.seed} and a prompt of {len(request.prompt_ids)} tokens is given up: "
        f"{len(request.lost_on)} engines died while they had it; the last was {name}: {error}"
    )
    failure.__cause__ = error
    return failure


async def _close_after(tasks: Sequence[asyncio.Task[None]], engine: PooledEngine) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)  # a start that was cancelled raises
    await engine.close()
