"""Small builders for the judges' tests."""

from klear_core.config.verify import CodeConfig, VerifyConfig, VerifyRuntime
from klear_core.types import (
    AssertTests,
    CallCase,
    CallTests,
    CodeReference,
    Difficulty,
    Domain,
    MathReference,
    Problem,
    Reference,
    StdinCase,
    StdinTests,
)
from klear_core.verify import JudgePool

THINK = "<think>\nlet me see\n</think>\n\n"


def problem(reference: Reference, problem_id: str = "p0") -> Problem:
    domain = Domain.MATH if isinstance(reference, MathReference) else Domain.CODE
    return Problem(
        problem_id=problem_id,
        source="test",
        domain=domain,
        question="?",
        reference=reference,
        difficulty=Difficulty.EASY,
    )


def math_problem(*answers: str) -> Problem:
    return problem(MathReference(answers=answers))


def boxed(answer: str) -> str:
    return f"{THINK}The answer is \\boxed{{{answer}}}."


def fenced(program: str, tag: str = "python") -> str:
    return f"{THINK}Here it is.\n\n```{tag}\n{program}\n```\n"


def stdin_reference(*cases: tuple[str, str], **more: object) -> CodeReference:
    return CodeReference(tests=StdinTests(cases=tuple(StdinCase(input=i, output=o) for i, o in cases)), **more)


def call_reference(fn_name: str, *cases: tuple[str, str], **more: object) -> CodeReference:
    return CodeReference(
        tests=CallTests(fn_name=fn_name, cases=tuple(CallCase(args_json=a, expected_json=e) for a, e in cases)), **more
    )


def asserts_reference(*programs: str) -> CodeReference:
    return CodeReference(tests=AssertTests(programs=programs))


ADD_STDIN = stdin_reference(("1 2\n", "3\n"), ("10 -4\n", "6\n"), ("0 0\n", "0\n"))
ADD_CALL = call_reference("add", ("[1, 2]", "3"), ("[10, -4]", "6"), ("[0, 0]", "0"))
ADD_ASSERTS = asserts_reference("assert add(1, 2) == 3", "assert add(10, -4) == 6", "assert add(0, 0) == 0")


def code_config(**code: object) -> VerifyConfig:
    """Settings for small programs: far more time than they need on the slowest machine, few workers."""
    return VerifyConfig(
        code=CodeConfig(**{"cpu_s": 30.0} | code), runtime=VerifyRuntime(math_workers=1, code_workers=2)
    )


def is_right(pool: JudgePool, gold: str, answer: str) -> bool:
    """Whether a boxed answer earns the full score; it must at least be the model's doing."""
    verdict = pool.judge(math_problem(gold), boxed(answer))
    assert verdict.outcome.counts_for_model, verdict
    return verdict.score == 1.0
