"""Runs inside a jailed child as module `klear_forms`: runs tests in the forms of pytest and unittest.

pytest itself is not in the jail. This has the part of it that tests of single functions use.
"""

import collections
import contextlib
import inspect
import io
import itertools
import math
import os
import re
import sys
import types
import warnings

from klear_values import CannotSendError


class Raises:
    """The context of `pytest.raises`, and what it gives."""

    def __init__(self, expected, match=None):
        self.expected, self.match = expected, match
        self.value = self.type = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            raise AssertionError("DID NOT RAISE %r" % (self.expected,))
        if not issubclass(kind, self.expected):
            return False
        self.value, self.type = error, kind
        if self.match is not None and not re.search(self.match, str(error)):
            raise AssertionError("%r does not match %r" % (self.match, str(error)))
        return True


def raises(expected, *args, match=None, **kwargs):
    context = Raises(expected, match)
    if not args:
        return context
    with context:
        args[0](*args[1:], **kwargs)
    return context


@contextlib.contextmanager
def warns(expected=Warning, match=None):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found
    if not any(issubclass(w.category, expected) and re.search(match or "", str(w.message)) for w in found):
        raise AssertionError("DID NOT WARN %r" % (expected,))


class Approx:
    """Equal to a number, or to a list, tuple or dict of numbers, within pytest's tolerances."""

    def __init__(self, expected, rel=None, abs=None, nan_ok=False):  # noqa: A002
        self.expected, self.nan_ok = expected, nan_ok
        self.rel = 1e-6 if rel is None and abs is None else rel or 0
        self.abs = 1e-12 if abs is None else abs

    def __eq__(self, other):
        return self._same(self.expected, other)

    def __ne__(self, other):
        return not self == other

    def __repr__(self):
        return "approx(%r)" % (self.expected,)

    __hash__ = None

    def _same(self, expected, value):
        if isinstance(expected, dict):
            is_dict = isinstance(value, dict) and expected.keys() == value.keys()
            return is_dict and all(self._same(expected[k], value[k]) for k in expected)
        if isinstance(expected, (list, tuple)):
            is_list = isinstance(value, (list, tuple)) and len(value) == len(expected)
            return is_list and all(map(self._same, expected, value))
        if isinstance(expected, (str, bytes, bool, type(None))) or not isinstance(value, (int, float, complex)):
            is_number = hasattr(type(value), "__float__") and type(value).__module__ in ("decimal", "fractions")
            return bool(is_number and abs(value - expected) <= self.abs) or expected == value
        if expected == value:
            return True
        if expected != expected:
            return self.nan_ok and value != value
        difference = abs(expected - value)
        return not math.isinf(difference) and difference <= max(self.rel * abs(expected), self.abs)


class Skipped(Exception):  # noqa: N818  pytest's name
    """A test that skips itself; it counts as passed."""


class Fixture:
    """A function marked as a fixture."""

    def __init__(self, function, params=(), autouse=False, scope="function"):
        self.function, self.params, self.autouse = function, list(params or ()), autouse
        self.is_shared = scope != "function"

    def of(self, instance):
        """Return the fixture that a method is for an object of its class."""
        function = types.MethodType(self.function, instance)
        return Fixture(function, self.params, self.autouse, "class" if self.is_shared else "function")


def fixture(function=None, *, params=(), autouse=False, scope="function", **__):
    if callable(function):
        return Fixture(function)
    return lambda f: Fixture(f, params, autouse, scope)


def _skip(reason=""):
    raise Skipped(reason)


def _fail(reason="", *_, **__):
    raise AssertionError(reason)


class Param:
    def __init__(self, *values, **_):
        self.values = values


class Mark:
    """`pytest.mark`: `parametrize` and `skip` have an effect, all others have none."""

    def __getattr__(self, name):
        def mark(*args, **kwargs):
            skips = name in ("skip", "xfail")  # a test that is expected to fail may also pass
            if len(args) == 1 and callable(args[0]) and not kwargs and name != "parametrize":
                return _marked(args[0], "skips", True) if skips else args[0]
            if name == "parametrize":
                return lambda f: _marked(f, "rows", [*getattr(f, "_klear_rows", []), (args[0], list(args[1]))])
            if skips or (name == "skipif" and args and args[0]):
                return lambda f: _marked(f, "skips", True)
            return lambda f: f

        return mark


