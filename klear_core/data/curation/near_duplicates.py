"""Find near-duplicates among questions: similar in words, the same in numbers and signs, with agreeing references.

A reworded question, which has fewer words in common, is one if its reference says the same, too.

There are three steps: `candidate_pairs`, `compare` and `decide`. The second can be divided among tasks. Questions are
numbered in order of rank, over all tables. Axis letters: B bands, N questions, M questions in buckets, P pairs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from klear_core.artifacts.records import load_tests
from klear_core.config.curate import NearConfig
from klear_core.data.curation.normalise import tokens_of
from klear_core.data.curation.sketch import (
    Hashes,
    Overlaps,
    Ragged,
    hash_of,
    joined_parts,
    overlaps_of,
    ragged,
    sketches_of,
)
from klear_core.types import AssertTests, CallTests, CustomReference, MathReference, Reference, UnverifiableReference

_MAX_COMPARED = 32
"""Questions of one bucket with which a later one is compared, the first in rank. It bounds the work where thousands of
questions share a bucket."""
_REASONS = (
    "similar_with_another_answer",
    "similar_with_other_numbers_or_signs",
    "similar_without_a_common_answer",
)
"""Reasons for which two similar questions are different problems."""
SAME = len(_REASONS)
"""Code of two questions that are the same problem; lower codes are indices of `_REASONS`."""
_KEYS_BESIDE_BANDS = 2
"""Keys by which reworded questions are found, where no MinHash band may agree: facts with answers, and facts alone."""
_MAX_COMPARED_BESIDE = 8
"""The same as `_MAX_COMPARED` for these keys: thousands of questions without a number may have the answer `yes`."""
_FEW_FACTS = 3
"""Numbers, signs and decisive words from which questions are compared by these alone."""
_LEAST_SHARED = 2.0
"""Runs that a reworded question shares at least."""
_CHANGED_RUNS = 6
"""Runs of three tokens that differ if two words do."""
UNLIKE = SAME + 1
"""Code of two questions that are not similar."""

Ranks = npt.NDArray[np.int64]
Pairs = npt.NDArray[np.uint64]
"""Pairs of questions: the later one in the upper 32 bits, the earlier one in the lower."""


@dataclass(frozen=True, slots=True, eq=False)
class NearTable:
    """Sketches of some questions in order of rank (about 0.6 KB a question)."""

    shingles: Ragged
    band_keys_BN: Hashes
    facts_N: Hashes
    num_facts_N: npt.NDArray[np.uint32]
    asked: Ragged
    """`ReferenceMarks.asked` of each question."""
    told: Ragged

    def __len__(self) -> int:
        return len(self.facts_N)

    def marks(self, index: int) -> ReferenceMarks:
        """Return what the reference of a question says."""
        return ReferenceMarks(asked=frozenset(self.asked[index].tolist()), told=frozenset(self.told[index].tolist()))


def near_table(
    questions: Sequence[Sequence[str]], domains: Iterable[str], marks: Sequence[ReferenceMarks], cfg: NearConfig
) -> NearTable:
    """Return the sketches of tokenised questions, each of at least one token."""
    sketches = sketches_of(questions, cfg)
    # Questions of different domains never share a bucket.
    domains_N = np.array([hash_of(domain) for domain in domains], dtype=np.uint64)
    facts = [facts_of(tokens) for tokens in questions]
    facts_N = np.array([hash_of(" ".join(own)) for own in facts], dtype=np.uint64)
    num_facts_N = np.array([len(own) for own in facts], dtype=np.uint32)
    asked = [sorted(m.asked) for m in marks]
    told = [sorted(m.told) for m in marks]
    # A question without answers, or with few facts, is in the bucket of its first band once more: no new pairs.
    first_N = sketches.band_keys_BN[0]
    # References that agree are found by the smallest of their answers' hashes.
    answers_N = np.array([min(m.answers, default=0) for m in marks], dtype=np.uint64)
    by_answer_N = np.where(answers_N, facts_N ^ answers_N, first_N)
    by_facts_N = np.where(num_facts_N >= _FEW_FACTS, facts_N, first_N)
    return NearTable(
        shingles=sketches.shingles,
        band_keys_BN=np.vstack([sketches.band_keys_BN, by_answer_N, by_facts_N]) ^ domains_N,
        facts_N=facts_N,
        num_facts_N=num_facts_N,
        asked=ragged(asked, np.uint64),
        told=ragged(told, np.uint64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A near-duplicate that is to be dropped."""

    of: int
    """Rank of the question that stays."""
    similarity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NearDuplicates:
    """The result of a search."""

    copies: dict[int, Copy] = field(default_factory=dict)
    """The questions to drop, by rank."""
    kept: Counter[str] = field(default_factory=Counter)
    """Number of questions that are similar to an earlier one and stay, by reason."""


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """The result of comparing pairs of questions."""

    similarity_P: npt.NDArray[np.float64]
    code_P: npt.NDArray[np.uint8]
    """An index of `_REASONS`, `SAME` or `UNLIKE`."""


