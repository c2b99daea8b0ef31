"""Describe published row formats and read single fields of their rows; errors name the missing or mistyped field."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from klear_core.config.data import RowSchema
from klear_core.data.formats.code_tests import finite, is_number
from klear_core.errors import ConfigError
from klear_core.types import Domain, Dropped, Reference, UnverifiableReference

T = TypeVar("T")

READ = "read"
"""Ledger step of the rows that cannot be used."""
EMPTY_ROW = "empty_row"
"""Reason for dropping a row without any value."""
_FIRST_ROWS = 5
"""Number of rows in which a check looks for a usable one first."""
_MOST_FIRST_ROWS = 10_000
"""Number of rows in which it looks if these are unusable: some tables begin with rows of nulls."""


Fields = Mapping[str, object]
Name = TypeVar("Name", bound=str)


_SOLUTION_KEYS = ("solution", "solutions")
_FENCED = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL)
_MOST_SOLUTIONS = 20
"""Published programs that are searched for one in Python."""
_PYTHON = (3, "PYTHON3", "python", "python3", "Python 3")
"""The language in rows that name it, as in CodeContests."""


def published_program(fields: Fields) -> str:
    """Return the first valid Python program in the row's field `solution` or `solutions`; empty if there is none."""
    return program_in(next((fields[key] for key in _SOLUTION_KEYS if fields.get(key)), None))


def program_in(published: object) -> str:
    """Return the first valid Python program in a published solution: a text, a list of texts or the JSON text of one,
    or CodeContests' columns `solution` and `language`. Empty if there is none.
    """
    if isinstance(published, str) and published.lstrip().startswith("["):
        try:
            published = json.loads(published)
        except (ValueError, RecursionError):
            return ""
    if isinstance(published, Mapping):
        programs, languages = published.get("solution"), published.get("language")
        if not isinstance(programs, list) or not isinstance(languages, list):
            return program_in(programs)
        published = [program for program, language in zip(programs, languages, strict=False) if language in _PYTHON]
    texts = published if isinstance(published, list) else [published]
    for text in texts[:_MOST_SOLUTIONS]:
        fenced = _FENCED.search(text) if isinstance(text, str) else None
        program = fenced[1] if fenced else text
        if isinstance(program, str) and _is_python(program):
            return program
    return ""


