"""Runs inside a jailed child: either the untrusted program's side of calls, or the tests' side (`role` "tester").

Requests and replies are JSON with tags, so that neither side ever unpickles the other's objects. Objects without a JSON
form stay where they are and travel as handles.
"""

import base64
import json
import os
import struct

REQUESTS, REPLIES = 3, 4
_OPAQUE = "an object of the program"


class ListNode:
    """LeetCode's linked list."""

    def __init__(self, val=0, next=None):  # noqa: A002  the name is LeetCode's
        self.val = val
        self.next = next


class TreeNode:
    """LeetCode's binary tree."""

    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right


_TYPES = {t.__name__: t for t in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, type(None))}
_NODES = {"ListNode": ("val", "next"), "TreeNode": ("val", "left", "right")}


class CannotSendError(Exception):
    """The tests want to hand over something that has no form on the wire."""


def _read(fd, count):
    parts = []
    while count:
        part = os.read(fd, count)
        if not part:
            os._exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def receive():
    return json.loads(_read(REQUESTS, struct.unpack(">I", _read(REQUESTS, 4))[0]))


def send(value):
    payload = json.dumps(value).encode()
    view = memoryview(struct.pack(">I", len(payload)) + payload)
    while view:
        view = view[os.write(REPLIES, view) :]


# --- values on the wire: scalars as they are, all else [tag, ...] -----------------------------------------------------------


class Wire:
    """Encodes and decodes values; objects it cannot write become handles of this side."""

    def __init__(self, handle_from, keeps_objects):
        self.kept = []
        self.handle_from = handle_from
        self.keeps_objects = keeps_objects

    def encode(self, value):
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if value - value == 0 else ["x", repr(value)]
        if isinstance(value, (list, tuple, set, frozenset)):
            tag = next(t for t, k in (("l", list), ("t", tuple), ("s", set), ("f", frozenset)) if isinstance(value, k))
            return [tag, [self.encode(v) for v in value]]
        if isinstance(value, dict):
            return ["d", [[self.encode(k), self.encode(v)] for k, v in value.items()]]
        return self._encode_object(value, kind)

    def _encode_object(self, value, kind):
        if isinstance(value, (bytes, bytearray)):
            return ["b", base64.b64encode(value).decode()]
        if kind is complex:
            return ["c", value.real, value.imag]
        if isinstance(value, (bool, int, str, float)):
            plain = next(k for k in (int, float, str) if isinstance(value, k))
            return self.encode(plain(value))
        if kind.__name__ in _NODES:
            return ["n", kind.__name__, [self.encode(getattr(value, name)) for name in _NODES[kind.__name__]]]
        if isinstance(value, Proxy):
            return ["p", object.__getattribute__(value, "_klear_path")]
        if hasattr(kind, "__array__") and hasattr(kind, "tolist"):
            return self.encode(value.tolist())
        if kind is range or hasattr(kind, "__next__") or kind.__name__ in ("deque", "dict_keys", "dict_values", "dict_items"):
            return ["i", [self.encode(v) for v in value]]
        if isinstance(value, type) and _TYPES.get(value.__name__) is value:
            return ["y", value.__name__]
        if not self.keeps_objects:
            raise CannotSendError("the tests pass a %s, which cannot be sent to the program" % kind.__name__)
        self.kept.append(value)
        return ["h", len(self.kept) - 1]

    def decode(self, value):
        if not isinstance(value, list):
            return value
        tag, *rest = value
        if tag in ("l", "t", "s", "f", "i"):
            return {"l": list, "t": tuple, "s": set, "f": frozenset, "i": list}[tag](self.decode(v) for v in rest[0])
        if tag == "d":
            return {self.decode(k): self.decode(v) for k, v in rest[0]}
        if tag == "b":
            return base64.b64decode(rest[0])
        if tag == "c":
            return complex(*rest)
        if tag == "x":
            return float(rest[0])
        if tag == "y":
            return _TYPES[rest[0]]
        if tag == "n":
            return self.node(rest[0])(*(self.decode(v) for v in rest[1]))
        return self.handle_from(tag, rest[0])

    def node(self, name):
        return {"ListNode": ListNode, "TreeNode": TreeNode}[name]


