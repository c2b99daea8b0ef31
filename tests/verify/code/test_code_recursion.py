"""Deep recursion: the limit is a setting, Python's default, and going beyond it fails a test, never the sandbox."""

import pytest
from verify_builders import asserts_reference, call_reference, code_config, fenced, problem, stdin_reference

from klear_core.types import CodeReference, Outcome
from klear_core.verify import JudgePool

DOWN = "def down(n):\n    return 0 if n == 0 else 1 + down(n - 1)\n"
UNLIMITED = "import sys\nsys.setrecursionlimit(10**9)\n"


def depth(n: int) -> dict[str, CodeReference]:
    return {
        "stdin": stdin_reference((str(n), f"{n}\n")),
        "call": call_reference("down", (f"[{n}]", str(n))),
        "asserts": asserts_reference(f"assert down({n}) == {n}"),
    }


def program(kind: str) -> str:
    return DOWN + ("print(down(int(input())))\n" if kind == "stdin" else "")


@pytest.mark.parametrize("kind", ["stdin", "call", "asserts"])
def test_a_program_may_nest_calls_as_deep_as_in_a_plain_interpreter(code_pool: JudgePool, kind: str) -> None:
    assert code_pool.judge(problem(depth(980)[kind]), fenced(program(kind))).score == 1.0
    verdict = code_pool.judge(problem(depth(1001)[kind]), fenced(program(kind)))
    assert (verdict.outcome, verdict.score, "RecursionError" in verdict.detail) == (Outcome.SCORED, 0.0, True), (
        verdict.detail
    )


def test_a_program_may_raise_its_own_limit(code_pool: JudgePool) -> None:
    raised = "import sys\nsys.setrecursionlimit(10**5)\n" + program("stdin")
    assert code_pool.judge(problem(depth(40_000)["stdin"]), fenced(raised)).score == 1.0


@pytest.mark.parametrize("kind", ["stdin", "call", "asserts"])
def test_the_limit_is_a_setting(sandbox_name: str, kind: str) -> None:
    with JudgePool(code_config(recursion_limit=50_000)) as pool:
        assert pool.judge(problem(depth(40_000)[kind]), fenced(program(kind))).score == 1.0


ENDLESS = {
    "a function": "def f():\n    return f()\nf()",
    "a cached function": "from functools import lru_cache\n@lru_cache(None)\ndef f(n):\n    return f(n + 1)\nf(0)",
    "a key of sorted": "def f(x):\n    return sorted([x, x], key=f)\nf(0)",
    "an operator": "class A:\n    def __eq__(self, other):\n        return [self] == [A()]\nA() == A()",
    "a representation": "class A:\n    def __repr__(self):\n        return repr([self])\nrepr(A())",
    "an attribute": "class A:\n    def __getattr__(self, name):\n        return getattr(self, name)\nA().x",
}
TOO_DEEP_TO_COMPILE = "print(" + "(" * 5000 + "1" + ")" * 5000 + ")"


@pytest.mark.parametrize("limit", ["the setting's", "none"])
@pytest.mark.parametrize("name", ENDLESS)
def test_endless_recursion_fails_the_test_and_not_the_sandbox(code_pool: JudgePool, name: str, limit: str) -> None:
    text = ENDLESS[name] if limit == "the setting's" else UNLIMITED + ENDLESS[name]
    verdict = code_pool.judge(problem(stdin_reference(("", ""), memory_limit_mb=256)), fenced(text))
    assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 0.0), verdict.detail
    assert code_pool.judge(problem(depth(5)["stdin"]), fenced(program("stdin"))).score == 1.0


def test_endless_recursion_in_a_call_fails_the_test_and_not_the_sandbox(code_pool: JudgePool) -> None:
    endless = UNLIMITED + "import functools\n@functools.lru_cache(None)\ndef down(n):\n    return down(n + 1)"
    for reference in depth(5).values():
        verdict = code_pool.judge(problem(reference), fenced(endless + "\ndown(1)"))
        assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 0.0), verdict.detail


def test_a_program_too_deep_to_compile_fails(code_pool: JudgePool) -> None:
    verdict = code_pool.judge(problem(stdin_reference(("", "1\n"))), fenced(TOO_DEEP_TO_COMPILE))
    assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 0.0), verdict.detail
