# ruff: noqa: E501
"""Assertions on a right program pass in all the forms in which published tests are written, and fail on a wrong one.

Each row is a test program, a right program, and a text in it with its replacement that makes the program wrong.
"""

import pytest
from verify_builders import asserts_reference, fenced, problem

from klear_core.types import Outcome
from klear_core.verify import JudgePool

POINT = "class Point:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
EQUAL = "    def __eq__(self, o): return isinstance(o, Point) and (self.x, self.y) == (o.x, o.y)\n    def __hash__(self): return hash((self.x, self.y))\n"
DATA = "from dataclasses import dataclass\n@dataclass(frozen=True, order=True)\nclass Point:\n    x: int\n    y: int = 0\ndef mirror(p): return Point(-p.x, p.y)\n"
STACK = (
    "class Stack:\n    def __init__(self): self._items = []\n    def push(self, x): self._items.append(x)\n    def pop(self):\n"
    "        if not self._items: raise EmptyError('empty', 3)\n        return self._items.pop()\n    def __len__(self): return len(self._items)\n"
    "    def __contains__(self, x): return x in self._items\n    def __iter__(self): return iter(self._items)\n    def __bool__(self): return bool(self._items)\n"
    "    def __getitem__(self, i): return self._items[i]\n    def __repr__(self): return 'Stack(%r)' % self._items\n"
    "    def __enter__(self): return self\n    def __exit__(self, *a): self._items.clear(); return True\n"
    "class EmptyError(LookupError):\n    def __init__(self, text, code):\n        super().__init__(text)\n        self.code = code\n"
)
FORMS = {
    "list changed in place": ("a = [3, 1, 2]\nsort(a)\nassert a == [1, 2, 3]", "def sort(a): a.sort()", "a.sort()", "sorted(a)"),
    "returns None and changes": ("a = [0, 1]\nassert f(a) is None and a == [1, 0]", "def f(a): a.reverse()", "reverse", "copy"),
    "nested list in place": ("m = [[1, 2], [3, 4]]\nrow = m[0]\nflip(m)\nassert m == [[1, 3], [2, 4]] and m[0] is row", "def flip(m): m[0][1], m[1][0] = m[1][0], m[0][1]", "m[0][1], m[1][0] =", "_ ="),
    "dict in place": ("d = {'a': 1}\ninc(d)\nassert d == {'a': 2, 'b': 0}", "def inc(d):\n    d['a'] += 1\n    d['b'] = 0", "+= 1", "+= 0"),
    "set and bytearray in place": ("s, b = {1}, bytearray(b'ab')\nadd(s, b)\nassert s == {1, 2} and b == b'xb'", "def add(s, b):\n    s.add(2)\n    b[0] = 120", "s.add(2)", "s.add(3)"),
    "keyword argument in place": ("a = []\nput(into=a)\nassert a == [1]", "def put(into): into.append(1)", "(1)", "(2)"),
    "linked list in place": ("n = list_node([1, 2, 3])\ncut(n)\nassert is_same_list(n, list_node([1, 3]))", "def cut(n): n.next = n.next.next", ".next.next", ".next"),
    "returns its argument": ("a = [1]\nassert same(a) is a", "def same(a): return a", "return a", "return list(a)"),
    "default argument is shared": ("assert f(1) == [1]\nassert f(2) == [1, 2]", "def f(x, seen=[]):\n    seen.append(x)\n    return seen", "seen=[]):", "seen=[]):\n    seen = []"),
    "dates": ("import datetime\nassert nxt(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)", "def nxt(d): return d + timedelta(days=1)", "days=1", "days=2"),
    "datetimes with a zone": ("from datetime import *\nassert f(datetime(2024, 1, 1, tzinfo=timezone.utc)) == datetime(2024, 1, 1, 1, tzinfo=timezone.utc)", "from datetime import timedelta\ndef f(d): return d + timedelta(hours=1)", "hours=1", "hours=2"),
    "durations": ("from datetime import timedelta\nassert total([timedelta(1), timedelta(2)]).days == 3", "from datetime import timedelta\ndef total(x): return sum(x, timedelta())", "sum(x,", "max(x), ("),
    "decimals": ("from decimal import Decimal\nassert add(Decimal('0.1'), Decimal('0.2')) == Decimal('0.3')", "def add(a, b): return a + b", "a + b", "a - b"),
    "fractions": ("from fractions import Fraction\nassert half(Fraction(1, 3)) == Fraction(1, 6)", "def half(x): return x / 2", "/ 2", "* 2"),
    "complex numbers": ("assert roots() == {1j, -1j} and abs(mul(1j, 1j) + 1) < 1e-9", "def roots(): return {1j, -1j}\ndef mul(a, b): return a * b", "a * b", "a"),
    "counters": ("from collections import Counter\nassert count('aab') == Counter('aba') and count('aab').most_common(1) == [('a', 2)]", "from collections import Counter\ndef count(s): return Counter(s)", "Counter(s)", "Counter(s[1:])"),
    "default dicts": ("d = group(['ab', 'c'])\nassert d['zz'] == [] and d[2] == ['ab']", "from collections import defaultdict\ndef group(w):\n    d = defaultdict(list)\n    for x in w: d[len(x)].append(x)\n    return d", "len(x)", "0"),
    "deques": ("from collections import deque\nq = deque([1, 2])\nrot(q)\nassert q == deque([2, 1])", "def rot(q): q.rotate(1)", "(1)", "(2)"),
    "namedtuples": ("p = origin()\nassert p.x == 0 and p == (0, 1)", "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef origin(): return P(0, 1)", "P(0, 1)", "P(1, 1)"),
    "ranges": ("assert rng(3) == range(3)", "def rng(n): return range(n)", "range(n)", "range(n + 1)"),
    "dataclasses": ("assert mirror(Point(1, 2)) == Point(-1, 2)\nassert Point(3) == Point(3, 0) != Point(4)\nassert Point(1) < Point(2)", DATA, "-p.x", "p.x"),
    "dataclass shown": ("assert repr(Point(1, 2)) == 'Point(x=1, y=2)' and str(Point(0)) == 'Point(x=0, y=0)'", DATA, "y: int = 0", "y: int = 1"),
    "objects in sets": ("assert len({Point(1, 2), Point(1, 2)}) == 1 and Point(1, 2) in [Point(1, 2)]", POINT + EQUAL, "return hash((self.x, self.y))", "return id(self)"),
    "arithmetic": ("v = Point(1, 2) + Point(3, 4)\nassert (v.x, v.y) == (4, 6)\nassert (Point(1, 2) * 3).y == 6 and (2 * Point(1, 2)).x == 2", POINT + "    def __add__(self, o): return Point(self.x + o.x, self.y + o.y)\n    def __mul__(self, k): return Point(self.x * k, self.y * k)\n    __rmul__ = __mul__", "self.y * k", "self.y"),
    "dot product": ("assert Point(1, 2) @ Point(3, 4) == 11", POINT + "    def __matmul__(self, o): return self.x * o.x + self.y * o.y", "+ self.y", "- self.y"),
    "length": ("s = Stack()\nassert len(s) == 0\ns.push(5)\nassert len(s) == 1", STACK, "return len(self._items)", "return 1"),
    "membership and items": ("s = Stack()\ns.push(5)\nassert 5 in s and 6 not in s and s[0] == 5 and list(s) == [5]", STACK, "x in self", "x not in self"),
    "truth": ("s = Stack()\nassert not s\ns.push(1)\nassert s", STACK, "bool(self._items)", "True"),
    "repr in an f-string": ("s = Stack()\ns.push(1)\nassert f'{s}' == 'Stack([1])'", STACK, "Stack(%r)", "S(%r)"),
    "with": ("with Stack() as s:\n    s.push(1)\n    assert len(s) == 1\n    raise ValueError\nassert len(s) == 0", STACK, "clear(); ", "count(0); "),
    "isinstance": ("assert isinstance(make(), Point) and not isinstance(3, Point)", POINT + "def make(): return Point(0, 0)", "return Point(0, 0)", "return 0"),
    "inheritance": ("assert issubclass(Sub, Point) and isinstance(Sub(1, 2), Point)", POINT + "class Sub(Point): pass", "Sub(Point)", "Sub"),
    "own exceptions": ("try:\n    Stack().pop()\n    assert False, 'did not raise'\nexcept EmptyError as e:\n    assert str(e) == 'empty' and e.code == 3 and isinstance(e, LookupError)", STACK, "EmptyError('empty', 3)", "EmptyError('empty', 4)"),
    "an exception by its base": ("ok = False\ntry:\n    Stack().pop()\nexcept LookupError:\n    ok = True\nassert ok", STACK, "raise EmptyError('empty', 3)", "return 0"),
    "builtin exception with a text": ("try:\n    f(-1)\nexcept ValueError as e:\n    assert 'negative' in str(e) and e.args == ('negative', -1)\nelse:\n    assert False", "def f(x): raise ValueError('negative', x)", "ValueError", "TypeError"),
    "SystemExit": ("try:\n    f()\n    assert False\nexcept SystemExit as e:\n    assert e.code == 2", "import sys\ndef f(): sys.exit(2)", "exit(2)", "exit(0)"),
    "captured output": ("import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n    hello('x')\nassert b.getvalue() == 'hello x\\n'", "def hello(n): print('hello', n)", "'hello'", "'hallo'"),
    "stdout replaced": ("import io, sys\nold, sys.stdout = sys.stdout, io.StringIO()\nhello()\ntext, sys.stdout = sys.stdout.getvalue(), old\nassert text == 'a\\nb\\n'", "import sys\ndef hello():\n    print('a')\n    sys.stdout.write('b\\n')", "print('a')", "print('b')"),
    "globals": ("assert count == 0\ntick()\ntick()\nassert count == 2 and LIMIT == 10", "count = 0\nLIMIT = 10\ndef tick():\n    global count\n    count += 1", "+= 1", "+= 2"),
    "globals in a function": ("def check():\n    log.clear() if False else None\n    record('x')\n    assert log == ['x']\ncheck()", "log = []\ndef record(x): log.append(x)", "(x)", "(x + x)"),
    "generators": ("g = fib()\nassert [next(g) for _ in range(5)] == [0, 1, 1, 2, 3]\nfrom itertools import islice\nassert list(islice(fib(), 3)) == [0, 1, 1]", "def fib():\n    a, b = 0, 1\n    while True:\n        yield a\n        a, b = b, a + b", "yield a", "yield b"),
    "a generator that ends": ("g = two()\nassert next(g) == 1 and next(g) == 2 and next(g, None) is None and list(two()) == [1, 2]", "def two():\n    yield 1\n    yield 2", "yield 2", "yield 3"),
    "send to a generator": ("g = echo()\nnext(g)\nassert g.send(3) == 6", "def echo():\n    x = 0\n    while True: x = yield 2 * x", "2 * x", "x"),
    "zip and map": ("assert list(pairs([1, 2])) == [(1, 1), (2, 4)] and dict(pairs([3])) == {3: 9}", "def pairs(x): return zip(x, map(lambda v: v * v, x))", "v * v", "v"),
    "cyclic list": ("a = [1]\na.append(a)\nassert depth(a) == 1\nb = loop()\nassert b[0] is b", "def depth(a): return 1 if a[1] is a else 2\ndef loop():\n    x = []\n    x.append(x)\n    return x", "is a else 2", "is not a else 2"),
    "shared rows": ("r = [0]\nm = [r, r]\nput(m)\nassert m == [[5], [5]] and r == [5]", "def put(m): m[0][0] = 5", "= 5", "= 6"),
    "async": ("import asyncio\nassert asyncio.run(double(4)) == 8", "import asyncio\nasync def double(x):\n    await asyncio.sleep(0)\n    return 2 * x", "2 * x", "x"),
    "async gathered": ("import asyncio\nasync def main():\n    assert await asyncio.gather(double(1), double(2)) == [2, 4]\nasyncio.run(main())", "async def double(x): return 2 * x", "2 * x", "x"),
    "async for and with": ("import asyncio\nasync def go():\n    async with Box() as b:\n        assert [x async for x in b.items()] == [1, 2]\nasyncio.run(go())", "class Box:\n    async def __aenter__(self): return self\n    async def __aexit__(self, *a): pass\n    async def items(self):\n        yield 1\n        yield 2", "yield 2", "yield 3"),
    "a function of the tests": ("calls = []\ndef twice(x):\n    calls.append(x)\n    return 2 * x\nassert apply(twice, [1, 2]) == [2, 4] and calls == [1, 2]", "def apply(f, x): return [f(v) for v in x]", "f(v)", "v"),
    "a key function": ("assert order(['bb', 'a'], key=lambda s: len(s)) == ['a', 'bb']", "def order(x, key): return sorted(x, key=key)", "sorted(x, key=key)", "list(x)"),
    "an object of the tests": ("class Store:\n    def get(self, k): return {'a': 1}[k]\nassert read(Store(), 'a') == 2", "def read(s, k): return s.get(k) + 1", "+ 1", "+ 0"),
    "main guard": ("def test_it():\n    assert f(1) == 2\nif __name__ == '__main__':\n    test_it()", "def f(x): return x + 1", "+ 1", "+ 2"),
    "main guard that calls another name": ("def run_all():\n    assert f(1) == 2\nif '__main__' == __name__:\n    run_all()\n    print('ok')", "def f(x): return x + 1", "+ 1", "+ 2"),
    "pytest.main": ("import sys, pytest\ndef test_it():\n    assert f(1) == 2\nif __name__ == '__main__':\n    sys.exit(pytest.main([__file__]))", "def f(x): return x + 1", "+ 1", "+ 2"),
    "exit with unittest.main": ("import sys, unittest\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(f(1), 2)\nsys.exit(unittest.main())", "def f(x): return x + 1", "+ 1", "+ 2"),
    "a mock": ("from unittest.mock import Mock\nm = Mock(return_value=3)\nassert use(m) == 4\nm.assert_called_once_with(7)", "def use(f): return f(7) + 1", "f(7)", "f(8)"),
    "a function that returns one": ("add5 = adder(5)\nassert add5(1) == 6 and adder(1)(2) == 3", "def adder(n): return lambda x: x + n", "x + n", "x"),
    "a decorator": ("calls = []\n@cached\ndef f(x):\n    calls.append(x)\n    return x\nassert f(1) == f(1) == 1 and calls == [1]", "def cached(f):\n    kept = {}\n    def inner(x):\n        if x not in kept: kept[x] = f(x)\n        return kept[x]\n    return inner", "if x not in kept: ", ""),
    "a closure with state": ("c = counter()\nassert [c(), c(), c()] == [1, 2, 3]", "def counter():\n    n = 0\n    def inner():\n        nonlocal n\n        n += 1\n        return n\n    return inner", "n += 1", "n += 2"),
    "enum": ("assert Color.RED.value == 1 and Color['RED'] is Color.RED and mix(Color.RED) == Color.BLUE and len(Color) == 2", "from enum import Enum\nclass Color(Enum):\n    RED = 1\n    BLUE = 2\ndef mix(c): return Color.BLUE", "return Color.BLUE", "return c"),
    "class attributes and properties": ("assert Circle.PI == 3 and Circle(2).area == 12\nc = Circle(1)\nc.r = 3\nassert c.area == 27 and Circle.unit().r == 1", "class Circle:\n    PI = 3\n    def __init__(self, r): self.r = r\n    @property\n    def area(self): return self.PI * self.r ** 2\n    @classmethod\n    def unit(cls): return cls(1)", "** 2", "** 3"),
    "subclass of list": ("s = Bag()\ns.put(1)\nassert len(s) == 1 and s[0] == 1", "class Bag(list):\n    def put(self, x): self.append(x)", "append(x)", "append(0)"),
    "hasattr and getattr": ("assert hasattr(Point(1, 2), 'x') and not hasattr(Point(1, 2), 'z') and getattr(Point(1, 2), 'y') == 2 and Point.__name__ == 'Point'", POINT, "self.x, self.y = x, y", "self.z, self.y = x, y"),
    "callable object": ("f = Adder(2)\nassert f(3) == 5 and callable(f)", "class Adder:\n    def __init__(self, n): self.n = n\n    def __call__(self, x): return x + self.n", "x + self.n", "x"),
    "format with a specification": ("a = Money(5)\nassert f'{a:>4}' == 'eur5>4' and format(a, 'x') == 'eur5x' and '{}'.format(a) == 'eur5'", "class Money:\n    def __init__(self, n): self.n = n\n    def __format__(self, how): return 'eur%d%s' % (self.n, how)", "% (self.n, how)", "% (self.n, '')"),
    "reversed": ("assert list(reversed(Down(3))) == [1, 2, 3]", "class Down:\n    def __init__(self, n): self.n = n\n    def __reversed__(self): return iter(range(1, self.n + 1))", "self.n + 1", "self.n"),
    "as a number": ("import math\nn = Num(7)\nassert range(10)[n] == 7 and hex(n) == '0x7' and complex(n) == 7j and bytes(n) == b'7'\nassert (math.floor(n), math.ceil(n), math.trunc(n)) == (7, 8, 6)", "class Num:\n    def __init__(self, n): self.n = n\n    def __index__(self): return self.n\n    def __complex__(self): return self.n * 1j\n    def __bytes__(self): return b'%d' % self.n\n    def __floor__(self): return self.n\n    def __ceil__(self): return self.n + 1\n    def __trunc__(self): return self.n - 1", "self.n + 1", "self.n"),
    "added in place": ("b = c = Bag()\nb += 3\nb += 4\nassert b.items == [3, 4] and c is b", "class Bag:\n    def __init__(self): self.items = []\n    def __iadd__(self, x):\n        self.items.append(x)\n        return self", "append(x)", "append(3)"),
    "unittest": ("import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.s = Stack()\n    def test_push(self):\n        self.s.push(1)\n        self.assertEqual(self.s.pop(), 1)\n    def test_empty(self):\n        with self.assertRaises(EmptyError):\n            self.s.pop()\nif __name__ == '__main__':\n    unittest.main()", STACK, "raise EmptyError('empty', 3)", "return 0"),
    "unittest run at once": ("import unittest\nclass T(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\nunittest.main()", "def add(a, b): return a + b", "a + b", "a"),
    "pytest functions": ("import pytest\nfrom solution import add\ndef test_add():\n    assert add(1, 2) == 3\ndef test_none():\n    with pytest.raises(TypeError, match='unsupported'):\n        add(1, None)\ndef test_near():\n    assert add(0.1, 0.2) == pytest.approx(0.3)", "def add(a, b): return a + b", "a + b", "a or b"),
    "pytest parameters and fixtures": ("import pytest\n@pytest.fixture\ndef stack():\n    s = Stack()\n    s.push(1)\n    yield s\n@pytest.mark.parametrize('x, n', [(1, 1), (2, 2)])\ndef test_push(stack, x, n):\n    stack.push(x)\n    assert stack[1] == n and len(stack) == 2", STACK, "self._items.append(x)", "self._items.append(1)"),
    "pytest capsys": ("def test_hello(capsys):\n    hello()\n    assert capsys.readouterr().out == 'hi\\n'", "def hello(): print('hi')", "'hi'", "'ho'"),
    "a test class": ("class TestAdd:\n    def setup_method(self): self.n = 1\n    def test_it(self): assert add(self.n, 2) == 3", "def add(a, b): return a + b", "a + b", "a"),
    "the module by name": ("import solution\nassert solution.add(1, 2) == 3\nsolution.BASE = 5\nassert solution.add(1, 2) == 8", "BASE = 0\ndef add(a, b): return BASE + a + b", "BASE + a", "a"),
    "types": ("p = Point(1, 2)\nassert type(p) is Point and type(p).__name__ == 'Point' and p.__class__ == Point and type(f()) is tuple", POINT + "def f(): return ()", "return ()", "return []"),
    "vars and dataclass helpers": ("from dataclasses import asdict, replace\nassert asdict(Point(1, 2)) == {'x': 1, 'y': 2} and replace(Point(1, 2), x=5).x == 5 and vars(Box(3)) == {'w': 3}", DATA + "class Box:\n    def __init__(self, w): self.w = w", "self.w = w", "self.v = w"),
    "input replaced": ("from unittest.mock import patch\nwith patch('builtins.input', side_effect=['2', '3']):\n    assert ask() == 5", "def ask(): return int(input()) + int(input())", "+ int(", "- int("),
    "stdin replaced": ("import io, sys\nsys.stdin = io.StringIO('2\\n3\\n')\nassert ask() == [2, 3]", "import sys\ndef ask(): return [int(input())] + [int(x) for x in sys.stdin]", "int(x)", "x"),
    "a helper replaced": ("from unittest.mock import patch\nwith patch('solution.load', return_value=4):\n    assert double() == 8\nassert double() == 2", "def load(): return 1\ndef double(): return 2 * load()", "2 *", "3 *"),
    "nodes of the tests": ("class Node:\n    def __init__(self, val, children=()): self.val, self.children, self.seen = val, list(children), False\nroot = Node(1, [Node(2), Node(3, [Node(4)])])\nassert total(root) == 10 and root.children[0].seen", "def total(n):\n    n.seen = True\n    return n.val + sum(map(total, n.children))", "n.seen = True", "pass"),
    "a container of the tests": ("class Ring:\n    def __len__(self): return 3\n    def __getitem__(self, i): return i * i if i < 3 else [][0]\nassert total(Ring()) == (3, 5, True)", "def total(r): return len(r), sum(r[i] for i in range(len(r))), bool(r)", "bool(r)", "not r"),
    "threads of the tests": ("import threading\nout = []\nts = [threading.Thread(target=lambda i=i: out.append(sq(i))) for i in range(8)]\n[t.start() for t in ts]\n[t.join() for t in ts]\nassert sorted(out) == [i * i for i in range(8)]", "def sq(x): return x * x", "x * x", "x"),
    "lru_cache": ("assert fib(10) == 55 and fib.cache_info().misses == 11", "from functools import lru_cache\n@lru_cache(None)\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)", "n if n < 2", "1 if n < 2"),
    "a list of objects": ("assert line(2) == [Point(0, 0), Point(1, 0)] and {Point(0): 1}[line(1)[0]] == 1", DATA + "def line(n): return [Point(i) for i in range(n)]", "Point(i)", "Point(i, i)"),
    "sorting objects": ("assert sorted([Point(2), Point(1)])[0].x == 1 and max(Point(2), Point(3)).x == 3 and min([Point(2), Point(1)], key=lambda p: -p.x).x == 2", DATA, "x: int", "y: int"),
    "subtests": ("import unittest\nclass T(unittest.TestCase):\n    def test_all(self):\n        for i in range(3):\n            with self.subTest(i=i):\n                self.assertEqual(sq(i), i * i)", "def sq(x): return x * x", "x * x", "x"),
    'an iterator class': ('it=Count(3)\nassert iter(it) is it\nassert next(it)==1 and list(it)==[2,3]\ntry:\n    next(it)\n    assert False\nexcept StopIteration: pass', 'class Count:\n    def __init__(self,n): self.i,self.n=0,n\n    def __iter__(self): return self\n    def __next__(self):\n        if self.i>=self.n: raise StopIteration\n        self.i+=1\n        return self.i', 'self.i+=1', 'self.i+=2'),
    'the cause of an exception': ("try:\n    f()\n    assert False\nexcept RuntimeError as e:\n    assert isinstance(e.__cause__, KeyError) and e.args==('outer',)", "def f():\n    try: {}['a']\n    except KeyError as k: raise RuntimeError('outer') from k", "'outer'", "'inner'"),
    'an exception of the standard library': ('from dataclasses import FrozenInstanceError\np=Q(1)\ntry:\n    p.x=2\n    assert False\nexcept FrozenInstanceError: pass\nassert hash(Q(1))==hash(Q(1)) and {Q(1),Q(1)}=={Q(1)}', 'from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Q:\n    x: int', 'frozen=True', 'unsafe_hash=True'),
    'functools.wraps around a function of the tests': ("n=[0]\n@retry(3)\ndef flaky():\n    n[0]+=1\n    if n[0]<3: raise OSError\n    return 'ok'\nassert flaky()=='ok' and n==[3] and flaky.__name__=='flaky'", 'import functools\ndef retry(k):\n    def deco(f):\n        @functools.wraps(f)\n        def inner(*a):\n            for i in range(k):\n                try: return f(*a)\n                except OSError:\n                    if i==k-1: raise\n        return inner\n    return deco', 'range(k)', 'range(1)'),
    'docstrings': ("assert f.__doc__=='Add.' and f.__name__=='f'", "def f():\n    'Add.'", "'Add.'", "'Sub.'"),
    'paths, patterns and ids': ("import re, pathlib, uuid\nassert isinstance(pat(), re.Pattern) and pat().match('ab12') and str(where())=='a/b'\nassert ident()==uuid.UUID(int=5)", "import re, uuid\nfrom pathlib import Path\ndef pat(): return re.compile(r'[a-z]+\\d+')\ndef where(): return Path('a')/'b'\ndef ident(): return uuid.UUID(int=5)", 'int=5', 'int=6'),
    'log records': ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertLogs('app', level='WARNING') as cm:\n            warn('x')\n        self.assertIn('bad x', cm.output[0])", "import logging\ndef warn(n): logging.getLogger('app').warning('bad %s', n)", "'bad %s'", "'good %s'"),
    'the environment': ("import os\nos.environ['LEVEL']='7'\nassert level()==7", "import os\ndef level(): return int(os.environ['LEVEL'])", 'int(', '1+int('),
    'the command line': ("import sys\nsys.argv=['x','4']\nassert main()==5", 'import sys\ndef main(): return int(sys.argv[1])+1', '+1', '+2'),
    'a function of the standard library replaced': ("from unittest.mock import patch\nwith patch('time.time', return_value=100.0):\n    assert stamp()==100", 'import time\ndef stamp(): return int(time.time())', 'int(time.time())', '1'),
    'pytest parameters of a class': ("import pytest\n@pytest.mark.parametrize('s,want',[pytest.param('','',id='empty'),('ab','ba')])\nclass TestRev:\n    def test_it(self,s,want):\n        assert rev(s)==want", 'def rev(s): return s[::-1]', '[::-1]', ''),
    'tests that may fail': ("import pytest\n@pytest.mark.skip(reason='x')\ndef test_a(): assert 0\n@pytest.mark.xfail\ndef test_b(): assert one()==2\ndef test_c(): assert one()==1", 'def one(): return 1', 'return 1', 'return 3'),
    'warnings': ('import pytest, warnings\ndef test_a():\n    with pytest.warns(DeprecationWarning):\n        old()', "import warnings\ndef old(): warnings.warn('old',DeprecationWarning)", 'DeprecationWarning)', 'UserWarning)'),
    'a seed': ('import random\nrandom.seed(3)\na=pick([1,2,3,4,5])\nrandom.seed(3)\nassert a==random.choice([1,2,3,4,5])', 'import random\ndef pick(x): return random.choice(x)', 'random.choice(x)', 'x[0]'),
    "enumerations of numbers and texts": ("assert (Perm.R | Perm.W).value == 3 and Perm.R in both() and Perm.W.name == 'W' and Perm.W == 2\nassert Day.MON == 'mon' and Day('mon') is Day.MON and isinstance(Day.MON, Day) and is_monday(Day.MON)", "from enum import Enum, IntFlag\nclass Perm(IntFlag):\n    R = 1\n    W = 2\nclass Day(str, Enum):\n    MON = 'mon'\ndef both(): return Perm.R | Perm.W\ndef is_monday(day): return day is Day.MON", "day is", "day is not"),
    "an import of the program replaced": ("from unittest.mock import patch\nwith patch('solution.random.randint', return_value=3), patch('solution.sleep') as pause:\n    assert roll() == 4\n    pause.assert_called_once_with(9)", "import random\nfrom time import sleep\ndef roll():\n    sleep(9)\n    return random.randint(1, 1) + 1", "+ 1", "+ 2"),
    "a list of the program's that it changes later": ("b = Box()\nxs = b.items()\nb.add(3)\nassert xs == [3]", "class Box:\n    def __init__(self): self.l = []\n    def items(self): return self.l\n    def add(self, x): self.l.append(x)", "self.l.append(x)", "self.l = [x]"),
    "a list of the program's that the tests change": ("b = Box()\nb.l.append(4)\nassert b.total() == 4 and b.l is b.l", "class Box:\n    def __init__(self): self.l = []\n    def total(self): return sum(self.l)", "sum(self.l)", "sum(self.l[1:])"),
    "a list of the tests that the program keeps": ("log = []\nb = Box(log)\nb.add(1)\nlog.append(5)\nassert b.total() == 6 and log == [1, 5]", "class Box:\n    def __init__(self, l): self.l = l\n    def add(self, x): self.l.append(x)\n    def total(self): return sum(self.l)", "self.l = l", "self.l = list(l)"),
    "a global container of the program's": ("import solution\nCACHE['x'] = [3]\nsolution.CACHE['x'].append(4)\nassert total() == 7\nsolution.CACHE.clear()\nassert total() == 0", "CACHE = {}\ndef total(): return sum(CACHE.get('x', []))", "sum(", "len("),
    "nested containers": ("g = Graph()\ng.adj.setdefault('a', []).append('b')\ng.next('a').append('c')\nassert g.adj == {'a': ['b', 'c']}", "class Graph:\n    def __init__(self): self.adj = {}\n    def next(self, x): return self.adj[x]", "return self.adj[x]", "return self.adj[x][:]"),
    "a dict that makes its values": ("t = Tree()\nt['a']['b'] = 1\nassert t == {'a': {'b': 1}} and count()['q'] == 7 and '{x}'.format_map(Safe()) == '<x>'", "from collections import defaultdict\nclass Tree(dict):\n    def __missing__(self, k):\n        self[k] = Tree()\n        return self[k]\nclass Safe(dict):\n    def __missing__(self, k): return '<' + k + '>'\ndef count(): return defaultdict(lambda: 7)", "lambda: 7", "int"),
    "a container with methods of its own": ("s = Stack([1, 2])\ns.push(3)\nd = CI(A=1)\nassert s == [1, 2, 3] and d['A'] == d['a'] == 1 and 'a' in d and d == {'a': 1}\nassert V(1, 2) + V(3, 4) == (4, 6) and V(3, 4).norm == 5", "from typing import NamedTuple\nclass Stack(list):\n    def push(self, x): self.append(x)\nclass CI(dict):\n    def __init__(self, **k): super().__init__((a.lower(), b) for a, b in k.items())\n    def __getitem__(self, k): return super().__getitem__(k.lower())\nclass V(NamedTuple):\n    x: int\n    y: int\n    def __add__(self, o): return V(self.x + o.x, self.y + o.y)\n    @property\n    def norm(self): return (self.x ** 2 + self.y ** 2) ** 0.5", "k.lower())", "k)"),
    "signatures and kinds of functions": ("import inspect, asyncio\ns = inspect.signature(f)\nassert list(s.parameters) == ['a', 'b', 'k'] and s.parameters['b'].default == 3 and s.return_annotation is str\nassert s.parameters['k'].kind is inspect.Parameter.KEYWORD_ONLY and str(inspect.signature(P)) == '(x, y=2)'\nassert inspect.isfunction(f) and inspect.isclass(P) and asyncio.iscoroutinefunction(g) and not inspect.iscoroutinefunction(f)", "def f(a: int, b=3, *, k) -> str: return ''\nasync def g(): pass\nclass P:\n    def __init__(self, x, y=2): pass", "*, k", "k=1"),
    "a thread of the program that calls the tests": ("seen = []\nw = Worker(seen.append)\nfor i in range(5): w.put(i)\nw.stop()\nassert seen == [0, 1, 2, 3, 4]", "import threading, queue\nclass Worker:\n    def __init__(self, cb):\n        self.q, self.cb = queue.Queue(), cb\n        self.t = threading.Thread(target=self.run)\n        self.t.start()\n    def run(self):\n        for x in iter(self.q.get, None): self.cb(x)\n    def put(self, x): self.q.put(x)\n    def stop(self):\n        self.q.put(None)\n        self.t.join()", "self.cb(x)", "self.cb(-x)"),
    'a time zone by name': ("from zoneinfo import ZoneInfo\nfrom datetime import datetime\nd=conv(datetime(2024,7,1,12,tzinfo=ZoneInfo('UTC')))\nassert d.hour==14", "from zoneinfo import ZoneInfo\ndef conv(d): return d.astimezone(ZoneInfo('Europe/Berlin'))", 'Europe/Berlin', 'Asia/Tokyo'),
    'standard error captured': ("import io,contextlib\nb=io.StringIO()\nwith contextlib.redirect_stderr(b):\n    warn('x')\nassert b.getvalue()=='x\\n'", 'import sys\ndef warn(s): print(s,file=sys.stderr)', 'print(s,', 'print(s+s,'),
    'print replaced': ("from unittest.mock import patch\nwith patch('builtins.print') as p:\n    greet('a')\np.assert_called_once_with('hi','a')", "def greet(n): print('hi',n)", "'hi'", "'ho'"),
    'a generator looked at': ('import inspect,types\nassert inspect.isgenerator(gen()) or isinstance(gen(),types.GeneratorType)\nassert list(gen())==[1,2]', 'def gen(): yield from (1,2)', '(1,2)', '(1,3)'),
    'a coroutine function of the tests': ('import asyncio\nasync def dbl(x):\n    await asyncio.sleep(0)\n    return 2*x\nassert asyncio.run(amap(dbl,[1,2]))==[2,4]', 'import asyncio\nasync def amap(f,xs): return [await f(x) for x in xs]', 'f(x)', 'f(1)'),
    'coroutines of the tests gathered': ('import asyncio\nasync def dbl(x):\n    await asyncio.sleep(0)\n    return 2*x\nassert asyncio.run(amap(dbl,[1,2]))==[2,4]', 'import asyncio\nasync def amap(f,xs): return list(await asyncio.gather(*(f(x) for x in xs)))', 'f(x)', 'f(1)'),
    'a fixture of the module': ("import pytest\n@pytest.fixture(scope='module')\ndef c(): return Counter2()\ndef test_a(c,monkeypatch):\n    monkeypatch.setattr('solution.STEP',5)\n    c.inc()\n    assert c.n==5\ndef test_b(c):\n    c.inc()\n    assert c.n==6", 'STEP=1\nclass Counter2:\n    n=0\n    def inc(s): s.n+=STEP', 's.n+=STEP', 's.n+=1'),
    'attributes and items deleted': ("b=Box()\nb['a']=1\nb['b']=2\ndel b['a']\nassert 'a' not in b and len(b)==1 and list(b.keys())==['b']\nb.x=1\ndel b.x\nassert not hasattr(b,'x')", 'class Box:\n    def __init__(s): s.d={}\n    def __setitem__(s,k,v): s.d[k]=v\n    def __delitem__(s,k): del s.d[k]\n    def __contains__(s,k): return k in s.d\n    def __len__(s): return len(s.d)\n    def keys(s): return s.d.keys()', 'del s.d[k]', 'pass'),
    'a pickled object': ('import pickle\nassert pickle.loads(pickle.dumps(P(3))).x==3', 'class P:\n    def __init__(s,x): s.x=x', 's.x=x', 's.x=0'),
    'a timer that calls the tests later': ('import threading\nrang = threading.Event()\nlater(0.01, lambda: rang.set())\nassert rang.wait(6) and times() == 1', 'import threading\ndef later(t,f): threading.Timer(t,f).start()\ndef times(): return 1', 'return 1', 'return 0'),
    'a thread that calls the tests while no call runs': ('import threading\ngot = []\nev = threading.Event()\ndef take(x):\n    got.append(x)\n    ev.set()\nstart(take)\nassert ev.wait(6) and got == [3]', 'import threading, time\ndef start(cb):\n    def run():\n        time.sleep(0.05)\n        cb(3)\n    threading.Thread(target=run).start()', 'cb(3)', 'cb(4)'),
    'handlers in threads': ("got=[]\nb=Bus()\nb.on('x',got.append)\nb.emit_async('x',3)\nb.join()\nassert got==[3]", 'import threading\nclass Bus:\n    def __init__(s): s.h={}; s.t=[]\n    def on(s,n,f): s.h.setdefault(n,[]).append(f)\n    def emit_async(s,n,v):\n        for f in s.h[n]:\n            t=threading.Thread(target=f,args=(v,)); t.start(); s.t.append(t)\n    def join(s):\n        for t in s.t: t.join()', 'args=(v,)', 'args=(0,)'),
    'two threads of the tests, one of which waits for the other': ('import threading\nb=Chan()\nout=[]\nt=threading.Thread(target=lambda: out.append(b.get()))\nt.start()\nb.put(5)\nt.join(5)\nassert out==[5]', 'import queue\nclass Chan:\n    def __init__(s): s.q=queue.Queue()\n    def put(s,x): s.q.put(x)\n    def get(s): return s.q.get()', 's.q.put(x)', 's.q.put(0)'),
    'a barrier of the program': ('import threading\nbar = Bar(2)\nout = []\ndef w(i):\n    out.append(bar.wait(i))\nts = [threading.Thread(target=w, args=(i,)) for i in range(2)]\n[t.start() for t in ts]\n[t.join(20) for t in ts]\nassert sorted(out) == [0, 1]', 'import threading\nclass Bar:\n    def __init__(s, n): s.b = threading.Barrier(n)\n    def wait(s, i):\n        s.b.wait()\n        return i', 'return i', 'return 1'),
    'a file of the tests': ("import io\nassert count(io.StringIO('a\\nb\\n'))==2\no=io.StringIO()\nwrite(o)\nassert o.getvalue()=='hi'", "def count(f): return sum(1 for _ in f)\ndef write(f): f.write('hi')", "'hi'", "'ho'"),
    'a csv writer on a file of the tests': ("import io,csv\no=io.StringIO()\nwcsv(o,[[1,2]])\nassert o.getvalue().strip()=='1,2'", 'import csv\ndef wcsv(o,rows): csv.writer(o).writerows(rows)', 'writerows(rows)', 'writerows([[0]])'),
    'the module alone': ("import solution\nassert solution.__name__=='solution' and hasattr(solution,'run') and solution.run()==1", "def run(): return 1\nif __name__=='__main__': raise SystemExit(3)", 'return 1', 'return 2'),
    'open replaced': ("from unittest.mock import patch,mock_open\nwith patch('builtins.open',mock_open(read_data='a\\nb')):\n    assert lines('x')==2", 'def lines(p):\n    with open(p) as f: return len(f.read().split())', 'len(f.read().split())', '0'),
    'a generator that is thrown at': ("g=gen()\nassert next(g)==1\nassert g.throw(ValueError('q'))=='caught q'\ng.close()\nassert log==['closed']", "log=[]\ndef gen():\n    try:\n        try: yield 1\n        except ValueError as e: yield 'caught %s'%e\n    finally: log.append('closed')", "'caught %s'", "'%s'"),
    'nodes of the program': ('h=build([1,2,3])\nassert h.next.prev is h and h.next.next.val==3 and h.next.next.next is None', 'class N:\n    def __init__(s,v): s.val=v; s.next=s.prev=None\ndef build(x):\n    h=c=N(x[0])\n    for v in x[1:]:\n        n=N(v); c.next=n; n.prev=c; c=n\n    return h', 'n.prev=c', 'n.prev=n'),
    'an exception group': ('try:\n    go()\n    assert False\nexcept ExceptionGroup as g:\n    assert len(g.exceptions)==2 and isinstance(g.exceptions[0],ValueError)', "def go(): raise ExceptionGroup('m',[ValueError(1),TypeError(2)])", 'ValueError(1)', 'KeyError(1)'),
    'an asynchronous queue': ('import asyncio\nasync def main():\n    p=Pub()\n    await p.put(1)\n    await p.put(2)\n    return [await p.get(), await p.get()]\nassert asyncio.run(main())==[1,2]', 'import asyncio\nclass Pub:\n    def __init__(s): s.q=asyncio.Queue()\n    async def put(s,x): await s.q.put(x)\n    async def get(s): return await s.q.get()', 'put(x)', 'put(x+1)'),
    'a singleton': ('assert S() is S()\nS().v=3\nassert S().v==3', 'class S:\n    _i=None\n    def __new__(c):\n        if c._i is None: c._i=super().__new__(c)\n        return c._i', 'if c._i is None: ', ''),
    'a mapping unpacked': ("def f(**k): return k\nassert f(**M())=={'a':1} and {**M()}=={'a':1}", "class M:\n    def keys(s): return ['a']\n    def __getitem__(s,k): return 1", 'return 1', 'return 2'),
    'a context manager that rolls back': ("try:\n    with tx() as t:\n        t.append(1)\n        raise ValueError('x')\nexcept ValueError: pass\nassert t==[1,'rollback']", "from contextlib import contextmanager\n@contextmanager\ndef tx():\n    l=[]\n    try:\n        yield l\n        l.append('commit')\n    except ValueError:\n        l.append('rollback')\n        raise", "'rollback'", "'roll'"),
    'a pool of the program that calls the tests': ('seen=set()\nassert pmap(lambda x:(seen.add(x),x*2)[1],[1,2,3])==[2,4,6] and seen=={1,2,3}', 'from concurrent.futures import ThreadPoolExecutor\ndef pmap(f,xs):\n    with ThreadPoolExecutor(3) as e: return list(e.map(f,xs))', 'e.map(f,xs)', 'e.map(str,xs)'),
    'threads of the tests that count': ('import threading\nc=C()\nts=[threading.Thread(target=lambda:[c.inc() for _ in range(20)]) for _ in range(4)]\n[t.start() for t in ts];[t.join() for t in ts]\nassert c.n==80', 'import threading\nclass C:\n    def __init__(s): s.n=0; s.l=threading.Lock()\n    def inc(s):\n        with s.l: s.n+=1', 's.n+=1', 's.n+=2'),
    'a mock with side effects': ("from unittest.mock import MagicMock\ndb=MagicMock()\ndb.get.side_effect=[1,KeyError('x')]\ns=Svc(db)\nassert s.read('a')==1 and s.read('b') is None\ndb.get.assert_any_call('a')\nassert db.get.call_count==2", 'class Svc:\n    def __init__(s,db): s.db=db\n    def read(s,k):\n        try: return s.db.get(k)\n        except KeyError: return None', 's.db.get(k)', "s.db.get('z')"),
    "a method of the program's class replaced": ("from unittest.mock import patch\nwith patch.object(Api,'fetch',return_value=5) as m:\n    assert Api().double()==10\nm.assert_called_once()", 'class Api:\n    def fetch(s): return 0\n    def double(s): return 2*s.fetch()', '2*s', '3*s'),
    "unittest's own runner": ('import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertTrue(f(2))\nr=unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\nassert r.wasSuccessful()', 'def f(x): return x>1', 'x>1', 'x>5'),
    'an asynchronous generator of the tests': ('import asyncio\nasync def src():\n    for i in range(3): yield i\nassert asyncio.run(collect(src()))==[0,1,2]', 'async def collect(a): return [x async for x in a]', '[x async', '[x+1 async'),
    'a generator of the tests that is sent to': ('def co():\n    got=[]\n    while True:\n        x=yield got\n        got.append(x)\nc=co()\nnext(c)\nfeed(c,[1,2])\nassert c.send(3)==[1,2,3]', 'def feed(c,xs):\n    for x in xs: c.send(x)', 'c.send(x)', 'c.send(0)'),
    'a fixture of a test class': ('import pytest\nclass TestS:\n    @pytest.fixture(autouse=True)\n    def make(self): self.s=St()\n    def test_push(self):\n        self.s.push(1)\n        assert self.s.pop()==1', 'class St:\n    def __init__(s): s.i=[]\n    def push(s,x): s.i.append(x)\n    def pop(s): return s.i.pop()', 's.i.append(x)', 's.i.append(2)'),
    'capsys in a test class': ("class TestP:\n    def test_a(self,capsys):\n        show(3)\n        out,err=capsys.readouterr()\n        assert out.strip()=='3'", 'def show(x): print(x)', 'print(x)', 'print(x,x)'),
    'coroutines of the tests as tasks': ('import asyncio\nlog=[]\nasync def job(i):\n    await asyncio.sleep(0)\n    log.append(i)\nasyncio.run(runall([job(1),job(2)]))\nassert sorted(log)==[1,2]', 'import asyncio\nasync def runall(cs):\n    ts=[asyncio.create_task(c) for c in cs]\n    for t in ts: await t', 'for t in ts: await t', '[t.cancel() for t in ts]'),
    'a producer and a consumer': ('import threading\nb=Buf(1)\nout=[]\ndef prod():\n    for i in range(5): b.put(i)\ndef cons():\n    for _ in range(5): out.append(b.get())\nts=[threading.Thread(target=prod),threading.Thread(target=cons)]\n[t.start() for t in ts];[t.join(30) for t in ts]\nassert out==[0,1,2,3,4]', 'import threading,collections\nclass Buf:\n    def __init__(s,n): s.n=n; s.d=collections.deque(); s.c=threading.Condition()\n    def put(s,x):\n        with s.c:\n            s.c.wait_for(lambda: len(s.d)<s.n)\n            s.d.append(x); s.c.notify_all()\n    def get(s):\n        with s.c:\n            s.c.wait_for(lambda: s.d)\n            x=s.d.popleft(); s.c.notify_all()\n            return x', 'x=s.d.popleft()', 'x=s.d.pop()+1'),
    'a future that calls the tests': ('import threading\ngot=[]\nev=threading.Event()\nf=start(4)\nf.add_done_callback(lambda fu: (got.append(fu.result()),ev.set()))\nassert ev.wait(6) and got==[16]', 'from concurrent.futures import ThreadPoolExecutor\nimport time\n_e=ThreadPoolExecutor(1)\ndef start(x): return _e.submit(lambda: (time.sleep(.05),x*x)[1])', 'x*x', 'x'),
    'a timer that rings again and again': ('import threading\nn=[]\nev=threading.Event()\ndef tick():\n    n.append(1)\n    if len(n)>=3: ev.set()\np=Every(0.005,tick)\np.start()\nassert ev.wait(6)\np.stop()\nassert len(n)>=3', 'import threading\nclass Every:\n    def __init__(s,t,f): s.t,s.f,s.e=t,f,threading.Event()\n    def start(s):\n        s.th=threading.Thread(target=s.run); s.th.start()\n    def run(s):\n        while not s.e.wait(s.t): s.f()\n    def stop(s): s.e.set(); s.th.join()', 's.th.join()', 'raise ValueError'),
    'an object of the program in the body of a class': ('class Box:\n    stack = Stack()\n    def size(self): return len(self.stack)\nBox.stack.push(1)\nassert Box().size() == 1', STACK, 'return len(self._items)', 'return 0'),
    'a descriptor of the program that is only set': ("class A:\n    age = Typed(int)\na = A()\na.age = 3\nassert a.age == 3 and a.__dict__ == {'age': 3}\ntry:\n    a.age = 'x'\n    assert False\nexcept TypeError:\n    pass", 'class Typed:\n    def __init__(self, t): self.t = t\n    def __set_name__(self, o, n): self.n = n\n    def __set__(self, obj, v):\n        if not isinstance(v, self.t): raise TypeError(self.n)\n        obj.__dict__[self.n] = v', 'not isinstance', 'isinstance'),
    'a descriptor that keeps its values by instance': ('class A:\n    x = Slot(1)\na, b = A(), A()\na.x = 5\nassert (a.x, b.x) == (5, 1)', 'import weakref\nclass Slot:\n    def __init__(self, d): self.d, self.v = d, weakref.WeakKeyDictionary()\n    def __get__(self, obj, owner=None): return self if obj is None else self.v.get(obj, self.d)\n    def __set__(self, obj, v): self.v[obj] = v', 'self.v[obj] = v', 'self.d = v'),
    'a cached property of the program': ('n = []\nclass A:\n    @cached_property\n    def y(self):\n        n.append(1)\n        return len(n)\na = A()\nassert a.y == 1 and a.y == 1 and A().y == 2', 'from functools import cached_property as _c\nclass cached_property(_c): pass', 'pass', '\n    def __get__(s, o, t=None): return s.func(o)'),
    'a lazy attribute of the program': ('calls = []\nclass A:\n    @lazy\n    def y(self):\n        calls.append(1)\n        return 42\na = A()\nassert a.y == 42 and a.y == 42 and calls == [1]', 'class lazy:\n    def __init__(self, f): self.f = f\n    def __set_name__(self, owner, name): self.name = name\n    def __get__(self, obj, owner=None):\n        if obj is None: return self\n        v = self.f(obj)\n        obj.__dict__[self.name] = v\n        return v', 'obj.__dict__[self.name] = v', 'pass'),
    'a class of the program as decorator of a method': ("class A:\n    @counted\n    def f(self, x): return x\na = A()\nassert a.f(3) == 3 and a.f(4) == 4\nassert A.__dict__['f'].n == 2", 'import functools, types\nclass counted:\n    def __init__(self, f): self.f, self.n = f, 0\n    def __call__(self, *a):\n        self.n += 1\n        return self.f(*a)\n    def __get__(self, obj, owner=None):\n        return self if obj is None else types.MethodType(self, obj)', '+= 1', '+= 2'),
    'a method decorated by the program': ('class A:\n    def __init__(self): self.k = 2\n    @double\n    def f(self, x): return self.k * x\nassert A().f(3) == 12', 'import functools\ndef double(f):\n    @functools.wraps(f)\n    def inner(*a): return 2 * f(*a)\n    return inner', '2 * f', 'f'),
    'a function of the tests registered by its annotation': ("@show.register\ndef _(x: list): return 'list'\nassert show([1]) == 'list' and show(1) == 'any'", "from functools import singledispatch\n@singledispatch\ndef show(x): return 'any'", "'any'", "'one'"),
    'a protocol of the program': ("class D:\n    def quack(self): return 'q'\nassert isinstance(D(), Duck) and not isinstance(3, Duck) and talk(D()) == 'q!'", "from typing import Protocol, runtime_checkable\n@runtime_checkable\nclass Duck(Protocol):\n    def quack(self): ...\ndef talk(d): return d.quack() + '!'", "'!'", "'?'"),
    'a coroutine of the program that waits for an event of the tests': ("import asyncio\nasync def main():\n    e = asyncio.Event()\n    async def setter():\n        await asyncio.sleep(0)\n        e.set()\n    r, _ = await asyncio.gather(wait_for(e), setter())\n    return r\nassert asyncio.run(main()) == 'ok'", "async def wait_for(e):\n    await e.wait()\n    return 'ok'", "'ok'", "'no'"),
    'a coroutine of the program that waits for one of the tests': ('import asyncio\nasync def main():\n    b = Bus()\n    async def later():\n        await asyncio.sleep(0.01)\n        await b.put(7)\n    got, _ = await asyncio.gather(b.get(), later())\n    return got\nassert asyncio.run(main()) == 7', 'import asyncio\nclass Bus:\n    def __init__(self): self.q = asyncio.Queue()\n    async def put(self, x): await self.q.put(x)\n    async def get(self): return await self.q.get()', 'self.q.put(x)', 'self.q.put(x + 1)'),
    'coroutines of the tests at the same time in the program': ('import asyncio\nnow = peak = 0\nasync def job():\n    global now, peak\n    now += 1\n    peak = max(peak, now)\n    await asyncio.sleep(0.001)\n    now -= 1\nasyncio.run(limited([job] * 5, 2))\nassert peak == 2', 'import asyncio\nasync def limited(fs, n):\n    sem = asyncio.Semaphore(n)\n    async def one(f):\n        async with sem: return await f()\n    return await asyncio.gather(*(one(f) for f in fs))', 'Semaphore(n)', 'Semaphore(n + 1)'),
    'a task of the program that is cancelled': ("import asyncio\nasync def main():\n    t = asyncio.create_task(forever())\n    await asyncio.sleep(0.01)\n    t.cancel()\n    try:\n        await t\n    except asyncio.CancelledError:\n        pass\n    return state\nassert asyncio.run(main()) == ['cleaned']", "import asyncio\nstate = []\nasync def forever():\n    try:\n        while True: await asyncio.sleep(0.001)\n    finally:\n        state.append('cleaned')", "'cleaned'", "'dirty'"),
    "exception notes": ("try:\n    f()\nexcept ValueError as e:\n    assert e.__notes__ == ['hint']\nelse: assert 0", "def f():\n    e = ValueError('x')\n    e.add_note('hint')\n    raise e\n", "e.add_note('hint')", "pass"),
    "setup_method with the method": ("class TestCounter:\n    def setup_method(self, method): self.c = Counter2()\n    def test_inc(self):\n        self.c.inc(); self.c.inc()\n        assert self.c.n == 2\n    def test_fresh(self): assert self.c.n == 0", "class Counter2:\n    def __init__(self): self.n = 0\n    def inc(self): self.n += 1\n", "+= 1", "+= 2"),
    "pytest caplog": ("import logging\ndef test_levels(caplog):\n    caplog.set_level(logging.DEBUG, logger='a.b')\n    run(2)\n    assert caplog.record_tuples == [('a.b', logging.DEBUG, 'step 0'), ('a.b', logging.DEBUG, 'step 1')]\n    caplog.clear()\n    assert caplog.messages == []\ndef test_default(caplog):\n    run(1)\n    assert not caplog.records\n    fail('x')\n    assert 'ERROR' in caplog.text and [r.levelname for r in caplog.records] == ['ERROR']", "import logging\nlog = logging.getLogger('a.b')\ndef run(n):\n    for i in range(n): log.debug('step %d', i)\ndef fail(t): log.error('failed: %s', t)\n", "log.error", "log.info"),
    "a builtin type as a virtual subclass": ("assert issubclass(int, Num) and isinstance(3, Num) and not isinstance('a', Num)", "from abc import ABC\nclass Num(ABC): pass\nNum.register(int)\n", "Num.register(int)", ""),
    "a decorator that keeps name and text": ("@memo\ndef sq(x):\n    'doc'\n    calls.append(x)\n    return x * x\ncalls = []\nassert sq(3) == 9 == sq(3) and calls == [3]\nassert sq.__name__ == 'sq' and sq.__doc__ == 'doc' and sq.cache == {3: 9}", "from functools import wraps\ndef memo(f):\n    @wraps(f)\n    def g(x):\n        if x not in g.cache: g.cache[x] = f(x)\n        return g.cache[x]\n    g.cache = {}\n    return g\n", "    @wraps(f)\n", ""),
    "a dict with attributes that are keys": ("d = D({'a': 1})\nassert d['zz'] == 'zz?' and d.get('q') is None and dict(d) == {'a': 1} and isinstance(d, dict)\nd.a = 4\nassert d['a'] == 4", "class D(dict):\n    def __missing__(self, k): return k + '?'\n    def __setattr__(self, k, v): self[k] = v\n", "k + '?'", "k"),
    "a dict with an attribute": ("g = Graph([(1, 2), (2, 3)])\nassert g[1] == {2} and frozenset({2, 3}) in g.edges and g.edges == {frozenset({1, 2}), frozenset({3, 2})}", "class Graph(dict):\n    def __init__(self, es):\n        super().__init__()\n        self.edges = set()\n        for a, b in es:\n            self.setdefault(a, set()).add(b)\n            self.setdefault(b, set()).add(a)\n            self.edges.add(frozenset((a, b)))\n", "frozenset((a, b))", "frozenset((a, a))"),
    "names in texts that the tests run": ("for n in range(1, 4):\n    exec(f'assert f{n}() == {n}')", "def f1(): return 1\ndef f2(): return 2\ndef f3(): return 3\n", "return 3", "return 4"),
    "names in a text that the tests evaluate": ("assert eval('f(2) + g', globals()) == 7", "g = 3\ndef f(x): return 2 * x\n", "2 * x", "x"),
    "dict with attributes": ("d = Conf(a=1)\nassert d.path == 'x' and d['a'] == 1 and isinstance(d, dict) and str(d) == 'Conf(1)' and d == {'a': 1}\nd.path = 'y'\nassert where(d) == 'y'", "class Conf(dict):\n    def __init__(self, **k):\n        super().__init__(k)\n        self.path = 'x'\n    def __str__(self): return f'Conf({len(self)})'\ndef where(d): return d.path\n", "len(self)", "self"),
    "a list with a text of its own": ("m = Matrix([[1, 2], [3, 4]])\nassert str(m) == '1 2\\n3 4' and m[1][0] == 3 and m == [[1, 2], [3, 4]] and len(m) == 2 and isinstance(m, list)\nassert [sum(r) for r in m] == [3, 7] and m.t() == [[1, 3], [2, 4]]", "class Matrix(list):\n    def __str__(self): return '\\n'.join(' '.join(map(str, r)) for r in self)\n    def t(self): return Matrix(map(list, zip(*self)))\n", "' '.join", "','.join"),
    "what pytest runs before and after": ("state = []\ndef setup_module(module): state.append('m')\ndef setup_function(function): state.append(function.__name__)\ndef teardown_function(function): state.append('end')\ndef test_a(): assert state == ['m', 'test_a'] and inc(1) == 2\ndef test_b(): assert state == ['m', 'test_a', 'end', 'test_b'] and inc(2) == 3\nclass TestC:\n    @classmethod\n    def setup_class(cls): cls.c = Num(1)\n    def setup_method(self): self.n = self.c.n\n    def teardown_method(self, method): self.c.n += 1\n    def test_1(self): assert self.n == 1\n    def test_2(self): assert self.n == 2", "def inc(x): return x + 1\nclass Num:\n    def __init__(self, n): self.n = n\n", "x + 1", "x + 2"),
    "tests that end with sys.exit(0)": ("import sys\nassert add(1, 2) == 3\nsys.exit(0)", "def add(a, b): return a + b", "a + b", "a"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_right_program_passes_and_a_wrong_one_fails(code_pool: JudgePool, form: str) -> None:
    tests, program, right, wrong = FORMS[form]
    assert right in program
    reference = problem(asserts_reference(tests))
    passed = code_pool.submit(reference, fenced(program)).result()
    assert (passed.outcome, passed.score) == (Outcome.SCORED, 1.0), passed.detail
    failed = code_pool.submit(reference, fenced(program.replace(right, wrong))).result()
    assert (failed.outcome, failed.score) == (Outcome.SCORED, 0.0), failed.detail


CANNOT_BE_SENT = {
    "a module": "import math\nassert area(math, 2) > 12",
    "a class derived from the program's": "class Sub(Point): pass\nassert Sub(1, 2).x == 1",
    "a pattern": "match make():\n    case Point(x=1): pass\n    case _: assert False",
    "a fixture that pytest has": "def test_it(tmp_path):\n    assert read(tmp_path / 'a.txt') == ''",
    "a file": "import tempfile\nassert read(tempfile.mkdtemp()) == ''",
}


@pytest.mark.parametrize("form", CANNOT_BE_SENT)
def test_tests_that_cannot_be_forwarded_fail_their_trial_and_no_program(code_pool: JudgePool, form: str) -> None:
    programs = [POINT + "def area(m, r): return m.pi * r * r", "def area(m, r): return 0", "x = 1"]
    for program in programs:
        verdict = code_pool.submit(problem(asserts_reference(CANNOT_BE_SENT[form])), fenced(program)).result()
        assert verdict.outcome is Outcome.BAD_REFERENCE, verdict
        assert "CannotSendError" in verdict.detail or "do not reach the program" in verdict.detail


YES = (
    "class Yes:\n    def __init__(self, *a): pass\n"
    + "".join(
        f"    def __{n}__(self, *a): return True\n"
        for n in ["eq", "ne", "lt", "le", "gt", "ge", "bool", "contains", "instancecheck"]
    )
    + "".join(
        f"    def __{n}__(self, *a): return self\n"
        for n in ["add", "sub", "mul", "radd", "rsub", "rmul", "abs", "neg", "getitem", "call", "enter", "round"]
    )
    + "    def __hash__(self): return 3\n    def __len__(self): return 3\n    def __iter__(self): return iter([])\n    def __getattr__(self, n): return self\n"
)
CLAIMS = {
    "equality": "assert add(1, 2) == 3",
    "equality from the right": "assert 3 == add(1, 2)",
    "order": "assert add(1, 2) < 4",
    "difference": "assert abs(add(1, 2) - 3) < 1e-6",
    "truth": "assert add(1, 2)",
    "membership": "assert 3 in add(1, 2)",
    "membership in a list": "assert add(1, 2) in [3]",
    "approx": "import pytest\ndef test_it():\n    assert add(1, 2) == pytest.approx(3)",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(add(1, 2), 3)",
    "with a class of the program": "assert isinstance(Yes(), Yes)\nassert add(1, 2) == 3",
    "less with a class of the program": "assert isinstance(Yes(), Yes)\nassert add(1, 2) < 4",
    "near with a class of the program": "assert isinstance(Yes(), Yes)\nassert abs(add(1, 2) - 3) < 1e-6",
    "isinstance of int": "assert isinstance(add(1, 2), int) and add(1, 2) == 3",
    "exit": "assert add(1, 2) == 3",
    "a list": "assert add(1, 2) == [3]",
    "a list from the right": "assert [3] == add(1, 2)",
}
CHEATS = {
    "object": "def add(a, b): return Yes()",
    "class": "def add(a, b): return Yes",
    "container": "class L(list):\n    def push(self): pass\n    def copy(self): return [3]\n    def __eq__(self, o): return True\ndef add(a, b): return L()",
    "exit": "import sys\ndef add(a, b): sys.exit(0)",
    "SystemExit": "def add(a, b): raise SystemExit",
    "skip": "def add(a, b):\n    class Skipped(Exception): pass\n    raise Skipped",
    "StopTrial": "def add(a, b):\n    raise type('StopTrial', (BaseException,), {})()",
    "StopIteration": "def add(a, b): raise StopIteration",
    "verdict": "import os, struct, json\ndef add(a, b):\n    p = json.dumps({'passed': True}).encode()\n    os.write(4, struct.pack('>I', len(p)) + p)\n    return Yes()",
    "callback": "import os, struct, json\ndef add(a, b):\n    p = json.dumps({'callback': 0, 'name': 'exit', 'args': [], 'kwargs': {}}).encode()\n    os.write(4, struct.pack('>I', len(p)) + p)\n    return Yes()",
    "changes": "import os, struct, json\ndef add(a, b):\n    p = json.dumps({'value': ['r', 0], 'changes': [[0, ['l', [3]]]]}).encode()\n    os.write(4, struct.pack('>I', len(p)) + p)\n    return Yes()",
}  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS)
def test_no_object_of_a_program_makes_an_assertion_hold(code_pool: JudgePool, claim: str) -> None:
    for name, cheat in CHEATS.items():
        verdict = code_pool.submit(problem(asserts_reference(CLAIMS[claim])), fenced(YES + cheat)).result()
        assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 0.0), (name, verdict.detail)


