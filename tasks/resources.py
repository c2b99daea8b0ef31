"""Ray around a stage: started here or joined, quiet, bounded in memory, and gone afterwards."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from klear_core.config.rl import RlConfig
from klear_core.errors import ResourceError
from tasks.ray_messages import ray_messages_logged
from tasks.reaper import no_orphans

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning a process
}
_LOCAL_ONLY = {
    "RAY_AUTH_MODE": "disabled",  # our own cluster listens on this machine alone; without it Ray warns
    "RAY_worker_niceness": "0",  # Ray's 15 lets whatever else runs here go first: beside two busy processes RL all but stood still
}
_JOIN_TIMEOUT_S = 10.0

_STORE_FLOOR_BYTES = 128 << 20  # rollouts and Ray's own things; Ray takes no less than 75 MB
_COPIES_OF_WEIGHTS = 6  # the version in use and the one on its way, in float32 where the file has bfloat16, and slack


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a stage asks of Ray."""

    num_cpus: int
    object_store_bytes: int


def needs_of(cfg: RlConfig, model: Path) -> Needs:
    """What an RL stage asks for: a CPU a thread, and room for some copies of the weights. GPUs are shared out by `plan_gpus`."""
    runtime = cfg.runtime
    from klear_core.train.base import model_folder

    weights = sum(f.stat().st_size for f in model_folder(model).glob("*.safetensors"))
    wanted = _STORE_FLOOR_BYTES + _COPIES_OF_WEIGHTS * weights
    return Needs(
        num_cpus=runtime.num_workers * runtime.num_threads + runtime.num_rollout_actors * runtime.rollout_threads,
        object_store_bytes=min(wanted, psutil.virtual_memory().total // 2),
    )


@contextmanager
def ray_session(needs: Needs) -> Iterator[None]:
    """Ray for the block: the cluster at RAY_ADDRESS, which stays up, or one of our own, which ends with the block.

    Ray's processes also end when this process is killed. ResourceError if Ray cannot start or has too few CPUs.
    """
    os.environ.update({k: v for k, v in _QUIET.items() if k not in os.environ})
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        os.environ.update({k: v for k, v in _LOCAL_ONLY.items() if k not in os.environ})
    import ray

    with no_orphans(), ray_messages_logged():
        try:
            with _own_signal_handlers():
                _init(address, needs)
            _check(ray.cluster_resources(), needs, where=f"the Ray cluster at {address}" if address else "this machine")
            yield
        finally:
            ray.shutdown()


def _init(address: str | None, needs: Needs) -> None:
    import ray
    from ray.exceptions import RayError

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    num_cpus = max(needs.num_cpus, os.cpu_count() or 1)  # logical ones, so that a learner and two actors also fit on two cores
    try:
        if address:
            _knock(address)
            ray.init(address=address, **quiet)
        else:
            ray.init(address="local", num_cpus=num_cpus, object_store_memory=needs.object_store_bytes, include_dashboard=False, **quiet)
    except (RayError, OSError, RuntimeError, ValueError) as e:
        what = f"the Ray cluster at RAY_ADDRESS={address} cannot be joined" if address else "Ray cannot be started on this machine"
        raise ResourceError(f"{what}: {e}") from e


def _knock(address: str) -> None:
    """OSError if nobody listens at host:port: Ray itself would try for five minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_JOIN_TIMEOUT_S).close()


def _check(has: dict[str, float], needs: Needs, *, where: str) -> None:
    if has.get("CPU", 0) < needs.num_cpus:
        raise ResourceError(
            f"{where} has {has.get('CPU', 0):g} CPUs, the stage needs {needs.num_cpus:g}: use fewer actors or threads "
            f"(rl.runtime.num_rollout_actors, rollout_threads), or set RAY_ADDRESS to a bigger cluster"
        )


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """`ray.init` puts in a SIGTERM handler that exits; Prefect's, which makes a cancelled run Cancelled, must stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours: Callable[[int, FrameType | None], object] | int | None = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, ours)
