"""Build the test cases of a code problem from the values in a row, and refuse malformed values with DataError."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TypeGuard

from klear_core.code_tests import CallCase, StdinCase
from klear_core.data.packed_tests import parse_json
from klear_core.errors import DataError


def stdin_case(given: object, output: object, i: int) -> StdinCase:
    """Return one run by standard input; `i` is its number, for messages."""
    if not isinstance(given, str) or not isinstance(output, str):
        raise DataError(
            f"test {i}: input and output must be text, not {type(given).__name__} and {type(output).__name__}"
        )
    return StdinCase(input=given, output=output)


def call_case(args: object, expected: object, i: int) -> CallCase:
    """Return one call with its expected result; `i` is its number, for messages."""
    if not isinstance(args, list):
        raise DataError(f"test {i}: the arguments of a call must be a list, not {args!r:.200}")
    try:
        return CallCase(args_json=json.dumps(args), expected_json=json.dumps(expected))
    except (TypeError, ValueError, RecursionError) as e:
        raise DataError(f"test {i}: not JSON: {e}") from e


def lcb_call(raw_input: object, raw_output: object, i: int) -> CallCase:
    """Parse a LiveCodeBench call: one JSON argument per line of input, and a JSON result."""
    if isinstance(raw_input, list):
        return call_case(raw_input, raw_output, i)
    if not isinstance(raw_input, str) or not isinstance(raw_output, str):
        raise DataError(f"test {i}: input and output of a call must be text or a list of arguments")
    try:
        args = [parse_json(line) for line in raw_input.split("\n") if line.strip()]
        return call_case(args, parse_json(raw_output), i)
    except (json.JSONDecodeError, RecursionError) as e:
        raise DataError(f"test {i}: not JSON lines: {e}") from e


def refuse_unknown(value: Mapping[str, object], known: set[str], where: str) -> None:
    """Raise DataError if a value has other keys than the known ones."""
    unknown = sorted(set(map(str, value)) - known)
    if unknown:
        raise DataError(f"unknown keys in {where}: {unknown[:8]}; known are {sorted(known)}")


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite(value: float | str) -> float | None:
    """Return a number, or one written as text, as a float; None if it is none, or too large for one."""
    try:
        number = float(value)
    except (ValueError, OverflowError):  # an integer may have hundreds of digits
        return None
    return number if math.isfinite(number) else None
