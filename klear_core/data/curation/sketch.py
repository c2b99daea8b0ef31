"""Sketch questions for the search of near-duplicates: MinHash bands find candidates, bottom-k sketches compare them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from klear_core.config.curate import NearConfig

# ---- lists of different lengths ----
# Hold lists of numbers of different lengths in flat arrays, which can be saved, mapped into memory and joined.


Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Lists of numbers, concatenated in one array."""

    values: Numbers
    ends: npt.NDArray[np.int64]
    """End of each list in `values`."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Numbers:
        start = self.ends[index - 1] if index else 0
        return self.values[start : self.ends[index]]

    def where(self, is_kept: npt.NDArray[np.bool_]) -> Ragged:
        """Return the lists with only the marked ones of their numbers."""
        num_kept = np.concatenate([[0], np.cumsum(is_kept, dtype=np.int64)])
        return Ragged(self.values[is_kept], num_kept[self.ends])

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the length of each list."""
        return np.diff(self.ends, prepend=0)


def ragged(lists: Sequence[Collection[int]], dtype: npt.DTypeLike) -> Ragged:
    """Return lists of numbers as flat arrays."""
    ends = np.cumsum([len(numbers) for numbers in lists], dtype=np.int64)
    # One array for all: an array for each list costs more than its numbers.
    return Ragged(np.fromiter(chain.from_iterable(lists), dtype=dtype), ends)


def joined_parts(parts: Sequence[Numbers], dtype: npt.DTypeLike) -> Ragged:
    """Return arrays as the lists of one Ragged."""
    values = np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
    return Ragged(values, np.cumsum([len(part) for part in parts], dtype=np.int64))


def joined(tables: Sequence[Ragged]) -> Ragged:
    """Return all lists of several tables, in order."""
    values = np.concatenate([table.values for table in tables])
    starts = np.cumsum([0, *(len(table.values) for table in tables[:-1])])
    return Ragged(values, np.concatenate([table.ends + start for table, start in zip(tables, starts, strict=True)]))


def distinct(values: Numbers) -> Numbers:
    """Return the distinct numbers, ascending. Several times as fast as `np.unique`, which hashes since numpy 2.3."""
    ordered = np.sort(values)
    return ordered[is_first(ordered)]


def is_first(values: Numbers) -> npt.NDArray[np.bool_]:
    """Return which numbers differ from the one before them; the first number does."""
    differs: npt.NDArray[np.bool_] = np.append(True, values[1:] != values[:-1])
    return differs[: len(values)]


# ---- sketch ----
# Sketch questions for the search of near-duplicates: MinHash bands find candidates, bottom-k sketches compare them.
#
# A sketch depends on a question's tokens alone, so shards can be sketched separately, in any order, on any machine.
# Axis letters: B bands, N questions, P permutations, R rows of a band.


Hashes = npt.NDArray[np.uint64]

SKETCH_SIZE = 256
"""Most shingles that are kept of a question. Most published questions have fewer, so their similarity is exact. For
longer ones it is an estimate with a standard error of 0.03 at most."""
_MAX_CODES = 1 << 18
"""Tokens whose hashes are remembered (about 40 MB)."""


@dataclass(frozen=True, slots=True, eq=False)
class Sketches:
    """The parts of questions that are compared with other questions."""

    shingles: Ragged
    """The smallest distinct shingle hashes of each question, ascending; all of them if there are at most
    `SKETCH_SIZE`."""
    band_keys_BN: Hashes
    """One key a band. Two questions are candidates if they have the same key in any band."""


def sketches_of(questions: Sequence[Sequence[str]], cfg: NearConfig) -> Sketches:
    """Return the sketches of questions, each with at least one token."""
    hashes = shingle_hashes(token_codes(questions), cfg.shingle)
    return Sketches(_smallest(hashes), _band_keys(hashes, cfg))


