"""Judge a response to a problem, from any thread or event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Protocol, Self, assert_never

from klear_core.artifacts.records import load_tests
from klear_core.config.rl import CustomReward
from klear_core.config.verify import VerifyConfig, VerifyRuntime, source_digest
from klear_core.cpus import usable_cpus
from klear_core.errors import ConfigError, JudgeError, SandboxError
from klear_core.prompts import NoAnswer, find_answer_text
from klear_core.types import (
    AnswerToJudge,
    AssertTests,
    CallTests,
    CodeReference,
    CustomReference,
    JudgedAnswer,
    MathReference,
    Outcome,
    Problem,
    StdinTests,
    StoredTests,
    UnverifiableReference,
    Verdict,
)
from klear_core.verify.client import CheckSandbox, CodeTask, Fault, JudgeClient, MathTask, Task, UserTask
from klear_core.verify.code.program import check_size, chosen_tests, find_program, num_chosen, reference_fault
from klear_core.verify.math.answer_text import boxed_texts, find_answer, quoted
from klear_core.verify.math.rules import compared_texts, decide, unboxed_verdict, usable_references
from klear_core.verify.user_code import memory_message


class JudgeBackend(Protocol):
    """Computes verdicts. Thread-safe; callbacks of the futures may call `submit`."""

    def submit(self, task: Task) -> Future[Verdict | Fault]:
        """Return a future of the task's verdict, or of the fault that left it without one."""
        ...

    def close(self) -> None:
        """End all judging processes."""
        ...


