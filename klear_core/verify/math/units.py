"""Read the unit after a number: known units with powers, products and quotients. Other words are not units."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from klear_core.verify.math.numbers import SCALES, SMALL_NUMBERS, as_text, is_numeric, spoken_number
from klear_core.verify.math.unit_names import (
    ADJECTIVES,
    COUNTED_NOUNS,
    CURRENCIES,
    CURRENCY_CODES,
    GENERIC_NOUNS,
    LONG_PREFIXES,
    METRIC_UNITS,
    NO_NOUNS,
    NOUN_JOINTS,
    OTHER_UNITS,
    POWERS_AFTER,
    POWERS_BEFORE,
    PREFIXES,
)

Dimensions = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The unit of a value: dimensions, size in base units, the noun that is counted, and a number word's factor."""

    dimensions: Dimensions = ()
    size: Fraction = Fraction(1)
    noun: str = ""
    scale: int = 1


NO_UNIT = Unit()


def _known_units() -> dict[str, tuple[Fraction, dict[str, int]]]:
    known: dict[str, tuple[Fraction, dict[str, int]]] = {}
    for names, (size, dimensions) in OTHER_UNITS.items():
        known |= dict.fromkeys(names.split(), (Fraction(size), dimensions))
    for symbols, names, size, dimensions in METRIC_UNITS.values():
        for base, prefixes in ((symbols, PREFIXES), (names, LONG_PREFIXES)):
            for name in base.split():
                known[name] = (Fraction(size), dimensions)
                scaled = {
                    prefix + name: (Fraction(size) * Fraction(10) ** power, dimensions)
                    for prefix, power in prefixes.items()
                }
                known |= {key: value for key, value in scaled.items() if key not in known}
    return known


_KNOWN = _known_units()

