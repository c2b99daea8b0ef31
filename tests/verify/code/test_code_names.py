# ruff: noqa: E501
"""Names that published solutions expect without an import: there for every scope that does not bind them, and never in a program's way."""

import pytest
from verify_builders import ADD_STDIN, asserts_reference, call_reference, fenced, problem, stdin_reference

from klear_core.types import CodeReference, Outcome
from klear_core.verify import JudgePool

FIVE = stdin_reference(("", "5\n"))
SIZE = call_reference("size", ("[[1, 2, 3, 4, 5]]", "5"))
OTHER_SCOPE = {
    "a local import": "def other():\n    from collections import deque\n    return deque()\nprint(len(deque([1] * 5)))",
    "a local import of a module": "def other():\n    import math\n    return math.pi\nprint(math.isqrt(25))",
    "a parameter": "def other(heappush):\n    return heappush\nh = []\nfor i in range(5):\n    heappush(h, i)\nprint(len(h))",
    "a keyword-only parameter": "def other(*, gcd=1, **lcm):\n    return gcd\nprint(gcd(10, 15) * lcm(1, 1))",
    "a lambda's parameter": "other = lambda ceil: ceil\nprint(ceil(4.5))",
    "a comprehension's variable": "other = [math for math in range(3)]\nprint(math.floor(5.5))",
    "a generator's variable": "other = list(inf for inf in range(3))\nprint(5 if inf > 10**9 else 0)",
    "a local variable": "def other():\n    count = 1\n    return count\nprint(next(count(5)))",
    "a nested function": "def other():\n    def accumulate(x):\n        return x\n    return accumulate\nprint(list(accumulate([2, 3]))[-1])",
    "a nested class": "def other():\n    class Counter:\n        pass\nprint(Counter('aaaaa')['a'])",
    "a class attribute": "class Other:\n    deque = 3\n    def run(self):\n        return len(deque([1] * 5))\nprint(Other().run())",
    "a method": "class Other:\n    def reduce(self, x):\n        return reduce(lambda a, b: a + b, x)\nprint(Other().reduce([2, 3]))",
    "an exception's name": "def other():\n    try:\n        1 / 0\n    except ZeroDivisionError as e:\n        return str(e)\nother()\nprint(5 if 2 < e < 3 else 0)",
    "an exception's name at the top level": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    pass\nprint(int(e) + 3)",
    "a with statement's name": "def other():\n    with open('/dev/null') as repeat:\n        return repeat\nprint(sum(repeat(1, 5)))",
    "a walrus": "def other():\n    return (comb := 3)\nprint(comb(5, 1))",
    "a match capture": "def other(x):\n    match x:\n        case [product, *chain]:\n            return product, chain\nprint(len(list(chain([1, 2], [3, 4, 5]))) * len(list(product([1]))))",
    "a deleted local": "def other():\n    bisect_left = 1\n    del bisect_left\nprint(bisect_left([1, 2, 3, 4, 5, 6], 6))",
    "a deleted import": "from collections import deque\ndel deque\nprint(len(deque([1] * 5)))",
    "a global statement": "def main():\n    global deque\n    from collections import deque\ndef size(x):\n    return len(deque(x))\nprint(size([1] * 5))",
    "a nonlocal variable": "def other():\n    sqrt = 1\n    def inner():\n        nonlocal sqrt\n        sqrt += 1\n    inner()\n    return sqrt\nprint(int(sqrt(25)))",
    "a loop variable": "def other():\n    for itertools in range(3):\n        pass\nprint(sum(itertools.repeat(1, 5)))",
    "a star import": "from collections import *\nprint(len(deque([1] * 5)) + ceil(-0.5))",
    "a conditional import": "if __name__ == 'not here':\n    from collections import deque\nprint(len(deque([1] * 5)))",
    "an import that fails": "try:\n    from no_such_module import deque\nexcept ImportError:\n    pass\nprint(len(deque([1] * 5)))",
    "an import that fails, with another way": "try:\n    from no_such_module import gcd\nexcept ImportError:\n    from math import gcd\nprint(gcd(10, 15))",
    "an import for the type checker": "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from typing import List\ndef size(x: List[int]) -> int:\n    return len(x)\nprint(size([1] * 5))",
    "code in a string": "print(eval('gcd(10, 15)'))",
    "a recursive local function named alike": "def other():\n    def perm(n):\n        return 1 if n == 0 else perm(n - 1)\n    return perm(3)\nother()\nprint(perm(5, 1))",
    "an f-string alone": "print(f'{gcd(10, 15)}')",
    "a decorator": "@lru_cache(None)\ndef f(n):\n    return n\nprint(f(5))",
    "a decorator of a class": "@dataclass\nclass Point:\n    x: int\n    seen: List[int] = field(default_factory=list)\nprint(Point(5).x)",
    "a base class": "class Table(defaultdict):\n    pass\nprint(Table(lambda: 5)[0])",
    "a default value": "def size(x, big=inf):\n    return len(x) if big > 9 else 0\nprint(size([1] * 5))",
    "an annotation": "def size(x: List[int], y: Optional[Dict[str, int]] = None) -> Tuple[int, ...]:\n    return len(x)\nprint(size([1] * 5))",
    "an annotated variable": "seen: DefaultDict[str, Deque[int]] = defaultdict(deque)\nprint(len(seen) + 5)",
    "annotations that are not evaluated": "from __future__ import annotations\ndef size(x: List[int]) -> Dict[str, int]:\n    return len(x)\nprint(size([1] * 5))",
    "annotations that are evaluated later": "from __future__ import annotations\nimport typing\ndef size(x: List[int]):\n    return len(x)\ntyping.get_type_hints(size)\nprint(size([1] * 5))",
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_SCOPE)
def test_a_name_that_another_scope_binds_is_there_for_the_rest(code_pool: JudgePool, case: str) -> None:
    verdict = code_pool.judge(problem(FIVE), fenced(OTHER_SCOPE[case]))
    assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 1.0), verdict.detail