# --- the program's side -------------------------------------------------------------------------------------------------------


class ProgramSide:
    """Answers calls of the untrusted program's functions."""

    def __init__(self, names, defined):
        self.names = names
        self.defined = defined
        self.wire = Wire(self._find, keeps_objects=True)
        self.wire.node = lambda name: self.names.get(name) or Wire.node(self.wire, name)

    def _find(self, tag, value):
        return self.wire.kept[value] if tag == "h" else self.resolve(value)

    def resolve(self, path):
        """A path is a name the program defines, or [handle], followed by attributes."""
        first, *attributes = path
        target = self.wire.kept[first] if isinstance(first, int) else self._defined(first)
        for name in attributes:
            target = getattr(target, name)
        return target

    def _defined(self, name):
        if name not in self.defined or name not in self.names:
            raise NameError("the program does not define %r" % name)
        return self.names[name]

    def entry(self, name):
        """The class Solution first: a star import may have brought a function of the same name."""
        if "Solution" in self.defined and hasattr(self.names.get("Solution"), name):
            return getattr(self.names["Solution"](), name)
        return self._defined(name)

    def answer(self, request):
        args = [self.wire.decode(a) for a in request["args"]]
        kwargs = {k: self.wire.decode(v) for k, v in request.get("kwargs", {}).items()}
        target = self.entry(request["entry"]) if "entry" in request else self.resolve(request["path"])
        if "set" in request:
            setattr(target, request["set"], args[0])
            return None
        if request.get("get"):
            return self.wire.encode(target)
        if request.get("list"):
            return self.wire.encode(list(target))
        return self.wire.encode(target(*args, **kwargs))


def serve_program(code, program, new_main):
    names = new_main("solution", {"ListNode": ListNode, "TreeNode": TreeNode} | program.globals)
    exec(code, names)
    side = ProgramSide(names, program.defined)
    while True:
        request = receive()
        if request.get("raw"):
            request["args"] = [_plain(a) for a in request["args"]]
        try:
            reply = {"value": side.answer(request)}
        except BaseException as e:
            reply = {"error": type(e).__name__, "text": _text_of(e)}
        send(reply)


def _plain(value):
    """Plain JSON arguments in the wire's form."""
    if isinstance(value, list):
        return ["l", [_plain(v) for v in value]]
    if isinstance(value, dict):
        return ["d", [[k, _plain(v)] for k, v in value.items()]]
    return value


def _text_of(error):
    try:
        return str(error)[:300]
    except BaseException:
        return ""


# --- the tests' side ------------------------------------------------------------------------------------------------------------


