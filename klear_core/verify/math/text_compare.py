"""Compare two answers by text: take off units and percent signs, read statements, and compare plain numbers.

What this cannot decide becomes a comparison for algebra.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from klear_core.config.verify import MathConfig
from klear_core.verify.math.answer_text import same_text_or_integers
from klear_core.verify.math.numbers import as_text, in_radians, is_numeric, numbers_agree, plain_number, spoken_number
from klear_core.verify.math.relations import (
    CONNECTIVE,
    Statement,
    bracket_depths,
    compare_statements,
    listed,
    read_statement,
    split_sides,
)
from klear_core.verify.math.units import (
    NO_UNIT,
    Unit,
    cents_of,
    is_glued_letter,
    read_compound,
    same_unit,
    split_unit,
    units_fit,
)
from klear_core.verify.math.variables import with_same_bound_names
from klear_core.verify.math.words import ORDINALS

ONE_WRAPPER = re.compile(r"\\(?:text|textrm|mbox|mathrm)\s*\{([^{}]*)\}")
_LETTER_LIST = re.compile(r"[A-Za-z](?:\s*,\s*[A-Za-z])+")
_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\((?:\\?[A-Za-z]+|\d+)\))?|\\(?:text|mathrm)\{[^{}]*\}")
_PERCENT = re.compile(
    r"(?:\\?%|\\(?:text|mathrm|mbox|textrm)\s*\{\s*(?:\\?%|percent|per cent)\s*\}|\\?\s*\b(?:percent|per cent))$", re.I
)
_TEXTS = re.compile(r"(?<!_)(?<!_\{)\\(?:text|textrm|mbox|textbf|textit)\s*\{([^{}]*)\}")
_QUALIFIERS = re.compile(
    r"(?<![\\A-Za-z])(?:or|more|less|fewer|least|most|greater|not|than"
    r"|about|approximately|roughly|nearly|almost|under|over|up)(?![A-Za-z])",
    re.I,
)
_FUNCTION_NAMES = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lcm gcd min max mod re im det tr cis"
)
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_NAME_BEFORE = re.compile(r"^\s*\\(?:text|textrm|mbox|mathrm)\s*\{[^{}]*\}\s*(?==)")
_TEXT_BEHIND = re.compile(r"(?<=[\d})])\s*\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}$")
_DEGREE_WORD = re.compile(r"(?<=\d)()\s*(?:\\(?:text|mathrm)\s*\{\s*degrees?\s*\}|degrees?)(?=$|\s*[,)])")
_RADIAN_WORD = re.compile(r"\s*(?:\\(?:text|mathrm)\s*\{\s*rad(?:ian)?s?\s*\}|(?<![A-Za-z\\])rad(?:ian)?s?)\s*")
_RADIANS = re.compile(
    rf"\\pi(?![a-zA-Z])|\\arc(?:sin|cos|tan|cot)|\\(?:sin|cos|tan|cot)\s*\^\s*\{{?-1|{_RADIAN_WORD.pattern}"
)
_DEGREE_SIGNS = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))(?!\s*\\?(?:text|mathrm|[CF]))")
_FUNCTION_OF = re.compile(r"[a-zA-Z]\s*\([a-xz]\)")
_LETTER_Y = re.compile(r"(?<![\\a-zA-Z])y(?![a-zA-Z])")
_APPROX = re.compile(r"\\(?:approx|simeq|thickapprox)(?![a-zA-Z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A reference and an answer that algebra must compare."""

    gold: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgebraComparison:
    """The comparisons left to algebra: an answer is right iff all pairs of at least one alternative are equal."""

    alternatives: tuple[tuple[Pair, ...], ...]