def candidate_pairs(tables: Sequence[NearTable], ranks_N: Ranks, cfg: NearConfig) -> Pairs:
    """Return the pairs to compare among some questions, ascending. Ranks are ascending, too.

    A question is compared with the earlier ones of its bucket that have the same facts. If there is none, it is
    compared with the first of the bucket, to count the similar questions that stay.
    """
    facts_N = np.concatenate([table.facts_N for table in tables])[ranks_N]
    pairs_P = np.empty(0, dtype=np.uint64)
    for band in range(cfg.num_bands + _KEYS_BESIDE_BANDS):
        # One band of all questions is in memory at a time.
        keys_N = np.concatenate([table.band_keys_BN[band] for table in tables])[ranks_N]
        most = _MAX_COMPARED if band < cfg.num_bands else _MAX_COMPARED_BESIDE
        pairs_P = np.union1d(pairs_P, _pairs_in_buckets(keys_N, facts_N, ranks_N, most))
    return pairs_P


def compare(tables: Sequence[NearTable], pairs_P: Pairs, cfg: NearConfig) -> Compared:
    """Return how similar the questions of each pair are, and whether they are the same problem."""
    starts = np.cumsum([0, *map(len, tables)])
    later_P, earlier_P = _ranks_of(pairs_P)
    places_P = [_Places(tables, starts, ranks) for ranks in (later_P, earlier_P)]
    overlaps = overlaps_of(places_P[0].shingles(), places_P[1].shingles())
    similarity_P = overlaps.similarities()
    code_P = np.full(len(pairs_P), UNLIKE, dtype=np.uint8)
    for i in np.flatnonzero((similarity_P >= cfg.threshold) | _may_be_reworded(overlaps, cfg)).tolist():
        (mine, my_index), (others, other_index) = places_P[0][i], places_P[1][i]
        is_similar = similarity_P[i] >= cfg.threshold
        if mine.facts_N[my_index] != others.facts_N[other_index]:
            if is_similar:
                code_P[i] = _REASONS.index("similar_with_other_numbers_or_signs")
            continue
        marks, others_marks = mine.marks(my_index), others.marks(other_index)
        if is_similar:
            code_P[i] = _code(marks, others_marks, similarity_P[i], cfg)
        if code_P[i] != SAME and _is_reworded(overlaps, i, int(mine.num_facts_N[my_index]), marks, others_marks, cfg):
            code_P[i] = SAME
    return Compared(similarity_P, code_P)


def decide(pairs_P: Pairs, compared: Compared) -> NearDuplicates:
    """Return which questions are copies, and how many stay although they are similar to another one."""
    found = NearDuplicates()
    is_similar_P = compared.code_P != UNLIKE
    later_P, earlier_P = _ranks_of(pairs_P[is_similar_P])
    similarity_P, code_P = compared.similarity_P[is_similar_P], compared.code_P[is_similar_P]
    ends = np.flatnonzero(later_P[1:] != later_P[:-1]) + 1
    # In order of rank, because a question can only be the copy of an earlier one that stays.
    for group in np.split(np.arange(len(later_P)), ends):
        if len(group):  # without pairs `np.split` returns one empty group
            _decide(int(later_P[group[0]]), earlier_P[group], similarity_P[group], code_P[group], found)
    return found


