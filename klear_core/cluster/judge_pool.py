"""Judge on all nodes of a Ray cluster: an actor on each, with the judging process that a single machine has."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from klear_core.cluster.judge_actors import JudgeActor, home_of_tests
from klear_core.config.verify import VerifyConfig
from klear_core.errors import JudgeError
from klear_core.types import Verdict
from klear_core.verify import JudgePool, build_judge_pool
from klear_core.verify.nodes import JudgeNodes
from klear_core.verify.work import Fault, Task

log = logging.getLogger(__name__)

_JUDGES_START_S = 300.0
_CLOSE_S = 20.0  # ending all jails takes seconds on a loaded machine
_RESTARTS = 3
"""Restarts of an actor whose node lives; its tasks are repeated."""


def build_cluster_judges(cfg: VerifyConfig) -> JudgePool:
    """Build judges on every node of the Ray cluster with a CPU; on this machine alone if no other has one.

    Raise JudgeError if no node's actor starts.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    here = ray.get_runtime_context().get_node_id()
    # A head without CPUs (a login node, KubeRay's) judges nothing, even if only one other node has some.
    if all(node["NodeID"] == here for node in nodes):
        return build_judge_pool(cfg)
    started = [RayJudgeNode(cfg, node) for node in nodes]
    present = [node for node in started if node.is_up()]
    if not present:
        raise JudgeError(f"no judging process could be started on any of {len(nodes)} nodes")
    return JudgePool(cfg, JudgeNodes(present))


class RayJudgeNode:
    """A `JudgeNode` in an actor."""

    def __init__(self, cfg: VerifyConfig, node: dict[str, Any]) -> None:
        """Start the actor on this node of `ray.nodes()`; `is_up` waits for it."""
        self.name = f"judging node {node['NodeManagerAddress']} ({node['NodeID'][:8]})"
        self.num_workers = 1
        where = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        # No CPUs are reserved: engines and learners do not reserve theirs either, and must still find their places.
        actor_type = ray.remote(
            num_cpus=0, max_restarts=_RESTARTS, max_task_retries=1, max_concurrency=100_000, scheduling_strategy=where
        )(JudgeActor)
        self._actor = actor_type.remote(cfg, node["Resources"]["CPU"])
        # Not awaited here, so that all nodes start at once.
        self._starting = self._actor.num_workers.remote()

    def is_up(self) -> bool:
        """Wait until the actor has started; return whether it has."""
        try:
            self.num_workers = ray.get(self._starting, timeout=_JUDGES_START_S)
        except (RayError, GetTimeoutError) as error:
            log.warning("%s does not start: %s", self.name, error)
            ray.kill(self._actor)
            return False
        return True

    def submit(self, task: Task) -> Future[Verdict | Fault]:
        """Send a task to the node; see `JudgeNode.submit`."""
        result: Future[Verdict | Fault] = Future()

        def resolve(answer: Future[Verdict | Fault]) -> None:
            error = answer.exception()
            if error is None:
                result.set_result(answer.result())
            elif isinstance(error, RayError):
                result.set_result(Fault(kind="lost", detail=type(error).__name__))
            else:  # such as an OSError of a judging process that cannot be started
                result.set_result(Fault(kind="lost", detail=f"{type(error).__name__}: {error}"[:500]))

        self._actor.judge.remote(task, home_of_tests(task)).future().add_done_callback(resolve)
        return result

    def close(self) -> None:
        """End the node's judging processes. A node that is lost has none."""
        try:
            ray.get(self._actor.close.remote(), timeout=_CLOSE_S)
        except (RayError, GetTimeoutError) as error:
            log.info("%s: %s while it was closed", self.name, type(error).__name__)
        ray.kill(self._actor)
