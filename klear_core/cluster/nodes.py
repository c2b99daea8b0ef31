"""Find the nodes of a run, and decide how many engines a stage samples with on them. Imports no torch."""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

import psutil

from klear_core.cluster.placement import (
    Node,
    Room,
    cpu_refusal,
    gpus_here,
    is_too_large_for_cpu,
    num_engine_ranks,
    place_ranks,
)
from klear_core.config.evaluate import LocalEngineConfig, TorchEngineConfig
from klear_core.config.train import TrainRuntime
from klear_core.errors import ResourceError
from klear_core.stopping import sigterm_handler_kept

log = logging.getLogger(__name__)

R = TypeVar("R")

_ADDRESS = re.compile(r"(ray://)?(?P<host>\[[\da-fA-F:.%\w]+\]|[^\s:/\[\]@]+):(?P<port>\d+)")
_JOIN_TIMEOUT_S = 10.0
_LOOK_S = 2.0  # between two looks at the cluster while nodes are missing


def joins_a_cluster() -> bool:
    """Return whether learners and engines run on a cluster that is there already."""
    return bool(os.environ.get("RAY_ADDRESS"))


def known_nodes() -> tuple[Node, ...]:
    """Return the nodes that the next run will have. Raise ResourceError if the cluster cannot be joined."""
    address = os.environ.get("RAY_ADDRESS")
    if address:
        return _nodes_at(address)
    # Ray is started here with as many CPUs as a stage needs: they are only a count for scheduling.
    return (Node(name="this machine", num_cpus=math.inf, num_gpus=gpus_here()),)


def nodes_now() -> tuple[Node, ...]:
    """Return what `known_nodes` would if this process had not asked before."""
    _nodes_at.cache_clear()
    return known_nodes()


@cache
def _nodes_at(address: str) -> tuple[Node, ...]:
    """Join the cluster for a moment, unless this process is connected, and return its nodes."""
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        return ray_nodes()
    require_listener(address)
    with sigterm_handler_kept():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            return ray_nodes()
        except (RayError, OSError, RuntimeError, ValueError) as e:
            raise cannot_join(address, e) from e
        finally:
            ray.shutdown()


def require_listener(address: str) -> None:
    """Raise ResourceError if the address is none or nothing listens there; Ray itself would retry for five minutes."""
    if address == "auto":  # the cluster that a raylet of this machine belongs to
        return
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ResourceError(
            f"RAY_ADDRESS = {address!r} is no HOST:PORT: it takes what `ray start --head` prints, such as 10.0.0.1:6379"
        )
    host, port = found["host"].strip("[]"), found["port"]
    try:
        socket.create_connection((host, int(port)), timeout=_JOIN_TIMEOUT_S).close()
    except (OSError, OverflowError) as e:  # the latter of a port above 65,535
        raise ResourceError(
            f"RAY_ADDRESS: {host}:{port} does not answer ({e}); start that cluster, or unset RAY_ADDRESS to run Ray "
            "on this machine"
        ) from e


def cannot_join(address: str, error: BaseException) -> ResourceError:
    """Return the error for a cluster that listens and refuses this process.

    Ray reports a wrong or missing token as a failed connection, so the remedy names it unless tokens are in use here.
    """
    has_token = os.environ.get("RAY_AUTH_MODE") == "token"
    token = (
        "is RAY_AUTH_TOKEN that of the cluster?"
        if has_token
        else "if the cluster was started with RAY_AUTH_MODE=token, set RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN here"
    )
    return ResourceError(f"the Ray cluster at RAY_ADDRESS={address} cannot be joined: {error}; {token}")


def when_there(plan: Callable[[], R], *, wait_s: float, look_s: float = _LOOK_S) -> R:
    """Return what `plan` returns, once the nodes of the cluster suffice for it; warn once of what is missing.

    Raise the ResourceError of `plan` after `wait_s`; at once if Ray runs on this machine alone, which stays as it is.
    """
    deadline, is_told = time.monotonic() + (wait_s if joins_a_cluster() else 0.0), False
    while True:
        try:
            return plan()
        except ResourceError as missing:
            if time.monotonic() >= deadline:
                raise
            if not is_told:
                log.warning("waiting up to %g s for nodes of the Ray cluster: %s", wait_s, missing)
                is_told = True
        time.sleep(min(look_s, max(0.0, deadline - time.monotonic())))


def ray_nodes() -> tuple[Node, ...]:
    """Return the living nodes of the Ray cluster that this process is connected to, in a fixed order."""
    import ray

    nodes = []
    for found in ray.nodes():
        resources = found["Resources"]
        if found["Alive"]:
            name, node_id = found["NodeManagerAddress"], found["NodeID"]
            num_gpus = int(resources.get("GPU", 0))
            nodes.append(Node(name=name, node_id=node_id, num_cpus=resources.get("CPU", 0.0), num_gpus=num_gpus))
    return tuple(sorted(nodes, key=lambda node: (node.name, node.node_id)))


_INTERFACE_SETTINGS = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "=", "TP_SOCKET_IFNAME": ""}
"""Variables that name the interface of a process group, with what precedes an exact name: NCCL's are prefixes."""