def _decide(
    rank: int, earlier: Ranks, alike: npt.NDArray[np.float64], codes: npt.NDArray[np.uint8], found: NearDuplicates
) -> None:
    """Add one question to `found`: as a copy of the most similar earlier one that stays, or as one that stays."""
    reasons: set[str] = set()
    best: Copy | None = None
    for other, similarity, code in zip(earlier.tolist(), alike.tolist(), codes.tolist(), strict=True):
        if other in found.copies:
            continue
        if code != SAME:
            reasons.add(_REASONS[code])
        elif best is None or similarity > best.similarity:
            best = Copy(of=other, similarity=similarity)
    if best:
        found.copies[rank] = best
    elif reasons:
        found.kept[min(reasons)] += 1


def _code(mine: ReferenceMarks, others: ReferenceMarks, alike: float, cfg: NearConfig) -> int:
    """Return why two similar questions with the same facts are different problems, or `SAME`."""
    if mine.disagree(others):
        return _REASONS.index("similar_with_another_answer")
    if alike < cfg.threshold_unanswered and not mine.share_an_answer(others):
        return _REASONS.index("similar_without_a_common_answer")
    return SAME


def _may_be_reworded(overlaps: Overlaps, cfg: NearConfig) -> npt.NDArray[np.bool_]:
    """Return which pairs have the least overlap that `_is_reworded` asks for."""
    num_runs_P = overlaps.num_in_smaller_P
    least_P = np.minimum(cfg.threshold_reworded * num_runs_P, num_runs_P - _CHANGED_RUNS)
    may: npt.NDArray[np.bool_] = overlaps.num_shared_P >= np.maximum(_LEAST_SHARED, least_P)
    return may


def _is_reworded(
    overlaps: Overlaps, i: int, num_facts: int, mine: ReferenceMarks, others: ReferenceMarks, cfg: NearConfig
) -> bool:
    """Return whether a pair with the same facts is one question in other words, perhaps inside of a longer text.

    If the references say the same, a share of the shorter question's runs is enough, or all but those of two words. If
    one says nothing, the longer text must contain the shorter one.
    """
    num_shared, num_runs = int(overlaps.num_shared_P[i]), int(overlaps.num_in_smaller_P[i])
    if mine.disagree(others):
        return False
    if not mine.agree(others):
        is_silent = not (mine.answers and others.answers)
        return is_silent and num_facts >= _FEW_FACTS and num_shared == num_runs > _CHANGED_RUNS
    share = cfg.threshold_reworded if num_facts else cfg.threshold
    needed = share * num_runs
    if num_facts > 1:
        needed = min(needed, num_runs - _CHANGED_RUNS)
    return num_shared >= max(_LEAST_SHARED, needed)


