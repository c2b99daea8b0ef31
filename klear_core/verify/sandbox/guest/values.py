"""Runs inside a jailed child as module `klear_values`: encodes the messages between the program and the tests.

Requests and replies are JSON with tags, so that neither side ever unpickles the other's objects. Objects without a JSON
form stay where they are and travel as handles.
"""

import base64
import json
import os
import struct

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


_TYPES = {t.__name__: t for t in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, type(None))}
_NODES = {"ListNode": ("val", "next"), "TreeNode": ("val", "left", "right")}


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


class Wire:
    """Encodes and decodes values; objects it cannot write become handles of this side.

    A value is a JSON scalar or a list that begins with a tag. l: list, t: tuple, s: set, f: frozenset, d: dict, i:
    iterator (decoded as a list), b: bytes, c: complex, x: a float without a JSON form, y: a type, n: a node of a linked
    list or tree, h: a handle of an object that stays here, p: a path to an object of the other side.
    """

    def __init__(self, handle_from, keeps_objects):
        self.kept = []
        self.handle_from = handle_from
        self.keeps_objects = keeps_objects

    def encode(self, value):
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:  # inf and nan, for which x - x is not 0, have no JSON form
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
        if isinstance(value, (bool, int, str, float)):  # of a subclass, such as IntEnum: send the plain value
            plain = next(k for k in (int, float, str) if isinstance(value, k))
            return self.encode(plain(value))
        if kind.__name__ in _NODES:  # by name, because programs define these classes themselves
            return ["n", kind.__name__, [self.encode(getattr(value, name)) for name in _NODES[kind.__name__]]]
        if isinstance(value, Proxy):
            return ["p", object.__getattribute__(value, "_klear_path")]
        # numpy's arrays and numbers
        if hasattr(kind, "__array__") and hasattr(kind, "tolist"):
            return self.encode(value.tolist())
        if (
            kind is range
            or hasattr(kind, "__next__")
            or kind.__name__ in ("deque", "dict_keys", "dict_values", "dict_items")
        ):
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


class Proxy:
    """Stands for an object of the program. Operators are those of this class; the program's are never called."""

    def __init__(self, tester, path):
        object.__setattr__(self, "_klear_tester", tester)
        object.__setattr__(self, "_klear_path", path)

    def __call__(self, *args, **kwargs):
        return self._klear_tester.request(self._klear_path, args, kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        path = self._klear_path
        if isinstance(path[0], int):  # the path starts at an object: ask for the attribute's current value
            return self._klear_tester.request([*path, name], (), {}, get=True)
        return Proxy(self._klear_tester, [*path, name])

    def __setattr__(self, name, value):
        self._klear_tester.request(self._klear_path, (value,), {}, set=name)

    def __iter__(self):
        return iter(self._klear_tester.request(self._klear_path, (), {}, list=True))

    def __bool__(self):
        # Without this, every assertion on such an object would pass.
        raise TypeError("an object of the program is neither true nor false")

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__
