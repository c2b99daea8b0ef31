"""Send tasks to judging processes: start them, route to the least busy node, replace what dies."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Literal, Protocol

from klear_core.config.rewards import CustomReward
from klear_core.config.verify import CustomJudge, MathConfig, VerifyConfig, VerifyRuntime
from klear_core.cpus import usable_cpus
from klear_core.types import AnswerToJudge, CodeReference, JudgedAnswer, Outcome, Verdict
from klear_core.verify.math.text_compare import AlgebraComparison

# ---- work ----
# Define the messages between the caller and the judging processes.


@dataclass(frozen=True, slots=True, kw_only=True)
class MathTask:
    """Request to compare an answer with its references by algebra.

    For an answer without a box `comparison` is None, and math-verify's own extractors search `unboxed`. A trial of the
    references (`is_trial`) makes all comparisons, and passes if one can be read.
    """

    golds: tuple[str, ...]
    comparison: AlgebraComparison | None
    unboxed: str
    answer: str
    """The answer as the verdict quotes it."""
    cfg: MathConfig
    is_trial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTask:
    """Request to run a program on the tests that were chosen for it, or that the worker chooses from stored ones."""

    problem_id: str
    program: bytes | None
    """None tries the reference without a program: its checker on the expected outputs, or its assertions."""
    reference: CodeReference
    num_tests: int
    """Number of tests that were chosen."""
    left_out: tuple[int, ...] = ()
    """Numbers of those of them that failed in the reference's own trial; they are not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTrial(Verdict):
    """The verdict on a code reference alone: SCORED if one of its tests can be used."""

    unusable: tuple[tuple[int, str], ...]
    """Number and reason of each test whose checker raises on the expected output, or whose assertions cannot be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSandbox:
    """Request to check that the sandbox isolates programs; the detail of the verdict names the backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTask:
    """Request to call a reward or a judge of the user's own; the score of the verdict is the number that it returns."""

    function: CustomReward | CustomJudge
    digest: str
    """`source_digest` of the function's module when the stage began."""
    answer: JudgedAnswer | AnswerToJudge
    """The only argument: what a reward gets, or what a judge gets."""


Task = MathTask | CodeTask | CheckSandbox | UserTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The reason why a judging process gave no verdict.

    `broke_off`, `out_of_cpu` and `out_of_memory` are the doing of what was judged: it raised or crashed, or used up
    its CPU time or memory. All other kinds are the machine's: the wall clock ran out, the worker was killed, the
    judging process died, a worker raised outside of a judgement, was closed, was lost with its node, or has no sandbox
    that isolates.
    """

    kind: Literal[
        "broke_off",
        "out_of_cpu",
        "out_of_memory",
        "timed_out",
        "killed",
        "died",
        "raised",
        "closed",
        "lost",
        "no_sandbox",
    ]
    detail: str


# ---- client ----


_LOG = logging.getLogger(__name__)
_STOP_GRACE_S = 20.0  # ending all jails takes seconds on a loaded machine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Link:
    """One judging process, the connection to it, and the futures of unanswered tasks by task id."""

    process: subprocess.Popen[bytes]
    connection: Connection
    pending: dict[int, Future[Verdict | Fault]] = field(default_factory=dict)


class JudgeBackend(Protocol):
    """The judging processes of this machine, of a node, or of all nodes. Thread-safe; callbacks may call `submit`."""

    def submit(self, task: Task) -> Future[Verdict | Fault]:
        """Return a future of the task's verdict, or of the fault that left it without one.

        A Fault of kind `lost` says that a node judges no more.
        """
        ...

    def close(self) -> None:
        """End all judging processes."""
        ...


class JudgeClient:
    """Sends tasks to one `klear_core.verify.server` and resolves their futures. Thread-safe; `close` ends the process.

    Callbacks of the futures run in the reader thread and may call `submit`. The server keeps reading tasks even while
    nobody reads its answers, so that a submitter blocked by the lock or by a full socket cannot deadlock.
    """

    def __init__(self, cfg: VerifyConfig) -> None:
        self._cfg = cfg
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._link: _Link | None = None

    def submit(self, task: Task) -> Future[Verdict | Fault]:
        """Send a task; the future resolves to its verdict, or to a `Fault` if the judging process fails or is closed.

        Raise OSError if the process cannot be started.
        """
        future: Future[Verdict | Fault] = Future()
        future.set_running_or_notify_cancel()  # cannot be cancelled: the reader thread must be able to set its result
        with self._lock:
            link = self._link = self._link or self._start()
            task_id = next(self._ids)
            link.pending[task_id] = future
            # If the process is gone, the reader thread notices too and resolves all pending futures.
            with contextlib.suppress(OSError):
                link.connection.send((task_id, task))
        return future

    def close(self) -> None:
        """End the judging process and its descendants; pending futures resolve to a `Fault`."""
        with self._lock:
            link, self._link = self._link, None
            if link is not None:
                _shut_down(link.connection)  # under the lock: the reader takes it before it closes the connection
        if link is not None:
            _wait_or_kill(link.process)

    def _start(self) -> _Link:
        our_end, server_end = socket.socketpair()
        fd = server_end.fileno()
        # One thread for each worker: there is a worker for every core.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "klear_core.verify.server", str(fd)]
        process = subprocess.Popen(
            command, pass_fds=(fd,), stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
        server_end.close()
        link = _Link(process=process, connection=Connection(our_end.detach()))
        # The settings are the first message; see `server.main`.
        link.connection.send_bytes(self._cfg.model_dump_json().encode())
        threading.Thread(target=self._read, args=(link,), name="klear-judge-reader", daemon=True).start()
        return link

    def _read(self, link: _Link) -> None:
        try:
            while True:
                task_id, result = link.connection.recv()
                link.pending.pop(task_id).set_result(result)
        except (EOFError, OSError):
            self._on_end(link)

    def _on_end(self, link: _Link) -> None:
        with self._lock:  # once this block ends, no task can be added to link.pending
            is_closed = self._link is not link
            if not is_closed:
                self._link = None
                _wait_or_kill(link.process)
                status = link.process.returncode
                _LOG.warning(
                    "the judging process ended by itself (exit status %s); the next answer starts another", status
                )
        link.connection.close()
        if is_closed:
            fault = Fault(kind="closed", detail="the judges were closed")
        else:
            fault = Fault(kind="died", detail="the judging process ended")
        for future in link.pending.values():
            future.set_result(fault)


def _shut_down(connection: Connection) -> None:
    """Shut down both directions, so that both sides see the end; closing alone would not wake our reader."""
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side shut it down first


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def math_workers(runtime: VerifyRuntime) -> int:
    """Return the number of processes that compare math answers."""
    return runtime.math_workers or usable_cpus()


def code_workers(runtime: VerifyRuntime) -> int:
    """Return the number of programs that run at a time: two a core, because half of a jail's start is waiting."""
    return runtime.code_workers or 2 * usable_cpus()


