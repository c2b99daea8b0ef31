# ruff: noqa: E501
"""The three kinds of tests: right programs pass, wrong ones get their share, what is broken is not scored."""

import pytest
from verify_builders import (
    ADD_ASSERTS,
    ADD_CALL,
    ADD_STDIN,
    asserts_reference,
    call_reference,
    fenced,
    problem,
    stdin_reference,
)

from klear_core.types import CodeReference, Outcome
from klear_core.verify import JudgePool

RIGHT = {
    "stdin": (ADD_STDIN, "a, b = map(int, input().split())\nprint(a + b)"),
    "stdin from a main function": (ADD_STDIN, "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()"),
    "stdin read whole": (ADD_STDIN, "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))"),
    "stdin by open(0)": (ADD_STDIN, "print(sum(map(int, open(0).read().split())))"),
    "stdin by os.read": (ADD_STDIN, "import os\nprint(sum(map(int, os.read(0, 100).split())))"),
    "stdin and exit(0)": (ADD_STDIN, "print(sum(map(int, input().split())))\nexit(0)"),
    "stdin in a thread": (
        ADD_STDIN,
        "import threading, sys\nthreading.stack_size(64 << 20)\nsys.setrecursionlimit(10**6)\n"
        "t = threading.Thread(target=lambda: print(sum(map(int, input().split()))))\nt.start()",
    ),
    "stdin at exit": (ADD_STDIN, "import atexit\natexit.register(lambda: print(sum(map(int, input().split()))))"),
    "stdout as a file that nobody closes": (ADD_STDIN, "out = open(1, 'w')\nprint(sum(map(int, input().split())), file=out)"),
    "stdout as a file that the program closed": (ADD_STDIN, "out = open(1, 'w')\nprint(sum(map(int, input().split())), file=out)\nout.close()"),
    "stdout as an object with write and flush": (
        ADD_STDIN,
        "import os, sys\nclass Out:\n    parts = []\n    write = parts.append\n"
        "    def flush(self): os.write(1, ''.join(self.parts).encode())\nsys.stdout = Out()\nprint(sum(map(int, input().split())))",
    ),
    "a larger stack": (ADD_STDIN, "import resource\nresource.setrlimit(resource.RLIMIT_STACK, [0x10000000, resource.RLIM_INFINITY])\nprint(sum(map(int, input().split())))"),
    "deep recursion": (ADD_STDIN, "import sys\nsys.setrecursionlimit(30000)\ndef f(n): return 0 if n == 0 else f(n - 1)\nf(20000)\nprint(sum(map(int, input().split())))"),
    "call of a function": (ADD_CALL, "def add(a, b):\n    return a + b"),
    "call of a method": (ADD_CALL, "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b"),
    "call of a lambda": (ADD_CALL, "add = lambda a, b: a + b"),
    "call that prints as well": (ADD_CALL, "def add(a, b):\n    print('debug', a)\n    return a + b"),
    "call without imports": (
        call_reference("count", ("[[1, 1, 2]]", '{"1": 2, "2": 1}')),
        "class Solution:\n    def count(self, x: List[int]) -> Dict[int, int]:\n        return dict(Counter(x))",
    ),
    "call that returns a tuple": (call_reference("pair", ("[1]", "[1, 2]")), "def pair(x):\n    return x, 2"),
    "asserts": (ADD_ASSERTS, "def add(a, b):\n    return a + b"),
    "check(candidate)": (
        asserts_reference("def check(candidate):\n    for i in range(3):\n        assert candidate(i, 1) == i + 1\ncheck(add)"),
        "def add(a, b):\n    return a + b",
    ),
    "check of a method": (
        asserts_reference("def check(candidate):\n    assert candidate(a=1, b=2) == 3\ncheck(Solution().add)"),
        "class Solution:\n    def add(self, a, b):\n        return a + b",
    ),
    "check with star imports": (
        asserts_reference("from operator import *\ndef check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)"),
        "def add(a, b):\n    return a + b",
    ),
    "asserts on sets and tuples": (
        asserts_reference("assert set(both((1, 2), (2, 3))) == {2}", "assert both((1, 2), (2, 3)) == (2,)"),
        "def both(a, b):\n    return tuple(set(a) & set(b))",
    ),
    "asserts with a class of the program": (
        asserts_reference("assert width(Box(3, 4)) == 3\nassert Box(3, 4).area() == 12"),
        "class Box:\n    def __init__(self, w, h):\n        self.w, self.h = w, h\n    def area(self):\n        return self.w * self.h\n"
        "def width(box):\n    return box.w",
    ),
    "asserts on a generator": (asserts_reference("assert list(upto(3)) == [0, 1, 2]"), "def upto(n):\n    yield from range(n)"),
    "asserts on linked lists": (
        asserts_reference("assert is_same_list(twice(list_node([1, 2])), list_node([1, 1, 2, 2]))"),
        "def twice(node):\n    return ListNode(node.val, ListNode(node.val, twice(node.next))) if node else None",
    ),
    "checker": (
        stdin_reference(("12\n", "3 4\n"), checker="def check(input, output, expected):\n    a, b = map(int, output.split())\n    return a * b == int(input)"),
        "print(2, int(input()) // 2)",
    ),
    "order free": (stdin_reference(("", "1\n2\n3\n"), is_order_free=True), "print(3)\nprint(1)\nprint(2)"),
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_program_passes_all_its_tests(code_pool: JudgePool, case: str) -> None:
    reference, program = RIGHT[case]
    verdict = code_pool.judge(problem(reference), fenced(program))
    assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 1.0), verdict.detail


