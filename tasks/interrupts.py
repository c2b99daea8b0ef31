"""Recognize Ctrl-C even if a library wrapped it: native code turns an exception raised inside it into a SystemError."""

from __future__ import annotations


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether the error is a KeyboardInterrupt, or one is in its chain of causes and contexts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
