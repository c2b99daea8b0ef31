"""Run Ray for one stage: start or join a cluster, silence its output, limit its memory, and shut it down afterwards."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from klear_core.artifacts.home import share_given
from klear_core.cluster.nodes import joins_a_cluster, require_listener
from klear_core.config.rl import RlConfig
from klear_core.config.train import TrainRuntime
from klear_core.errors import ResourceError
from klear_core.hf_config import read_hf_config
from tasks.ray_messages import ray_messages_logged
from tasks.reaper import no_orphans

if TYPE_CHECKING:
    from collections.abc import Callable

    from klear_core.train.ranks import RunRanks

log = logging.getLogger(__name__)

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # otherwise every process prints a warning
}
LOCAL_SETTINGS = {  # of a Ray cluster that is started here
    "RAY_AUTH_MODE": "disabled",  # without it Ray warns; our own cluster listens on this machine only
    "RAY_worker_niceness": "0",  # with Ray's default of 15, two other busy processes almost stop RL
    # Ray's record of tasks is for its dashboard, which does not run. A worker cancels a run by signalling all of its
    # processes, and Ray would wait 5 s to send the last of the record to a process that has ended.
    "RAY_task_events_report_interval_ms": "0",
}
_STORE_FLOOR_BYTES = 128 << 20  # rollouts and Ray's own objects; Ray's minimum is 75 MB
# Two versions of the weights (in use and in transfer), in float32 where the file has bfloat16 (times two), and slack.
_COPIES_OF_WEIGHTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Ray resources of a stage."""

    num_cpus: int
    object_store_bytes: int


def needs_of(cfg: RlConfig, model: Path) -> Needs:
    """Return an RL stage's resources: one CPU per thread, room for copies of the weights. `plan_gpus` assigns GPUs."""
    runtime = cfg.runtime
    from klear_core.train.base import model_folder

    weights = sum(f.stat().st_size for f in model_folder(model).glob("*.safetensors"))
    wanted = _STORE_FLOOR_BYTES + _COPIES_OF_WEIGHTS * weights
    return Needs(
        num_cpus=runtime.num_workers * runtime.num_threads + runtime.num_rollout_actors * runtime.rollout_threads,
        # Ray takes this memory from the machine's, of which learner and engines need the rest.
        object_store_bytes=min(wanted, psutil.virtual_memory().total // 2),
    )


@contextmanager
def learner_ranks(runtime: TrainRuntime, model: Path) -> Iterator[RunRanks]:
    """Yield the function that runs a stage's learner ranks: on Ray, except a single rank on CPU, in this process.

    Raise ResourceError if `device = "auto"` would put a model that is too large for it on a CPU.
    """
    from klear_core.train.ranks import run_here

    if _is_one_on_this_cpu(runtime):
        yield run_here
        return
    with ray_session(Needs(num_cpus=runtime.num_workers * runtime.num_threads, object_store_bytes=_STORE_FLOOR_BYTES)):
        from klear_core.cluster.run_ranks import check_device, run_on_ray
        from klear_core.train.base import model_folder

        check_device(runtime, read_hf_config(model_folder(model)).num_params)
        share_model(model)
        yield run_on_ray


def share_model(model: Path) -> None:
    """Send a model that was given by its folder to the shared store, if other nodes may need it."""
    if joins_a_cluster():
        share_given(model)


def _is_one_on_this_cpu(runtime: TrainRuntime) -> bool:
    from klear_core.train.model import pick_device

    if runtime.num_workers > 1 or runtime.device == "cuda":
        return False
    # A driver without a GPU may be connected to a cluster that has some.
    return runtime.device == "cpu" or (not joins_a_cluster() and pick_device("auto").type == "cpu")


@contextmanager
def ray_session(needs: Needs) -> Iterator[None]:
    """Connect to the cluster at RAY_ADDRESS, which stays up, or start one that ends with the block.

    A cluster started here also ends if this process is killed. ResourceError if Ray cannot start or has too few CPUs.
    """
    os.environ.update({k: v for k, v in _QUIET.items() if k not in os.environ})
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        os.environ.update({k: v for k, v in LOCAL_SETTINGS.items() if k not in os.environ})
    import ray

    where = f"the Ray cluster at {address}" if address else "this machine"
    with no_orphans(), ray_messages_logged():
        try:
            with _kept_signal_handlers():
                _init(address, needs)
            _check_cpus(ray.cluster_resources(), needs, where=where)
            yield
        finally:
            ray.shutdown()


def _init(address: str | None, needs: Needs) -> None:
    import ray

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    # Ray's CPUs are only a count for scheduling: a learner and two actors must also fit on a machine with two cores.
    num_cpus = max(needs.num_cpus, os.cpu_count() or 1)
    if address:
        require_listener(address)
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                object_store_memory=needs.object_store_bytes,
                include_dashboard=False,
                **quiet,
            )
    except Exception as e:  # a node that takes Ray's 30 s to start, on a busy machine, is a bare Exception
        if address:
            raise ResourceError(f"the Ray cluster at RAY_ADDRESS={address} cannot be joined: {e}") from e
        raise ResourceError(f"Ray cannot be started on this machine: {e}") from e


def _check_cpus(resources: dict[str, float], needs: Needs, *, where: str) -> None:
    num_cpus = resources.get("CPU", 0)
    if num_cpus < needs.num_cpus:
        raise ResourceError(
            f"{where} has {num_cpus:g} CPUs, the stage needs {needs.num_cpus:g}: use fewer actors or threads "
            f"(num_workers, num_threads, num_rollout_actors and rollout_threads of the stage's runtime, num_engines "
            f"and num_threads of evaluate.runtime), or set RAY_ADDRESS to a bigger cluster"
        )


@contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """Restore the SIGTERM handler after the block: `ray.init` installs one that exits.

    Prefect's handler must stay, because it sets a cancelled run to Cancelled. Only the main thread can set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler: Callable[[int, FrameType | None], object] | int | None = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
