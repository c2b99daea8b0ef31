"""No text that a model writes leaves an answer unscored, as long as the reference passes its own trial."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from verify_builders import (
    ADD_ASSERTS,
    ADD_STDIN,
    THINK,
    asserts_reference,
    boxed,
    call_reference,
    code_config,
    fenced,
    math_problem,
    problem,
    stdin_reference,
)

from klear_core.config.verify import MathConfig, VerifyConfig, VerifyRuntime
from klear_core.types import CodeReference, MathReference, Outcome, Problem, Verdict
from klear_core.verify import JudgePool, faulty_references
from klear_core.verify.client import Fault, MathTask, Task

THE_MODELS = (Outcome.SCORED, Outcome.NO_ANSWER)

SPLITS = "def check(input, output, expected):\n    a, b = map(int, output.split())\n    return a * b == int(input)"
PICKS = "def check(input, output, expected):\n    return output['sum'][0] == expected['sum'][0]"
EXITS = "import os\ndef check(input, output, expected):\n    output == expected or os._exit(3)\n    return True"
SPINS = (
    "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 2))  # its own limit is 20 s\n"
    "def check(input, output, expected):\n    while output != expected: pass\n    return True"
)
EATS = "def check(input, output, expected):\n    return len(output) < 9 or bytearray(1 << 40)"
STOPS = "def check(input, output, expected):\n    if output != expected: raise SystemExit(0)\n    return True"
CHECKED = {
    "splits": stdin_reference(("12\n", "3 4\n"), checker=SPLITS),
    "exits": stdin_reference(("", "yes\n"), checker=EXITS),
    "eats": stdin_reference(("", "yes\n"), checker=EATS),
    "stops": stdin_reference(("", "yes\n"), checker=STOPS),
    "picks": call_reference("add", ("[1, 2]", '{"sum": [3]}'), checker=PICKS),
}
OUTPUTS = ["x", "1 2 3", "", "\n", "1.0 5.0", "3", "3 " * 5000, "\u0663 \u0664 \u0665", "nan nan", "9" * 5000 + " 1"]
OUTPUTS += ["\x00", "\ud800", "- -", "yes no maybe"]
RAISED = ["ImportError('x')", "ModuleNotFoundError('numpy')", "SystemExit(0)", "KeyboardInterrupt", "GeneratorExit"]
RAISED += [
    "AssertionError",
    "StopIteration",
    "RecursionError",
    "MemoryError",
    "BaseException('x')",
    "UnicodeError(1, 2)",
]
BODIES = [f"raise {error}" for error in RAISED]
BODIES += [
    "import numpy\n    return numpy.array([a, b]).sum()",
    "from no_such_module import add\n    return add(a, b)",
    "import os\n    os._exit(0)",
    "import sys\n    sys.exit()",
    "r = []\n    for _ in range(9000): r = [r]\n    return r",
    "r = []\n    r.append(r)\n    return r",
    "r = {}\n    r[0] = r\n    return r",
    "return 10 ** 10000",
    "return float('nan')",
    "return add",
    "return lambda: 1",
    "return type('X', (), {'__eq__': lambda s, o: True, '__bool__': lambda s: True})()",
    "return type('E', (Exception,), {})()",
    "return (i for i in [1])",
    "return 'x' * (64 << 20)",
    "import os\n    os.write(4, b'\\x00\\x00\\x00\\x05{\"a\":')\n    return 3",
    "import os\n    os.write(4, b'\\xff\\xff\\xff\\xff')\n    return 3",
    "import os\n    os.close(4)",
    "import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)",
    "yield from (a, b)",
    "return bytes(range(256))",
    "return '\\ud800'",
    "return {1: {2}, (3,): frozenset([4])}",
    "return a.__class__",
    "return __import__('os')",
]
PROGRAMS = [f"def add(a, b):\n    {body}" for body in BODIES]
PROGRAMS += ["raise ImportError", "import numpy", "def add(", "", "add = 3", "class Solution:\n    add = None", "\x00"]
PROGRAMS += ["async def add(a, b):\n    return a + b", "def add(a, b): return a + b\ndel add", "x = " + "(" * 500]
BOMBS = [
    "9^{9^{9^9}}",
    "1000000!",
    "(x+1)^{100000}",
    r"\binom{10^9}{10^8}",
    "99999999999999999999!!!",
    "2^{2^{2^{30}}}",
]
BOMBS += [
    r"\sqrt{" * 28 + "2" + "}" * 28,
    r"\sum_{k=1}^{10^{12}} \sin(k!)",
    r"\frac{0}{0}",
    "7\ud800",
    r"\infty-\infty",
]
BOMBS += ["10^{9999999999}", "10^{-9999999999}", "1e999999999", "9^9^9^9^9", r"\{1,2\}\cup", "[1,", "1/0", "x=" * 50]
BOMBS += [
    r"\begin{pmatrix}a\\b\end{pmatrix}^{100}",
    "25_{99999}",
    "1" * 999,
    "0.(3)",
    "5%%%",
    "(1,2)" * 100,
    r"\text{" * 20,
]
CUT_OFF = "<think>\nFirst I add"
REFERENCES = ["73", "1/2", r"\sqrt{2}", "x^2+1", "(3,4]", "1,2", r"\text{Evelyn}", "B", "x>3", r"5\text{ cm}", "50%"]
REFERENCES += [
    r"\begin{pmatrix}1\\2\end{pmatrix}",
    r"\{1,2\}",
    r"\frac{1\pm\sqrt{17}}{2}",
    "25_6",
    "4:30 p.m.",
    "10^{12}",
]


@pytest.fixture(scope="module")
def quick_pool() -> Iterator[JudgePool]:
    """A short limit of CPU time: a bomb needs more, and no reference here, also not the first one of a worker, which loads the parser."""
    with JudgePool(VerifyConfig(math=MathConfig(cpu_s=0.6), runtime=VerifyRuntime(math_workers=2))) as pool:
        yield pool


def unscored(pool: JudgePool, problems: list[Problem], responses: list[str]) -> dict[tuple[int, str], str]:
    """The outcomes that are not the model's, by problem and response; all references must pass their trial."""
    assert faulty_references(problems, pool, run_tests=True) == []
    found = {(i, r): pool.submit(p, r) for i, p in enumerate(problems) for r in responses}
    verdicts = {key: future.result(timeout=300) for key, future in found.items()}
    return {key: f"{v.outcome}: {v.detail}" for key, v in verdicts.items() if v.outcome not in THE_MODELS}


