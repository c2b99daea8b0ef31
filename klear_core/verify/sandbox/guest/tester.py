"""Runs inside a jailed child as module `klear_tester`: runs the tests, which call the program in the other jail."""

import ast
import os
import random
import sys
import types

from klear_forms import pytest_module, run_forms
from klear_looks import FORWARDED, ProgramModule, forward_looks, is_instance, type_of, with_descriptors
from klear_remote import Names, Tester
from klear_values import CannotSendError, ListNode, TreeNode, receive, send, text_of

_MODULES = [
    "bisect",
    "collections",
    "copy",
    "datetime",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "random",
    "re",
    "string",
    "sys",
    "typing",
]
_TYPING = ["Any", "Callable", "Dict", "Iterable", "List", "Optional", "Set", "Tuple", "Union"]


def list_node(values):
    """Return a linked list of the values; the published LeetCode tests call this helper by its name."""
    head = None
    for value in reversed(values or []):
        head = ListNode(value, head)
    return head


def tree_node(values):
    """Return the binary tree with these values in level order, None for an absent child."""
    if not values:
        return None
    root = TreeNode(values[0])
    queue, at = [root], 1
    while queue and at < len(values):
        node = queue.pop(0)
        for side in ("left", "right"):
            if at < len(values) and values[at] is not None:
                setattr(node, side, TreeNode(values[at]))
                queue.append(getattr(node, side))
            at += 1
    return root


def is_same_list(a, b):
    """Return whether two linked lists hold the same values."""
    while a and b and a.val == b.val:
        a, b = a.next, b.next
    return not a and not b


def is_same_tree(a, b):
    """Return whether two trees have the same shape and values."""
    if not a or not b:
        return not a and not b
    return a.val == b.val and is_same_tree(a.left, b.left) and is_same_tree(a.right, b.right)


_HELPERS = {f.__name__: f for f in (ListNode, TreeNode, list_node, tree_node, is_same_list, is_same_tree)}
_HELPERS["inf"] = float("inf")


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


class StopTrial(BaseException):
    """Raised in a trial that has seen enough."""


class StandIn:
    """Stands for the program in the trial of a test program: all its attributes, calls and operators give another.

    Every comparison but `!=`, `<` and `>` holds. A loop that only the real program would end is stopped.
    """

    _klear_path = ("the program",)

    def __init__(self, wire):
        self._klear_wire = wire
        self._klear_left = [2_000]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._any()

    def __call__(self, *args, **kwargs):
        for value in (*args, *kwargs.values()):
            self._klear_wire.encode(value)
            self._klear_wire.forget(list(self._klear_wire.shared))  # so that each is looked at again
        return self._any()

    def _any(self, *_):
        self._klear_left[0] -= 1
        if self._klear_left[0] < 0:
            raise StopTrial
        return self

    def _true(self, *_):
        return self._any() is self

    def _false(self, *_):
        return self._any() is not self

    def _zero(self, *_):
        self._any()
        return 0

    def _nothing(self, *_):
        self._any()

    def __iter__(self):
        self._any()
        return iter(())

    def __await__(self):
        yield from ()
        return self._any()

    def __mro_entries__(self, bases):
        raise CannotSendError("the tests derive a class from one of the program's")

    def __float__(self):
        return 0.0

    def __setattr__(self, name, value):
        if name.startswith("_klear"):
            object.__setattr__(self, name, value)

    __bool__ = __eq__ = __le__ = __ge__ = __contains__ = __instancecheck__ = __subclasscheck__ = _true
    __ne__ = __lt__ = __gt__ = _false
    __hash__ = __len__ = __index__ = __int__ = _zero
    __setitem__ = __delitem__ = __exit__ = _nothing
    __enter__ = __getitem__ = __neg__ = __pos__ = __abs__ = __invert__ = __round__ = _any


for _name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
    setattr(StandIn, "__%s__" % _name, StandIn._any)
    setattr(StandIn, "__r%s__" % _name, StandIn._any)


