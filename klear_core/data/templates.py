"""Find the fixed opening and ending that a source puts around its questions, from the first rows of the source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from klear_core.data.meaning import first_fact

SAMPLE_SIZE = 200
"""Rows of a source that its templates are learned from."""
_MIN_WORDS = 4
"""Shorter openings and endings are common in questions (`what is the`)."""
_MIN_WORDS_WITH_FACTS = 15
"""Shorter templates hold no number, operator or decisive word: those could be the problem's (`work modulo 7`)."""
_MIN_ROWS = 3
_MIN_SHARE = 0.25
"""Share of the sample that must have a template."""
_MIN_REST = 3
"""Least number of tokens that a question must have without its template; else it is compared with it."""

Tokens = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Templates:
    """The openings and endings of a source's questions, longest first."""

    openings: tuple[Tokens, ...]
    endings: tuple[Tokens, ...]

    def bare(self, tokens: Sequence[str]) -> Sequence[str]:
        """Return a question's tokens without its opening and ending, unless nearly nothing would be left."""
        if not self.openings and not self.endings:
            return tokens
        start = next((len(t) for t in self.openings if tuple(tokens[: len(t)]) == t), 0)
        end = next((len(t) for t in self.endings if tuple(tokens[-len(t) :]) == t), 0)
        rest = tokens[start : len(tokens) - end]
        return rest if len(rest) >= _MIN_REST else tokens


def templates_of(sample: Sequence[Sequence[str]]) -> Templates:
    """Return the templates in a sample of one source's tokenised questions."""
    openings = [_before_first_fact(opening) for opening in _common_openings(sample)]
    reversed_endings = _common_openings([tokens[::-1] for tokens in sample])
    endings = [_after_last_fact(ending[::-1]) for ending in reversed_endings]
    return Templates(openings=_longest_first(openings), endings=_longest_first(endings))


def _common_openings(questions: Iterable[Sequence[str]]) -> list[Tokens]:
    """Return the longest common openings of all groups of questions that begin alike, if the group is large enough."""
    groups: dict[Tokens, list[Sequence[str]]] = defaultdict(list)
    num_questions = 0
    for tokens in questions:
        num_questions += 1
        groups[tuple(tokens[:_MIN_WORDS])].append(tokens)
    needed = max(_MIN_ROWS, _MIN_SHARE * num_questions)
    return [_common_opening(group) for group in groups.values() if len(group) >= needed]


def _common_opening(questions: Sequence[Sequence[str]]) -> Tokens:
    # In sorted order, the prefix that the first and the last share is common to all between them.
    first, last = min(map(tuple, questions)), max(map(tuple, questions))
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]


def _before_first_fact(opening: Tokens) -> Tokens:
    return opening if len(opening) >= _MIN_WORDS_WITH_FACTS else opening[: first_fact(opening)]


def _after_last_fact(ending: Tokens) -> Tokens:
    while len(ending) < _MIN_WORDS_WITH_FACTS and (fact := first_fact(ending)) < len(ending):
        ending = ending[fact + 1 :]
    return ending


def _longest_first(templates: Iterable[Tokens]) -> tuple[Tokens, ...]:
    long_enough = {template for template in templates if len(template) >= _MIN_WORDS}
    return tuple(sorted(long_enough, key=lambda template: (-len(template), template)))
