"""Run the judging process, a separate program that holds the pebble pools.

The caller may use CUDA, Ray and a hundred threads, so it must not fork. This way it never does, and it imports neither
sympy nor pebble.

    python -m klear_core.verify.server FD        reads tasks from and sends verdicts to socket FD until it closes
"""

from __future__ import annotations

import contextlib
import functools
import gc
import resource
import signal
import sys
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from queue import SimpleQueue
from typing import assert_never

import pebble

from klear_core.config.verify import UserFunction, VerifyConfig
from klear_core.cpus import usable_cpus
from klear_core.errors import SandboxError
from klear_core.stopping import IS_LINUX, die_with_parent
from klear_core.types import Outcome, Verdict
from klear_core.verify import user_code
from klear_core.verify.client import CheckSandbox, CodeTask, Fault, MathTask, Task, UserTask, code_workers, math_workers
from klear_core.verify.code import judge as code_judge
from klear_core.verify.code.program import limits_for
from klear_core.verify.math import algebra as math_compare  # before the first fork: workers share the loaded sympy
from klear_core.verify.sandbox import selftest
from klear_core.verify.sandbox.jail import STARVED_FACTOR, adopt_orphans, end_orphans, forget_dead_jails
from klear_core.verify.sandbox.jail_command import Backend

_MATH_BACKSTOP_S = 10.0  # added to the wall-clock limit; the worker enforces its limit of CPU time itself
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit statuses of a worker that was killed from outside."""
_CODE_BACKSTOP_S = 120.0  # added to the limits of all tests together, which the jail enforces itself


def main() -> None:
    """Serve one caller until it closes its end of the socket."""
    # Blocked in Ray's processes, from one of which this may come; pebble ends its workers by it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    connection = Connection(int(sys.argv[1]))
    gc.collect()
    # Without this, a garbage collection in a worker would write to every object and so copy sympy's 27 MB per worker.
    gc.freeze()
    Server(connection, VerifyConfig.model_validate_json(connection.recv_bytes())).serve()


class Server:
    """Runs tasks in worker processes and sends results back as they finish, in any order."""

    def __init__(self, connection: Connection, cfg: VerifyConfig) -> None:
        self._connection = connection
        self._cfg = cfg
        self._replies: SimpleQueue[tuple[int, Verdict | Fault]] = SimpleQueue()
        self._pools: list[pebble.ProcessPool] = []
        self._user_pools: dict[tuple[str, int], pebble.ProcessPool] = {}
        """Workers of a user's function, by its name and limit of memory."""
        self._backend: Backend | None = None

    def serve(self) -> None:
        """Schedule incoming tasks until the caller closes its end or dies, then stop all workers."""
        # Pebble kills workers that take long to end their jails. Such jails then become children of this process.
        adopt_orphans(has_other_children=True)
        threading.Thread(target=self._write_replies, name="klear-judge-writer", daemon=True).start()
        try:
            while True:
                task_id, task = self._connection.recv()
                try:
                    future = self._schedule(task)
                except SandboxError as e:
                    self._replies.put((task_id, Fault(kind="no_sandbox", detail=str(e))))
                    continue
                future.add_done_callback(functools.partial(self._reply, task_id))
        except (EOFError, ConnectionError):
            for pool in self._pools:
                pool.stop()
                pool.join()
        end_orphans()
        forget_dead_jails()

    def _schedule(self, task: Task) -> Future[Verdict | Fault]:
        match task:
            case MathTask():
                wall_s = self._cfg.math.cpu_s * self._cfg.math.wall_factor + _MATH_BACKSTOP_S
                compared: Future[Verdict | Fault] = self._math_pool.schedule(
                    math_compare.compare, (task,), timeout=wall_s
                )
                return compared
            case CodeTask():
                self._checked_backend()
                judged: Future[Verdict | Fault] = self._code_pool.schedule(
                    _judge_code, (task,), timeout=_code_timeout_s(task, self._cfg)
                )
                return judged
            case UserTask():
                # The worker enforces the call's own limit; this one is for an import that hangs.
                wall_s = user_code.longest_s(task.function.timeout_s) + user_code.IMPORT_TIMEOUT_S
                computed: Future[Verdict | Fault] = self._user_pool(task.function).schedule(
                    user_code.compute, (task,), timeout=wall_s
                )
                return computed
            case CheckSandbox():
                done: Future[Verdict | Fault] = Future()
                done.set_result(Verdict(outcome=Outcome.SCORED, score=1.0, detail=self._checked_backend()))
                return done
            case _:
                assert_never(task)

    def _checked_backend(self) -> Backend:
        if self._backend is None:
            self._backend = selftest.checked_backend(self._cfg)
        return self._backend

    @functools.cached_property
    def _math_pool(self) -> pebble.ProcessPool:
        runtime = self._cfg.runtime
        return self._keep(
            pebble.ProcessPool(
                max_workers=math_workers(runtime),
                max_tasks=runtime.tasks_per_worker,
                initializer=_start_math_worker,
                initargs=(self._cfg.math.memory_mb,),
            )
        )

    @functools.cached_property
    def _code_pool(self) -> pebble.ProcessPool:
        runtime = self._cfg.runtime
        return self._keep(
            pebble.ProcessPool(
                max_workers=code_workers(runtime),
                max_tasks=runtime.tasks_per_worker,
                initializer=_start_code_worker,
                initargs=(self._checked_backend(), self._cfg),
            )
        )

    def _user_pool(self, cfg: UserFunction) -> pebble.ProcessPool:
        """Return the workers of one function alone, so that memory which another one keeps does not count for it."""
        key = cfg.function, cfg.memory_mb
        if key not in self._user_pools:
            runtime = self._cfg.runtime
            self._user_pools[key] = self._keep(
                pebble.ProcessPool(
                    max_workers=runtime.reward_workers or usable_cpus(),
                    max_tasks=runtime.tasks_per_worker,
                    initializer=_start_user_worker,
                    initargs=(cfg.memory_mb,),
                )
            )
        return self._user_pools[key]

    def _keep(self, pool: pebble.ProcessPool) -> pebble.ProcessPool:
        self._pools.append(pool)
        return pool

    def _reply(self, task_id: int, future: Future[Verdict | Fault]) -> None:
        self._replies.put((task_id, outcome_of(future)))

    def _write_replies(self) -> None:
        """Send results to the caller; runs in its own thread.

        A caller that does not read its replies must block neither pebble's loops nor `serve`. It may itself be waiting
        for `serve` to read its next task.
        """
        while True:
            try:
                self._connection.send(self._replies.get())
            except ConnectionError:
                return  # the caller is gone; `serve` notices too