class JudgePool:
    """Judges answers. Thread-safe; worker processes start with the first answer that needs one and end at `close`."""

    def __init__(self, cfg: VerifyConfig, backend: JudgeBackend | None = None) -> None:
        """Hash the sources of the user's judges. Raise ConfigError if one is missing.

        `backend` computes the verdicts: by default a process of its own on this machine, which always calls the user's
        functions.
        """
        self.cfg = cfg
        self._judges = {judge.name: (judge, source_digest(judge.module)) for judge in cfg.judges}
        self.health = JudgeHealth(max_failed_frac=cfg.max_failed_frac, min_failed_count=cfg.min_failed_count)
        # The user's modules are in the working directory of this machine, which other nodes need not have.
        self._local = JudgeClient(cfg)
        self._client: JudgeBackend = self._local if backend is None else backend

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all judging processes."""
        self._client.close()
        self._local.close()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return warnings about the judging, to be stored with the stage's artifact."""
        if self.cfg.sandbox == "rlimits-only":
            return ('untrusted programs ran with limits only, without isolation (verify.sandbox = "rlimits-only")',)
        return ()

    def check_sandbox(self) -> str:
        """Check that the sandbox isolates programs and return its name. Call this before spending compute.

        Raise SandboxError, which says what is missing.
        """
        return self._submit(CheckSandbox()).result().detail

    def prepare(self, problems: Iterable[Problem]) -> tuple[str, ...]:
        """Check the sandbox, if there is a code problem, before compute is spent; return `notes`.

        Raise SandboxError, which says what is missing, and ConfigError for a reference whose judge is unknown.
        """
        has_code = False
        for problem in problems:
            if isinstance(problem.reference, CustomReference) and problem.reference.judge not in self._judges:
                raise ConfigError(
                    f"problem {problem.problem_id} of {problem.source}: {self._unknown(problem.reference)}"
                )
            has_code |= isinstance(problem.reference, CodeReference)
        if not has_code:
            return ()
        self.check_sandbox()
        return self.notes

    def judge(self, problem: Problem, response: str) -> Verdict:
        """Return the verdict on a complete model output, think tags included.

        Raise JudgeError or SandboxError only, which are failures of the judge or sandbox.
        """
        verdict = self.submit(problem, response).result()
        self.health.record(verdict)
        return verdict

    async def judge_async(self, problem: Problem, response: str) -> Verdict:
        """Return the verdict as `judge` does, without blocking the event loop."""
        future = self.submit(problem, response)
        # Many math answers are decided by text, at once: they need no turn of the event loop.
        verdict = future.result() if future.done() else await asyncio.wrap_future(future)
        self.health.record(verdict)
        return verdict

    def submit(self, problem: Problem, response: str) -> Future[Verdict]:
        """Return a future of the verdict, which is not yet counted in `health`."""
        if isinstance(problem.reference, UnverifiableReference):
            detail = f"problem {problem.problem_id}: {problem.reference.why}"
            return _done(Verdict(outcome=Outcome.UNVERIFIABLE, score=0.0, detail=detail))
        answer_text = find_answer_text(response, self.cfg)  # the part of the response in which an answer may be
        if isinstance(answer_text, NoAnswer):
            is_code = isinstance(problem.reference, CodeReference)
            return _done(_no_answer_verdict(answer_text, self.cfg, is_code=is_code))
        match problem.reference:
            case MathReference():
                return self._submit(self._prepare_math(problem.reference, answer_text))
            case CodeReference():
                program = find_program(answer_text, self.cfg.code)
                return self._submit(self._prepare_code(problem.problem_id, problem.reference, program))
            case CustomReference():
                return self._submit(self._prepare_custom(problem, problem.reference, response, answer_text))
            case _:
                assert_never(problem.reference)

    def submit_program(self, problem_id: str, reference: CodeReference, program: str) -> Future[Verdict]:
        """Return a future of the verdict on a program that is already extracted from its response."""
        return self._submit(self._prepare_code(problem_id, reference, check_size(program, self.cfg.code)))

    def submit_reward(self, reward: CustomReward, digest: str, answer: JudgedAnswer) -> Future[Verdict]:
        """Return a future of the value of a user's reward: the score of a verdict, SCORED unless the function failed.

        `digest` is the `source_digest` that its module must have.
        """
        return self._submit(UserTask(function=reward, digest=digest, answer=answer))

    def _prepare_math(self, reference: MathReference, answer_text: str) -> Verdict | MathTask:
        cfg = self.cfg.math
        golds = usable_references(reference.answers, cfg)
        if not golds:
            detail = (
                f"no usable reference among {len(reference.answers)} "
                f"(empty, unbalanced braces, or longer than {cfg.max_answer_chars} characters)"
            )
            return Verdict(outcome=Outcome.BAD_REFERENCE, score=0.0, detail=detail)
        answer = find_answer(answer_text, cfg)
        if isinstance(answer, NoAnswer):
            return _no_answer_verdict(answer, self.cfg)
        decision = unboxed_verdict(golds, answer, cfg) if answer.is_unboxed else decide(golds, answer, cfg)
        shown = quoted(compared_texts(golds[0], answer, cfg))
        if decision is None:  # text rules do not decide, so a worker must parse the unboxed text
            return MathTask(golds=golds, comparison=None, unboxed=answer.texts[0], answer=shown, cfg=cfg)
        if isinstance(decision, bool):
            relation = "matches" if decision else "does not match"
            detail = f"answer {shown} {relation} the reference, by text rules"
            return Verdict(outcome=Outcome.SCORED, score=float(decision), detail=detail)
        return MathTask(golds=golds, comparison=decision, unboxed="", answer=shown, cfg=cfg)

    def _prepare_code(self, problem_id: str, reference: CodeReference, program: str | NoAnswer) -> Verdict | CodeTask:
        # Before the program is looked at: a reference that cannot be used is no fault of a model without a program.
        defect = reference_fault(reference, self.cfg.code)
        if defect is not None:
            detail = f"problem {problem_id}: {defect}"
            return Verdict(outcome=Outcome.BAD_REFERENCE, score=0.0, detail=detail)
        if isinstance(program, NoAnswer):
            return _no_answer_verdict(program, self.cfg, is_code=True)
        tests = reference.tests
        if not isinstance(tests, StoredTests):  # a worker reads stored tests, and chooses among them in the same way
            reference = dataclasses.replace(reference, tests=chosen_tests(tests, problem_id, self.cfg.code))
        # surrogatepass: a model can write half of a surrogate pair, which UTF-8 refuses.
        return CodeTask(
            problem_id=problem_id,
            program=program.encode("utf-8", "surrogatepass"),
            reference=reference,
            num_tests=num_chosen(reference.num_tests, self.cfg.code),
        )

    def _prepare_custom(
        self, problem: Problem, reference: CustomReference, response: str, answer_text: str
    ) -> Verdict | UserTask:
        if reference.judge not in self._judges:
            detail = f"problem {problem.problem_id}: {self._unknown(reference)}"
            return Verdict(outcome=Outcome.BAD_REFERENCE, score=0.0, detail=detail)
        judge, digest = self._judges[reference.judge]
        boxes = boxed_texts(answer_text)
        answer = AnswerToJudge(
            problem_id=problem.problem_id,
            source=problem.source,
            question=problem.question,
            reference=json.loads(reference.value_json),
            answer=answer_text,
            box=boxes[-1] if boxes else None,
            response=response,
        )
        return UserTask(function=judge, digest=digest, answer=answer)

    def _unknown(self, reference: CustomReference) -> str:
        return f"verify.judges has no judge {reference.judge!r}; it has {', '.join(self._judges) or 'none'}"

    def _submit(self, prepared: Verdict | Task) -> Future[Verdict]:
        if isinstance(prepared, Verdict):
            return _done(prepared)
        verdict: Future[Verdict] = Future()
        # From now on it cannot be cancelled: a cancelled caller stops waiting, and the verdict still comes.
        verdict.set_running_or_notify_cancel()
        # A task over which two processes die is taken for the cause, and would end every further one.
        self._run(prepared, verdict, tries_left=1)
        return verdict

    def _run(self, task: Task, verdict: Future[Verdict], *, tries_left: int) -> None:
        """Submit a task and resolve `verdict` with its result; submit it again if the judging process died."""

        def resolve(done: Future[Verdict | Fault]) -> None:
            result = done.result()
            match result:
                case Verdict():
                    verdict.set_result(result)
                case Fault(kind="died") if tries_left > 0:
                    self._run(task, verdict, tries_left=tries_left - 1)
                case Fault(kind="no_sandbox"):
                    verdict.set_exception(SandboxError(result.detail))
                case Fault(kind="timed_out"):
                    verdict.set_result(Verdict(outcome=Outcome.TIMED_OUT, score=0.0, detail=result.detail))
                case Fault(kind="out_of_memory") if isinstance(task, UserTask):
                    detail = memory_message(task.function)
                    verdict.set_result(Verdict(outcome=Outcome.JUDGE_FAILED, score=0.0, detail=detail))
                case _:
                    verdict.set_result(Verdict(outcome=Outcome.JUDGE_FAILED, score=0.0, detail=result.detail))

        try:
            client = self._local if isinstance(task, UserTask) else self._client
            client.submit(task).add_done_callback(resolve)
        except OSError as e:
            verdict.set_exception(JudgeError(f"the judging process cannot be started: {e}"))


