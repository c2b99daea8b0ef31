"""Runs inside a jailed child as module `klear_service`: answers calls of the program, or runs the tests, by role."""

import copy
import io
import math
import operator
import os
import sys

from klear_looks import FORWARDED
from klear_remote import INPUTS, NAMES_OF_FUNCTIONS, REMOTE_METHODS
from klear_tester import serve_tester
from klear_turns import Turns
from klear_values import ListNode, TreeNode, Wire, receive, send, text_of

_MAX_SHOWN_BYTES = 1 << 20  # of what one call prints


class Printed(io.BytesIO):
    """Keeps what the program prints to a stream, up to a limit, until it is sent to the tests."""

    def write(self, data):
        room = _MAX_SHOWN_BYTES - self.tell()
        if room > 0:
            super().write(bytes(data)[:room])
        return len(data)

    def taken(self):
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text.decode("utf-8", "replace")


class Observed:
    """Keeps the warnings and log records of the program until they are sent to the tests, which may expect them."""

    def __init__(self):
        self.kinds = set()
        self.warned, self.logged = [], []

    def start(self, kinds):
        for kind in set(kinds) - self.kinds:
            self.kinds.add(kind)
            if kind == "warnings":
                import warnings

                warnings.simplefilter("always")
                warnings.showwarning = self._warn
            else:
                import logging

                handler = logging.Handler()
                handler.emit = self._log
                logging.root.addHandler(handler)
                logging.root.setLevel(logging.DEBUG)

    def _warn(self, text, category, *_, **__):
        self.warned.append((category, str(text)))

    def _log(self, record):
        self.logged.append([record.name, record.levelno, record.getMessage()])

    def taken(self, wire):
        found = {}
        if self.warned:
            found["warned"] = [[wire.encode(category), text] for category, text in self.warned]
        if self.logged:
            found["logged"] = self.logged
        self.warned, self.logged = [], []
        return found


class Remote:
    """Stands for an object of the tests, such as a function or an instance of their class that they pass."""

    __slots__ = ("__weakref__", "_klear_path", "_klear_side")

    def __init__(self, side, number):
        object.__setattr__(self, "_klear_side", side)
        object.__setattr__(self, "_klear_path", [number])

    def _klear_ask(self, do, *args, **kwargs):
        return self._klear_side.ask_tests(self._klear_path[0], do, args, kwargs)

    def __call__(self, *args, **kwargs):
        return self._klear_ask("__call__", *args, **kwargs)

    def __getattr__(self, name):
        if name.startswith("__") and name not in NAMES_OF_FUNCTIONS and name != "__dict__":
            raise AttributeError(name)
        return self._klear_ask("__getattribute__", name)

    def __setattr__(self, name, value):
        self._klear_ask("__setattr__", name, value)


def _remote_method(name):
    return lambda self, *args: self._klear_ask(name, *args)


Remote.__doc__ = property(lambda self: self._klear_ask("__getattribute__", "__doc__"))
for _name in (*REMOTE_METHODS, "__enter__", "__exit__"):
    setattr(Remote, _name, _remote_method(_name))


class IteratorOfTests:
    """An iterator or generator of the tests, which runs as far as it is asked."""

    def __init__(self, side, number):
        self._klear_side, self._klear_path = side, [number]

    _klear_path = None

    def __iter__(self):
        return self

    def __next__(self):
        return self._klear_side.ask_tests(self._klear_path[0], "__next__", (), {})

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self._klear_side.ask_tests(self._klear_path[0], name, args, {})


class RemoteInput(io.TextIOBase):
    """The standard input that the tests have put in place of theirs."""

    def __init__(self, side, number):
        self.readline = lambda *args: side.ask_tests(number, "readline", args, {})
        self.read = lambda *args: side.ask_tests(number, "read", args, {})

    def __next__(self):
        line = self.readline()
        if not line:
            raise StopIteration
        return line


