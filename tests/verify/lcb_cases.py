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
    prints("a leading zero before 5,000 digits", "0" + "1" * 5000, "1" * 5000),
    prints("forty digits after the point", "1." + "0" * 39 + "1", "1"),
    prints("an exponent beyond a double's", "1e400", "1E+400"),
    prints("an exponent below a double's", "1e-400", "0"),
    prints("a vertical tab between numbers", "1\x0b2", "1 2"),
    prints("a form feed for a line end", "1\x0c2", "1\n2"),
    prints("a carriage return for a line end", "1\r2", "1\n2"),
    prints("a no-break space between numbers", "1\u00a02", "1 2"),
    prints("a no-break space between words", "a\u00a0b", "a b"),
    prints("a byte order mark", "\ufeff1", "1"),
    prints("a unit separator at the end", "6\x1f", "6"),
    prints("nan twice", "nan 1", "nan  1"),
    prints("a fraction", "1/2", "0.5"),
    prints("a comma for thousands", "1,000", "1000"),
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
    returns("nan in a list", "[float('nan')]", "[NaN]"),
    returns("a tuple of tuples", "((1, 2), (3, 4))", "[[1, 2], [3, 4]]"),
    returns("a named tuple", "namedtuple('P', 'a b')(1, 2)", "[1, 2]"),
    returns("a range", "range(2)", "[0, 1]"),
    returns("a generator", "(i for i in range(2))", "[0, 1]"),
    returns("a deque", "deque([1, 2])", "[1, 2]"),
    returns("a deque in a list", "[deque([1, 2])]", "[[1, 2]]"),
    returns("the keys of a dict", "{1: 1}.keys()", "[1]"),
    returns("a Counter", "Counter('a')", '{"a": 1}'),
    returns("a large integer for a float", "2**70", "1180591620717411303424.0"),
    returns("an integer that no float is", "2**53 + 1", "9007199254740992.0"),
    returns("bytes", "b'a'", '"a"'),
    returns("a Decimal", "__import__('decimal').Decimal(2)", "2"),
    returns("an object that equals everything", "type('E', (), {'__eq__': lambda self, other: True})()", "7"),
    returns("a numpy number", "__import__('numpy').int64(3)", "3"),
    returns("a numpy array", "__import__('numpy').array([1, 2])", "[1, 2]"),
    returns("by the name mode", "mode([x, x, 2])", "1"),
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
VALUES += [
    LcbCase(name=f"returns {name}", program=program, given=given, expected="1", fn_name="f")
    for name, program, given in (
        (
            "by a class inherited",
            "class B:\n    def f(self, x):\n        return x\nclass Solution(B):\n    pass\n",
            "1",
        ),
        ("by a lambda", "f = lambda x: x\n", "1"),
        ("beside the words class Solution", "# no class Solution here\ndef f(x):\n    return x\n", "1"),
        ("by a function beside a class Solution", "class Solution:\n    pass\ndef f(x):\n    return x\n", "1"),
        ("by Optional[ListNode] in a signature", "def f(x: Optional[ListNode]):\n    return x\n", "1"),
        ("after an import from __future__", "from __future__ import annotations\ndef f(x):\n    return x\n", "1"),
        ("with too many arguments", "def f(x):\n    return x\n", "1\n2"),
        ("by another name", "def g(x):\n    return x\n", "1"),
    )
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
PROGRAMS += [
    reads(
        "input() past the end of a line without end",
        "try:\n    while True:\n        input()\nexcept EOFError:\n    print(6)\n",
        "3\n1",
    ),
    reads("input() of an empty line", "input()\nprint(len(input()) + len(input()))\n", "3\n\nx\n", "1"),
    reads("input() of a Windows line", "print(len(input()))\n", "abc\r\n", "3"),
    reads("input() with a prompt", "input('n?')\nprint(6)\n"),
    reads(
        "readline(), then read()", "import sys\nsys.stdin.readline()\nprint(sum(map(int, sys.stdin.read().split())))\n"
    ),
    reads("readlines() less their ends", "import sys\nprint(sum(map(int, sys.stdin.readlines()[1][:-1].split())))\n"),
    reads("sys.stdin.read(1)", "import sys\nprint(len(sys.stdin.read(1)))\n", expected="1"),
    reads(
        "sys.stdin.buffer.readlines()", "import sys\nprint(sum(map(int, sys.stdin.buffer.readlines()[1].split())))\n"
    ),
    reads("next(sys.stdin)", "import sys\nnext(sys.stdin)\nprint(sum(map(int, next(sys.stdin).split())))\n"),
    reads("/dev/stdin", "print(sum(map(int, open('/dev/stdin').read().split()[1:])))\n"),
    reads(
        "os.fstat(0)",
        "import io, os\nf = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\nf()\nprint(sum(map(int, f().split())))\n",
    ),
    reads("fileinput", "import fileinput\nprint(sum(map(int, list(fileinput.input())[1].split())))\n"),
    reads("stdin without import", "stdin.readline()\nprint(sum(map(int, stdin.readline().split())))\n"),
    reads("stdout without import", "stdout.write('6')\n"),
    reads("maxsize without import", "print(6 if maxsize > 0 else 0)\n"),
    reads("loads without import", "print(loads('6'))\n"),
    reads("shuffle without import", "x = [6]\nshuffle(x)\nprint(x[0])\n"),
    reads("findall without import", "print(findall('[0-9]', 'a6')[0])\n"),
    reads("StringIO without import", "print(StringIO('6').read())\n"),
    reads("os without import", "print(6 if os else 0)\n"),
    reads(
        "sys.stdout in a StringIO",
        "import io, sys\nout, sys.stdout = sys.stdout, io.StringIO()\nprint(6)\nout.write(sys.stdout.getvalue())\n",
    ),
    reads("sys.stdout closed at the end", "import sys\nprint(6)\nsys.stdout.close()\n"),
    reads("atexit", "import atexit\natexit.register(print, 6)\n"),
    reads("__del__ at the end", "class A:\n    def __del__(self):\n        print(6)\na = A()\n"),
    reads(
        "a thread that nobody joins",
        "import threading, time\ndef f():\n    time.sleep(0.3)\n    print(6)\nthreading.Thread(target=f).start()\n",
    ),
    reads("__main__ guard the other way round", "if '__main__' == __name__:\n    print(6)\n"),
    reads("globals()", "x = 6\nprint(globals()['x'])\n"),
    reads("an import from __future__", "from __future__ import annotations\nprint(6)\n"),
    reads("a star import in a try", "try:\n    from math import *\nexcept ImportError:\n    pass\nprint(6)\n"),
    reads("return outside a function", "print(6)\nreturn\n"),
    reads("eval in a comprehension", "a = 6\nprint([eval('a') for _ in range(1)][0])\n"),
    reads("sys.argv", "import sys\nprint(len(sys.argv))\n", expected="1"),
    reads("resource", "import resource\nprint(6)\n"),
    reads("os.getcwd()", "import os\nos.getcwd()\nprint(6)\n"),
    reads("os.fork()", "import os\nif os.fork() == 0:\n    os._exit(0)\nprint(6)\n"),
    reads(
        "recursion of 60,000 frames", "def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\nprint(f(60000) - 59994)\n"
    ),
    reads("an integer of 5,000 digits", "print(str(10**5000)[:1])\n", expected="1"),
    reads("sys.exit(text)", _SUM + "import sys\nsys.exit('bye')\n"),
    reads("KeyboardInterrupt", _SUM + "raise KeyboardInterrupt\n"),
    reads("17 MB of output", "print('a' * (17 << 20))\n", expected="a" * (17 << 20)),
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