def _pairs_in_buckets(keys_N: Hashes, facts_N: Hashes, ranks_N: Ranks, most: int) -> Pairs:
    """Return the pairs of one band, each later question with `most` earlier ones; see `candidate_pairs`.

    A bucket is the questions with the same key.
    """
    order_N = np.argsort(keys_N, kind="stable")  # stable: ascending ranks within a bucket
    is_same = np.diff(keys_N[order_N]) == 0
    is_in_bucket = np.append(is_same, False) | np.append(False, is_same)
    members_M = order_N[is_in_bucket]  # all other questions are alone with their key
    if not len(members_M):
        return np.empty(0, dtype=np.uint64)
    keys_M = keys_N[members_M]
    bucket_M = np.cumsum(np.append(False, keys_M[1:] != keys_M[:-1]))
    first_of_bucket = np.flatnonzero(np.append(True, bucket_M[1:] != bucket_M[:-1]))
    first_M = members_M[first_of_bucket][bucket_M]
    # Members with the same facts become neighbours, still by rank.
    by_facts = np.lexsort((members_M, facts_N[members_M], bucket_M))
    members_M, first_M, bucket_M = members_M[by_facts], first_M[by_facts], bucket_M[by_facts]
    facts_M = facts_N[members_M]
    is_new = np.append(True, (bucket_M[1:] != bucket_M[:-1]) | (facts_M[1:] != facts_M[:-1]))
    start_M = np.flatnonzero(is_new)[np.cumsum(is_new) - 1]  # first member with the same key and facts
    num_earlier_M = np.arange(len(members_M)) - start_M
    counts_M = np.minimum(num_earlier_M, most)
    # One pair for each member and each of the first members of its group; `within_P` counts these from 0.
    later_P = np.repeat(members_M, counts_M)
    within_P = np.arange(len(later_P)) - np.repeat(np.cumsum(counts_M) - counts_M, counts_M)
    earlier_P = members_M[np.repeat(start_M, counts_M) + within_P]
    is_alone_M = (num_earlier_M == 0) & (members_M != first_M)
    later = ranks_N[np.concatenate([later_P, members_M[is_alone_M]])].astype(np.uint64)
    earlier = ranks_N[np.concatenate([earlier_P, first_M[is_alone_M]])].astype(np.uint64)
    pairs_P: Pairs = (later << np.uint64(32)) | earlier
    return pairs_P


def _ranks_of(pairs_P: Pairs) -> tuple[Ranks, Ranks]:
    """Return the later and the earlier question of each pair."""
    return (pairs_P >> np.uint64(32)).astype(np.int64), (pairs_P & np.uint64(0xFFFFFFFF)).astype(np.int64)


class _Places:
    """The tables of questions, and their places in them."""

    def __init__(self, tables: Sequence[NearTable], starts: Ranks, ranks: Ranks) -> None:
        self._tables = tables
        self._table = np.searchsorted(starts, ranks, side="right") - 1
        self._index = ranks - starts[self._table]

    def __getitem__(self, i: int) -> tuple[NearTable, int]:
        return self._tables[self._table[i]], int(self._index[i])

    def shingles(self) -> Ragged:
        """Return copies of all questions' shingles."""
        places = zip(self._table.tolist(), self._index.tolist(), strict=True)
        return joined_parts([self._tables[table].shingles[index] for table, index in places], np.uint32)


# ---- equivalence ----
# Tell whether two similar questions can be the same problem: numbers, signs and reference answers must agree.


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
_SHORT_WORDS = frozenset(["by", "of", "to", "in", "up", "on", "at", "as", "or", "an", "so", "off", "out"])
"""Words of which a hyphen before or behind makes no difference (`step-by-step`)."""
_ANSWER, _NAME = 0, 1
"""Hashes that stand for the question itself and for the name of the function to write."""
_OF_NAME = 1
"""Lowest bit of an answer's hash that is the name of a function; those of all other answers are even."""
_MAX_TESTS = 8
"""Tests of a program that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceMarks:
    """Hashes of a reference: two references disagree if they answer the same and have no answer in common."""

    asked: frozenset[int]
    """Hashes of the things asked for: the question itself, a function's name, or inputs of a program."""
    told: frozenset[int]
    """The answers. The hash of a function's name is odd, all others are even."""

    def disagree(self, other: ReferenceMarks) -> bool:
        """Return whether the references contradict each other; functions of two names do, whatever they return."""
        if _NAME in self.asked & other.asked:
            return (self.told - self.answers).isdisjoint(other.told - other.answers)
        return not self.asked.isdisjoint(other.asked) and self.told.isdisjoint(other.told)

    def share_an_answer(self, other: ReferenceMarks) -> bool:
        """Return whether the references agree on an answer or a test; a function's name alone proves little."""
        return not self.answers.isdisjoint(other.answers)

    def agree(self, other: ReferenceMarks) -> bool:
        """Return whether all answers, or the tests that are compared, of one reference are among the other's."""
        mine, others = self.answers, other.answers
        return bool(mine and others) and (mine <= others or others <= mine)

    @property
    def answers(self) -> frozenset[int]:
        """Return what is told without the names of functions."""
        return frozenset(one for one in self.told if not one & _OF_NAME)


