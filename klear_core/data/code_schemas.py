"""The row formats of code sources and benchmarks. Their tests are read by `verify.references`; here is where the question stands."""

from __future__ import annotations

import re
from collections.abc import Mapping

from klear_core.data.fields import Fields, RowError, Schema, grade_at, keys, no_rating, text_at, value_at
from klear_core.data.references import code_reference_from_row
from klear_core.errors import DataError
from klear_core.types import CodeReference

_OPENING = re.compile(
    r"^\s*(?:(?:You are an expert Python programmer\. )?You will be given a question \(problem specification\) and will generate a correct "
    r"Python program that matches the specification and passes all tests\.(?: You will NOT return anything except for the program\.?)?"
    r"|Please solve the programming task below using a self-contained code snippet in a markdown code block\.)"
    r"(?:\s*(?:### )?Question:)?\s*"
)

_TEST_FIELDS = frozenset(["tests", "input_output", "test_list", "test", "public_test_cases", "private_test_cases", "reward_model"])

_APPS_LEVELS = ("introductory", "interview", "competition")
_TACO_LEVELS = ("easy", "medium", "medium_hard", "hard", "very_hard")


def without_opening(prompt: str) -> str:
    """The prompt without the opening sentence of LiveCodeBench or rLLM: the same problem has the same text in every source."""
    return _OPENING.sub("", prompt).strip()


def code_reference(fields: Fields) -> CodeReference:
    """The tests of a row, whatever its format; RowError if there are none or they make no sense."""
    tests = fields.get("tests")
    if isinstance(tests, Mapping) and "fname" in tests:
        raise RowError("no_reference", "tests", f"stand in the file {tests['fname']!r}, which is not part of the row")
    if not _TEST_FIELDS & fields.keys():
        raise RowError("no_reference", "tests", f"no field has any; looked for {', '.join(sorted(_TEST_FIELDS))}")
    try:
        return code_reference_from_row(fields)
    except DataError as e:
        raise RowError("bad_reference", "tests", str(e)) from e


def with_starter(statement: str, starter: str) -> str:
    """A statement and how to answer it: by completing the starter code, or from standard input to standard output.

    The added words are fewer than a decontamination gram, so that they alone can never look like a leak.
    """
    if starter.strip():
        return f"{statement}\n\nComplete this code:\n```python\n{starter.rstrip()}\n```"
    return f"{statement}\n\nRead standard input, write standard output."


def _lcb_question(fields: Fields) -> str:
    """LiveCodeBench's own rows, or the prompts of QwQ's evaluation without their opening."""
    if "question_content" not in fields:
        return without_opening(text_at(fields, "prompt"))
    starter = value_at(fields, "starter_code")
    return with_starter(text_at(fields, "question_content"), starter if isinstance(starter, str) else "")


def _leetcode_question(fields: Fields) -> str:
    """v0.3 has the bare description and the starter code apart; v0.2 joins them in `query`, as rLLM does."""
    if "problem_description" in fields:
        return with_starter(text_at(fields, "problem_description"), text_at(fields, "starter_code"))
    return without_opening(text_at(fields, "query"))


def _leetcode_rating(fields: Fields) -> float | None:
    grade = grade_at(fields, "difficulty")
    return grade_at(fields, "meta", "difficulty") if grade is None else grade


def _mbpp_question(fields: Fields) -> str:
    """The statement with the first test, without which the function's name and arguments would be unknown."""
    tests = value_at(fields, "test_list")
    if not isinstance(tests, list) or not tests:
        raise RowError("no_reference", "test_list", "no test")
    return f"{text_at(fields, 'text')}\n\nIt must pass this test:\n```python\n{tests[0]}\n```"


def _apps_question(fields: Fields) -> str:
    starter = fields.get("starter_code")
    return with_starter(text_at(fields, "question"), starter if isinstance(starter, str) else "")


def _apps_rating(fields: Fields) -> float | None:
    """The middle of the level's part of the scale; APPS has three levels, TACO five."""
    level = str(fields.get("difficulty")).lower()
    scale = next((s for s in (_APPS_LEVELS, _TACO_LEVELS) if level in s), None)
    return None if scale is None else (scale.index(level) + 0.5) / len(scale)


CODE_SCHEMAS = (
    Schema(
        name="rllm_code",
        signatures=keys("problem tests"),
        question=lambda fields: without_opening(text_at(fields, "problem")),
        reference=code_reference,
        rating=no_rating,
    ),
    Schema(
        name="lcb",
        signatures=keys("question_content question_id platform starter_code", "prompt question_id contest_date tests"),
        question=_lcb_question,
        reference=code_reference,
        rating=lambda fields: grade_at(fields, "difficulty"),
    ),
    Schema(
        name="apps",
        signatures=keys("question input_output"),
        question=_apps_question,
        reference=code_reference,
        rating=_apps_rating,
    ),
    Schema(
        name="mbpp",
        signatures=keys("text test_list"),
        question=_mbpp_question,
        reference=code_reference,
        rating=no_rating,
    ),
    Schema(
        name="humaneval",
        signatures=keys("prompt test entry_point canonical_solution"),
        question=lambda fields: f"Complete this function:\n```python\n{text_at(fields, 'prompt')}\n```",
        reference=code_reference,
        rating=no_rating,
    ),
    Schema(
        name="leetcode",
        signatures=keys("query test entry_point"),
        question=_leetcode_question,
        reference=code_reference,
        rating=_leetcode_rating,
    ),
)
