"""Make a row format from the places that a source's `fields` declare."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from klear_core.config.data import FieldMap
from klear_core.data.code_schemas import reference_in, with_instructions
from klear_core.data.fields import (
    Fields,
    RowError,
    Schema,
    answers_at,
    grade_at,
    has_surrogate,
    rating_at,
    text_at,
    user_message,
)
from klear_core.data.own_references import custom_reference
from klear_core.errors import DataError
from klear_core.types import CustomReference, Domain, MathReference, Reference

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