def compare_values(gold: str, answer: str, cfg: MathConfig) -> bool | AlgebraComparison:
    """Return the verdict on two normalised texts, or the comparison that algebra must make."""
    named = with_same_bound_names(gold, answer)
    if named is None:
        return False
    gold, answer = _in_one_angle_unit(*named)
    gold, gold_percent = _strip_percent(gold)
    answer, answer_percent = _strip_percent(answer)
    sides = _values(gold, answer, cfg)
    measured = [answer] * gold_percent + [gold] * answer_percent
    if sides is None or (cfg.units != "ignore" and any(split_unit(text)[1].dimensions for text in measured)):
        return False
    pairs = [sides]  # the readings of `73%`, one of which must be equal: as 73, as 0.73, or both
    if gold_percent != answer_percent and cfg.percent != "ignore":
        gold_value, answer_value = sides
        hundredth = (gold_value, _hundredth(answer_value)) if answer_percent else (_hundredth(gold_value), answer_value)
        pairs = [hundredth] if cfg.percent == "value" else [*pairs, hundredth]
    alternatives: list[tuple[Pair, ...]] = []
    for gold_side, answer_side in pairs:
        found = _compare_bare(gold_side, answer_side, cfg)
        if found is True:
            return True
        alternatives += found.alternatives if isinstance(found, AlgebraComparison) else ()
    return AlgebraComparison(alternatives=tuple(alternatives)) if alternatives else False


def _in_one_angle_unit(gold: str, answer: str) -> tuple[str, str]:
    """Write degrees in radians where the other text is in radians; without degree signs in lists and tuples."""
    texts = (_DEGREE_WORD.sub(r"\1^\\circ", gold), _DEGREE_WORD.sub(r"\1^\\circ", answer))
    is_degrees = [r"\circ" in text for text in texts]
    is_radians = [
        _RADIANS.search(text) is not None and not degrees for text, degrees in zip(texts, is_degrees, strict=True)
    ]
    if any(is_degrees) and any(is_radians):
        in_one = (in_radians(_RADIAN_WORD.sub("", text)) for text in texts)
        return next(in_one), next(in_one)
    return (gold, answer) if "," not in gold + answer else (_DEGREE_SIGNS.sub("", gold), _DEGREE_SIGNS.sub("", answer))


def _values(gold: str, answer: str, cfg: MathConfig) -> tuple[str, str] | None:
    """Return both values, the answer's converted to the reference's unit; None if their units cannot be equal."""
    if cfg.units == "ignore":
        gold, answer = _without_text_behind(gold), _without_text_behind(answer)
    gold_value, gold_unit = split_unit(gold)
    answer_value, answer_unit = _split_answer(answer, gold_value, gold_unit)
    gold_is_product = is_glued_letter(gold, gold_value) and answer_unit == NO_UNIT
    answer_is_product = is_glued_letter(answer, answer_value) and gold_unit == NO_UNIT and answer[-1] in gold
    if gold_is_product or answer_is_product:
        return gold, answer  # `2m` is twice m; it is two meters only against a plain reference `2`
    gold_unit, answer_unit = cents_of(gold_unit, answer_unit), cents_of(answer_unit, gold_unit)
    if cfg.units == "strict" and not same_unit(gold_unit, answer_unit):
        return None
    if cfg.units == "compatible" and not units_fit(gold_unit, answer_unit):
        return None
    ratio = Fraction(answer_unit.scale)
    is_share = not gold_unit.dimensions and 1 in (gold_unit.size, answer_unit.size)  # 5 hours per day are 5
    if cfg.units == "compatible" and gold_unit.dimensions == answer_unit.dimensions and not is_share:
        ratio *= answer_unit.size / gold_unit.size
    return _scaled(gold_value, Fraction(gold_unit.scale)), _scaled(answer_value, ratio)


def _split_answer(answer: str, gold_value: str, gold_unit: Unit) -> tuple[str, Unit]:
    """Return the answer's value and unit; `1 hour 30 minutes` is 1.5 if that is a reference without a unit."""
    compound = read_compound(answer)
    number = plain_number(gold_value) if compound is not None and gold_unit == NO_UNIT else None
    if compound is not None and number is not None:
        total, smallest, largest = compound
        in_largest = total * smallest.size / largest.size
        if number.value == in_largest:
            return as_text(in_largest), largest
    return split_unit(answer)


def _without_text_behind(text: str) -> str:
    value, unit = split_unit(text)
    return text if unit != NO_UNIT else _TEXT_BEHIND.sub("", value).strip()


