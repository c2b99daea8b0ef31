"""Runs inside a jailed child as module `klear_values`: encodes the messages between the program and the tests.

Requests and replies are JSON with tags, so that neither side ever unpickles the other's objects. Objects without a JSON
form stay where they are and travel as handles.
"""

import base64
import builtins
import collections
import datetime
import decimal
import fractions
import json
import operator
import os
import re
import struct
import sys

REQUESTS, REPLIES = 3, 4


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


_BUILTIN_TYPES = {n: t for n, t in vars(builtins).items() if isinstance(t, type)}
_BUILTIN_TYPES["NoneType"] = type(None)
_NODES = {"ListNode": ("val", "next"), "TreeNode": ("val", "left", "right")}
_SCALARS = frozenset([bool, int, str, type(None)])
_OF_CONTAINERS = frozenset(
    "__%s__" % name
    for name in (
        "getitem setitem delitem contains iter len call enter getattr setattr delattr str repr bool eq lt add sub mul "
        "truediv or and"
    ).split()
)
"""Special methods that make of a container something else."""
_MAX_SHARED = 4_000
"""Items of shared objects that are compared at each message."""
_DICTS = {
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
}


_STANDARD = frozenset(
    "_queue asyncio.exceptions concurrent.futures._base configparser copy csv dataclasses decimal fractions "
    "json.decoder queue re re._constants sre_constants statistics struct subprocess zipfile zlib".split()
)
"""Modules whose exceptions tests may name."""


class CannotSendError(Exception):
    """Raised if the tests pass a value that cannot be encoded."""


def _read(fd, count):
    parts = []
    while count:
        part = os.read(fd, count)
        if not part:
            os._exit(0)  # the supervisor has closed the session
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


def text_of(error):
    try:
        return str(error)[:300]
    except BaseException:
        return ""


def _parts_of(value):
    """Return the name and arguments that make an equal object of the standard library; None for all other values."""
    kind = type(value)
    if kind is decimal.Decimal:
        return "Decimal", [str(value)]
    if kind is fractions.Fraction:
        return "Fraction", [value.numerator, value.denominator]
    if kind is datetime.timedelta:
        return "timedelta", [value.days, value.seconds, value.microseconds]
    if kind is datetime.timezone:
        return "timezone", [value.utcoffset(None)]
    if kind is datetime.datetime:
        date = [value.year, value.month, value.day]
        return "datetime", [*date, value.hour, value.minute, value.second, value.microsecond, value.tzinfo]
    if kind is datetime.date:
        return "date", [value.year, value.month, value.day]
    if kind is datetime.time:
        return "time", [value.hour, value.minute, value.second, value.microsecond, value.tzinfo]
    if kind is range:
        return "range", [value.start, value.stop, value.step]
    if kind.__module__ == "uuid" and kind.__name__ == "UUID":
        return "UUID", [value.hex]
    if kind.__module__ in ("pathlib", "pathlib._local") and kind.__name__ in ("PosixPath", "PurePosixPath"):
        return "PurePosixPath" if kind.__name__.startswith("Pure") else "PosixPath", [str(value)]
    if kind is re.Pattern:
        return "Pattern", [value.pattern, value.flags]
    if kind.__name__ == "ZoneInfo" and kind.__module__ in ("zoneinfo", "_zoneinfo"):
        return "ZoneInfo", [value.key]
    if kind is slice:
        return "slice", [value.start, value.stop, value.step]
    return None


_MAKERS = {
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
    "timedelta": datetime.timedelta,
    "timezone": datetime.timezone,
    "datetime": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "range": range,
    "slice": slice,
    # Imported only where needed, because the imports cost time.
    "ZoneInfo": lambda key: __import__("zoneinfo").ZoneInfo(key),
    "UUID": lambda text: __import__("uuid").UUID(text),
    "PosixPath": lambda text: __import__("pathlib").PosixPath(text),
    "PurePosixPath": lambda text: __import__("pathlib").PurePosixPath(text),
    "Pattern": re.compile,
}


def _remote_text(error):
    return getattr(error, "_klear_text", "") or ", ".join(str(a) for a in error.args)