def _done(verdict: Verdict) -> Future[Verdict]:
    future: Future[Verdict] = Future()
    future.set_result(verdict)
    return future


def _no_answer_verdict(missing: NoAnswer, cfg: VerifyConfig, *, is_code: bool = False) -> Verdict:
    # The score of a program that passes no test.
    score = -1.0 if is_code and cfg.code.score == "plus_minus" else 0.0
    return Verdict(outcome=Outcome.NO_ANSWER, score=score, detail=missing.reason)


def build_judge_pool(cfg: VerifyConfig) -> JudgePool:
    """Build the judges for these settings; use the result as a context manager."""
    return JudgePool(cfg)


# ---- concurrency ----
# Compute how many answers are judged at a time.


def math_workers(runtime: VerifyRuntime) -> int:
    """Return the number of processes that compare math answers."""
    return runtime.math_workers or usable_cpus()


def code_workers(runtime: VerifyRuntime) -> int:
    """Return the number of programs that run at a time: two a core, because half of a jail's start is waiting."""
    return runtime.code_workers or 2 * usable_cpus()


# ---- health ----
# Count verdicts by outcome, and stop a stage in which the judge itself fails too often.


_JUDGE_FAILURES = (Outcome.JUDGE_FAILED, Outcome.SANDBOX_FAILED, Outcome.TIMED_OUT)
"""Outcomes of a failed judge. TIMED_OUT means that the judge ran out of time; a program that does is SCORED."""