_WRAPPER = re.compile(
    r"\\(?:text|mathrm|textrm|mbox|operatorname|textit|mathit|mathsf|rm)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_FRACTION = re.compile(r"\\frac\{((?:[^{}]|\{[^{}]*\})*)\}\{((?:[^{}]|\{[^{}]*\})*)\}")
_TOKEN = re.compile(
    r"(?P<word>[^\W\d_]+\.?|¢)|\^\{?(?P<power>-?\d)\}?|(?P<per>/)|(?P<blank>\\cdot(?![a-zA-Z])|[\s*·⋅\-~()]|\\,)"
)


def read_unit(text: str) -> Unit | None:
    """Return the unit that the complete text names; None if it is not a unit.

    Examples are `square feet`, `m/s^2`, `\\text{ million dollars}` and `different ways`.
    """
    if len(text) > 120:
        return None
    text = _WRAPPER.sub(r" \1 ", text.replace(r"\mu", "µ"))
    return _Parser().parse(_FRACTION.sub(r" \1/\2 ", text))


class _Parser:
    """Parses one unit; its state is the product of the factors read so far."""

    def __init__(self) -> None:
        self._dimensions: Counter[str] = Counter()
        self._size = Fraction(1)
        self._noun = ""
        self._scale = 1
        self._last: tuple[Fraction, dict[str, int], int] | None = None
        """The last factor and its power, which a power behind it raises (`cm^2`, `cm squared`)."""
        self._sign = 1
        """-1 if the next factor is divided by."""
        self._power = 1
        """Power of the next factor, of a word before it (`square`, `cubic`)."""
        self._num_words = 0

    def parse(self, text: str) -> Unit | None:
        position = 0
        text = text.strip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None or not self._take(match):
                return None
            position = match.end()
        if self._num_words == 0 or self._power != 1 or self._sign != 1:
            return None
        dimensions = tuple(sorted((name, power) for name, power in self._dimensions.items() if power))
        return Unit(dimensions=dimensions, size=self._size, noun=self._noun, scale=self._scale)

    def _take(self, match: re.Match[str]) -> bool:
        if match["word"] is not None:
            self._num_words += 1
            return self._take_word(match["word"].rstrip("."))
        if match["per"] is not None:
            self._sign = -1
            return True
        return match["power"] is None or self._raise_last(int(match["power"]))

    def _take_word(self, word: str) -> bool:
        lower = word.lower()
        if lower in SCALES or lower.removesuffix("s") in SCALES:
            is_first = not self._dimensions and not self._noun
            self._scale *= SCALES.get(lower) or SCALES[lower.removesuffix("s")]
            return is_first
        if lower in POWERS_BEFORE and self._power == 1:
            self._power = POWERS_BEFORE[lower]
            return True
        if lower in POWERS_AFTER:
            return self._raise_last(POWERS_AFTER[lower])
        if lower == "per":
            self._sign = -1
            return True
        found = _lookup(word)
        if found is not None:
            size, dimensions = found
            self._multiply(size, dimensions, self._sign * self._power)
            self._last = (size, dimensions, self._sign * self._power)
            self._sign = self._power = 1
            return True
        return self._take_counted(lower)

    def _take_counted(self, word: str) -> bool:
        if word in ("a", "an") and self._last is not None:
            self._sign = -1  # 60 miles an hour
            return True
        if word in ADJECTIVES:
            return True
        noun = _singular(word)
        if noun is None or self._power != 1:
            return False
        self._last, self._sign = None, 1
        if noun in COUNTED_NOUNS and not self._noun:
            self._noun = noun
        return True

    def _multiply(self, size: Fraction, dimensions: dict[str, int], power: int) -> None:
        self._size *= size**power
        for name, exponent in dimensions.items():
            self._dimensions[name] += exponent * power

    def _raise_last(self, power: int) -> bool:
        if self._last is None or power == 0:
            return False
        size, dimensions, sign = self._last
        self._multiply(size, dimensions, sign * (power - 1))
        self._last = None
        return True


def _lookup(word: str) -> tuple[Fraction, dict[str, int]] | None:
    if word in _KNOWN:
        return _KNOWN[word]
    if len(word) == 1:
        return None  # single letters keep their case: `M` is molar, and `x` is a variable
    lower = word.lower()
    if lower in _KNOWN or not lower.endswith("s") or len(lower) <= 2:
        return _KNOWN.get(lower)
    return _KNOWN.get(lower[:-1])  # a plural


def _singular(word: str) -> str | None:
    for form in (word, word.removesuffix("s"), word.removesuffix("es")):
        if form in GENERIC_NOUNS or form in COUNTED_NOUNS:
            return form
    return None


def same_unit(gold: Unit, answer: Unit) -> bool:
    """Return whether both values have the same unit, or neither has one."""
    return (gold.dimensions, gold.size, gold.noun) == (answer.dimensions, answer.size, answer.noun)


def cents_of(unit: Unit, other: Unit) -> Unit:
    """Return the unit, or cents of euros for those of dollars where the other is euros."""
    is_cent = unit.dimensions == (("dollar", 1),) and unit.size == Fraction(1, 100)
    is_euro = other.dimensions == (("euro", 1),)
    return Unit(dimensions=other.dimensions, size=other.size / 100, scale=unit.scale) if is_cent and is_euro else unit


def units_fit(gold: Unit, answer: Unit) -> bool:
    """Return whether a value in one unit may equal one in the other: 5 apples are 5, but not 5 oranges or 5 cm."""
    if gold.noun and answer.noun and not _same_noun(gold.noun, answer.noun):
        return False
    if gold.dimensions and answer.dimensions:
        are_same = gold.dimensions == answer.dimensions or {gold, answer} == _POUNDS
        return are_same or _are_both_degrees(gold.dimensions, answer.dimensions)
    counted, measured = (gold, answer) if answer.dimensions else (answer, gold)
    return not (counted.noun and measured.dimensions)


_POUNDS = {Unit(dimensions=(("pound sterling", 1),)), Unit(dimensions=(("g", 1),), size=Fraction("453.59237"))}
"""`5 pounds` is money where the reference is."""


def _same_noun(gold: str, answer: str) -> bool:
    """Return whether both name the same things: red marbles are marbles, but not blue marbles."""
    (*gold_modifiers, gold_head), (*answer_modifiers, answer_head) = gold.split(), answer.split()
    is_narrower = not gold_modifiers or not answer_modifiers or gold_modifiers == answer_modifiers
    return gold_head == answer_head and is_narrower


def _are_both_degrees(gold: Dimensions, answer: Dimensions) -> bool:
    """Return whether one is a bare degree and the other any: `20^\\circ` may be 20 degrees Celsius or Fahrenheit."""
    names = {*gold, *answer}
    return ("degree", 1) in names and names <= {("degree", 1), ("celsius", 1), ("fahrenheit", 1)}


_SIGNS = "".join(CURRENCIES)
_CODE_BEFORE = re.compile(r"^(?:\\(?:text|mathrm)\s*\{\s*)?([A-Z]{3}|[A-Z]\w\.?)\s*\}?\s*(?=\d)")
_CODED_SIGN = re.compile(
    rf"^\\(?:text|mathrm)\s*\{{\s*\\?([{_SIGNS}])\s*\}}|^\\text\s*\{{\s*(\\?[{_SIGNS}][\d.,]+)\s*\}}$"
)
_DOLLARS_PER = re.compile(r"^([\d.,]+)\s*(\\text\s*\{\s*)?dollars?(?=\s+(?:per|an?|each)\b)")
_EACH = re.compile(r"(?<=[\d\s{])(?:an?|each|every)(?=\s+[a-z])")
_CURRENCY_BEFORE = re.compile(rf"^([-+]?)\s*\\?([{_SIGNS}])\s*(?=[-+\d.\\(])")
_CURRENCY_AFTER = re.compile(rf"(?<=\d)\s*(?:\\text\s*\{{\s*)?\\?([{_SIGNS}])\s*\}}?$")
_DEGREES = re.compile(r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*(?:\\(?:text|mathrm|rm)\s*\{\s*([CF])\s*\}|([CF]))?$")
_UNIT_PRODUCT = r"(?:\s|\\cdot(?![a-zA-Z])|\\(?:text|mathrm)\{[^{}]*\}(?:\s*\^\{?\d\}?)?)+"
_TAIL_TOKEN = re.compile(
    r"(?P<wrapped>\\(?:text|mathrm|textrm|mbox|operatorname|textit|mathit|mathsf|rm)\s*\{(?:[^{}]|\{[^{}]*\})*\})"
    rf"|(?P<unit>\\frac\{{{_UNIT_PRODUCT}\}}\{{{_UNIT_PRODUCT}\}})"
    r"|(?P<other>\\(?!mu(?![a-zA-Z])|cdot(?![a-zA-Z]))[a-zA-Z]+)|(?P<bare>(?:\\mu\s*)?[^\W\d_]+\.?|¢)|(?P<per>/)"
    r"|(?P<glue>\\cdot|\^\{?-?\d\}?(?!\d)|[\s*·⋅\-~()])|."
)
_COMPOUND_PART = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)\s*([^\W\d_]+\.?)")
_COMPOUND = re.compile(
    rf"{_COMPOUND_PART.pattern}(?:\s*(?:,?\s*(?:and|und|et|y|e)\b|,)?\s*{_COMPOUND_PART.pattern}){{1,4}}\s*"
)
_FEET_AND_INCHES = re.compile(r"^(\d+)\s*'\s*(\d+(?:\.\d+)?)\s*(?:''|\\?\")$")
_SPOKEN = "|".join(sorted(SMALL_NUMBERS, key=len, reverse=True))
_NUMBER_WORDS = re.compile(rf"\b(?:{_SPOKEN})(?:[- ](?:{_SPOKEN}))?(?:\s|$)", re.I)
_CENTS = frozenset(["cent", "céntimo", "centime", "centavo", "penny", "pennie", "pence", "ct", "Cent"])
_CURRENCY_DIMENSIONS = frozenset(((name, 1),) for name in CURRENCIES.values())
_MAX_UNIT_TOKENS = 24
_OPERATORS = "+-*/^=<>,([{:_|&!"


@lru_cache(maxsize=4096)
def split_unit(text: str) -> tuple[str, Unit]:
    """Return the value and its unit; the complete text and NO_UNIT if no known unit follows the value."""
    code = _CODE_BEFORE.match(text)
    if code is not None and code[1] in CURRENCY_CODES:
        text = CURRENCY_CODES[code[1]] + text[code.end() :]
    text = _DOLLARS_PER.sub(r"\\$\1 \2", text)
    text = _CODED_SIGN.sub(lambda m: m[1] or m[2], text)
    before = _CURRENCY_BEFORE.match(text)
    if before is not None:
        value, unit = split_unit(before[1] + _EACH.sub("per", text[before.end() :].strip()))
        money = Unit(dimensions=((CURRENCIES[before[2]], 1),), scale=unit.scale)
        if unit.dimensions in ((), money.dimensions):
            return value, money
        is_rate = all(power < 0 for _, power in unit.dimensions)
        # The price of an hour is money too, and not that of a minute.
        rate = "-".join(["per", *(name for name, _ in unit.dimensions), str(unit.size)])
        return (value, replace(money, noun=rate)) if is_rate else (text, NO_UNIT)
    after = _CURRENCY_AFTER.search(text)
    if after is not None:
        return text[: after.start()].strip(), Unit(dimensions=((CURRENCIES[after[1]], 1),))
    degrees = _DEGREES.search(text)
    if degrees is not None and degrees.start() > 0:
        name = {"C": "celsius", "F": "fahrenheit", None: "degree"}[degrees[1] or degrees[2]]
        return text[: degrees.start()].strip(), Unit(dimensions=((name, 1),))
    compound = read_compound(text)
    if compound is not None:
        return as_text(compound[0]), compound[1]
    return _split_tail(text)


def read_compound(text: str) -> tuple[Fraction, Unit, Unit] | None:
    """Return the value of `1 hour 30 minutes` in its smallest unit, that unit and the largest; None for other texts."""
    plain = re.sub(r"\\(?:text|mathrm|rm|mbox)\s*\{([^{}]*)\}", r" \1 ", text)
    plain = _FEET_AND_INCHES.sub(r"\1 feet \2 inches", plain.strip())
    if not plain[:1].isdigit():
        plain = _NUMBER_WORDS.sub(_in_digits, plain)
    if _COMPOUND.fullmatch(plain) is None:
        return None
    total, units = Fraction(0), list[Unit]()
    parts = _COMPOUND_PART.findall(plain)
    names = [name.rstrip(".") for _, name in parts]
    if names[0] in ("h", "hr", "hrs") or names[-1] in ("s", "sec"):
        names = ["min" if name == "m" else name for name in names]  # of an hour, not meters
    if names[-1] in ("pence", "penny", "p"):
        names[0] = {"pound": "gbp", "pounds": "gbp"}.get(names[0], names[0])
    for (number, _), name in zip(parts, names, strict=True):
        unit = read_unit(name)
        if units and name.rstrip("s") in _CENTS and units[0].dimensions in _CURRENCY_DIMENSIONS:
            unit = Unit(dimensions=units[0].dimensions, size=units[0].size / 100)
        if unit is None or not unit.dimensions or unit.scale != 1:
            return None
        if units and (unit.dimensions != units[0].dimensions or unit.size >= units[-1].size):
            return None
        units.append(unit)
        total += Fraction(number) * unit.size
    return total / units[-1].size, units[-1], units[0]


def _in_digits(match: re.Match[str]) -> str:
    value = spoken_number(match[0].strip())
    return match[0] if value is None or value.denominator != 1 else f"{value} "


def _split_tail(text: str) -> tuple[str, Unit]:
    starts: list[tuple[int, bool]] = []
    for match in _TAIL_TOKEN.finditer(text):
        if match["wrapped"] or match["unit"] or match["bare"] or match["per"]:
            starts.append((match.start(), match["bare"] is not None))
        elif not match["glue"]:
            starts.clear()  # the unit can only begin after this token
    # In order of position, so that the longest unit is tried first.
    for start, is_bare in starts[-_MAX_UNIT_TOKENS:]:
        value = text[:start].strip()
        is_closed = sum(map(value.count, "([{")) == sum(map(value.count, ")]}"))
        is_value = (
            value != "" and is_closed and value[-1] not in _OPERATORS and (not is_bare or _takes_bare_unit(value))
        )
        unit = read_unit(text[start:]) if is_value else None
        if is_value and unit is None and (not is_bare or _may_be_bare_noun(text, start)):
            unit = read_noun(text[start:])
        if unit is not None:
            return value, unit
    return text, NO_UNIT


def _may_be_bare_noun(text: str, start: int) -> bool:
    """Return whether unknown letters after a number are a word: `4 zorbs`, but not the variables of `4xy`."""
    word = re.match(r"[^\W\d_]+", text[start:])
    return word is not None and (not word[0].isascii() or (text[start - 1] == " " and len(word[0]) >= 4))


def read_noun(text: str) -> Unit | None:
    """Return the unit that a noun in no list is: `zorbs`, `red marbles`, `slices of pizza`; None for other words."""
    words = re.findall(r"[^\W\d_]+(?:-[^\W\d_]+)*", _WRAPPER.sub(r" \1 ", text))
    if (
        text.startswith("/")
        or not 1 <= len(words) <= 7
        or re.search(r"\d|[^\w\s{}()\\$.\-/]", _WRAPPER.sub(r" \1 ", text))
    ):
        return None
    words = [word.lower() for word in words]
    joint = next((i for i, word in enumerate(words) if i > 0 and word in NOUN_JOINTS), len(words))
    after_joint = [word for word in words[joint:] if word not in ADJECTIVES | NOUN_JOINTS]
    if any(_is_no_noun(word) for word in words[:joint] + after_joint):
        return None
    *modifiers, head = words[:joint]
    if head in ADJECTIVES or any(len(word) == 1 and word.isascii() for word in words[:joint]):
        return None
    kept = [word for word in modifiers if word not in ADJECTIVES]
    return Unit(noun=" ".join([*kept, _known_singular(head)]) if head not in GENERIC_NOUNS else "")


def _is_no_noun(word: str) -> bool:
    is_number = spoken_number(word) is not None or word.removesuffix("s") in SCALES
    is_adverb = word.endswith("ly") and len(word) > 4
    return word in NO_NOUNS or is_number or is_adverb


def _known_singular(word: str) -> str:
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        return word.removesuffix("s")
    return word


def _takes_bare_unit(value: str) -> bool:
    """Return whether bare letters after a value can be a unit.

    They can after a number in digits or words, but not after a sum or a product of variables.
    """
    number = value.rpartition("=")[2].strip()
    is_sum = re.search(r"[^\s(^{][+-]", number.replace(" ", "")) is not None
    return (is_numeric(number) and not is_sum) or spoken_number(number) is not None


def is_glued_letter(text: str, value: str) -> bool:
    """Return whether the unit is one bare letter directly after the number: `2m` may be twice m."""
    return len(text) == len(value) + 1 and text[-1].isalpha()
