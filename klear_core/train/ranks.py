"""Define how a stage runs its learner ranks, and run a single rank in this process.

Several ranks, and ranks on GPUs, are Ray actors (`klear_core.cluster.gang`), which the stage's task passes in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from klear_core.config.train import TrainRuntime
from klear_core.errors import ResourceError
from klear_core.metrics import Telemetry
from klear_core.train.world import World, join_world

R = TypeVar("R")
Body = Callable[[World, Telemetry], R]
"""The work of one rank; all ranks make the same collective calls in the same order."""


class RunRanks(Protocol):
    """Run `body` on every rank and return rank 0's result; its telemetry and log records come to this process.

    `body` and its result must be picklable, and `body` must go on from its own checkpoint: it runs again if a rank
    dies.
    """

    def __call__(self, body: Body[R], runtime: TrainRuntime, telemetry: Telemetry) -> R:
        """Raise a rank's exception as it is, TrainingError if ranks die more often than `runtime.max_restarts`."""
        ...


def run_here(body: Body[R], runtime: TrainRuntime, telemetry: Telemetry) -> R:
    """Run the only rank in this process; see `RunRanks`. Raise ResourceError if there are several."""
    if runtime.num_workers > 1:
        raise ResourceError(f"runtime.num_workers = {runtime.num_workers}: several learner ranks run on Ray only")
    with join_world(runtime, rank=0, init_method="") as world:  # one rank meets no other, so it needs no address
        return body(world, telemetry)
