"""Read answers from any file by the places of its values, which `--fields` names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from klear_core.config.data import FieldMap
from klear_core.config.load import explained
from klear_core.data.formats.detect import by_name, mapped_schema, places_of, suggested_places, value_at_place
from klear_core.data.formats.fields import Fields, RowError
from klear_core.errors import ConfigError
from klear_core.evaluate.answers.layout_rows import AnswerRow, math_reference, response_in, score_in, scored, texts_in

_EVERY = "*"
_RESPONSE_NAMES = "response generation completion model_output output prediction generated_text answer text solution"
_SCORE_NAMES = "score correct is_correct passed ok graded reward acc"
_REFERENCE_WORDS = frozenset(["gold", "expected", "reference", "ground", "truth", "target"])
"""Words in the names of what an answer is compared with."""
_UNKNOWN_QUESTION = "PLACE_OF_THE_QUESTION"
"""Name in `suggested_places`."""


class AnswerPlaces(FieldMap):
    """Places of the values in rows of answers: those of a problem as a source's `fields` has them, and two more.

    `*` stands for every element of a list: `samples.*.text`.
    """

    model_config = ConfigDict(title="--fields")

    response: str = Field(min_length=1)
    """Place of the model's answer: a text, a chat that ends with it, or a list of several answers."""
    score: str = ""
    """Place of the score that the file states: 0 or 1, or true or false; a list where there are several answers."""
    rows: str = ""
    """Place of the list of rows, in a JSON file that is one object."""

    @model_validator(mode="after")
    def _has_reference(self) -> Self:
        if not self.answer and not self.tests:
            raise ValueError("neither answer nor tests has a place, so that nothing says what is right")
        return self


def places_in(text: str) -> AnswerPlaces:
    """Return the places that a value of `--fields` states (`question=a.b response=c`); raise ConfigError."""
    try:
        pairs = [pair.partition("=") for pair in shlex.split(text)]
    except ValueError as e:
        raise ConfigError(f"--fields {text!r}: {e}") from e
    bare = [key for key, sign, _ in pairs if not sign]
    if bare:
        raise ConfigError(f"--fields: {bare[0]!r} is not KEY=PLACE; one pair of quotes holds all of them")
    try:
        return AnswerPlaces.model_validate({key: place for key, _, place in pairs})
    except ValidationError as e:
        known = "'question=… answer=… response=… score=…'"
        raise ConfigError(f"--fields {text!r}: {explained(e, AnswerPlaces)}; all pairs stand in quotes: {known}") from e


def mapped_row(fields: Fields, places: AnswerPlaces) -> AnswerRow:
    """Return the problem and answers of a row that has them at these places; raise RowError."""
    schema = mapped_schema(places)
    reference = (
        math_reference(value_at_place(fields, places.answer), places.answer)
        if places.answer and not places.judge
        else schema.reference_of(fields, domain=None)
    )
    texts = _texts_at(fields, places.response)
    answers = scored(texts, _scores_at(fields, places.score, len(texts)) if places.score else None)
    return AnswerRow(question=schema.question(fields), reference=reference, answers=answers, problem="")


def _scores_at(fields: Fields, place: str, num_answers: int) -> list[object]:
    """Return the score of each answer, or None where it is empty; raise RowError for what is no score."""
    value = _values_at(fields, place)
    scores = value if isinstance(value, list) else [value]
    if len(scores) != num_answers:
        raise RowError("wrong_type", place, f"{len(scores)} scores for {num_answers} answers")
    for score in scores:
        if score not in (None, "") and score_in(score) is None:
            raise RowError("wrong_type", place, f"{score!r} is neither 0 nor 1, true nor false; leave score= out")
    return scores


def _texts_at(fields: Fields, place: str) -> tuple[str, ...]:
    value = _values_at(fields, place)
    if (said := _last_said(value, place)) is not None:
        return (said,)
    texts: list[str] = []
    for one in value if isinstance(value, list) else [value]:
        said = _last_said(one, place)
        texts += texts_in(one, place) if said is None else [said]
    if not texts:
        raise RowError("no_answer", place, "holds no answer")
    return tuple(texts)


def _last_said(value: object, place: str) -> str | None:
    """Return the text of a chat's last message, which the model must have said; None for any other value."""
    last = value[-1] if isinstance(value, list) and value else None
    if not isinstance(last, Mapping) or "role" not in last:
        return None
    if last["role"] != "assistant":
        raise RowError("no_answer", place, f"ends with a message of {last['role']}, not with the model's answer")
    return response_in(last, "content", where=f"{place}.")


def _values_at(fields: Fields, place: str) -> object:
    """Return the value at a place; where it has `*`, the list of the values at the rest of it in every element."""
    before, sign, after = place.partition(f".{_EVERY}")
    value = value_at_place(fields, before)
    if not sign:
        return value
    if not isinstance(value, list):
        raise RowError("wrong_type", before, f"expected a list, found {type(value).__name__}")
    rest = after.removeprefix(".")
    place_in_one = f".{rest}" if rest else ""
    return [_values_at({"": one}, place_in_one) for one in value]


def suggested_option(row: Fields) -> str:
    """Return the `--fields` for rows like this one, guessed from its keys and values."""
    named = _suggested(row)
    for place, first in _lists_in(row).items() if named["question"] == _UNKNOWN_QUESTION else ():
        inner = _suggested(first)
        if inner["question"] != _UNKNOWN_QUESTION:
            named = inner | {"rows": place}
            break
    pairs = [f"{key}={place}" for key, place in named.items()]
    quoted = [
        shlex.quote(pair) if re.search(r"[\s'\"\\]", pair) else pair for pair in pairs
    ]  # `*` needs no second pair
    return shlex.join(["--fields", " ".join(quoted)])


def _suggested(row: Fields) -> dict[str, str]:
    own = list(places_of(row))
    listed = [f"{place}.{_EVERY}.{key}" for place, first in _lists_in(row).items() for key in places_of(first)]
    responses = by_name([*own, *listed], _RESPONSE_NAMES)
    response = next((place for place in responses if _is_response(row, place)), "PLACE_OF_THE_RESPONSE")
    beside = [place for place in listed if place.rpartition(f"{_EVERY}.")[0] == response.rpartition(f"{_EVERY}.")[0]]
    scores = by_name(beside if _EVERY in response else own, _SCORE_NAMES)
    score = next((place for place in scores if _is_score(row, place)), "")
    others = [place for place in own if place not in (response, score)]
    found = suggested_places({place: value_at_place(row, place) for place in others})
    reference = found if len(found) > 1 else found | {"answer": "PLACE_OF_THE_ANSWER"}
    return reference | {"response": response} | ({"score": score} if score else {})


def _lists_in(row: Fields) -> dict[str, Fields]:
    """Return the first element of every list of objects in a row by its place; a chat is none."""
    found = {place: value_at_place(row, place) for place in places_of(row)}
    return {
        place: value[0]
        for place, value in found.items()
        if isinstance(value, list) and value and isinstance(value[0], Mapping) and "role" not in value[0]
    }


def _is_response(row: Fields, place: str) -> bool:
    if not _REFERENCE_WORDS.isdisjoint(re.split(r"[^a-z]+", place.lower())):
        return False
    try:
        return bool("".join(_texts_at(row, place)))
    except RowError:
        return False


def _is_score(row: Fields, place: str) -> bool:
    value = _values_at(row, place)
    values = value if isinstance(value, list) and value else [value]
    return all(score_in(one) is not None for one in values)