def _without_failures(tree):
    """Return the test program with every statement alone in a `try`, so that one that fails does not hide the next."""

    class Transformer(ast.NodeTransformer):
        def generic_visit(self, node):
            super().generic_visit(node)
            for field in ("body", "orelse", "finalbody"):
                statements = getattr(node, field, None)
                if isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt):
                    setattr(node, field, [self.guarded(s) for s in statements])
            return node

        def guarded(self, statement):
            is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
            if is_future or isinstance(statement, (ast.Global, ast.Nonlocal)):
                return statement
            name = lambda n: ast.Name(id=n, ctx=ast.Load())  # noqa: E731
            serious = ast.Tuple(
                elts=[name("_klear_import_error"), name("_klear_os_error"), name("_klear_cannot_send")], ctx=ast.Load()
            )
            handlers = [
                ast.ExceptHandler(type=serious, name=None, body=[ast.Raise(exc=None, cause=None)]),
                ast.ExceptHandler(type=name("_klear_exception"), name=None, body=[ast.Pass()]),
            ]
            return ast.Try(body=[statement], handlers=handlers, orelse=[], finalbody=[])

    return ast.fix_missing_locations(Transformer().visit(tree))


_REPLACEABLE = frozenset(
    "datetime glob json math os os.path random secrets shutil socket string subprocess sys time urllib.request "
    "uuid".split()
)
"""Modules in which a test may replace something that the program then uses."""
_PROGRAM_MODULES = ("solution", "main", "program", "submission", "candidate", "your_module", "my_module", "module")


def run_tests(source, is_trial=False):
    """Run a test program and return `passed`, `failed`, or `broken` if the test program itself cannot run.

    A trial runs it against a stand-in for the program, with which no assertion fails: it is `broken` if it cannot be
    compiled, imports what is not there, hangs by itself, or gives the program a value that cannot be sent.
    """
    tester = Tester()
    result = _result(source, tester, is_trial)
    tester.turns.lock.acquire()  # other threads of the tests send nothing any more
    return result


def _result(source, tester, is_trial):
    try:
        stand_in = StandIn(tester.wire) if is_trial else None
        names, tree = _prepared(source, tester, stand_in)
        called = {node.id for s in tree.body if not isinstance(s, _DEFINITIONS) for node in _names_in(s)}
        code = compile(_without_failures(tree) if is_trial else tree, "<tests>", "exec")
        try:
            exec(code, names)
        except SystemExit as e:  # such as `sys.exit(unittest.main())`: the cases are still to be run
            if e.code or getattr(e, "_klear_is_remote", False):
                raise
        run_forms(names, called)
    except StopTrial:
        return {"passed": True}
    except BaseException as e:
        return _result_of(e, is_trial)
    return {"passed": True}


def _result_of(error, is_trial):
    text = "%s: %s" % (type(error).__name__, text_of(error))
    is_remote = getattr(error, "_klear_is_remote", False)
    if isinstance(error, (CannotSendError, ImportError, SyntaxError)) and not is_remote:
        return {"broken": text}
    if is_trial and isinstance(error, OSError):
        return {"broken": "files of the tests do not reach the program: " + text}
    if is_trial or (isinstance(error, SystemExit) and not error.code and not is_remote):
        return {"passed": True}
    return {"failed": "assertion failed " + text_of(error) if isinstance(error, AssertionError) else text}


class _TypeOf(ast.NodeTransformer):
    """Has the tests ask the program for the type of one of its objects, in place of that of what stands for it."""

    def visit_Call(self, node):
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1 and not node.keywords:
            node.func.id = "_klear_type"
        elif isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            node.func.id = "_klear_is_instance"
        return node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr == "__class__" and isinstance(node.ctx, ast.Load):
            return ast.Call(func=ast.Name(id="_klear_type", ctx=ast.Load()), args=[node.value], keywords=[])
        return node


