"""Extract the text that counts as the math answer of a response, and normalise it.

String operations only, linear in the length of the response.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from klear_core.config.verify import MathConfig
from klear_core.prompts import NoAnswer
from klear_core.verify.math.numbers import brace_short_fractions, join_thousands, read_mixed_numbers

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_BEFORE_NFKC = str.maketrans(
    dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f", "\\,")
    | {"\u211d": r"\mathbb{R}"}
)
"""Characters to replace before NFKC: narrow and no-break spaces join digits, and NFKC would make them plain spaces."""
_SIGNS = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\ufe63": "-",
        "\u2044": "/",
        "\u00d7": r"\times ",
        "\u00f7": "/",
        "\u00b7": r"\cdot ",
    }
    | {"π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "≈": r"\approx "}
    | {"∈": r"\in ", "\u222a": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "\u2228": r"\lor ", "∧": r"\land "}
)
_SYNONYMS = (
    (re.compile(r"\\(?:leq|leqslant|leqq)(?![a-zA-Z])|<=|=<"), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant|geqq)(?![a-zA-Z])|>="), r"\\ge "),
    # not `!=`, because `5!=120` is a factorial
    (re.compile(r"\\ne(?![a-zA-Z])|\\not\s*=|\\(?:neg|lnot)(?![a-zA-Z])"), r"\\neq "),
    (re.compile(r"=>|-+>"), r"\\to "),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset "),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
)
_MIXED = re.compile(r"(?<=\d)(?=[¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])")
_SPACES = re.compile(r"(?<!\\)\\[,;:!> ]|\\q?quad(?![a-zA-Z])|~|\s+")
_SCIENTIFIC = re.compile(r"(?<![\w.\\}])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,4})(?![\w.])")
_ORDINAL = re.compile(r"(?<=\d)(?:\^?\{?\\(?:text|mathrm|textrm)\{(?:st|nd|rd|th)\}\}?|(?:st|nd|rd|th)\b)")
_LONE_BRACES = re.compile(r"(?<=[_^])\{(\w)\}")
_SIZING = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])|\\displaystyle(?![a-zA-Z])")
_FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_BRACES = re.compile(r"\\[{}\\]|[{}]")
_IDLE_SPACES = re.compile(r"(?<!\d) +| +(?!\d)")
_INTEGER = re.compile(r"[+-]?[0-9]{1,1000}", re.ASCII)
_MAX_QUOTED = 80
_MAX_BOXES = 64
"""Boxes of a response that are compared, from its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MathAnswer:
    """The answer that a response gives: its boxed texts in order, or (`is_unboxed`) the text to search."""

    texts: tuple[str, ...]
    is_unboxed: bool


def quoted(texts: tuple[str, ...]) -> str:
    """Return the texts of an answer as messages quote them: shortened, on one line, and safe to print."""
    text = " ".join(", ".join(texts).split())
    shown = text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "…"
    return '"' + "".join(map(_printable, shown)) + '"'


def _printable(char: str) -> str:
    # a model can write control characters, which a terminal would obey, and halves of characters
    return char if char.isprintable() else "\ufffd"


def find_answer(answer_text: str, cfg: MathConfig) -> MathAnswer | NoAnswer:
    """Return the answer in a response's text, by the settings' rules on boxes and size, or the reason for none."""
    boxes = boxed_texts(answer_text)
    if not boxes:
        return _unboxed_answer(answer_text, cfg)
    if boxes[-1] is None:
        return NoAnswer(reason="the last box is not closed")
    texts = tuple(box.strip() for box in boxes if box is not None)
    if not texts[-1]:
        return NoAnswer(reason="the last box is empty")
    read = texts[-1:] if cfg.several_boxes == "last" else texts
    for text in read:
        if len(text) > cfg.max_answer_chars:
            return NoAnswer(reason=f"the answer is longer than {cfg.max_answer_chars} characters")
        if nesting(text) > cfg.max_nesting:
            return NoAnswer(reason=f"the answer nests deeper than {cfg.max_nesting}")
    return MathAnswer(texts=texts[-_MAX_BOXES:], is_unboxed=False)