@dataclass(frozen=True, slots=True, eq=False)
class Overlaps:
    """Numbers of shingles of pairs of questions; of a sample of them if one has more than `SKETCH_SIZE`."""

    num_shared_P: npt.NDArray[np.int64]
    num_in_union_P: npt.NDArray[np.int64]
    num_in_smaller_P: npt.NDArray[np.int64]
    """Those of the question that has fewer."""

    def similarities(self) -> npt.NDArray[np.float64]:
        """Return the Jaccard similarities."""
        alike: npt.NDArray[np.float64] = self.num_shared_P / self.num_in_union_P
        return alike


def overlaps_of(one: Ragged, other: Ragged) -> Overlaps:
    """Return the overlap of each set of shingles with the one at the same place in `other`.

    If a sketch is full, its similarity is an estimate: the smallest hashes of the union are a random sample of it
    (bottom-k sketches, Cohen and Kaplan 2007).
    """
    if not len(one):
        return Overlaps(*(np.empty(0, dtype=np.int64) for _ in range(3)))
    # The pair's number is above the bits of the shingle, so that one sort merges all pairs. A shared shingle occurs
    # twice in a row.
    mine = _numbered(one)
    merged = np.sort(np.concatenate([mine, _numbered(other)]))
    is_repeat = np.append(False, merged[1:] == merged[:-1])
    is_shared = np.append(is_repeat[1:], False)[~is_repeat]
    union = merged[~is_repeat]
    pair = (union >> np.uint64(32)).astype(np.int64)
    starts = np.searchsorted(pair, np.arange(len(one)))
    # If one of the sketches is full, only the smallest `SKETCH_SIZE` hashes of the union are a random sample of it.
    is_full = np.maximum(one.lengths(), other.lengths()) == SKETCH_SIZE
    counts = (np.arange(len(union)) - starts[pair] < SKETCH_SIZE) | ~is_full[pair]
    num_in_union = np.bincount(pair[counts], minlength=len(one))
    num_shared = np.bincount(pair[counts & is_shared], minlength=len(one))
    is_mine = np.isin(union, mine, assume_unique=True)
    num_mine = np.bincount(pair[counts & is_mine], minlength=len(one))
    return Overlaps(num_shared, num_in_union, np.minimum(num_mine, num_in_union - num_mine + num_shared))


def hash_of(text: str) -> int:
    """Return a 64-bit hash that is the same in every process, unlike `hash`."""
    # surrogatepass: JSON escapes can produce lone surrogates, which plain UTF-8 refuses to encode.
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def token_codes(questions: Sequence[Sequence[str]]) -> Ragged:
    """Return a hash of each token of each question."""
    codes = _marked_codes(questions)
    return Ragged(codes.values & _CODE, codes.ends)


def token_and_word_codes(questions: Sequence[Sequence[str]]) -> tuple[Ragged, Ragged]:
    """Return a hash of each token of each question, and the same of the tokens that are words or numbers."""
    marked = _marked_codes(questions)
    codes = Ragged(marked.values & _CODE, marked.ends)
    return codes, codes.where(marked.values > _CODE)


def _marked_codes(questions: Sequence[Sequence[str]]) -> Ragged:
    ends = np.cumsum([len(tokens) for tokens in questions], dtype=np.int64)
    codes = map(_CODES.__getitem__, chain.from_iterable(questions))
    return Ragged(np.fromiter(codes, dtype=np.uint64), ends)


def shingle_hashes(codes: Ragged, length: int) -> Ragged:
    """Return the hashes of all runs of `length` token codes of each question; of all its codes if it has fewer.

    A question without a code has no run.
    """
    lengths = codes.lengths()
    run_lengths = np.minimum(length, lengths)
    num_runs = lengths - run_lengths + (lengths > 0)
    ends = np.cumsum(num_runs)
    # Place of each run's first code: where the question's codes begin, plus the run's number within the question.
    starts = np.repeat(codes.ends - lengths - (ends - num_runs), num_runs) + np.arange(ends[-1] if len(ends) else 0)
    run_length = np.repeat(run_lengths, num_runs)
    hashes = run_length.astype(np.uint64)
    for i in range(length):
        is_long = run_length > i  # short questions have one run, which is shorter
        if is_long.all():
            hashes = _mixed(hashes ^ codes.values[starts + i])
        else:
            hashes[is_long] = _mixed(hashes[is_long] ^ codes.values[starts[is_long] + i])
    return Ragged(hashes, ends)