FORGERIES = {
    "the frame of a generator": (
        "assert total(x for x in [1, 2, 3]) == 6",
        "def total(it):\n    frame = it._klear_side.ask_tests(it._klear_path[0], '__getattribute__', ('gi_frame',), {})\n"
        "    frame.f_builtins['exec'](\"import klear_values, time; klear_values.send({'passed': True}); time.sleep(9)\")",
    ),
    "a mock that equals everything": (
        "from unittest.mock import patch\nwith patch('builtins.input', side_effect=['3', '4']):\n    assert solve() == 7",
        "def solve():\n    input.configure_mock(**{'__eq__.return_value': True})\n    return input",
    ),
    "a mock that notes nothing": (
        "from unittest.mock import Mock\nm = Mock()\nnotify(m)\nm.send.assert_called_once_with(3)",
        "def notify(m): m.send.assert_called_once_with = print",
    ),
    "a mock that was called by itself": (
        "from unittest.mock import Mock\nm = Mock()\nnotify(m)\nassert m.call_count == 2",
        "def notify(m): m.call_count = 2",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_what_tests_pass_to_a_program_forges_no_result(code_pool: JudgePool, forgery: str) -> None:
    tests, program = FORGERIES[forgery]
    verdict = code_pool.submit(problem(asserts_reference(tests)), fenced(program)).result()
    assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 0.0), verdict.detail


def test_a_descriptor_of_a_program_replaces_no_method_of_the_tests(code_pool: JudgePool) -> None:
    tests = "class Box:\n    part = Part()\n    def check(self, x): return x == 3\nbox = Box()\nassert box.part is not None\nassert box.check(add(1, 2))"
    for attack in (
        "obj.check = yes",
        "owner.check = yes",
        "obj.__dict__['check'] = yes",
        "obj.__class__.check = yes",
        "vars(obj).update(check=yes)",
    ):
        program = f"def yes(*a): return True\nclass Part:\n    def __get__(self, obj, owner=None):\n        try: {attack}\n        except Exception: pass\n        return 1\ndef add(a, b): return 4"
        verdict = code_pool.submit(problem(asserts_reference(tests)), fenced(program)).result()
        assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 0.0), (attack, verdict.detail)
        right = code_pool.submit(
            problem(asserts_reference(tests)), fenced(program.replace("return 4", "return a + b"))
        ).result()
        assert right.score == 1.0, (attack, right.detail)
