"""Run learner ranks as Ray actors at planned places, relay what they report, and name those that die."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, TypeVar, assert_never

import ray
from ray.exceptions import OutOfMemoryError

from klear_core import stopping
from klear_core.cluster.nodes import ray_nodes, rendezvous_at
from klear_core.cluster.placement import Placement, Room, cpu_refusal, is_too_large_for_cpu, place_ranks
from klear_core.cluster.rank_actors import LOGGER, Logged, Progressed, RankActor, Report, Reports
from klear_core.cluster.ray_calls import LOST, START_S, Plan, Reservation, Restarts, awaited, cause_of, lost_nodes
from klear_core.config.train import TrainRuntime
from klear_core.errors import GpuMemoryError, KlearError, ResourceError, TrainingError
from klear_core.metrics import Heartbeat, Telemetry
from klear_core.stopping import StoppedEarly
from klear_core.train.distributed import Body
from klear_core.waits import Silence, now, span

_POLL_S = 0.5
"""Seconds between two polls of the ranks' reports, plus 0.01 for each rank: a thousand ranks are polled every 10 s."""
_GRACE_S = 60.0
"""Longest wait for an answer of the other ranks after a rank's RuntimeError.

torch raises one for a lost peer too. A rank that answers is alive, so then the error is that rank's own.
"""
_OTHERS_S = 1.0
"""Seconds to wait for further deaths after the first: when a node dies, all of its ranks die."""
_MOST_NAMED = 8  # most ranks that an error names; there may be a thousand
_RELEASE_S = 10.0  # longest wait; a running Ray needs milliseconds
_GPU_STALL_S = 600.0
"""Longest silence of learner ranks on GPUs, whatever `stall_timeout_s` says: a micro-batch takes seconds there."""
_STACKS_S = 15.0  # wait for the stacks of ranks that have stalled
_REPORTS = "reports"
_NO_GPU_MEMORY = re.compile(r"out of memory|_STATUS_ALLOC_FAILED", re.IGNORECASE)

log = logging.getLogger(__name__)