def bind_to_node_address() -> str:
    """Let the process groups of this actor use the interface that has Ray's address of its node; return the address.

    By itself gloo advertises what the host's name resolves to, which on Debian is 127.0.1.1. Variables that are set
    already are kept, and so is everything if no interface has the address, as behind a translated one. Without Ray,
    where the actor's class is used by itself, nothing is set and the address is empty.
    """
    import ray.util

    if not ray.is_initialized():
        return ""
    address: str = ray.util.get_node_ip_address()
    interface = _interface_of(address)
    if interface is None:
        log.warning("no interface of this node has Ray's address of it, %s: process groups choose their own", address)
        return address
    for name, exact in _INTERFACE_SETTINGS.items():
        os.environ.setdefault(name, exact + interface)
    return address


def _interface_of(address: str) -> str | None:
    """Return the name of the network interface that has this address; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        # IPv6 addresses of one link carry their scope: fe80::1%eth0
        if address in (found.address.partition("%")[0] for found in addresses):
            return str(name).partition(":")[0]  # eth0:1 is a second address of eth0
    return None


def rendezvous_at(address: str) -> str:
    """Return where a process group can start on this node, whose address is IPv4 or IPv6; the port is free for now."""
    is_ipv6 = ":" in address
    with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET) as s:
        # Port 0 lets the system pick a free one. It is unprotected from here until rank 0 listens on it.
        s.bind(("", 0))
        port = s.getsockname()[1]
    return f"tcp://[{address}]:{port}" if is_ipv6 else f"tcp://{address}:{port}"


# ---- engine plan ----
# Decide how many engines a stage samples with, and on what. Imports neither Ray nor torch.


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The engines of a stage."""

    num_engines: int
    gpus_per_engine: int
    """Whole GPUs of one engine; 0 on CPU."""


def plan_engines(
    num_engines: Literal["auto"] | int, engine: LocalEngineConfig, gpus_of_nodes: Sequence[int], *, key: str
) -> EnginePlan:
    """Return the engines for nodes with so many GPUs each; the GPUs of an engine are on one node.

    Raise ResourceError if there are too few; `key` is the stage's section.
    """
    num_gpus = sum(gpus_of_nodes)
    is_on_cpu = num_gpus == 0 or (isinstance(engine, TorchEngineConfig) and engine.runtime.device == "cpu")
    if is_on_cpu:
        return EnginePlan(num_engines=1 if num_engines == "auto" else num_engines, gpus_per_engine=0)
    gpus_per_engine = num_engine_ranks(engine)
    most = sum(gpus // gpus_per_engine for gpus in gpus_of_nodes)
    wanted = max(1, most) if num_engines == "auto" else num_engines  # 1 that does not fit is refused below
    if wanted > most:
        raise ResourceError(
            f"{key}.runtime.num_engines = {num_engines!r}: {wanted} engines with {gpus_per_engine} GPUs each need "
            f"{wanted * gpus_per_engine} GPUs, and there are {num_gpus}{_by_node(gpus_of_nodes)}. Lower num_engines or "
            f"{key}.engine.runtime.tensor_parallel"
        )
    return EnginePlan(num_engines=wanted, gpus_per_engine=gpus_per_engine)


def check_engines_have_gpus(plan: EnginePlan, engine: LocalEngineConfig, num_params: int, *, key: str) -> None:
    """Raise ResourceError if `device = "auto"` would sample on a CPU from a model too large for it."""
    is_auto = isinstance(engine, TorchEngineConfig) and engine.runtime.device == "auto"
    if is_auto and plan.gpus_per_engine == 0 and is_too_large_for_cpu(num_params):
        raise ResourceError(cpu_refusal(f"{key}.engine.runtime", num_params))


def plan_scorer(
    engine: LocalEngineConfig, runtime: TrainRuntime, nodes: Sequence[Node], num_params: int | None, *, key: str
) -> EnginePlan:
    """Return the engine that scores models beside a learner with these settings, on GPUs that the learner leaves free.

    Raise ResourceError if no node has enough; a small model may be scored on the CPU instead. `key` is the stage's
    section.
    """
    rooms = Room.of(nodes)
    num_gpus = sum(node.num_gpus for node in nodes)
    # Takes the learner's GPUs out of `rooms`.
    if num_gpus and runtime.device != "cpu":
        place_ranks(rooms, runtime, 1.0)
    free = [len(room.unused()) for room in rooms]
    needed = num_engine_ranks(engine)
    if num_gpus == 0 or max(free) >= needed:
        return plan_engines(1, engine, free, key=key)
    is_small = num_params is None or not is_too_large_for_cpu(num_params)
    if isinstance(engine, TorchEngineConfig) and (engine.runtime.device == "cpu" or is_small):
        return EnginePlan(num_engines=1, gpus_per_engine=0)
    raise ResourceError(
        f"{key}.runtime.curve: the engine that scores, that of evaluate.engine, needs {needed} of {num_gpus} GPUs, "
        f"and the learner's {runtime.num_workers} ranks leave {sum(free)}{_by_node(free)}: lower "
        f"{key}.runtime.num_workers, or remove the curve"
    )


def _by_node(gpus_of_nodes: Sequence[int]) -> str:
    """Return the GPUs of several nodes in words; nothing for one."""
    if len(gpus_of_nodes) == 1:
        return ""
    each = ", ".join(map(str, gpus_of_nodes))
    return f" ({each} on the nodes; those of an engine must be on one)"