def full_runs(codes: Ragged, length: int) -> Ragged:
    """Return the hashes of each list's runs of `length` codes; a shorter list has none."""
    lengths = codes.lengths()
    is_long = lengths >= length
    long = codes if is_long.all() else codes.where(np.repeat(is_long, lengths))
    return shingle_hashes(long, length)


def _smallest(hashes: Ragged) -> Ragged:
    """Return the `SKETCH_SIZE` smallest distinct upper halves of the hashes of each question."""
    lengths = hashes.lengths()
    numbers = np.repeat(np.arange(len(hashes), dtype=np.uint64), lengths)
    # The question's number is above the bits of the hash, so that one sort orders by question, then by hash.
    packed = distinct((numbers << np.uint64(32)) | (hashes.values >> np.uint64(32)))
    question = (packed >> np.uint64(32)).astype(np.int64)
    starts = np.searchsorted(question, np.arange(len(hashes)))
    is_kept = np.arange(len(packed)) - starts[question] < SKETCH_SIZE
    counts = np.bincount(question[is_kept], minlength=len(hashes))
    return Ragged((packed[is_kept] & np.uint64(0xFFFFFFFF)).astype(np.uint32), np.cumsum(counts))


def _band_keys(hashes: Ragged, cfg: NearConfig) -> Hashes:
    """Return a key for each band and question: a hash over the MinHash values of the band's rows."""
    starts = hashes.ends - hashes.lengths()
    seeds_P = _mixed(np.arange(1, cfg.num_bands * cfg.rows_per_band + 1, dtype=np.uint64))
    seeds_BR = seeds_P.reshape(cfg.num_bands, cfg.rows_per_band)
    keys_BN = np.empty((cfg.num_bands, len(hashes)), dtype=np.uint64)
    permuted, shifted = np.empty_like(hashes.values), np.empty_like(hashes.values)
    for band, seeds_R in enumerate(seeds_BR):
        keys_N = np.full(len(hashes), band, dtype=np.uint64)
        for seed in seeds_R:
            # One permutation at a time, over the shingles of all questions, so that the arrays stay in the cache.
            np.bitwise_xor(hashes.values, seed, out=permuted)
            _mix(permuted, shifted)
            minima_N = np.minimum.reduceat(permuted, starts)
            keys_N = _mixed(keys_N ^ minima_N)
        keys_BN[band] = keys_N
    return keys_BN


def _numbered(sets: Ragged) -> Hashes:
    """Return all values of the sets, with the number of the set in the upper 32 bits."""
    numbers = np.repeat(np.arange(len(sets), dtype=np.uint64), sets.lengths())
    return (numbers << np.uint64(32)) | sets.values.astype(np.uint64)


_CODE = np.uint64(0xFFFFFFFF)
"""The bits of a token's hash; the next one marks words and numbers."""


class _Codes(dict[str, int]):
    """Hashes of the tokens seen so far, up to a limit, with the mark of words and numbers."""

    def __missing__(self, token: str) -> int:
        # surrogatepass: JSON escapes can produce lone surrogates, which plain UTF-8 refuses to encode.
        code = zlib.crc32(token.encode(errors="surrogatepass")) | (token[0].isalnum() << 32)
        if len(self) < _MAX_CODES:
            self[token] = code
        return code


_CODES = _Codes()


def _mixed(values: Hashes) -> Hashes:
    """Return a bijective hash of each value."""
    mixed = values.copy()
    _mix(mixed, np.empty_like(mixed))
    return mixed


def _mix(values: Hashes, shifted: Hashes) -> None:
    """Hash each value in place, with an array of the same size to work in: this is the inner loop of sketching.

    The hash is the finaliser of SplitMix64, a bijection; sums and products wrap around.
    """
    values += np.uint64(0x9E3779B97F4A7C15)
    np.right_shift(values, np.uint64(30), out=shifted)
    values ^= shifted
    values *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(values, np.uint64(27), out=shifted)
    values ^= shifted
    values *= np.uint64(0x94D049BB133111EB)
    np.right_shift(values, np.uint64(31), out=shifted)
    values ^= shifted
