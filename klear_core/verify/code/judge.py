"""Judge one program in a jail, test by test, in lockstep, with the expected values on this side only.

This runs in a worker process that keeps its jails between tasks. A jail that misbehaves is replaced, and a test that it
may have affected is run again in a fresh one, so that the judge's own failures are never scored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, assert_never

from klear_core.artifacts.records import load_tests
from klear_core.config.verify import CodeConfig, VerifyConfig
from klear_core.errors import ArtifactError
from klear_core.types import (
    AssertTests,
    CallCase,
    CallTests,
    CodeReference,
    Outcome,
    StdinCase,
    StdinTests,
    StoredTests,
    Verdict,
)
from klear_core.verify.client import CodeTask, CodeTrial
from klear_core.verify.code.program import chosen_tests, limits_for, limits_of_tester, same_output, same_value
from klear_core.verify.sandbox.jail import Jail, JailBrokenError, JailReply, Status, TestLimits, WireError, plain_value
from klear_core.verify.sandbox.jail_command import Backend

_MAX_CALLS_PER_TEST = 100_000
_SHOWN_CHARS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class TestResult:
    """The result of one test. `is_timeout` counts towards `max_timeouts`, the number of tests that may time out.

    `broken` says that the checker or the test program did not give a result. The trial of a reference fails over it. A
    reference that has passed its trial breaks only over what a program sent, so that the program has failed the test.
    """

    kind: Literal["passed", "failed", "broken"]
    detail: str = ""
    is_timeout: bool = False


class CodeJudge:
    """Judges programs in one worker's jails: one for programs, one (started on first use) for asserts and checkers."""

    def __init__(self, backend: Backend, cfg: VerifyConfig) -> None:
        self._backend: Backend = backend
        self._cfg = cfg
        self._programs = JailSlot(backend, cfg)
        self._tests = JailSlot(backend, cfg)

    def judge(self, task: CodeTask) -> Verdict:
        """Return the verdict on a program, or on the reference alone; `sandbox_failed` if the jail broke twice.

        `judge_failed` if the problem's stored tests cannot be read: that says nothing about the program.
        """
        try:
            task = self._with_tests(task)
        except ArtifactError as e:
            detail = f"problem {task.problem_id}: {e}"
            return Verdict(outcome=Outcome.JUDGE_FAILED, score=0.0, detail=detail)
        first_fault = ""
        # A jail that breaks says nothing about the program, which gets a second try in fresh jails.
        for _ in range(2):
            try:
                return self._try_reference(task) if task.program is None else self._judge(task, task.program)
            except JailBrokenError as e:
                first_fault = first_fault or str(e)
                self.close()
        return Verdict(outcome=Outcome.SANDBOX_FAILED, score=0.0, detail=first_fault)

    def close(self) -> None:
        """End both jails."""
        self._programs.discard()
        self._tests.discard()

    def _with_tests(self, task: CodeTask) -> CodeTask:
        """Return the task with the tests that were chosen of its stored ones; memory of the others is freed at once."""
        if not isinstance(task.reference.tests, StoredTests):
            return task
        chosen = chosen_tests(load_tests(task.reference), task.problem_id, self._cfg.code)
        return dataclasses.replace(task, reference=dataclasses.replace(task.reference, tests=chosen))

    def _try_reference(self, task: CodeTask) -> Verdict:
        """Run the checker on each expected output, or the assertions against a stand-in for the program.

        A test over which that breaks is left out of all judgements; without any other the reference is bad.
        """
        unusable: list[tuple[int, str]] = []
        num_timeouts = 0
        for i in range(task.num_tests):
            # After as many timeouts as a program may have, the other tests are not tried, and not used.
            if num_timeouts >= self._cfg.code.max_timeouts:
                unusable.append((i, "not tried after the timeouts before it"))
                continue
            result = self._try_test(task.reference, i)
            if result.kind == "broken":
                unusable.append((i, result.detail))
                num_timeouts += result.is_timeout
        if len(unusable) == task.num_tests:
            number, why = unusable[0]
            return Verdict(outcome=Outcome.BAD_REFERENCE, score=0.0, detail=f"test {number}: {why}")
        num_usable = task.num_tests - len(unusable)
        detail = f"{num_usable} of {task.num_tests} tests can be run"
        return CodeTrial(outcome=Outcome.SCORED, score=1.0, detail=detail, unusable=tuple(unusable))

    def _try_test(self, reference: CodeReference, i: int) -> TestResult:
        tests = reference.tests
        match tests:
            case StdinTests():
                case = tests.cases[i]
                return self._check(reference.checker, case.input, case.output, case.output)
            case CallTests():
                call = tests.cases[i]
                expected = json.loads(call.expected_json)
                return self._check(reference.checker, json.loads(call.args_json), expected, expected)
            case AssertTests():
                return self._ask_tester({"source": tests.programs[i], "is_trial": True})
            case StoredTests():
                raise AssertionError("stored tests are read before the first test")
            case _:
                assert_never(tests)

    def _judge(self, task: CodeTask, program: bytes) -> Verdict:
        limits = limits_for(task.reference, self._cfg)
        # Compiled once for all tests; a jail that replaces this one compiles it again (`jail_for`).
        jail = self._programs.next_program()
        loaded = jail.load(program, limits)
        numbers = [i for i in range(task.num_tests) if i not in task.left_out]
        num_tests = len(numbers)
        if loaded.status is Status.NOT_PYTHON:
            detail = f"0 of {num_tests} tests passed: {_shown(loaded.text)}"
            return verdict_of(0, num_tests, detail, self._cfg.code)
        if loaded.status is not Status.OK:
            raise JailBrokenError(f"{loaded.status.name}: {loaded.text}")
        num_passed = num_timeouts = 0
        first_failure = ""
        for num_run, i in enumerate(numbers, 1):
            result = self._run_test(task.reference, program, i, limits)
            if result.kind == "passed":
                num_passed += 1
            else:
                first_failure = first_failure or f"; test {i}: {result.detail}"
                num_timeouts += result.is_timeout
            # The score is known (hard), or further timeouts would cost minutes: the remaining tests count as failed.
            if num_timeouts >= self._cfg.code.max_timeouts or (first_failure and self._cfg.code.score == "hard"):
                if num_run < num_tests:
                    first_failure += f"; stopped after {num_run}"
                break
        detail = f"{num_passed} of {num_tests} tests passed{first_failure}"
        return verdict_of(num_passed, num_tests, detail, self._cfg.code)

    def _run_test(self, reference: CodeReference, program: bytes, i: int, limits: TestLimits) -> TestResult:
        tests = reference.tests
        match tests:
            case StdinTests():
                case = tests.cases[i]
                return self._run_stdin(reference, program, case, limits)
            case CallTests():
                call = tests.cases[i]
                return self._run_call(reference, program, tests.fn_name, call, limits)
            case AssertTests():
                return self._run_asserts(program, tests.programs[i], limits)
            case StoredTests():
                raise AssertionError("stored tests are read before the first test")
            case _:
                assert_never(tests)

    def _run_stdin(self, reference: CodeReference, program: bytes, case: StdinCase, limits: TestLimits) -> TestResult:
        jail = self._programs.jail_for(program, limits)
        reply = jail.run(case.input.encode("utf-8", "surrogateescape"), limits)
        self._programs.note(reply)
        if reply.status is not Status.OK:
            return _failure(reply, limits)
        output = reply.data.decode("utf-8", "surrogateescape")
        if reference.checker:
            return self._check(reference.checker, case.input, output, case.output)
        if same_output(case.output, output, self._cfg.code, is_order_free=reference.is_order_free):
            return TestResult(kind="passed")
        return TestResult(kind="failed", detail=f"wrong output {_shown(output)}, expected {_shown(case.output)}")

    def _run_call(
        self, reference: CodeReference, program: bytes, fn_name: str, call: CallCase, limits: TestLimits
    ) -> TestResult:
        args, expected = json.loads(call.args_json), json.loads(call.expected_json)
        jail = self._programs.jail_for(program, limits)
        with open_session(self._programs, jail, "program", limits) as session:
            # "raw": the arguments are plain JSON, and the guest converts them to its tagged form.
            reply = session.ask(json.dumps({"entry": fn_name, "args": args, "raw": True}).encode(), limits)
            if reply.status is not Status.REPLIED:
                return _failure(reply, limits)
        try:
            # A checker gets lists whatever the rule.
            is_exact = self._cfg.code.compare == "decimal" and not reference.checker
            answer = plain_value(reply.data, is_exact=is_exact)
        except WireError as e:
            return TestResult(kind="failed", detail=_shown(str(e)))
        try:
            if reference.checker:
                return self._check(reference.checker, args, answer, expected)
            if same_value(expected, answer, self._cfg.code, is_order_free=reference.is_order_free):
                return TestResult(kind="passed")
        except RecursionError:
            return TestResult(kind="failed", detail="the result is nested too deeply to compare")
        detail = f"wrong result {_shown(repr(answer))}, expected {_shown(repr(expected))}"
        return TestResult(kind="failed", detail=detail)

    def _run_asserts(self, program: bytes, source: str, limits: TestLimits) -> TestResult:
        """Run the tests in a separate jail; each of their calls to the program goes to the program's jail and back."""
        programs = self._programs.jail_for(program, limits)
        tester_limits = limits_of_tester(self._cfg, limits)
        tests = self._tests.jail()
        with (
            open_session(self._tests, tests, "tester", tester_limits),
            open_session(self._programs, programs, "program", limits),
        ):
            # The tests run until they call the program, or end; each call is answered by the program's jail.
            question = tests.ask(json.dumps({"source": source}).encode(), tester_limits)
            for _ in range(_MAX_CALLS_PER_TEST):
                if question.status is not Status.REPLIED:
                    return _tester_failure(question)
                result = _test_verdict(question.data)
                if result is not None:
                    return result
                answer = programs.ask(question.data, limits)
                if answer.status is not Status.REPLIED:
                    return _failure(answer, limits)
                question = tests.ask(answer.data, tester_limits)
        return TestResult(kind="failed", detail=f"more than {_MAX_CALLS_PER_TEST} calls", is_timeout=True)

    def _check(self, checker: str, given: object, output: object, expected: object) -> TestResult:
        return self._ask_tester({"source": checker, "input": given, "output": output, "expected": expected})

    def _ask_tester(self, request: dict[str, object]) -> TestResult:
        """Run a checker, or assertions without a program, in the tests' jail."""
        tests = self._tests.jail()
        limits = limits_of_tester(self._cfg, None)
        with open_session(self._tests, tests, "tester", limits):
            reply = tests.ask(json.dumps(request).encode(), limits)
        if reply.status is not Status.REPLIED:
            return _tester_failure(reply)
        result = _test_verdict(reply.data)
        return result or TestResult(kind="broken", detail="it called the program")


