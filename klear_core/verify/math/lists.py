"""Read lists of values: how many there are, and both values of `\\pm`."""

from __future__ import annotations

import re

from klear_core.verify.math.numbers import is_numeric
from klear_core.verify.math.relations import Statement, bracket_depths, listed

_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])\s*")
_NO_SINGLE_VALUE = re.compile(r"[,=]|\.\.|\\pm(?![a-zA-Z])")


def num_listed(statement: Statement) -> int | None:
    """Return how many numbers a bare list has, one or more; None for sets, tuples, statements, and unclear lists."""
    if statement.kind != "plain":
        return None
    parts = listed(statement.texts[0])
    is_plain = all(is_numeric(part) and not _NO_SINGLE_VALUE.search(part) for part in parts)
    return len(parts) if is_plain else None


def signs_apart(text: str) -> str:
    r"""Write `\frac{1\pm\sqrt5}{2}` as two values. Algebra itself reads the sign outside of brackets: `1\pm\sqrt5`."""
    text = text.strip()
    is_set = text.startswith(r"\{") and text.endswith(r"\}")
    parts = listed(text[2:-2] if is_set else text)
    values: list[str] = []
    for part in parts:
        signs = list(_PLUS_MINUS.finditer(part))
        is_one_inside = len(signs) == 1 and bracket_depths(part)[signs[0].start()] > 0 and "," not in part
        if is_one_inside:
            values += [_PLUS_MINUS.sub("+", part), _PLUS_MINUS.sub("-", part)]
        else:
            values.append(part)
    if len(values) == len(parts):
        return text
    joined = ", ".join(values)
    return rf"\{{{joined}\}}" if is_set else joined
