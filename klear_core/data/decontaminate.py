"""Drop prompts that share word n-grams with a benchmark question (Klear-Reasoner section 3.1, after AceReason)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from klear_core.config.data import DecontaminateConfig
from klear_core.data.candidates import Candidate
from klear_core.data.normalise import is_word, tokens_of
from klear_core.errors import DataError
from klear_core.types import Dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected:
    """A benchmark question that must not be trained on."""

    benchmark: str
    question_id: str
    question: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hit:
    """The protected question that overlaps most with a prompt."""

    index: int
    num_shared: int
    first_shared: str


class Decontaminator:
    """An index of the n-grams of all protected questions; a lookup takes time linear in the prompt's length."""

    def __init__(self, cfg: DecontaminateConfig, protected: Iterable[Protected]) -> None:
        self._cfg = cfg
        self._protected = tuple(protected)
        tokens = [tokens_of(one.question) for one in self._protected]
        asked = Counter(gram for t in tokens for gram in self._own_grams(t))
        self.common_phrases = frozenset(gram for gram, count in asked.items() if count > cfg.max_questions_per_gram)
        """N-grams that occur in more than `max_questions_per_gram` protected questions; they drop no prompt."""
        self._num_grams: list[int] = []
        self._askers: dict[str, list[int]] = {}
        """Indices of the questions that contain each n-gram."""
        self._whole: dict[str, list[tuple[Sequence[str], int]]] = {}
        """(tokens, index) of questions too short for an n-gram or with common ones only, by first token.

        They are matched in full, signs included: `3 + 4` is not `3 - 4`.
        """
        for index in range(len(self._protected)):
            self._protect(index, tokens[index])

    @property
    def num_protected(self) -> int:
        """Return the number of questions that are kept out of training."""
        return len(self._protected)

    def leak_in(self, candidate: Candidate) -> Dropped | None:
        """Return the drop record, with the benchmark question and the shared text; None if it is clean."""
        tokens = tokens_of(candidate.question)
        hit = self._whole_hit(tokens) or self._gram_hit([t for t in tokens if is_word(t)])
        if hit is None:
            return None
        near = self._protected[hit.index]
        detail = f"{candidate.source}: shares {hit.num_shared} with {near.benchmark} {near.question_id}: {hit.first_shared!r}"
        return Dropped(
            problem_id=candidate.problem_id, step="decontaminate", reason=f"in_{near.benchmark}", detail=detail
        )

    def _protect(self, index: int, tokens: Sequence[str]) -> None:
        if not tokens:
            one = self._protected[index]
            raise DataError(
                f"benchmark {one.benchmark}, question {one.question_id}: {one.question!r} has no word to recognise it by"
            )
        # Coverage is relative to the grams that can match, so common phrases are not in the denominator either.
        own = self._own_grams(tokens) - self.common_phrases
        self._num_grams.append(len(own))
        if not own:
            self._whole.setdefault(tokens[0], []).append((tokens, index))
        for gram in own:
            self._askers.setdefault(gram, []).append(index)

    def _own_grams(self, tokens: Sequence[str]) -> set[str]:
        return set(_grams([t for t in tokens if is_word(t)], self._cfg.ngram))

    def _gram_hit(self, words: Sequence[str]) -> _Hit | None:
        found = [gram for gram in dict.fromkeys(_grams(words, self._cfg.ngram)) if gram in self._askers]
        if len(found) < self._cfg.min_overlap:
            return None
        shared = Counter(index for gram in found for index in self._askers[gram])
        # Nearest by coverage, so that a short question fully contained beats a long one; ties go to the lower index.
        nearest = max(shared, key=lambda index: (shared[index] / self._num_grams[index], -index))
        if shared[nearest] / self._num_grams[nearest] < self._cfg.min_coverage:
            return None
        first = next(gram for gram in found if nearest in self._askers[gram])
        return _Hit(index=nearest, num_shared=shared[nearest], first_shared=first)

    def _whole_hit(self, tokens: Sequence[str]) -> _Hit | None:
        for start, token in enumerate(tokens):
            for question, index in self._whole.get(token, ()):
                if tokens[start : start + len(question)] == question:
                    return _Hit(index=index, num_shared=1, first_shared=" ".join(question))
        return None


def _grams(tokens: Sequence[str], length: int) -> Iterable[str]:
    return (" ".join(tokens[i : i + length]) for i in range(len(tokens) - length + 1))
