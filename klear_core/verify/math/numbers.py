"""Read plain numbers by their text alone: thousands separators, mixed numbers, words, bases, exact values.

Linear in the length of the text; imports no sympy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

_SPACE = r"(?:\\[,!;:> ]|~|\\(?:thinspace|negthinspace|enspace|space)(?![a-zA-Z]))"
_GAP = rf"\s*(?:{_SPACE}\s*)+"
_SEPARATOR = rf"(?:,|\{{,\}}|\\text\{{,\}}|,?\{{?{_GAP}\}}?|\{{,{_GAP}\}})"
_THOUSANDS = re.compile(rf"(?<![\d,.])\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d|,\d)")
_LIST_COMMA = re.compile(r",(?!\s*\\!)")
_DECIMAL_GROUPS = re.compile(rf"(?<=\d)\.\d{{3}}(?:{_GAP}\d{{3}})*{_GAP}\d{{1,3}}(?!\d)")
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
_OPENINGS = re.compile(r"[(\[]|\\\{")
_CLOSINGS = re.compile(r"[)\]]|\\\}")

_MIXED = re.compile(
    r"(?P<before>^|[=(\[,{+\-<>|$;]|\\(?:cdot|times|approx|leq?|geq?|in|pm)(?![a-zA-Z]))"
    r"(?P<blank>\s*)(?P<whole>\d{1,15})"
    r"(?:\s*\\frac\s*(?:\{(?P<n1>\d{1,15})\}|(?P<n2>\d))\s*(?:\{(?P<d1>\d{1,15})\}|(?P<d2>\d))"
    r"|\s+(?P<n3>\d{1,15})\s*/\s*(?P<d3>\d{1,15}))(?![\d.^!/]| +\d)"
)
_SHORT_FRACTION = re.compile(r"\\(frac|binom)\s*(?:(\d)\s*(\d)|(\d)\s*(?=\{))")
_BLANK_BETWEEN_DIGITS = re.compile(r"(?<![_^\d])\d+(?:\.\d*)? +\.?\d")
_PLAIN = re.compile(
    r"(?P<sign>[+-]?)\s*(?:\\frac\{(?P<n>\d{1,1000})\}\{(?P<d>\d{1,1000})\}"
    r"|(?P<mantissa>\d{1,1000}(?:\.\d{0,1000})?|\.\d{1,1000})"
    r"(?:\s*/\s*(?P<over>\d{1,1000})|\s*\\(?:times|cdot)\s*10\s*\^\s*\{?(?P<power>[+-]?\d{1,3})\}?)?)",
    re.ASCII,
)
_POWER_OF_TEN = re.compile(r"([+-]?)\s*10\s*\^\s*\{?([+-]?\d{1,3})\}?", re.ASCII)
_BASED = re.compile(
    r"\(?\s*([+-]?[0-9A-Za-z]*[0-9][0-9A-Za-z]*(?:\.[0-9A-Za-z]+)?)\s*\)?"
    r"\s*_\s*\{?\s*(?:\\text\s*\{)?\s*(\d{1,3}|[a-z]+)\s*\}*"
)

_REPEATING = re.compile(
    r"(?<![\d.])(?P<whole>\d{0,15})\.(?P<fixed>\d{0,15})"
    r"(?:\\(?:overline|bar)\s*(?P<bar>\{\d{1,15}\}|\d)|\((?P<round>\d{1,15})\)"
    r"|(?P<dots>\\dot\s*(?:\{\d\}|\d)(?:\d{0,15}\\dot\s*(?:\{\d\}|\d))?))"
)
_BARRED = re.compile(r"\\(?:overline|bar)(?![a-zA-Z])\s*(?:\{((?:[^{}]|\{[^{}]*\})*)\}|([a-zA-Z]))")
_LETTER_RUNS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]+")
_IMAGINARY = re.compile(r"(?<![\\a-zA-Z])i(?![a-zA-Z])")
_CONTINUED = re.compile(r"(?<![\d.])(?P<whole>\d{1,15})\.(?P<digits>\d{2,30})\s*(?:\.{3}|\\(?:l|c)?dots(?![a-zA-Z]))")
_REPEATED = re.compile(r"(\d{2,10}?)\1+$|(\d)\2\2+$")
_DIGITS_TIMES = re.compile(r"(?<![\w.^{\\])(\d+)\s*(?=\([(\d\\-])")
_MINUTES = re.compile(
    r"(?P<degrees>\d{1,6})\s*\^\s*\{?\\circ\s*\}?\s*(?P<minutes>\d{1,2})\s*(?:'|\^\{?\\prime\}?)(?!')"
    r"(?:\s*(?P<seconds>\d{1,2})\s*(?:''|\^\{?\\prime\s*\\prime\}?))?"
)
_ANGLE = re.compile(
    r"(\\frac\{[^{}]*\}\{[^{}]*\}|\([^()]*\)|(?<![\w.])\\?[a-zA-Z](?![a-zA-Z])|\d+(?:\.\d+)?(?:/\d+)?)"
    r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))"
)
_CIS = re.compile(r"\\cis\s*(\((?:[^()]|\([^()]*\))*\)|\\frac\{[^{}]*\}\{[^{}]*\}|\\?\w+)")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|cis)(?![a-zA-Z])")

_LETTERS = re.compile(r"[^\W\d_]")
_NUMERIC_COMMANDS = re.compile(
    r"\\(?:frac|sqrt|pi|cdot|times|binom|div|pm|log|ln|a?r?c?(?:sin|cos|tan|cot|sec|csc)|circ|exp|infty)(?![a-zA-Z])"
)

_UNITS = (
    "zero one two three four five six seven eight nine ten "
    "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_ORDINALS = "third fourth fifth sixth seventh eighth ninth tenth"
SMALL_NUMBERS = {word: i for i, word in enumerate(_UNITS.split())}
SMALL_NUMBERS |= {word: 10 * i for i, word in enumerate(_TENS.split(), start=2)}
"""Values of the words up to ninety."""
_PARTS = {"half": 2, "halves": 2, "quarter": 4, "quarters": 4}
_PARTS |= {word + end: i for i, word in enumerate(_ORDINALS.split(), start=3) for end in ("", "s")}
SCALES = {"hundred": 100, "dozen": 12, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
"""Words that multiply the number before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A plain number: its exact value, and whether its text implies rounding (0.333, 1.6e-19) or not (3, 1/3, 73.0)."""

    value: Fraction
    is_rounded: bool


_COMMA_MONEY = re.compile(
    r"(?<![\d.,])(\d{1,3}(?:\.\d{3})*|\d+),(\d\d)(?=\s*(?:\\(?:text|mathrm)\{)?\s*(?:€|EUR\b|euros?\b|CHF\b|zł|kr\b))"
)


def join_thousands(text: str, *, in_lists: bool = True) -> str:
    """Join groups of digits: 1,000 and 1\\,000 are one number. A plain comma in brackets separates: (12,102) is a pair.

    With `in_lists` False every comma that is not `{,}` or `,\\!` separates.
    """

    def join(match: re.Match[str]) -> str:
        is_plain = _LIST_COMMA.search(match.group().replace("{,}", "")) is not None
        if is_plain and not in_lists:
            return match.group()
        before = text[: match.start()]
        is_list = len(_OPENINGS.findall(before)) > len(_CLOSINGS.findall(before))
        if is_plain and is_list:
            return match.group()
        return re.sub(r"\D", "", match.group())

    def join_decimals(match: re.Match[str]) -> str:
        return "." + re.sub(r"\D", "", match.group())

    text = _DECIMAL_GROUPS.sub(join_decimals, _THOUSANDS.sub(join, text))
    return _DECIMAL_COMMA.sub(".", text)


def read_decimal_commas(text: str) -> str:
    """Return `7,20 €` as `7.20 €`: money of countries that write a decimal comma."""
    return _COMMA_MONEY.sub(lambda m: f"{m[1].replace('.', '')}.{m[2]}", text) if "," in text else text


def read_mixed_numbers(text: str) -> str:
    """Rewrite `1 1/2` and `1\\frac12` as `\\frac{3}{2}`; an integer before an improper fraction stays as it is."""

    def convert(match: re.Match[str]) -> str:
        numerator = int(match["n1"] or match["n2"] or match["n3"])
        denominator = int(match["d1"] or match["d2"] or match["d3"])
        if not 0 < numerator < denominator:
            return match.group()
        whole = int(match["whole"])
        return f"{match['before']}{match['blank']}\\frac{{{whole * denominator + numerator}}}{{{denominator}}}"

    return _MIXED.sub(convert, text)


def read_repeating(text: str) -> str:
    """Rewrite decimals that repeat as exact fractions: `0.1\\overline{6}`, `0.1\\dot6`, `0.1(6)` and `0.1666\\ldots`.

    Of a decimal with dots that does not repeat (`3.14159\\ldots`) the dots are removed: it is a rounded number.
    """

    def marked(match: re.Match[str]) -> str:
        block = re.sub(r"\D", "", match["bar"] or match["round"] or match["dots"])
        return _fraction_text(match["whole"] or "0", match["fixed"], block)

    def continued(match: re.Match[str]) -> str:
        digits = match["digits"]
        repeated = _REPEATED.search(digits)
        if repeated is None:
            return f"{match['whole']}.{digits}"
        return _fraction_text(match["whole"], digits[: repeated.start()], repeated[1] or repeated[2])

    text = _CONTINUED.sub(continued, _REPEATING.sub(marked, text))
    return _DIGITS_TIMES.sub(r"\1\\cdot ", text)  # the parser would read `2(3)` as a mixed number


def _fraction_text(whole: str, fixed: str, block: str) -> str:
    """Return `whole.fixed` followed by `block` for ever as LaTeX."""
    nines = 10 ** len(block) - 1
    value = Fraction(int(whole + fixed or "0") * nines + int(block), nines * 10 ** len(fixed))
    return as_text(value)


def read_conjugates(text: str) -> str:
    """Write a bar over one letter in one way, and a bar over a complex number as its conjugate."""

    def spelled(match: re.Match[str]) -> str:
        inner = (match[1] or match[2] or "").strip()
        letters = set(_LETTER_RUNS.findall(inner))
        if letters == {"i"}:
            return f"({_IMAGINARY.sub('(-i)', inner)})"
        return rf"\bar{{{inner}}}" if len(inner) == 1 and letters else match.group()

    return _BARRED.sub(spelled, text)


def read_angles(text: str) -> str:
    """Rewrite `22^\\circ 30'` as degrees, and degrees in a formula with trigonometric functions as radians."""

    def in_degrees(match: re.Match[str]) -> str:
        seconds = Fraction(match["seconds"] or 0)
        value = Fraction(match["degrees"]) + Fraction(match["minutes"]) / 60 + seconds / 3600
        return as_text(value) + r"^\circ"

    text = _MINUTES.sub(in_degrees, text)
    if _TRIGONOMETRIC.search(text):
        text = _CIS.sub(r"e^{i \1}", in_radians(text))
    return text


def in_radians(text: str) -> str:
    """Return the text with each angle in degrees as a multiple of pi."""
    return _ANGLE.sub(lambda m: rf"(\frac{{{m[1]} \pi}}{{180}})", text)


def brace_short_fractions(text: str) -> str:
    """Rewrite `\\frac 1 3` and `\\frac13` as `\\frac{1}{3}`."""

    def brace(match: re.Match[str]) -> str:
        if match[2] is not None:
            return f"\\{match[1]}{{{match[2]}}}{{{match[3]}}}"
        return f"\\{match[1]}{{{match[4]}}}"

    return _SHORT_FRACTION.sub(brace, text)


def has_split_digits(text: str) -> bool:
    """Return whether a blank separates two digits: `1 3` is not a number, least of all 13."""
    return _BLANK_BETWEEN_DIGITS.search(text) is not None


_HEXADECIMAL = re.compile(r"-?0x[0-9a-f]{1,64}", re.IGNORECASE)


@lru_cache(maxsize=4096)
def plain_number(text: str) -> Number | None:
    """Return the exact value of an integer, decimal, fraction or number in scientific notation, else None.

    `0x1f` is the integer 31: read as a product, it and all other hexadecimal numbers would be 0.
    """
    if _HEXADECIMAL.fullmatch(text):
        return Number(value=Fraction(int(text, 16)), is_rounded=False)
    power_of_ten = _POWER_OF_TEN.fullmatch(text)
    if power_of_ten is not None:
        value = Fraction(10) ** int(power_of_ten[2])
        return Number(value=-value if power_of_ten[1] == "-" else value, is_rounded=False)
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    sign = -1 if match["sign"] == "-" else 1
    if match["n"] is not None:
        ratio = _ratio(Fraction(match["n"]), int(match["d"]))
        return None if ratio is None else Number(value=sign * ratio, is_rounded=False)
    mantissa = Fraction(match["mantissa"].removesuffix("."))
    quotient = _ratio(mantissa, int(match["over"] or 1))
    if quotient is None:
        return None
    value = quotient * Fraction(10) ** int(match["power"] or 0)
    is_rounded = mantissa.denominator != 1
    if match["power"] is not None:
        is_rounded |= "." in match["mantissa"] or value.denominator != 1
    return Number(value=sign * value, is_rounded=is_rounded)


def _ratio(numerator: Fraction, denominator: int) -> Fraction | None:
    return numerator / denominator if denominator else None


def numbers_agree(gold: Number, answer: Number, digits: int) -> bool:
    """Compare exactly if neither number is rounded or one is an integer, else to `digits` significant digits."""
    if gold.value == answer.value:
        return True
    is_exact = not (gold.is_rounded or answer.is_rounded) or _is_written_integer(gold) or _is_written_integer(answer)
    if is_exact:
        return False
    # The tolerance is relative. The factor 1 + 1e-9 is the same as in math/compare.py.
    tolerance = Fraction(10**9 + 1, 10**9) / 10**digits
    return bool(abs(gold.value - answer.value) <= tolerance * max(abs(gold.value), abs(answer.value)))


def _is_written_integer(number: Number) -> bool:
    return not number.is_rounded and number.value.denominator == 1


def as_text(value: Fraction) -> str:
    """Return a number as LaTeX that reads back to the same value."""
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def based_number(text: str) -> tuple[str, int] | None:
    """Return the digits and base of `25_6` or `(1A)_{16}`, base ten for an integer without one, else None."""
    if re.fullmatch(r"[+-]?\d{1,1000}", text, re.ASCII):
        return _digits(text), 10
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    base = int(match[2]) if match[2].isdigit() else SMALL_NUMBERS.get(match[2], 0)
    return (_digits(match[1]), base) if 2 <= base <= 36 else None


def names_a_base(text: str) -> bool:
    """Return whether the text is a number with its base as a subscript."""
    return "_" in text and based_number(text) is not None


def is_numeric(text: str) -> bool:
    """Return whether the text has no letters except in commands that make up numbers (`\\frac`, `\\pi`)."""
    return _LETTERS.search(_NUMERIC_COMMANDS.sub("", text)) is None


def _digits(text: str) -> str:
    sign = "-" if text.startswith("-") else ""
    return sign + (text.lstrip("+-").lstrip("0").upper() or "0")


def spoken_number(text: str) -> Fraction | None:
    """Return the value of `twenty-one`, `two thirds`, `three and a half` or `five hundred thousand`.

    Returns None if a word does not fit.
    """
    words = re.findall(r"[a-z]+", text.lower())
    if not words or len(words) > 20 or re.fullmatch(r"[A-Za-z \-]+", text) is None:
        return None
    part = _PARTS.get(words[-1])
    if part is None:
        return _spoken_integer(words)
    head = words[:-1]
    if "and" in head:
        split = len(head) - 1 - head[::-1].index("and")
        whole, count = _spoken_integer(head[:split]), head[split + 1 :]
    else:
        whole, count = Fraction(0), head
    times = Fraction(1) if count in ([], ["a"], ["an"]) else _spoken_integer(count)
    if whole is None or times is None or (not count and part != 2):
        return None
    return whole + times / part


def _spoken_integer(words: list[str]) -> Fraction | None:
    # `total` is what a word such as thousand has completed, `current` the number after it.
    total = current = 0
    last_small = 0  # value of the last small word: `twenty one` fits, `one twenty` and `two three` do not
    if not words or words[0] == "and":
        return None
    for i, word in enumerate(words):
        if word in SMALL_NUMBERS:
            fits = last_small == 0 or (last_small >= 20 and 0 < SMALL_NUMBERS[word] < 10)
            if not fits or (SMALL_NUMBERS[word] == 0 and len(words) > 1):
                return None
            current += SMALL_NUMBERS[word]
            last_small = SMALL_NUMBERS[word]
        elif word in SCALES:
            if current == 0 and not (i == 1 and words[0] == "a"):
                return None
            current = max(current, 1) * SCALES[word]
            last_small = 0
            if SCALES[word] >= 1000:
                total, current = total + current, 0
        else:
            joins_scale = word == "and" and words[i - 1] in SCALES  # two hundred and one
            opens_scale = word == "a" and i == 0 and len(words) > 1 and words[1] in SCALES  # a hundred
            if not joins_scale and not opens_scale:
                return None
    return Fraction(total + current)
