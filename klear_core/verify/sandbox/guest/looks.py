"""Runs inside a jailed child as module `klear_looks`: what tests look at, such as types, of the program's objects."""

import collections.abc
import sys
import types

from klear_remote import NAMES_OF_FUNCTIONS, Proxy, RemoteAsyncIterator, RemoteIterator


class ProgramModule(types.ModuleType):
    """The module under whose name the tests import the program."""

    def __init__(self, name, look_up, bind):
        super().__init__(name)
        vars(self).update(_klear_look_up=look_up, _klear_bind=bind, _klear_saved={})

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._klear_look_up(name)

    def __setattr__(self, name, value):
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            self._klear_saved.setdefault(name, getattr(self, name, None))
            self._klear_bind(name, value)

    def __delattr__(self, name):
        self._klear_bind(name, self._klear_saved.pop(name))  # `mock.patch` ends so


def type_of(value):
    if type(value) is not Proxy:
        return type(value)
    found = value._klear_apply("type")
    if value._klear_is_known() and type(found) is Proxy:
        value._klear_tester.named.add(found._klear_path[0])
    return found


def is_instance(value, kinds):
    """Return what `isinstance` does; the program is asked whether an object of its own is, say, a `Sized`."""
    if isinstance(value, kinds) and type(value) not in _STAND_INS:
        return True
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        place = _PLACES.get(kind) if type(value) in _STAND_INS and isinstance(kind, type) else None
        if value._klear_tester.apply("is_a", value, *place) if place else isinstance(value, kind):
            return True
    return False


_STAND_INS = (Proxy, RemoteIterator, RemoteAsyncIterator)
_PLACES = {
    vars(module)[name]: (module.__name__, name)
    for module in (collections.abc, types)
    for name in dir(module)
    if isinstance(vars(module)[name], type)
} | {kind: ("builtins", kind.__name__) for kind in (list, tuple, set, frozenset, dict)}


class RemoteDescriptor:
    """A function or another descriptor of the program in a class of the tests, which binds as Python has it."""

    _klear_path = None

    def __init__(self, proxy, hooks):
        vars(self).update(_klear_proxy=proxy, _klear_hooks=hooks, _klear_path=proxy._klear_path, _klear_name="")

    def _klear_apply(self, do, *args):
        return self._klear_proxy._klear_apply(do, *args)

    def __set_name__(self, owner, name):
        self._klear_name = name
        if "__set_name__" in self._klear_hooks:
            self._klear_apply("set_name", owner, name)

    def __get__(self, instance, owner=None):
        if "__get__" in self._klear_hooks:
            return self._klear_apply("get", instance, owner)
        return getattr(instance, "__dict__", {}).get(self._klear_name, self._klear_proxy)

    def __getattr__(self, name):
        return getattr(self._klear_proxy, name)


class RemoteDataDescriptor(RemoteDescriptor):
    """A descriptor of the program that also says what setting an attribute does."""

    def __set__(self, instance, value):
        self._klear_apply("set", instance, value)

    def __delete__(self, instance):
        self._klear_apply("delete", instance)

    def __setattr__(self, name, value):
        (vars(self).__setitem__ if name.startswith("_klear") else self._klear_proxy.__setattr__)(name, value)


def with_descriptors(cls):
    """Have what a class of the tests took from the program bind to its instances; a test case is not shown to it."""
    if "unittest" in sys.modules and issubclass(cls, sys.modules["unittest"].TestCase):
        return cls
    for name, value in list(vars(cls).items()):
        if type(value) is Proxy:
            hooks = value._klear_apply("hooks")
            if hooks:
                is_data = "__set__" in hooks or "__delete__" in hooks
                descriptor = (RemoteDataDescriptor if is_data else RemoteDescriptor)(value, hooks)
                value._klear_tester.open_classes.add(cls)
                setattr(cls, name, descriptor)
                descriptor.__set_name__(cls, name)
    return cls


def use_open(target, owner, name, *value):
    """Read or set an attribute of an instance whose class has descriptors of the program; none of its methods."""
    if not value and name in NAMES_OF_FUNCTIONS:
        return getattr(target, name)
    if not value and name == "__dict__":
        return State(target, owner)
    if (value and _is_own(owner, name)) or name.startswith(("__", "_klear")):
        raise AttributeError(name)
    return setattr(target, name, *value) if value else getattr(target, name)


def _is_own(owner, name):
    """Return whether a name is that of a method or another attribute of the tests' class itself."""
    held = next((vars(kind)[name] for kind in owner.__mro__ if name in vars(kind)), None)
    return held is not None and not hasattr(type(held), "_klear_path")


class State:
    """The `__dict__` of such an instance, for the program."""

    def __init__(self, target, owner):
        self._target, self._owner = target, owner

    def __getitem__(self, key):
        return vars(self._target)[key]

    def __setitem__(self, key, value):
        if _is_own(self._owner, key):
            raise AttributeError(key)
        vars(self._target)[key] = value

    def __delitem__(self, key):
        del vars(self._target)[key]

    def __contains__(self, key):
        return key in vars(self._target)

    def get(self, key, default=None):
        return vars(self._target).get(key, default)

    def setdefault(self, key, default=None):
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key, *default):
        return vars(self._target).pop(key, *default)


FORWARDED = {
    "dataclasses": "asdict astuple replace is_dataclass".split(),
    "inspect": (
        "isfunction isclass ismethod isabstract iscoroutinefunction isgeneratorfunction isasyncgenfunction isgenerator"
    ).split(),
    "asyncio": ["iscoroutinefunction"],
}
"""Functions of the standard library that look into an object, and ask the program about one of its own."""


def forward_looks(module):
    """Have these functions of a module work on objects of the program."""

    def forwarded(name, own):
        def function(value, *args, **kwargs):
            if type(value) in _STAND_INS:
                return value._klear_tester.apply(name, value, *args, **kwargs)
            return own(value, *args, **kwargs)

        return function

    found = __import__(module)
    for name in FORWARDED[module]:
        setattr(found, name, forwarded(name, getattr(found, name)))
