"""The teacher of puzzles solves sums, an operation a line, products first."""

import asyncio

import pytest
from distill_fakes import make_problem

from klear_core.config.distill import PuzzleTeacherConfig
from klear_core.distill.teachers.procedural import PuzzleTeacher
from klear_core.distill.teachers.teacher import TeacherFailure, TeacherResult
from klear_core.types import TeacherReply


def ask(question: str, *, slip_rate: float = 0.0, sample_idx: int = 0) -> TeacherResult:
    teacher = PuzzleTeacher(PuzzleTeacherConfig(slip_rate=slip_rate, blind_spot_rate=0.0))
    return asyncio.run(teacher.sample(make_problem(0, question=question), sample_idx=sample_idx, seed=0)).result


@pytest.mark.parametrize(
    ("question", "reasoning", "answer"),
    [
        ("What is 36 + 19 - 34?", "36 + 19 = 55\n55 - 34 = 21", "21"),
        ("Calculate 2 + 3 * 4 * 5 - 6.", "3 * 4 = 12\n12 * 5 = 60\n2 + 60 = 62\n62 - 6 = 56", "56"),
        ("Calculate -5 * -6.", "-5 * -6 = 30", "30"),
        ("State the final answer to the following arithmetic problem: 7 - 9 - 8 =", "7 - 9 = -2\n-2 - 8 = -10", "-10"),
    ],
)
def test_a_sum_is_solved_an_operation_a_line(question, reasoning, answer):
    reply = ask(question)
    assert isinstance(reply, TeacherReply)
    assert (reply.reasoning, reply.answer, reply.finish_reason) == (reasoning, f"\\boxed{{{answer}}}", "stop")


@pytest.mark.parametrize(
    "question",
    [
        "What is 12 / 3 + 4?",
        "Compute (3 + 4) * 2.",
        "3 + 4.5",
        "2^3 + 4",
        "What is 7?",
        "1 + 2 or 3 + 4?",
        "3 + 45 / 5",
        "-( 3 + 4 )",
    ],
)
def test_other_expressions_are_not_taken_for_sums(question):
    assert isinstance(ask(question), TeacherFailure)


def test_a_slip_is_carried_on_to_the_answer():
    for i in range(30):
        reply = ask("What is 36 + 19 - 34?", slip_rate=1.0, sample_idx=i)
        assert isinstance(reply, TeacherReply)
        first, second = reply.reasoning.splitlines()
        wrong = int(first.removeprefix("36 + 19 = "))
        assert 1 <= abs(wrong - 55) <= 9
        left, result = second.split(" = ")
        assert left == f"{wrong} - 34"
        assert 1 <= abs(int(result) - (wrong - 34)) <= 9
        assert reply.answer == f"\\boxed{{{result}}}"