def outcome_of(future: Future[Verdict | Fault]) -> Verdict | Fault:
    """Return the verdict of a worker's task, or the fault that left it without one.

    A worker that the kernel ended for its CPU time, or that crashed or exited, did so over what it judged. One that was
    killed from outside, or at the wall clock, did not.
    """
    if future.cancelled():
        return Fault(kind="closed", detail="the judging process is stopping")
    error = future.exception()
    match error:
        case None:
            return future.result()
        case TimeoutError():
            return Fault(kind="timed_out", detail="a worker was killed at its wall clock")
        case pebble.ProcessExpired() if error.exitcode == -user_code.RAN_OUT_OF_CPU:
            return Fault(kind="out_of_cpu", detail="a worker was killed at its limit of CPU time")
        case pebble.ProcessExpired() if error.exitcode in (-user_code.RAN_OUT, -signal.SIGALRM):  # SIGALRM: its own
            return Fault(kind="timed_out", detail="the function ran out of time, and its worker was killed")
        case pebble.ProcessExpired() if error.exitcode == user_code.OUT_OF_MEMORY:
            return Fault(kind="out_of_memory", detail="the function ran out of memory, and its worker ended")
        case pebble.ProcessExpired() if error.exitcode in _KILLED:
            detail = "a worker was killed: perhaps this machine has too little memory"
            return Fault(kind="killed", detail=f"{detail}, or a function ran out of time with all signals blocked")
        case pebble.ProcessExpired():
            return Fault(kind="broke_off", detail=f"a worker died ({error})")
        case _:
            return Fault(kind="raised", detail=f"{type(error).__name__}: {error}"[:500])


def _code_timeout_s(task: CodeTask, cfg: VerifyConfig) -> float:
    longest_test_s = limits_for(task.reference, cfg).wall_s * STARVED_FACTOR
    return task.num_tests * longest_test_s + _CODE_BACKSTOP_S


def _start_math_worker(memory_mb: int) -> None:
    _die_with_parent()
    if IS_LINUX:  # macOS refuses the limit
        limit = memory_mb << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _start_user_worker(memory_mb: int) -> None:
    _die_with_parent()
    user_code.limit_memory(memory_mb)
    # If the machine runs out of memory, the kernel kills this process first, not the stage.
    with contextlib.suppress(OSError):  # where /proc is read-only, the kernel chooses by size alone
        Path("/proc/self/oom_score_adj").write_text("1000")


_JUDGES: list[code_judge.CodeJudge] = []
"""The one judge of a code worker. It is global because its jails outlive a task and pebble keeps no state for tasks."""


def _start_code_worker(backend: Backend, cfg: VerifyConfig) -> None:
    _die_with_parent()
    adopt_orphans(has_other_children=False)
    judge = code_judge.CodeJudge(backend, cfg)
    _JUDGES[:] = [judge]
    Finalize(judge, judge.close, exitpriority=10)  # runs however pebble ends the worker: recycled, stopped, pipe closed


def _judge_code(task: CodeTask) -> Verdict | Fault:
    return _JUDGES[0].judge(task)


def _die_with_parent() -> None:
    """Have the kernel kill this worker when the server dies; forbid core files."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
