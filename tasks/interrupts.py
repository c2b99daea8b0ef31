"""Ctrl-C, also where a library has made another error of it: native code turns what is raised inside it into a SystemError."""

from __future__ import annotations


def is_interrupt(error: BaseException | None) -> bool:
    """Whether this error is an interrupt, was raised from one, or came up while one was passing."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