def _is_python(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes
            return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


_CLUSTER_KEYS = ("cluster", "contest_id", "subject", "family", "template")


def stated_cluster(fields: Fields) -> str:
    """Return the contest, subject or template that a row says its problem is of; empty if it says none."""
    for key in _CLUSTER_KEYS:
        value = fields.get(key)
        if isinstance(value, str | int) and value != "":
            return str(value)
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """One row format: the keys that identify it and its field readers, which raise RowError and ignore unknown keys."""

    name: RowSchema
    signatures: tuple[frozenset[str], ...]
    """A row has this format if it has all keys of one of these sets."""
    question: Callable[[Fields], str]
    reference: Callable[[Fields], Reference] | None
    """None if rows of this format have no reference, so that they can be distilled and not judged."""
    rating: Callable[[Fields], float | None]
    domain: Callable[[Fields], Domain | None] = field(default=lambda _fields: None)
    """For formats without references: the domain that a row states, None if it does not."""
    solution: Callable[[Fields], str] = published_program
    """For code problems: the program that the row publishes as a solution, empty if there is none in Python."""
    cluster: Callable[[Fields], str] = field(default=stated_cluster)
    """Contest, subject or template of the row's problem; empty if it states none."""

    def reference_of(self, fields: Fields, *, domain: Domain | None) -> Reference:
        """Return the row's reference; raise RowError. `domain` is that of rows which show none."""
        if self.reference is not None:
            return self.reference(fields)
        stated = self.domain(fields) or domain
        if stated is None:
            raise RowError(
                "unknown_domain", "domain", "nothing in the row says math or code; set the source's `domain`"
            )
        return UnverifiableReference(domain=stated, why=f"rows in the format {self.name} have no reference")


def keys(*signatures: str) -> tuple[frozenset[str], ...]:
    """Return signatures (sets of keys), each given as a string of space-separated keys."""
    return tuple(frozenset(s.split()) for s in signatures)


def best_fit(row: Fields, formats: Mapping[Name, Sequence[frozenset[str]]], *, where: str, remedy: str) -> Name | None:
    """Return the format whose signature has the most keys of those that the row has whole; None if none fits.

    `formats` has the signatures by name. ConfigError, with the remedy, if several formats fit equally well.
    """
    sizes: dict[Name, int] = {}
    for name, signatures in formats.items():
        fitting = [len(signature) for signature in signatures if signature <= row.keys()]
        if fitting:
            sizes[name] = max(fitting)
    best = [name for name, size in sizes.items() if size == max(sizes.values())]
    if len(best) > 1:
        raise ConfigError(
            f"{where}: a row with the keys {sorted(row)} could be any of {', '.join(sorted(best))}; {remedy}"
        )
    return best[0] if best else None


class RowError(Exception):
    """A row cannot be used.

    `reason` is the slug that ledgers count by, `field` the place in the row, `detail` the value that was found.
    """

    def __init__(self, reason: str, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}")
        self.reason = reason
        self.field = field
        self.detail = detail


def has_surrogate(text: str) -> bool:
    """Return whether a text has half a surrogate pair, which no file in UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


_ID_KEYS = ("id", "problem_id", "question_id", "uuid", "unique_id", "task_id", "hash", "uid")


def is_empty_row(fields: Fields) -> bool:
    """Return whether no key of a row has a value, as in the padding of some tables."""
    return not any(value is not None and value != "" for value in fields.values())


def stated_id(fields: Fields) -> str:
    """Return the id that the source gave the row; empty if it gave none."""
    for key in _ID_KEYS:
        value = fields.get(key)
        if isinstance(value, str | int) and value != "":
            return str(value)[:80]
    return ""


def value_at(fields: Fields, *path: str) -> object:
    """Return the value under nested keys; raise RowError `missing_field` if one of them is absent."""
    value: object = fields
    for i, key in enumerate(path):
        if not isinstance(value, Mapping) or key not in value:
            raise RowError("missing_field", ".".join(path[: i + 1]), "missing")
        value = value[key]
    return value


def text_at(fields: Fields, *path: str) -> str:
    """Return the non-empty string under nested keys, stripped."""
    value = value_at(fields, *path)
    if not isinstance(value, str):
        raise RowError("wrong_type", ".".join(path), f"expected a string, found {_shown(value)}")
    if not value.strip():
        raise RowError("empty_field", ".".join(path), "empty")
    return value.strip()


def answer_at(fields: Fields, *path: str) -> str:
    """Return the reference answer under nested keys as text; a number in its shortest form (7.0 gives "7").

    An empty answer raises RowError `no_reference`, because the question itself may be fine.
    """
    value = value_at(fields, *path)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise RowError("no_reference", ".".join(path), "the answer is empty")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError("wrong_type", ".".join(path), f"expected a string or a number, found {_shown(value)}")
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise RowError("wrong_type", ".".join(path), f"expected a finite number, found {value}")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return bare_answer(str(value))


def bare_answer(answer: str) -> str:
    """Return the answer without the dollar signs and full stop that some sources put around it (`$3 \\sqrt{6}$.`)."""
    bare = answer.strip()
    if bare.endswith("$."):
        bare = bare[:-1]
    if len(bare) > 2 and bare.startswith("$") and bare.endswith("$") and "$" not in bare[1:-1]:
        bare = bare[1:-1].strip()
    return bare


def answers_at(fields: Fields, *path: str) -> tuple[str, ...]:
    """Return the accepted answers under nested keys: one, or several in a list or in the JSON text of a list of texts.

    Skywork-OR1 has `["\\\\frac{1}{2}"]`. The text `[1, 2]` is an answer itself, an interval or a list.
    """
    value = value_at(fields, *path)
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = None
        is_texts = isinstance(parsed, list) and bool(parsed) and all(isinstance(text, str) for text in parsed)
        value = parsed if is_texts else value
    if not isinstance(value, list):
        return (answer_at(fields, *path),)
    if not value:
        raise RowError("no_reference", ".".join(path), "the list of answers is empty")
    return tuple(answer_at({"answer": one}, "answer") for one in value)


def number_at(fields: Fields, *path: str) -> float:
    """Return the finite number under nested keys; it may be given as a string."""
    value = value_at(fields, *path)
    number = finite(value) if isinstance(value, str | int | float) else None
    if number is None:
        raise RowError("wrong_type", ".".join(path), f"expected a number, found {_shown(value)}")
    return number


def rating_at(fields: Fields, key: str, *, top: float) -> float | None:
    """Return a difficulty as a share of the scale's top; None if it is absent or zero (zero means unknown)."""
    if fields.get(key) is None:
        return None
    number = number_at(fields, key)
    if not 0 <= number <= top:
        raise RowError("bad_rating", key, f"{number:g} is outside of the scale, which ends at {top:g}")
    return number / top or None


def no_rating(_fields: Fields) -> None:
    """Return None: the rating reader of sources that do not rate their problems."""


_GRADES = {"easy": 1 / 6, "medium": 1 / 2, "hard": 5 / 6}


def grade_at(fields: Fields, *path: str) -> float | None:
    """Return easy, medium or hard as the midpoint of its third of [0, 1]; None if the row has no such grade."""
    try:
        grade = value_at(fields, *path)
    except RowError:
        return None
    return _GRADES.get(str(grade).lower())


_USER_ROLES = ("user", "human")


def is_from_user(message: object) -> bool:
    """Return whether a chat's message is a user's, in either layout (see `user_message`)."""
    # A table in which rows have either layout has the keys of both, some of them null.
    return isinstance(message, Mapping) and (message.get("role") or message.get("from")) in _USER_ROLES


def user_message(fields: Fields, *path: str) -> str:
    """Return the text of the only user message in a chat; other roles hold the source's instructions.

    Both layouts are read: `role` and `content`, and ShareGPT's `from` and `value`, where the user is called human too.
    """
    messages, key = value_at(fields, *path), ".".join(path)
    if not isinstance(messages, list):
        raise RowError("wrong_type", key, f"expected a list of messages, found {_shown(messages)}")
    users = [message for message in messages if is_from_user(message)]
    if len(users) != 1:
        raise RowError("not_single_turn", key, f"expected one user message, found {len(users)}")
    return message_text(users[0])


def message_text(message: Fields) -> str:
    """Return the text of a chat's message, in either layout, as one string or as a list of parts with text.

    Raise RowError `not_text` for an image and the like, without which the text would be another question.
    """
    key = "content" if message.get("role") else "value"
    parts = message.get(key)
    if not isinstance(parts, list):
        return text_at(message, key)
    texts = []
    for part in parts:
        # A table has the keys of all kinds of parts in each of them, some of them null: only `type` tells the kind.
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind != "text":
            raise RowError("not_text", key, f"expected parts of type 'text', found one of type {kind!r}")
        text = value_at(part, "text")
        if not isinstance(text, str):
            raise RowError("wrong_type", key, f"expected a string as a part's text, found {_shown(text)}")
        texts.append(text)
    return text_at({key: "".join(texts)}, key)


_OPTION_KEYS = ("options", "choices")
"""Columns of multiple choice: a list, or an object whose values are options or lists of them."""
_IMAGE_KEYS = ("image", "images")


def check_is_whole(question: str, fields: Fields) -> None:
    """Raise RowError if other columns of the row hold an image, or options half of which the question does not show.

    Not all of them: a number that is an option may stand in the question by chance.
    """
    for key in _IMAGE_KEYS:
        if fields.get(key):
            raise RowError("not_text", key, "the question has an image")
    for key in _OPTION_KEYS:
        options = _options_in(fields.get(key))
        missing = [option for option in options if option not in question]
        if missing and 2 * len(missing) >= len(options):
            raise RowError(
                "options_left_out",
                key,
                f"the question lacks {missing[0][:60]!r} and its other options: write them into the question, or say "
                "by the source's `fields` that they do not belong to it",
            )


def _options_in(value: object) -> list[str]:
    """Return the options of a row; empty if the value is no list or object."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if not isinstance(value, list):
        return []
    return [text for one in value for text in (_options_in(one) or [str(one).strip()]) if one is not None]


def _shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"


# ---- contest ids ----
# Name the contest problem that a row holds, if the row says so; a problem has one name in all sources.


_URLS = (
    (
        re.compile(r"codeforces\.com/(?:problemset/problem|contest)/(\d+)/(?:problem/)?([A-Za-z]\d?)\b"),
        "codeforces/{}{}",
    ),
    (re.compile(r"atcoder\.jp/contests/\w+/tasks/(\w+)"), "atcoder/{}"),
    (re.compile(r"leetcode\.com/problems/([\w-]+)"), "leetcode/{}"),
)
_ATCODER_ID = re.compile(r"a[brgh]c\d{3}_\w{1,2}")
_CODEFORCES_ID = re.compile(r"(\d{1,4})[_/]([A-Za-z]\d?)")


def contest_id(fields: Fields) -> str:
    """Return a name such as `atcoder/abc365_b`, `codeforces/1873a` or `leetcode/two-sum`; empty if the row has none.

    LeetCode problems are named by their slug: LeetCode numbers them in two ways, and sources use either.
    """
    for key in ("url", "link", "problem_url"):
        found = _from_url(str(fields.get(key, "")))
        if found:
            return found
    for key in ("question_id", "id", "problem_id"):
        found = _from_id(str(fields.get(key, "")))
        if found:
            return found
    return _leetcode_slug(fields)


def _from_url(url: str) -> str:
    for pattern, name in _URLS:
        match = pattern.search(url)
        if match:
            return name.format(*match.groups()).lower()
    return ""


def _from_id(text: str) -> str:
    if _ATCODER_ID.fullmatch(text):
        return f"atcoder/{text}"
    match = _CODEFORCES_ID.fullmatch(text)
    return f"codeforces/{match[1]}{match[2]}".lower() if match else ""


def _leetcode_slug(fields: Fields) -> str:
    """Return the slug of a LiveCodeBench row (its title) or of a LeetCodeDataset row (its task id)."""
    is_leetcode = fields.get("platform") == "leetcode" or str(fields.get("entry_point", "")).startswith("Solution()")
    if not is_leetcode:
        return ""
    name = str(fields.get("question_title") or fields.get("task_id") or "")
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"leetcode/{slug}" if slug else ""


# ---- limits ----
# Read the time and memory limits that rows state: as numbers, or as text with a unit (`2.0 seconds`).


_QUANTITY = re.compile(r"(?:(\d+(?:\.\d+)?)\s*(?:-|to)\s*)?(\d+(?:\.\d+)?)\s*([a-z]+)\.?")
"""A number with its unit, or a range, of which the upper end counts (`0.5 - 2 seconds`)."""
_SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "milliseconds": 1e-3}
_MEGABYTES = {"mb": 1.0, "megabyte": 1.0, "megabytes": 1.0, "kb": 2.0**-10, "kilobytes": 2.0**-10}
_MEGABYTES |= {"gb": 2.0**10, "gigabyte": 2.0**10, "gigabytes": 2.0**10, "bytes": 2.0**-20}
_MOST_SECONDS, _MOST_MEGABYTES = 86_400.0, 2.0**20
"""A day and a terabyte. A larger limit is a mistake in the row, and more than the sandbox can set."""


def seconds_in(value: object) -> float | None:
    """Return a time limit; None if the row states none that can be read, so that the limit of the settings holds."""
    return _amount(value, _SECONDS, most=_MOST_SECONDS)


def megabytes_in(value: object) -> int | None:
    """Return a memory limit; None if the row states none that can be read, or less than a megabyte."""
    amount = _amount(value, _MEGABYTES, most=_MOST_MEGABYTES)
    return None if amount is None or amount < 1 else int(amount)


def _amount(value: object, units: dict[str, float], *, most: float) -> float | None:
    """Return a positive number, `most` at most, in the unit that counts 1."""
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value.strip().lower())
        if match is None or match[3] not in units:
            return None
        value = float(match[2]) * units[match[3]]
    number = finite(value) if is_number(value) else None
    return number if number is not None and 0 < number <= most else None


def head_of(rows: Iterator[T | Dropped]) -> list[T | Dropped]:
    """Return the first few rows; more of them, up to the first usable one, if none of these is usable."""
    head = list(islice(rows, _FIRST_ROWS))
    if any(not isinstance(row, Dropped) for row in head):
        return head
    for row in islice(rows, _MOST_FIRST_ROWS):
        head.append(row)
        if not isinstance(row, Dropped):
            break
    return head