def _scaled(value: str, factor: Fraction) -> str:
    value = in_digits(value)
    if factor == 1:
        return value
    number = plain_number(value)
    # A rounded number stays as it is written: a fraction in its place would count as exact.
    if number is not None and not number.is_rounded:
        return as_text(number.value * factor)
    return rf"({value}) \cdot {as_text(factor)}"


def _compare_bare(gold: str, answer: str, cfg: MathConfig) -> bool | AlgebraComparison:
    """Compare two values without their units, by text where that is enough."""
    same = _same_value(gold, answer, cfg)
    if same is not None:
        return same
    if cfg.units != "ignore" and _extra_words(gold) != _extra_words(answer):
        return False
    alternatives: list[tuple[Pair, ...]] = []
    gold, answer = _with_names_apart(gold, answer), _with_names_apart(answer, gold)
    gold_statement, answer_statement = read_statement(_exact(gold)), read_statement(_exact(answer))
    lengths = {length for length in map(num_listed, (gold_statement, answer_statement)) if length is not None}
    if len(lengths) > 1:
        return False  # algebra compares lists as sets, in which a value that is stated twice counts once
    for pairs in compare_statements(gold_statement, answer_statement):
        chained = [pair for gold_side, answer_side in pairs for pair in _chain(gold_side, answer_side)]
        verdicts = [_same_value(pair.gold, pair.answer, cfg) for pair in chained]
        if False in verdicts:
            continue
        if all(verdicts):
            return True
        undecided = (pair for pair, verdict in zip(chained, verdicts, strict=True) if verdict is None)
        apart = (Pair(gold=signs_apart(pair.gold), answer=signs_apart(pair.answer)) for pair in undecided)
        alternatives.append(tuple(apart))
    return AlgebraComparison(alternatives=tuple(alternatives)) if alternatives else False


def _with_names_apart(text: str, other: str) -> str:
    """Return `a=3, b=3` for `a=b=3` where the other text has several values too."""
    *names, value = [side.strip() for side in text.split("=")]
    if len(names) < 2 or "," not in other or not all(_NAME.fullmatch(name) for name in names) or "," in value:
        return text
    return ", ".join(f"{name}={value}" for name in names)


def _same_value(gold: str, answer: str, cfg: MathConfig) -> bool | None:
    """Compare equal texts and plain numbers; None for all other texts."""
    same = same_text_or_integers(gold, answer)
    if same is not None:
        return same
    gold_number, answer_number = plain_number(gold), plain_number(answer)
    if gold_number is None or answer_number is None:
        return None
    return numbers_agree(gold_number, answer_number, cfg.rounding_digits)


def _extra_words(text: str) -> list[str]:
    """Return words that are not units and change the meaning: `4 \\text{ or more}` is not 4."""
    if r"\begin" in text:
        return []
    text = CONNECTIVE.sub(",", _NAME_BEFORE.sub("", text))
    words = re.findall(r"[^\W\d_]{2,}|[^\W\d_a-zA-Z]", " ".join(_TEXTS.findall(text)).lower())
    bare = [word.lower() for word in _QUALIFIERS.findall(_TEXTS.sub(" ", text))]
    return [word for word in words if word not in _FUNCTIONS] + bare


def _exact(text: str) -> str:
    """Remove approximation signs: `\\approx 3.1` becomes 3.1, and `x \\approx 3.1` becomes x=3.1.

    Of `\\frac{2}{3} \\approx 0.67` the left side is kept, because it is the exact one.
    """
    left, *right = _APPROX.split(text)
    if not right:
        return text
    if not left.strip():
        return right[0].strip()
    return f"{left.strip()}={right[0].strip()}" if _NAME.fullmatch(left.strip()) else left.strip()


