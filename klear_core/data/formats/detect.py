"""Detect the row format of a file: the published ones, mixed ones, and those that a config maps.

The modules `math_rows`, `code_rows` and `traces` define most formats; those that hold math or code are here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from klear_core.config.data import FieldMap, StoredSource
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
    best_fit,
    grade_at,
    has_surrogate,
    keys,
    program_in,
    published_program,
    rating_at,
    stated_cluster,
    text_at,
    user_message,
    value_at,
)
from klear_core.data.formats.math_rows import MATH_SCHEMAS
from klear_core.data.formats.references import custom_reference, reference_from_cell
from klear_core.data.formats.trace_rows import TRACE_SCHEMAS
from klear_core.errors import ConfigError, DataError
from klear_core.types import CustomReference, Domain, MathReference, Reference


def schema_for(source: StoredSource, first_row: Fields, *, where: str) -> Schema:
    """Return the format that the source names, or for `auto` the one that fits the keys of the first row best.

    Raise ConfigError if no format fits, or several equally well.
    """
    if source.fields is not None:
        return mapped_schema(source.fields)
    name: str | None = source.row_schema
    if name == "auto":
        signatures = {schema.name: schema.signatures for schema in SCHEMAS}
        name = best_fit(first_row, signatures, where=where, remedy="set row_schema to the right one")
        if name == "gsm8k" and _is_bare(first_row["answer"]):
            return mapped_schema(FieldMap(question="question", answer="answer"))
    for schema in SCHEMAS:
        if schema.name == name:
            return schema
    raise ConfigError(
        f"{where}: no known row format has the keys {sorted(first_row)}. Say where the values are, in the source's "
        f"settings: {suggested_line(first_row)} (docs/data.md, any other schema)"
    )


_MAX_BARE = 300
"""Characters of a bare answer of the first row; more are a worked solution that lacks its last line."""


def _is_bare(answer: object) -> bool:
    """Return whether an answer of the first row is one line or a number, and not a worked solution of GSM8K."""
    if isinstance(answer, str):
        is_line = len(answer.splitlines()) == 1 and len(answer) <= _MAX_BARE
        return is_line and bool(answer.strip()) and "####" not in answer
    return isinstance(answer, int | float)


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
        solution=lambda fields: _solution(fields, places),
        cluster=lambda fields: (
            str(value_at_place(fields, places.cluster)) if places.cluster else stated_cluster(fields)
        ),
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


def _question(fields: Fields, places: FieldMap) -> str:
    held = _at(fields, places.question)
    parsed = _parsed(held[_HELD])
    if _is_chat(parsed):
        held = {_HELD: parsed}
    try:
        is_chat = isinstance(held[_HELD], list)
        question = user_message(held, _HELD) if is_chat else text_at(held, _HELD)
    except RowError as e:
        raise RowError(e.reason, places.question, e.detail) from e
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
        raise RowError(e.reason, place, e.detail) from e


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
        raise RowError(e.reason, places.tests, e.detail) from e


def _solution(fields: Fields, places: FieldMap) -> str:
    """Return the published program; empty for a row that has none."""
    if not places.solution:
        return published_program(fields)
    try:
        return program_in(value_at_place(fields, places.solution))
    except RowError:
        return ""


def _rating(fields: Fields, places: FieldMap) -> float | None:
    if not places.rating:
        return None
    held = _at(fields, places.rating)
    try:
        return grade_at(held, _HELD) or rating_at(held, _HELD, top=places.rating_top)
    except RowError as e:
        raise RowError(e.reason, places.rating, e.detail) from e


_QUESTION_NAMES = """
question problem prompt query instruction problem_statement statement exercise task user_input input description
messages conversations conversation chat dialog text content body title q
"""
_ANSWER_NAMES = """
answer final_answer expected_answer correct_answer ground_truth reference_answer gold target solution expected
expected_output label result truth reference output response a
"""
_TEST_NAMES = "tests test_cases unit_tests test_list testcases input_output asserts test"
_OTHER_NAMES = "id uuid hash index idx source url type split subject domain level difficulty category"
_NO_ANSWER_NAMES = frozenset(_OTHER_NAMES.split())
_MOST_ANSWER_CHARS = 200
"""A longer text is a solution, and no answer that could be compared."""
_MOST_NESTED = 3


def suggested_line(row: Fields) -> str:
    """Return a line of TOML that says where a row has its question and reference, guessed from its keys and values."""
    found = suggested_places(row)
    pairs = ", ".join(f"{key} = {json.dumps(place, ensure_ascii=False)}" for key, place in found.items())
    return f"fields = {{ {pairs} }}" + ("" if len(found) > 1 else ', domain = "math"')


def suggested_places(row: Fields) -> dict[str, str]:
    """Return the likely places of a row's question and of its answer or tests, where it has any."""
    places = list(places_of(row))
    found: dict[str, str] = {"question": _question_place(row, places) or "PLACE_OF_THE_QUESTION"}
    others = [place for place in places if place != found["question"]]
    if answer := _first_readable(by_name(others, _ANSWER_NAMES), row, _is_answer):
        found["answer"] = answer
    elif tests := _first_readable(by_name(others, _TEST_NAMES), row, _is_tests):
        found["tests"] = tests
    elif answer := _first_readable(_unnamed(others, row), row, _is_answer):
        found["answer"] = answer
    return found


