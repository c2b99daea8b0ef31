"""Run a stage's engines, judges and scorer of checkpoints as pools of Ray actors."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from klear_core.artifacts.remote_paths import RemotePaths, remote_paths_of
from klear_core.artifacts.store import BUILDING
from klear_core.cluster.engine_actors import EngineActor, RayEngine, relay_logs
from klear_core.cluster.nodes import EnginePlan, check_engines_have_gpus, plan_engines, ray_nodes, when_there
from klear_core.cluster.placement import Node
from klear_core.cluster.ray_calls import awaited, dead_nodes, within
from klear_core.config.evaluate import EnginesRuntime
from klear_core.config.pipeline import InlineEvalJob
from klear_core.config.verify import VerifyConfig
from klear_core.cpus import usable_cpus
from klear_core.errors import JudgeError, ResourceError, TrainingError
from klear_core.evaluate.inline_eval import open_inline_eval, score_with, spec_of
from klear_core.generate.factory import EngineSpec, Sampler, num_slots, start_members, start_with_endpoints
from klear_core.hf_config import read_hf_config
from klear_core.types import StoredTests, Verdict
from klear_core.verify import JudgePool
from klear_core.verify.client import CodeTask, Fault, JudgeClient, JudgeNode, JudgeNodes, Task

log = logging.getLogger(__name__)

_START_S = 1800.0  # longest wait for an engine to load its model: 64 GB from a shared disk take minutes
_NOTICE_S = 30.0  # wait for GPUs from which on the log says so; a process starts within seconds
_QUEUE_S = 86400.0  # longest wait for GPUs if no engine of the pool has any: other runs end, or free some at their ends


async def start_pool(spec: EngineSpec, *, runtime: EnginesRuntime, key: str) -> Sampler:
    """Start the engines that fit the Ray cluster which this process is connected to, and join the endpoints of the
    settings to them.

    One engine on CPU stays in this process. Raise ResourceError if there are too few GPUs, or for a model too large for
    a CPU, and no more come in time; `key` is the stage's section.
    """
    plan = await asyncio.to_thread(plan_when_there, spec, runtime=runtime, key=key)
    if plan.num_engines == 0 or plan == EnginePlan(num_engines=1, gpus_per_engine=0):
        return await start_with_endpoints(spec, runtime=runtime, key=key, num_here=plan.num_engines)
    return await start_planned(spec, plan=plan, runtime=runtime, key=key)


def plan_when_there(
    spec: EngineSpec, *, runtime: EnginesRuntime, key: str, nodes: Callable[[], Sequence[Node]] = ray_nodes
) -> EnginePlan:
    """Return the engines for the nodes of the cluster, once these suffice; see `when_there`."""

    def plan() -> EnginePlan:
        found = plan_engines(runtime.num_engines, spec.cfg, [node.num_gpus for node in nodes()], key=key)
        if found.num_engines:
            check_engines_have_gpus(found, spec.cfg, read_hf_config(spec.model_folder).num_params, key=key)
        return found

    return when_there(plan, wait_s=runtime.wait_for_nodes_s)


async def start_planned(spec: EngineSpec, *, plan: EnginePlan, runtime: EnginesRuntime, key: str) -> Sampler:
    """Start the engines of a plan as Ray actors, and join the endpoints of the settings; `key` is its section."""
    limit = num_slots(spec.cfg, is_on_gpu=plan.gpus_per_engine > 0)
    engines: list[RayEngine] = []
    # The queue holds the list and not a copy, because engines are made with its `wait`.
    queue = GpuQueue(engines, plan.gpus_per_engine, key=key)
    engines += [_engine(index, spec, plan, limit, queue) for index in range(plan.num_engines)]
    return await start_members(engines, runtime=runtime, key=key, num_up=1, dead_nodes=dead_nodes)


class GpuQueue:
    """Waits until Ray has given engines of a pool their GPUs, and says once that it waits."""

    def __init__(
        self,
        engines: Sequence[RayEngine],
        gpus_per_engine: int,
        *,
        key: str,
        nodes: Callable[[], Sequence[Node]] = ray_nodes,
    ) -> None:
        """`nodes` returns the living nodes of the cluster; `key` is the stage's section."""
        self._engines, self._gpus_per_engine, self._key = engines, gpus_per_engine, key
        self._nodes = nodes
        self._has_noticed = False

    async def wait(self, actor: Any) -> None:
        """Return when an actor runs. Raise ResourceError if none of the pool's does for too long."""
        running = asyncio.ensure_future(awaited(actor.__ray_ready__.remote()))
        try:
            done, _ = await asyncio.wait([running], timeout=_NOTICE_S)
            if not done:
                self._notice()
            deadline = asyncio.get_running_loop().time() + (_QUEUE_S if self._gpus_per_engine else _START_S)
            while not done:
                done, _ = await asyncio.wait([running], timeout=_START_S)
                # Whether a node has enough GPUs for an engine, free or not: nodes may be lost while engines wait.
                has_room = any(node.num_gpus >= self._gpus_per_engine for node in self._nodes())
                is_late = asyncio.get_running_loop().time() >= deadline or not has_room
                if not done and is_late and not any(engine.is_there for engine in self._engines):
                    raise ResourceError(self._refusal())
            await running
        finally:
            running.cancel()

    def _notice(self) -> None:
        if self._has_noticed:
            return
        self._has_noticed = True
        num_queued = sum(engine.is_queued for engine in self._engines)
        # a warning, so that a terminal shows it
        log.warning(
            "%s: %d of %d engines wait for GPUs that other work of the Ray cluster holds, and join when they have them",
            self._key, num_queued, len(self._engines),
        )  # fmt: skip

    def _refusal(self) -> str:
        num_gpus = sum(node.num_gpus for node in self._nodes())
        return (
            f"{self._key}: none of {len(self._engines)} engines got its {self._gpus_per_engine} GPUs; the Ray cluster "
            f"has {num_gpus} in all: nodes were lost, or other work holds them"
        )


