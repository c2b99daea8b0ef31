"""References that cannot be judged are found without an answer of a model's; usable ones are left alone."""

import pytest
from verify_builders import (
    ADD_ASSERTS,
    ADD_CALL,
    ADD_STDIN,
    asserts_reference,
    call_reference,
    problem,
    stdin_reference,
)

from klear_core.types import CodeReference, MathReference, Outcome
from klear_core.verify import JudgePool, faulty_references, has_test_program

NEVER_RIGHT = "def check(input, output, expected):\n    return False"
CRASHES = "def check(input, output, expected):\n    return 1 / 0"
READS_A_NUMBER = "def check(input, output, expected):\n    return abs(int(output) - int(expected)) < 2"


def faults(pool: JudgePool, *references: MathReference | CodeReference, run_tests: bool = True) -> dict[str, str]:
    """The details of the faults by number of the reference."""
    problems = [problem(reference, str(i)) for i, reference in enumerate(references)]
    found = faulty_references(problems, pool, run_tests=run_tests)
    assert all(verdict.outcome is Outcome.BAD_REFERENCE for _, verdict in found)
    return {p.problem_id: verdict.detail for p, verdict in found}


GOOD_MATH = ["7", "7907", "50%", "10^{12}", r"\pi", r"\frac{1}{2}", "1,2", "(3, 4]", r"x^2+1", "x>3", r"5\text{ cm}"]
GOOD_MATH += ["A", "yes", r"\text{Evelyn}", "4:30 p.m."]
BAD_MATH = ["", "   ", r"\frac{1}{2", "}{", "9" * 5000, r"\boxed{}", "$$", "."]


def test_references_that_mean_something_have_no_fault(math_pool: JudgePool) -> None:
    assert faults(math_pool, *(MathReference(answers=(answer,)) for answer in GOOD_MATH)) == {}


@pytest.mark.parametrize("answer", BAD_MATH)
def test_a_math_reference_that_cannot_be_read_is_found(math_pool: JudgePool, answer: str) -> None:
    assert set(faults(math_pool, MathReference(answers=(answer,)), MathReference(answers=("7",)))) == {"0"}


def test_one_usable_reference_of_several_is_enough(math_pool: JudgePool) -> None:
    assert faults(math_pool, MathReference(answers=("", "7"))) == {}
    assert set(faults(math_pool, MathReference(answers=()))) == {"0"}


def test_code_without_tests_is_found_without_a_sandbox(math_pool: JudgePool) -> None:
    empty = [stdin_reference(), call_reference("add"), asserts_reference()]
    assert set(faults(math_pool, *empty, ADD_STDIN, ADD_CALL, ADD_ASSERTS, run_tests=False)) == {"0", "1", "2"}


def test_a_test_program_that_cannot_run_is_found_in_the_sandbox(code_pool: JudgePool) -> None:
    broken = [
        asserts_reference("import klear_no_such_module\nassert add(1, 2) == 3"),
        stdin_reference(("1", "1"), checker="def check(input: "),
        stdin_reference(("1", "1"), checker=CRASHES),
        call_reference("add", ("[1, 2]", "3"), checker=CRASHES),
    ]
    usable = [
        ADD_ASSERTS,
        ADD_STDIN,
        ADD_CALL,
        stdin_reference(("1", "1"), ("2", "2"), checker=READS_A_NUMBER),
        call_reference("add", ("[1, 2]", "3"), checker=READS_A_NUMBER),
        stdin_reference(("1", "1"), checker=NEVER_RIGHT),
    ]
    found = faults(code_pool, *broken, *usable)
    assert set(found) == {"0", "1", "2", "3"}
    assert "ModuleNotFoundError" in found["0"]
    assert "SyntaxError" in found["1"]
    assert "ZeroDivisionError" in found["2"]


def test_only_assertions_and_checkers_are_programs_of_the_reference() -> None:
    references = [ADD_STDIN, ADD_CALL, MathReference(answers=("7",)), ADD_ASSERTS, stdin_reference(checker=CRASHES)]
    assert [has_test_program(reference) for reference in references] == [False, False, False, True, True]
