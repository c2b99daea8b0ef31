"""Drop prompts that overlap with a benchmark question (Klear-Reasoner section 3.1, after AceReason: shared 9-grams).

Every rule is tried on every prompt, so that the report can say what each would drop; the configured rules drop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import get_args

import numpy as np
import numpy.typing as npt

from klear_core.config.curate import DecontaminateConfig, DecontaminationRule
from klear_core.data.candidates import Candidate
from klear_core.data.curation.normalise import tokens_of
from klear_core.data.curation.sketch import (
    Hashes,
    Ragged,
    distinct,
    full_runs,
    is_first,
    ragged,
    token_and_word_codes,
    token_codes,
)
from klear_core.errors import DataError
from klear_core.types import Domain, Dropped, UnverifiableReference

RULES: tuple[DecontaminationRule, ...] = get_args(DecontaminationRule)
_NO_REFERENCE = UnverifiableReference(domain=Domain.MATH, why="not judged")
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
        # A killed curation uses the pickle of this object, also in a later version: attributes keep their names.
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


def questions_in(
    prompts: Sequence[str], protected: Sequence[Protected], cfg: DecontaminateConfig
) -> Iterator[Protected]:
    """Yield the protected question that each prompt overlaps with most by the configured rules, if there is one."""
    guard = Decontaminator(cfg, protected)
    by_id = {(question.benchmark, question.question_id): question for question in protected}
    candidates = [
        Candidate(source="", domain=Domain.MATH, question=text, reference=_NO_REFERENCE, rating=None)
        for text in prompts
    ]
    for leak in guard.leaks_in(candidates, [tokens_of(text) for text in prompts]):
        if leak is not None and leak.is_dropped:
            yield by_id[leak.benchmark, leak.question_id]


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
    return [token for token in tokens if token[0].isalnum()]  # runs of letters, and numbers


def _check_recognisable(question: Protected, tokens: Sequence[str]) -> None:
    if not tokens:
        raise DataError(
            f"benchmark {question.benchmark}, question {question.question_id}: {question.question!r} "
            "has no word to recognise it by"
        )


# ---- leak filter ----
# Pick the prompts that may overlap with a protected question, many at a time, before they are compared with care.
#
# A prompt that is left out matches no rule; one that is picked may match none either.


Found = npt.NDArray[np.bool_]


class LeakFilter:
    """Hashes of the n-grams of all protected questions."""

    def __init__(
        self,
        words: Sequence[Sequence[str]],
        tokens: Sequence[Sequence[str]],
        *,
        ngram: int,
        shingles: GramIndex,
        near_share: float,
        near_shared: int,
    ) -> None:
        """Take the words and the tokens of each question, the index of its runs of tokens, and the rule `near`.

        That rule asks for `near_shared` common runs, which are `near_share` of those of the shorter text.
        """
        self._ngram = ngram
        self._near_share = near_share
        self._near_shared = near_shared
        self._shingle = shingles.length
        self._word_grams = HashSet(full_runs(token_codes(words), ngram).values)
        common = [gram.split(" ") for gram in shingles.common]
        self._common = HashSet(full_runs(token_codes(common), self._shingle).values)
        hashes = full_runs(token_codes(tokens), self._shingle)
        question = np.repeat(np.arange(len(tokens)), hashes.lengths())
        is_rare = ~self._common.has(hashes.values)
        rare, question = hashes.values[is_rare], question[is_rare]
        order = np.argsort(rare, kind="stable")
        self._questions = question[order]
        self._shingles = HashSet(rare)
        self._starts = np.searchsorted(rare[order], self._shingles.values)
        self._ends = np.append(self._starts[1:], len(self._questions))[: len(self._starts)]
        self._num_shingles = np.array(shingles.num_grams)

    def may_overlap(self, tokens: Sequence[Sequence[str]]) -> Found:
        """Return for each prompt whether it may match a rule about n-grams (not contests or short questions)."""
        codes, words = token_and_word_codes(tokens)
        grams = full_runs(words, self._ngram)
        shared, _ = self._word_grams.find(grams.values)
        prompt = np.repeat(np.arange(len(words)), grams.lengths())
        found: Found = np.bincount(prompt[shared], minlength=len(words)) > 0
        return found | self._may_be_near(codes)

    def _may_be_near(self, tokens: Ragged) -> Found:
        """Return for each prompt whether some question shares enough shingles with it for the rule `near`."""
        hashes = full_runs(tokens, self._shingle)
        prompt = np.repeat(np.arange(len(tokens)), hashes.lengths())
        found: Found = np.zeros(len(tokens), dtype=np.bool_)
        hits, at = self._shingles.find(hashes.values)
        if not len(hits):
            return found
        prompt_of_hit = prompt[hits]
        # One entry for each pair of a shared shingle in a prompt and a question that has it.
        counts = self._ends[at] - self._starts[at]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        question = self._questions[np.repeat(self._starts[at], counts) + within]
        num_questions = len(self._num_shingles)
        pair, num_shared = np.unique(np.repeat(prompt_of_hit, counts) * num_questions + question, return_counts=True)
        # A shingle that a prompt repeats counts several times here and once in `_num_rare`. So neither number nor share
        # is too low, and no leak is missed.
        is_enough = num_shared >= self._near_shared
        if not is_enough.any():
            return found  # of most chunks: texts in one language share a few runs of tokens
        pair, num_shared = pair[is_enough], num_shared[is_enough]
        prompt_of_pair, question_of_pair = np.divmod(pair, num_questions)
        num_rare = self._num_rare(hashes, prompt, len(tokens))
        shorter = np.minimum(self._num_shingles[question_of_pair], num_rare[prompt_of_pair])
        found[prompt_of_pair[num_shared >= self._near_share * shorter]] = True
        return found

    def _num_rare(self, hashes: Ragged, prompt: npt.NDArray[np.int64], num_prompts: int) -> npt.NDArray[np.int64]:
        """Return the number of distinct runs of tokens of each prompt that are no common phrase, or a little fewer."""
        is_rare = ~self._common.has(hashes.values)
        # The prompt's number above 40 bits of the hash: two runs with equal bits count as one, hence "a little fewer".
        packed = (prompt[is_rare].astype(np.uint64) << np.uint64(40)) | (hashes.values[is_rare] >> np.uint64(24))
        return np.bincount((distinct(packed) >> np.uint64(40)).astype(np.int64), minlength=num_prompts)


# ---- gram index ----
# Index the n-grams of questions, and find the question that a text overlaps with most.
#
# The index is arrays of hashes: thousands of questions are indexed in a fraction of a second, and worker processes load
# it in milliseconds. Axis letters: E entries (an n-gram and a question that has it), G distinct n-grams.


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


# ---- hash set ----
# Look up many hashes in a large set of hashes, most of which are not in it.


_BITS_PER_HASH = 16
"""Bits of the bitmap for each hash: one lookup in 16 for another hash finds a bit that is set, and is searched for."""
_MIN_BITS = 10


class HashSet:
    """Distinct hashes in ascending order, with a bitmap of their upper bits that fits into the processor's cache.

    A binary search among a hundred thousand hashes takes ten times as long as a look at the bitmap.
    """

    def __init__(self, values: Hashes) -> None:
        self.values: Hashes = distinct(values)
        num_bits = max(_MIN_BITS, (_BITS_PER_HASH * len(self.values)).bit_length())
        self._shift = np.uint64(64 - num_bits)
        is_set = np.zeros(1 << num_bits, dtype=np.bool_)
        is_set[self.values >> self._shift] = True
        self._bitmap = np.packbits(is_set, bitorder="little")

    def __len__(self) -> int:
        return len(self.values)

    def find(self, hashes: Hashes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return which of some hashes are in the set, by their indices, and the index in `values` of each of these."""
        if not len(self.values):
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        bit = hashes >> self._shift
        is_set = self._bitmap[bit >> np.uint64(3)] >> (bit & np.uint64(7)).astype(np.uint8) & 1
        maybe = np.flatnonzero(is_set)
        at = np.minimum(np.searchsorted(self.values, hashes[maybe]), len(self.values) - 1)
        is_hit = self.values[at] == hashes[maybe]
        return maybe[is_hit], at[is_hit]

    def has(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Return which of some hashes are in the set."""
        found = np.zeros(len(hashes), dtype=np.bool_)
        found[self.find(hashes)[0]] = True
        return found