def _marked(function, what, value):
    setattr(function, "_klear_" + what, value)
    return function


class Capture:
    """The fixture `capsys`: what was printed since the last reading."""

    def __init__(self):
        self.out, self.err = io.StringIO(), io.StringIO()

    def readouterr(self):
        texts = [stream.getvalue() for stream in (self.out, self.err)]
        for stream in (self.out, self.err):
            stream.seek(0)
            stream.truncate()
        return collections.namedtuple("CaptureResult", "out err")(*texts)


class CapLog:
    """The fixture `caplog`: what was logged, at the levels that the tests set."""

    def __init__(self, stack):
        import logging

        self.logging, self.stack, self.records = logging, stack, []
        self.handler = logging.Handler()
        self.handler.emit = self.records.append
        stack.callback(logging.root.removeHandler, self.handler)
        logging.root.addHandler(self.handler)

    messages = property(lambda self: [record.getMessage() for record in self.records])
    text = property(lambda self: "".join("%-8s %s:%s\n" % found for found in self._shown()))
    record_tuples = property(lambda self: [(r.name, r.levelno, r.getMessage()) for r in self.records])

    def _shown(self):
        return [(r.levelname, r.name, r.getMessage()) for r in self.records]

    def clear(self):
        self.records.clear()

    def set_level(self, level, logger=None):
        logger = self.logging.getLogger(logger)
        self.stack.callback(logger.setLevel, logger.level)
        logger.setLevel(level)

    @contextlib.contextmanager
    def at_level(self, level, logger=None):
        logger = self.logging.getLogger(logger)
        before = logger.level
        logger.setLevel(level)
        yield
        logger.setLevel(before)


class MonkeyPatch:
    """The fixture `monkeypatch`, for attributes, items and the environment of the tests' own process."""

    def __init__(self, stack):
        from unittest.mock import patch

        self.patch, self.stack = patch, stack

    def setattr(self, target, name, *value):
        patch = self.patch(target, name) if isinstance(target, str) else self.patch.object(target, name, *value)
        self.stack.enter_context(patch)

    def delattr(self, target, name):
        own = getattr(target, name)
        delattr(target, name)
        self.stack.callback(setattr, target, name, own)

    def delenv(self, name, raising=True):
        self.setenv(name, "")
        del os.environ[name]

    def setitem(self, target, key, value):
        self.stack.enter_context(self.patch.dict(target, {key: value}))

    def setenv(self, name, value):
        self.stack.enter_context(self.patch.dict("os.environ", {name: value}))


def pytest_module():
    module = types.ModuleType("pytest")
    module.raises, module.approx, module.fixture, module.mark, module.param = raises, Approx, fixture, Mark(), Param
    module.skip, module.fail, module.importorskip = _skip, _fail, __import__
    module.warns = warns
    module.deprecated_call = lambda **more: warns((DeprecationWarning, PendingDeprecationWarning), **more)
    module.main = lambda *_, **__: 0
    return module


def run_forms(names, called):
    """Run test functions, test classes and unittest's cases that the tests define and do not call themselves."""
    with contextlib.ExitStack() as shared:
        _run_forms(names, called, Shared(shared))


class Shared:
    """The values of fixtures that several tests share, and what ends them."""

    def __init__(self, stack):
        self.stack, self.values = stack, {}


def _run_forms(names, called, shared):
    module = types.SimpleNamespace(**{name: value for name, value in names.items() if not name.startswith("_")})
    _call_hook(module, "setup_module", module)
    unittest = sys.modules.get("unittest")  # costs time, and is there if the tests have imported it
    for name, value in list(names.items()):
        if (
            unittest
            and isinstance(value, type)
            and issubclass(value, unittest.TestCase)
            and value.__module__ == "tests"
        ):
            _run_cases(value)
        elif name.startswith("Test") and isinstance(value, type) and value.__module__ == "tests":
            _call_hook(value, "setup_class", value)
            for method in [m for m in vars(value) if m.startswith("test")]:
                instance = value()
                own = {n: fixture.of(instance) for n, fixture in vars(value).items() if isinstance(fixture, Fixture)}
                _call_hook(instance, "setup_method", getattr(instance, method))
                rows = getattr(value, "_klear_rows", [])
                run_function(getattr(instance, method), dict(names, **own), shared, rows)
                _call_hook(instance, "teardown_method", getattr(instance, method))
            _call_hook(value, "teardown_class", value)
        elif name.startswith("test") and isinstance(value, types.FunctionType) and name not in called:
            _call_hook(module, "setup_function", value)
            run_function(value, names, shared)
            _call_hook(module, "teardown_function", value)
    _call_hook(module, "teardown_module", module)


