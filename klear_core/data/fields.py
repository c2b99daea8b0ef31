"""What a published row format is, and reading single fields of its rows; what is missing or of the wrong type is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from klear_core.config.data import RowSchema
from klear_core.types import Reference

Fields = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """One format: how it is recognised, and what its rows say. The readers raise RowError and ignore keys that they do not know."""

    name: RowSchema
    signatures: tuple[frozenset[str], ...]
    """A row has this format if it has all keys of one of these sets."""
    question: Callable[[Fields], str]
    reference: Callable[[Fields], Reference]
    rating: Callable[[Fields], float | None]


def keys(*signatures: str) -> tuple[frozenset[str], ...]:
    """Signatures written as words."""
    return tuple(frozenset(s.split()) for s in signatures)


class RowError(Exception):
    """A row cannot be used: `reason` is the slug that ledgers count by, `field` where in the row, `detail` what was found."""

    def __init__(self, reason: str, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}")
        self.reason = reason
        self.field = field
        self.detail = detail


def value_at(fields: Fields, *path: str) -> object:
    """The value under nested keys; RowError `missing_field` if one of them is not there."""
    value: object = fields
    for i, key in enumerate(path):
        if not isinstance(value, Mapping) or key not in value:
            raise RowError("missing_field", ".".join(path[: i + 1]), "missing")
        value = value[key]
    return value


def text_at(fields: Fields, *path: str) -> str:
    """The non-empty string under nested keys, stripped."""
    value = value_at(fields, *path)
    if not isinstance(value, str):
        raise RowError("wrong_type", ".".join(path), f"expected a string, found {_shown(value)}")
    if not value.strip():
        raise RowError("empty_field", ".".join(path), "empty")
    return value.strip()


def answer_at(fields: Fields, *path: str) -> str:
    """The reference answer under nested keys: a string, or a number written as briefly as it can be.

    An absent one is RowError `no_reference`, for the question itself may be fine.
    """
    value = value_at(fields, *path)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise RowError("no_reference", ".".join(path), "the answer is empty")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError("wrong_type", ".".join(path), f"expected a string or a number, found {_shown(value)}")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return bare_answer(str(value))


def bare_answer(answer: str) -> str:
    """Without the dollar signs and the full stop that some sources set around an answer (`$3 \\sqrt{6}$.`)."""
    bare = answer.strip()
    if bare.endswith("$."):
        bare = bare[:-1]
    if len(bare) > 2 and bare.startswith("$") and bare.endswith("$") and "$" not in bare[1:-1]:
        bare = bare[1:-1].strip()
    return bare


def number_at(fields: Fields, *path: str) -> float:
    """The finite number under nested keys, also if it is written as a string."""
    value = value_at(fields, *path)
    try:
        number = float(value) if isinstance(value, str | int | float) else None
    except ValueError:
        number = None
    if number is None or not abs(number) < float("inf"):
        raise RowError("wrong_type", ".".join(path), f"expected a number, found {_shown(value)}")
    return number


def rating_at(fields: Fields, key: str, *, top: float) -> float | None:
    """A difficulty as a share of its scale's top; None where the row has none, or zero, which sources use for unknown."""
    if fields.get(key) is None:
        return None
    number = number_at(fields, key)
    if not 0 <= number <= top:
        raise RowError("bad_rating", key, f"{number:g} is outside of the scale, which ends at {top:g}")
    return number / top or None


def no_rating(_fields: Fields) -> None:
    """For sources that do not rate their problems."""


_GRADES = {"easy": 1 / 6, "medium": 1 / 2, "hard": 5 / 6}


def grade_at(fields: Fields, *path: str) -> float | None:
    """easy, medium or hard as the middle of its third; None where the row does not say."""
    try:
        grade = value_at(fields, *path)
    except RowError:
        return None
    return _GRADES.get(str(grade).lower())


def user_message(fields: Fields, key: str) -> str:
    """The text of the one user message in a chat; other roles are instructions of the source, not the question."""
    messages = value_at(fields, key)
    if not isinstance(messages, list):
        raise RowError("wrong_type", key, f"expected a list of messages, found {_shown(messages)}")
    users = [m for m in messages if isinstance(m, Mapping) and m.get("role") == "user"]
    if len(users) != 1:
        raise RowError("not_single_turn", key, f"expected one user message, found {len(users)}")
    return text_at(users[0], "content")


def _shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