def verdict_of(num_passed: int, num_tests: int, detail: str, cfg: CodeConfig) -> Verdict:
    """Return the verdict on a program that passed `num_passed` of its tests."""
    fraction = num_passed / num_tests
    match cfg.score:
        case "soft":
            score = fraction
        case "hard":
            score = float(num_passed == num_tests)
        case _:
            assert_never(cfg.score)
    return Verdict(outcome=Outcome.SCORED, score=score, detail=detail)


def _failure(reply: JailReply, limits: TestLimits) -> TestResult:
    """Return the failed test of a program that ended early.

    Raise JailBrokenError for a status that is not the program's.
    """
    match reply.status:
        case Status.EXITED:
            detail = f"exit status {reply.code}: {_shown(reply.text)}"
        case Status.SIGNALLED:
            detail = f"killed by signal {reply.code}: {_shown(reply.text)}"
        case Status.CPU_LIMIT:
            detail = f"more than {limits.cpu_s:g} s of CPU time"
        case Status.WALL_LIMIT:
            detail = f"more than {limits.wall_s:g} s of wall clock"
        case Status.MEMORY_LIMIT:
            detail = "too much memory in all"
        case Status.OUTPUT_LIMIT:
            detail = f"more than {limits.output_bytes >> 20} MB of output"
        case Status.OK:
            detail = "ended without a result"
        case _:
            raise JailBrokenError(f"{reply.status.name}: {reply.text}")
    is_timeout = reply.status in (Status.CPU_LIMIT, Status.WALL_LIMIT)
    return TestResult(kind="failed", detail=detail, is_timeout=is_timeout)


