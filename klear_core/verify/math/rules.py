"""Decide math answers by their text alone where possible, and collect what algebra must decide. Imports no sympy."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import assert_never

from klear_core.config.verify import MathConfig
from klear_core.verify.math.answer_text import MathAnswer, is_balanced, normalise, same_text_or_integers
from klear_core.verify.math.numbers import based_number, has_split_digits, is_numeric, names_a_base
from klear_core.verify.math.relations import read_congruence, same_congruence
from klear_core.verify.math.text_compare import ONE_WRAPPER, AlgebraComparison, Pair, compare_values, in_digits
from klear_core.verify.math.units import read_compound, read_unit
from klear_core.verify.math.words import phrase_words, same_phrase

_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textit|mbox|operatorname)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")
_WORD_LIST = re.compile(r"[A-Za-z][A-Za-z', -]*")
_SHORT_WORDS = frozenset({"yes", "no", "odd", "even", "on", "none", "true", "false", "not", "both", "all"})
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]*\.?"
_LETTERS_LISTED = re.compile(r"[A-J](?:(?:\s*[,;]\s*|\s+|\s*,?\s*and\s+)[A-J])+")
_PLACE = re.compile(r"\d{1,2}(?:st|nd|rd|th)? quadrant", re.I)
_DATE = re.compile(rf"{_MONTH} \d{{1,2}}|\d{{1,2}} {_MONTH}")
_NAME_OF_LETTERS = re.compile(r"[A-Z]{2,12}")
_CAPITALS = re.compile(r"(?<![\\a-zA-Z])[A-Z]{2,}(?![a-z])")
_POINTS_BEFORE = re.compile(r"\\(?:triangle|angle|overline|line|seg)(?![a-zA-Z])|[{}]")
_SYMBOLIC = re.compile(r"[=<>^_+*/\\]|\\[a-zA-Z]")
_RATIO_NAME = re.compile(r"^\s*[^=]{0,40}=(?!=)")
_NO_RATIO = re.compile(r"\\(?:\{|mapsto|to|text|in|mid)(?![a-zA-Z])|[=<>,;|]|(?<![\\A-Za-z])[A-Za-z]{2,}")
_TO = r"\s*(?:\\text\s*\{\s*to\s*\}| to )\s*"
_WORDED_RATIO = re.compile(rf"\s*([\d.]+){_TO}([\d.]+)(?:{_TO}([\d.]+))?\s*")
_CLOCK = re.compile(r"0*(\d{1,2})(?::(\d{2}))?(?::(\d{2}))?\s*(?:([ap])\.?\s*m\b\.?)?", re.I)
_HEAVY = re.compile(r"\\(?:i*int|oint|sum|prod|lim|bigcup|bigcap)(?![a-zA-Z])")
_STATED = re.compile(r"\b[Aa]nswer(?: is|:)?[:\s*]++([^\n]{1,200}?)(?=\.?\**+(?:\s*+(?:\n|$)|\. [A-Z]))")
_LABEL = re.compile(
    r"^\\(?:text|textrm|mbox|textbf|mathrm)\s*\{[^{}]*:\s*\}\s*|^(?:the )?(?:final |correct )?answer(?: is)?\s*:?\s+",
    re.I,
)
_READ_AS_LIST = re.compile(r",\s*(?:\\[,;:> ]|~)")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*\\?%")
_EITHER = re.compile(r"\\(?:text|mbox|textrm)\s*\{\s*OR\s*\}")
_POINT_NAME = re.compile(r"^[A-Z]'?\s*=?\s*(?=\([^()]*,[^()]*\)$)")
_COMPLEX_IN_J = re.compile(r"\(?-?[\d.]+\s*[-+]\s*[\d.]*\s*j\)?")
_UNIT_VECTOR = re.compile(r"\\(?:hat|vec|bar|overrightarrow)\s*\{?\s*(?:\\)?([ijk])(?:math)?\s*\}?")
_VECTOR_TERM = re.compile(
    r"([+-]?)((?:[\da-hl-z.]|\\frac\{[^{}]*\}\{[^{}]*\}|\\sqrt\{[^{}]*\}|\([^()]*\))*)\*?([ijk])(?![a-z])"
)
"""A coefficient and a unit vector."""
_VECTOR = re.compile(r"\\begin\{([pbvB]?matrix)\}((?:(?!\\begin).)*)\\end\{\1\}", re.S)
_TRANSPOSED = re.compile(
    r"^(\(.*,.*\)|\[.*,.*\])\s*\^\s*\{?\s*(?:\\(?:top|intercal)|\\(?:text|mathrm|mathsf)\s*\{?T\}?|T)\s*\}?$"
)
_COMBINATIONS = re.compile(
    r"(?<![a-zA-Z\\)\d}])(?:C\s*\(\s*(\d{1,4})\s*,\s*(\d{1,4})\s*\)|C_\{?(\d{1,4})\}?\s*\^\{?(\d{1,4})\}?"
    r"|\\(?:mathrm|text)\{C\}_\{?(\d{1,4})\}?\s*\^\{?(\d{1,4})\}?"
    r"|(?:\{\s*\}\s*)?[_^]\{?(\d{1,4})\}?\s*C_\{?(\d{1,4})\}?|(\d{1,4})\s*C\s*(\d{1,4}))(?![\d_])"
)
"""Other ways to write a binomial coefficient: `C(10,3)`, `C_{10}^3`, `{}_{10}C_3`."""
_TIME_OF_DAY = (
    (re.compile(r"\bin the (?:afternoon|evening)\b|\bat night\b", re.I), "pm"),
    (re.compile(r"\bin the morning\b", re.I), "am"),
    (re.compile(r"^(?:12(?::00)?\s*)?noon$", re.I), "12:00 pm"),
    (re.compile(r"^(?:12(?::00)?\s*)?midnight$", re.I), "12:00 am"),
)
_MAX_COMBINATIONS = 16
"""Most combinations of the readings of several boxes that algebra compares; more are rare, and are left out."""


def usable_references(answers: tuple[str, ...], cfg: MathConfig) -> tuple[str, ...]:
    r"""Return the normalised references that can be compared with; empty if there is none.

    A reference that can be read in two ways (`12,\ 345` as one number or as two) is returned in both.
    """
    counted = answers if cfg.references == "any" else answers[:1]
    short = (a for a in counted if a.strip() and len(a) <= cfg.max_answer_chars and is_balanced(a))
    return tuple(dict.fromkeys(reading for a in short for reading in _readings(a) if reading))


# All samples of a problem are compared with the same references.
@lru_cache(maxsize=4096)
def _readings(reference: str) -> tuple[str, ...]:
    texts = _EITHER.split(reference)
    readings = [_first_side(normalise(text)) for text in texts]
    if _READ_AS_LIST.search(reference):
        readings += [normalise(text, commas_separate=True) for text in texts]
    return tuple(readings)


def _first_side(reference: str) -> str:
    """Return `0.56` for `0.56 = 56\\%`: all sides of a numeric equation are the same value."""
    sides = [side.strip() for side in reference.split("=")]
    return sides[0] if _is_numeric_chain(sides) else reference


def _is_numeric_chain(sides: list[str]) -> bool:
    return len(sides) > 1 and all(side and is_numeric(side) for side in sides)


def decide(golds: tuple[str, ...], answer: MathAnswer, cfg: MathConfig) -> bool | AlgebraComparison:
    """Return the verdict on a boxed answer if text rules give one for any reference, else what algebra must compare."""
    alternatives: list[tuple[Pair, ...]] = []
    for gold in golds:
        parts = []
        for text in compared_texts(gold, answer, cfg):
            part = _compare_text(gold, _normalise_for(gold, text), cfg)
            if part is False:
                break
            parts.append(part)
        else:  # no box is wrong for this reference
            if all(part is True for part in parts):
                return True
            alternatives += _combinations([part for part in parts if isinstance(part, AlgebraComparison)])
    return AlgebraComparison(alternatives=tuple(alternatives)) if alternatives else False


def _normalise_for(gold: str, text: str) -> str:
    """Return the normalised answer; `81,256` is read as two values if the reference has two, `3-2j` as `3-2i`."""
    normalised = normalise(text)
    if "i" in gold and "j" not in gold and _COMPLEX_IN_J.fullmatch(normalised):
        return normalised.replace("j", "i")
    num_values = _count_values(gold)
    if num_values > 1 and _count_values(normalised) != num_values:
        separated = normalise(text, commas_separate=True)
        if _count_values(separated) == num_values:
            return separated
    return normalised


def compared_texts(gold: str, answer: MathAnswer, cfg: MathConfig) -> tuple[str, ...]:
    """Return the boxed texts that must all be right, or the text of an answer without a box."""
    if answer.is_unboxed:
        return answer.texts
    match cfg.several_boxes:
        case "agree":
            return answer.texts
        case "join":
            return (", ".join(answer.texts),)
        case "last":
            num_values = _count_values(gold)
            if num_values > 1 and len(answer.texts) == num_values and all(_count_values(t) == 1 for t in answer.texts):
                return (", ".join(answer.texts),)  # `\boxed{2} and \boxed{3}` against a reference of two values
            return answer.texts[-1:]
        case _:
            assert_never(cfg.several_boxes)


def _count_values(text: str) -> int:
    """Count the values of a bare comma list; a tuple, set or interval is one value."""
    depth = commas = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        commas += char == "," and depth == 0
    return commas + 1


def unboxed_verdict(golds: tuple[str, ...], answer: MathAnswer, cfg: MathConfig) -> bool | None:
    """Judge text without a box by what follows its last "answer is"; None leaves it to algebra.

    This settles references that are letters or words, which algebra could not.
    """
    stated = _STATED.findall(re.sub(r"[ \t]+", " ", answer.texts[0]))
    text = normalise(stated[-1].strip(" *:\n")) if stated else normalise(answer.texts[0])
    verdicts: list[bool | None] = []
    for gold in golds:
        choice = choice_verdict(gold, text) if cfg.choices == "letter" else None
        verdicts.append(_first(same_text_or_integers(gold, text), choice, _word_verdict(gold, text)))
    if any(verdicts):
        return True
    return None if None in verdicts else False


def _first(*verdicts: bool | None) -> bool | None:
    return next((v for v in verdicts if v is not None), None)


def _combinations(parts: list[AlgebraComparison]) -> list[tuple[Pair, ...]]:
    """Return the alternatives of several comparisons that must all hold, at most `_MAX_COMBINATIONS`."""
    combined: list[tuple[Pair, ...]] = [()]
    for part in parts:
        combined = [left + right for left in combined for right in part.alternatives][:_MAX_COMBINATIONS]
    return combined


def _compare_text(gold: str, answer: str, cfg: MathConfig) -> bool | AlgebraComparison:
    choice = choice_verdict(gold, answer) if cfg.choices == "letter" else None
    if choice is not None:
        return choice
    gold, answer = _with_same_vectors(gold, answer)
    if gold.startswith("(") or answer.startswith("("):
        gold, answer = _POINT_NAME.sub("", gold), _POINT_NAME.sub("", answer)
    else:
        gold, answer = _COMBINATIONS.sub(_binomial, gold), _COMBINATIONS.sub(_binomial, answer)
    gold, answer = in_digits(gold), in_digits(answer)
    same = _first(same_text_or_integers(gold, answer), _word_verdict(gold, answer), _based_verdict(gold, answer))
    if same is not None:
        return same
    gold_congruence, answer_congruence = read_congruence(gold), read_congruence(answer)
    if gold_congruence is not None and answer_congruence is not None:
        return same_congruence(gold_congruence, answer_congruence)
    if gold_congruence is not None and gold_congruence.left:
        return False  # algebra would read one number of it
    if answer_congruence is not None and answer_congruence.left:
        answer = answer_congruence.right  # `3^5 \equiv 3 \pmod 5` states a value
    ratio = _ratio_verdict(gold, answer)
    if ratio is not None:
        return ratio
    if _has_swapped_names(gold, answer):
        return False
    if _HEAVY.search(answer) and not _HEAVY.search(gold):
        return False  # an unevaluated sum or integral restates the question
    if has_split_digits(gold) or has_split_digits(answer):
        return False  # `1 3` is not a number, but algebra would read it as one
    answer = _LABEL.sub("", answer)
    if "%" in answer and _is_numeric_chain(answer.split("=")):
        # Each side of `0.56 = 56\%` may have its own percent sign.
        answer = _PERCENT.sub(r"\\frac{\1}{100}", answer)
    return compare_values(_LABEL.sub("", gold), answer, cfg)


def _with_same_vectors(gold: str, answer: str) -> tuple[str, str]:
    """Write a row or column as a tuple where the other text is one; a row and a column stay apart."""
    texts = (_TRANSPOSED.sub(r"\1", gold), _TRANSPOSED.sub(r"\1", answer))
    least = max(1 + len(re.findall(r"\\\\|&|,", text)) for text in texts)
    sums = [_in_components(text, least=least) for text in texts]
    if any(sums):
        texts = (sums[0] or texts[0], sums[1] or texts[1])
    vectors = [_VECTOR.fullmatch(text) for text in texts]
    are_tuples = [re.fullmatch(r"\(.*,.*\)|\[.*,.*\]", text) is not None for text in texts]
    are_named = [vector is None and text.count("=") > 1 for vector, text in zip(vectors, texts, strict=True)]
    if any(vectors) and (any(are_tuples) or any(are_named)):
        return _as_tuple(texts[0]), _as_tuple(texts[1])
    return texts if all(are_tuples) else (gold, answer)


def _in_components(text: str, *, least: int) -> str | None:
    """Return `3i-4j` as `(3,-4)`, with at least so many components; None for what is no sum of unit vectors."""
    if "i" not in text or "j" not in text:
        return None  # `3+4i` is a complex number
    plain = _UNIT_VECTOR.sub(r"\1", text).replace(" ", "")
    terms = list(_VECTOR_TERM.finditer(plain))
    if "".join(term[0] for term in terms) != plain:
        return None
    parts = {term[3]: f"{term[1].strip('+')}{term[2] or 1}" for term in terms}
    if len(parts) < len(terms) or not {"i", "j"} <= parts.keys():
        return None
    names = "ijk" if "k" in parts or least > len("ij") else "ij"
    return f"({','.join(parts.get(name, '0') for name in names)})"


def _as_tuple(text: str) -> str:
    vector = _VECTOR.fullmatch(text)
    if vector is None:
        return text
    is_line = "&" not in vector[2] or "\\\\" not in vector[2]
    if not is_line:
        return text
    values = re.split(r"\\\\|&", vector[2])
    return f"({','.join(value.strip() for value in values if value.strip())})"


def _binomial(match: re.Match[str]) -> str:
    total, chosen = next((match[i], match[i + 1]) for i in (1, 3, 5, 7, 9) if match[i])
    is_choice = 2 < int(total) >= int(chosen)
    return rf"\binom{{{total}}}{{{chosen}}}" if is_choice else match.group()


def _has_swapped_names(gold: str, answer: str) -> bool:
    """Return whether names in capitals differ by the order of their letters only, which algebra reads as products."""
    gold_names, answer_names = Counter(_CAPITALS.findall(gold)), Counter(_CAPITALS.findall(answer))
    extra, missing = answer_names - gold_names, gold_names - answer_names
    extra_letters = {"".join(sorted(name)) for name in extra}
    missing_letters = {"".join(sorted(name)) for name in missing}
    return bool(missing) and extra_letters >= missing_letters


def _based_verdict(gold: str, answer: str) -> bool | None:
    """Compare digits and base if either number names its base, else return None: `25_6` is neither 25 nor 17."""
    if not (names_a_base(gold) or names_a_base(answer)):
        return None
    return based_number(gold) == based_number(answer)


def _word_verdict(gold: str, answer: str) -> bool | None:
    """Judge references that are words or clock times, which algebra would read as products and ratios; else None."""
    clock = _clock_time(gold)
    if clock is not None:
        given = _CLOCK.fullmatch(_clock_text(answer))
        if given is None and not clock[3] and _WORDED_RATIO.fullmatch(answer) is not None:
            return None  # `9 to 16` says that 9:16 is a ratio
        if given is None:
            return not clock[3] and _is_duration(answer, clock[:3])
        hour, half = int(given[1]), (given[4] or "").lower()
        gold_hour, gold_half = clock[0], clock[3]
        if half or gold_half:  # `13:45` alone may be minutes and seconds
            (hour, half), (gold_hour, gold_half) = _in_halves(hour, half), _in_halves(gold_hour, gold_half)
        # `4:30` may be either half of the day.
        same_half = not (gold_half and half) or gold_half == half
        return (gold_hour, *clock[1:3]) == (hour, int(given[2] or 0), int(given[3] or 0)) and same_half
    clock = _clock_time(answer)
    if clock is not None and not clock[3] and _is_duration(gold, clock[:3]):
        return True
    words, given_words = _unwrap(gold), _unwrap(answer)
    if _NAME_OF_LETTERS.fullmatch(words) and words.lower() not in _SHORT_WORDS:
        # Letters in capitals are a name (`SWS`, a segment AB), not a product; a name has one order.
        if same_phrase(words, given_words):
            return phrase_words(words) != [words.lower()] or words == given_words
        is_choices = sorted(words) == list(words) and words[-1] <= _LETTERS[-1]
        if is_choices and _LETTERS_LISTED.fullmatch(given_words):
            return [*words] == re.findall("[A-J]", given_words)  # several options: `A, C` is AC
        return words == _POINTS_BEFORE.sub("", given_words).strip() or _letters(words) == _letters(given_words)
    # Up to three letters without a wrapper may be a product of variables, `xyz`.
    is_words = (_WORD_LIST if ONE_WRAPPER.fullmatch(gold) else _WORDS).fullmatch(words) is not None
    is_meant = _WRAPPED.search(gold) is not None or len(words) >= 4 or words.lower() in _SHORT_WORDS
    if (is_words and is_meant) or _DATE.fullmatch(words) or _PLACE.fullmatch(words):
        is_text = _SYMBOLIC.search(given_words) is None
        return _letters(words) == _letters(given_words) or (is_text and same_phrase(words, given_words))
    return None


def _ratio_verdict(gold: str, answer: str) -> bool | AlgebraComparison | None:
    """Compare two ratios part by part: `3:4` is `6:8`, but not the number 0.75; None if neither is a ratio."""
    gold_parts, answer_parts = _ratio_parts(gold), _ratio_parts(answer)
    if gold_parts is None and answer_parts is None:
        return None
    if gold_parts is not None and answer_parts is None:
        worded = _WORDED_RATIO.fullmatch(answer)
        if worded is not None:
            answer_parts = [part for part in worded.groups() if part]
    if gold_parts is None or answer_parts is None or len(gold_parts) != len(answer_parts):
        return False
    pairs: list[Pair] = []
    for gold_part, answer_part in zip(gold_parts[1:], answer_parts[1:], strict=True):
        pairs.append(
            Pair(
                gold=rf"\frac{{{gold_part}}}{{{gold_parts[0]}}}", answer=rf"\frac{{{answer_part}}}{{{answer_parts[0]}}}"
            )
        )
    return True if gold_parts == answer_parts else AlgebraComparison(alternatives=(tuple(pairs),))


def _ratio_parts(text: str) -> list[str] | None:
    named = _RATIO_NAME.sub("", text)
    if ":" not in named or _NO_RATIO.search(named):
        return None
    parts = [part.strip() for part in named.split(":")]
    return parts if all(parts) else None


def _clock_time(text: str) -> tuple[int, int, int, str] | None:
    """Return hour, minute, second and half of the day (or "") of `4:30 p.m.` or `9 a.m.`; None for other texts."""
    match = _CLOCK.fullmatch(_clock_text(text))
    if match is None or not (match[2] or match[4]):
        return None
    return int(match[1]), int(match[2] or 0), int(match[3] or 0), (match[4] or "").lower()


def _is_duration(text: str, parts: tuple[int, ...]) -> bool:
    """Return whether a text has these hours and minutes, or minutes and seconds: `2 h 15 min` is 2:15."""
    compound, seconds = read_compound(text), read_unit("s")
    if compound is None or seconds is None or compound[1].dimensions != seconds.dimensions:
        return False
    numbers = [int(digits) for digits in re.findall(r"\d+", text)]
    return numbers in (list(parts), list(parts[: len("hm")])) and not any(parts[len(numbers) :])


def _in_halves(hour: int, half: str) -> tuple[int, str]:
    """Return hour and half of the day of an hour on either clock: 15 is 3 p.m."""
    return (hour - 12, "p") if 12 < hour < 24 and not half else (hour, half)


def _clock_text(text: str) -> str:
    text = re.sub(r"\s*:\s*", ":", _unwrap(text))
    for words, half in _TIME_OF_DAY:
        text = words.sub(half, text)
    return text


def _unwrap(text: str) -> str:
    return _WRAPPED.sub(r"\1", text).strip(" .")


def _letters(text: str) -> str:
    return re.sub(r"[^\w]+|_", " ", text.lower()).strip()


# ---- choices ----
# Judge answers whose reference is the letter of an option: an answer counts only if it names exactly one option.


_LETTERS = "ABCDEFGHIJ"
_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|textit|mbox|textrm|boldsymbol|bf|operatorname)\s*\{([^{}]*)\}"
)
_LEAD = re.compile(
    r"(?:the )?(?:(?:final|correct|right|best) )?(?:option|choice|answer)(?: (?:option|choice))?(?: is)?\s*:?\s*"
    r"(?:(?:option|choice) )?(?=[(\[A-Ja-j])",
    re.I,
)
_LETTER = re.compile(r"(?P<open>[(\[])?\s*(?P<letter>[A-Ja-j])\s*(?P<close>[)\]])?(?P<mark>[.:])?(?![A-Za-z0-9_^'])")
_WITH_TEXT = re.compile(r"\([A-J]\) (?=\S)")
_OTHER_LETTER = re.compile(r"(?<![A-Za-z\\])(?:[B-HJ]|A(?! [a-z]))(?![A-Za-z])|[(\[]\s*[a-j]\s*[)\]]")
_JOINING = re.compile(r"\s*(?:or|and|not|is|isn't|was|nor|/|,|&|\||\+|-\s*[A-Ja-j]\b)(?![a-zA-Z])", re.I)
_JUDGING = re.compile(r"\b(?:wrong|incorrect|instead|not sure|either|neither|both)\b", re.I)
_CONFIRMED = re.compile(r"\s+is (?:the )?(?:correct|right)(?: (?:answer|option|choice))?$", re.I)
_COMMAND = re.compile(r"\\[a-zA-Z]+")


def choice_verdict(gold: str, answer: str) -> bool | None:
    """Return whether the answer names the reference's option; None if the reference is not the letter of an option."""
    letter = _plain_choice(gold).strip("() .,[]")
    if _WITH_TEXT.match(_plain_choice(gold)):
        # An answer that names no option may state the option's text or value, which other rules compare.
        chosen = _chosen(_plain_choice(answer))
        return None if chosen is None else chosen == _chosen(_plain_choice(gold))
    if len(letter) != 1 or letter not in _LETTERS:
        return None
    return _chosen(_plain_choice(answer)) == letter


