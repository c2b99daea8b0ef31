"""Read the time and memory limits that rows state: as numbers, or as text with a unit (`2.0 seconds`)."""

from __future__ import annotations

import re

from klear_core.data.cases import finite, is_number

_QUANTITY = re.compile(r"(?:(\d+(?:\.\d+)?)\s*(?:-|to)\s*)?(\d+(?:\.\d+)?)\s*([a-z]+)\.?")
"""A number with its unit, or a range, of which the upper end counts (`0.5 - 2 seconds`)."""
_SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "milliseconds": 1e-3}
_MEGABYTES = {"mb": 1.0, "megabyte": 1.0, "megabytes": 1.0, "kb": 2.0**-10, "kilobytes": 2.0**-10}
_MEGABYTES |= {"gb": 2.0**10, "gigabyte": 2.0**10, "gigabytes": 2.0**10, "bytes": 2.0**-20}
_MOST_SECONDS, _MOST_MEGABYTES = 86_400.0, 2.0**20
"""A day and a terabyte. A larger limit is a mistake in the row, and more than the sandbox can set."""


def seconds_in(value: object) -> float | None:
    """Return a time limit; None if the row states none that can be read, so that the limit of the settings holds."""
    return _amount(value, _SECONDS, most=_MOST_SECONDS)


def megabytes_in(value: object) -> int | None:
    """Return a memory limit; None if the row states none that can be read, or less than a megabyte."""
    amount = _amount(value, _MEGABYTES, most=_MOST_MEGABYTES)
    return None if amount is None or amount < 1 else int(amount)


def _amount(value: object, units: dict[str, float], *, most: float) -> float | None:
    """Return a positive number, `most` at most, in the unit that counts 1."""
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value.strip().lower())
        if match is None or match[3] not in units:
            return None
        value = float(match[2]) * units[match[3]]
    number = finite(value) if is_number(value) else None
    return number if number is not None and 0 < number <= most else None