OWN = {
    "a function": "def gcd(a, b):\n    return 5\nprint(gcd(2, 3))",
    "a class": "class deque:\n    def __init__(self, x):\n        self.n = 5\nprint(deque([1]).n)",
    "a variable": "e = 5\nprint(e)",
    "a later function": "def main():\n    print(heappush(1))\ndef heappush(x):\n    return 5\nmain()",
    "a variable that a function sets": "def init():\n    global count\n    count = 5\ninit()\nprint(count)",
    "an import under the same name": "from operator import mul as gcd\nprint(gcd(1, 5))",
    "a module under the same name": "import cmath as math\nprint(5 if math.sqrt(-1) == 1j else 0)",
    "a loop's variable": "for inf in range(6):\n    pass\nprint(inf)",
    "a star import": "from operator import *\nprint(add(2, 3))",
    "code that is executed": "exec('def gcd(a, b): return 5')\nprint(gcd(2, 3))",
    "a name put into globals": "globals()['gcd'] = lambda a, b: 5\nprint(gcd(2, 3))",
    "a name absent from globals": "if 'cache' not in globals():\n    cache = {'x': 5}\nprint(cache['x'])",
    "a name absent from the module": "import sys\nif not hasattr(sys.modules[__name__], 'cache'):\n    cache = {'x': 5}\nprint(cache['x'])",
    "names of a module": "deque = 1\nprint(5 if [n for n in dir() if n[0] != '_'] == ['deque'] and 'gcd' not in globals() else 0)",
    "a builtin": "def pow(a, b):\n    return 5\nprint(pow(1, 1))",
    "the module's own function by its name": "from bisect import bisect\nprint(bisect([1, 2, 3, 4, 5], 9))",
    "a class of the standard library": "from datetime import datetime\nprint(5 if datetime(2024, 1, 5).day == 5 else 0)",
}  # fmt: skip


