"""Runs inside the jail as module `klear_programs`: provides the names and interpreter state that programs expect."""

import _io
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
    "typing": "Any Callable Collection Container DefaultDict Deque Dict Final FrozenSet Generator Generic "
    "Hashable Iterable Iterator List Literal Mapping MutableMapping NamedTuple NewType NoReturn Optional Protocol "
    "Sequence Set Sized Tuple Type TypeVar TypedDict Union cast overload",
    "collections": "Counter OrderedDict UserDict UserList UserString defaultdict deque namedtuple ChainMap",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "itertools": "accumulate chain combinations combinations_with_replacement compress count cycle dropwhile "
    "filterfalse groupby islice pairwise permutations product repeat starmap takewhile tee zip_longest",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce singledispatch total_ordering wraps",
    "math": "acos acosh asin asinh atan atan2 atanh cbrt ceil comb copysign cos cosh degrees dist e erf erfc exp "
    "exp2 expm1 fabs factorial floor fmod frexp fsum gamma gcd hypot inf isclose isfinite isinf isnan isqrt lcm "
    "ldexp lgamma log log10 log1p log2 modf nan nextafter perm pi prod radians remainder sin sinh sqrt tan tanh "
    "tau trunc ulp",
    "string": "Formatter Template ascii_letters ascii_lowercase ascii_uppercase capwords digits hexdigits "
    "octdigits printable punctuation whitespace",
    "operator": "add and_ attrgetter concat contains countOf eq floordiv ge getitem gt index indexOf inv invert "
    "is_ is_not itemgetter le lshift lt methodcaller mod mul ne neg not_ or_ pos rshift setitem sub truediv truth "
    "xor",
    "re": "fullmatch search subn split findall finditer escape match DOTALL IGNORECASE MULTILINE VERBOSE",
    "io": "BytesIO StringIO TextIOWrapper",
    "sys": "argv byteorder exc_info float_info getrecursionlimit getsizeof intern maxsize maxunicode modules "
    "set_int_max_str_digits setrecursionlimit stderr stdin stdout version version_info",
    "json": "JSONDecodeError dump dumps load loads",
    "statistics": "fmean geometric_mean harmonic_mean mean median median_high median_low mode multimode pstdev "
    "pvariance quantiles stdev variance",
    "fractions": "Fraction",
    "decimal": "Decimal",
    "datetime": "date datetime timedelta timezone",
    "copy": "deepcopy",
    "random": "Random choice choices gauss getrandbits randint randrange sample seed shuffle uniform",
    "dataclasses": "dataclass field",
}
"""Names that published solutions use without an import: those that LiveCodeBench's harness imports, and some more."""
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
                    self.provided[name] = module
        self.is_parallel = bool(words & {"multiprocessing", "ProcessPoolExecutor"})
        for module in sorted(words & MODULES):  # imported here, once for all forks
            __import__(module)
            self.provided[module] = ""

    def provide(self):
        """Add the names that published solutions expect to the builtins.

        As builtins they are hidden by anything that the program binds itself, in any scope.
        """
        if self.is_parallel:
            provide_parallel()
        for name, module in self.provided.items():
            if not hasattr(builtins, name):
                # Looked up in the fork, which has other streams.
                value = getattr(sys.modules[module], name) if module else sys.modules[name]
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


def leave(status, names):
    """End as an interpreter would: wait for other threads, run exit handlers, flush buffers.

    Files among the program's global names are flushed, too: an interpreter closes them when it takes its modules apart.
    """
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        if "atexit" in sys.modules:
            sys.modules["atexit"]._run_exitfuncs()
        streams = [sys.stdout, sys.__stdout__, sys.stderr]
        for stream in streams:
            # As in CPython: an object in place of a stream need not say whether it is closed.
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        for value in list(names.values()):
            if issubclass(type(value), _io._IOBase) and not any(value is stream for stream in streams):
                _flush_quietly(value)
    except BaseException:
        status = status or 1
    os._exit(status)


def _flush_quietly(file):
    try:
        file.flush()
    except Exception:  # a closed file, or one whose end fails: an interpreter goes on, too
        pass


def report(error):
    try:
        text = "%s: %s" % (type(error).__name__, error)
        os.write(2, text.encode("utf-8", "replace")[-ERROR_BYTES:])
    except BaseException:
        os.write(2, b"an exception that cannot be shown")