def boxed_texts(text: str) -> list[str | None]:
    """Return the contents of all outermost `\\boxed{}` in order, with None for one that is never closed."""
    contents: list[str | None] = []
    position = 0
    while (start := _BOX.search(text, position)) is not None:
        end = _closing_brace(text, start.end())
        if end is None:
            contents.append(None)
            break  # everything after an unclosed box is inside it
        contents.append(text[start.end() + 1 : end])
        position = end
    return contents


def normalise(text: str, *, commas_separate: bool = False) -> str:
    """Remove differences of spelling that never change a math answer's value.

    These are Unicode forms, spaces, delimiters, thousands separators and mixed numbers. With `commas_separate` a plain
    comma is never read as a thousands separator: `81,256` is two values.
    """
    text = _SUPERSCRIPTS.sub(_raise, text.translate(_BEFORE_NFKC))
    text = _MIXED.sub(" ", text)  # `3½` is 3 and 1/2, not 31/2
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS)
    text = text.strip().rstrip(".。").strip()
    for opening, closing in _DELIMITERS:
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
            text = text[len(opening) : len(text) - len(closing)].strip()
    boxes = boxed_texts(text)
    if len(boxes) == 1 and boxes[0] is not None and _BOX.match(text) and text.endswith("}"):
        text = boxes[0]
    text = _SIZING.sub("", text)
    text = _FRACTION.sub(r"\\frac", text)
    # Before spaces become plain ones: `1\,000` is one number, `1 000` is none.
    text = join_thousands(text, in_lists=not commas_separate)
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    for pattern, command in _SYNONYMS:
        text = pattern.sub(command, text)
    text = _ORDINAL.sub("", text)
    text = _LONE_BRACES.sub(r"\1", text)
    text = brace_short_fractions(text)
    text = _SPACES.sub(" ", text).strip().rstrip(".").strip()
    text = re.sub(" +", " ", text)
    return read_mixed_numbers(text)  # last: it expects fractions with braces, and single spaces


def _raise(match: re.Match[str]) -> str:
    return f"^{{{unicodedata.normalize('NFKC', match.group())}}}"


def same_text_or_integers(gold: str, answer: str) -> bool | None:
    """Compare two normalised answers without algebra: True for equal text, else by value for two plain integers.

    Returns None if neither rule applies.
    """
    if _IDLE_SPACES.sub("", gold) == _IDLE_SPACES.sub("", answer):
        return True
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        return int(gold) == int(answer)
    return None


def is_balanced(text: str) -> bool:
    """Return whether every brace is closed (escaped braces are text)."""
    depth = 0
    for match in _BRACES.finditer(text):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth < 0:
            return False
    return depth == 0


def nesting(text: str) -> int:
    """Return the greatest nesting depth of brackets of any kind."""
    depth = deepest = 0
    for char in text:
        if char in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "})]":
            depth = max(0, depth - 1)
    return deepest


def _unboxed_answer(answer_text: str, cfg: MathConfig) -> MathAnswer | NoAnswer:
    if cfg.box == "required":
        return NoAnswer(reason=r"no \boxed{}")
    text = answer_text.strip()
    if not text:
        return NoAnswer(reason="nothing after </think>")
    statement = stated_answer(text[-cfg.max_prose_chars :])
    if statement is None:
        return NoAnswer(reason="no box, and no finished sentence at the end that states an answer")
    return MathAnswer(texts=(statement,), is_unboxed=True)


def _closing_brace(text: str, opening: int) -> int | None:
    depth = 0
    for match in _BRACES.finditer(text, opening):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None


# ---- prose ----
# Find the sentence in which a text without a box states its answer. A number that is only mentioned is no answer.


