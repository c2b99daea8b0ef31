"""Read the elements of a JSON array one at a time, however large the array is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

CHUNK_CHARS = 1 << 20

if TYPE_CHECKING:
    pass

_SCANNED_CHARS = 8 << 20
"""Longer elements are parsed once, after a scan has found their end, and not again with each part of the file."""
_MAX_INT_DIGITS = 4300
"""Longest integer that Python converts from text (`sys.set_int_max_str_digits`)."""
_SPACE = re.compile(r"[ \t\r\n]*")
# Possessive quantifiers, so that nothing is remembered for backtracking.
_IN_STRING = re.compile(r"(?:[^\"\\]++|\\.)*+", re.DOTALL)
_BETWEEN_STRINGS = re.compile(r"[^\"\[\]{},]*+")
_IN_ELEMENT = re.compile(r"[^\"\[\]{}]*+")


def _integer(digits: str) -> int | str:
    """Return the integer, or its digits if they are more than Python converts."""
    return int(digits) if len(digits) <= _MAX_INT_DIGITS else digits


DECODER = json.JSONDecoder(parse_int=_integer)


def array_elements(f: TextIO, max_chars: int) -> Iterator[tuple[str, object] | None]:
    """Yield each element's JSON text and value; None for an element of more than `max_chars`."""
    text = f.read(CHUNK_CHARS)
    at = _after_space(text, text.index("[") + 1)
    while text[at : at + 1] != "]":
        try:
            value, end = DECODER.raw_decode(text, at)
            after = _after_space(text, end)
        except json.JSONDecodeError:
            end = after = len(text)
        if after < len(text) and text[after] in ",]":  # otherwise the element may be cut: "12" of "123"
            yield (text[at:end], value) if end - at <= max_chars else None
            at = _after_space(text, after + (text[after] == ","))
            continue
        if len(text) - at > _SCANNED_CHARS:
            large, text = large_element(f, text[at:], max_chars)
            yield None if large is None else (large, DECODER.decode(large))
            at = _after_space(text, int(text[0] == ","))
            continue
        more = f.read(max(CHUNK_CHARS, len(text) - at))  # doubling: linear time for a large element
        if not more:
            DECODER.raw_decode(text, at)  # end of file: raises the decoder's own error if the element is broken
            raise json.JSONDecodeError(
                "an element is followed by neither a comma nor the end of the array", text, after
            )
        text, at = text[at:] + more, 0
    if (text[at + 1 :] + f.read(CHUNK_CHARS)).strip():
        raise json.JSONDecodeError("more text follows the end of the array", text, at + 1)


def large_element(f: TextIO, text: str, max_chars: int) -> tuple[str | None, str]:
    """Return the element that begins with `text`, or None if it is too long, and the text that follows it."""
    parts: list[str] = []
    num_chars = 0
    nesting = _Nesting()
    while text:
        end = nesting.end_of_element(text)
        num_chars += len(text) if end is None else end
        if num_chars <= max_chars:
            parts.append(text[:end])
        else:
            parts.clear()
        if end is not None:
            return ("".join(parts) if parts else None), text[end:]
        text = f.read(CHUNK_CHARS)
    raise json.JSONDecodeError("the file ends in the middle of an element", "", 0)


class _Nesting:
    """Finds the end of an element of an array whose text comes in parts, without parsing it."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        """Whether the last part ended with a backslash, which belongs to the first character of the next."""

    def end_of_element(self, part: str) -> int | None:
        """Return the index of the comma or bracket after the element; None if the element does not end in this part."""
        at = int(self._is_escaped)
        self._is_escaped = False
        while at < len(part):
            pattern = _IN_ELEMENT if self._depth else _BETWEEN_STRINGS
            match = (_IN_STRING if self._is_string else pattern).match(part, at)
            assert match is not None, at
            at = match.end()
            sign = part[at : at + 1]
            match sign:
                case '"':
                    self._is_string = not self._is_string
                case "\\":
                    self._is_escaped = True
                case "[" | "{":
                    self._depth += 1
                case "," | "]" | "}" if not self._depth:
                    return at
                case "]" | "}":
                    self._depth -= 1
            at += 1
        return None


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None, at
    return match.end()