WRONG = {
    "wrong sum": (ADD_STDIN, "print(5)", 0.0),
    "right on one of three": (ADD_STDIN, "print(3)", 1 / 3),
    "no newline handling needed but wrong order": (stdin_reference(("", "1\n2\n")), "print(2)\nprint(1)", 0.0),
    "a prefix of the output": (stdin_reference(("", "1\n2\n")), "print(1)", 0.0),
    "more than the output": (stdin_reference(("", "1\n")), "print(1)\nprint(2)", 0.0),
    "right text, failing exit status": (ADD_STDIN, "print(sum(map(int, input().split())))\nraise SystemExit(1)", 0.0),
    "right text, then an exception": (ADD_STDIN, "print(sum(map(int, input().split())))\n1/0", 0.0),
    "not Python": (ADD_STDIN, "def f(:", 0.0),
    "function is missing": (ADD_CALL, "def sub(a, b):\n    return a - b", 0.0),
    "only a star import defines it": (ADD_CALL, "from operator import *\ndef unrelated(): pass", 0.0),
    "a wrong method is not replaced by an imported function": (
        ADD_CALL,
        "from operator import add\nclass Solution:\n    def add(self, a, b):\n        return 7",
        0.0,
    ),
    "text for a number": (ADD_CALL, "def add(a, b):\n    return str(a + b)", 0.0),
    "asserts half right": (ADD_ASSERTS, "def add(a, b):\n    return 3", 1 / 3),
    "asserts, undefined function": (ADD_ASSERTS, "x = 1", 0.0),
    "abs instead": (stdin_reference(("", "YES\n")), "print('NO')", 0.0),
    "large integers differ": (stdin_reference(("", "123456789012\n")), "print(123456789013)", 0.0),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_program_gets_the_share_it_passes(code_pool: JudgePool, case: str) -> None:
    reference, program, score = WRONG[case]
    verdict = code_pool.judge(problem(reference), fenced(program))
    assert verdict.outcome is Outcome.SCORED, verdict.detail
    assert verdict.score == pytest.approx(score), verdict.detail


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (stdin_reference(), "empty"),
        (asserts_reference("import klear_no_such_module\nassert add(1, 2) == 3"), "ModuleNotFoundError"),
        (
            stdin_reference(("1", "1"), checker="def check(input, output, expected):\n    return 1 / 0"),
            "ZeroDivisionError",
        ),
        (stdin_reference(("1", "1"), checker="def check(input: "), "SyntaxError"),
    ],
)
def test_a_broken_reference_is_never_a_score(code_pool: JudgePool, reference: CodeReference, reason: str) -> None:
    verdict = code_pool.judge(problem(reference), fenced("print(1)"))
    assert verdict.outcome is Outcome.BAD_REFERENCE
    assert reason in verdict.detail
