"""Index the n-grams of questions, and find the question that a text overlaps with most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


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
        grams = [set(_grams(tokens, length)) for tokens in questions]
        num_questions = Counter(gram for of_question in grams for gram in of_question)
        self.common = frozenset(gram for gram, count in num_questions.items() if count > max_questions)
        """N-grams of more than `max_questions` questions."""
        # Shares are relative to the n-grams that can match, so common phrases are not in the denominator either.
        self.num_grams = [len(of_question - self.common) for of_question in grams]
        self._questions_with: dict[str, list[int]] = {}
        self._first_with: dict[str, int] = {}
        """The first question that has each common phrase."""
        for index, of_question in enumerate(grams):
            for gram in of_question:
                if gram in self.common:
                    self._first_with.setdefault(gram, index)
                else:
                    self._questions_with.setdefault(gram, []).append(index)

    def overlap_with(self, tokens: Sequence[str]) -> Overlap:
        """Return what a text shares with each question."""
        grams = dict.fromkeys(_grams(tokens, self.length))  # distinct, in order
        questions_of = {gram: self._questions_with[gram] for gram in grams if gram in self._questions_with}
        num_rare = sum(gram not in self.common for gram in grams)
        return Overlap(index=self, questions_of=questions_of, num_grams=num_rare)

    def common_hit(self, tokens: Sequence[str]) -> Hit | None:
        """Return the first common phrase in a text, with one of its questions; None if there is none."""
        phrases = [gram for gram in dict.fromkeys(_grams(tokens, self.length)) if gram in self.common]
        if not phrases:
            return None
        return Hit(index=self._first_with[phrases[0]], num_shared=len(phrases), first_shared=phrases[0])


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


def _grams(tokens: Sequence[str], length: int) -> list[str]:
    return [" ".join(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
