"""The index of n-grams is arrays of hashes; it finds what plain sets of texts would."""

import random

import numpy as np
import pytest

from klear_core.data.curation.decontaminate import GramIndex, HashSet


def grams_of(tokens, length):
    return [" ".join(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]


class Plain:
    """The same numbers by definition."""

    def __init__(self, questions, *, length, max_questions):
        self.length = length
        self.grams = [set(grams_of(tokens, length)) for tokens in questions]
        every = set().union(*self.grams)
        self.common = {gram for gram in every if sum(gram in grams for grams in self.grams) > max_questions}

    def nearest(self, tokens):
        own = [gram for gram in dict.fromkeys(grams_of(tokens, self.length)) if gram not in self.common]
        shared = [[gram for gram in own if gram in grams] for grams in self.grams]
        hits = [i for i, grams in enumerate(shared) if grams]
        if not hits:
            return None
        best = max(hits, key=lambda i: (len(shared[i]) / len(self.grams[i] - self.common), -i))
        return best, len(shared[best]), shared[best][0]

    def common_hit(self, tokens):
        phrases = [gram for gram in dict.fromkeys(grams_of(tokens, self.length)) if gram in self.common]
        if not phrases:
            return None
        return next(i for i, grams in enumerate(self.grams) if phrases[0] in grams), len(phrases), phrases[0]


def fields(hit):
    return hit and (hit.index, hit.num_shared, hit.first_shared)


@pytest.mark.parametrize("num_words", [2, 4, 20])
@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_the_index_finds_what_sets_of_texts_would(num_words, length):
    draw = random.Random(num_words + length)

    def text():
        return [f"w{draw.randrange(num_words)}" for _ in range(draw.choice([0, 1, 2, 5, 10, 30]))]

    for num_questions in (0, 1, 3, 20):
        questions = [text() for _ in range(num_questions)]
        index = GramIndex(questions, length=length, max_questions=2)
        plain = Plain(questions, length=length, max_questions=2)
        assert index.common == plain.common
        assert index.num_grams == [len(grams - plain.common) for grams in plain.grams]
        for tokens in [*(text() for _ in range(20)), ["unknown"] * 12]:
            assert fields(index.overlap_with(tokens).nearest()) == plain.nearest(tokens)
            assert fields(index.common_hit(tokens)) == plain.common_hit(tokens)


@pytest.mark.parametrize("num_known", [0, 1, 5_000])
def test_a_set_of_hashes_finds_its_own_and_no_other(num_known):
    draw = np.random.default_rng(0)
    known = draw.integers(0, 2**64, num_known, dtype=np.uint64)
    others = draw.integers(0, 2**64, 5_000, dtype=np.uint64)
    others[:2] = 0, 2**64 - 1
    hashes = HashSet(np.concatenate([known, known]))
    assert hashes.values.tolist() == sorted(known.tolist())
    looked_up = np.concatenate([others, known])
    assert hashes.has(looked_up).tolist() == [False] * 5_000 + [True] * num_known
    found, at = hashes.find(looked_up)
    assert hashes.values[at].tolist() == looked_up[found].tolist() == known.tolist()
