"""Unpack the tests of a row: JSON text, and the compressed private tests of LiveCodeBench. Both have size limits."""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import sys
import zlib

from klear_core.errors import DataError

MAX_TESTS_BYTES = 256 << 20
"""Limit for the unpacked tests of one problem, in bytes.

KlearReasoner-CodeSub has 278 KB a row, the largest LiveCodeBench problem about 100 MB.
"""


class LongIntegerError(DataError):
    """A test holds an integer of more digits than Python reads. The limit protects the whole process, so it stays."""

    def __init__(self) -> None:
        super().__init__(f"a test has an integer of more than {sys.get_int_max_str_digits():,} digits")


def parse_json(text: str) -> object:
    """Return the value of a JSON text. Raise LongIntegerError, or ValueError or RecursionError as `json` does."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError as e:  # the only one that is not about the text's syntax
        raise LongIntegerError from e


def unpack(value: object) -> object:
    """Return the value of a JSON text, and any other value as it is."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_TESTS_BYTES:
        raise DataError(f"tests of {len(value)} characters; at most {MAX_TESTS_BYTES} are read")
    try:
        return parse_json(value)
    except (json.JSONDecodeError, RecursionError) as e:
        raise DataError(f"tests are not JSON: {e}") from e


def unpack_or_none(value: object) -> object:
    """Return the value of a JSON text; None for an empty value or a text that is not JSON."""
    try:
        return unpack(value) if value else None
    except DataError:
        return None


def is_packed(value: object) -> bool:
    """Return whether LiveCodeBench's tests are compressed. Plain tests are the JSON text of a list."""
    return isinstance(value, str) and not value.lstrip().startswith("[")


class _TextUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        raise DataError(f"private_test_cases pickles {module}.{name}; only text is read")


def inflate(value: object) -> str:
    """Unpack LiveCodeBench's private tests: base64 of zlib of a pickled JSON text.

    The unpickler refuses all classes and functions, because the file is untrusted, and the output size is limited.
    """
    assert isinstance(value, str)
    try:
        inflater = zlib.decompressobj()
        raw = inflater.decompress(base64.b64decode(value, validate=True), MAX_TESTS_BYTES)
        if inflater.unconsumed_tail:
            raise DataError(f"private_test_cases unpack to more than {MAX_TESTS_BYTES} bytes")
        text = _TextUnpickler(io.BytesIO(raw)).load()
    except (binascii.Error, ValueError, zlib.error, pickle.UnpicklingError, EOFError) as e:
        raise DataError(f"private_test_cases cannot be unpacked: {e}") from e
    if not isinstance(text, str):
        raise DataError(f"private_test_cases pickle a {type(text).__name__}, not text")
    return text
