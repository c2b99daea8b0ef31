"""Send tasks to judging processes: what is tried again, and whose fault a judgement was that broke off."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from concurrent.futures import Future

from klear_core.config.verify import CustomJudge, VerifyConfig
from klear_core.errors import JudgeError, SandboxError
from klear_core.types import FAILED_ON_ANSWER, Outcome, Verdict
from klear_core.verify.blame import PASSED, probes_of
from klear_core.verify.client import CodeTask, Fault, JudgeBackend, JudgeClient, MathTask, Task, UserTask
from klear_core.verify.user_code import longest_s, memory_message

_OF_THE_ANSWER = ("broke_off", "out_of_cpu", "out_of_memory")
"""Kinds of faults over what was judged."""
_TRIED_AGAIN = ("died", "killed")
"""Kinds of faults that a second try may not have."""
_TRIED_AGAIN_OF_USERS = ("killed", "timed_out")
"""Such kinds in a worker of a user's function, which may also be over the answer. A judging process that died is not:
it judges many answers at a time."""
_FIRST_PROBES = 2
"""Number of the probes of a user's function that are always tried."""
_NO_PROBE_WORKED = (
    "so it was with each of our {} answers. A judge returns 0 for an answer that it cannot read; one that raises needs "
    "a right answer under `answer` of its reference's value"
)


