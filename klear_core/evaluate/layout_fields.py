"""Read the fields that several layouts of answer files have in common: references, scores, counts and texts."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from klear_core.data.fields import Fields, RowError, answer_at, bare_answer, value_at
from klear_core.data.math_schemas import without_thousands_commas
from klear_core.types import MathReference
from klear_core.verify.math.text import boxed_texts

_AFTER_HASHES = re.compile(r"####\s*(\S.*)$", re.MULTILINE)


def math_reference(value: object, where: str) -> MathReference:
    """Return the reference that a target states: the answer itself, or at the end of a worked solution."""
    if isinstance(value, list | tuple) and value and not any(isinstance(v, list | tuple | Mapping) for v in value):
        answers = [math_reference(v, where).answers[0] for v in value]
        return MathReference(answers=tuple(dict.fromkeys(answers)))
    text = answer_at({where: value}, where)
    # GSM8K's solutions end in `#### 1,234`.
    after_hashes = _AFTER_HASHES.findall(text)
    if after_hashes:
        return MathReference(answers=(without_thousands_commas(after_hashes[-1].strip()),))
    # The last box: a worked solution may box results on its way.
    boxes = [box for box in boxed_texts(text) if box]
    return MathReference(answers=(bare_answer(boxes[-1] if boxes else text),))


def score_in(value: object) -> float | None:
    """Return a stated score of one answer: 0 or 1, also as true or false; None for anything else."""
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return float(value.strip().lower() == "true")
    if isinstance(value, bool | int | float) and value in (0, 1):
        return float(value)
    return None


def count_in(value: object) -> int | None:
    """Return a stated count: an integer from 0 on; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return None


def texts_in(value: object, where: str) -> tuple[str, ...]:
    """Return the answers in a field: a text, or lists of texts at any depth. Parquet may hold a list as its text."""
    if isinstance(value, str):
        if value.startswith("[") and value.endswith("]"):
            try:
                return texts_in(ast.literal_eval(value), where)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return (value,)
        return (value,)
    if not isinstance(value, list | tuple):
        raise RowError("no_text", where, "holds no generated text: a task that only scores given choices")
    found: list[str] = []
    for part in value:
        found += (part,) if isinstance(part, str) else texts_in(part, where)
    return tuple(found)


def response_in(fields: Fields, key: str, *, where: str = "") -> str:
    """Return an answer's text, which may be empty: a model can answer nothing."""
    value = value_at(fields, key)
    if not isinstance(value, str):
        raise RowError("wrong_type", where + key, f"an answer must be text, not {type(value).__name__}")
    return value


def first_text(fields: Fields, *names: str) -> str:
    """Return the first of these fields that is text or an integer; empty if there is none."""
    for name in names:
        if isinstance(fields.get(name), str | int):
            return str(fields[name])
    return ""


def row_name(key: str, name: str) -> str:
    """Return the name of a row; empty if `name` is."""
    return f"{key} {name}" if name else ""


def literal(value: object, *, opening: str = "[") -> object:
    """Return a list, or what else `opening` begins, that a column holds as its text; other values unchanged."""
    if isinstance(value, str) and value.startswith(opening):
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
    return value
