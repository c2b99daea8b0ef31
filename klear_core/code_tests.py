"""Define the tests that programs are judged by: the reference of a code problem. Importing this loads nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinCase:
    """One run of a program: its standard input and the expected standard output."""

    input: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCase:
    """One call: a JSON array of arguments and the expected JSON value."""

    args_json: str
    expected_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinTests:
    """Test cases for a program that reads standard input and writes standard output."""

    cases: tuple[StdinCase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTests:
    """Calls of `fn_name`, a function or a method of the class `Solution` (LeetCode, LiveCodeBench)."""

    fn_name: str
    cases: tuple[CallCase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertTests:
    """Python source of assertions, one test per entry (HumanEval, MBPP)."""

    programs: tuple[str, ...]


Tests = StdinTests | CallTests | AssertTests
TestKind = Literal["stdin", "call", "asserts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTests:
    """A handle to large tests in a file, from which `load_tests` of `artifacts.tests_file` reads them for judging."""

    path: str
    """The file; in a shard its name alone, because it is in the shard's folder."""
    offset: int
    num_bytes: int
    """Size in the file, compressed."""
    kind: TestKind
    num_tests: int
    num_chars: int
    """Characters of all tests together, uncompressed."""
    digest: str
    """BLAKE2b of the compressed bytes, 32 hex digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeReference:
    """The tests of a code problem. `checker` is Python source of a special judge, empty if answers are unique."""

    tests: StdinTests | CallTests | AssertTests | StoredTests
    time_limit_s: float | None = None
    memory_limit_mb: int | None = None
    is_order_free: bool = False
    checker: str = ""

    @property
    def test_kind(self) -> TestKind:
        """Return how the tests run a program; stored tests are not read for it."""
        tests = self.tests
        match tests:
            case StdinTests():
                return "stdin"
            case CallTests():
                return "call"
            case AssertTests():
                return "asserts"
            case StoredTests():
                return tests.kind
            case _:
                assert_never(tests)

    @property
    def num_tests(self) -> int:
        """Return the number of test cases, or of assertion programs; stored tests are not read for it."""
        tests = self.tests
        match tests:
            case StdinTests() | CallTests():
                return len(tests.cases)
            case AssertTests():
                return len(tests.programs)
            case StoredTests():
                return tests.num_tests
            case _:
                assert_never(tests)