def _engine(index: int, spec: EngineSpec, plan: EnginePlan, limit: int, queue: GpuQueue) -> RayEngine:
    # No CPUs are reserved, because the number of threads is a setting. SPREAD: on CPU, nothing else would keep Ray from
    # putting all engines on one node. An actor of several GPUs is always on one node.
    actor_type = ray.remote(num_cpus=0, num_gpus=plan.gpus_per_engine, max_restarts=0, scheduling_strategy="SPREAD")(
        EngineActor
    )

    async def load(actor: Any) -> None:
        try:
            engine.limit, logged = await within(actor.start.remote(spec), _START_S, engine.name, "start")
            relay_logs(logged, engine.name)
        except TrainingError as error:  # a timeout
            raise ResourceError(str(error)) from error

    async def create() -> Any:
        return actor_type.remote()

    engine = RayEngine(f"engine {index}", create, load, limit=limit, wait_for_gpus=queue.wait)
    return engine


# ---- judge pool ----
# Judge on all nodes of a Ray cluster: an actor on each, with the judging process that a single machine has.


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
        return JudgePool(cfg)
    started = [RayJudge(cfg, node) for node in nodes]
    present = [node for judge in started if (node := judge.wait()) is not None]
    if not present:
        raise JudgeError(f"no judging process could be started on any of {len(nodes)} nodes")
    return JudgePool(cfg, JudgeNodes(present))


class RayJudge:
    """A `JudgeBackend` in an actor, for one node."""

    def __init__(self, cfg: VerifyConfig, node: dict[str, Any]) -> None:
        """Start the actor on this node of `ray.nodes()`; `wait` waits for it."""
        self._name = f"judging node {node['NodeManagerAddress']} ({node['NodeID'][:8]})"
        where = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        # No CPUs are reserved: engines and learners do not reserve theirs either, and must still find their places.
        actor_type = ray.remote(
            num_cpus=0, max_restarts=_RESTARTS, max_task_retries=1, max_concurrency=100_000, scheduling_strategy=where
        )(JudgeActor)
        self._actor = actor_type.remote(cfg, node["Resources"]["CPU"])
        # Not awaited here, so that all nodes start at once.
        self._starting = self._actor.num_workers.remote()

    def wait(self) -> JudgeNode | None:
        """Wait until the actor has started; return its node, None if it does not start."""
        try:
            num_workers = ray.get(self._starting, timeout=_JUDGES_START_S)
        except (RayError, GetTimeoutError) as error:
            log.warning("%s does not start: %s", self._name, error)
            ray.kill(self._actor)
            return None
        return JudgeNode(name=self._name, num_workers=num_workers, backend=self)

    def submit(self, task: Task) -> Future[Verdict | Fault]:
        """Send a task to the node; see `JudgeBackend.submit`."""
        result: Future[Verdict | Fault] = Future()

        def resolve(answer: Future[Verdict | Fault]) -> None:
            error = answer.exception()
            if error is None:
                result.set_result(answer.result())
            elif isinstance(error, RayError):
                result.set_result(Fault(kind="lost", detail=type(error).__name__))
            else:  # such as an OSError of a judging process that cannot be started
                result.set_result(Fault(kind="lost", detail=f"{type(error).__name__}: {error}"[:500]))

        self._actor.judge.remote(task, remote_paths_of_tests(task)).future().add_done_callback(resolve)
        return result

    def close(self) -> None:
        """End the node's judging processes. A node that is lost has none."""
        try:
            ray.get(self._actor.close.remote(), timeout=_CLOSE_S)
        except (RayError, GetTimeoutError) as error:
            log.info("%s: %s while it was closed", self._name, type(error).__name__)
        ray.kill(self._actor)


# ---- judge actors ----
# Define the Ray actor that judges on one node; imports no Ray.


