"""Define the row formats of published reasoning traces, from which the prompts alone are taken.

The traces are no references, because a teacher's answer may be wrong. So problems from these rows are distilled and not
judged, except rows of the OpenThoughts metadata, which hold the original solution or tests."""

from __future__ import annotations

from klear_core.data.formats.code_rows import ELSEWHERE, code_rating, reference_in, with_instructions, without_wrapping
from klear_core.data.formats.fields import (
    Fields,
    RowError,
    Schema,
    keys,
    no_rating,
    program_in,
    rating_at,
    text_at,
    user_message,
    value_at,
)
from klear_core.data.formats.math_rows import boxed_reference
from klear_core.types import Domain, Reference

_PYTHON = "Generate an executable Python function generated from the given prompt. "
_BY_STDIN = _PYTHON + (
    "The function should take stdin as input and print the output. Simply call the function after the definition."
)
_BY_CALL = _PYTHON + "Return the function body without invoking it at the final solution."
_BOXED = "Return your final response within \\boxed{}."
_OPENINGS = {_BY_STDIN: Domain.CODE, _BY_CALL: Domain.CODE, _BOXED: Domain.MATH}
"""Instructions that OpenThoughts puts before a question; they tell its domain."""


def _opening_of(prompt: str) -> str:
    return next((opening for opening in _OPENINGS if prompt.startswith(opening)), "")


def _conversation_question(fields: Fields) -> str:
    prompt = user_message(fields, "conversations")
    opening = _opening_of(prompt)
    question = without_wrapping(prompt.removeprefix(opening))
    if not question:
        raise RowError("empty_field", "conversations", "no question follows the instruction")
    return with_instructions(question, None) if opening == _BY_STDIN else question


def _conversation_domain(fields: Fields) -> Domain | None:
    """Return the domain by `domain` (OpenThoughts3), else by the instruction; None if neither tells."""
    if fields.get("domain") is not None:
        return _math_or_code(text_at(fields, "domain"), "domain")
    return _OPENINGS.get(_opening_of(user_message(fields, "conversations")))


def _math_or_code(value: str, key: str) -> Domain:
    """Return the domain of this name; raise RowError `other_domain` for science, puzzles and the like."""
    try:
        return Domain(value.lower())
    except ValueError:
        raise RowError("other_domain", key, f"{value!r} is neither math nor code") from None


def _metadata_question(fields: Fields) -> str:
    problem = text_at(fields, "problem")
    if _math_or_code(text_at(fields, "domain"), "domain") is Domain.MATH:
        return problem
    return with_instructions(problem, fields.get("starter_code"))


def _metadata_reference(fields: Fields) -> Reference:
    if _math_or_code(text_at(fields, "domain"), "domain") is Domain.MATH:
        return boxed_reference(fields, "ground_truth_solution")
    return reference_in(value_at(fields, "test_cases"))


def _question_of_ocr(fields: Fields, key: str) -> str:
    question = text_at(fields, key)
    if question != ELSEWHERE:
        return question
    place = f"row {fields.get('index')} of split {fields.get('split')!r} of {fields.get('dataset')}"
    raise RowError("question_elsewhere", key, f"it is {place}; name that data set in the source's `lookup`")


TRACE_SCHEMAS = (
    Schema(  # open-thoughts/OpenThoughts-114k, OpenThoughts2-1M, OpenThoughts3-1.2M (with domain, difficulty)
        name="open_thoughts",
        signatures=keys("conversations"),
        question=_conversation_question,
        reference=None,
        rating=lambda fields: rating_at(fields, "difficulty", top=10),
        domain=_conversation_domain,
    ),
    Schema(  # open-thoughts/OpenThoughts-114k, subset metadata
        name="open_thoughts_metadata",
        signatures=keys("problem ground_truth_solution domain test_cases starter_code"),
        question=_metadata_question,
        reference=_metadata_reference,
        rating=no_rating,
        solution=lambda fields: program_in(fields.get("ground_truth_solution")),
    ),
    Schema(  # nvidia/AceReason-1.1-SFT
        name="acereason_sft",
        signatures=keys("category source input output"),
        question=lambda fields: without_wrapping(text_at(fields, "input")),
        reference=None,
        rating=no_rating,
        domain=lambda fields: _math_or_code(text_at(fields, "category"), "category"),
    ),
    Schema(  # nvidia/OpenCodeReasoning
        name="open_code_reasoning",
        signatures=keys("input output license dataset split difficulty"),
        question=lambda fields: _question_of_ocr(fields, "input"),
        reference=None,
        rating=code_rating,
        domain=lambda _fields: Domain.CODE,
    ),
    Schema(  # nvidia/OpenCodeReasoning-2
        name="open_code_reasoning_2",
        signatures=keys("question r1_generation license dataset split difficulty"),
        question=lambda fields: _question_of_ocr(fields, "question"),
        reference=None,
        rating=code_rating,
        domain=lambda _fields: Domain.CODE,
    ),
)