def _call_hook(owner, name, offered):
    """Call what tests run before or after others, if it is there; it may take the function, class or module."""
    hook = getattr(owner, name, None)
    if hook is not None:
        hook(*[offered][: len(inspect.signature(hook).parameters)])


def _run_cases(case):
    import unittest

    result = unittest.TestResult()
    result.addError = result.addFailure = result.addSubTest = lambda _test, *error: _reraise(error[-1])
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(case)
    suite.run(result)


def _reraise(error):
    if error is not None:
        raise error[1]


def run_function(function, names, shared, rows_of_class=()):
    """Run one test once for each combination of its parameters, and those of its class."""
    if getattr(function, "_klear_skips", False):
        return
    rows = []
    for argument_names, values in [*rows_of_class, *getattr(function, "_klear_rows", [])]:
        listed = argument_names.replace(" ", "").split(",") if isinstance(argument_names, str) else argument_names
        rows.append([(listed, v.values if isinstance(v, Param) else (v,) if len(listed) == 1 else v) for v in values])
    given_names = [name for row in rows for listed, _ in row[:1] for name in listed]
    needed = [name for name in inspect.signature(function).parameters if name not in given_names]
    needed = [
        n for n, value in names.items() if isinstance(value, Fixture) and value.autouse and n not in needed
    ] + needed
    used = _used_fixtures(needed, names)
    chosen = [[(name, value) for value in names[name].params] for name in used if names[name].params]
    for combination, params in itertools.product(itertools.product(*rows), itertools.product(*chosen)):
        given = {}
        for listed, values in combination:
            given.update(zip(listed, values))  # noqa: B905  Python 3.9
        with contextlib.ExitStack() as stack:
            made = Made(names, shared, stack, dict(params))
            for name in needed:
                value = made.value(name)
                if name in inspect.signature(function).parameters:
                    given[name] = value
            try:
                finish(function(**given))
            except Skipped:
                pass


def finish(result):
    """Run the coroutine of an asynchronous test to its end."""
    if inspect.iscoroutine(result):
        import asyncio

        asyncio.run(result)


def _used_fixtures(needed, names):
    """Return the names of the fixtures that these need, and of those that these need in turn."""
    used, queue = [], list(needed)
    while queue:
        name = queue.pop(0)
        if isinstance(names.get(name), Fixture) and name not in used:
            used.append(name)
            queue += inspect.signature(names[name].function).parameters
    return used


class Made:
    """Makes the fixtures of one test."""

    def __init__(self, names, shared, stack, params):
        self.names, self.shared, self.stack, self.params = names, shared, stack, params
        self.values = {}

    def value(self, name):
        if name in self.values:
            return self.values[name]
        if name == "capsys":
            made = Capture()
            self.stack.enter_context(contextlib.redirect_stdout(made.out))
            self.stack.enter_context(contextlib.redirect_stderr(made.err))
        elif name == "caplog":
            made = CapLog(self.stack)
        elif name == "monkeypatch":
            made = MonkeyPatch(self.stack)
        elif isinstance(self.names.get(name), Fixture):
            made = self._of(name, self.names[name])
        else:
            raise CannotSendError("the test's argument %r is no fixture that is known here" % name)
        self.values[name] = made
        return made

    def _of(self, name, fixture):
        key = name, repr(self.params.get(name))
        if fixture.is_shared and key in self.shared.values:
            return self.shared.values[key]
        stack = self.shared.stack if fixture.is_shared else self.stack
        param = self.params.get(name)
        param = param.values[0] if isinstance(param, Param) else param
        request = types.SimpleNamespace(param=param, addfinalizer=stack.callback, fixturename=name)
        needed = inspect.signature(fixture.function).parameters
        made = fixture.function(**{n: request if n == "request" else self.value(n) for n in needed})
        if inspect.isgenerator(made):
            stack.callback(next, made, None)
            made = next(made)
        if fixture.is_shared:
            self.shared.values[key] = made
        return made
