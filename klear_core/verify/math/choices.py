"""Judge answers whose reference is the letter of an option: an answer counts only if it names exactly one option."""

from __future__ import annotations

import re

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
