"""Index the n-grams of questions, and find the question that a text overlaps with most.

The index is arrays of hashes: thousands of questions are indexed in a fraction of a second, and worker processes load
it in milliseconds. Axis letters: E entries (an n-gram and a question that has it), G distinct n-grams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from klear_core.data.ragged import Ragged, is_first, ragged
from klear_core.data.sketch import Hashes, full_runs

_UNKNOWN = -1
"""Number of a token that no question has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """The question that overlaps most with a text."""

    index: int
    num_shared: int
    first_shared: str


class GramIndex:
    """The n-grams of numbered questions. N-grams of many questions are common phrases, which match no question."""

    def __init__(self, questions: Sequence[Sequence[str]], *, length: int, max_questions: int) -> None:
        self.length = length
        """Tokens of an n-gram."""
        # Tokens are numbered instead of hashed, so that two n-grams are only the same by a collision of 64 bits.
        self._number_of = {token: i for i, token in enumerate(dict.fromkeys(chain.from_iterable(questions)))}
        numbers = [list(map(self._number_of.__getitem__, tokens)) for tokens in questions]
        hashes = full_runs(ragged(numbers, np.uint64), length)
        question = np.repeat(np.arange(len(questions)), hashes.lengths())
        order_E = np.argsort(hashes.values, kind="stable")  # stable: ascending questions for one n-gram
        gram_E, question_E = hashes.values[order_E], question[order_E]
        is_new = is_first(gram_E) | is_first(question_E)  # an n-gram counts once in a question
        order_E, gram_E, self._question_E = order_E[is_new], gram_E[is_new], question_E[is_new]
        self._start_G = np.flatnonzero(is_first(gram_E))
        self._gram_G: Hashes = gram_E[self._start_G]
        self._end_G = np.append(self._start_G[1:], len(gram_E))[: len(self._start_G)]
        self._is_common_G = self._end_G - self._start_G > max_questions
        is_rare_E = ~np.repeat(self._is_common_G, self._end_G - self._start_G)
        # Shares are relative to the n-grams that can match, so common phrases are not in the denominator either.
        self.num_grams: list[int] = np.bincount(self._question_E[is_rare_E], minlength=len(questions)).tolist()
        first_runs = order_E[self._start_G[self._is_common_G]]
        self.common = frozenset(_gram_at(run, questions, question, hashes, length) for run in first_runs.tolist())
        """N-grams of more than `max_questions` questions."""

    def overlap_with(self, tokens: Sequence[str]) -> Overlap:
        """Return what a text shares with each question."""
        grams = _distinct_grams(tokens, self.length)
        found = self._found(tokens, grams)
        num_common = sum(bool(self._is_common_G[gram]) for gram in found.values())
        questions_of = {text: self._questions(gram) for text, gram in found.items() if not self._is_common_G[gram]}
        return Overlap(index=self, questions_of=questions_of, num_grams=len(grams) - num_common)

    def common_hit(self, tokens: Sequence[str]) -> Hit | None:
        """Return the first common phrase in a text, with one of its questions; None if there is none."""
        if not self.common:
            return None
        found = self._found(tokens, _distinct_grams(tokens, self.length))
        phrases = [text for text, gram in found.items() if self._is_common_G[gram]]
        if not phrases:
            return None
        first = self._questions(found[phrases[0]])[0]
        return Hit(index=first, num_shared=len(phrases), first_shared=phrases[0])

    def _found(self, tokens: Sequence[str], grams: dict[str, int]) -> dict[str, int]:
        """Return which of a text's n-grams, given with their places, the questions have, and their numbers in G."""
        if not grams or not len(self._gram_G):
            return {}
        numbers = np.array([self._number_of.get(token, _UNKNOWN) for token in tokens])
        hashes = full_runs(Ragged(numbers.astype(np.uint64), np.array([len(numbers)])), self.length).values
        at = np.minimum(np.searchsorted(self._gram_G, hashes), len(self._gram_G) - 1)
        at[self._gram_G[at] != hashes] = _UNKNOWN
        number_at = at.tolist()
        return {gram: number_at[place] for gram, place in grams.items() if number_at[place] != _UNKNOWN}

    def _questions(self, gram: int) -> list[int]:
        questions: list[int] = self._question_E[self._start_G[gram] : self._end_G[gram]].tolist()
        return questions


class Overlap:
    """The n-grams that a text shares with questions."""

    def __init__(self, *, index: GramIndex, questions_of: dict[str, list[int]], num_grams: int) -> None:
        self._num_grams_of = index.num_grams
        self._questions_of = questions_of
        self._num_grams = num_grams
        self._num_shared = Counter(question for questions in questions_of.values() for question in questions)

    def nearest(
        self, *, min_shared: int = 1, min_coverage: float = 0.0, min_share_of_shorter: float = 0.0
    ) -> Hit | None:
        """Return the question with the largest share of its n-grams in the text, of those that reach all thresholds."""
        fit = []
        for question, num_shared in self._num_shared.items():
            shorter = min(self._num_grams_of[question], self._num_grams)
            enough = num_shared >= min_shared and num_shared >= min_coverage * self._num_grams_of[question]
            if enough and num_shared >= min_share_of_shorter * shorter:
                fit.append(question)
        if not fit:
            return None
        # By coverage, so that a short question that is fully contained beats a long one; ties go to the lower index.
        nearest = max(fit, key=lambda question: (self._coverage(question), -question))
        first = next(gram for gram, questions in self._questions_of.items() if nearest in questions)
        return Hit(index=nearest, num_shared=self._num_shared[nearest], first_shared=first)

    def _coverage(self, question: int) -> float:
        return self._num_shared[question] / self._num_grams_of[question]


def _distinct_grams(tokens: Sequence[str], length: int) -> dict[str, int]:
    """Return the distinct n-grams of a text in order, each with the place of its first token."""
    places: dict[str, int] = {}
    for i in range(len(tokens) - length + 1):
        places.setdefault(" ".join(tokens[i : i + length]), i)
    return places


def _gram_at(run: int, questions: Sequence[Sequence[str]], question: np.ndarray, hashes: Ragged, length: int) -> str:
    """Return the text of an n-gram by its number among those of all questions."""
    its = int(question[run])
    start = run - int(hashes.ends[its] - hashes.lengths()[its])
    return " ".join(questions[its][start : start + length])