class RanksLost(TrainingError):  # noqa: N818  # it is an event to recover from before it is an error
    """Learner ranks died; the message names them with their node, process id and reason."""

    def __init__(self, message: str, nodes: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.nodes = nodes
        """Ids of the nodes that died with their ranks; empty if the processes alone died."""


class Gang:
    """All learner ranks of a stage, one actor each. A process group cannot replace a rank: all start anew, or none."""

    def __init__(
        self,
        actor: type[RankActor],
        runtime: TrainRuntime,
        *,
        gpus_per_rank: float,
        telemetry: Telemetry,
        plan: Plan | None = None,
    ) -> None:
        """`plan` chooses the places of ranks and engines; None: the ranks have the cluster to themselves."""
        self.ranks: list[Any] = []
        """Handles of the actors; empty before `start`."""
        self._runtime = _with_device(runtime, gpus_per_rank)
        self._has_gpus = gpus_per_rank > 0
        plan = plan or (lambda nodes: Placement(ranks=tuple(place_ranks(Room.of(nodes), self._runtime, gpus_per_rank))))
        self._reservation = Reservation(
            plan,
            width=self._runtime.context_parallel,
            threads_per_rank=self._runtime.num_threads,
            wait_s=runtime.wait_for_nodes_s,
        )
        self._telemetry = telemetry
        # Do not let Ray restart ranks: a new one must first load model and checkpoint, together with all others.
        # Reserve no CPUs for the process, because its threads are those of the placement group's bundle.
        actor_type = ray.remote(num_cpus=0, num_gpus=gpus_per_rank, max_restarts=0, concurrency_groups={_REPORTS: 1})
        self._actor_type = actor_type(actor)
        self._is_asked_to_stop = False
        self._names: list[str] = []
        """Names of the ranks, with node and process id once these are known."""
        self._polls: dict[int, asyncio.Future[Reports]] = {}
        """Calls for reports that a rank has not answered yet."""
        self._progress: dict[int, Heartbeat] = {}
        """What each rank has done, as far as it has reported."""
        self._warnings: set[str] = set()
        """Warnings of ranks that were logged already: all ranks warn of the same things."""

    async def start(self) -> None:
        """Reserve the places, start all ranks and join them in a process group.

        Raise RanksLost if one dies meanwhile, ResourceError if the cluster has no room.
        """
        await self.reserve()
        places = self._reservation.placement.ranks
        strategies = map(self._reservation.bundle_of, range(len(places)))
        self.ranks = [self._actor_type.options(scheduling_strategy=strategy).remote() for strategy in strategies]
        # Named already here, for errors of ranks that die before their process ids are known.
        self._names = [f"learner rank {i} (node {place.node.name})" for i, place in enumerate(places)]
        timeout_s = START_S
        pids = await self.wait([rank.process_id.remote() for rank in self.ranks], "start", stall_timeout_s=timeout_s)
        named = enumerate(zip(places, pids, strict=True))
        self._names = [f"learner rank {i} (node {place.node.name}, pid {pid})" for i, (place, pid) in named]
        address = self.ranks[0].__ray_call__.remote(_rendezvous_address)
        (init_method,) = await self.wait([address], "find a port", stall_timeout_s=timeout_s)
        level = logging.getLogger(LOGGER).getEffectiveLevel()
        joins = [rank.join.remote(self._runtime, i, init_method, level) for i, rank in enumerate(self.ranks)]
        await self.wait(joins, "join the process group", stall_timeout_s=timeout_s)

    async def wait(self, calls: Sequence[Awaitable[Any]], what: str, *, stall_timeout_s: float) -> list[Any]:
        """Return the results of one call of each rank; meanwhile relay what the ranks report.

        Raise StoppedEarly if the ranks stop on request, RanksLost if one has died, GpuMemoryError if a rank's GPU is
        too small, another exception of a rank as it is, or TrainingError if no rank has done anything for
        `stall_timeout_s`; the log then has all ranks' stacks.
        """
        tasks = [asyncio.ensure_future(awaited(call)) for call in calls]
        seen, deadline = dict(self._progress), now() + stall_timeout_s
        began, silence = time.monotonic(), Silence()
        if len(tasks) > 1:  # the span of the learner ends with the last of them
            for name, task in zip(self._names, tasks, strict=False):
                task.add_done_callback(partial(_trace_rank, name, what, began))
        try:
            while True:
                poll_s = min(_POLL_S + 0.01 * len(self.ranks), max(0.0, deadline - now()))
                _, pending = await asyncio.wait(tasks, timeout=poll_s, return_when=asyncio.FIRST_EXCEPTION)
                await self._relay_reports()
                failed = _failures(tasks)
                if stopping.is_asked():
                    if failed:  # a rank has stopped as well, or the signal went to the ranks, too
                        raise StoppedEarly(f"the learner was to {what}") from next(iter(failed.values()))
                    self._ask_to_stop()
                if failed:
                    raise await self._cause(failed, tasks)
                if not pending:
                    # Once more: the reports above may have been asked for before the calls ended.
                    await self._relay_reports()
                    return [task.result() for task in tasks]
                if seen != self._progress:
                    seen, deadline = dict(self._progress), now() + stall_timeout_s
                silent_s = now() - (deadline - stall_timeout_s)
                silence.check(silent_s, lambda: f"the learner to {what}; last done: {self._last_done()}")
                if now() >= deadline:
                    await self._log_stacks()
                    raise TrainingError(
                        f"stalled: no progress for {stall_timeout_s:g} s while the learner was to {what}; last done: "
                        f"{self._last_done()}; the log has the stack of every rank"
                    )
        finally:
            span("learner", what, began, time.monotonic())
            # Stops waiting; Ray goes on with the calls. No effect on those that are done.
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """Kill all ranks and release their places; do not wait long if a signal has already ended Ray."""
        self.kill()
        # SIGTERM goes to all processes of a session or container, Ray's own too. A call to a Ray that is gone blocks
        # for a minute, and then ends this process with an error. What is not released ends with the driver's job.
        releasing = threading.Thread(target=self._reservation.release, daemon=True)
        releasing.start()
        releasing.join(_RELEASE_S)

    def kill(self) -> None:
        """Kill all ranks, and keep their places for others."""
        for rank in self.ranks:
            ray.kill(rank, no_restart=True)
        for poll in self._polls.values():
            poll.cancel()
        self.ranks, self._polls, self._progress = [], {}, {}

    async def reserve(self) -> None:
        """Reserve the places of the ranks, or keep those of an earlier start."""
        await self._reservation.hold()

    async def engine_options(self, index: int) -> dict[str, Any]:
        """Return where Ray shall start an engine of the plan; see `Reservation.engine_options`."""
        return await self._reservation.engine_options(index)

    def _ask_to_stop(self) -> None:
        """Pass on the request to stop, once to each rank."""
        if not self._is_asked_to_stop:
            self._is_asked_to_stop = True
            for rank in self.ranks:
                rank.stop.options(concurrency_group=_REPORTS).remote()

    async def _relay_reports(self) -> None:
        """Log what the ranks have reported so far, without waiting for a rank that is slow to answer."""
        self._ask_for_reports()
        await asyncio.wait(self._polls.values(), timeout=_POLL_S)
        for index in [i for i, poll in self._polls.items() if poll.done()]:
            poll = self._polls.pop(index)
            if poll.exception() is None:  # a death is found by the call that this rank was to answer
                reports = poll.result()
                self._progress[index] = reports.progress
                for report in reports.items:
                    self._relay(index, report)

    def _ask_for_reports(self) -> None:
        for index, rank in enumerate(self.ranks):
            if index not in self._polls:
                asked = rank.take_reports.options(concurrency_group=_REPORTS).remote()
                self._polls[index] = asyncio.ensure_future(awaited(asked))

    @property
    def stall_s(self) -> float:
        """Return the longest silence of ranks that train."""
        limit_s = self._runtime.stall_timeout_s
        return min(limit_s, _GPU_STALL_S) if self._has_gpus else limit_s

    async def _log_stacks(self) -> None:
        """Log what every thread of every rank is doing; ranks that do not answer are named."""
        asked = [rank.stacks.options(concurrency_group=_REPORTS).remote() for rank in self.ranks]
        polls = [asyncio.ensure_future(awaited(call)) for call in asked]
        await asyncio.wait(polls, timeout=_STACKS_S)
        for index, poll in enumerate(polls):
            has_answered = poll.done() and poll.exception() is None
            stacks = poll.result() if has_answered else "it does not answer: its process is stopped or in native code"
            log.error("%s, when it had stalled:\n%s", self._name(index), stacks)
            poll.cancel()

    def _last_done(self) -> str:
        """Return what each rank did last, those that did least first: others wait for them."""
        ordered = sorted(self._progress.items(), key=lambda item: (item[1].count, item[0]))
        named = [f"{self._name(i)}: {progress.latest}" for i, progress in ordered[:_MOST_NAMED]]
        more = [f"and {len(ordered) - _MOST_NAMED} more"] if len(ordered) > _MOST_NAMED else []
        return "; ".join([*named, *more]) or "no rank has answered"

    def _name(self, index: int) -> str:
        return self._names[index] if index < len(self._names) else f"learner rank {index}"

    def _relay(self, index: int, report: Report) -> None:
        match report:
            case Logged(is_added=True):
                self._telemetry.add(report.metrics, step=report.step)
            case Logged():
                self._telemetry.log(report.metrics, step=report.step)
            case Progressed():
                self._telemetry.progress(report.done, report.total, report.note)
            case logging.LogRecord():
                message = report.getMessage()
                if index > 0:
                    if message in self._warnings:
                        return
                    report.msg = f"{self._name(index)}: {message}"  # no arguments: the rank has filled them in
                self._warnings.add(message)
                logging.getLogger(report.name).handle(report)
            case _:
                assert_never(report)

    async def _cause(self, failed: dict[int, BaseException], tasks: Sequence[asyncio.Future[Any]]) -> BaseException:
        """Return what to raise for these failed calls, by rank: the death of ranks, or the first error of one."""
        if out_of_memory := self._out_of_memory(failed):  # before the others, which wait for this rank and fail, too
            return out_of_memory
        lost = {i: error for i, error in failed.items() if isinstance(error, LOST)}
        errors = [cause_of(error) for error in failed.values() if not isinstance(error, LOST)]
        # An error of ours, or of a type that torch does not raise for a lost peer, is the rank's own.
        own = [error for error in errors if isinstance(error, KlearError) or not isinstance(error, RuntimeError)]
        if own and not lost:
            return own[0]
        # torch raises a RuntimeError for a lost peer: ask whether all ranks are still there.
        lost |= await self._dead_ranks()
        if not lost:  # the rank that was waited for may have failed meanwhile
            return self._out_of_memory(_failures(tasks)) or errors[0]
        await asyncio.wait(tasks, timeout=_OTHERS_S)
        lost |= {i: error for i, error in _failures(tasks).items() if isinstance(error, LOST)}
        named = [f"{self._name(i)} died: {_reason(error)}" for i, error in sorted(lost.items())]
        cause = next(iter(lost.values()))
        # The next start must not plan on a node that is dead, which Ray notices only after some seconds.
        places = self._reservation.placement.ranks
        found = RanksLost("; ".join(named), await lost_nodes({places[i].node.node_id for i in lost if i < len(places)}))
        found.__cause__ = cause
        return found

    def _out_of_memory(self, failed: dict[int, BaseException]) -> GpuMemoryError | None:
        """Return the error of the first of these ranks whose GPU was too small, if there is one."""
        for index, error in failed.items():
            if _is_out_of_gpu_memory(cause_of(error)):
                return _named_gpu_memory(self._name(index), cause_of(error), self._runtime)
        return None

    async def _dead_ranks(self) -> dict[int, BaseException]:
        """Wait until every rank has answered or is known to be dead; return the errors of the dead."""
        self._ask_for_reports()
        polls = dict(self._polls)  # answered on a thread of its own, also by a rank that is in a long call
        await asyncio.wait(polls.values(), timeout=_GRACE_S)
        dead: dict[int, BaseException] = {}
        for index, poll in polls.items():
            error = poll.exception() if poll.done() else None
            if isinstance(error, LOST):
                dead[index] = error
        return dead


def _trace_rank(name: str, what: str, began: float, _: asyncio.Future[Any]) -> None:
    span(name, what, began, time.monotonic())


def _failures(tasks: Sequence[asyncio.Future[Any]]) -> dict[int, BaseException]:
    """Return the errors of the calls that have failed, by rank."""
    failed = {}
    for index, task in enumerate(tasks):
        error = task.exception() if task.done() else None
        if error is not None:
            failed[index] = error
    return failed


def _is_out_of_gpu_memory(error: BaseException) -> bool:
    """Return whether nothing could be allocated on a GPU: by torch, the driver, NCCL, cuBLAS or cuDNN.

    By words, because only torch's own allocator has a type for it. On a CPU torch says "can't allocate memory".
    """
    return isinstance(error, RuntimeError) and _NO_GPU_MEMORY.search(str(error)) is not None


def _named_gpu_memory(rank: str, error: BaseException, runtime: TrainRuntime) -> GpuMemoryError:
    first = re.split(r"\. |\n", str(error).strip())[0]
    found = GpuMemoryError(
        f"{rank} ran out of GPU memory ({first}) with tokens_per_microbatch = {runtime.tokens_per_microbatch}, "
        f"context_parallel = {runtime.context_parallel} and num_workers = {runtime.num_workers}"
    )
    found.__cause__ = error
    return found


def _with_device(runtime: TrainRuntime, gpus_per_rank: float) -> TrainRuntime:
    """Return the settings with the planned device in place of `auto`: a rank must not choose another by itself."""
    if runtime.device != "auto":
        return runtime
    return runtime.model_copy(update={"device": "cuda" if gpus_per_rank else "cpu"})


def _reason(error: BaseException) -> str:
    """Return why an actor died, from the text that Ray has for it."""
    text = " ".join(str(error).split())
    if isinstance(error, OutOfMemoryError):
        return "Ray killed it because its node ran out of memory; fewer ranks, engines or judges there need less"
    node = re.search(r"its node has died\. Node Id: \w+ (.*)", text)
    if node:
        return f"its node died ({node[1]})"
    worker = re.search(r"Worker exit detail: (.*?)(?: Some common causes| There are some|$)", text)
    return worker[1] if worker else text


def _rendezvous_address(_actor: RankActor) -> str:
    """Return an address on the actor's node for the process group to start from; runs in the actor."""
    import klear_core.train.distributed  # noqa: F401  # slow, so before a port is picked that others may take

    return rendezvous_at(ray.util.get_node_ip_address())


# ---- run ranks ----
# Run a function on all learner ranks as Ray actors: the `RunRanks` of SFT and of `klear rl replay`.


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
                results = await gang.wait(runs, "train", stall_timeout_s=gang.stall_s)
            except RanksLost as lost:
                restarts.count("the learner", lost, lost.nodes)
                gang.kill()
            else:
                return results[0]  # the other ranks return None
    finally:
        gang.close()