@pytest.mark.parametrize("case", OWN)
def test_the_programs_own_name_counts(code_pool: JudgePool, case: str) -> None:
    verdict = code_pool.judge(problem(FIVE), fenced(OWN[case]))
    assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 1.0), verdict.detail


CALLED = {
    "a method's local": "class Solution:\n    def other(self, List):\n        return List\n    def size(self, x: List[int]) -> int:\n        return len(deque(x))",
    "an import in the method": "class Solution:\n    def other(self):\n        from collections import deque\n    def size(self, x: List[int]) -> int:\n        return len(deque(x))",
    "a function under a condition": "try:\n    import no_such_module\nexcept ImportError:\n    def size(x):\n        return len(x)",
    "a function of another branch": "import sys\nif sys.version_info > (3,):\n    def size(x):\n        return len(x)\nelse:\n    size = None",
    "an import under another name": "from builtins import len as size",
}  # fmt: skip


@pytest.mark.parametrize("case", CALLED)
def test_a_called_program_has_the_names_too(code_pool: JudgePool, case: str) -> None:
    verdict = code_pool.judge(problem(SIZE), fenced(CALLED[case]))
    assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 1.0), verdict.detail


UNDEFINED = {
    "a name that nothing provides": (FIVE, "print(no_such_name(5))"),
    "a misspelt name": (FIVE, "print(len(dequeue([1] * 5)))"),
    "a function that is only provided": (call_reference("gcd", ("[10, 15]", "5")), "x = gcd(1, 2)"),
    "a function local to another": (SIZE, "def other():\n    def size(x):\n        return len(x)"),
    "a comprehension's variable": (SIZE, "x = [size for size in (len,)]"),
    "a lambda's parameter": (SIZE, "x = lambda size: len"),
    "a local of the program": (FIVE, "def other():\n    value = 5\nother()\nprint(value)"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNDEFINED)
def test_a_name_that_the_program_does_not_define_fails(code_pool: JudgePool, case: str) -> None:
    reference, program = UNDEFINED[case]
    verdict = code_pool.judge(problem(reference), fenced(program))
    assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 0.0), verdict.detail


TESTS = {
    "a loop in a function": "def check(f):\n    for add in (1, 2):\n        assert f(add, 1) == add + 1\ncheck(add)",
    "a parameter": "def check(add):\n    assert add(1, 2) == 3\ncheck(add)",
    "a comprehension's variable": "assert [add for add in range(2)] == [0, 1]\nassert add(1, 2) == 3",
    "a local import": "def other():\n    from operator import add\nassert add(1, 2) == 3",
    "a class attribute": "class Case:\n    add = 1\nassert add(1, 2) == 3",
}  # fmt: skip


@pytest.mark.parametrize("case", TESTS)
def test_a_name_that_the_tests_bind_elsewhere_is_still_the_programs(code_pool: JudgePool, case: str) -> None:
    right = code_pool.judge(problem(asserts_reference(TESTS[case])), fenced("def add(a, b):\n    return a + b"))
    wrong = code_pool.judge(problem(asserts_reference(TESTS[case])), fenced("def add(a, b):\n    return a - b"))
    assert (right.outcome, right.score, wrong.outcome, wrong.score) == (Outcome.SCORED, 1.0, Outcome.SCORED, 0.0), (
        right.detail
    )


def test_what_one_program_uses_is_not_there_for_the_next(code_pool: JudgePool) -> None:
    probe: CodeReference = stdin_reference(("", "False\n"))
    assert code_pool.judge(problem(FIVE), fenced("print(gcd(10, 15))")).score == 1.0
    assert (
        code_pool.judge(
            problem(probe), fenced("import builtins\nprint(any(n[0] == 'g' and n[1:] == 'cd' for n in dir(builtins)))")
        ).score
        == 1.0
    )
    assert code_pool.judge(problem(ADD_STDIN), fenced("print(sum(map(int, input().split())))")).score == 1.0
