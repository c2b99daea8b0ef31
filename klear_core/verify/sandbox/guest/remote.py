"""Runs inside a jailed child as module `klear_remote`: what stands for the program's objects on the tests' side."""

import builtins
import operator
import os
import sys
import types
import warnings

from klear_turns import Turns, finished, follow
from klear_values import CannotSendError, ListNode, TreeNode, Wire

INPUTS = ("input", builtins), ("stdin", sys), ("print", builtins), ("open", builtins)
"""What the program uses of the tests if they replace it."""
_OPERATORS = "getitem setitem delitem contains eq ne lt le gt ge add sub mul truediv floordiv mod pow neg index".split()
REMOTE_METHODS = {"__%s__" % f.__name__: f for f in (iter, next, len, bool, hash, str, repr, abs, int, float)}
"""What the program may do with objects of the tests, beside calling them and their public methods."""
REMOTE_METHODS.update({"__%s__" % name: getattr(operator, name) for name in _OPERATORS})
NAMES_OF_FUNCTIONS = frozenset(["__name__", "__qualname__", "__doc__", "__module__", "__annotations__"])
"""What the program may read of functions of the tests, as `functools.wraps` does."""
_QUICK_STEPS, _STEP_S = 50, 0.002
REMOTE_METHODS.update(__radd__=lambda a, b: b + a, __rsub__=lambda a, b: b - a, __rmul__=lambda a, b: b * a)


