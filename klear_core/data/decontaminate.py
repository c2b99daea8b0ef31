"""Drop prompts that overlap with a benchmark question (Klear-Reasoner section 3.1, after AceReason: shared 9-grams).

Every rule is tried on every prompt, so that the report can say what each would drop; the configured rules drop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from klear_core.config.curate import DecontaminateConfig, DecontaminationRule
from klear_core.data.candidates import Candidate
from klear_core.data.gram_index import GramIndex, Hit
from klear_core.data.leak_filter import LeakFilter
from klear_core.data.normalise import tokens_of
from klear_core.errors import DataError
from klear_core.types import Dropped

RULES: tuple[DecontaminationRule, ...] = get_args(DecontaminationRule)
_SHINGLE = 3
"""Tokens of a shingle for the rule `near`, as in the search of near-duplicates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected:
    """A benchmark question that must not be trained on."""

    benchmark: str
    question_id: str
    question: str
    contest_id: str = ""
    """Contest problem that the row holds; empty if the row does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A prompt beside the benchmark question that it overlaps with, for a person to judge."""

    problem_id: str
    source: str
    benchmark: str
    question_id: str
    rules: str
    """The rules that would drop the prompt, separated by spaces."""
    is_dropped: bool
    shared: str
    """First text in common."""
    num_shared: int
    prompt: str
    question: str


class Decontaminator:
    """Indexes of all protected questions; a lookup takes time linear in the prompt's length."""

    def __init__(self, cfg: DecontaminateConfig, protected: Iterable[Protected]) -> None:
        self._cfg = cfg
        self._protected = tuple(protected)
        tokens = [tokens_of(question.question) for question in self._protected]
        for question, its_tokens in zip(self._protected, tokens, strict=True):
            _check_recognisable(question, its_tokens)
        words = [_words(t) for t in tokens]
        self._words = GramIndex(words, length=cfg.ngram, max_questions=cfg.max_questions_per_gram)
        self._shingles = GramIndex(tokens, length=_SHINGLE, max_questions=cfg.max_questions_per_gram)
        # In a text with two or three rare shingles, one in common is a large share and yet no evidence. So at least
        # as many tokens must be shared as an n-gram has.
        self._near_shared = cfg.ngram - _SHINGLE + 1
        self._filter = LeakFilter(
            words,
            tokens,
            ngram=cfg.ngram,
            shingles=self._shingles,
            near_share=cfg.near_share,
            near_shared=self._near_shared,
        )
        self.common_phrases = self._words.common
        """N-grams that occur in more than `max_questions_per_gram` protected questions."""
        self._short_questions: dict[str, list[tuple[Sequence[str], int]]] = {}
        """(tokens, index) of questions too short for an n-gram or with common ones only, by first token.

        They are matched in full, signs included: `3 + 4` is not `3 - 4`.
        """
        for index in range(len(self._protected)):
            if not self._words.num_grams[index]:
                self._short_questions.setdefault(tokens[index][0], []).append((tokens[index], index))
        self._with_contest_id = {p.contest_id: i for i, p in enumerate(self._protected) if p.contest_id}

    @property
    def num_protected(self) -> int:
        """Return the number of questions that are kept out of training."""
        return len(self._protected)

    def leaks_in(self, candidates: Sequence[Candidate], tokens: Sequence[Sequence[str]]) -> list[Leak | None]:
        """Return for each candidate, given with its tokens, the same as `leak_of`, faster for many at once."""
        if not self._protected:
            return [None] * len(candidates)
        may_overlap = self._filter.may_overlap(tokens).tolist()
        leaks: list[Leak | None] = []
        for candidate, its_tokens, is_suspect in zip(candidates, tokens, may_overlap, strict=True):
            is_leak = is_suspect or candidate.contest_id in self._with_contest_id or self._short_hit(its_tokens)
            leaks.append(self.leak_of(candidate, its_tokens) if is_leak else None)
        return leaks

    def leak_of(self, candidate: Candidate, tokens: Sequence[str]) -> Leak | None:
        """Return the benchmark question that a prompt, given with its tokens, overlaps with most; None if no rule fits.

        Not all rules drop a prompt: see `Leak.is_dropped`.
        """
        hits = self._hits(tokens, candidate.contest_id)
        if not hits:
            return None
        dropping = [rule for rule in hits if rule in self._cfg.rules]
        hit = hits[dropping[0] if dropping else next(iter(hits))]
        near = self._protected[hit.index]
        return Leak(
            problem_id=candidate.problem_id,
            source=candidate.source,
            benchmark=near.benchmark,
            question_id=near.question_id,
            rules=" ".join(hits),
            is_dropped=bool(dropping),
            shared=hit.first_shared,
            num_shared=hit.num_shared,
            prompt=candidate.question,
            question=near.question,
        )

    def _hits(self, tokens: Sequence[str], contest_id: str) -> dict[DecontaminationRule, Hit]:
        """Return the rules that match, in the order of `RULES`, each with the nearest question."""
        cfg = self._cfg
        words = _words(tokens)
        overlap = self._words.overlap_with(words)
        short = self._short_hit(tokens)
        found = {
            "ngram": short or overlap.nearest(min_shared=cfg.min_overlap, min_coverage=cfg.min_coverage),
            "any_ngram": short or overlap.nearest() or self._words.common_hit(words),
            "share": short or overlap.nearest(min_share_of_shorter=cfg.min_share),
            "near": short or self._near(tokens),
            "contest": self._contest_hit(contest_id),
        }
        return {rule: hit for rule in RULES if (hit := found[rule])}

    def _near(self, tokens: Sequence[str]) -> Hit | None:
        overlap = self._shingles.overlap_with(tokens)
        return overlap.nearest(min_shared=self._near_shared, min_share_of_shorter=self._cfg.near_share)

    def _contest_hit(self, contest_id: str) -> Hit | None:
        if contest_id not in self._with_contest_id:
            return None
        return Hit(index=self._with_contest_id[contest_id], num_shared=1, first_shared=contest_id)

    def _short_hit(self, tokens: Sequence[str]) -> Hit | None:
        """Return the first question without n-grams that occurs in full, token by token; None if there is none."""
        if self._short_questions.keys().isdisjoint(tokens):
            return None  # most prompts; the set operation saves a loop in Python
        for start, token in enumerate(tokens):
            for question, index in self._short_questions.get(token, ()):
                if tokens[start : start + len(question)] == question:
                    return Hit(index=index, num_shared=1, first_shared=" ".join(question))
        return None