def test_no_boxed_text_leaves_a_math_answer_unscored(quick_pool: JudgePool) -> None:
    unboxed = [f"{THINK}The answer is {bomb}." for bomb in BOMBS[:4]]
    assert unscored(quick_pool, [math_problem(REFERENCES[2])], [boxed(bomb) for bomb in BOMBS]) == {}
    assert unscored(quick_pool, [math_problem(gold) for gold in REFERENCES], [boxed(BOMBS[0])]) == {}
    assert unscored(quick_pool, [math_problem("73")], unboxed) == {}


def test_a_bomb_is_wrong_and_says_what_it_used_up(quick_pool: JudgePool) -> None:
    verdict = quick_pool.judge(math_problem("73"), boxed("9^{9^{9^{9}}}"))
    assert (verdict.outcome, verdict.score, "CPU time" in verdict.detail) == (Outcome.SCORED, 0.0, True), verdict


@pytest.mark.parametrize("gold", ["9^{9^{9^9}}+x", "1000000!-x"])
def test_a_reference_that_exceeds_the_limits_by_itself_scores_no_answer(quick_pool: JudgePool, gold: str) -> None:
    for answer in ("5", "x", gold, r"\frac{1}{2}"):
        assert quick_pool.submit(math_problem(gold), boxed(answer)).result().outcome is Outcome.BAD_REFERENCE