# ---- nodes ----
# Judge on several nodes: send each task to the least busy node, and to another if that node is lost.


log = logging.getLogger(__name__)

MAX_TRIES = 3
"""A task counts as the cause once this many nodes were lost while they had it."""


@dataclass(eq=False, slots=True, kw_only=True)
class JudgeNode:
    """The judging processes of one node, and how busy they are."""

    name: str
    num_workers: int
    """Number of tasks that it works on at a time, to compare how busy nodes are."""
    backend: JudgeBackend
    num_open: int = 0
    is_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    task: Task
    result: Future[Verdict | Fault]
    num_tries: int = 0


class JudgeNodes:
    """A `JudgeBackend` over several nodes."""

    def __init__(self, nodes: Sequence[JudgeNode]) -> None:
        assert nodes, "judging needs a node"
        self._nodes = nodes
        self._lock = threading.Lock()

    def submit(self, task: Task) -> Future[Verdict | Fault]:
        """Send a task to the least busy node; see `JudgeBackend.submit`. The sandbox is checked on every node."""
        result: Future[Verdict | Fault] = Future()
        if isinstance(task, CheckSandbox):
            self._check_all(task, result)
        else:
            self._send(_Job(task=task, result=result))
        return result

    def close(self) -> None:
        """End all judging processes."""
        for node in self._nodes:
            node.backend.close()

    def _send(self, job: _Job) -> None:
        with self._lock:
            node = self._least_busy()
            if node is not None:
                node.num_open += 1
        if node is None:
            job.result.set_result(self._all_lost())
            return
        node.backend.submit(job.task).add_done_callback(partial(self._on_result, node, job))

    def _all_lost(self) -> Fault:
        return Fault(kind="died", detail=f"all {len(self._nodes)} judging nodes were lost")

    def _least_busy(self) -> JudgeNode | None:
        present = [node for node in self._nodes if not node.is_lost]
        # This task counts, too, so that of idle nodes the largest comes first; `min` returns the first of equals.
        return min(present, key=lambda node: (node.num_open + 1) / node.num_workers, default=None)

    def _on_result(self, node: JudgeNode, job: _Job, done: Future[Verdict | Fault]) -> None:
        result = done.result()
        with self._lock:
            node.num_open -= 1
        if not (isinstance(result, Fault) and result.kind == "lost"):
            job.result.set_result(result)
            return
        self._note_loss(node, result)
        if job.num_tries + 1 < MAX_TRIES:
            self._send(_Job(task=job.task, result=job.result, num_tries=job.num_tries + 1))
        else:
            detail = f"{MAX_TRIES} nodes were lost while they had this task; the last: {result.detail}"
            job.result.set_result(Fault(kind="died", detail=detail))

    def _note_loss(self, node: JudgeNode, fault: Fault) -> None:
        with self._lock:
            is_first, node.is_lost = not node.is_lost, True
            num_left = sum(not other.is_lost for other in self._nodes)
        if is_first:
            log.warning(
                "%s judges no more (%s); its tasks go to the %d nodes that are left",
                node.name, fault.detail, num_left,
            )  # fmt: skip

    def _check_all(self, task: CheckSandbox, result: Future[Verdict | Fault]) -> None:
        """Resolve to the first fault, with the node's name, or to the backends' names once all nodes have passed.

        A node that is lost meanwhile is left out, unless it is the last.
        """
        with self._lock:
            present = [node for node in self._nodes if not node.is_lost]
        if not present:
            result.set_result(self._all_lost())
            return
        found: dict[str, Verdict | Fault] = {}

        def collect(node: JudgeNode, done: Future[Verdict | Fault]) -> None:
            answer = done.result()
            if isinstance(answer, Fault) and answer.kind == "lost":
                self._note_loss(node, answer)
            with self._lock:
                found[node.name] = answer
                is_last = len(found) == len(present)
            if is_last:
                result.set_result(_combined(found))

        for node in present:
            node.backend.submit(task).add_done_callback(partial(collect, node))


def _combined(found: dict[str, Verdict | Fault]) -> Verdict | Fault:
    passed: set[str] = set()
    for name, answer in sorted(found.items()):
        if isinstance(answer, Verdict):
            passed.add(answer.detail)
        elif answer.kind != "lost":
            return Fault(kind=answer.kind, detail=f"{name}: {answer.detail}")
    if not passed:
        return Fault(kind="died", detail=f"all {len(found)} judging nodes were lost")
    return Verdict(outcome=Outcome.SCORED, score=1.0, detail=", ".join(sorted(passed)))
