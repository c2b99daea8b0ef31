"""Try the nodes of a Ray cluster as training uses them: their limits and clocks, an all-reduce and a broadcast."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from klear_core.cluster.nodes import bind_to_node_address, ray_nodes, rendezvous_at
from klear_core.cluster.placement import Node

_TIMEOUT_S = 120.0
"""Longest wait for the nodes: NCCL finds its interfaces and connects within seconds."""
_VALUES = {"nccl": 64 << 20, "gloo": 1 << 20}
"""Float32 numbers that are sent: 256 MB over NCCL."""
_MOST_NODES = 64
SHM = Path("/dev/shm")  # noqa: S108  where Ray's objects and new weights of engines lie


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Resources of a node's processes; of the process that asks, which has the limits of its raylet."""

    name: str
    clock_s: float
    """Seconds since the epoch by the node's clock."""
    shm_free_gb: float
    """0 without such a folder."""
    max_files: int
    max_locked_mb: float
    """Memory that may be pinned for InfiniBand; infinite without a limit."""
    environment: dict[str, str]
    """Its NCCL and GLOO variables."""


def node_facts() -> NodeFacts:
    """Return the facts of this node."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    shm_free_gb = shutil.disk_usage(SHM).free / 1e9 if SHM.is_dir() else 0.0
    max_files = 1 << 30 if files == unlimited else files
    max_locked_mb = float("inf") if locked == unlimited else locked / (1 << 20)
    return NodeFacts(
        name=socket.gethostname(),
        clock_s=time.time(),
        shm_free_gb=shm_free_gb,
        max_files=max_files,
        max_locked_mb=max_locked_mb,
        environment={key: value for key, value in os.environ.items() if key.startswith(("NCCL_", "GLOO_"))},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Measurements of one node."""

    all_reduce_s: float
    broadcast_s: float
    num_bytes: int


class NodeProbe:
    """Joins the other nodes, as a learner rank does."""

    def facts(self) -> NodeFacts:
        """Return the facts of the actor's node."""
        return node_facts()

    def address(self) -> str:
        """Return where the others find this one."""
        return rendezvous_at(ray.util.get_node_ip_address())

    def exchange(self, rank: int, size: int, address: str, backend: Literal["nccl", "gloo"]) -> Exchange:
        """Sum over all nodes and send from the first to all, and check what arrived (collective call).

        Raise RuntimeError if other numbers arrive, or if torch cannot connect.
        """
        import torch
        import torch.distributed as dist

        bind_to_node_address()
        timeout = timedelta(seconds=_TIMEOUT_S / 2)
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=timeout)
        try:
            device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
            values = torch.full((_VALUES[backend],), float(rank + 1), device=device)
            dist.all_reduce(values.clone())  # connects
            started = time.perf_counter()
            dist.all_reduce(values)
            wanted = size * (size + 1) / 2
            is_right = bool((values == wanted).all())  # waits for the device
            all_reduce_s = time.perf_counter() - started
            sent = torch.arange(_VALUES[backend], dtype=torch.float32, device=device)
            received = sent.clone() if rank == 0 else torch.zeros_like(sent)
            started = time.perf_counter()
            dist.broadcast(received, src=0)
            is_right &= bool((received == sent).all())
            broadcast_s = time.perf_counter() - started
            if not is_right:
                raise RuntimeError(f"{backend} brought other numbers to node {rank} than were sent")
            return Exchange(
                all_reduce_s=all_reduce_s, broadcast_s=broadcast_s, num_bytes=values.numel() * values.element_size()
            )
        finally:
            dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkReport:
    """All nodes, and the slowest exchange between them; `failure` says why there is none."""

    backend: Literal["nccl", "gloo"]
    facts: tuple[NodeFacts, ...]
    skew_s: float
    """Largest difference of a node's clock from this machine's, the time of the question left out."""
    exchange: Exchange | None
    failure: str


def try_network(start_s: float = _TIMEOUT_S) -> NetworkReport:
    """Try all nodes of the cluster that this process is connected to: over NCCL if two have GPUs, else over gloo.

    A node on which no process has started after `start_s` is a failure, and nothing is exchanged.
    """
    nodes = ray_nodes()
    with_gpus = [node for node in nodes if node.num_gpus]
    backend: Literal["nccl", "gloo"] = "nccl" if len(with_gpus) > 1 else "gloo"
    chosen = (with_gpus if backend == "nccl" else nodes)[:_MOST_NODES]
    probes = [_probe(node, has_gpu=backend == "nccl") for node in chosen]
    try:
        absent = _absent(chosen, probes, start_s)
        if absent:
            failure = f"no process has started within {start_s:g} s on {', '.join(absent)}"
            return NetworkReport(backend=backend, facts=(), skew_s=0.0, exchange=None, failure=failure)
        facts, skew_s = _facts(probes)
        if len(probes) < 2:
            return NetworkReport(backend=backend, facts=facts, skew_s=skew_s, exchange=None, failure="")
        try:
            address = ray.get(probes[0].address.remote(), timeout=_TIMEOUT_S)
            asked = [probe.exchange.remote(i, len(probes), address, backend) for i, probe in enumerate(probes)]
            found = ray.get(asked, timeout=_TIMEOUT_S)
        except Exception as e:  # noqa: BLE001  a broken network can raise anything
            last = str(e).strip().rpartition("\n")[2]
            failure = f"{type(e).__name__}: {last}"[:300]
            return NetworkReport(backend=backend, facts=facts, skew_s=skew_s, exchange=None, failure=failure)
        slowest = max(found, key=lambda exchange: exchange.all_reduce_s)
        return NetworkReport(backend=backend, facts=facts, skew_s=skew_s, exchange=slowest, failure="")
    finally:
        for probe in probes:
            ray.kill(probe)


def _probe(node: Node, *, has_gpu: bool) -> Any:
    where = NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False)
    options = {"num_cpus": 0, "num_gpus": int(has_gpu), "max_restarts": 0, "scheduling_strategy": where}
    return ray.remote(**options)(NodeProbe).remote()


def _absent(nodes: Sequence[Node], probes: Sequence[Any], start_s: float) -> list[str]:
    """Return the names of the nodes whose process does not start in time: its GPU is taken, or the node is lost."""
    asked = [probe.__ray_ready__.remote() for probe in probes]
    ray.wait(asked, num_returns=len(asked), timeout=start_s)
    names = []
    for node, answer in zip(nodes, asked, strict=True):
        try:
            ray.get(answer, timeout=0)
        except RayError:  # a timeout, too
            names.append(node.name)
    return names


def _facts(probes: Sequence[Any]) -> tuple[tuple[NodeFacts, ...], float]:
    """Return the facts of all nodes and the largest skew of their clocks."""
    facts, skews = [], []
    for probe in probes:
        before = time.time()
        found: NodeFacts = ray.get(probe.facts.remote(), timeout=_TIMEOUT_S)
        after = time.time()
        facts.append(found)
        skews.append(max(before - found.clock_s, found.clock_s - after, 0.0))
    return tuple(facts), max(skews)