class _InClassBody(ast.NodeTransformer):
    """Has the body of a class look its names up among the global ones, which asks the program; Python would not."""

    def __init__(self, names):
        self.names = names

    def visit_Name(self, node):
        if node.id not in self.names or not isinstance(node.ctx, ast.Load):
            return node
        where = ast.Name(id="_klear_names", ctx=ast.Load())
        return ast.Subscript(value=where, slice=ast.Constant(value=node.id), ctx=ast.Load())

    def visit_FunctionDef(self, node):
        node.decorator_list = [self.visit(decorator) for decorator in node.decorator_list]
        node.args.defaults = [self.visit(default) for default in node.args.defaults]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node):
        node.decorator_list = [self.visit(decorator) for decorator in node.decorator_list]
        node.bases = [self.visit(base) for base in node.bases]
        return node

    def visit_Lambda(self, node):
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_Lambda


def _names_in(statement):
    return [node for node in ast.walk(statement) if isinstance(node, ast.Name)]


def _prepared(source, tester, stand_in):
    """Return the global names of a test program, and its tree."""
    for name in _PROGRAM_MODULES:
        if stand_in is None:
            sys.modules[name] = ProgramModule(name, tester.attribute, lambda *pair: tester.apply("bind", *pair))
        else:
            sys.modules[name] = ProgramModule(name, lambda _: stand_in, lambda *_: None)
    sys.modules["pytest"] = pytest_module()
    tree, stars = _as_script(source)
    _watch(tester, tree)
    if stand_in is None:
        _forward_settings(tester, source)
    if "environ" in source or "setenv" in source:
        tester.environ = dict(os.environ)
    looks = {
        "warnings": ("arns", "warning", "deprecated_call"),
        "logging": ("logging", "assertLogs", "assertNoLogs", "caplog"),
    }
    tester.observe = [kind for kind, words in looks.items() if any(word in source for word in words)]
    for kind in tester.observe:
        __import__(kind)
    if "unittest" in source:
        __import__("unittest").main = lambda *_, **__: None  # `run_forms` runs the cases
    for module in FORWARDED:
        if module in source:
            forward_looks(module)
    provided = {"__name__": "tests", "__file__": "tests.py", "_klear_type": type_of, "_klear_is_instance": is_instance}
    provided.update(_klear_with_descriptors=with_descriptors, **_HELPERS)
    provided.update((name, __import__(name)) for name in _MODULES)
    provided.update((name, getattr(provided["typing"], name)) for name in _TYPING)
    provided.update(stars)
    under_test = _names_under_test(source, tree.body[-1], provided) if tree.body else set()
    for node in ast.walk(tree):
        # `match` asks for a real class, which what stands for one of the program's is not.
        if (
            getattr(ast, "MatchClass", None)
            and isinstance(node, ast.MatchClass)
            and ast.unparse(node.cls) in under_test
        ):
            raise CannotSendError("the tests match a pattern against a class of the program")
        if isinstance(node, ast.ClassDef):
            node.body = [_InClassBody(under_test).visit(statement) for statement in node.body]
            node.decorator_list.append(ast.Name(id="_klear_with_descriptors", ctx=ast.Load()))
    evaluates = any(isinstance(node, ast.Name) and node.id in ("eval", "exec") for node in ast.walk(tree))
    names = Names(tester.look_up if stand_in is None else lambda _: stand_in, under_test, evaluates)
    names.update(provided, __builtins__=__builtins__, _klear_names=names)
    if stand_in is not None:
        names.update(dict.fromkeys(under_test, stand_in))
        names.update(
            _klear_import_error=ImportError,
            _klear_os_error=OSError,
            _klear_cannot_send=CannotSendError,
            _klear_exception=Exception,
        )
    module = sys.modules["tests"] = types.ModuleType("tests")  # unittest and dataclasses look it up
    vars(module).update(names)
    return names, ast.fix_missing_locations(_TypeOf().visit(tree))