def _chain(gold: str, answer: str) -> tuple[Pair, ...]:
    """Return the pairs that must be equal if the answer has equals signs.

    `2+3=5` is right for 5 only if every numeric side equals 5; algebra alone would look at the last side. `x=5` is 5
    with a name, and two equations with the same left side are compared by their right sides.
    """
    gold_sides, answer_sides = split_sides(gold), split_sides(answer)
    if len(gold_sides) == len(answer_sides) == 2 and gold_sides[0].replace(" ", "") == answer_sides[0].replace(" ", ""):
        return (Pair(gold=gold_sides[1], answer=answer_sides[1]),)
    if len(gold_sides) == len(answer_sides) == 2 and _names_one_function(gold_sides, answer_sides):
        return (Pair(gold=gold_sides[1], answer=answer_sides[1]),)
    if len(gold_sides) == 2 and len(answer_sides) == 1 and _NAME.fullmatch(gold_sides[0].strip()):
        return (Pair(gold=gold_sides[1].strip(), answer=answer),)
    if len(answer_sides) == 1 or len(gold_sides) > 1:
        return (Pair(gold=gold, answer=answer),)
    sides = [side.strip() for side in answer_sides]
    if _NAME.fullmatch(sides[0]) and len(sides) == 2 and sides[1]:
        return (Pair(gold=gold, answer=sides[1]),)
    numeric = [s for s in sides if s and is_numeric(s)]
    if not numeric:
        return (Pair(gold=gold, answer=answer),)
    return tuple(Pair(gold=gold, answer=side) for side in numeric)


def _names_one_function(gold: list[str], answer: list[str]) -> bool:
    """Return whether one side is `f(x)=...` and the other `y=...` in the same variable."""
    heads = sorted((gold[0].strip(), answer[0].strip()), key=len)
    bodies = gold[1] + answer[1]
    return heads[0] == "y" and _FUNCTION_OF.fullmatch(heads[1]) is not None and _LETTER_Y.search(bodies) is None


def _strip_percent(text: str) -> tuple[str, bool]:
    stripped = _PERCENT.sub("", text)
    return (stripped.strip(), True) if stripped != text else (text, False)


def _hundredth(text: str) -> str:
    return rf"\frac{{{text}}}{{100}}"


@lru_cache(maxsize=4096)
def in_digits(text: str) -> str:
    """Write number words as digits, and take a number or a list of letters out of the one `\\text{}` around it."""
    wrapper = ONE_WRAPPER.fullmatch(text)
    inner = wrapper[1].strip() if wrapper is not None else text
    value = spoken_number(inner.rstrip("."))
    if value is not None:
        return as_text(value)
    ordinal = ORDINALS.get(inner.lower().removeprefix("the ").strip(" ."))
    if ordinal is not None:
        return ordinal
    return inner if inner[:1].isdigit() or _LETTER_LIST.fullmatch(inner) else text


# ---- lists ----
# Read lists of values: how many there are, and both values of `\pm`.


_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])\s*")
_NO_SINGLE_VALUE = re.compile(r"[,=]|\.\.|\\pm(?![a-zA-Z])")


def num_listed(statement: Statement) -> int | None:
    """Return how many numbers a bare list has, one or more; None for sets, tuples, statements, and unclear lists."""
    if statement.kind != "plain":
        return None
    parts = listed(statement.texts[0])
    is_plain = all(is_numeric(part) and not _NO_SINGLE_VALUE.search(part) for part in parts)
    return len(parts) if is_plain else None


def signs_apart(text: str) -> str:
    r"""Write `\frac{1\pm\sqrt5}{2}` as two values. Algebra itself reads the sign outside of brackets: `1\pm\sqrt5`."""
    text = text.strip()
    is_set = text.startswith(r"\{") and text.endswith(r"\}")
    parts = listed(text[2:-2] if is_set else text)
    values: list[str] = []
    for part in parts:
        signs = list(_PLUS_MINUS.finditer(part))
        is_one_inside = len(signs) == 1 and bracket_depths(part)[signs[0].start()] > 0 and "," not in part
        if is_one_inside:
            values += [_PLUS_MINUS.sub("+", part), _PLUS_MINUS.sub("-", part)]
        else:
            values.append(part)
    if len(values) == len(parts):
        return text
    joined = ", ".join(values)
    return rf"\{{{joined}\}}" if is_set else joined
