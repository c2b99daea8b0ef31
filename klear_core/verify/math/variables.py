"""Rename bound variables: `f(t)=t^2` is `f(x)=x^2`, and `2\\pi k, k\\in\\mathbb{Z}` is `2\\pi n, n\\in\\mathbb{Z}`.

A letter is bound if its text says so: as the argument of a definition, as a member of a set of numbers, left of the
colon of a set, or as the index of a sum or an integral. All other letters are the question's, and keep their names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBERS = {"integer": "Z", "whole number": "Z", "real": "R", "natural": "N", "positive integer": "N", "rational": "Q"}
_KIND = (
    r"(?:an? |any |all |every |some )?(?:arbitrary )?"
    r"(?P<of>positive integer|integer|whole number|real|natural|rational|(?:real )?constant|arbitrary)s?(?: numbers?)?"
)
_OPENING = (
    r"\s*(?:[,;:]|\()?\s*(?:\\text\s*\{\s*,?\s*(?:\(|)(?:for|where|with|and|as)?\s*(?:all|any|every|each|some|an?)?\s*"
    r"(?P<kind>positive integer|integer|real|natural|whole number|(?:real )?constant)?s?(?: numbers?| values?)?"
    r"(?: of)?\s*\})?\s*(?:\\forall\s*)?"
)
_MEMBER = r"\\in\s*(?P<set>\\mathbb\{[A-Z]\}(?:\s*[\^_]\s*\{?[+*\d\\a-z]{1,3}\}?)?)"
_LISTED = r"[a-zA-Z](?:\s*(?:,|\\text\s*\{\s*,?\s*and\s*\})\s*[a-zA-Z])*"
_DOMAIN = re.compile(
    rf"(?:(?=\s*(?:[,;:(]|\\text|\\forall)){_OPENING}(?P<names>{_LISTED})|(?P<name>[a-zA-Z]))"
    rf"\s*(?:{_MEMBER}|\\text\s*\{{\s*(?:is |in |are )?{_KIND}\s*[.)]?\s*\}})\s*\)?\s*$"
)
_FOR_ALL = re.compile(
    r"\s*,?\s*\\text\s*\{\s*,?\s*(?:for|where|with)\s+(?:all|any|every|each|some|an?)?\s*(?:arbitrary )?"
    r"(?:(?:positive integer|integer|real|natural|(?:real )?constant)s?)?(?: numbers?)?\s*\}"
    rf"\s*(?P<names>{_LISTED})\s*$"
    r"|\s*,?\s*\\forall\s*(?P<other>[a-zA-Z])\s*$"
)
_DEFINED = re.compile(r"(?<![\\a-zA-Z])(?P<name>[a-zA-Z])\s*\((?P<letters>[a-z](?:\s*,\s*[a-z])*)\)\s*=(?!=)")
_MAP = re.compile(r"^(?:[a-zA-Z]\s*:\s*)?(?P<letters>[a-z])\s*\\mapsto\s*(?P<body>.+)$", re.S)
_SEQUENCE = re.compile(r"^(?P<name>[a-zA-Z])_\{?(?P<letters>[a-z])\}?\s*=(?!=)")
_SET = re.compile(r"^\\\{\s*(?P<left>.+?)\s*(?:\\mid(?![a-zA-Z])|:|\\?\|)\s*(?P<right>.+)\\\}$", re.S)
_NAMES = re.compile(r"\(?\s*(?P<letters>[a-z](?:\s*,\s*[a-z])*)\s*\)?(?:\s*\\in\s*.*)?")
_MEMBER_ONLY = re.compile(rf"(?P<name>[a-z])\s*{_MEMBER}\s*")
_FORM_OF_SET = re.compile(
    r"^\\\{\s*([a-z])\s*(?:\\mid(?![a-zA-Z])|:|\\?\|)\s*\1\s*=(?!=)([^=<>]*\\in(?![a-zA-Z])[^=<>]*)\\\}$"
)
"""`\\{x | x=2k, k\\in\\mathbb{Z}\\}`, which is `x=2k, k\\in\\mathbb{Z}`."""
_INDEX = re.compile(r"\\(?:sum|prod|bigcup|bigcap)_\s*\{?\s*(?P<letters>[a-z])\s*=")
_DIFFERENTIAL = re.compile(r"(?<![\\a-zA-Z])d\s*(?P<letters>[a-z])(?![a-zA-Z])")
_STATEMENT = re.compile(r"[<>]|\\(?:le|ge|neq|in|ni|mid|equiv)(?![a-zA-Z])")
_LETTER = re.compile(r"\\text\s*\{[^{}]*\}|\\[a-zA-Z]+|[a-zA-Z]")
_CONSTANT = re.compile(r"(\+\s*)([A-Zck])$")
_NUMBERED_CONSTANT = re.compile(r"(?<![\\a-zA-Z])([Cc])_\{?[01]\}?(?!\d)")
_SEVERAL_CONSTANTS = re.compile(r"(?<![\\a-zA-Z])[Cc]_\{?([1-4])\}?(?!\d)")
_HEAD = re.compile(r"\s*([a-zA-Z](?:\s*\([^()]*\))?)\s*=(?!=)")
_CONSTANTS, _INTEGERS = frozenset("CcKkA"), frozenset("jklmn")
_FRESH = "uvwpqhsrabjkmnlzyxt"
_CASED = re.compile(
    r"\\(?:text|mathrm|mathbb|mathcal|operatorname|begin|end)\s*\{[^{}]*\}"
    r"|(?P<name>\\(?:[Gg]amma|[Dd]elta|[Tt]heta|[Ll]ambda|[Xx]i|[Ss]igma|[Pp]hi|[Pp]si|[Oo]mega)(?![a-zA-Z]))"
    r"|\\[a-zA-Z]+|(?P<letter>[a-zA-Z])"
)
"""A letter or its command; words, sets of numbers and other commands have no case."""
_NO_CAPITALS = (r"\tau", r"\mu", r"\nu", r"\rho", r"\eta", r"\zeta", r"\kappa", r"\chi")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """A text, the letters that it binds in order, the set that they range over, and the text without a definition."""

    text: str
    letters: tuple[str, ...] = ()
    domain: str = ""
    body: str = ""


def with_same_bound_names(gold: str, answer: str) -> tuple[str, str] | None:
    """Return both texts with the same names for what they bind; None if they range over different sets."""
    gold, answer = _same_parameter(*_same_constant(gold, answer))
    gold_bound, answer_bound = _read(gold), _read(answer)
    if gold_bound.domain and answer_bound.domain and gold_bound.domain != answer_bound.domain:
        return None
    if gold_bound.body and answer_bound.body and gold_bound.text != gold_bound.body != answer_bound.text:
        is_map = gold_bound.text == "" or answer_bound.text == ""
        if is_map:
            gold_bound = _Bound(text=gold_bound.body, letters=gold_bound.letters)
            answer_bound = _Bound(text=answer_bound.body, letters=answer_bound.letters)
    texts = (gold_bound.text or gold_bound.body, answer_bound.text or answer_bound.body)
    letters = (gold_bound.letters, answer_bound.letters)
    if letters[0] == letters[1] or len(letters[0]) != len(letters[1]):
        return texts
    used = {letter for text in texts for letter in _letters(text)}
    fresh = [letter for letter in _FRESH if letter not in used]
    if len(fresh) < len(letters[0]):
        return texts
    renamed = (_renamed(text, dict(zip(old, fresh, strict=False))) for text, old in zip(texts, letters, strict=True))
    return next(renamed), next(renamed)


def with_cases_apart(gold: str, answer: str, *, is_sentence: bool = False) -> tuple[str, str]:
    """Return both texts with other names for capitals that stand in one text with their small letter: R and r differ.

    The parser ignores case, so that `R^2-r^2` would be 0. A sentence has letters in all of its words: of those only the
    reference's own count.
    """
    capitals: set[str] = set()
    for text in (gold, answer):
        names = {match["name"] or match["letter"] for match in _CASED.finditer(text)} - {None}
        capitals |= {name for name in names if name != name.lower() and name.lower() in names}
    if is_sentence:
        capitals = {name for name in capitals if name in gold or name.lower() in gold}
    if r"\begin" in gold + answer:
        capitals.discard("T")  # of a matrix `^T` is the transpose, which the parser knows by this letter
    free = [name for name in _NO_CAPITALS if name not in gold + answer]
    renamed = dict(zip(sorted(capitals), free, strict=False))

    def spelled(match: re.Match[str]) -> str:
        new = renamed.get(match["name"] or match["letter"] or "")
        return match[0] if new is None else f"{new} "

    return (_CASED.sub(spelled, gold), _CASED.sub(spelled, answer)) if renamed else (gold, answer)


def _read(text: str) -> _Bound:
    """Return what a text binds, without the words that say over which numbers."""
    text = _FORM_OF_SET.sub(r"\1=\2", text.strip())
    domain, ranging = "", tuple[str, ...]()
    for_all = _FOR_ALL.search(text)
    found = _DOMAIN.search(text) if not text.startswith(r"\{") else None
    # In `x>0, x\in\mathbb{Z}` the set is a part of the answer.
    if found is not None and found.start() > 0 and _STATEMENT.search(text[: found.start()]) is None:
        kind = found["kind"] or found["of"] or ""
        numbers = found["set"] or (rf"\mathbb{_NUMBERS[kind]}" if kind in _NUMBERS else "")
        domain = re.sub(r"[\s{}]", "", numbers)
        text, ranging = text[: found.start()].strip(), _split_names(found["names"] or found["name"])
    elif for_all is not None and for_all.start() > 0:
        text, ranging = text[: for_all.start()].strip(), _split_names(for_all["names"] or for_all["other"])
    defined = _definition(text)
    if defined is not None:
        # A definition's argument may be any number of its domain, which is the question's.
        is_argument = set(ranging) <= {*defined.letters}
        return defined if is_argument else _Bound(text=text, letters=(*defined.letters, *ranging), domain=domain)
    if ranging:
        return _Bound(text=text, letters=ranging, domain=domain)
    return _read_set(text) or _read_index(text) or _Bound(text=text)


def _definition(text: str) -> _Bound | None:
    mapped = _MAP.match(text)
    if mapped is not None:
        return _Bound(text="", letters=(mapped["letters"],), body=mapped["body"])
    arguments = {_split_names(match["letters"]) for match in _DEFINED.finditer(text)}
    if len(arguments) == 1:
        first = _DEFINED.match(text)
        body = text[first.end() :].strip() if first is not None else ""
        return _Bound(text=text, letters=arguments.pop(), body=body)
    sequence = _SEQUENCE.match(text)
    if sequence is not None and sequence["letters"] in _letters(text[sequence.end() :]):
        return _Bound(text=text, letters=(sequence["letters"],))
    return None


def _read_set(text: str) -> _Bound | None:
    found = _SET.match(text)
    if found is None:
        return None
    member = _MEMBER_ONLY.fullmatch(found["right"])
    if member is not None and _NAMES.fullmatch(found["left"]) is None:
        # `\{2k : k \in \mathbb{Z}\}` is `2k, k \in \mathbb{Z}`
        return _Bound(text=found["left"], letters=(member["name"],), domain=re.sub(r"[\s{}]", "", member["set"]))
    names = _NAMES.fullmatch(found["left"])
    ranging = _letters(found["right"])
    if names is None and len(ranging) == 1 and ranging <= _letters(found["left"]):
        return _Bound(text=re.sub(r"\s*\\mid(?![a-zA-Z])\s*", ":", text), letters=tuple(ranging))
    if names is not None:
        return _Bound(text=re.sub(r"\s*\\mid(?![a-zA-Z])\s*", ":", text), letters=_split_names(names["letters"]))
    return None


def _read_index(text: str) -> _Bound | None:
    found = _INDEX.search(text) or (_DIFFERENTIAL.search(text) if r"\int" in text else None)
    return _Bound(text=text, letters=(found["letters"],)) if found is not None else None


def _same_constant(gold: str, answer: str) -> tuple[str, str]:
    """Write the constant of integration as the reference does: `x^2+K` is `x^2+C`."""
    gold_end, answer_end = _CONSTANT.search(gold), _CONSTANT.search(answer)
    if gold_end is None or answer_end is None or gold_end[2] != "C" or answer.count(answer_end[2]) > 1:
        return gold, answer
    return gold, answer[: answer_end.start()] + answer_end[1] + "C"


def _same_parameter(gold: str, answer: str) -> tuple[str, str]:
    """Name a free parameter as the reference does: `y=Ke^x` is `y=Ce^x`, and `n=3m+1` is `n=3k+1`.

    It is free if it is the only letter in which the texts differ, and is named as constants or integers are.
    """
    are_numbered = [_SEVERAL_CONSTANTS.search(text) is not None for text in (gold, answer)]
    if are_numbered[0] != are_numbered[1] and (_HEAD.match(gold) or _HEAD.match(answer)):
        gold, answer = _in_letters(gold), _in_letters(answer)
    if "_" not in gold or "_" not in answer:
        gold, answer = (_NUMBERED_CONSTANT.sub(r"\1", text) for text in (gold, answer))
    old, new = _letters(answer) - _letters(gold), _letters(gold) - _letters(answer)
    if len(old) != 1 or len(new) != 1:
        return gold, answer
    names = old | new
    heads = [_HEAD.match(text) for text in (gold, answer)]
    is_equation = heads[0] is not None and heads[1] is not None and not names & _letters(heads[0][1] + heads[1][1])
    is_declared = is_equation and old <= {*_read(answer).letters}
    is_periodic = r"\pi" in gold and _letters(gold) == new
    if is_declared or (names <= _CONSTANTS and is_equation) or (names <= _INTEGERS and (is_equation or is_periodic)):
        return gold, _renamed(answer, {old.pop(): new.pop()})
    return gold, answer


def _in_letters(text: str) -> str:
    """Return `y=Ae^x+Be^{-x}` for `y=C_1e^x+C_2e^{-x}`; one constant stays."""
    numbers = sorted({match[1] for match in _SEVERAL_CONSTANTS.finditer(text)})
    letters = dict(zip(numbers, "ABDE", strict=False))
    if not 2 <= len(numbers) <= len(letters) or _letters(text) & {*letters.values()}:
        return text
    return _SEVERAL_CONSTANTS.sub(lambda m: f" {letters[m[1]]} ", text)


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(name[0] for name in _LETTER.finditer(text) if len(name[0]) == 1)


def _letters(text: str) -> set[str]:
    return {match[0] for match in _LETTER.finditer(text) if len(match[0]) == 1}


def _renamed(text: str, names: dict[str, str]) -> str:
    return _LETTER.sub(lambda m: names.get(m[0], m[0]), text)
