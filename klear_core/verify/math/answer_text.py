"""Extract the text that counts as the math answer of a response, and normalise it.

String operations only, linear in the length of the response.
"""

# ruff: noqa: RUF001  the signs that are read look like others

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from klear_core.config.verify import MathConfig
from klear_core.prompts import NoAnswer
from klear_core.verify.math.numbers import (
    brace_short_fractions,
    join_thousands,
    read_angles,
    read_conjugates,
    read_decimal_commas,
    read_mixed_numbers,
    read_repeating,
)
from klear_core.verify.math.spelling import (
    Rewrite,
    closing_brace,
    on_one_line,
    plain_characters,
    plain_commands,
    rewritten,
)
from klear_core.verify.math.words import in_english, meant_symbol

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_SYNONYMS: tuple[Rewrite, ...] = (
    ((r"\leq", "<=", "=<"), re.compile(r"\\(?:leq|leqslant|leqq)(?![a-zA-Z])|<=|=<"), r"\\le "),
    ((r"\geq", ">="), re.compile(r"\\(?:geq|geqslant|geqq)(?![a-zA-Z])|>="), r"\\ge "),
    # not `!=`, because `5!=120` is a factorial
    ((r"\n", r"\lnot"), re.compile(r"\\ne(?![a-zA-Z])|\\not\s*=|\\(?:neg|lnot)(?![a-zA-Z])"), r"\\neq "),
    (("=>", "->"), re.compile(r"=>|-+>"), r"\\to "),
    ((r"\varnothing",), re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset "),
    ((r"\lt",), re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    ((r"\gt",), re.compile(r"\\gt(?![a-zA-Z])"), ">"),
)
_SPACES = re.compile(r"(?<!\\)\\[,;:!> ]|\\q?quad(?![a-zA-Z])|~|\s+")
_SCIENTIFIC = re.compile(r"(?<![\w.\\}])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,4})(?![\w.])")
_ORDINAL = re.compile(
    r"(?<=\d)(?:\^?\{?\\(?:text|mathrm|textrm)\{(?:st|nd|rd|th)\}\}?|(?:st|nd|rd|th)\b)"
    r"(?!\s*(?:\\text\s*\{)?\s*(?:root|power))"
)
_LONE_BRACES = re.compile(r"(?<=[_^])\{(\w)\}")
_BRACES = re.compile(r"\\[{}\\]|[{}]")
_IDLE_SPACES = re.compile(r"(?<!\d) +| +(?!\d)")
_INTEGER = re.compile(r"[+-]?[0-9]{1,1000}", re.ASCII)
_PLAIN = re.compile(r"-?[0-9]{1,18}(?:\.[0-9]{1,18})?", re.ASCII)
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
        end = closing_brace(text, start.end())
        if end is None:
            contents.append(None)
            break  # everything after an unclosed box is inside it
        contents.append(text[start.end() + 1 : end])
        position = end
    return contents


# The samples of a problem often give the same answer, and are compared with the same references.
@lru_cache(maxsize=4096)
def normalise(text: str, *, commas_separate: bool = False) -> str:
    """Remove differences of spelling that never change a math answer's value.

    These are characters, presentation, words of other languages (`spelling.py`, `words.py`), spaces, thousands
    separators, and other ways to write a number. With `commas_separate` a plain comma is never read as a thousands
    separator: `81,256` is two values.
    """
    if _PLAIN.fullmatch(text):
        return text
    text = on_one_line(plain_commands(plain_characters(text)))
    text = in_english(text)
    text = read_decimal_commas(text)
    # Before spaces become plain ones: `1\\,000` is one number, `1 000` is none.
    text = join_thousands(text, in_lists=not commas_separate)
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    text = rewritten(text, _SYNONYMS)
    text = _ORDINAL.sub("", text)
    text = _LONE_BRACES.sub(r"\1", text)
    text = brace_short_fractions(text)
    text = _SPACES.sub(" ", text).strip().rstrip(".").strip()
    text = re.sub(" +", " ", text)
    text = read_angles(read_conjugates(read_repeating(text)))
    return meant_symbol(read_mixed_numbers(text))  # it expects fractions with braces, and single spaces


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
    if statement.value is not None and nesting(statement.value) <= cfg.max_nesting:
        return MathAnswer(texts=(statement.value,), is_unboxed=False)
    return MathAnswer(texts=(statement.sentence,), is_unboxed=True)


# ---- prose ----
# Find the answer that a text without a box states at its end. A number that is only mentioned is no answer.


_MARKS = re.compile(r"<\|[^|<>]{1,40}\|>|\*\*|__|^\*(?=[^\s*])|(?<=[^\s*])\*$", re.M)
_DISPLAYED = re.compile(r"\\\[.*?\\\]|\$\$.*?\$\$", re.S)
_COLON_AT_LINE_END = re.compile(r":[ \t]*\n+[ \t]*(?=\S)")
_REASON = re.compile(r",? (?:because|since) [^?\n]{1,300}[.!]$")
_SOLE = re.compile(r"the\b[^.?!;:,]{1,80}?\b(?:is|are|was|were|equals|costs)\s+(\S[^?!;:]{0,40}?)[.!]?", re.I)
"""One sentence that is the complete text: `The area is 7.`"""
_VERB_AT_LINE_END = re.compile(r"(\b(?:is|are|be|equals))[ \t]*\n+[ \t]*(?=\\\[|\$\$)")
_SENTENCE_END = re.compile(r"(?<=[.?。])\s+|(?<=!)\s+(?=[A-Z])|\n+")
_FINISHED = re.compile(r"""[.!?。][)"'”$*]*$|\\[\])]$|\$$""")
_CUT_OFF = re.compile(
    r"[,;:=+\-*/^_&(\[{<>]\s*$|\\[a-zA-Z]*$"
    r"|\b(?:and|or|so|the|(?-i:a)|an|is|are|be|of|to|for|with|that|because|if|then|which|where|than|at|by|in)[\s.…]*$",
    re.I,
)
_NAMED = re.compile(
    r"^\s*####\s*\S"
    r"|^\s*(?:final (?:answer|result)|answer|ans|a|solution|result)\s*(?:[:=\u2013]|\s-\s)\s*\S"
    r"|\b(?:answers?|(?:correct|right|best) (?:option|choice))\b[^.!?\n]{0,60}?(?:\b(?:is|are|be|equals)\b|[:=])\s*\S"
    r"|^(?:the )?(?:final )?result is\s+\S"
    r"|(?:^|\b(?:option|choice)\s+)\(?[A-J]\)? is (?:the )?(?:correct|right)\b"
    r"|\bI choose (?:option |choice )?\(?[A-J]\b"
    r"|\S\s+(?:is|are)\s+(?:indeed |definitely )?(?:the|our|my)\s+(?:final |correct |right )?"
    r"(?:answer|solution|result)\b",
    re.I,
)
_CONCLUDES = re.compile(
    r"^\W*(?:and |yes, )?(?:so|thus|hence|therefore|consequently|finally|accordingly"
    r"|in conclusion|to conclude|we conclude|it follows)\b"
    r"[^?]*(?:\b(?:is|are|was|were|be|equals?|gives?|has|have)\b|[=≈])\s*\S"
    r"|^[^?]*\b(?:is|are|was|were|equals?|has|have)\s+(?:thus|hence|therefore|consequently)\s+\S",
    re.I,
)
_DENIES = re.compile(
    r"\b(?:could ?n[o']t|could not|can ?not|can't|unable|do(?:es)?(?: not|n't) (?:know|have|exist|work)|did(?: not|n't)"
    r"|no (?:final )?answer|unsure|not sure|not certain"
    r"|not (?:be )?(?:the|an|my|our|correct|right)|is ?n[o']t|is not|was not"
    r"|wrong|incorrect|guess|unclear|unknown|undetermined|maybe|perhaps|might be|may be|could be)\b",
    re.I,
)
_GOES_ON = re.compile(
    r"\b(?:wait|however|alternatively|hmm|let me|let's|but|actually|similarly"
    r"|suppose|assume|unless|check|verify|next)\b",
    re.I,
)
_VALUE = re.compile(
    r"[0-9$\\∞π]|\b(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|infinite)\b"
    r"|(?:\b(?:is|are|be)|[:=])\s*\(?[A-Za-z]+(?: [A-Za-z]+){0,2}\W*$|\b(?:option|choice)\b"
)
_TAG = re.compile(
    r"<(?:final_?)?answer>\s*(.*?)\s*</(?:final_?)?answer>|\[ANSWER\]\s*(.*?)\s*\[/ANSWER\]"
    r"|\{[^{}]{0,200}?\"(?:final_)?answer\"\s*:\s*(?:\"([^\"\n]{0,200})\"|([^\"{},\n]{1,200}))\s*\}",
    re.I | re.S,
)
_BOLD_LINE = re.compile(r"(?:\*\*|__)([^*]+)(?:\*\*|__)\s*[.!]?")
_HEADING = re.compile(r"(?:#{1,6}\s*|\*\*)?(?:the )?(?:final |correct )?(?:answer|result)\s*:?\s*(?:\*\*)?\s*:?", re.I)
_LABELLED = re.compile(
    r"\W*(?:step|case|part|example|method|note|problem|question|conclusion|solution|proof|lemma|remark|section)\b", re.I
)
_WORDS = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}(?![A-Za-z]*\})")
_VALUE_AT = tuple(
    re.compile(pattern, re.I | re.S)
    for pattern in (
        r"^\s*####\s*(.+)$",
        r"\b(?:option|choice)\s+(\(?[A-J]\)?) is (?:the )?(?:correct|right)\b",
        r"(?:^(?:so|thus|hence|therefore)\s+|^|[,:]\s+)(?-i:(\(?[A-J]\)?)) is (?:indeed )?"
        r"(?:the )?(?:correct|right)(?: (?:one|answer|option|choice))?\W*$",
        r"\bI choose (?:option |choice )?(\(?[A-J]\)?)\W*$",
        r"(?:^|\s)(\$[^$]{1,60}\$|\\\(.{1,60}?\\\)|[^\s,]*[\d\\][^\s,]*|\(?[A-J]\)?)\s+is (?:indeed |definitely )?"
        r"(?:the|our|my) (?:final |correct |right )?(?:answer|solution|result)\W*$",
        r"^(?:.*\b(?:answers?|(?:option|choice|result))\b[^.!?\n]{0,60}?(?:\b(?:is|are|be|equals)\b|[:=\u2013]|\s-\s)"
        r"|\s*(?:a|ans|solution)\s*[:=])\s*:?\s*(?:option |choice )?(\S.*)$",
    )
)
"""How a sentence states a value; the first group is the value."""
_CONCLUDED = (
    re.compile(
        r"^\W*(?:and |yes, )?(?:so|thus|hence|therefore)\b,?\s+(?:we (?:get|have|find) )?"
        r"((?:\$|\\\()?\s*[a-zA-Z](?:_\w)?(?:\([a-z]\))?\s*=.*)$",
        re.I | re.S,
    ),
    re.compile(r"^.*\b(?:is|are|was|were|be|equals?|gives?|has|have)\s+(\S.*)$", re.I | re.S),
)
"""How a conclusion states a value: an equation, or what follows the last verb."""
_BOUNDING_WORDS = re.compile(
    r"\b(?:at (?:least|most)|(?:more|less|greater|fewer) than|or (?:more|less|greater|fewer)|between|or|and)\b", re.I
)
_FILLER = re.compile(
    r"^(?:(?:indeed|definitely|simply|just|therefore|thus|then|clearly|also|still|again|option|choice"
    r"|donc|quindi|dunque|pertanto|portanto|daher|somit|folglich)\s+)+",
    re.I,
)
_IS = "The answer is "
_FOREIGN = tuple(
    (re.compile(pattern, re.I), replacement)
    for pattern, replacement in (
        (r"(?:答案|答え|解答|結果|结果|选项)(?:并)?(?:不是|ではない)", "The answer is not "),
        (r"(?<![^\s*])答\s*[:：]\s*(?:[^\d。\n$\\不非没至最约超少多]{0,20}(?=[\d$\\]))?", _IS),
        (r"(?:答案|答え|解答|结果|选项)\s*(?:应该是|应为|是|为|等于|は|[:：=])\s*", _IS),
        (r"(?<!不)(?:答案|故|应|应该|所以|因此)?\s*(?:选择|选|選)\s*(?:项)?\s*[:：]?\s*(?=\(?[A-J])", _IS),
        (r"(?:です|である|となります|입니다|이다)\s*[.。]?(?=\s|$)", "."),
        (r"(?:정답|답)\s*(?:은|는|[:：])\s*", _IS),
        (r"\bist die (?:richtige |endgültige )?(?:Antwort|Lösung)\s+(?!ist|lautet)", f"{_IS.lower()}"),
        (r"\b(?:Antwort|Lösung|Ergebnis)\s*(?:ist|lautet)\s+nicht\b", "The answer is not"),
        (r"\b(?:Antwort|Lösung|Ergebnis)\s*(?:ist|lautet|:)\s*", _IS),
        (r"\b(?:réponse|solution|résultat)(?: finale| correcte)?\s*n['’]est pas", "The answer is not"),
        (r"\b(?:réponse|solution|résultat)(?: finale?| correcte)?\s*(?:est|:)\s*", _IS),
        (
            r"\b(?:respuesta|resposta|risposta|solución|solução|soluzione|resultado|risultato)(?: \w+)?"
            r"\s+(?:no es|não é|non è)",
            "The answer is not",
        ),
        (
            r"\b(?:respuesta|resposta|risposta|solución|solução|soluzione|resultado|risultato)(?: \w+)?"
            r"\s*(?:es|é|è|:)\s*",
            _IS,
        ),
        (r"\b(?:ответ|результат)\s*не\b", "The answer is not"),
        (r"\b(?:ответ|результат)\s*(?:равен|это|[:—-])\s*", _IS),
        (
            r"\b(?:antwoord|svaret|odpověď|odpowiedź|răspunsul|válasz|vastaus|cevap)\s*(?:is|är|er|je|to|este|on|:)?\s*(?:niet|inte|ikke|nie|nu)\b",
            "The answer is not",
        ),
        (r"\b(?:antwoord|svaret|odpověď|odpowiedź|răspunsul|vastaus)\s*(?:is|är|er|je|to|este|on|:)\s*", _IS),
        (r"\bcevap\s+(\S{1,40}?)['’]?[dt][ıiuü]r\b", rf"{_IS}\1"),
        (r"الجواب\s*(?:ليس)", "The answer is not "),
        (r"(?:الجواب|الإجابة)\s*(?:هو|هي|:)\s*", _IS),
    )
)
"""How other languages say "the answer is", and that it is not."""
_MAX_VALUE_CHARS = 120
_MAX_AFTER = 2  # sentences that may follow the statement: "I think that's the final answer."
_MAX_BARE_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A statement of the answer, and the value alone where it can be told from the words around it."""

    sentence: str
    value: str | None


def stated_answer(text: str) -> Stated | None:
    """Return what states the answer at the end of a finished text; None if nothing does."""
    tagged = _tagged(text)
    if tagged is not None:
        inner = stated_answer(tagged) if _NAMED.search(tagged) else None
        return inner or (Stated(sentence=tagged, value=tagged) if tagged else None)
    alone = _alone(text) or _sole(text)
    if alone is not None:
        return Stated(sentence=alone, value=alone)
    for pattern, replacement in _FOREIGN:
        text = pattern.sub(replacement, text)
    sentence = _stating_sentence(text)
    return None if sentence is None else Stated(sentence=sentence, value=_value_in(sentence))


def _tagged(text: str) -> str | None:
    """Return the content of the last answer tag or JSON answer, "" if it is empty or taken back; None without one."""
    found = [*_TAG.finditer(text)]
    if not found:
        return None
    last = found[-1]
    after = text[last.end() :]
    content = next(group for group in last.groups() if group is not None).strip()
    return "" if _GOES_ON.search(after) or _DENIES.search(after) else content


def _alone(text: str) -> str | None:
    """Return the last line if it is one value in bold, or stands under a heading that says that it is the answer."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    before = lines[-2] if len(lines) > 1 else ""
    bold = _BOLD_LINE.fullmatch(lines[-1]) if lines else None
    last = lines[-1] if lines else ""
    value = bold[1].strip() if bold is not None else last
    is_answer = _HEADING.fullmatch(before) is not None or (bold is not None and not before.endswith(":"))
    is_label = _LABELLED.match(value) or _NAMED.search(value) or _DENIES.search(value) or value.endswith(":")
    is_value = 0 < len(value) <= _MAX_BARE_CHARS and not is_label and len(_WORDS.findall(value)) <= 3
    return value if is_answer and is_value else None


