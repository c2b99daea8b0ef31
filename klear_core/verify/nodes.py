"""Judge on several nodes: send each task to the least busy node, and to another if that node is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from klear_core.types import Outcome, Verdict
from klear_core.verify.work import CheckSandbox, Fault, Task

log = logging.getLogger(__name__)

MAX_TRIES = 3
"""A task counts as the cause once this many nodes were lost while they had it."""


class JudgeNode(Protocol):
    """The judging processes of one node."""

    name: str
    num_workers: int
    """Number of tasks that it works on at a time, to compare how busy nodes are."""

    def submit(self, task: Task) -> Future[Verdict | Fault]:
        """Return a future of the verdict or fault; a Fault of kind `lost` says that the node judges no more."""
        ...

    def close(self) -> None:
        """End the node's judging processes."""
        ...


@dataclass(eq=False, slots=True)
class _Slot:
    node: JudgeNode
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
        self._slots = [_Slot(node) for node in nodes]
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
        for slot in self._slots:
            slot.node.close()

    def _send(self, job: _Job) -> None:
        with self._lock:
            slot = self._least_busy()
            if slot is not None:
                slot.num_open += 1
        if slot is None:
            job.result.set_result(self._all_lost())
            return
        slot.node.submit(job.task).add_done_callback(partial(self._on_result, slot, job))

    def _all_lost(self) -> Fault:
        return Fault(kind="died", detail=f"all {len(self._slots)} judging nodes were lost")

    def _least_busy(self) -> _Slot | None:
        present = [slot for slot in self._slots if not slot.is_lost]
        # This task counts, too, so that of idle nodes the largest comes first; `min` returns the first of equals.
        return min(present, key=lambda slot: (slot.num_open + 1) / slot.node.num_workers, default=None)

    def _on_result(self, slot: _Slot, job: _Job, done: Future[Verdict | Fault]) -> None:
        result = done.result()
        with self._lock:
            slot.num_open -= 1
        if not (isinstance(result, Fault) and result.kind == "lost"):
            job.result.set_result(result)
            return
        self._note_loss(slot, result)
        if job.num_tries + 1 < MAX_TRIES:
            self._send(_Job(task=job.task, result=job.result, num_tries=job.num_tries + 1))
        else:
            detail = f"{MAX_TRIES} nodes were lost while they had this task; the last: {result.detail}"
            job.result.set_result(Fault(kind="died", detail=detail))

    def _note_loss(self, slot: _Slot, fault: Fault) -> None:
        with self._lock:
            is_first, slot.is_lost = not slot.is_lost, True
            num_left = sum(not slot.is_lost for slot in self._slots)
        if is_first:
            log.warning(
                "%s judges no more (%s); its tasks go to the %d nodes that are left",
                slot.node.name, fault.detail, num_left,
            )  # fmt: skip

    def _check_all(self, task: CheckSandbox, result: Future[Verdict | Fault]) -> None:
        """Resolve to the first fault, with the node's name, or to the backends' names once all nodes have passed.

        A node that is lost meanwhile is left out, unless it is the last.
        """
        with self._lock:
            slots = [slot for slot in self._slots if not slot.is_lost]
        if not slots:
            result.set_result(self._all_lost())
            return
        found: dict[str, Verdict | Fault] = {}

        def collect(slot: _Slot, done: Future[Verdict | Fault]) -> None:
            answer = done.result()
            if isinstance(answer, Fault) and answer.kind == "lost":
                self._note_loss(slot, answer)
            with self._lock:
                found[slot.node.name] = answer
                is_last = len(found) == len(slots)
            if is_last:
                result.set_result(_combined(found))

        for slot in slots:
            slot.node.submit(task).add_done_callback(partial(collect, slot))


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