def places_of(value: object, before: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the places in a row that have no further keys below them, those near its top first."""
    held = _parsed(value) if before else value
    if not isinstance(held, Mapping) or depth == _MOST_NESTED:
        return
    nested: list[str] = []
    for key, below in held.items():
        if not key or (before and "." in key):
            continue  # no place can name it
        if not isinstance(_parsed(below), Mapping):
            yield f"{before}.{key}" if before else key
        elif "." not in key:
            nested.append(key)
    for key in nested:
        yield from places_of(held[key], f"{before}.{key}" if before else key, depth + 1)


def _question_place(row: Fields, places: Sequence[str]) -> str:
    if named := _first_readable(by_name(places, _QUESTION_NAMES), row, _is_question):
        return named
    texts = {place: value_at_place(row, place) for place in places}
    longest = sorted(places, key=lambda place: -len(str(texts[place])) if isinstance(texts[place], str) else 0)
    return _first_readable(longest, row, _is_question)


def by_name(places: Sequence[str], names: str) -> list[str]:
    """Return the places whose last key is one of the names, or has one as a word; the best name first."""
    ranks = {name: rank for rank, name in enumerate(names.split())}
    ranked: list[tuple[int, int, str]] = []
    for order, place in enumerate(places):
        key = re.sub(r"(?<=[a-z])(?=[A-Z])|[^\w]+", "_", place.rsplit(".", 1)[-1]).lower()
        words = [word for word in key.split("_") if len(word) > 1 and word in ranks]
        if key in ranks:
            ranked.append((ranks[key], order, place))
        elif words:
            ranked.append((len(ranks) + min(ranks[word] for word in words), order, place))
    return [place for _, _, place in sorted(ranked)]


def _unnamed(places: Sequence[str], row: Fields) -> list[str]:
    """Return the places with a value that may be the answer whatever they are called."""
    candidates = [place for place in places if _NO_ANSWER_NAMES.isdisjoint(re.split(r"[._\W]+", place.lower()))]
    return [place for place in candidates if value_at_place(row, place) is not None]


def _first_readable(places: Sequence[str], row: Fields, is_readable: Callable[[Fields, str], bool]) -> str:
    values = {place: value_at_place(row, place) for place in places}
    readable = (place for place, value in values.items() if value is not None and is_readable(row, place))
    # A null says nothing: other rows may have a value there, or the row is known by its keys alone.
    return next(chain(readable, (place for place, value in values.items() if value is None)), "")


def _is_question(row: Fields, place: str) -> bool:
    try:
        return bool(_question(row, FieldMap(question=place)))
    except RowError:
        return False


def _is_answer(row: Fields, place: str) -> bool:
    try:
        answers = _math_reference(row, place).answers
    except RowError:
        return False
    return all(len(answer) <= _MOST_ANSWER_CHARS and "\n" not in answer for answer in answers)


def _is_tests(row: Fields, place: str) -> bool:
    try:
        return bool(_code_reference(row, FieldMap(question="-", tests=place)))
    except RowError:
        return False


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
        rating=lambda fields: rating_at(fields, "level", top=5),  # as in MATH, in SimpleRL's rows
    ),
    Schema(  # Skywork-OR1-RL-Data, DAPO-Math-17k, One-Shot RLVR, SimpleRL-Zoo
        name="verl",
        signatures=keys(
            "data_source prompt ability reward_model extra_info",
            "data_source prompt ability reward_model question answer",
        ),
        question=_rl_question,
        reference=_rl_reference,
        rating=lambda fields: rating_at(fields, "level", top=5),  # as in MATH, in SimpleRL's rows
    ),
    Schema(
        name="problem",
        signatures=keys("question reference"),
        question=lambda fields: text_at(fields, "question"),
        reference=_klear_reference,
        rating=_klear_rating,
    ),
)


SCHEMAS: tuple[Schema, ...] = (*MATH_SCHEMAS, *CODE_SCHEMAS, *MIXED_SCHEMAS, *TRACE_SCHEMAS)