def facts_of(tokens: Sequence[str]) -> list[str]:
    """Return numbers, signs, operators and decisive words in order. Questions that differ in them differ in meaning."""
    return [fact for _, fact in _facts(tokens)]


def first_fact(tokens: Sequence[str]) -> int:
    """Return the index of the first number, operator or decisive word (not a bracket), or the number of tokens."""
    return next((i for i, fact in _facts(tokens) if fact not in _BRACKETS), len(tokens))


def marks_of(question: str, reference: Reference) -> ReferenceMarks:
    """Return what a reference says, for comparison with others of the same domain."""
    if isinstance(reference, MathReference):
        answers = _hashes(map(_plain_answer, reference.answers))
        return ReferenceMarks(asked=frozenset({_ANSWER}), told=answers)
    if isinstance(reference, CustomReference):
        return ReferenceMarks(asked=frozenset({_ANSWER}), told=_hashes([reference.value_json]))
    if isinstance(reference, UnverifiableReference):
        return ReferenceMarks(asked=frozenset(), told=frozenset())
    tests = load_tests(reference)
    if isinstance(tests, CallTests):
        calls = [f"{call.args_json}\x1f{call.expected_json}" for call in tests.cases[:_MAX_TESTS]]
        return ReferenceMarks(asked=frozenset({_NAME}), told=_name_hashes([tests.fn_name]) | _hashes(calls))
    if isinstance(tests, AssertTests):
        names = [name for match in _FUNCTION.findall(question) for name in match if name]
        told = _name_hashes(names) | _hashes(tests.programs[:_MAX_TESTS])
        return ReferenceMarks(asked=frozenset({_NAME} if names else ()), told=told)
    cases = tests.cases[:_MAX_TESTS]
    asked = frozenset(hash_of(case.input.strip()) for case in cases)
    told = _hashes(f"{case.input.strip()}\x1f{case.output.strip()}" for case in cases)
    return ReferenceMarks(asked=asked, told=told)


def _hashes(answers: Iterable[str]) -> frozenset[int]:
    return frozenset([hash_of(answer) & ~_OF_NAME for answer in answers])


def _name_hashes(names: Iterable[str]) -> frozenset[int]:
    return frozenset(hash_of(name) | _OF_NAME for name in names)


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
        elif not token[0].isalnum() and not _is_punctuation(tokens, i):
            yield i, token


def _is_punctuation(tokens: Sequence[str], i: int) -> bool:
    """Return whether a sign is a hyphen (`n-gon`, `five-digit`) or an exclamation mark, and so has no meaning."""
    before = tokens[i - 1] if i else ""
    after = tokens[i + 1] if i + 1 < len(tokens) else ""
    if tokens[i] == "!":
        return before.isalpha() and len(before) > 1
    # A single letter is a variable, and a short word may be a product of variables: `x-ab` is a difference.
    is_hyphen = tokens[i] == "-" and before.isalnum() and after.isalpha()
    if is_hyphen and len(before) > 1 and not _SHORT_WORDS.isdisjoint((before, after)):
        return True
    return is_hyphen and after not in _OPERATORS and len(after) >= (4 if len(before) == 1 else 3)


def _plain_answer(answer: str) -> str:
    """Return the tokens of an answer without layout; a whole number has one form (`7.0`, `7`)."""
    text = " ".join(tokens_of(_LAYOUT_OF_ANSWER.sub("", answer.strip())))
    try:
        number = float(text.replace(" ", ""))
    except ValueError:
        return text or answer
    return str(int(number)) if number.is_integer() else str(number)
