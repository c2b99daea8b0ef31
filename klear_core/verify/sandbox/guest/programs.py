"""Runs inside the jail as module `klear_programs`: provides the names and interpreter state that programs expect."""

import ast
import builtins
import gc
import os
import struct
import sys
import types

from klear_parallel import provide_parallel

ERROR_BYTES = 600

PRELUDE = {
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Iterable Iterator List Literal "
    "NamedTuple Optional Sequence Set Tuple Type TypeVar Union",
    "collections": "Counter OrderedDict defaultdict deque namedtuple ChainMap",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle groupby islice "
    "pairwise permutations product repeat starmap takewhile zip_longest",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering",
    "math": "ceil comb cos dist e exp factorial floor fsum gcd hypot inf isqrt lcm "
    "log log10 log2 nan perm pi prod sin sqrt tan",
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


def _word_table():
    """Return a table for `bytes.translate` that turns every byte outside of ASCII words into a space."""
    table = bytearray(b" " * 256)
    for byte in range(128):
        if chr(byte).isalnum() or byte == ord("_"):
            table[byte] = byte
    return bytes(table)


_WORD_BYTES = _word_table()
_SCOPES = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def scan(source):
    """Return the code and the names that the program defines at its top level."""
    tree = ast.parse(source, "<solution>")
    return compile(tree, "<solution>", "exec", dont_inherit=True), _top_level(tree)


def _top_level(tree):
    """Return the names that the program itself binds in its module.

    A name that an import binds unchanged is left out: it is not a solution.
    """
    names, queue = set(), list(tree.body)
    while queue:
        node = queue.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(a.asname for a in node.names if a.asname)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if not isinstance(node, _SCOPES):
            queue += ast.iter_child_nodes(node)
    return names


class Program:
    """A compiled program and the names to provide to it; the code stays marshalled, for this process never runs it."""

    def __init__(self, source, frame):
        size = struct.unpack(">I", frame[:4])[0]
        self.defined = set(frame[4 : 4 + size].decode().split())
        self.code = frame[4 + size :]
        self.provided = {}
        # Scopes are ignored: a name is provided for any word of the text, and the program's own bindings hide it.
        words = {word.decode() for word in source.translate(_WORD_BYTES).split()}
        for module, names in PRELUDE.items():
            for name in words & set(names.split()):
                if hasattr(__import__(module), name):
                    self.provided[name] = getattr(__import__(module), name)
        self.is_parallel = bool(words & {"multiprocessing", "ProcessPoolExecutor"})
        for module in sorted(words & MODULES):  # imported here, once for all forks
            self.provided[module] = __import__(module)

    def provide(self):
        """Add the names that published solutions expect to the builtins.

        As builtins they are hidden by anything that the program binds itself, in any scope.
        """
        if self.is_parallel:
            provide_parallel()
        for name, value in self.provided.items():
            if not hasattr(builtins, name):
                setattr(builtins, name, value)


def new_main(name, names):
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__dict__.update(names)
    module.__dict__["__builtins__"] = __builtins__
    return module.__dict__


def behave_like_an_interpreter(recursion_limit):
    """Open the standard streams and restore the state of a fresh interpreter.

    Our own frames do not count towards the recursion limit.
    """
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)
    builtins.exit = builtins.quit = sys.exit  # what `site` would define
    gc.enable()
    sys.argv = ["solution.py"]
    own_frames, frame = 0, sys._getframe()
    while frame:
        own_frames, frame = own_frames + 1, frame.f_back
    sys.setrecursionlimit(own_frames + recursion_limit)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)  # solutions print integers of more than 4,300 digits, the default limit


def leave(status):
    """End as an interpreter would: wait for other threads, run exit handlers, flush buffers."""
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