class Wire:
    """Encodes and decodes values; objects it cannot write become handles of this side.

    A value is a JSON scalar or a list that begins with a tag. l: list, t: tuple, s: set, f: frozenset, d: dict, i: an
    iterable as a list, b: bytes, B: bytearray, c: complex, x: a float without a JSON form, y: a builtin type, o: an
    object of the standard library, q: deque, m: namedtuple, n: a node of a linked list or tree, r: an object that the
    sides share already, h: a handle of an object that stays here, g: one of an iterator, G: one of an asynchronous
    iterator, a: one of a coroutine, E: one of a member of an enumeration of numbers or texts, k: one of an exception
    class, e: an exception, p: an object of the other side.

    Lists, dicts, sets and nodes that are sent have a number on both sides (+); each message first says which of them
    have changed since. The tests' side forgets those to which nothing else refers any more.
    """

    def __init__(self, side, number, is_plain=False):
        self.side = side
        self.is_plain = is_plain  # of a call test: values only, as trees
        self.kept = []
        self.numbers = {}
        self.named_tuples = {}
        self.classes = {}
        self.shared = {}
        self.shared_numbers = {}
        self.held = {}  # what each shared object held when both sides last agreed on it
        self.next_number = number  # of the next shared object; one side has even and the other odd numbers

    def forget(self, numbers):
        for number in numbers:
            self.shared_numbers.pop(id(self.shared.pop(number, None)), None)
            self.held.pop(number, None)

    def unused(self, new):
        """Return the numbers of shared objects, but `new` ones, that only this table knows, or that are too large."""
        found = [n for n, count in _counts(self.shared).items() if n not in new and count <= _UNUSED]
        sizes = sorted((len(held), n) for n, held in self.held.items() if n not in new)
        total = sum(size for size, _ in sizes)
        while total > _MAX_SHARED:
            size, number = sizes.pop()
            total -= size
            found.append(number)
        return found

    def message(self, content, **more):
        """Return a message that says what has changed, and what `content()` gives."""
        first, held = self.next_number, dict(self.held)
        try:
            return dict(more, changes=self.changes(), **content())
        except BaseException:
            self.forget(range(first, self.next_number, 2))
            self.held = held
            raise

    def changes(self):
        """Encode the new contents of shared objects that have changed, by number."""
        found = []
        for number, value in list(self.shared.items()):
            now, before = _held(value), self.held.get(number, ())
            if len(now) != len(before) or any(map(operator.is_not, now, before)):
                self.held[number] = now
                found.append([number, self.contents(value)])
        return found

    def take_changes(self, message):
        """Give shared objects what the other side says that they hold now."""
        for number, contents in message["changes"]:
            self.fill(self.shared[number], contents)
            self.held[number] = _held(self.shared[number])

    def _share(self, value):
        """Encode a list, dict, set or node that the other side does not have."""
        if self.is_plain:
            return self.contents(value)
        number = self.next_number
        self.next_number += 2
        self.shared[number] = value
        self.shared_numbers[id(value)] = number
        contents = self.contents(value)
        self.held[number] = _held(value)
        return ["+", number, contents]

    def _shared(self, number, contents):
        """Return the object that the other side has just shared."""
        made = self._empty(contents[0], contents[1:])
        self.shared[number] = made
        self.shared_numbers[id(made)] = number
        self.fill(made, contents)
        self.held[number] = _held(made)
        return made

    def handle(self, value):
        """Keep an object on this side and return its number, the same each time."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.kept)
            self.kept.append(value)
        return self.numbers[id(value)]

    def encode(self, value):
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is float:  # inf and nan, for which x - x is not 0, have no JSON form
            return value if value - value == 0 else ["x", repr(value)]
        if not self.is_plain and id(value) in self.shared_numbers:
            return ["r", self.shared_numbers[id(value)]]
        if isinstance(value, (list, tuple, set, frozenset, dict)) and (self.is_plain or not self._is_more(value, kind)):
            return self._encode_container(value, kind)
        return self._encode_object(value, kind)

    def _is_more(self, value, kind):
        """Return whether an object whose class is derived from a container's is more than a container."""
        has_attributes = kind.__module__ == "solution" and bool(getattr(value, "__dict__", None))
        return has_attributes or self.has_methods(kind)

    def has_methods(self, kind):
        """Return whether a class derived from a container is more than a container."""
        for base in kind.__mro__:
            for name, value in vars(base).items() if base.__module__ in ("solution", "tests") else ():
                is_method = callable(value) or isinstance(value, (property, classmethod, staticmethod))
                is_special = base.__module__ == "solution" and name in _OF_CONTAINERS
                if is_method and (is_special or not name.startswith("_")):
                    return True
        return False

    def _encode_container(self, value, kind):
        if isinstance(value, (tuple, frozenset)):
            if hasattr(kind, "_fields") and not self.is_plain:
                return ["m", kind.__name__, list(kind._fields), self.items(value)]
            return ["t" if isinstance(value, tuple) else "f", self.items(value)]
        return self._share(value)

    def contents(self, value):
        """Encode what a list, dict, set or node holds now."""
        if isinstance(value, list):
            return ["l", self.items(value)]
        if isinstance(value, set):
            return ["s", self.items(value)]
        if isinstance(value, dict):
            pairs = [[self.encode(k), self.encode(v)] for k, v in value.items()]
            name = type(value).__name__
            if self.is_plain or _DICTS.get(name) is not type(value):
                makes_values = type(value).__module__ == "solution" and hasattr(type(value), "__missing__")
                return ["d", pairs, "missing", None] if makes_values and not self.is_plain else ["d", pairs]
            return ["d", pairs, name, self.encode(getattr(value, "default_factory", None))]
        if isinstance(value, bytearray):
            return ["B", base64.b64encode(value).decode()]
        if isinstance(value, collections.deque):
            return ["q", self.items(value), value.maxlen]
        name = type(value).__name__
        return ["n", name, [self.encode(getattr(value, field)) for field in _NODES[name]]]

    def items(self, values):
        values = list(values)
        if all(type(v) in _SCALARS for v in values):
            return values
        return [self.encode(v) for v in values]

    def _encode_object(self, value, kind):
        if kind is bytes or (self.is_plain and isinstance(value, (bytes, bytearray))):
            return ["b", base64.b64encode(value).decode()]
        if kind is complex:
            return ["c", self.encode(value.real), self.encode(value.imag)]
        if hasattr(kind, "_klear_path"):
            return ["p", object.__getattribute__(value, "_klear_path")]
        if isinstance(value, (bool, int, str, float)):  # of a subclass: send the plain value
            base = next(k for k in (int, float, str) if isinstance(value, k))
            plain = self.encode(base.__float__(value) if base is float else base.__add__(value, base()))
            name = getattr(value, "_name_", 0)  # None for a combination of flags, in older versions of Python
            is_member = not self.is_plain and base is not float and type(name) in (str, type(None))
            return ["E", self.handle(value), plain, name] if is_member else plain
        if kind.__name__ in _NODES:  # by name, because programs define these classes themselves
            return self._share(value)
        # numpy's arrays and numbers
        if hasattr(kind, "__array__") and hasattr(kind, "tolist"):
            plain = value.tolist()
            return ["i", self.items(plain)] if self.is_plain and isinstance(plain, list) else self.encode(plain)
        is_view = kind.__name__ in ("dict_keys", "dict_values", "dict_items")
        if is_view or (self.is_plain and (kind.__name__ in ("range", "deque") or hasattr(kind, "__next__"))):
            return ["i", [self.encode(v) for v in value]]
        if not self.is_plain:
            encoded = self._encode_rich(value, kind)
            if encoded is not None:
                return encoded
        self.side.check_handle(value)
        return ["h", self.handle(value), *self.side.describe(value)]

    def _encode_rich(self, value, kind):
        if kind is bytearray or kind is collections.deque:
            return self._share(value)
        parts = _parts_of(value)
        if parts is not None:
            return ["o", parts[0], [self.encode(part) for part in parts[1]]]
        if isinstance(value, BaseException):
            return self._encode_exception(value, kind)
        if isinstance(value, type) and _BUILTIN_TYPES.get(value.__name__) is value:
            return ["y", value.__name__]
        if isinstance(value, type) and issubclass(value, BaseException):
            if "_klear_number" in vars(value):
                return ["p", [value._klear_number]]
            bases = [self.encode(base) for base in value.__bases__]
            return ["k", self.handle(value), value.__name__, bases, value.__module__]
        is_more = kind.__module__ in ("solution", "tests") or hasattr(kind, "__enter__")  # such as a file
        for tag, method in (("a", "__await__"), ("G", "__anext__"), ("g", "__next__")):
            if hasattr(kind, method) and not is_more:
                self.side.check_handle(value)
                return [tag, self.handle(value)]
        return None

    def _encode_exception(self, value, kind):
        attributes = {}
        for name, attribute in getattr(value, "__dict__", {}).items():
            if not name.startswith("_") or name == "__notes__":
                attributes[name] = attribute
        encoded = [self.encode(kind), self.encode(value.args), self.encode(attributes)]
        cause = value.__cause__
        return ["e", *encoded, text_of(value), None if cause is None else self.encode(cause)]

    def exception_class(self, number, name, bases, module):
        """Return a class of this side for one of the other's, which tests can name in `except`.

        One of the standard library is itself on both sides, if this side has imported its module.
        """
        known = getattr(sys.modules.get(module), name, None) if module in _STANDARD else None
        if isinstance(known, type) and issubclass(known, BaseException):
            return known
        if number not in self.classes:
            decoded = tuple(self.decode(base) for base in bases)
            kinds = tuple(k for k in decoded if isinstance(k, type)) or (Exception,)
            if not any(issubclass(k, BaseException) for k in kinds):
                kinds = (Exception,)
            members = {"_klear_number": number, "__str__": _remote_text, "__module__": "solution"}
            try:
                self.classes[number] = type(name, kinds, members)
            except TypeError:
                self.classes[number] = type(name, (Exception,), members)
        return self.classes[number]

    def exception(self, kind, arguments, attributes, text, cause):
        kind = self.decode(kind)
        arguments, attributes = self.decode(arguments), self.decode(attributes)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            kind = Exception
        try:
            made = kind.__new__(kind, *arguments)
        except Exception:
            made = kind.__new__(kind)
        made.args = arguments
        if "_klear_number" not in vars(kind):
            try:
                kind.__init__(made, *arguments)
            except Exception:
                pass
        for name, value in attributes.items():
            setattr(made, name, value)
        made._klear_text = text
        cause = self.decode(cause)
        made.__cause__ = cause if isinstance(cause, BaseException) else None
        return made

    def decode(self, value):
        if not isinstance(value, list):
            return value
        tag, *rest = value
        if tag == "+":
            return self._shared(*rest)
        if tag in ("t", "f", "i"):
            return {"t": tuple, "f": frozenset, "i": list}[tag](self.decode(v) for v in rest[0])
        if tag == "r":
            return self.shared[rest[0]]
        if tag == "b":
            return base64.b64decode(rest[0])
        if tag == "c":
            return complex(*(self.decode(v) for v in rest))
        if tag == "x":
            return float(rest[0])
        if tag == "y":
            return _BUILTIN_TYPES[rest[0]]
        if tag == "o":
            return _MAKERS[rest[0]](*(self.decode(part) for part in rest[1]))
        if tag == "m":
            key = (rest[0], tuple(rest[1]))
            if key not in self.named_tuples:
                self.named_tuples[key] = collections.namedtuple(*key)
            return self.named_tuples[key](*(self.decode(v) for v in rest[2]))
        if tag == "k":
            return self.exception_class(*rest)
        if tag == "e":
            return self.exception(*rest)
        return self.side.object_from(tag, rest)

    def _empty(self, tag, rest):
        if tag == "d" and len(rest) > 1:
            made = self.side.dict_of_missing() if rest[1] == "missing" else _DICTS[rest[1]]()
            if rest[2] is not None:
                made.default_factory = self.decode(rest[2])
            return made
        if tag == "q":
            return collections.deque(maxlen=rest[1])
        if tag == "n":
            kind = self.side.node(rest[0])
            return kind.__new__(kind)
        return {"l": list, "s": set, "d": dict, "B": bytearray}[tag]()

    def fill(self, target, value):
        """Give an existing list, dict, set or node the contents that were sent."""
        tag, *rest = value
        if tag == "l":
            target[:] = [self.decode(v) for v in rest[0]]
        elif tag == "d":
            pairs = [(self.decode(k), self.decode(v)) for k, v in rest[0]]
            target.clear()
            for key, item in pairs:
                target[key] = item
        elif tag == "B":
            target[:] = base64.b64decode(rest[0])
        elif tag == "n":
            for field, item in zip(_NODES[rest[0]], rest[1]):  # noqa: B905  Python 3.9
                setattr(target, field, self.decode(item))
        else:
            items = [self.decode(v) for v in rest[0]]
            target.clear()
            (target.update if tag == "s" else target.extend)(items)


def _counts(table):
    return {number: sys.getrefcount(value) for number, value in list(table.items())}


_UNUSED = _counts({0: []})[0]


def _held(value):
    if isinstance(value, dict):
        return [part for pair in list(value.items()) for part in pair]
    if type(value).__name__ in _NODES:
        return [getattr(value, field, None) for field in _NODES[type(value).__name__]]
    return list(value)