_MARKS = re.compile(r"<\|[^|<>]{1,40}\|>|\*\*|__")
_DISPLAYED = re.compile(r"\\\[.*?\\\]|\$\$.*?\$\$", re.S)
_COLON_AT_LINE_END = re.compile(r":[ \t]*\n+[ \t]*(?=\S)")
_SENTENCE_END = re.compile(r"(?<=[.?。])\s+|(?<=!)\s+(?=[A-Z])|\n+")
_FINISHED = re.compile(r"""[.!?。][)"'”$*]*$|\\[\])]$|\$$""")
_CUT_OFF = re.compile(
    r"[,;:=+\-*/^_&(\[{<>]\s*$|\\[a-zA-Z]*$"
    r"|\b(?:and|or|so|the|a|an|is|are|be|of|to|for|with|that|because|if|then|which|where|than|at|by|in)[\s.…]*$",
    re.I,
)
_NAMED = re.compile(
    r"^\s*####\s*\S"
    r"|^\s*(?:final answer|answer|ans|a|solution|result)\s*[:=]\s*\S"
    r"|\banswer\b[^.!?\n]{0,60}?(?:\b(?:is|are|be|equals)\b|[:=])\s*\S"
    r"|\S\s+(?:is|are)\s+(?:indeed |definitely )?(?:the|our|my)\s+(?:final |correct |right )?"
    r"(?:answer|solution|result)\b",
    re.I,
)
_CONCLUDES = re.compile(
    r"^\W*(?:and |yes, )?(?:so|thus|hence|therefore|consequently|finally|accordingly"
    r"|in conclusion|to conclude|we conclude|it follows)\b"
    r"[^?]*(?:\b(?:is|are|was|were|be|equals?|gives?|has|have)\b|[=≈])\s*\S",
    re.I,
)
_DENIES = re.compile(
    r"\b(?:could ?n[o']t|could not|can ?not|can't|unable|do(?:es)?(?: not|n't) (?:know|have|exist|work)|did(?: not|n't)"
    r"|no (?:final )?answer|unsure|not sure|not certain"
    r"|not (?:be )?(?:the|an|my|our|correct|right)|is ?n[o']t|is not|was not"
    r"|wrong|incorrect|guess|unclear|unknown|undetermined|maybe|perhaps|might be|may be)\b",
    re.I,
)
_GOES_ON = re.compile(
    r"\b(?:wait|however|alternatively|hmm|let me|let's|but|actually|similarly"
    r"|suppose|assume|unless|check|verify|next)\b",
    re.I,
)
_VALUE = re.compile(
    r"[0-9$\\∞π]|\b(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|infinite)\b"
    r"|(?:\b(?:is|are|be)|[:=])\s*\(?[A-Za-z]+\W*$"
)
_MAX_AFTER = 2  # sentences that may follow the statement: "I think that's the final answer."
_MAX_BARE_CHARS = 80


def stated_answer(text: str) -> str | None:
    """Return the sentence that states the answer at the end of a finished text; None if there is none."""
    text = _DISPLAYED.sub(lambda m: " ".join(m[0].split()), _MARKS.sub("", text))
    text = _COLON_AT_LINE_END.sub(": ", text).strip()
    if len(text) <= _MAX_BARE_CHARS and _is_bare(text):
        return text
    sentences = [s.strip() for s in _SENTENCE_END.split(text) if s.strip()]
    for num_after, sentence in enumerate(reversed(sentences[-1 - _MAX_AFTER :])):
        if _DENIES.search(sentence):
            return None
        if _states(sentence):
            is_last = num_after == 0
            return None if is_last and not _is_complete(sentence) else sentence
        if _GOES_ON.search(sentence) or not _FINISHED.search(sentence):
            return None
    return None


def _states(sentence: str) -> bool:
    return bool((_NAMED.search(sentence) or _CONCLUDES.search(sentence)) and _VALUE.search(sentence))


def _is_complete(sentence: str) -> bool:
    """Return whether a sentence is not cut off.

    A conclusion needs its full stop. A sentence that names the answer may end without one, but not mid-phrase.
    """
    if _CUT_OFF.search(sentence):
        return False
    return bool(_FINISHED.search(sentence) or _NAMED.search(sentence))


def _is_bare(text: str) -> bool:
    """Return whether the text is only an expression or a word: `73`, `$x=\\frac12$`, `Yes.`"""
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text)
    return "\n" not in text and len(words) <= 1 and not _CUT_OFF.search(text) and not _DENIES.search(text)