class JudgeActor:
    """Run a judging process with all of its workers, like that of a stage on one machine."""

    def __init__(self, cfg: VerifyConfig, ray_cpus: float) -> None:
        """Use the CPUs that both this process and Ray have on the node, where the settings name no number."""
        cpus = max(1, min(usable_cpus(), int(ray_cpus)))
        workers = {
            "math_workers": cfg.runtime.math_workers or cpus,
            # Twice as many, because half of the wall time of a short program is the start of its jail, asleep.
            "code_workers": cfg.runtime.code_workers or 2 * cpus,
            "reward_workers": cfg.runtime.reward_workers or cpus,
        }
        runtime = cfg.runtime.model_copy(update=workers)
        self._num_workers = runtime.code_workers
        self._client = JudgeClient(cfg.model_copy(update={"runtime": runtime}))

    async def num_workers(self) -> int:
        """Return the number of programs that run at a time."""
        return self._num_workers

    async def judge(self, task: Task, remote: RemotePaths | None = None) -> Verdict | Fault:
        """Return the verdict, or the fault that left the task without one; `home` tells where stored tests are."""
        # In a thread: the first task of a file fetches it from the store.
        if remote is not None:
            task = await asyncio.to_thread(_with_tests_here, task, remote)
        return await asyncio.wrap_future(self._client.submit(task))

    async def close(self) -> None:
        """End the judging process with everything that it started."""
        await asyncio.to_thread(self._client.close)


def remote_paths_of_tests(task: Task) -> RemotePaths | None:
    """Return where another node gets the tests of a task from; None if it holds them, or without a shared store."""
    if isinstance(task, CodeTask) and isinstance(task.reference.tests, StoredTests):
        return _remote_paths_of(str(Path(task.reference.tests.path).parent))
    return None


@cache
def _remote_paths_of(folder: str) -> RemotePaths | None:
    # Artifacts alone are in the store: tests in a working folder are the driver's.
    return None if BUILDING in Path(folder).parts else remote_paths_of(Path(folder))


def _with_tests_here(task: Task, remote: RemotePaths) -> Task:
    """Return the task with the path that its stored tests have on this node."""
    if not isinstance(task, CodeTask) or not isinstance(task.reference.tests, StoredTests):
        return task
    tests = replace(task.reference.tests, path=_file_here(task.reference.tests.path, remote))
    return replace(task, reference=replace(task.reference, tests=tests))


@cache
def _file_here(path: str, remote: RemotePaths) -> str:
    return str(remote.local_path(Path(path)))


# ---- model scorer ----
# Score models while they train, with an engine on GPUs of the Ray cluster that the learner leaves free.


_MAX_RESTARTS = 1  # of an engine while one model is scored; a score that fails is reported, and training continues


class RayScorer:
    """Starts an engine actor for each model, so that its GPUs are free in between; see `ModelScorer`."""

    def __init__(
        self, job: InlineEvalJob, plan: EnginePlan, *, seed: int, remote: RemotePaths | None, key: str
    ) -> None:
        """`home` is that of the stage: nodes with other disks get the models from its store."""
        self._job = job
        self._seed = seed
        self._remote = remote
        self._start = partial(start_planned, plan=plan, runtime=EnginesRuntime(max_restarts=_MAX_RESTARTS), key=key)
        self._lock = threading.Lock()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[dict[str, float]]] | None = None
        self._is_stopped = False

    def score(self, model: Path) -> dict[str, float]:
        """Return the scores of a model. Raise ResourceError if no engine starts, or after `stop`."""
        try:
            return asyncio.run(self._score(model))
        except asyncio.CancelledError:
            raise ResourceError("the scorer was stopped") from None

    def stop(self) -> None:
        """Cancel the scoring that runs, and start no more."""
        with self._lock:
            self._is_stopped = True
            # Called on another thread than the event loop's, to which asyncio's objects belong.
            if self._running is not None:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel)

    async def _score(self, model: Path) -> dict[str, float]:
        spec = replace(spec_of(self._job, model, seed=self._seed), remote=self._remote, is_sent=True)
        with open_inline_eval(self._job, build_cluster_judges, model, seed=self._seed) as inline_eval:
            task = asyncio.ensure_future(score_with(inline_eval, self._start, spec))
            with self._lock:
                if self._is_stopped:  # before there was a task to cancel
                    task.cancel()
                self._running = asyncio.get_running_loop(), task
            try:
                return await task
            finally:
                with self._lock:
                    self._running = None


@contextmanager
def ray_scorer(
    job: InlineEvalJob, folder: Path, *, plan: EnginePlan, seed: int, remote: RemotePaths | None, key: str
) -> Iterator[RayScorer]:
    """Yield a scorer of models with `folder`'s tokenizer; raise what `open_inline_eval` raises, before training."""
    with open_inline_eval(job, build_cluster_judges, folder, seed=seed):
        pass
    yield RayScorer(job, plan, seed=seed, remote=remote, key=key)
