"""Nested brackets modulo 7: `mod 7: ((3+4)*(5-2))=?`. The number of operations is the level.

A solution copies the whole expression once for each operation, so its length grows with the square of the level.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import comb

from klear_core.errors import DataError

MODULUS = 7
"""147 different operations, few enough for a model of half a million parameters to learn in minutes."""
OPERATORS = "+-*"

_BRACKETS = re.compile(r"mod 7: (?P<text>[-+*()0-6]+)=\?")
_INNERMOST = re.compile(r"\(([0-6])([-+*])([0-6])\)")


def count_brackets(level: int) -> int:
    """Return the number of expressions with `level` operations."""
    return int(MODULUS ** (level + 1) * len(OPERATORS) ** level * _num_shapes(level))


def write_brackets(level: int, index: int) -> str:
    """Return the question with this number."""
    digits: list[str] = []
    operators: list[str] = []
    for _ in range(level + 1):
        index, digit = divmod(index, MODULUS)
        digits.append(str(digit))
    for _ in range(level):
        index, operator = divmod(index, len(OPERATORS))
        operators.append(OPERATORS[operator])
    return f"mod {MODULUS}: {_nested(level, index, iter(digits), iter(operators))}=?"


def parse_brackets(question: str) -> str | None:
    """Return the expression of a question; None if it is no question of this family."""
    match = _BRACKETS.fullmatch(question)
    return match["text"] if match else None


def first_operation(text: str) -> re.Match[str] | None:
    """Return the leftmost bracket of two digits: groups 1 to 3 are left digit, operator and right digit."""
    return _INNERMOST.search(text)


def solve_brackets(text: str) -> str:
    """Return the value of an expression, a digit; raise DataError if its brackets do not match."""
    while found := first_operation(text):
        text = replace_operation(text, found, value_of(found[1], found[2], found[3]))
    if len(text) != 1:
        raise DataError(f"brackets do not match: {text!r} is left")
    return text


def replace_operation(text: str, found: re.Match[str], value: int) -> str:
    """Return the expression with `value` in place of the bracket that was found."""
    return f"{text[: found.start()]}{value}{text[found.end() :]}"


def value_of(left: str, operator: str, right: str) -> int:
    """Return the value of one operation, in 0..6."""
    a, b = int(left), int(right)
    values = {"+": a + b, "-": a - b, "*": a * b}
    return values[operator] % MODULUS


def _nested(level: int, shape: int, digits: Iterator[str], operators: Iterator[str]) -> str:
    """Return the expression whose shape has this number among the binary trees with `level` inner nodes."""
    if level == 0:
        return next(digits)
    for num_left in range(level):
        num_right = level - 1 - num_left
        num_shapes = _num_shapes(num_left) * _num_shapes(num_right)
        if shape < num_shapes:
            left, right = divmod(shape, _num_shapes(num_right))
            operator = next(operators)
            return (
                f"({_nested(num_left, left, digits, operators)}{operator}"
                f"{_nested(num_right, right, digits, operators)})"
            )
        shape -= num_shapes
    raise AssertionError((level, shape))


def _num_shapes(level: int) -> int:
    """Return the number of binary trees with `level` inner nodes (Catalan numbers)."""
    return comb(2 * level, level) // (level + 1)