@pytest.mark.parametrize(
    "reference", [MathReference(answers=(r"\frac{1}{2",)), MathReference(answers=("9^{9^{9^9}}+x",)), stdin_reference()]
)
def test_a_reference_that_cannot_be_used_leaves_an_answer_that_was_cut_off_unscored_as_the_others(
    quick_pool: JudgePool, reference: MathReference | CodeReference
) -> None:
    """Else one cut-off answer of four would be the whole score of the problem."""
    outcomes = [quick_pool.submit(problem(reference), text).result().outcome for text in (boxed("5"), CUT_OFF)]
    assert outcomes == [Outcome.BAD_REFERENCE, Outcome.BAD_REFERENCE]


@pytest.mark.parametrize("name", CHECKED)
def test_no_output_leaves_a_checked_program_unscored(code_pool: JudgePool, name: str) -> None:
    reference = CHECKED[name]
    programs = [f"import sys\nsys.stdout.buffer.write({text.encode('utf-8', 'surrogatepass')!r})" for text in OUTPUTS]
    if name == "picks":  # by calls: what the program returns
        programs = [program for program in PROGRAMS if "add" in program][:24]
    assert unscored(code_pool, [problem(reference)], [fenced(program) for program in programs]) == {}


def test_a_checker_that_spins_on_an_output_makes_the_program_wrong(sandbox_name: str) -> None:
    """A test that spins counts as a time-out of the program, of which one is allowed here."""
    reference = stdin_reference(("", "yes\n"), ("", "yes\n"), checker=SPINS)
    with JudgePool(code_config(max_timeouts=1)) as pool:
        verdict = pool.judge(problem(reference), fenced("print('no')"))
    assert (verdict.outcome, verdict.score, "stopped after 1" in verdict.detail) == (Outcome.SCORED, 0.0, True), verdict


ASSERTED = {
    "plain": ADD_ASSERTS,
    "twice": asserts_reference("assert add(add(1, 2), 3) == 6 and [add(1, 2)] == [3]"),
    "caught": asserts_reference("try:\n    r = add(1, 2)\nexcept ImportError:\n    r = 0\nassert r == 3"),
    "imports": asserts_reference("def check(f):\n    import math\n    assert math.isclose(f(1, 2), 3)\ncheck(add)"),
}


@pytest.mark.parametrize("name", ASSERTED)
def test_no_program_leaves_assertions_unscored(code_pool: JudgePool, name: str) -> None:
    programs = PROGRAMS if name in ("plain", "caught") else PROGRAMS[::3]
    assert unscored(code_pool, [problem(ASSERTED[name])], [fenced(program) for program in programs]) == {}


def test_no_program_leaves_calls_and_outputs_unscored(code_pool: JudgePool) -> None:
    free = dataclasses.replace(call_reference("add", ("[1, 2]", "[3, 4]")), is_order_free=True)
    references: list[CodeReference] = [call_reference("add", ("[1, 2]", "3")), free, ADD_STDIN]
    assert unscored(code_pool, [problem(r) for r in references], [fenced(program) for program in PROGRAMS]) == {}


IN_A_FUNCTION = "def check(f):\n    assert f(1, 2) == 3\n    import klear_no_such_module\ncheck(add)"


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (asserts_reference(IN_A_FUNCTION), "ModuleNotFoundError"),
        (asserts_reference("assert add(1, 2) == 3\nimport klear_no_such_module"), "ModuleNotFoundError"),
        (asserts_reference("assert add(1, ", "import klear_no_such_module"), "test 0: SyntaxError"),
        (stdin_reference(("1", "y"), ("1", "x"), checker=SPLITS), "test 0: ValueError"),
    ],
)
def test_a_reference_that_fails_its_trial_scores_no_program_whatever_it_does(
    code_pool: JudgePool, reference: CodeReference, reason: str
) -> None:
    programs = ["def add(a, b):\n    return a + b", "def add(a, b):\n    return 7", "raise ImportError", "print(1, 1)"]
    for response in [*map(fenced, programs), CUT_OFF]:
        verdict = code_pool.submit(problem(reference), response).result()  # uncounted: they would stop a stage
        assert verdict.outcome is Outcome.BAD_REFERENCE, verdict
        assert reason in verdict.detail


