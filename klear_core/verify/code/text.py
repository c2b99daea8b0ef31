"""Extract the program from a response, and choose the tests it is judged on."""

from __future__ import annotations

import random
import re
import textwrap
from typing import assert_never

from klear_core.artifacts.tests_file import sizes_of_tests
from klear_core.code_tests import AssertTests, CallTests, CodeReference, StdinTests, StoredTests, Tests
from klear_core.config.verify import CodeConfig
from klear_core.seeding import seed_for
from klear_core.verify.window import NoAnswer

# Possessive quantifiers, so that hostile text cannot make it backtrack.
_FENCE = re.compile(r"^ {0,12}(`{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+$", re.M)
_PYTHON_TAGS = frozenset({"python", "py", "python3", ""})


def find_program(answer_text: str, cfg: CodeConfig) -> str | NoAnswer:
    """Return the last closed fenced block that counts as Python, or the reason why there is none to run."""
    programs: list[str] = []
    for tag, text in fenced_blocks(answer_text):
        is_python = tag == "python" if cfg.fence == "python" else tag.lower() in _PYTHON_TAGS
        if is_python:
            programs.append(text)
    if not programs:
        return NoAnswer(reason="no closed block of Python code")
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