class JudgeHealth:
    """Counts verdicts by outcome, and raises once too many of them failed for reasons that are not the model's."""

    def __init__(self, *, max_failed_frac: float, min_failed_count: int, what: str = "verdicts") -> None:
        """Count from zero. `what` names the counted verdicts in the error."""
        self._what = what
        self._max_failed_frac = max_failed_frac
        self._min_failed_count = min_failed_count
        self._lock = threading.Lock()
        self._counts: Counter[Outcome] = Counter()

    @property
    def counts(self) -> dict[Outcome, int]:
        """Return the number of verdicts so far, by outcome."""
        with self._lock:
            return dict(self._counts)

    @property
    def num_failed(self) -> int:
        """Return the number of failures so far that are not the model's."""
        counts = self.counts
        return sum(counts.get(outcome, 0) for outcome in _JUDGE_FAILURES)

    def record(self, verdict: Verdict) -> None:
        """Count a verdict. Raise JudgeError when failures of the judge or sandbox exceed the limit."""
        with self._lock:
            self._counts[verdict.outcome] += 1
            failed = sum(self._counts[o] for o in _JUDGE_FAILURES)
            total = self._counts.total()
        if (
            verdict.outcome in _JUDGE_FAILURES
            and failed >= self._min_failed_count
            and failed > self._max_failed_frac * total
        ):
            raise JudgeError(
                f"{failed} of {total} {self._what} failed for reasons that are not the model's "
                f"(limit {self._max_failed_frac:.0%}, verify.max_failed_frac); continuing would use unreliable "
                f"ones. Last failure: {verdict.outcome}: {verdict.detail}"
            )


# ---- references ----
# Find references that cannot be judged, by judging an answer of our own to each problem.


_RESPONSE = "<think>\n</think>\n{answer}"
_MATH_ANSWER = r"\boxed{7907}"
"""A plain number as the answer: text rules decide only if the reference is a number or words; else it is parsed."""


def has_test_program(problem: Problem) -> bool:
    """Return whether judging this problem runs a program that belongs to its reference: assertions or a checker."""
    reference = problem.reference
    return isinstance(reference, CodeReference) and bool(reference.checker or reference.test_kind == "asserts")


def faulty_references(
    problems: Iterable[Problem], judges: JudgePool, *, run_tests: bool
) -> list[tuple[Problem, Verdict]]:
    """Return the problems whose answers cannot be judged, each with a verdict that says why.

    These include problems on which a judge of the user's own fails. Our math answer has a box, because without one the
    reference is not read; a code reference is checked even if there is no program. `run_tests` also runs the
    references' own programs once, in the sandbox, which must isolate. Raise JudgeError if the judge itself fails.
    """
    pending = [(problem, future) for problem in problems for future in _verdicts(problem, judges, run_tests=run_tests)]
    faults: dict[str, tuple[Problem, Verdict]] = {}
    for problem, future in pending:
        verdict = future.result()
        is_ours = not isinstance(problem.reference, CustomReference)
        if is_ours and verdict.outcome in (Outcome.JUDGE_FAILED, Outcome.SANDBOX_FAILED):
            raise JudgeError(f"problem {problem.problem_id}: {verdict.outcome}: {verdict.detail}")
        if not verdict.outcome.counts_for_model:
            faults.setdefault(problem.problem_id, (problem, verdict))
    return list(faults.values())


def _verdicts(problem: Problem, judges: JudgePool, *, run_tests: bool) -> Iterator[Future[Verdict]]:
    reference = problem.reference
    match reference:
        case MathReference() | CustomReference() | UnverifiableReference():
            yield judges.submit(problem, _RESPONSE.format(answer=_MATH_ANSWER))
        case CodeReference():
            yield judges.submit(
                problem, _RESPONSE.format(answer="no program")
            )  # only number and size of the tests count
            if run_tests and has_test_program(problem):
                yield judges.submit_program(problem.problem_id, *_first_test(reference))
        case _:
            assert_never(reference)


def _first_test(reference: CodeReference) -> tuple[CodeReference, str]:
    """Return the reference with one test if a checker judges it, and a program that gives that test's expected value.

    A checker must be able to read a right output. If it cannot read another one, that may be the program's fault.
    """
    tests = load_tests(reference)
    match tests:
        case AssertTests():
            return reference, "pass"
        case StdinTests():
            program = f"print({tests.cases[0].output!r}, end='')" if tests.cases else "pass"
            return dataclasses.replace(reference, tests=StdinTests(cases=tests.cases[:1])), program
        case CallTests():
            expected = tests.cases[0].expected_json if tests.cases else "null"
            program = f"import json\ndef {tests.fn_name}(*args):\n    return json.loads({expected!r})"
            one = CallTests(fn_name=tests.fn_name, cases=tests.cases[:1])
            return dataclasses.replace(reference, tests=one), program
        case _:
            assert_never(tests)