class JudgeCalls:
    """Verdicts on tasks, whatever becomes of the processes that compute them. Thread-safe."""

    def __init__(self, cfg: VerifyConfig, backend: JudgeBackend | None) -> None:
        """`backend` computes the verdicts: by default a process of its own on this machine, which always calls the
        user's functions.
        """
        # The user's modules are in the working directory of this machine, which other nodes need not have.
        self._local = JudgeClient(cfg)
        self._client: JudgeBackend = self._local if backend is None else backend

    def close(self) -> None:
        """End all judging processes."""
        self._client.close()
        self._local.close()

    def submit(self, prepared: Verdict | Task, *, is_probe: bool = False) -> Future[Verdict]:
        """Return a future of the verdict, or of the JudgeError or SandboxError that left none.

        The fault of a probe is not blamed on anybody.
        """
        if isinstance(prepared, Verdict):
            return done_verdict(prepared)
        verdict: Future[Verdict] = Future()
        # From now on it cannot be cancelled: a cancelled caller stops waiting, and the verdict still comes.
        verdict.set_running_or_notify_cancel()

        def resolve(fault: Fault) -> None:
            blamed = _failed(fault) if is_probe else self._blame(prepared, fault)
            blamed.add_done_callback(lambda done: pass_on(verdict, done))

        # A task over which two processes die is taken for the cause, and would end every further one.
        self._run(prepared, verdict, resolve, tries_left=1)
        return verdict

    def _run(self, task: Task, verdict: Future[Verdict], on_break: Callable[[Fault], None], *, tries_left: int) -> None:
        """Submit a task and resolve `verdict` with its result; submit it again if the judging process died.

        A user's function that ran out of time is also tried again: a busy machine, or what it asks, may have been slow.
        `on_break` is called instead if the judgement broke off over what was judged.
        """
        is_users = isinstance(task, UserTask)
        tried_again = _TRIED_AGAIN + (_TRIED_AGAIN_OF_USERS if is_users else ())
        of_the_answer = _OF_THE_ANSWER + (_TRIED_AGAIN_OF_USERS if is_users else ())

        def resolve(done: Future[Verdict | Fault]) -> None:
            result = done.result()
            match result:
                case Verdict():
                    verdict.set_result(result)
                case Fault(kind=kind) if tries_left > 0 and kind in tried_again:
                    self._run(task, verdict, on_break, tries_left=tries_left - 1)
                case Fault(kind="no_sandbox"):
                    verdict.set_exception(SandboxError(result.detail))
                case Fault(kind=kind) if kind in of_the_answer:
                    on_break(result)
                case _:
                    _failed(result).add_done_callback(lambda last: pass_on(verdict, last))

        try:
            client = self._local if is_users else self._client
            client.submit(task).add_done_callback(resolve)
        except OSError as e:
            verdict.set_exception(JudgeError(f"the judging process cannot be started: {e}"))

    def _blame(self, task: Task, fault: Fault) -> Future[Verdict]:
        """Return a future of the verdict on a judgement that broke off: whose fault it was.

        Our references pass their trial before an answer is judged by them, so that the answer is to blame. A judge of
        the user's may depend on something outside, such as a server: it is tried on answers of ours each time, which
        also tells a machine or server that is away from an answer over which the function waits or dies.
        """
        if isinstance(task, UserTask) and fault.kind == "out_of_memory":
            fault = dataclasses.replace(fault, detail=memory_message(task.function))
        match task:
            case MathTask(is_trial=True) | CodeTask(program=None):
                return done_verdict(Verdict(outcome=Outcome.BAD_REFERENCE, score=0.0, detail=fault.detail))
            case MathTask():
                detail = f"answer {task.answer} is wrong: {fault.detail}, where the reference itself is"
                return done_verdict(Verdict(outcome=Outcome.SCORED, score=0.0, detail=detail))
            case UserTask():
                return self._blame_user_function(task, fault)
            case _:
                return _failed(fault)

    def _blame_user_function(self, task: UserTask, fault: Fault) -> Future[Verdict]:
        """Try a user's judge or reward on answers of ours; if it works on one, the model's answer is to blame."""
        verdict: Future[Verdict] = Future()
        verdict.set_running_or_notify_cancel()

        def follow(done: Future[Verdict]) -> None:
            if done.exception() is None and done.result().outcome is Outcome.SCORED:
                is_judge = isinstance(task.function, CustomJudge)
                what, score = ("wrong: the judge", 0.0) if is_judge else ("the reward", FAILED_ON_ANSWER)
                detail = f"{what} works on another answer, but on this one it failed: {fault.detail}"
                verdict.set_result(Verdict(outcome=Outcome.SCORED, score=score, detail=detail))
            else:
                _failed(fault).add_done_callback(lambda last: pass_on(verdict, last))

        self.probe(task).add_done_callback(follow)
        return verdict

    def probe(self, task: UserTask) -> Future[Verdict]:
        """Return a future that is PASSED if a user's function works on an answer of ours, else says why not.

        Once our first two answers, a number and a right one, have failed, others are tried for as long as one call may
        take: a function that waits for something outside fails slowly on each.
        """
        verdict: Future[Verdict] = Future()
        verdict.set_running_or_notify_cancel()
        probes = probes_of(task)
        failed: list[Verdict] = []
        ends_at = math.inf

        def follow(done: Future[Verdict]) -> None:
            nonlocal ends_at
            if done.exception() is not None:
                pass_on(verdict, done)
                return
            if done.result().outcome is Outcome.SCORED:
                verdict.set_result(PASSED)
                return
            failed.append(done.result())
            if len(failed) == _FIRST_PROBES:
                ends_at = time.monotonic() + longest_s(task.function.timeout_s)
            is_late = time.monotonic() > ends_at or all(one.outcome is Outcome.TIMED_OUT for one in failed)
            if probes and (len(failed) < _FIRST_PROBES or not is_late):
                self.submit(probes.pop(0), is_probe=True).add_done_callback(follow)
            else:
                detail = f"{failed[0].detail}; {_NO_PROBE_WORKED.format(len(failed))}"
                verdict.set_result(dataclasses.replace(failed[0], detail=detail))

        self.submit(probes.pop(0), is_probe=True).add_done_callback(follow)
        return verdict


def _failed(fault: Fault) -> Future[Verdict]:
    outcome = Outcome.TIMED_OUT if fault.kind in ("timed_out", "out_of_cpu") else Outcome.JUDGE_FAILED
    return done_verdict(Verdict(outcome=outcome, score=0.0, detail=fault.detail))


def pass_on(verdict: Future[Verdict], done: Future[Verdict]) -> None:
    """Resolve `verdict` as the other future was."""
    error = done.exception()
    if error is not None:
        verdict.set_exception(error)
    else:
        verdict.set_result(done.result())


def done_verdict(verdict: Verdict) -> Future[Verdict]:
    """Return a future of a verdict that is known already."""
    future: Future[Verdict] = Future()
    future.set_result(verdict)
    return future
