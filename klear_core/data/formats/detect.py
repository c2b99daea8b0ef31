"""Detect the row format of a file: the published ones, mixed ones, and those that a config maps.

The formats are defined in `math_rows`, `code_rows` and `traces`, and the mixed ones below.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from klear_core.config.data import FieldMap, FileSource, HubSource
from klear_core.data.formats.code_rows import (
    CODE_SCHEMAS,
    code_reference,
    reference_in,
    with_instructions,
    without_wrapping,
)
from klear_core.data.formats.fields import (
    Fields,
    RowError,
    Schema,
    answers_at,
    grade_at,
    has_surrogate,
    keys,
    rating_at,
    text_at,
    user_message,
    value_at,
)
from klear_core.data.formats.math_rows import MATH_SCHEMAS
from klear_core.data.formats.references import custom_reference, reference_from_cell
from klear_core.data.formats.traces import TRACE_SCHEMAS
from klear_core.errors import ConfigError, DataError
from klear_core.types import CustomReference, Domain, MathReference, Reference

# ---- mapped schema ----
# Make a row format from the places that a source's `fields` declare.


_HELD = "value"
"""Key under which a value that was found is given to the readers of single fields."""


def mapped_schema(places: FieldMap) -> Schema:
    """Return the row format that has its values at these places."""
    return Schema(
        name="mapped",
        signatures=(),
        question=lambda fields: _question(fields, places),
        reference=_reference_reader(places),
        rating=lambda fields: _rating(fields, places),
    )


def value_at_place(fields: Fields, place: str) -> object:
    """Return the value at a place such as `reward_model.ground_truth` or `messages.0.content`; raise RowError."""
    if place in fields:
        return fields[place]
    value: object = fields
    done: list[str] = []
    for part in place.split("."):
        value = _parsed(value)
        done.append(part)
        is_index = isinstance(value, list) and part.isdecimal() and int(part) < len(value)
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and is_index:
            value = value[int(part)]
        else:
            raise RowError("missing_field", ".".join(done), "missing")
    return value


def _parsed(value: object) -> object:
    """Return what JSON text holds if more of a place follows it; other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _at(fields: Fields, place: str) -> Fields:
    return {_HELD: value_at_place(fields, place)}


def _named(place: str, error: RowError) -> RowError:
    return RowError(error.reason, place, error.detail)


def _question(fields: Fields, places: FieldMap) -> str:
    held = _at(fields, places.question)
    parsed = _parsed(held[_HELD])
    if _is_chat(parsed):
        held = {_HELD: parsed}
    try:
        is_chat = isinstance(held[_HELD], list)
        question = user_message(held, _HELD) if is_chat else text_at(held, _HELD)
    except RowError as e:
        raise _named(places.question, e) from e
    if places.starter_code:
        question = with_instructions(question, value_at_place(fields, places.starter_code))
    if has_surrogate(question):
        raise RowError("not_utf8", places.question, "a JSON text in it escapes one half of a surrogate pair")
    return question


def _is_chat(value: object) -> bool:
    """Return whether a value is a list of messages; a question may be JSON text, too (`[1, 2, 3]`)."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)


def _reference_reader(places: FieldMap) -> Callable[[Fields], Reference] | None:
    if places.judge:
        return lambda fields: _custom_reference(fields, places)
    if places.answer:
        return lambda fields: _math_reference(fields, places.answer)
    if places.tests:
        return lambda fields: _code_reference(fields, places)
    return None


def _math_reference(fields: Fields, place: str) -> MathReference:
    try:
        return MathReference(answers=answers_at(_at(fields, place), _HELD))
    except RowError as e:
        raise _named(place, e) from e


def _custom_reference(fields: Fields, places: FieldMap) -> CustomReference:
    try:
        return custom_reference(places.judge, value_at_place(fields, places.answer), domain=Domain.MATH)
    except DataError as e:
        raise RowError("bad_reference", places.answer, str(e)) from e


def _code_reference(fields: Fields, places: FieldMap) -> Reference:
    name = str(value_at_place(fields, places.fn_name) or "") if places.fn_name else ""
    try:
        return reference_in(value_at_place(fields, places.tests), fn_name=name)
    except RowError as e:
        raise _named(places.tests, e) from e


def _rating(fields: Fields, places: FieldMap) -> float | None:
    if not places.rating:
        return None
    held = _at(fields, places.rating)
    try:
        return grade_at(held, _HELD) or rating_at(held, _HELD, top=places.rating_top)
    except RowError as e:
        raise _named(places.rating, e) from e


# ---- mixed schemas ----
# Define the row formats that hold math or code: RL training rows in verl's layout, and Klear's own format.


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


# ---- schemas ----


SCHEMAS: tuple[Schema, ...] = (*MATH_SCHEMAS, *CODE_SCHEMAS, *MIXED_SCHEMAS, *TRACE_SCHEMAS)


def schema_for(source: FileSource | HubSource, first_row: Fields, *, where: str) -> Schema:
    """Return the format that the source names, or for `auto` the one that matches the keys of the first row.

    If one matching format's keys include another's, the more specific format wins. Raise ConfigError if no format
    matches or several do.
    """
    if source.fields is not None:
        return mapped_schema(source.fields)
    if source.row_schema != "auto":
        return next(s for s in SCHEMAS if s.name == source.row_schema)
    fits = [(s, signature) for s in SCHEMAS for signature in s.signatures if signature <= first_row.keys()]
    best: dict[str, Schema] = {}
    for schema, signature in fits:
        # `<` is strict subset: a signature is beaten by any matching signature with more keys.
        if not any(signature < other for _, other in fits):
            best[schema.name] = schema
    if len(best) == 1:
        return next(iter(best.values()))
    if not best:
        known = ", ".join(schema.name for schema in SCHEMAS)
        raise ConfigError(f"{where}: no known row format has the keys {sorted(first_row)}; known formats: {known}")
    raise ConfigError(
        f"{where}: a row with the keys {sorted(first_row)} could be any of {', '.join(sorted(best))}; "
        "set row_schema to the right one"
    )
