"""Extract the program from a response, choose its tests and limits, and compare outputs, all outside the jail."""

from __future__ import annotations

import json
import math
import random
import re
import textwrap
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import partial
from typing import TypeVar, assert_never

from klear_core.artifacts.records import sizes_of_tests
from klear_core.config.verify import CodeConfig, VerifyConfig
from klear_core.prompts import NoAnswer
from klear_core.seeding import seed_for
from klear_core.types import AssertTests, CallTests, CodeReference, StdinTests, StoredTests, Tests
from klear_core.verify.sandbox.jail import TestLimits

# Possessive quantifiers, so that hostile text cannot make it backtrack.
_FENCE = re.compile(r"^ {0,12}(`{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+$", re.M)
_PYTHON_TAGS = frozenset({"python", "py", "python3", ""})
NO_PROGRAM = "no closed block of Python code"


def find_program(answer_text: str, cfg: CodeConfig) -> str | NoAnswer:
    """Return the last closed fenced block that counts as Python, or the reason why there is none to run."""
    programs: list[str] = []
    for tag, text in fenced_blocks(answer_text):
        is_python = tag == "python" if cfg.fence == "python" else tag.lower() in _PYTHON_TAGS
        if is_python:
            programs.append(text)
    if not programs:
        return NoAnswer(reason=NO_PROGRAM)
    return check_size(programs[-1], cfg)


def check_size(program: str, cfg: CodeConfig) -> str | NoAnswer:
    """Return the program, or the reason why it may not be run: it is empty or too long."""
    if not program.strip():
        return NoAnswer(reason="the block of code is empty")
    if len(program.encode("utf-8", "surrogatepass")) > cfg.max_program_kb << 10:
        return NoAnswer(reason=f"the program is longer than {cfg.max_program_kb} kB")
    return program


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return (tag, content) of the closed Markdown fences, in order.

    A fence closes with at least as many backticks as it opened with and no tag.
    """
    blocks: list[tuple[str, str]] = []
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif len(fence[1]) >= len(opening[1]) and not fence[2]:
            content = text[opening.end() + 1 : fence.start()]
            if opening[0].startswith(" "):
                content = textwrap.dedent(content)
            blocks.append((opening[2], content))
            opening = None
        elif fence[2]:
            opening = fence  # the earlier one was never closed
    return blocks


def reference_fault(reference: CodeReference, cfg: CodeConfig) -> str | None:
    """Return the reason why a reference cannot be used for judging, or None if it can; stored tests are not read."""
    tests = reference.tests
    num_chars = tests.num_chars if isinstance(tests, StoredTests) else sum(sizes_of_tests(tests))
    if not reference.num_tests:
        return "the test list is empty"
    if num_chars > cfg.max_test_mb << 20:
        return f"the tests are {num_chars >> 20} MB, more than verify.code.max_test_mb = {cfg.max_test_mb}"
    if reference.test_kind == "asserts" and (reference.checker or reference.is_order_free):
        return "assertions take neither a checker nor is_order_free"
    return None


def num_chosen(num_tests: int, cfg: CodeConfig) -> int:
    """Return how many of a problem's tests its programs are run on."""
    return min(num_tests, cfg.max_tests or num_tests)


def chosen_tests(tests: Tests, problem_id: str, cfg: CodeConfig) -> Tests:
    """Return at most `max_tests` of the tests, in their original order.

    The draw depends only on the problem's id, so that every sample is judged on the same tests.
    """
    num_tests = len(sizes_of_tests(tests))
    if num_chosen(num_tests, cfg) == num_tests:
        return tests
    rng = random.Random(seed_for(0, "verify/tests", problem_id))  # noqa: S311  not for secrets
    kept = sorted(rng.sample(range(num_tests), cfg.max_tests))
    match tests:
        case StdinTests():
            return StdinTests(cases=tuple(tests.cases[i] for i in kept))
        case CallTests():
            return CallTests(fn_name=tests.fn_name, cases=tuple(tests.cases[i] for i in kept))
        case AssertTests():
            return AssertTests(programs=tuple(tests.programs[i] for i in kept))
        case _:
            assert_never(tests)


