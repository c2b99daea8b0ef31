"""How to lose a node of a Ray cluster on this machine."""

from __future__ import annotations

from ray.cluster_utils import Cluster

from klear_core.cluster.nodes import ray_nodes


def kill_a_rank_node(cluster: Cluster, num_ranks: int) -> None:
    """Kill a raylet, not the head's, with all its processes, among the nodes of so many ranks with one CPU each."""
    with_cpus = [node.node_id for node in ray_nodes() if node.num_cpus]
    used = with_cpus[:num_ranks]  # ranks fill nodes in this order
    victim = next(node for node in cluster.worker_nodes if node.node_id in used)
    cluster.remove_node(victim, allow_graceful=False)