def drop_of(leak: Leak) -> Dropped:
    """Return the drop record of a prompt that is to be dropped, with the benchmark question and the shared text."""
    overlap = f"shares {leak.num_shared} with {leak.benchmark} {leak.question_id}: {leak.shared!r}"
    return Dropped(
        problem_id=leak.problem_id,
        step="decontaminate",
        reason=f"in_{leak.benchmark}",
        detail=f"{leak.source}: {overlap}; rules: {leak.rules.replace(' ', ', ')}",
        matched_id=leak.question_id,
    )


def counts_by_rule(num_leaks: Mapping[str, int]) -> dict[str, int]:
    """Return for each rule the number of prompts that it would drop, and that no other rule would drop.

    `num_leaks` has the number of leaks by `Leak.rules`.
    """
    counts: dict[str, int] = {}
    for rule in RULES:
        counts[f"rule_{rule}_matches"] = sum(n for rules, n in num_leaks.items() if rule in rules.split())
        counts[f"rule_{rule}_alone"] = num_leaks.get(rule, 0)
    return counts


def _words(tokens: Sequence[str]) -> list[str]:
    return [token for token in tokens if token[0].isalnum()]  # as `is_word`, without millions of calls


def _check_recognisable(question: Protected, tokens: Sequence[str]) -> None:
    if not tokens:
        raise DataError(
            f"benchmark {question.benchmark}, question {question.question_id}: {question.question!r} "
            "has no word to recognise it by"
        )
