"""Find repeated questions by exact match after normalisation; the first one in order of rank stays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from klear_core.config.curate import DedupConfig
from klear_core.data.candidates import Candidate
from klear_core.data.near import Ranks
from klear_core.data.normalise import tokens_of
from klear_core.data.ragged import Ragged
from klear_core.data.sketch import hash_of
from klear_core.types import MathReference


def exact_key(candidate: Candidate, tokens: Sequence[str], cfg: DedupConfig) -> bytes:
    """Return 16 bytes that candidates with the same question share; `tokens` are those of the question."""
    text = " ".join(tokens) if cfg.normalise else ""
    text = text or candidate.question  # normalisation may leave nothing (no word or sign): compare the raw text
    # surrogatepass: JSON escapes can produce lone surrogates, which plain UTF-8 refuses to encode.
    return hashlib.blake2b(f"{candidate.domain}\x1f{text}".encode(errors="surrogatepass"), digest_size=16).digest()


def keys_array(keys: Iterable[bytes]) -> npt.NDArray[np.uint64]:
    """Return keys as an array of two columns."""
    return np.frombuffer(b"".join(keys), dtype=">u8").astype(np.uint64).reshape(-1, 2)


def first_with_key(keys_N2: npt.NDArray[np.uint64]) -> Ranks:
    """Return for each candidate the first one in order of rank that has the same key, which may be itself."""
    order_N = np.lexsort((keys_N2[:, 1], keys_N2[:, 0]))  # stable: ascending ranks for one key
    in_order_N2 = keys_N2[order_N]
    is_new_N = np.append(True, (in_order_N2[1:] != in_order_N2[:-1]).any(axis=1))[: len(order_N)]
    first_N: Ranks = np.empty(len(order_N), dtype=np.int64)
    first_N[order_N] = order_N[is_new_N][np.cumsum(is_new_N) - 1]
    return first_N


@dataclass(frozen=True, slots=True, eq=False)
class WrittenAnswers:
    """Hashes of the normalised answers of candidates, to find repeats with another answer."""

    hashes: Ragged
    is_math_N: npt.NDArray[np.bool_]
    """False for code, where two test sets of one problem may differ without a contradiction."""

    def __getitem__(self, index: int) -> frozenset[int] | None:
        return frozenset(self.hashes[index].tolist()) if self.is_math_N[index] else None


def written_answers(candidate: Candidate) -> frozenset[int] | None:
    """Return hashes of the normalised answers; None if the reference is no list of answers."""
    if not isinstance(candidate.reference, MathReference):
        return None
    return frozenset(hash_of(" ".join(tokens_of(a)) or a) for a in candidate.reference.answers)


def contradict(one: frozenset[int] | None, other: frozenset[int] | None) -> bool:
    """Return whether the answers to one question differ, compared as text."""
    return one is not None and other is not None and one.isdisjoint(other)
