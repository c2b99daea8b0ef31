"""Tell whether two similar questions can be the same problem: numbers, signs and reference answers must agree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from klear_core.artifacts.tests_file import load_tests
from klear_core.code_tests import AssertTests, CallTests
from klear_core.data.normalise import is_word, tokens_of
from klear_core.data.sketch import hash_of
from klear_core.types import CustomReference, MathReference, Reference, UnverifiableReference

_OPERATOR_NAMES = """
sqrt frac binom sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln exp lim det gcd lcm max min sum
prod int iint oint partial lfloor rfloor lceil rceil floor ceil cup cap notin subset subseteq setminus circ pm mp
mod pmod bmod infty infinity oplus neg wedge vee
"""
_OPERATORS = frozenset(_OPERATOR_NAMES.split())
_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_TENS = "thirty forty fifty sixty seventy eighty ninety"
_OPPOSITES = (
    "maximum maximal maximize largest greatest biggest longest most highest",
    "minimum minimal minimize smallest least fewest shortest lowest",
    "more greater larger", "less smaller fewer", "increasing ascending", "decreasing descending", "even", "odd",
    "not no never cannot without neither nor", "non", "positive", "negative", "row rows", "column columns",
    "left", "right",
    "inside", "outside", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
    "last", "area", "perimeter", "volume", "product", "difference", "quotient", "remainder",
    "dozen", "hundred", "thousand", "million", "billion", "half", "quarter", "twice double", "thrice triple",
    "rational", "irrational", "finite", "infinite", "unequal", "inscribed", "circumscribed",
    "numerator", "denominator", "clockwise", "counterclockwise anticlockwise", "horizontal", "vertical",
    "convex", "concave", "radius", "diameter", "median",
)  # fmt: skip
_MEANS = {word: str(number) for number, word in enumerate(_NUMBER_WORDS.split())}
_MEANS |= {word: str(10 * number) for number, word in enumerate(_TENS.split(), 3)}
for _group in _OPPOSITES:
    _MEANS |= dict.fromkeys(_group.split(), _group.split()[0])
"""Words that decide what is asked, each with the word or the number that stands for all that mean the same."""
_BAR = "overline"
_DECISIVE = _OPERATORS | _MEANS.keys() | {_BAR}
_BRACKETS = frozenset("()[]<>|!=&")
_FUNCTION = re.compile(r"\bdef\s+(\w+)\s*\(|\bassert\s+(?:not\s+)?(?:\w+\()?(\w+)\s*\(")
_LAYOUT_OF_ANSWER = re.compile(r"\\(?:text|mbox|mathrm|boxed)(?![a-zA-Z])|\\[,;:! ]|\.$")
_ANSWER, _NAME = 0, 1
"""Hashes that stand for the question itself and for the name of the function to write."""
_MAX_TESTS = 8
"""Tests of a program that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceMarks:
    """Hashes of a reference: two references disagree if they answer the same and have no answer in common."""

    asked: frozenset[int]
    """Hashes of the things asked for: the question itself, a function's name, or inputs of a program."""
    told: frozenset[int]
    """The answers."""

    def disagree(self, other: ReferenceMarks) -> bool:
        """Return whether the references contradict each other."""
        return not self.asked.isdisjoint(other.asked) and self.told.isdisjoint(other.told)

    def share_an_answer(self, other: ReferenceMarks) -> bool:
        """Return whether the references agree on an answer or a test; a function's name alone proves little."""
        return _NAME not in self.asked and not self.told.isdisjoint(other.told)


def facts_of(tokens: Sequence[str]) -> list[str]:
    """Return numbers, signs, operators and decisive words in order. Questions that differ in them differ in meaning."""
    return [fact for _, fact in _facts(tokens)]


def first_fact(tokens: Sequence[str]) -> int:
    """Return the index of the first number, operator or decisive word (not a bracket), or the number of tokens."""
    return next((i for i, fact in _facts(tokens) if fact not in _BRACKETS), len(tokens))


def marks_of(question: str, reference: Reference) -> ReferenceMarks:
    """Return what a reference says, for comparison with others of the same domain."""
    if isinstance(reference, MathReference):
        answers = frozenset(hash_of(_plain_answer(answer)) for answer in reference.answers)
        return ReferenceMarks(asked=frozenset({_ANSWER}), told=answers)
    if isinstance(reference, CustomReference):
        return ReferenceMarks(asked=frozenset({_ANSWER}), told=frozenset({hash_of(reference.value_json)}))
    if isinstance(reference, UnverifiableReference):
        return ReferenceMarks(asked=frozenset(), told=frozenset())
    tests = load_tests(reference)
    if isinstance(tests, CallTests):
        return ReferenceMarks(asked=frozenset({_NAME}), told=frozenset({hash_of(tests.fn_name)}))
    if isinstance(tests, AssertTests):
        names = [name for match in _FUNCTION.findall(question) for name in match if name]
        return ReferenceMarks(asked=frozenset({_NAME} if names else ()), told=frozenset(map(hash_of, names)))
    cases = tests.cases[:_MAX_TESTS]
    asked = frozenset(hash_of(case.input.strip()) for case in cases)
    told = frozenset(hash_of(f"{case.input.strip()}\x1f{case.output.strip()}") for case in cases)
    return ReferenceMarks(asked=asked, told=told)


def _facts(tokens: Sequence[str]) -> Iterator[tuple[int, str]]:
    for i, token in enumerate(tokens):
        if token[0].isalpha() and token not in _DECISIVE:
            continue  # most tokens are plain words
        # A bar over digits is a repeating decimal or a numeral; over letters it marks a segment, which many leave out.
        is_bar = token == _BAR and i + 1 < len(tokens) and tokens[i + 1][0].isdigit()
        if token[0].isdigit() or token in _OPERATORS or is_bar:
            yield i, token
        elif token in _MEANS:
            yield i, _MEANS[token]
        elif not is_word(token) and not _is_punctuation(tokens, i):
            yield i, token


def _is_punctuation(tokens: Sequence[str], i: int) -> bool:
    """Return whether a sign is a hyphen (`n-gon`, `five-digit`) or an exclamation mark, and so has no meaning."""
    before = tokens[i - 1] if i else ""
    after = tokens[i + 1] if i + 1 < len(tokens) else ""
    if tokens[i] == "!":
        return before.isalpha() and len(before) > 1
    # A single letter is a variable, and a short word may be a product of variables: `x-ab` is a difference.
    is_hyphen = tokens[i] == "-" and before.isalnum() and after.isalpha()
    return is_hyphen and after not in _OPERATORS and len(after) >= (4 if len(before) == 1 else 3)


def _plain_answer(answer: str) -> str:
    """Return the tokens of an answer without layout; a whole number has one form (`7.0`, `7`)."""
    text = " ".join(tokens_of(_LAYOUT_OF_ANSWER.sub("", answer.strip())))
    try:
        number = float(text.replace(" ", ""))
    except ValueError:
        return text or answer
    return str(int(number)) if number.is_integer() else str(number)