class Tester:
    """Runs the tests; every use of the program's names goes to the other jail and back."""

    def __init__(self):
        Tester.current = self
        self.wire = Wire(self, 0)
        self.turns = Turns(self.wire, self._call_back, self._read, take=self._repeat)
        self.depth = 0
        self.proxies = {}
        self.tasks = {}  # of the tests' event loop, for which the program waits
        self.own = [(name, holder, getattr(holder, name)) for name, holder in INPUTS]
        self.watched = {}  # what the tests replace in modules of the standard library, and its own value
        self.observe = ()  # "warnings" and "logging", if the tests look at them
        self.environ = None  # as the program has it, if the tests change it
        self.patched = {}  # names that the tests patch in the program's module, with the module of ours of that name
        self.open_classes = set()  # of the tests: descriptors of the program keep what they need in their instances
        self.named = set()  # handles of what the tests name themselves: functions, classes and objects

    def check_handle(self, value):
        """Raise CannotSendError for a value of the tests that the program cannot use from afar, or must not have."""
        is_future = hasattr(type(value), "__await__") and not isinstance(value, types.CoroutineType)
        # A frame, such as `gi_frame` of a generator that the tests pass, leads to their builtins, `exec` among them.
        if isinstance(value, (types.ModuleType, types.FrameType, types.CodeType)) or is_future:
            raise CannotSendError("the tests pass a %s, which cannot be sent to the program" % type(value).__name__)

    def describe(self, value):
        return []

    def node(self, name):
        return {"ListNode": ListNode, "TreeNode": TreeNode}[name]

    def object_from(self, tag, rest):
        if tag == "p":
            return self.wire.kept[rest[0][0]]
        if tag == "a":
            return self._coroutine(Proxy(self, rest[0]))
        number = rest[0]
        if number not in self.proxies and tag == "E":
            self.proxies[number] = member(*rest)
        if number not in self.proxies:
            kind = {"g": RemoteIterator, "G": RemoteAsyncIterator}.get(tag, Proxy)
            self.proxies[number] = kind(self, *rest)
        return self.proxies[number]

    async def _coroutine(self, awaitable):
        return await self.awaited("start", awaitable)

    async def awaited(self, do, value):
        """Have the program start to await something, and let both sides' event loops run in turns until it is done."""
        number, is_done = self.apply(do, value)
        num_steps = 0
        while not is_done:
            num_steps += 1
            try:
                await sys.modules["asyncio"].tasks.sleep(0 if num_steps < _QUICK_STEPS else _STEP_S)
            except sys.modules["asyncio"].CancelledError:
                self.apply("cancel", number)
            is_done = self.apply("step", number)
        return self.apply("result", number)

    def apply(self, do, *args, **kwargs):
        """Have the program apply a function to its objects, and return the result or raise what it raised."""
        with self.turns.lock:
            failed, value = self._apply(do, args, kwargs)
        if failed:
            raise value
        return value

    def _apply(self, do, args, kwargs):
        def content():
            message = self._replaced()
            message["args"] = [self.wire.encode(a) for a in args]
            message["kwargs"] = {k: self.wire.encode(v) for k, v in kwargs.items()}
            for name, holder, own in self.own:
                now = getattr(holder, name)
                if now is not own:
                    message[name] = self.wire.handle(now)
            return message

        first = self.wire.next_number
        message = self.wire.message(content, do=do)
        if not self.depth:  # of an outer request the program may still change what it got
            message["forget"] = self.wire.unused(range(first, self.wire.next_number, 2))
            self.wire.forget(message["forget"])
        self.depth += 1
        try:
            return self.turns.ask(message)
        finally:
            self.depth -= 1

    def _read(self, reply):
        """Return whether the program raised, and its result or exception."""
        failed = "error" in reply
        value = self.wire.decode(reply["error" if failed else "value"])
        if failed:
            value._klear_is_remote = True
        return failed, value

    def _replaced(self):
        """Return the part of a request on what the tests have replaced, such as `time.time`, for the program to see."""
        message, replaced = {}, []
        for (module, name), own in self.watched.items():
            now = getattr(sys.modules[module], name)
            if now is not own:
                replaced.append([module, name, self.wire.encode(now)])
        if replaced:
            message["replaced"] = replaced
        if self.observe:
            message["observe"] = self.observe
        if self.environ is not None and self.environ != dict(os.environ):
            message["environ"] = self.environ = dict(os.environ)
        return message

    def _repeat(self, message):
        """Print, warn and log here as the program did."""
        for stream in ("stdout", "stderr"):
            if message.get(stream):
                getattr(sys, stream).write(message[stream])
        for category, text in message.get("warned", ()):
            kind = self.wire.decode(category)
            warnings.warn(text, kind if isinstance(kind, type) and issubclass(kind, Warning) else UserWarning, 1)
        for name, level, text in message.get("logged", ()):
            sys.modules["logging"].getLogger(name).log(level, "%s", text)

    def _call_back(self, request):
        """Call a function of the tests for the program, to which they passed it."""
        self.depth += 1
        try:
            target = self.wire.kept[request["of"]]
            args = [self.wire.decode(a) for a in request["args"]]
            kwargs = {k: self.wire.decode(v) for k, v in request["kwargs"].items()}
            result = self._use(target, request["do"], args, kwargs)
            return self.wire.message(lambda: {"value": self.wire.encode(result)})
        except CannotSendError:
            raise
        except BaseException as e:
            error = e
        finally:
            self.depth -= 1
        return self.wire.message(lambda: {"error": self.wire.encode(error)})

    def dict_of_missing(self):
        return RemoteDict(self)

    def _use(self, target, name, args, kwargs):
        if name == "__call__":
            return target(*args, **kwargs)
        attribute = args[0] if name in ("__getattribute__", "__setattr__") else name
        if _controls_mock(target, attribute):
            raise AttributeError(attribute)
        if name in ("__start__", "__done__", "__cancel__", "__result__"):
            return follow(self.tasks, target, name)
        if name in ("__await__", "__anext__"):
            return self.turns.without_lock(finished, target if name == "__await__" else target.__anext__())
        if name in ("__getattribute__", "__setattr__"):
            owner = target if isinstance(target, type) else type(target)
            if not self.open_classes.isdisjoint(owner.__mro__):
                return sys.modules["klear_looks"].use_open(target, owner, *args)
            if args[0].startswith("_") and (name == "__setattr__" or args[0] not in NAMES_OF_FUNCTIONS):
                raise AttributeError(args[0])
            return (getattr if name == "__getattribute__" else setattr)(target, *args)
        if name in REMOTE_METHODS:
            return REMOTE_METHODS[name](target, *args)
        if name.startswith("_") and name not in ("__enter__", "__exit__"):
            raise AttributeError(name)
        return getattr(target, name)(*args, **kwargs)

    def look_up(self, name):
        """Return what the program binds to a name now, and note that the tests name it."""
        value = self.apply("look_up", name)
        if type(value) is Proxy:
            self.named.add(value._klear_path[0])
        return value

    def attribute(self, name):
        """Return what the program's module has under a name, also what it imports if the tests patch that."""
        if name not in self.patched:
            return self.look_up(name)
        return self.patched[name] or self.apply("peek", name)


