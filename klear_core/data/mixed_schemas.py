"""Define the row formats that hold math or code: RL training rows in verl's layout, and Klear's own format."""

from __future__ import annotations

from klear_core.data.code_schemas import code_reference, without_wrapping
from klear_core.data.fields import (
    Fields,
    RowError,
    Schema,
    answers_at,
    grade_at,
    keys,
    rating_at,
    text_at,
    user_message,
    value_at,
)
from klear_core.data.own_references import reference_from_cell
from klear_core.errors import DataError
from klear_core.types import MathReference, Reference


def _is_code(fields: Fields) -> bool:
    """Return whether a row is code: by `ability`, or if that names neither domain by `data_source`.

    In KlearReasoner `data_source` selects the verifier.
    """
    ability, data_source = text_at(fields, "ability"), text_at(fields, "data_source")
    if ability in ("math", "code"):
        return ability == "code"
    for mark, is_code in (("math", False), ("coder1", True)):
        if mark in data_source:
            return is_code
    raise RowError(
        "unknown_domain", "ability", f"neither ability {ability!r} nor data_source {data_source!r} says math or code"
    )


def _rl_question(fields: Fields) -> str:
    """Return the bare `question` if the row has one, else the user message without the source's instructions."""
    if fields.get("question"):
        return text_at(fields, "question")
    is_text = isinstance(fields.get("prompt"), str)  # DAPO-Math-17k-Processed
    text = text_at(fields, "prompt") if is_text else user_message(fields, "prompt")
    if "<|im_start|>" in text:
        raise RowError("templated_prompt", "prompt", "holds a chat template, and there is no bare `question` beside it")
    return without_wrapping(text)


def _rl_reference(fields: Fields) -> Reference:
    if _is_code(fields):
        return code_reference(fields)
    return MathReference(answers=answers_at(fields, "reward_model", "ground_truth"))


def _rl_rating(fields: Fields) -> float | None:
    """Return the rating from `level`, which SimpleRL's rows take from MATH (1 to 5)."""
    return rating_at(fields, "level", top=5)


def _klear_reference(fields: Fields) -> Reference:
    try:
        return reference_from_cell(value_at(fields, "reference"))
    except DataError as e:
        raise RowError("bad_reference", "reference", str(e)) from e


def _klear_rating(fields: Fields) -> float | None:
    """Return the rating from an optional `difficulty`: easy, medium or hard, or a share in [0, 1]."""
    if isinstance(fields.get("difficulty"), str):
        return grade_at(fields, "difficulty")
    return rating_at(fields, "difficulty", top=1)


MIXED_SCHEMAS = (
    Schema(  # Kwai-Klear/KlearReasoner-MathSub-30K and -CodeSub-15K
        name="klear_rl",
        signatures=keys("data_source prompt ability reward_model"),
        question=_rl_question,
        reference=_rl_reference,
        rating=_rl_rating,
    ),
    Schema(  # Skywork-OR1-RL-Data, DAPO-Math-17k, One-Shot RLVR, SimpleRL-Zoo
        name="verl",
        signatures=keys(
            "data_source prompt ability reward_model extra_info",
            "data_source prompt ability reward_model question answer",
        ),
        question=_rl_question,
        reference=_rl_reference,
        rating=_rl_rating,
    ),
    Schema(
        name="problem",
        signatures=keys("question reference"),
        question=lambda fields: text_at(fields, "question"),
        reference=_klear_reference,
        rating=_klear_rating,
    ),
)