class Proxy:
    """Stands for something of the program. Its operators are this class's: the program's own are never asked."""

    def __init__(self, tester, path):
        object.__setattr__(self, "_klear_tester", tester)
        object.__setattr__(self, "_klear_path", path)

    def __call__(self, *args, **kwargs):
        return self._klear_tester.request(self._klear_path, args, kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        path = self._klear_path
        if isinstance(path[0], int):  # of an object: its value now
            return self._klear_tester.request([*path, name], (), {}, get=True)
        return Proxy(self._klear_tester, [*path, name])

    def __setattr__(self, name, value):
        self._klear_tester.request(self._klear_path, (value,), {}, set=name)

    def __iter__(self):
        return iter(self._klear_tester.request(self._klear_path, (), {}, list=True))

    def __bool__(self):
        raise TypeError("an object of the program is neither true nor false")

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__


class RemoteError(Exception):
    """The program raised something that has no builtin type of that name."""


class Tester:
    """Runs the tests; every call of the program's names goes to the other jail and back."""

    def __init__(self):
        self.wire = Wire(lambda tag, value: Proxy(self, [value] if tag == "h" else value), keeps_objects=False)

    def request(self, path, args, kwargs, **how):
        encoded = {"args": [self.wire.encode(a) for a in args], "kwargs": {k: self.wire.encode(v) for k, v in kwargs.items()}}
        send({"path": path, **how, **encoded})
        reply = receive()
        if "value" in reply:
            return self.wire.decode(reply["value"])
        import builtins

        kind = getattr(builtins, reply["error"], None)
        is_exception = isinstance(kind, type) and issubclass(kind, Exception)
        raise (kind if is_exception else RemoteError)("%s: %s" % (reply["error"], reply["text"]))


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
    """A linked list of the values, as the published LeetCode tests name it."""
    head = None
    for value in reversed(values or []):
        head = ListNode(value, head)
    return head


def tree_node(values):
    """A binary tree from its level order, None for an absent child."""
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
    """Whether two linked lists hold the same values."""
    while a and b and a.val == b.val:
        a, b = a.next, b.next
    return not a and not b


def is_same_tree(a, b):
    """Whether two trees have the same shape and values."""
    if not a or not b:
        return not a and not b
    return a.val == b.val and is_same_tree(a.left, b.left) and is_same_tree(a.right, b.right)


_HELPERS = {f.__name__: f for f in (ListNode, TreeNode, list_node, tree_node, is_same_list, is_same_tree)} | {"inf": float("inf")}


def run_tests(source):
    """`passed`, `failed`, or `broken` where the test program itself cannot run."""
    tester = Tester()
    tree, stars = _without_star_imports(source)
    if isinstance(stars, str):
        return {"broken": stars}
    names = {"__name__": "tests", **_HELPERS, **stars}
    names.update((name, __import__(name)) for name in _MODULES)
    names.update((name, getattr(names["typing"], name)) for name in _TYPING)
    names.update((name, Proxy(tester, [name])) for name in _names_under_test(tree, names))
    names["__builtins__"] = __builtins__
    try:
        exec(compile(tree, "<tests>", "exec"), names)
    except AssertionError as e:
        return {"failed": "assertion failed " + _text_of(e)}
    except (SystemExit, ImportError, CannotSendError) as e:
        return {"broken": "%s: %s" % (type(e).__name__, _text_of(e))}
    except Exception as e:
        return {"failed": "%s: %s" % (type(e).__name__, _text_of(e))}
    return {"passed": True}


def _without_star_imports(source):
    """The tree without its `from x import *`, and what those bring in (or why they cannot be imported)."""
    import ast

    tree = ast.parse(source)
    stars, kept = {}, []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            try:
                exec("from %s import *" % node.module, stars)
            except ImportError as e:
                return tree, str(e)
        else:
            kept.append(node)
    tree.body = kept
    stars.pop("__builtins__", None)
    return tree, stars


def _names_under_test(tree, provided):
    """Free names that nothing else provides. If there are none, those of the last statement (`check(add)` after star imports);
    and if those are builtins only, the builtins it calls (MBPP asks for a function `sum`)."""
    import ast
    import builtins

    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update((a.asname or a.name).split(".")[0] for a in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    taken = bound | set(dir(builtins))
    free = _loaded(tree) - taken
    callees = {node.func.id for node in ast.walk(tree.body[-1]) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return free - set(provided) or _loaded(tree.body[-1]) - taken or callees - bound


def _loaded(tree):
    import ast

    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def run_checker(request):
    """The special judge's own word on one output: its `check(input, output, expected)` returns a bool or a fraction."""
    names = {"__name__": "checker", "__builtins__": __builtins__}
    try:
        exec(compile(request["source"], "<checker>", "exec"), names)
        verdict = names["check"](request["input"], request["output"], request["expected"])
        return {"passed": bool(verdict)}
    except BaseException as e:
        return {"broken": "%s: %s" % (type(e).__name__, _text_of(e))}


def serve_tester():
    while True:
        request = receive()
        send(run_checker(request) if "output" in request else run_tests(request["source"]))


def serve(code, program, new_main, role):
    """The child's whole life after the supervisor has locked it in."""
    if role == "program":
        serve_program(code, program, new_main)
    else:
        serve_tester()
