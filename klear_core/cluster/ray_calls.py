"""Call Ray actors with a timeout, limit their restarts, and reserve their places as placement groups."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from klear_core import stopping
from klear_core.cluster.nodes import ray_nodes, when_there
from klear_core.cluster.placement import Node, Place, Placement
from klear_core.cluster.rank_actors import Arrays, to_tensors
from klear_core.errors import KlearError, ResourceError, TrainingError
from klear_core.waits import waiting

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")
RemoteCall = Callable[[Any], Awaitable[Any]]
"""Function of an actor's handle that starts a call, such as `lambda actor: actor.sleep.remote()`."""

LOST = (RayActorError, OutOfMemoryError)
"""Errors of a call whose actor is gone. OutOfMemoryError, no RayActorError, means Ray killed it to free memory."""
_DEAD_NODE = re.compile(r"node has died\. Node Id: (\w+)")
_LOOK_S = 1.0  # between two looks whether a node is alive
_KNOWN_S = 120.0
"""Longest wait for Ray to find out why an actor is unavailable: it takes a node for dead after five failed checks of up
to 10 s, with 3 s between them (`health_check_failure_threshold`, `_timeout_ms`, `_period_ms`)."""
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
    """Count what cost a run some of its actors against the number of allowed restarts: a dead actor, or a dead node."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.used = 0
        self._lost_nodes: set[str] = set()
        """Ids of the dead nodes that were counted; all of a node's actors die with it."""

    def count(self, who: str, error: BaseException, nodes: frozenset[str] = frozenset()) -> None:
        """Count one more lost actor, unless the death of its node was counted. Raise TrainingError above the limit.

        `nodes` are those whose death cost the actor, if that is known and not in the error. Raise StoppedEarly if the
        stage is to stop.
        """
        if stopping.is_asked():
            raise stopping.StoppedEarly(f"{who} was lost") from error
        nodes |= dead_nodes(error)
        is_new = not nodes or not nodes <= self._lost_nodes
        self._lost_nodes |= nodes
        self.used += is_new
        lost = f"{who} was lost ({error})" if isinstance(error, KlearError) else f"{who} was lost"
        if is_new and self.used > self.allowed:
            raise TrainingError(f"{lost}; runtime.max_restarts = {self.allowed} allows no more") from error
        log.warning("%s (%s); starting another", lost, type(error).__name__)


async def within(awaitable: Awaitable[T], timeout_s: float, who: str, what: str) -> T:
    """Return a remote call's result or raise its original error; on a timeout TrainingError names `who` and `what`."""
    try:
        with waiting(who, what):
            return await asyncio.wait_for(awaited(awaitable), timeout_s)
    except RayTaskError as e:
        raise cause_of(e) from e
    except TimeoutError:
        raise TrainingError(f"stalled: waited {timeout_s:g} s for {who} to {what}") from None


async def lost_nodes(nodes: Collection[str]) -> frozenset[str]:
    """Return which of these nodes have died, once every other one has run a task: Ray takes seconds to find out."""
    answers = await asyncio.gather(*map(_answers, nodes))
    return frozenset(node_id for node_id, has_answered in zip(nodes, answers, strict=True) if not has_answered)


async def final_error(actor: Any, error: BaseException) -> BaseException:
    """Return why a call of this actor failed, once Ray knows: only then does the error name a node that died.

    Before, all actors of a node are `temporarily unavailable`, and another in their place may start on that node. An
    actor that neither answers nor is found dead keeps the error that it had.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KNOWN_S):
            while isinstance(error, ActorUnavailableError):
                try:
                    await awaited(actor.__ray_ready__.remote())
                except LOST as later:
                    error = later
                else:
                    break  # it is there again, but what it was doing is lost
                await asyncio.sleep(_LOOK_S)
    return error


async def _answers(node_id: str) -> bool:
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    while True:
        asked = ray.remote(_pass).options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote()
        answer = asyncio.ensure_future(awaited(asked))
        while not answer.done():
            if not any(node.node_id == node_id for node in ray_nodes()):
                answer.cancel()
                return False
            await asyncio.wait([answer], timeout=_LOOK_S)
        if answer.exception() is None:
            return True
        await asyncio.sleep(_LOOK_S)  # it failed before Ray knew that the node is dead


def _pass() -> None:
    """Do nothing, on the node that is asked."""


def dead_nodes(error: BaseException | None) -> set[str]:
    """Return the ids of the nodes whose death this error, or one that it was raised from, reports."""
    found: set[str] = set()
    while error is not None:
        found |= set(_DEAD_NODE.findall(" ".join(str(error).split())))
        error = error.__cause__
    return found


def cause_of(error: BaseException) -> BaseException:
    """Return the error raised in the actor, without Ray's wrapper."""
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error