def _sole(text: str) -> str | None:
    """Return the value that the only sentence of a text gives: of `The area is 7.`"""
    sole = _SOLE.fullmatch(_MARKS.sub("", text).strip())
    if sole is None or not _FINISHED.search(text) or _DENIES.search(text) or _GOES_ON.search(text):
        return None
    value = _FILLER.sub("", sole[1])
    return value if re.search(r"[\d\\]", value) and len(_WORDS.findall(value)) <= 3 else None


def _value_in(sentence: str) -> str | None:
    """Return the value that a sentence states if few words stand beside it; None if its words must be read too."""
    text = sentence.strip()
    for pattern in _VALUE_AT:
        found = pattern.search(text)
        if found is not None:
            value = _without_end(found[1])
            is_short = 0 < len(value) <= _MAX_VALUE_CHARS and len(_WORDS.findall(value)) <= 3
            return value if is_short and not re.search(r"[.?!]\s", value) else None
    for pattern in _CONCLUDED:
        found = pattern.search(text)
        value = _without_end(found[1]) if found is not None else ""
        has_other_words = _WORDS.search(_BOUNDING_WORDS.sub(" ", value)) is not None
        if 0 < len(value) <= _MAX_VALUE_CHARS and re.search(r"\d", value) and not has_other_words:
            return value
    return None


