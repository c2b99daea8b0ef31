"""What is decided about a math answer by its text alone, and what is left to algebra. No sympy here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import assert_never

from klear_core.config.verify import MathConfig
from klear_core.verify.math_text import Answer, is_balanced, normalise, same_text_or_integers

_CHOICE = re.compile(
    r"(?:\\(?:text|textbf|mathrm|mathbf|textit)\{)?\s*(?:(?:option|choice|answer)(?: is)?:? ?)?\(?([A-Ja-j])\)?\}?\s*(?:[).:,\\} ].*)?$",
    re.I | re.S,
)
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textit|mbox|operatorname)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")
_SHORT_WORDS = frozenset({"yes", "no", "odd", "even", "on", "none", "true", "false", "not", "both", "all"})
_CLOCK = re.compile(r"0*(\d{1,2}):(\d{2})\s*([ap])?\.?(?:m\b\.?)?", re.I)
_HEAVY = re.compile(r"\\(?:i*int|oint|sum|prod|lim|bigcup|bigcap)(?![a-zA-Z])")
_LETTERS = re.compile(r"[A-Za-z]")
_NUMERIC_COMMANDS = re.compile(r"\\(?:frac|sqrt|pi|cdot|times|binom|div|pm|log|ln|sin|cos|tan|circ|exp)(?![a-zA-Z])")
_STATED = re.compile(r"\b[Aa]nswer(?: is|:)?[:\s*]++([^\n]{1,200}?)(?=\.?\**+(?:\s*+(?:\n|$)|\. [A-Z]))")
_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\((?:\\?[A-Za-z]+|\d+)\))?|\\(?:text|mathrm)\{[^{}]*\}")
_PERCENT = re.compile(r"(?:\\?%|\\?\s*\b(?:percent|per cent))$", re.I)
_UNIT = re.compile(
    r"(?<=[\d})])\s*(?:\\(?:text|mathrm|textrm|mbox|operatorname|rm)\s*\{\s*([^{}]*?)\s*\}"
    r"|(?<=[\d})\s])\s*([A-Za-z][A-Za-z. ]*(?:/[A-Za-z]+)?))\s*((?:\^\{?\d\}?)?)$"
)
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?$")
_CURRENCY = re.compile(r"^\\?[$€£]\s*(?=[\d.\-])")

_UNIT_NAMES = {
    alias: name
    for name, aliases in {
        "mm": "mm millimeter millimetre",
        "cm": "cm centimeter centimetre",
        "m": "m meter metre",
        "km": "km kilometer kilometre",
        "in": "in inch inches",
        "ft": "ft foot feet",
        "yd": "yd yard",
        "mi": "mi mile",
        "s": "s sec second",
        "min": "min minute",
        "h": "h hr hour",
        "day": "d day",
        "week": "week wk",
        "year": "year yr",
        "g": "g gram",
        "kg": "kg kilogram",
        "lb": "lb lbs pound",
        "oz": "oz ounce",
        "l": "l liter litre",
        "ml": "ml milliliter millilitre",
        "dollar": "dollar usd",
        "cent": "cent",
        "degree": "degree deg",
        "radian": "radian rad",
    }.items()
    for alias in aliases.split()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A reference and an answer that algebra has to compare."""

    gold: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is left to algebra about one answer: right iff for any alternative all of its pairs are equal."""

    alternatives: tuple[tuple[Pair, ...], ...]


def usable_references(answers: tuple[str, ...], cfg: MathConfig) -> tuple[str, ...]:
    """The normalised references that can be compared with; empty if there is none."""
    counted = answers if cfg.references == "any" else answers[:1]
    short = (a for a in counted if a.strip() and len(a) <= cfg.max_answer_chars and is_balanced(a))
    return tuple(text for a in short if (text := normalise(a)))


def decide(golds: tuple[str, ...], answer: Answer, cfg: MathConfig) -> bool | Question:
    """The verdict if text rules give one for any reference, else what algebra must decide (prose always goes there)."""
    alternatives: list[tuple[Pair, ...]] = []
    for gold in golds:
        parts = []
        for text in _texts_for(gold, answer, cfg):
            part = _compare_text(gold, normalise(text), cfg)
            if part is False:
                break
            parts.append(part)
        else:
            if all(part is True for part in parts):
                return True
            alternatives += _product([part for part in parts if not isinstance(part, bool)])
    return Question(alternatives=tuple(alternatives)) if alternatives else False


def _texts_for(gold: str, answer: Answer, cfg: MathConfig) -> tuple[str, ...]:
    """The boxes that must all be right."""
    match cfg.several_boxes:
        case "agree":
            return answer.texts
        case "join":
            return (", ".join(answer.texts),)
        case "last":
            num_values = _count_values(gold)
            if num_values > 1 and len(answer.texts) == num_values and all(_count_values(t) == 1 for t in answer.texts):
                return (", ".join(answer.texts),)  # `\boxed{2} and \boxed{3}` for a reference of two values
            return answer.texts[-1:]
        case _:
            assert_never(cfg.several_boxes)


def _count_values(text: str) -> int:
    """How many values a bare comma list has; a tuple, set or interval is one value."""
    depth = commas = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        commas += char == "," and depth == 0
    return commas + 1


def prose_verdict(golds: tuple[str, ...], answer: Answer, cfg: MathConfig) -> bool | None:
    """For text without a box: what the words after the last "answer is" settle where algebra could not, for letters and words."""
    stated = _STATED.findall(re.sub(r"[ \t]+", " ", answer.texts[0]))
    text = normalise(stated[-1].strip(" *:\n")) if stated else normalise(answer.texts[0])
    verdicts = [
        _first(same_text_or_integers(g, text), _choice_verdict(g, text) if cfg.choices == "letter" else None, _word_verdict(g, text))
        for g in golds
    ]
    if any(verdicts):
        return True
    return None if None in verdicts else False


def _first(*verdicts: bool | None) -> bool | None:
    return next((v for v in verdicts if v is not None), None)


def _product(parts: list[Question]) -> list[tuple[Pair, ...]]:
    combined: list[tuple[Pair, ...]] = [()]
    for part in parts:
        combined = [left + right for left in combined for right in part.alternatives][:16]
    return combined


def _compare_text(gold: str, answer: str, cfg: MathConfig) -> bool | Question:
    choice = _choice_verdict(gold, answer) if cfg.choices == "letter" else None
    same = _first(same_text_or_integers(gold, answer), choice, _word_verdict(gold, answer))
    if same is not None:
        return same
    if _HEAVY.search(answer) and not _HEAVY.search(gold):
        return False  # an unevaluated sum or integral restates the question
    return _without_units(gold, answer, cfg)


def _choice_verdict(gold: str, answer: str) -> bool | None:
    letter = _unwrap(gold).strip("() .")
    if len(letter) != 1 or letter not in "ABCDEFGHIJ":
        return None
    given = _unwrap(answer)
    if len(given) == 1:
        return given == letter  # a bare `e` or `i` is a number, not an option
    match = _CHOICE.match(given)
    return match is not None and match.group(1).upper() == letter


def _word_verdict(gold: str, answer: str) -> bool | None:
    """For references that are words or clock times, which algebra would take for products and ratios."""
    clock = _CLOCK.fullmatch(_unwrap(gold))
    if clock is not None:
        given = _CLOCK.fullmatch(_unwrap(answer))
        if given is None:
            return False
        same_half = clock[3] is None or given[3] is None or clock[3].lower() == given[3].lower()
        return int(clock[1]) == int(given[1]) and clock[2] == given[2] and same_half
    words = _unwrap(gold)
    is_words = _WORDS.fullmatch(words) is not None
    if is_words and (_WRAPPED.search(gold) or len(words) >= 4 or words.lower() in _SHORT_WORDS):
        return _letters(words) == _letters(_unwrap(answer))
    return None


def _without_units(gold: str, answer: str, cfg: MathConfig) -> bool | Question:
    gold, gold_percent = _strip_percent(gold)
    answer, answer_percent = _strip_percent(answer)
    gold_value, gold_unit = _split_unit(gold)
    answer_value, answer_unit = _split_unit(answer)
    if cfg.units == "strict" and gold_unit != answer_unit:
        return False
    if cfg.units == "compatible" and gold_unit != answer_unit and gold_unit in _KNOWN and answer_unit in _KNOWN:
        return False
    pairs = [(gold_value, answer_value)]
    if gold_percent != answer_percent and cfg.percent != "ignore":
        hundredth = (gold_value, _hundredth(answer_value)) if answer_percent else (_hundredth(gold_value), answer_value)
        pairs = [hundredth] if cfg.percent == "value" else [*pairs, hundredth]
    alternatives = []
    for gold_side, answer_side in pairs:
        same = same_text_or_integers(gold_side, answer_side)
        if same:
            return True
        if same is None:
            alternatives.append(_chain(gold_side, answer_side))
    return Question(alternatives=tuple(alternatives)) if alternatives else False


def _chain(gold: str, answer: str) -> tuple[Pair, ...]:
    """`2+3=5` is right for 5 only if every numeric side equals 5; algebra alone would look at the last side.

    `x=5` is 5 under a name, and two equations with one left side are compared by their right sides.
    """
    gold_sides, answer_sides = gold.split("="), answer.split("=")
    if len(gold_sides) == len(answer_sides) == 2 and gold_sides[0].replace(" ", "") == answer_sides[0].replace(" ", ""):
        return (Pair(gold=gold_sides[1], answer=answer_sides[1]),)
    if "=" not in answer or "=" in gold:
        return (Pair(gold=gold, answer=answer),)
    sides = [side.strip() for side in answer.split("=")]
    if _NAME.fullmatch(sides[0]) and len(sides) == 2 and sides[1]:
        return (Pair(gold=gold, answer=sides[1]),)
    numeric = [s for s in sides if s and not _LETTERS.search(_NUMERIC_COMMANDS.sub("", s))]
    if not numeric:
        return (Pair(gold=gold, answer=answer),)
    return tuple(Pair(gold=gold, answer=side) for side in numeric)


def _strip_percent(text: str) -> tuple[str, bool]:
    stripped = _PERCENT.sub("", text)
    return (stripped.strip(), True) if stripped != text else (text, False)


def _hundredth(text: str) -> str:
    return rf"\frac{{{text}}}{{100}}"


_KNOWN = frozenset(_UNIT_NAMES.values())


def _split_unit(text: str) -> tuple[str, str]:
    """The value and its unit under one name, with its power (`cm^2`); "" without a unit."""
    if _CURRENCY.match(text):
        return _CURRENCY.sub("", text), "dollar"
    if _DEGREE.search(text):
        return _DEGREE.sub("", text).strip(), "degree"
    match = _UNIT.search(text)
    if match is None or (match[1] is None and not re.fullmatch(r"[-+]?[\d.,/ ]+", text[: match.start()])):
        return text, ""
    raw = (match[1] if match[1] is not None else match[2]).strip(" .").lower()
    if match[1] is None and raw not in _UNIT_NAMES and raw.removesuffix("s") not in _UNIT_NAMES:
        return text, ""  # `3 x` is a product
    name = _UNIT_NAMES.get(raw) or _UNIT_NAMES.get(raw.removesuffix("s")) or raw
    power = re.sub(r"\D", "", match[3])
    return text[: match.start()].strip(), name + (f"^{power}" if power else "")


def _unwrap(text: str) -> str:
    return _WRAPPED.sub(r"\1", text).strip()


def _letters(text: str) -> str:
    return re.sub(r"[^a-z]+", " ", text.lower()).strip()
