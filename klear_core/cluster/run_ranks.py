"""Run a function on all learner ranks as Ray actors: the `RunRanks` of SFT and of `klear rl replay`."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from klear_core.cluster.calls import Restarts
from klear_core.cluster.gang import Gang, RanksLost
from klear_core.cluster.nodes import ray_nodes
from klear_core.cluster.placement import cpu_refusal, is_too_large_for_cpu
from klear_core.cluster.rank_actor import RankActor
from klear_core.config.train import TrainRuntime
from klear_core.errors import ResourceError
from klear_core.metrics import Telemetry
from klear_core.train.ranks import Body

R = TypeVar("R")


def check_device(runtime: TrainRuntime, num_params: int) -> None:
    """Raise ResourceError if `device = "auto"` would train a model on CPUs that is too large for them."""
    if runtime.device == "auto" and gpus_per_rank(runtime) == 0 and is_too_large_for_cpu(num_params):
        raise ResourceError(cpu_refusal("runtime", num_params))


def gpus_per_rank(runtime: TrainRuntime) -> float:
    """Return 1 if the ranks run on GPUs: if that is set, or the cluster has any and `device` leaves the choice."""
    has_gpus = any(node.num_gpus for node in ray_nodes())
    return float(runtime.device == "cuda" or (runtime.device == "auto" and has_gpus))


def run_on_ray(body: Body[R], runtime: TrainRuntime, telemetry: Telemetry) -> R:
    """Run `body` on all ranks, and again on new ones if some die; see `RunRanks`."""
    value: R = asyncio.run(_run(body, runtime, telemetry))
    return value


async def _run(body: Body[Any], runtime: TrainRuntime, telemetry: Telemetry) -> Any:
    restarts = Restarts(runtime.max_restarts)
    gang = Gang(RankActor, runtime, gpus_per_rank=gpus_per_rank(runtime), telemetry=telemetry)
    try:
        while True:
            try:
                await gang.start()
                runs = [rank.run.remote(body) for rank in gang.ranks]
                results = await gang.wait(runs, "train", stall_timeout_s=runtime.stall_timeout_s)
            except RanksLost as lost:
                restarts.count("the learner", lost)
                gang.kill()
            else:
                return results[0]  # the other ranks return None
    finally:
        gang.close()