def _without_end(value: str) -> str:
    """Return a value without the end of its sentence and the words that lead to it; `5!.` is a factorial."""
    value = value.strip()
    value = value[:-1] if value.endswith("!.") else value.rstrip(".!。")
    return _FILLER.sub("", value.strip().removeprefix(":").strip())


def _stating_sentence(text: str) -> str | None:
    text = _DISPLAYED.sub(lambda m: " ".join(m[0].split()), _MARKS.sub("", text))
    text = _VERB_AT_LINE_END.sub(r"\1 ", _COLON_AT_LINE_END.sub(": ", text)).strip()
    if len(text) <= _MAX_BARE_CHARS and _is_bare(text):
        return text
    sentences = [_REASON.sub(".", s.strip()) for s in _SENTENCE_END.split(text) if s.strip()]
    for num_after, sentence in enumerate(reversed(sentences[-1 - _MAX_AFTER :])):
        if _DENIES.search(sentence):
            return None
        if (_NAMED.search(sentence) or _CONCLUDES.search(sentence)) and _VALUE.search(sentence):
            is_last = num_after == 0
            return None if is_last and not _is_complete(sentence) else sentence
        if _GOES_ON.search(sentence) or not _FINISHED.search(sentence):
            return None
    return None


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
    if _LABELLED.match(text):
        return False
    return "\n" not in text and len(words) <= 1 and not _CUT_OFF.search(text) and not _DENIES.search(text)