# ---- limits ----
# Compute the limits of a test from those of its problem and of the settings.


_TESTER_CPU_S = 20.0
_TESTER_RECURSION_LIMIT = 50_000  # our helpers compare trees and encode linked lists by recursion
_MIN_MEMORY_MB = 256  # the interpreter itself needs this much; problems' limits are meant for C++


def limits_for(reference: CodeReference, cfg: VerifyConfig) -> TestLimits:
    """Return a test's limits: those of the problem, adapted to Python, or else those of the settings."""
    cpu_s, memory_mb = cfg.code.cpu_s, cfg.code.memory_mb
    if reference.time_limit_s is not None:
        cpu_s = reference.time_limit_s * cfg.code.time_limit_scale
    if reference.memory_limit_mb is not None:
        memory_mb = max(reference.memory_limit_mb, _MIN_MEMORY_MB)
    return TestLimits(
        cpu_s=cpu_s,
        wall_s=cpu_s * cfg.code.wall_factor + 2.0,
        memory_mb=memory_mb,
        output_bytes=cfg.limits.output_mb << 20,
        recursion_limit=cfg.code.recursion_limit,
        may_exit=cfg.code.compare == "decimal",
    )


def limits_of_tester(cfg: VerifyConfig, program: TestLimits | None) -> TestLimits:
    """Return the limits of the tests' process. Its wall-clock limit includes the program's, for which it waits."""
    wall_s = _TESTER_CPU_S * cfg.code.wall_factor
    if program is not None:
        wall_s += program.wall_s
    return TestLimits(
        cpu_s=_TESTER_CPU_S,
        wall_s=wall_s,
        memory_mb=cfg.code.memory_mb,
        output_bytes=cfg.limits.output_mb << 20,
        recursion_limit=_TESTER_RECURSION_LIMIT,
    )


# ---- compare ----
# Compare a program's output with the expected one. Runs on the host, on plain text and plain JSON values only.


_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?", re.ASCII)
_MAX_NUMBER_CHARS = 400
_DOUBLE_DIGITS = 17  # significant digits of a double
# Significant digits of binary128, the widest float that a reference solution prints. A number with more digits was
# computed to that precision on purpose, and all its digits are compared.
_FLOAT_DIGITS = 36
_MAX_DEPTH = 100

N = TypeVar("N", float, Fraction)


def same_output(expected: str, output: str, cfg: CodeConfig, *, is_order_free: bool = False) -> bool:
    """Compare standard outputs by the rule in the settings. `is_order_free` allows the lines in any order."""
    if expected.strip() == output.strip():
        return True
    if cfg.compare == "exact" and not is_order_free:
        return False
    if cfg.compare == "decimal":
        return _same_as_livecodebench(expected, output, is_order_free=is_order_free)
    expected_lines, lines = _lines(expected), _lines(output)
    if len(expected_lines) != len(lines):
        return False
    if is_order_free:
        expected_lines, lines = sorted(expected_lines), sorted(lines)
    return all(_same_line(e, o, cfg) for e, o in zip(expected_lines, lines, strict=True))


def _same_as_livecodebench(expected: str, output: str, *, is_order_free: bool) -> bool:
    """Compare as LiveCodeBench's `grade_stdio`: stripped lines, blank ones inside included, equal as text or, if all
    words of both are numbers for `decimal.Decimal`, as lists of exact numbers.
    """
    pairs = [[line.strip() for line in text.strip().split("\n")] for text in (expected, output)]
    if len(pairs[0]) != len(pairs[1]):
        return False
    if is_order_free:
        pairs = [sorted(lines) for lines in pairs]
    return all(a == b or _are_equal_decimals(a, b) for a, b in zip(*pairs, strict=True))


def _are_equal_decimals(expected: str, line: str) -> bool:
    numbers = []
    for words in (expected.split(), line.split()):
        try:
            numbers.append([Decimal(word) for word in words])
        except InvalidOperation:
            return False
    try:
        return numbers[0] == numbers[1]
    except InvalidOperation:  # a signalling nan
        return False


