"""Pick the prompts that may overlap with a protected question, many at a time, before they are compared with care.

A prompt that is left out matches no rule; one that is picked may match none either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from klear_core.data.gram_index import GramIndex
from klear_core.data.hash_set import HashSet
from klear_core.data.ragged import Ragged, distinct
from klear_core.data.sketch import full_runs, token_and_word_codes, token_codes

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
        self._word_grams = HashSet(_hashes_of(words, ngram).values)
        common = [gram.split(" ") for gram in shingles.common]
        self._common = HashSet(_hashes_of(common, self._shingle).values)
        hashes = _hashes_of(tokens, self._shingle)
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


def _hashes_of(texts: Sequence[Sequence[str]], length: int) -> Ragged:
    """Return the hashes of each text's runs of `length` tokens; a shorter text has none."""
    return full_runs(token_codes(texts), length)
