"""Runs inside a jailed child as module `klear_looks`: what tests look at, such as types, of the program's objects."""

import collections.abc
import types

from klear_remote import Proxy, RemoteAsyncIterator, RemoteIterator


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
}
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
