"""Embed questions as short vectors of 8-bit integers, whose cosine similarity tells how much they have in common.

Axis letters: N questions, D dimensions, F distinct features of a question.
"""

from __future__ import annotations

import importlib.util
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import assert_never

import numpy as np
import numpy.typing as npt

from klear_core.config.curate import EmbeddingConfig, HashedEmbedding, SentenceEmbedding
from klear_core.data.kcenter import Indices, Vectors, quantised
from klear_core.data.normalise import tokens_of
from klear_core.errors import ConfigError

Floats = npt.NDArray[np.float64]

_NUM_BUCKETS = 1 << 20
"""Buckets in which document frequencies are counted; two words share one with a probability of one in a million."""
_MAX_COUNTED = 100_000
"""Approximate number of questions whose words are counted."""
_QUESTIONS_PER_BLOCK = 1024
"""Questions whose vectors are in memory before they become 8-bit integers."""


def embed(cfg: EmbeddingConfig, questions: Callable[[], Iterable[str]], places: Indices) -> Vectors:
    """Return the vectors of questions, each at its place; `questions` may be called twice."""
    match cfg:
        case HashedEmbedding():
            blocks = _hashed(questions, len(places), cfg.dimensions)
        case SentenceEmbedding():
            blocks = _by_model(cfg, questions())
        case _:
            assert_never(cfg)
    vectors_ND: Vectors | None = None
    num_done = 0
    for block_BD in blocks:
        if vectors_ND is None:
            vectors_ND = np.empty((len(places), block_BD.shape[1]), dtype=np.int8)
        vectors_ND[places[num_done : num_done + len(block_BD)]] = quantised(block_BD)
        num_done += len(block_BD)
    assert vectors_ND is not None, "there is a question"
    assert num_done == len(places), (num_done, len(places))
    return vectors_ND


def check_embedding(cfg: EmbeddingConfig) -> None:
    """Raise ConfigError if the model's library is not installed, or its folder is missing."""
    if not isinstance(cfg, SentenceEmbedding):
        return
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ConfigError("select.embedding: sentence-transformers is not installed: pip install 'klear[embed]'")
    if cfg.revision is None and not Path(cfg.model).is_dir():
        raise ConfigError(
            f"select.embedding.model: {cfg.model!r} is no folder; for a model of the Hub, give a commit as revision"
        )


def _hashed(questions: Callable[[], Iterable[str]], count: int, dimensions: int) -> Iterator[Floats]:
    """Embed by hashed TF-IDF: every word adds its weight to one dimension, with a sign (Weinberger et al. 2009)."""
    idf = _inverse_frequencies(questions(), one_in=max(1, count // _MAX_COUNTED))
    rest = iter(questions())
    while block := list(islice(rest, _QUESTIONS_PER_BLOCK)):
        yield np.stack([_tf_idf(question, idf, dimensions) for question in block])


def _by_model(cfg: SentenceEmbedding, questions: Iterable[str]) -> Iterator[Floats]:
    """Embed by a sentence-transformers model."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(cfg.model, revision=cfg.revision)
    rest = iter(questions)
    while block := list(islice(rest, _QUESTIONS_PER_BLOCK)):
        yield model.encode(block, batch_size=cfg.runtime.batch_size, show_progress_bar=False).astype(np.float64)


def _inverse_frequencies(questions: Iterable[str], *, one_in: int) -> Floats:
    """Return the weight of each bucket's words, `log((1 + n) / (1 + n_word)) + 1` over a sample of the questions."""
    num_with: npt.NDArray[np.int64] = np.zeros(_NUM_BUCKETS, dtype=np.int64)
    num_counted = 0
    for question in questions:
        if _hash(question) % one_in:  # sampled by content, so that the order of the questions does not matter
            continue
        num_with[list({_hash(word) % _NUM_BUCKETS for word in _words(question)})] += 1
        num_counted += 1
    return np.log((1 + num_counted) / (1 + num_with)) + 1


def _words(question: str) -> list[str]:
    return tokens_of(question) or [question]  # a question such as `?` has no token


def _hash(word: str) -> int:
    return zlib.crc32(word.encode(errors="surrogatepass"))


def _tf_idf(question: str, idf: Floats, dimensions: int) -> Floats:
    counts = Counter(map(_hash, _words(question)))
    hashes_F = np.fromiter(counts, dtype=np.int64, count=len(counts))
    tf_F = np.array([1 + math.log(n) for n in counts.values()])
    signs_F = 1 - 2 * (hashes_F >> 31)  # the highest of 32 bits; the others choose the dimension
    weights_F = tf_F * idf[hashes_F % _NUM_BUCKETS] * signs_F
    return np.bincount((hashes_F & 0x7FFFFFFF) % dimensions, weights=weights_F, minlength=dimensions).astype(np.float64)
