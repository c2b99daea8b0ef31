"""Read the tests of published code problems: cases, assertions, and packed forms."""

from __future__ import annotations

import ast
import base64
import binascii
import io
import json
import math
import pickle
import sys
import zlib
from collections.abc import Mapping
from typing import TypeGuard

from klear_core.errors import DataError
from klear_core.types import AssertTests, CallCase, CodeReference, StdinCase


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


# ---- assertions ----
# Turn tests that are Python source into the assertion programs of a CodeReference; nothing is run.


_NO_PROGRAM = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors of Python's parser: half a character and a NUL are ValueErrors, deep nesting causes the last two."""


def asserts_reference(programs: object) -> CodeReference:
    """Return the reference of one test program or a list of them."""
    return CodeReference(tests=AssertTests(programs=checked_programs(programs)))


def checked_programs(programs: object) -> tuple[str, ...]:
    """Return test programs as a tuple; DataError if there is none or one is not Python."""
    listed = [programs] if isinstance(programs, str) else programs
    if not isinstance(listed, list) or not listed or not all(isinstance(p, str) and p.strip() for p in listed):
        raise DataError(f"assertions must be a program or a non-empty list of programs, not {programs!r:.200}")
    for i, program in enumerate(listed):
        try:
            ast.parse(program)
        except _NO_PROGRAM as e:
            raise DataError(f"test program {i} is not Python: {e}") from e
    return tuple(listed)


def entry_point_reference(row: Mapping[str, object]) -> CodeReference:
    """Parse HumanEval and LeetCodeDataset rows, where `test` defines `check(candidate)`.

    Definitions in the prompt other than the entry point are helpers that the tests need, so they are prepended.
    """
    test, entry_point, prompt = row["test"], row["entry_point"], row.get("prompt", "")
    if isinstance(test, str) and isinstance(entry_point, str) and isinstance(prompt, str) and "def check(" in test:
        helpers = _definitions_besides(prompt, entry_point)
        return asserts_reference(f"{helpers}\n{test}\ncheck({entry_point})")
    raise DataError("prompt, test and entry_point must be strings and test must define check(candidate)")


def pytest_reference(program: object) -> CodeReference:
    """Turn plain test functions into one program that calls them; fixtures and marks need pytest and are refused."""
    if not isinstance(program, str):
        raise DataError(f"tests.pytest must be a program, not {type(program).__name__}")
    try:
        tree = ast.parse(program)
    except _NO_PROGRAM as e:
        raise DataError(f"tests.pytest is not Python: {e}") from e
    kept = [node for node in tree.body if not _imports_solution_or_pytest(node)]
    functions = [n for n in kept if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
    if not functions or any(n.args.args or n.decorator_list for n in functions):
        raise DataError("tests.pytest must hold plain test functions without fixtures or marks")
    calls = "\n".join(f"{n.name}()" for n in functions)
    return asserts_reference("\n".join(ast.unparse(node) for node in kept) + "\n" + calls)


def _definitions_besides(prompt: str, entry_point: str) -> str:
    if prompt.rstrip().endswith(('"""', "'''", ":")):
        # HumanEval prompts end in a signature or docstring; `pass` completes the body so that they parse.
        prompt = prompt.rstrip() + "\n    pass\n"
    try:
        body = ast.parse(prompt).body
    except _NO_PROGRAM:
        return ""  # LeetCodeDataset's older prompts are prose
    # The entry point is left out: its stub would shadow the solution that the tests check.
    kept = [node for node in body if not _defines(node, entry_point) and not _imports_package(node)]
    return "\n".join(ast.unparse(node) for node in kept)


def _defines(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name


def _imports_package(node: ast.stmt) -> bool:
    """Return whether a statement imports a third-party package.

    LeetCodeDataset's prelude imports sortedcontainers for the programs; the tests need the standard library only.
    """
    match node:
        case ast.Import(names=names):
            modules = [alias.name for alias in names]
        case ast.ImportFrom(module=str(module)):
            modules = [module]
        case _:
            return False
    return any(module.split(".")[0] not in sys.stdlib_module_names for module in modules)


def _imports_solution_or_pytest(node: ast.stmt) -> bool:
    match node:
        case ast.ImportFrom(module=module):
            return module in ("solution", "pytest")
        case ast.Import(names=names):
            return all(alias.name in ("solution", "pytest") for alias in names)
        case _:
            return False


# ---- packed tests ----
# Unpack the tests of a row: JSON text, and the compressed private tests of LiveCodeBench. Both have size limits.


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