def same_value(expected: object, value: object, cfg: CodeConfig, *, is_order_free: bool = False) -> bool:
    """Compare JSON values: tuples equal lists and True equals 1, as in Python.

    Floats are equal to tolerances, or exactly by the rule `decimal`, as in LiveCodeBench.
    """
    if is_order_free and isinstance(expected, list) and isinstance(value, list):
        as_text = partial(json.dumps, sort_keys=True)
        expected, value = sorted(expected, key=as_text), sorted(value, key=as_text)
    return _same(expected, value, cfg, _MAX_DEPTH)


def _lines(text: str) -> list[list[str]]:
    return [tokens for line in text.split("\n") if (tokens := line.split())]


def _same_line(expected: list[str], tokens: list[str], cfg: CodeConfig) -> bool:
    if expected == tokens:
        return True
    if len(expected) != len(tokens):
        return False
    match cfg.compare:
        case "exact" | "whitespace" | "decimal":
            return False
        case "tokens":
            return all(_same_token(e, t, cfg) for e, t in zip(expected, tokens, strict=True))
        case _:
            assert_never(cfg.compare)


def _same_token(expected: str, token: str, cfg: CodeConfig) -> bool:
    if expected == token:
        return True
    if not _is_number(expected) or not _is_number(token):
        return False
    if _INTEGER.fullmatch(expected):
        # `1.0` equals `1`, but two integers must be equal as text.
        return _INTEGER.fullmatch(token) is None and _same_decimal(expected, token)
    num_digits = _significant_digits(expected)
    if num_digits <= _DOUBLE_DIGITS:
        return _close(float(expected), float(token), cfg)
    difference = abs(Fraction(expected) - Fraction(token))
    if num_digits > _FLOAT_DIGITS and not _is_printed_double(expected):
        # Every digit must be equal, except that the last may differ by one.
        return difference <= Fraction(10) ** int(Decimal(expected).as_tuple().exponent)
    return difference <= _tolerance(Fraction(expected), cfg)


def _significant_digits(number: str) -> int:
    mantissa = number.lower().partition("e")[0]
    return len(mantissa.replace(".", "").lstrip("+-0"))


def _is_printed_double(number: str) -> bool:
    """Return whether the digits are a double printed in full: `%.50f` of 0.1 has fifty, of which seventeen matter."""
    places = -int(Decimal(number).as_tuple().exponent)
    return f"{float(number):.{max(places, 0)}f}" == number.lstrip("+")


def _same_decimal(expected: str, token: str) -> bool:
    if not _is_number(expected) or not _is_number(token):
        return expected == token
    try:
        return Decimal(expected) == Decimal(token)
    except InvalidOperation:
        return False


def _is_number(token: str) -> bool:
    return len(token) <= _MAX_NUMBER_CHARS and _NUMBER.fullmatch(token) is not None


def _close(expected: float, value: float, cfg: CodeConfig) -> bool:
    if not (math.isfinite(expected) and math.isfinite(value)):
        return expected == value
    return abs(expected - value) <= _tolerance(expected, cfg)


def _tolerance(expected: N, cfg: CodeConfig) -> N:
    """Return the largest difference from `expected` that still counts as equal, computed in its own type."""
    number = type(expected)
    return max(number(cfg.abs_tolerance), number(cfg.rel_tolerance) * abs(expected))


def _same(expected: object, value: object, cfg: CodeConfig, depth: int) -> bool:
    if depth == 0:
        return False
    if isinstance(expected, list) and isinstance(value, list):
        if len(expected) != len(value):
            return False
        return all(_same(e, v, cfg, depth - 1) for e, v in zip(expected, value, strict=True))
    if isinstance(expected, dict) and isinstance(value, dict):
        if expected.keys() != value.keys():
            return False
        return all(_same(expected[key], value[key], cfg, depth - 1) for key in expected)
    is_exact = cfg.compare == "decimal"
    if isinstance(expected, float) and isinstance(value, int | float) and not is_exact:
        return _close(expected, _to_float(value), cfg)
    if isinstance(expected, int | float) and isinstance(value, int | float):
        return expected == value
    return type(expected) is type(value) and expected == value


def _to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
