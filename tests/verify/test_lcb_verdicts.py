"""The rule `decimal` gives LiveCodeBench's own verdicts, but for the cases listed here with their reasons."""

import json
from collections.abc import Iterator

import pytest
from lcb_cases import CASES, VERDICTS, LcbCase
from verify_builders import call_reference, fenced, problem, stdin_reference

from klear_core.config.verify import BENCHMARK_CODE, VerifyConfig, VerifyRuntime
from klear_core.types import CodeReference
from klear_core.verify import JudgePool

IS_RIGHT = json.loads(VERDICTS.read_text())["is_right"]

ACCEPTED = "the contests' own judges accept the program"
STDIN = f"its stand-in for standard input lacks this; {ACCEPTED}"
STDOUT = f"it collects text from sys.stdout alone; {ACCEPTED}"
WRAPPED = f"it runs the program as the body of a function, behind its own imports; {ACCEPTED}"
TAKEN = f"it takes this away from the program; {ACCEPTED}"
NO_JSON = "such a result has no JSON form in which it could leave the jail"
DIFFERENT = {
    "sys.stdin.buffer.readline() twice": STDIN,
    "sys.stdin.buffer.readlines()": STDIN,
    "sys.stdin.read(1)": STDIN,
    "readline(), then read()": STDIN,
    "readlines() less their ends": STDIN,
    "input() of a Windows line": STDIN,
    "a loop over sys.stdin": STDIN,
    "next(sys.stdin)": STDIN,
    "open(0)": STDIN,
    "/dev/stdin": STDIN,
    "os.read(0)": STDIN,
    "os.fstat(0)": STDIN,
    "sys.stdout.buffer.write": STDOUT,
    "stdout without import": STDOUT,
    "os.write(1)": STDOUT,
    "os._exit(0) after a flush": STDOUT,
    "sys.stdout closed at the end": STDOUT,
    "atexit": STDOUT,
    "a thread that nobody joins": STDOUT,
    "global": WRAPPED,
    "globals()": WRAPPED,
    "eval in a comprehension": WRAPPED,
    "a star import in a try": WRAPPED,
    "an import from __future__": WRAPPED,
    "returns after an import from __future__": WRAPPED,
    "__main__ guard that is not last": WRAPPED,
    "__main__ guard the other way round": WRAPPED,
    "returns beside the words class Solution": "it takes the words for a class",
    "returns by a function beside a class Solution": "it looks in the class alone",
    "returns by Optional[ListNode] in a signature": "it does not have LeetCode's class",
    "os without import": "more modules than it imports are there",
    "quit()": TAKEN,
    "resource": TAKEN,
    "os.getcwd()": TAKEN,
    "os.fork()": TAKEN,
    "sys.argv": "the arguments are its own process's",
    "an integer of 5,000 digits": "Python's limit of 4,300 digits is off here, as in the contests' older versions",
    "return outside a function": "a program is run as a file, in which this is a syntax error",
    "__del__ at the end": "the process ends without taking its objects apart",
    "17 MB of output": "a program may print verify.limits.output_mb = 16",
    "returns a Decimal": NO_JSON,
    "returns an object that equals everything": NO_JSON,
    "a file that is written": "a program may not write to its current folder",
}
SLOW = ("a loop without end", "a sleep of one second")


@pytest.fixture(scope="module")
def benchmark_pool(sandbox_name: str) -> Iterator[JudgePool]:
    """A pool with the rules of evaluation, and more time than the slowest machine needs."""
    rules = BENCHMARK_CODE.model_copy(update={"cpu_s": 30.0})
    with JudgePool(VerifyConfig(code=rules, runtime=VerifyRuntime(math_workers=1, code_workers=2))) as pool:
        yield pool


def reference_of(case: LcbCase) -> CodeReference:
    if not case.fn_name:
        return stdin_reference((case.given, case.expected))
    arguments = f"[{','.join(case.given.splitlines())}]"
    return call_reference(case.fn_name, (arguments, case.expected))


def judged(pool: JudgePool, case: LcbCase) -> bool:
    verdict = pool.judge(problem(reference_of(case), problem_id=case.name), fenced(case.program))
    assert verdict.outcome.counts_for_model, verdict
    return verdict.is_correct


def test_a_program_has_numpy_where_the_interpreter_has_it(benchmark_pool: JudgePool) -> None:
    """LiveCodeBench's harness has it. Elsewhere a note says so before compute is spent."""
    case = next(case for case in CASES if case.name == "numpy")
    notes = benchmark_pool.prepare([problem(reference_of(case), problem_id=case.name)])
    assert IS_RIGHT["numpy"]
    assert judged(benchmark_pool, case) == (not any("has no numpy" in note for note in notes))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in (*SLOW, "numpy")], ids=lambda case: case.name
)
def test_a_verdict_is_that_of_livecodebench(benchmark_pool: JudgePool, case: LcbCase) -> None:
    is_same = judged(benchmark_pool, case) == IS_RIGHT[case.name]
    assert is_same == (case.name not in DIFFERENT), DIFFERENT.get(case.name)


def test_the_table_has_a_verdict_for_each_case() -> None:
    assert {case.name for case in CASES} == IS_RIGHT.keys()
    assert DIFFERENT.keys() < IS_RIGHT.keys()