async def awaited(awaitable: Awaitable[T]) -> T:
    """Return the result of any awaitable as a coroutine's: asyncio makes tasks of coroutines only."""
    return await awaitable


# ---- reservation ----
# Reserve the places of learner ranks as Ray placement groups, and say where RL's engines go.


_NODES_S = 2.0  # seconds between two checks that the planned nodes are alive
_NODE_LABEL = "ray.io/node-id"

Plan = Callable[[Sequence[Node]], Placement]
"""Returns the places of all ranks and engines on these nodes."""


class Reservation:
    """The placement groups of all ranks, one for each context-parallel group of `width` ranks."""

    def __init__(self, plan: Plan, *, width: int, threads_per_rank: int, wait_s: float = 0.0) -> None:
        """Reserve nothing yet. `plan` chooses the places; a rank without a GPU reserves `threads_per_rank` CPUs.

        `wait_s` is the longest wait for nodes that are missing.
        """
        self.placement = Placement(ranks=())
        """Places of ranks and engines; empty before `hold`."""
        self._plan = plan
        self._width = width
        self._threads_per_rank = threads_per_rank
        self._wait_s = wait_s
        self._groups: list[PlacementGroup] = []
        self._lock = asyncio.Lock()
        """Held while places are reserved: ranks and engines that restart at once must not replace each other's."""

    async def hold(self) -> None:
        """Reserve the places of all ranks. Raise ResourceError if the cluster has no room.

        Those of an earlier call are kept, unless one of their nodes has died, which Ray notices only after some
        seconds.
        """
        async with self._lock:
            deadline = time.monotonic() + START_S
            while not (self._groups and await self._are_ready(deadline)):
                # First, because the new groups would wait for what these hold on nodes that live.
                self.release()
                plan = partial(when_there, lambda: self._plan(ray_nodes()), wait_s=self._wait_s)
                self.placement = await asyncio.to_thread(plan)
                self._reserve(self.placement.ranks)
                # Again: a node may have been missing for longer than reserved places take to become free.
                deadline = time.monotonic() + START_S

    def _reserve(self, places: Sequence[Place]) -> None:
        for first in range(0, len(places), self._width):
            own = places[first : first + self._width]
            # The label pins the group to the node that was planned for it.
            on_node = [{_NODE_LABEL: place.node.node_id} for place in own]
            bundles = [self._bundle(place) for place in own]
            self._groups.append(placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=on_node))

    def bundle_of(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """Return the strategy that puts an actor into a rank's bundle."""
        group, index = divmod(rank, self._width)
        return PlacementGroupSchedulingStrategy(self._groups[group], placement_group_bundle_index=index)

    async def engine_options(self, index: int) -> dict[str, Any]:
        """Return where Ray shall start an engine: on its rank's GPU if it shares one, else on its node or a free one.

        The places must be held. If a node has died, an engine that shares a GPU moves with the ranks.
        """
        if not self.placement.engines:
            return {}
        if self._rank_beside(index) is not None:
            await self.hold()
        rank = self._rank_beside(index)  # again, because `hold` may have made a new plan
        if rank is not None:
            return {"scheduling_strategy": self.bundle_of(rank)}
        # Soft: if the node has died, any other with enough free GPUs will do.
        node_id = self.placement.engines[index].node.node_id
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True)}

    def _rank_beside(self, index: int) -> int | None:
        """Return the rank whose GPU an engine shares; None if the engine has GPUs of its own."""
        place = self.placement.engines[index]
        for rank, own in enumerate(self.placement.ranks):
            if own.node == place.node and set(place.gpus) & set(own.gpus):
                return rank
        return None

    def release(self) -> None:
        """Return all places to the cluster."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []

    async def _are_ready(self, deadline: float) -> bool:
        """Wait until all places are reserved; return False if a node of theirs has died."""
        ranks = self.placement.ranks
        planned = {place.node.node_id for place in ranks}
        waiting = list(self._groups)
        while time.monotonic() < deadline:
            if not planned <= {node.node_id for node in ray_nodes()}:
                return False
            # In a thread, because it blocks; `ready()` would start a process for each group.
            if await asyncio.to_thread(waiting[-1].wait, _NODES_S):
                waiting.pop()
            if not waiting:
                return True
        free = {name: number for name, number in ray.available_resources().items() if name in ("CPU", "GPU")}
        raise ResourceError(
            f"the learner waited {START_S:g} s for {len(ranks)} x {self._bundle(ranks[0])} of the Ray cluster, which "
            f"has {free} free: other work holds the rest"
        )

    def _bundle(self, place: Place) -> dict[str, float]:
        """Return the Ray resources of one rank: whole GPUs, or the CPUs of its threads."""
        # Whole, even if the rank takes a share: engines beside it use the rest (see `engine_options`).
        return {"GPU": float(len(place.gpus))} if place.gpus else {"CPU": float(self._threads_per_rank)}