ONE_BROKEN = [
    (asserts_reference("assert add(1, ", "assert add(1, 2) == 3", "assert add(2, 2) == 5"), "test 0: SyntaxError"),
    (stdin_reference(("3", "1 3"), ("3", "x"), ("4", "2 2"), checker=SPLITS), "test 1: ValueError"),
    (
        call_reference("add", ("[1, 2]", "3"), ("[1, 2]", '{"sum": []}'), ("[2, 2]", '{"sum": [5]}'), checker=PICKS),
        "test 0: TypeError",
    ),
]


@pytest.mark.parametrize(("reference", "fault"), ONE_BROKEN[:2])
def test_a_test_that_fails_its_trial_is_left_out_by_name_and_the_others_judge(
    code_pool: JudgePool, reference: CodeReference, fault: str
) -> None:
    right_once = "def add(a, b):\n    return a + b\nif __name__ == '__main__': print(1, 3)"
    verdict = code_pool.judge(problem(reference), fenced(right_once))
    assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 0.5)
    assert verdict.detail.startswith("1 of 2 tests passed; test 2: ")
    (note,) = code_pool.notes_on_trials([problem(reference), problem(ADD_STDIN)])
    assert note.startswith("1 of 2 references have tests that cannot be used, which are left out")
    assert f"2 of 3 tests can be run; {fault}" in note


def test_all_tests_but_one_may_fail_their_trial_and_no_program_is_unscored_then(code_pool: JudgePool) -> None:
    reference, fault = ONE_BROKEN[2]
    assert unscored(code_pool, [problem(reference)], [fenced(program) for program in PROGRAMS[::3]]) == {}
    (note,) = code_pool.notes_on_trials([problem(reference)])
    assert f"1 of 3 tests can be run; {fault}" in note


def test_an_import_that_the_tests_can_do_without_is_no_fault(code_pool: JudgePool) -> None:
    reference = asserts_reference(
        "try:\n    import klear_no_such_module\nexcept ImportError:\n    pass\nassert add(1, 2) == 3"
    )
    assert code_pool.judge(problem(reference), fenced("def add(a, b):\n    return a + b")).score == 1.0


def test_tests_that_walk_over_what_the_program_returns_pass_their_trial(code_pool: JudgePool) -> None:
    walk = "def values(n):\n    v = []\n    while n:\n        v.append(n.val)\n        n = n.next\n    return v\n"
    reference = asserts_reference(walk + "assert values(f(3)) == [3]")
    assert code_pool.judge(problem(reference), fenced("def f(x):\n    return ListNode(x)")).score == 1.0


class Counting:
    """Judging processes that count the trials, and pass the second one."""

    def __init__(self) -> None:
        self.num_trials = 0

    def submit(self, task: Task) -> Future[Verdict | Fault]:
        assert isinstance(task, MathTask)
        self.num_trials += task.is_trial
        done: Future[Verdict | Fault] = Future()
        lost = Fault(kind="lost", detail="no node")
        done.set_result(lost if self.num_trials == 1 else Verdict(outcome=Outcome.SCORED, score=1.0))
        return done

    def close(self) -> None:
        pass


def test_a_reference_is_tried_once_unless_the_machine_failed() -> None:
    counting = Counting()
    with JudgePool(VerifyConfig(), counting) as pool:
        answer = (math_problem(r"\sqrt{3}+x"), boxed("x+1"))
        assert pool.submit(*answer).result().outcome is Outcome.JUDGE_FAILED
        for _ in range(3):
            assert pool.submit(*answer).result().outcome is Outcome.SCORED
    assert counting.num_trials == 2