def _forward_settings(tester, source):
    """Have the seed and the recursion limit that the tests set also be the program's."""
    for module, name in ((random, "seed"), (sys, "setrecursionlimit")):
        if name in source:
            setattr(module, name, _both(getattr(module, name), lambda *args, do=name: tester.apply(do, *args)))


def _both(own, remote):
    def function(*args):
        own(*args)
        remote(*args)

    return function


def _watch(tester, tree):
    """Note what the tests replace outside of themselves: in modules that the program may use, and in its own."""
    for node in ast.walk(tree):
        path = []
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).split(".")[-1]
            texts = [a.value if isinstance(a, ast.Constant) else ast.unparse(a) for a in node.args[:2]]
            if called in ("patch", "setattr") and isinstance(node.args[0], ast.Constant):
                path = str(texts[0]).split(".")
            elif called in ("object", "setattr") and len(texts) == 2:
                path = [*str(texts[0]).split("."), str(texts[1])]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            path = ast.unparse(node).split(".")
        is_programs = bool(path) and path[0] in _PROGRAM_MODULES
        *module, name = path[is_programs:] or [""]
        if is_programs and not module:
            tester.patched[name] = None
        elif module and ".".join(module) in _REPLACEABLE and name not in ("stdin", "stdout", "stderr"):
            owner = ".".join(module)
            __import__(owner)
            if is_programs:
                tester.patched[module[0]] = sys.modules[module[0]]
            if hasattr(sys.modules[owner], name):
                tester.watched[owner, name] = getattr(sys.modules[owner], name)


def _as_script(source):
    """Return the tree without `from x import *` and main guards, whose bodies are kept, and what the imports bind."""
    tree = ast.parse(source)
    stars, kept = {}, []
    for node in tree.body:
        if _is_main_guard(node):
            kept += node.body
            continue
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            exec("from %s import *" % node.module, stars)
        else:
            kept.append(node)
    tree.body = kept
    stars.pop("__builtins__", None)
    return tree, stars


def _is_main_guard(node):
    if not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare)):
        return False
    sides = {ast.unparse(side) for side in (node.test.left, *node.test.comparators)}
    return isinstance(node.test.ops[0], ast.Eq) and sides == {"__name__", "'__main__'"}


def _names_under_test(source, last, provided):
    """Return the names that the program must define: the global names that nothing else provides.

    If there are none, those of the last statement (`check(add)` after star imports). If those are builtins only, the
    builtins that it calls (MBPP asks for a function `sum`).
    """
    import builtins
    import symtable

    bound, loaded = set(), set()
    tables = [symtable.symtable(source, "<tests>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_module = table.get_type() == "module"
            if symbol.is_referenced() and (is_module or symbol.is_global()):
                loaded.add(symbol.get_name())
            if (is_module or symbol.is_declared_global()) and (symbol.is_assigned() or symbol.is_imported()):
                bound.add(symbol.get_name())
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    if modules & set(_PROGRAM_MODULES):
        last = ast.Pass()  # the names that a module of the program gives
    taken = bound | set(dir(builtins))
    in_last = {node.id for node in ast.walk(last) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    callees = {
        node.func.id for node in ast.walk(last) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    found = loaded - taken - set(provided) or (in_last & loaded) - taken
    return found or (set() if loaded & {"eval", "exec"} else callees - bound)


def run_checker(request):
    """Return the special judge's verdict on one output; its `check(input, output, expected)` returns a truth value."""
    names = {"__name__": "checker", "__builtins__": __builtins__}
    try:
        exec(compile(request["source"], "<checker>", "exec"), names)
        verdict = names["check"](request["input"], request["output"], request["expected"])
        return {"passed": bool(verdict)}
    except BaseException as e:
        return {"broken": "%s: %s" % (type(e).__name__, text_of(e))}


def serve_tester():
    while True:
        request = receive()
        send(
            run_checker(request)
            if "output" in request
            else run_tests(request["source"], request.get("is_trial", False))
        )
