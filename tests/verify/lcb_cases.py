# ruff: noqa: E501
"""Corner cases of LiveCodeBench's judge: programs with one test each, and the verdicts of its own test function.

`python tests/verify/lcb_cases.py TESTING_UTIL` judges them by a copy of lcb_runner/evaluation/testing_util.py and writes
tests/files/lcb_verdicts.json, in which each case's verdict stands beside the commit that gave it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

COMMIT = "28fef95ea8c9f7a547c8329f2cd3d32b92c1fa24"
"""Commit of github.com/LiveCodeBench/LiveCodeBench (MIT) whose function gave the verdicts."""
VERDICTS = Path(__file__).parents[1] / "files" / "lcb_verdicts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LcbCase:
    """A program and one test: an input and the expected output, or JSON arguments of `fn_name` and the JSON result."""

    name: str
    program: str
    given: str = ""
    expected: str = ""
    fn_name: str = ""


def prints(name: str, output: str, expected: str) -> LcbCase:
    return LcbCase(name=f"prints {name}", program=f"print({output!r}, end='')", expected=expected)


def returns(name: str, value: str, expected: str) -> LcbCase:
    program = f"class Solution:\n    def f(self, x):\n        return {value}\n"
    return LcbCase(name=f"returns {name}", program=program, given="1", expected=expected, fn_name="f")


def reads(name: str, program: str, given: str = "3\n1 2 3\n", expected: str = "6") -> LcbCase:
    return LcbCase(name=name, program=program, given=given, expected=expected)


OUTPUTS = [
    prints("the text", "YES 1", "YES 1"),
    prints("blanks around", "  6 \n\n", "6"),
    prints("blanks around a line", "1 \n 2", "1\n2"),
    prints("a Windows line end", "1\r\n2", "1\n2"),
    prints("two blanks between words", "a  b", "a b"),
    prints("two blanks between numbers", "1  2", "1 2"),
    prints("a tab between numbers", "1\t2", "1 2"),
    prints("a blank line inside", "1\n\n2", "1\n2"),
    prints("one line too many", "1\n2\n3", "1\n2"),
    prints("an integer as a decimal", "1.0", "1"),
    prints("a decimal with more zeros", "0.500", "0.5"),
    prints("a word and a decimal", "YES 1.0", "YES 1"),
    prints("a decimal off by 1e-9", "0.333333333", "0.3333333333"),
    prints("scientific notation", "1e3", "1000"),
    prints("a plus sign", "+1", "1"),
    prints("a number with underscores", "1_000", "1000"),
    prints("inf for Infinity", "inf", "Infinity"),
    prints("nan for NaN", "nan", "NaN"),
    prints("a signalling nan", "snan", "1"),
    prints("digits of another script", "\uff11\uff12", "12"),
    prints("a number that is wrapped otherwise", "1\n2", "1 2"),
    prints("another case", "Yes", "YES"),
    prints("a large integer off by one", "50000000000000001", "50000000000000000"),
    prints("negative zero", "-0", "0"),
    prints("a leading zero", "007", "7"),
    prints("quotes around", '"abc"', "abc"),
    prints("nothing for nothing", "", ""),
    prints("something for nothing", "1", ""),
    prints("hex", "0x10", "16"),
    prints("one number less", "1 2", "1 2 3"),
]
VALUES = [
    returns("the value", "[1, 2]", "[1, 2]"),
    returns("a tuple for a list", "(1, 2)", "[1, 2]"),
    returns("a tuple in a list", "[(1, 2)]", "[[1, 2]]"),
    returns("a float close by", "2.5000001", "2.5"),
    returns("a float off by the last bit", "0.1 + 0.2", "0.3"),
    returns("a float for an integer", "2.0", "2"),
    returns("an integer for a float", "2", "2.0"),
    returns("True for 1", "True", "1"),
    returns("1 for true", "1", "true"),
    returns("None", "None", "null"),
    returns("a string for a number", "'2'", "2"),
    returns("a dict in another order", "{'b': 1, 'a': 2}", '{"a": 2, "b": 1}'),
    returns("a dict with number keys", "{1: 2}", '{"1": 2}'),
    returns("a set for a list", "{1}", "[1]"),
    returns("a list in another order", "[2, 1]", "[1, 2]"),
    returns("nan", "float('nan')", "NaN"),
    returns("inf", "float('inf')", "Infinity"),
    LcbCase(
        name="returns by a function", program="def f(x):\n    return x + 1\n", given="1", expected="2", fn_name="f"
    ),
    LcbCase(
        name="returns after printing",
        program="def f(x):\n    print('debug')\n    return x\n",
        given="1",
        expected="1",
        fn_name="f",
    ),
    LcbCase(name="returns what exit leaves", program="def f(x):\n    exit()\n", given="1", expected="1", fn_name="f"),
    LcbCase(
        name="returns with two arguments",
        program="def f(a, b):\n    return a + b\n",
        given="1\n2",
        expected="3",
        fn_name="f",
    ),
    LcbCase(
        name="returns by a name without import",
        program="def f(x):\n    return Counter([x])[1]\n",
        given="1",
        expected="1",
        fn_name="f",
    ),
    LcbCase(
        name="returns by List in a signature",
        program="class Solution:\n    def f(self, x: List[int]) -> int:\n        return sum(x)\n",
        given="[1, 2]",
        expected="3",
        fn_name="f",
    ),
    LcbCase(
        name="returns what changes its argument",
        program="def f(x):\n    x.append(3)\n    return x\n",
        given="[1]",
        expected="[1, 3]",
        fn_name="f",
    ),
]
_SUM = "n = int(input())\nprint(sum(map(int, input().split())))\n"
PROGRAMS = [
    reads("input()", _SUM),
    reads("sys.stdin.read()", "import sys\nd = sys.stdin.read().split()\nprint(sum(map(int, d[1:])))\n"),
    reads("sys.stdin.readline()", "import sys\ninput = sys.stdin.readline\n" + _SUM),
    reads(
        "sys.stdin.readlines()", "import sys\nlines = sys.stdin.readlines()\nprint(sum(map(int, lines[1].split())))\n"
    ),
    reads("sys.stdin.buffer.read()", "import sys\nd = sys.stdin.buffer.read().split()\nprint(sum(map(int, d[1:])))\n"),
    reads("sys.stdin.buffer.readline() once", "import sys\nn = int(sys.stdin.buffer.readline())\nprint(6)\n"),
    reads(
        "sys.stdin.buffer.readline() twice",
        "import sys\nf = sys.stdin.buffer.readline\nf()\nprint(sum(map(int, f().split())))\n",
    ),
    reads(
        "a loop over sys.stdin",
        "import sys\nlines = [line for line in sys.stdin]\nprint(sum(map(int, lines[1].split())))\n",
    ),
    reads("open(0)", "d = open(0).read().split()\nprint(sum(map(int, d[1:])))\n"),
    reads("os.read(0)", "import os\nd = os.read(0, 100).split()\nprint(sum(map(int, d[1:])))\n"),
    reads("input() past the end", "try:\n    while True:\n        input()\nexcept EOFError:\n    print(6)\n"),
    reads(
        "__main__ guard",
        "def main():\n    input()\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()\n",
    ),
    reads("__main__ guard that is not last", "if __name__ == '__main__':\n    print(6)\nx = 1\n"),
    reads(
        "global",
        "total = 0\ndef add(x):\n    global total\n    total += x\ninput()\nfor x in map(int, input().split()):\n    add(x)\nprint(total)\n",
    ),
    reads("a name without import", "input()\nprint(reduce(add, map(int, input().split())))\n"),
    reads(
        "recursion of 20,000 frames", "def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\nprint(f(20000) - 19994)\n"
    ),
    reads(
        "a thread with a large stack",
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**26)\ndef main():\n    input()\n    print(sum(map(int, input().split())))\nt = threading.Thread(target=main)\nt.start()\nt.join()\n",
    ),
    reads("sys.exit()", _SUM + "import sys\nsys.exit()\n"),
    reads("sys.exit(1)", _SUM + "import sys\nsys.exit(1)\n"),
    reads("exit()", _SUM + "exit()\n"),
    reads("quit()", _SUM + "quit()\n"),
    reads("an exception after the answer", _SUM + "raise ValueError\n"),
    reads("os._exit(0) after a flush", "import os, sys\n" + _SUM + "sys.stdout.flush()\nos._exit(0)\n"),
    reads("text on standard error", "import sys\nprint('debug', file=sys.stderr)\n" + _SUM),
    reads("sys.stdout.write", "import sys\nsys.stdout.write('6')\n"),
    reads("sys.stdout.buffer.write", "import sys\nsys.stdout.buffer.write(b'6')\n"),
    reads("os.write(1)", "import os\nos.write(1, b'6')\n"),
    reads("numpy", "import numpy as np\nprint(int(np.array([1, 2, 3]).sum()))\n"),
    reads("200 MB", "x = bytearray(200 << 20)\nprint(6)\n"),
    reads("1.2 GB", "x = bytearray(1200 << 20)\nprint(6)\n"),
    reads("a sleep of one second", "import time\ntime.sleep(1)\nprint(6)\n"),
    reads("a loop without end", "while True:\n    pass\n"),
    reads("a syntax error", "print(6\n"),
    reads("a function that is never called", "def main():\n    print(6)\n"),
    reads("a file that is written", "open('t.txt', 'w').write('6')\nprint(open('t.txt').read())\n"),
    reads(
        "a decorator and a class",
        "from functools import lru_cache\nclass A:\n    @staticmethod\n    @lru_cache(None)\n    def f(n):\n        return n * 2\nprint(A.f(3))\n",
    ),
]
CASES = [*OUTPUTS, *VALUES, *PROGRAMS]


def _judge(case: LcbCase) -> bool:
    """Return the verdict of `run_test` of the module `testing_util`, which this process can import."""
    from testing_util import run_test

    tests = {"inputs": [case.given], "outputs": [case.expected]}
    if case.fn_name:
        tests["fn_name"] = case.fn_name
    results, _ = run_test({"input_output": json.dumps(tests)}, test=case.program, timeout=6)
    return bool(results) and all(result is True or result > 0 for result in results)


def _verdict_of(name: str, folder: Path) -> bool:
    """Judge one case in a process of its own; a process that dies without a verdict is a wrong answer, as there."""
    done = subprocess.run(
        [sys.executable, __file__, str(folder), name],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.strip().endswith("verdict: True")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        sys.path.insert(0, sys.argv[1])
        print("\nverdict:", _judge(next(case for case in CASES if case.name == sys.argv[2])))
    else:
        folder = Path(sys.argv[1]).resolve().parent
        table = {case.name: _verdict_of(case.name, folder) for case in CASES}
        VERDICTS.write_text(json.dumps({"commit": COMMIT, "is_right": table}, indent=1, ensure_ascii=False) + "\n")