def _chosen(text: str) -> str | None:
    """Return the one option that a text names; None if it names none or several, or is prose instead."""
    if len(text) == 1:
        return text  # not in upper case: a bare `e` or `i` is a number, not an option
    lead = _LEAD.match(text)
    text = _CONFIRMED.sub("", text[lead.end() :] if lead is not None else text)
    match = _LETTER.match(text)
    if match is None or (match["open"] and not match["close"]):
        return None
    # Lower case names an option only with a mark or a lead: `(b)`, `b.`, `the answer is b`.
    letter = match["letter"].upper() if match["close"] or match["mark"] or lead else match["letter"]
    rest = text[match.end() :].strip(" .,")
    if not rest:
        return letter
    is_marked = match["close"] is not None or match["mark"] is not None
    rest_letters = re.sub(r"[^A-Za-z]", "", _COMMAND.sub("", rest))
    if not is_marked:
        # Only the option's value may follow a bare letter: `B = 5`, `B 5`.
        is_value = rest_letters == "" and (rest[0] == "=" or rest[0].isalnum() or rest[0] in "$\\(,")
        return letter if is_value else None
    if _JOINING.match(rest) or _JUDGING.search(rest) or _OTHER_LETTER.search(_COMMAND.sub("", rest)):
        return None
    return letter


def _plain_choice(text: str) -> str:
    inner = _TEXT_COMMAND.sub(r"\1", _TEXT_COMMAND.sub(r"\1", text))
    return inner.replace("$", "").strip()