def _tester_failure(reply: JailReply) -> TestResult:
    if reply.status in (Status.CPU_LIMIT, Status.WALL_LIMIT):
        return TestResult(kind="broken", detail="the test program itself ran out of time", is_timeout=True)
    return TestResult(kind="broken", detail=f"the test program ended: {reply.status.name} {_shown(reply.text)}")


def _test_verdict(frame: bytes) -> TestResult | None:
    """Return the result in a frame from the tests' jail, or None if it is a call that the program must answer."""
    try:
        found = json.loads(frame)
    except (ValueError, RecursionError):
        return None  # a call, with a value that this interpreter cannot read; the program's may
    match found:
        case {"passed": True}:
            return TestResult(kind="passed")
        case {"passed": False}:
            return TestResult(kind="failed", detail="refused by the checker")
        case {"failed": detail}:
            return TestResult(kind="failed", detail=_shown(str(detail)))
        case {"broken": detail}:
            return TestResult(kind="broken", detail=_shown(str(detail)))
        case _:
            return None


def _shown(text: str) -> str:
    if len(text) > _SHOWN_CHARS:
        text = text[: _SHOWN_CHARS - 3] + "..."
    return text if text.isprintable() else repr(text)


# ---- jail slot ----
# Keep one jail of a worker alive across programs, and replace it when it may be damaged.