def _controls_mock(target, name):
    """Return whether this attribute says what a mock of the tests does and noted: `configure_mock` may make it equal
    everything, and `assert_called_with` is the tests' own check.
    """
    mock = sys.modules.get("unittest.mock")
    return mock is not None and isinstance(target, mock.NonCallableMock) and name in dir(mock.Mock())


class Names(dict):
    """The global names of the tests. Those of the program are asked for at each use, unless they are objects of it.

    `evaluates`: the tests name more in texts that they evaluate.
    """

    def __init__(self, look_up, under_test, evaluates):
        self.look_up = look_up
        self.under_test = under_test
        self.evaluates = evaluates

    def __missing__(self, name):
        is_texts = self.evaluates and not hasattr(builtins, name)
        if not (is_texts or name in self.under_test):
            raise KeyError(name)
        value = self.look_up(name)
        if type(value) is Proxy or isinstance(value, type):
            self[name] = value
        return value


class Flags(int):
    """Flags of the program that the tests have combined: a number, whatever the program claims."""

    value = property(int)

    def __contains__(self, other):
        return int(self) & int(other) == int(other)


def _combined(method):
    return lambda self, other: Flags(method(self, other))


for _name in ("__or__", "__and__", "__xor__"):
    setattr(Flags, _name, _combined(getattr(int, _name)))


class IntMember(Flags):
    """A member of an enumeration of the program that is a number, too, such as IntEnum."""

    _klear_path = None


class TextMember(str):
    """A member of an enumeration of the program that is a text, too, such as StrEnum."""

    _klear_path = None
    value = property(str)


def member(number, plain, name):
    made = (TextMember if isinstance(plain, str) else IntMember)(plain)
    made._klear_path, made.name = [number], name
    return made


class RemoteIterator:
    """An iterator of the program, which runs as far as it is asked."""

    _klear_path = None

    def __init__(self, tester, number):
        self._klear_tester = tester
        self._klear_path = [number]

    def __iter__(self):
        return self

    def __next__(self):
        return self._klear_tester.apply("next", self)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._klear_tester.apply("getattr", self, name)


class RemoteAsyncIterator:
    """An asynchronous iterator of the program."""

    _klear_path = None

    def __init__(self, tester, number):
        self._klear_tester = tester
        self._klear_path = [number]

    def __aiter__(self):
        return self

    async def __anext__(self):
        return await self._klear_tester.awaited("start_next", self)


class RemoteDict(dict):
    """A dict of the program whose class makes values for missing keys."""

    def __init__(self, tester):
        super().__init__()
        self._klear_tester = tester

    def __missing__(self, key):
        return self._klear_tester.apply("getitem", self, key)


