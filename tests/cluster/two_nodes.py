"""A Ray cluster of two nodes on this machine, and how to end one of its processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from processes import alive, title
from ray.cluster_utils import Cluster


@contextmanager
def two_nodes(*, cpus_each: int = 2, gpus_each: int = 0) -> Iterator[Cluster]:
    """Start both, point RAY_ADDRESS at them, and stop them afterwards. GPUs are only counted: torch finds none."""
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    before = {key: os.environ.get(key) for key in [*settings, "RAY_ADDRESS"]}
    os.environ.update(settings)
    node = {"num_cpus": cpus_each, "num_gpus": gpus_each, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        cluster.add_node(**node)
        cluster.wait_for_nodes()
        os.environ["RAY_ADDRESS"] = cluster.address
        yield cluster
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        cluster.shutdown()


def actors_of(name: str) -> list[psutil.Process]:
    """Living processes that run an actor of this class."""
    return [p for p in alive(psutil.Process().children(recursive=True)) if title(p).startswith(f"ray::{name}")]
