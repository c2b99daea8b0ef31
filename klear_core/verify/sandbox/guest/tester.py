"""Runs inside a jailed child as module `klear_tester`: runs the tests, which call the program in the other jail."""

from klear_values import CannotSendError, ListNode, Proxy, TreeNode, Wire, receive, send, text_of


class RemoteError(Exception):
    """The program raised something that has no builtin type of that name."""


class Tester:
    """Runs the tests; every call of the program's names goes to the other jail and back."""

    def __init__(self):
        self.wire = Wire(lambda tag, value: Proxy(self, [value] if tag == "h" else value), keeps_objects=False)

    def request(self, path, args, kwargs, **how):
        encoded_args = [self.wire.encode(a) for a in args]
        encoded_kwargs = {k: self.wire.encode(v) for k, v in kwargs.items()}
        send({"path": path, **how, "args": encoded_args, "kwargs": encoded_kwargs})
        reply = receive()
        if "value" in reply:
            return self.wire.decode(reply["value"])
        import builtins

        # Tests may expect the type: `try: f(-1)`, `except ValueError: pass`.
        kind = getattr(builtins, reply["error"], None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = RemoteError
        raise kind("%s: %s" % (reply["error"], reply["text"]))


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


def run_tests(source):
    """Run a test program and return `passed`, `failed`, or `broken` if the test program itself cannot run."""
    tester = Tester()
    tree, stars = _without_star_imports(source)
    if isinstance(stars, str):
        return {"broken": stars}
    names = {"__name__": "tests", **_HELPERS, **stars}
    names.update((name, __import__(name)) for name in _MODULES)
    names.update((name, getattr(names["typing"], name)) for name in _TYPING)
    names.update((name, Proxy(tester, [name])) for name in _names_under_test(source, tree.body[-1], names))
    names["__builtins__"] = __builtins__
    try:
        exec(compile(tree, "<tests>", "exec"), names)
    except AssertionError as e:
        return {"failed": "assertion failed " + text_of(e)}
    except (SystemExit, ImportError, CannotSendError) as e:
        return {"broken": "%s: %s" % (type(e).__name__, text_of(e))}
    except Exception as e:
        return {"failed": "%s: %s" % (type(e).__name__, text_of(e))}
    return {"passed": True}


def _without_star_imports(source):
    """Return the tree without its `from x import *`, and the names that these bind (or why one cannot be imported)."""
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


def _names_under_test(source, last, provided):
    """Return the names that the program must define: the global names that nothing else provides.

    If there are none, those of the last statement (`check(add)` after star imports). If those are builtins only, the
    builtins that it calls (MBPP asks for a function `sum`).
    """
    import ast
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
    taken = bound | set(dir(builtins))
    in_last = {node.id for node in ast.walk(last) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    callees = {
        node.func.id for node in ast.walk(last) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return loaded - taken - set(provided) or (in_last & loaded) - taken or callees - bound


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
        send(run_checker(request) if "output" in request else run_tests(request["source"]))