class ProgramSide:
    """Answers calls of the untrusted program's functions."""

    def __init__(self, names, defined, is_plain):
        self.names = names
        self.defined = defined
        self.wire = Wire(self, 1, is_plain)
        self.remotes = {}
        self.loop = None
        self.tasks = []
        # What the tests may apply to objects of the program.
        self.functions = {name: getattr(operator, name) for name in _OPERATORS}
        builtin = (len, iter, next, bool, hash, str, repr, int, float, complex, bytes, round, format, reversed)
        builtin += (isinstance, issubclass, math.trunc, math.floor, math.ceil, operator.index)
        self.functions.update({f.__name__: f for f in builtin})
        self.functions.update(
            {"getattr": getattr, "setattr": setattr, "delattr": delattr, "start": self.start, "step": self.step}
        )
        self.functions.update(
            start_next=lambda iterator: self.start(iterator.__anext__()),
            result=lambda number: self.tasks[number].result(),
            cancel=lambda number: self.tasks[number].cancel(),
        )
        self.functions.update(seed=lambda *args: __import__("random").seed(*args))
        self.functions.update(
            setrecursionlimit=sys.setrecursionlimit, copy=copy.copy, deepcopy=copy.deepcopy, type=type
        )
        for module, names in FORWARDED.items() if not is_plain else ():
            self.functions.update((name, getattr(__import__(module), name)) for name in names)
        self.functions.update(signature=_signature, plain=_plain, is_a=_is_a)
        for name in ("get", "set", "delete", "set_name"):
            hook = "__%s__" % name
            self.functions[name] = lambda found, *args, hook=hook: getattr(type(found), hook)(found, *args)
        self.functions["hooks"] = lambda found: [hook for hook in _HOOKS if hasattr(type(found), hook)]
        for name in ("dumps", "loads"):
            self.functions[name] = lambda *args, name=name: getattr(__import__("pickle"), name)(*args)
        self.own = [(name, holder, getattr(holder, name)) for name, holder in INPUTS]
        self.replaced = {}  # what the tests have replaced in modules, and its own value
        self.observed = Observed()
        self.printed = {}
        self.turns = Turns(self.wire, self.reply_to, self._read, self._add)

    def check_handle(self, value):
        """Any object of the program may be named by a handle."""

    def describe(self, value):
        kind = type(value)
        return [self.wire.handle(kind)] if kind.__module__ == "solution" and not isinstance(value, type) else []

    def node(self, name):
        # A program that defines ListNode itself may rely on the attributes and methods of its own class.
        return self.names.get(name) or {"ListNode": ListNode, "TreeNode": TreeNode}[name]

    def object_from(self, tag, rest):
        if tag == "p":
            return self.wire.kept[rest[0][0]]
        if tag in ("a", "G"):
            return (self._coroutine if tag == "a" else self._items)(rest[0])
        if tag == "g":
            return IteratorOfTests(self, rest[0])
        return self.remotes.setdefault(rest[0], Remote(self, rest[0]))  # one object for one of theirs

    async def _coroutine(self, number):
        """Await something of the tests. Their loop runs between the steps of ours; one of the program's own waits."""
        asyncio = sys.modules["asyncio"]
        is_in_steps = asyncio.get_running_loop() is self.loop
        is_done = self.ask_tests(number, "__start__", (), {}) if is_in_steps else None
        if is_done is None:
            return self.ask_tests(number, "__await__", (), {})
        while not is_done:
            try:
                await asyncio.tasks.sleep(0)
            except asyncio.CancelledError:
                self.ask_tests(number, "__cancel__", (), {})
            is_done = self.ask_tests(number, "__done__", (), {})
        return self.ask_tests(number, "__result__", (), {})

    async def _items(self, number):
        while True:
            try:
                item = self.ask_tests(number, "__anext__", (), {})
            except StopAsyncIteration:
                return
            yield item

    def _defined(self, name):
        if name not in self.defined or name not in self.names:
            raise NameError("the program does not define %r" % name)
        return self.names[name]

    def entry(self, name):
        """Return the function to call. The class Solution comes first: a star import may bind the same name."""
        if "Solution" in self.defined and hasattr(self.names.get("Solution"), name):
            return getattr(self.names["Solution"](), name)
        return self._defined(name)

    def start(self, awaitable):
        """Start to await something in the event loop that all requests share; return its number, and if it is done."""
        import asyncio

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)

        async def result():
            return await awaitable

        self.tasks.append(self.loop.create_task(result()))
        return len(self.tasks) - 1, self.step(len(self.tasks) - 1)

    def step(self, number):
        """Let the event loop do what is ready; the tests' loop runs between two steps, in one thread with it."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()
        return self.tasks[number].done()

    def ask_tests(self, number, name, args, kwargs):
        """Call a function of the tests, and answer what they ask meanwhile. Any thread of the program may call it."""

        def content():
            encoded = [self.wire.encode(a) for a in args]
            return {"args": encoded, "kwargs": {k: self.wire.encode(v) for k, v in kwargs.items()}}

        with self.turns.lock:
            failed, value = self.turns.ask(self.wire.message(content, do=name, of=number))
        if failed:
            raise value
        return value

    def _read(self, reply):
        failed = "error" in reply
        return failed, self.wire.decode(reply["error" if failed else "value"])

    def reply_to(self, request):
        """Return the result of a request with the objects that it changed, or the exception that it raised."""
        with self.turns.lock:
            try:
                self._take_input(request)
                self._take_replaced(request)
                args = [self.wire.decode(a) for a in request["args"]]
                kwargs = {k: self.wire.decode(v) for k, v in request["kwargs"].items()}
                self.wire.forget(request.get("forget", ()))
                result = self.turns.without_lock(self._execute, request["do"], args, kwargs)
                return self.wire.message(lambda: {"value": self.wire.encode(result)})
            except BaseException as e:  # also SystemExit: a program may call sys.exit
                return self._error(e)

    def _add(self):
        """Return what the program has printed, warned and logged since the last message."""
        printed = {name: stream.taken() for name, stream in self.printed.items() if stream.tell()}
        return dict(printed, **self.observed.taken(self.wire))

    def _execute(self, do, args, kwargs):
        if do == "look_up":
            return self._defined(*args)
        if do == "peek":
            return self.names[args[0]]
        if do == "bind":
            return self.names.__setitem__(*args)
        if do == "call":
            return args[0](*args[1:], **kwargs)
        return self.functions[do](*args, **kwargs)

    def dict_of_missing(self):
        return {}

    def _take_input(self, request):
        """Use what the tests have put in place of `input`, `print`, `open` and of the standard input."""
        for name, holder, own in self.own:
            now = own
            if name in request:
                now = (RemoteInput if name == "stdin" else Remote)(self, request[name])
            setattr(holder, name, now)

    def _take_replaced(self, request):
        """Replace what the tests have replaced in modules of the standard library, such as `time.time`."""
        for (module, name), own in self.replaced.items():
            setattr(sys.modules[module], name, own)
        self.replaced = {}
        for module, name, value in request.get("replaced", ()):
            __import__(module)
            self.replaced[module, name] = getattr(sys.modules[module], name)
            setattr(sys.modules[module], name, self.wire.decode(value))
        if "environ" in request:
            os.environ.clear()
            os.environ.update(request["environ"])
        self.observed.start(request.get("observe", ()))

    def _error(self, error):
        try:
            return self.wire.message(lambda: {"error": self.wire.encode(error)})
        except BaseException:
            return {"changes": [], "error": ["e", ["y", "Exception"], ["t", []], ["t", []], text_of(error), None]}

    def plain_reply_to(self, request):
        """Answer a call test, whose arguments and result are plain values."""
        try:
            return {"value": self.wire.encode(self.entry(request["entry"])(*request["args"]))}
        except BaseException as e:
            return {"error": type(e).__name__, "text": text_of(e)}


_OPERATORS = (
    "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift "
    "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift "
    "neg pos abs invert eq ne lt le gt ge contains getitem setitem delitem"
).split()


_HOOKS = ("__get__", "__set__", "__delete__", "__set_name__")


def _signature(function):
    """Return what makes the signature of a function or class again: its parameters and what it returns."""
    import inspect

    def stated(value):
        return [] if value is inspect.Parameter.empty else [value]

    found = inspect.signature(function)
    parameters = [
        [p.name, int(p.kind), tuple(stated(p.default)), tuple(stated(p.annotation))] for p in found.parameters.values()
    ]
    return parameters, tuple(stated(found.return_annotation))


def _is_a(value, module, name):
    return isinstance(value, getattr(sys.modules[module], name))


def _plain(value):
    """Return what a container holds, whatever its class makes of it; None for all other objects."""
    kind = next((k for k in (list, dict, set, frozenset, tuple) if isinstance(value, k)), None)
    return None if kind is None else tuple.__getitem__(value, slice(None)) if kind is tuple else kind.copy(value)


def serve_program(code, program, new_main):
    request = receive()
    is_plain = request.get("raw", False)
    program.provide()
    names = new_main("solution", {"ListNode": ListNode, "TreeNode": TreeNode})
    printed = {} if is_plain else {"stdout": Printed(), "stderr": Printed()}
    for name, stream in printed.items():
        shown = io.TextIOWrapper(stream, "utf-8", "surrogateescape", write_through=True)
        setattr(sys, name, shown)
        setattr(sys, "__%s__" % name, shown)
    exec(code, names)
    side = ProgramSide(names, program.defined, is_plain)
    side.printed = printed
    while is_plain:
        send(side.plain_reply_to(request))
        request = receive()
    side.turns.serve(request)


def serve(code, program, new_main, role):
    """Serve requests until the process is killed; called once the process is restricted."""
    if role == "program":
        serve_program(code, program, new_main)
    else:
        serve_tester()
