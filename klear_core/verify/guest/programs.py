"""Runs inside the jail as module `klear_programs`: what a program defines and needs, and the habits of an interpreter around it."""

import gc
import os
import struct
import sys
import types

ERROR_BYTES = 600
_RECURSION_LIMIT = 50_000

PRELUDE = {
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Iterable Iterator List Literal NamedTuple Optional "
    "Sequence Set Tuple Type TypeVar Union",
    "collections": "Counter OrderedDict defaultdict deque namedtuple ChainMap",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle groupby islice pairwise permutations product "
    "repeat starmap takewhile zip_longest",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering",
    "math": "ceil comb cos dist e exp factorial floor fsum gcd hypot inf isqrt lcm log log10 log2 nan perm pi prod sin sqrt tan",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "operator": "add and_ itemgetter mul or_ sub xor",
    "fractions": "Fraction",
    "decimal": "Decimal",
    "datetime": "datetime timedelta",
    "copy": "deepcopy",
    "random": "randint",
    "dataclasses": "dataclass field",
}
MODULES = frozenset(
    [
        "array",
        "bisect",
        "collections",
        "copy",
        "cmath",
        "dataclasses",
        "datetime",
        "decimal",
        "enum",
        "fractions",
        "functools",
        "heapq",
        "io",
        "itertools",
        "json",
        "math",
        "numbers",
        "operator",
        "os",
        "queue",
        "random",
        "re",
        "statistics",
        "string",
        "struct",
        "sys",
        "threading",
        "time",
        "traceback",
        "typing",
    ]
)


def scan(source):
    """The code, the names it defines, those it takes from the prelude, and the modules worth importing before the forks."""
    import ast
    import builtins

    tree = ast.parse(source, "<solution>")
    bound, loaded, modules = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Import):
            bound.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
            modules.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            bound.update(alias.asname or alias.name for alias in node.names)
            modules.add((node.module or "").split(".")[0])
    free = loaded - bound - set(dir(builtins))
    return compile(tree, "<solution>", "exec", dont_inherit=True), _top_level(tree), free, modules


def _top_level(tree):
    """Names the program itself binds at its top level: what star imports bring in is not a solution."""
    import ast

    names = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(a.asname for a in node.names if a.asname)
        else:
            names.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return names


class Program:
    """A compiled program and what the forks need to run it; the code stays marshalled, for this process never runs it."""

    def __init__(self, frame):
        lengths = struct.unpack(">III", frame[:12])
        parts, at = [], 12
        for length in lengths:
            parts.append(frame[at : at + length])
            at += length
        self.defined, free, modules = (set(p.decode().split()) for p in parts)
        self.code = frame[at:]
        self.globals = {}
        for module in sorted(modules & MODULES):
            __import__(module)
        for module, names in PRELUDE.items():
            for name in free & set(names.split()):
                self.globals.setdefault(name, getattr(__import__(module), name, None))
        for module in free & MODULES:
            self.globals[module] = __import__(module)


def new_main(name, names):
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__dict__.update(names)
    module.__dict__["__builtins__"] = __builtins__
    return module.__dict__


def open_stdio():
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)
    import builtins

    builtins.exit = builtins.quit = sys.exit  # what `site` would define
    gc.enable()
    sys.argv = ["solution.py"]
    sys.setrecursionlimit(_RECURSION_LIMIT)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)


def leave(status):
    """End as an interpreter would: other threads are waited for, exit handlers run, buffers are flushed."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        if "atexit" in sys.modules:
            sys.modules["atexit"]._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        status = status or 1
    os._exit(status)


def report(error):
    try:
        text = "%s: %s" % (type(error).__name__, error)
        os.write(2, text.encode("utf-8", "replace")[-ERROR_BYTES:])
    except BaseException:
        os.write(2, b"an exception that cannot be shown")