class Proxy:
    """Stands for an object of the program.

    Whether an assertion holds is never left to an object that the tests do not know: a result could claim to equal
    everything. Comparisons and arithmetic are the program's only for what the tests name themselves, and for instances
    of classes that they name; and none of these ever equals a plain value.
    """

    __slots__ = ("_klear_kind", "_klear_path", "_klear_tester")

    def __init__(self, tester, number, kind=None):
        for name, value in zip(self.__slots__, (kind, [number], tester)):  # noqa: B905
            object.__setattr__(self, name, value)

    def _klear_is_known(self):
        named = self._klear_tester.named
        return self._klear_path[0] in named or self._klear_kind in named

    def _klear_apply(self, do, *args):
        return self._klear_tester.apply(do, self, *args)

    def __call__(self, *args, **kwargs):
        return self._klear_tester.apply("call", self, *args, **kwargs)

    def __getattr__(self, name):
        if name.startswith("__") and name not in _SHOWN_NAMES:
            raise AttributeError(name)
        value = self._klear_apply("getattr", name)
        if type(value) is Proxy and self._klear_path[0] in self._klear_tester.named and value._klear_kind is None:
            self._klear_tester.named.add(value._klear_path[0])  # such as a class inside of a class
        return value

    def __setattr__(self, name, value):
        self._klear_apply("setattr", name, value)

    def __delattr__(self, name):
        self._klear_apply("delattr", name)

    def __reduce_ex__(self, protocol):
        return _unpickled, (self._klear_apply("dumps", protocol),)

    def __mro_entries__(self, bases):
        raise CannotSendError("the tests derive a class from one of the program's")

    def __instancecheck__(self, value):
        try:
            return bool(self._klear_tester.apply("isinstance", value, self))
        except CannotSendError:
            return False

    def __subclasscheck__(self, value):
        is_builtin = isinstance(value, type) and vars(builtins).get(value.__name__) is value
        return (type(value) is Proxy or is_builtin) and bool(self._klear_tester.apply("issubclass", value, self))

    def __eq__(self, other):
        if isinstance(other, (list, tuple, dict, set, frozenset)):
            return self._klear_apply("plain") == other  # what it holds, if its class is derived from such a container
        if self is other or type(other) is not Proxy:
            return self is other
        return self._klear_is_known() and other._klear_is_known() and self._klear_apply("eq", other) is True

    def __hash__(self):
        return self._klear_apply("hash") if self._klear_is_known() else object.__hash__(self)

    def __bool__(self):
        # Without this, every assertion on such an object would pass.
        if not self._klear_is_known():
            raise TypeError("an object of the program is neither true nor false")
        return self._klear_apply("bool") is True

    def __len__(self):
        return self._klear_apply("len")

    def __iter__(self):
        return self._klear_apply("iter")

    def __next__(self):
        return self._klear_apply("next")

    def __contains__(self, value):
        if self._klear_is_known():
            return self._klear_apply("contains", value) is True
        return any(value is item or value == item for item in self)

    def __enter__(self):
        return self._klear_tester.apply("call", self._klear_apply("getattr", "__enter__"))

    def __exit__(self, kind, error, trace):
        leave = self._klear_apply("getattr", "__exit__")
        return self._klear_tester.apply("call", leave, kind, error, None)

    async def __aenter__(self):
        return await self._klear_tester.apply("call", self._klear_apply("getattr", "__aenter__"))

    async def __aexit__(self, kind, error, trace):
        leave = self._klear_apply("getattr", "__aexit__")
        return await self._klear_tester.apply("call", leave, kind, error, None)

    def __aiter__(self):
        return self._klear_tester.apply("call", self._klear_apply("getattr", "__aiter__"))


def _unpickled(data):
    """Have the program make an object again of what it has pickled itself."""
    return Tester.current.apply("loads", data)


_SHOWN_NAMES = frozenset(
    "__%s__" % name
    for name in (
        "name qualname len next dict annotations wrapped code defaults kwdefaults mro bases members abstractmethods"
    ).split()
)
Proxy.__doc__ = property(lambda self: self._klear_apply("getattr", "__doc__"))


def _unary(do, is_free):
    def method(self, *args):
        if not is_free and not self._klear_is_known():
            raise TypeError("the tests do not know this object of the program")
        return self._klear_apply(do, *args)

    return method


def _binary(do, is_reversed):
    """Return an operator method. With a plain value it gives another object only: a number could be any claim."""

    def method(self, other):
        if not self._klear_is_known():
            return NotImplemented
        both = (other, self) if is_reversed else (self, other)
        result = self._klear_tester.apply(do, *both)
        is_shown = type(result) is Proxy or (type(other) is Proxy and other._klear_is_known())
        return result if is_shown else NotImplemented

    return method


def _ordering(do):
    def method(self, other):
        if type(other) is not Proxy or not (self._klear_is_known() and other._klear_is_known()):
            return NotImplemented
        return self._klear_apply(do, other) is True

    return method


for _name in (
    "getitem setitem delitem str repr format bytes int float complex index round trunc floor ceil reversed "
    "copy deepcopy"
).split():
    setattr(Proxy, "__%s__" % _name, _unary(_name, is_free=True))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Proxy, "__%s__" % _name, _unary(_name, is_free=False))
for _name in "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split():
    setattr(Proxy, "__%s__" % _name.strip("_"), _binary(_name, is_reversed=False))
    setattr(Proxy, "__r%s__" % _name.strip("_"), _binary(_name, is_reversed=True))
    setattr(Proxy, "__i%s__" % _name.strip("_"), _binary("i" + _name.strip("_"), is_reversed=False))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Proxy, "__%s__" % _name, _ordering(_name))


def _signature(self):
    import inspect

    if self._klear_kind is not None:
        raise AttributeError("__signature__")  # as an object has, other than functions and classes
    parameters, returned = self._klear_apply("signature")
    empty = inspect.Parameter.empty
    made = [
        inspect.Parameter(name, kind, default=(*default, empty)[0], annotation=(*annotation, empty)[0])
        for name, kind, default, annotation in parameters
    ]
    return inspect.Signature(made, return_annotation=(*returned, empty)[0])


Proxy.__signature__ = property(_signature)