_HARMLESS = (Status.OK, Status.EXITED)  # after any other end the jail is replaced, as a precaution


class JailSlot:
    """Keeps one jail alive across programs; replaces it after `programs_per_jail` of them or after anything unusual."""

    def __init__(self, backend: Backend, cfg: VerifyConfig) -> None:
        self._backend: Backend = backend
        self._cfg = cfg
        self._jail: Jail | None = None
        self._num_programs = 0
        self._must_load = False
        """Whether the jail was replaced since its program was loaded."""
        self._needs_restart = False

    def jail(self) -> Jail:
        """Return the jail, started if necessary."""
        if self._jail is not None and self._needs_restart:
            self.discard()
        if self._jail is None:
            self._jail = Jail(self._backend, self._cfg.jail_limits)
            self._needs_restart = False
            self._num_programs = 0
            self._must_load = True
        return self._jail

    def next_program(self) -> Jail:
        """Return the jail for another program, a fresh one if this one has run `programs_per_jail` of them."""
        if self._num_programs >= self._cfg.limits.programs_per_jail:
            self.discard()
        jail = self.jail()
        self._num_programs += 1
        self._must_load = False  # the caller loads the next program
        return jail

    def jail_for(self, program: bytes, limits: TestLimits) -> Jail:
        """Return the jail with the program loaded, reloaded if the jail was replaced."""
        jail = self.jail()
        if self._must_load:
            # It has compiled once already, so a failure now is the jail's.
            if jail.load(program, limits).status is not Status.OK:
                raise JailBrokenError("a program compiled in one jail and not in the next")
            self._must_load = False
        return jail

    def note(self, reply: JailReply) -> None:
        """Record how a process ended; after anything but a plain exit the next test gets a fresh jail."""
        if reply.status is Status.NO_FORK:
            raise JailBrokenError(f"the jail could not start a process: {reply.text}")
        self._needs_restart |= reply.status not in _HARMLESS and reply.status is not Status.REPLIED

    def discard(self) -> None:
        """End the jail, if there is one."""
        if self._jail is not None:
            self._jail.kill()
            self._jail = None


@contextlib.contextmanager
def open_session(slot: JailSlot, jail: Jail, role: Literal["program", "tester"], limits: TestLimits) -> Iterator[Jail]:
    """Yield the jail with a session of this role open, and close the session afterwards."""
    slot.note(jail.open(role, limits))
    try:
        yield jail
    finally:
        jail.close_session()
