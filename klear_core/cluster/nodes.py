"""Find the nodes of a run: those of the Ray cluster at RAY_ADDRESS, or this machine."""

from __future__ import annotations

import logging
import math
import os
import socket
from functools import cache

from klear_core.cluster.placement import gpus_here
from klear_core.cluster.places import Node
from klear_core.errors import ResourceError

_JOIN_TIMEOUT_S = 10.0


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


@cache
def _nodes_at(address: str) -> tuple[Node, ...]:
    """Join the cluster for a moment, unless this process is connected, and return its nodes."""
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        return ray_nodes()
    require_listener(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        return ray_nodes()
    except (RayError, OSError, RuntimeError, ValueError) as e:
        raise ResourceError(f"the Ray cluster at RAY_ADDRESS={address} cannot be joined: {e}") from e
    finally:
        ray.shutdown()


def require_listener(address: str) -> None:
    """Raise ResourceError if nothing listens at host:port; Ray itself would retry for five minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_JOIN_TIMEOUT_S).close()
    except OSError as e:
        raise ResourceError(
            f"RAY_ADDRESS: {host}:{port} does not answer ({e}); start that cluster, or unset RAY_ADDRESS to run Ray "
            "on this machine"
        ) from e


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
