"""Find references that cannot be judged, by judging an answer of our own to each problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import assert_never

from klear_core.artifacts.tests_file import load_tests
from klear_core.code_tests import AssertTests, CallTests, CodeReference, StdinTests
from klear_core.errors import JudgeError
from klear_core.types import CustomReference, MathReference, Outcome, Problem, UnverifiableReference, Verdict
from klear_core.verify.pool import JudgePool

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
