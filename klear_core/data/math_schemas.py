"""Define the row formats of math sources and benchmarks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from klear_core.data.fields import (
    Fields,
    RowError,
    Schema,
    answer_at,
    keys,
    no_rating,
    rating_at,
    text_at,
    user_message,
)
from klear_core.types import MathReference

_TOP_OF_MATH_LEVELS = 5
"""Highest level in MATH, which rates problems 1 to 5."""
_TOP_OF_AOPS_SCALE = 10
"""Top of the Art of Problem Solving's scale of 1 to 10, which DeepScaleR's AIME rows and DeepMath use."""

_GSM8K_ANSWER = re.compile(r"####\s*(\S.*)$", re.MULTILINE)
_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}\b)")


def _one_answer(fields: Fields, *path: str) -> MathReference:
    return MathReference(answers=(answer_at(fields, *path),))


def _gsm8k_reference(fields: Fields) -> MathReference:
    """Return the number after `####` in the worked solution, without thousands commas."""
    match = _GSM8K_ANSWER.search(text_at(fields, "answer"))
    if match is None:
        raise RowError("no_reference", "answer", "no '#### ' before a final answer")
    return MathReference(answers=(_THOUSANDS_COMMA.sub("", match[1].strip()),))


def _klear_bench_reference(fields: Fields) -> MathReference:
    """Return the answer from Klear-Reasoner's benchmark files.

    AIME 2024 has it in `meta.answer`, AIME 2025 in `meta.solution` (the bare answer), HMMT in `answer`.
    """
    meta = fields.get("meta")
    if not isinstance(meta, Mapping):
        return _one_answer(fields, "answer")
    return _one_answer(fields, "meta", "answer" if "answer" in meta else "solution")


def _deepscaler_rating(fields: Fields) -> float | None:
    """Return the rating; rows with a `type` come from MATH (levels 1 to 5), all others use the 10-point scale."""
    return rating_at(fields, "difficulty", top=_TOP_OF_MATH_LEVELS if "type" in fields else _TOP_OF_AOPS_SCALE)


MATH_SCHEMAS = (
    Schema(
        name="klear_bench",
        signatures=keys("messages meta", "messages answer"),
        question=lambda fields: user_message(fields, "messages"),
        reference=_klear_bench_reference,
        rating=no_rating,
    ),
    Schema(
        name="gsm8k",
        signatures=keys("question answer"),
        question=lambda fields: text_at(fields, "question"),
        reference=_gsm8k_reference,
        rating=no_rating,
    ),
    Schema(
        name="math500",
        signatures=keys("problem answer subject level"),
        question=lambda fields: text_at(fields, "problem"),
        reference=lambda fields: _one_answer(fields, "answer"),
        rating=lambda fields: rating_at(fields, "level", top=_TOP_OF_MATH_LEVELS),
    ),
    Schema(
        name="amc23",
        signatures=keys("problem question answer"),
        question=lambda fields: text_at(fields, "problem"),
        reference=lambda fields: _one_answer(fields, "answer"),
        rating=no_rating,
    ),
    Schema(
        name="deepscaler",
        signatures=keys("problem answer difficulty"),
        question=lambda fields: text_at(fields, "problem"),
        reference=lambda fields: _one_answer(fields, "answer"),
        rating=_deepscaler_rating,
    ),
    Schema(
        name="deepmath",
        signatures=keys("prompt messages ground_truth difficulty"),
        question=lambda fields: text_at(fields, "prompt"),
        reference=lambda fields: _one_answer(fields, "ground_truth"),
        rating=lambda fields: rating_at(fields, "difficulty", top=_TOP_OF_AOPS_SCALE),
    ),
    Schema(
        name="nemo",
        signatures=keys("problem expected_answer"),
        question=lambda fields: text_at(fields, "problem"),
        reference=lambda fields: _one_answer(fields, "expected_answer"),
        rating=no_rating,
    ),
)
