"""Choose among curated problems: the best sources, caps and shares of sources, a subset of fixed size.

A draw orders problems by a seeded hash of their id, so it does not depend on files, shards or the order of rows.
Axis letter: N problems.

Axis letters: N questions, D dimensions, F distinct features of a question.
"""

from __future__ import annotations

import importlib.util
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import compress, islice
from math import floor
from pathlib import Path
from typing import assert_never

import numpy as np
import numpy.typing as npt

from klear_core.config.curate import CurateConfig, EmbeddingConfig, HashedEmbedding, SelectConfig, SentenceEmbedding
from klear_core.config.data import Source
from klear_core.data.curation.kcenter import Centres, Indices, Vectors, k_center, quantised, refined
from klear_core.data.curation.normalise import tokens_of
from klear_core.data.sources import source_name
from klear_core.errors import ConfigError
from klear_core.seeding import seed_for
from klear_core.types import Dropped

SELECT = "select"
"""Ledger step of the problems that this module drops."""

_STAYS, _OVER_CAP, _OVER_WEIGHT, _NOT_DRAWN, _NOT_A_CENTER = range(5)
_MEANING = {
    "": "",
    "over_cap": "select.caps allows fewer problems of this source",
    "over_weight": "select.weights allows fewer problems of this source",
    "not_drawn": "not among the drawn select.num_problems",
    "not_a_center": "not among the select.num_problems centres",
}
"""Reasons in the order of their numbers, and what they mean."""
_SLUGS = tuple(_MEANING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The problems to choose from, in any order; the result is the same for each order."""

    problem_ids: Sequence[str]
    sources: Sequence[str]
    """Name of each problem's source."""
    questions: Callable[[], Iterable[str]]
    """Returns the questions in the order of the ids; may be called more than once, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """The result of a selection: why each problem is dropped, or that it stays."""

    pool: Pool
    reasons_N: npt.NDArray[np.int8]
    """Index into the reasons; 0 stays."""
    centres: Centres | None
    """The result of K-center greedy if it was used; it counts the problems of `left_N` alone."""
    left_N: Indices
    """The problems, ascending, among which the centres were chosen."""
    notes: tuple[str, ...]
    """Warnings for the reader of the report."""

    def drop_of(self, index: int) -> Dropped | None:
        """Return the drop record of a problem of the pool, or None if it stays."""
        reason = _SLUGS[self.reasons_N[index]]
        if not reason:
            return None
        matched_id, detail = "", f"{self.pool.sources[index]}: {_MEANING[reason]}"
        if self.centres is not None and reason == "not_a_center":
            place = np.searchsorted(self.left_N, index)
            matched_id = self.pool.problem_ids[self.left_N[self.centres.nearest_N[place]]]
            detail += f"; the nearest of them is {self.centres.similarity_N[place]:.3f} like it (cosine)"
        problem_id = self.pool.problem_ids[index]
        return Dropped(problem_id=problem_id, step=SELECT, reason=reason, detail=detail, matched_id=matched_id)


def sources_to_read(cfg: CurateConfig) -> tuple[Source, ...]:
    """Return the sources that are not left out by `top_k_sources`, in the order of the list.

    Of two sources of the same quality the first in the list is the better one.
    """
    quality = [cfg.select.quality.get(source_name(source), 0.0) for source in cfg.sources]
    by_rank = sorted(range(len(quality)), key=lambda i: (-quality[i], i))
    return tuple(cfg.sources[i] for i in sorted(by_rank[: cfg.select.top_k_sources]))


def left_out(cfg: CurateConfig) -> list[str]:
    """Return a note on each source that is not read."""
    read = sources_to_read(cfg)
    return [
        f"source {source_name(source)} is left out by select.top_k_sources = {cfg.select.top_k_sources}"
        for source in cfg.sources
        if source not in read
    ]


def check_selection(cfg: CurateConfig) -> None:
    """Raise ConfigError if the selection names unknown sources, or leaves one out that needs a value."""
    names = [source_name(source) for source in cfg.sources]
    by_source: dict[str, Mapping[str, float]] = {"quality": cfg.select.quality, "caps": cfg.select.caps}
    by_source["weights"] = cfg.select.weights
    for key, named in by_source.items():
        for name in named:
            if name not in names:
                raise ConfigError(f"select.{key}: {name!r} is none of the sources, which are: {', '.join(names)}")
    _require_all("quality", cfg.select.quality, names)
    _require_all("weights", cfg.select.weights, [source_name(source) for source in sources_to_read(cfg)])
    if cfg.select.num_problems is not None and cfg.select.method == "k_center":
        check_embedding(cfg.select.embedding)


def select_problems(cfg: SelectConfig, pool: Pool, *, seed: int) -> Selection:
    """Return which problems stay: caps first, then the shares of sources and the size of the result."""
    draws_N = _draws(pool, seed)
    members = _members(pool, draws_N)
    reasons_N = np.full(len(draws_N), _STAYS, dtype=np.int8)
    for source in cfg.caps.keys() & members.keys():
        own_M = members[source]
        members[source], reasons_N[own_M[cfg.caps[source] :]] = own_M[: cfg.caps[source]], _OVER_CAP
    available = {source: len(own_M) for source, own_M in members.items()}
    quotas = mix(available, cfg.weights, most=cfg.num_problems) if cfg.weights else available
    size = min(sum(quotas.values()), cfg.num_problems or len(draws_N))
    if cfg.num_problems is not None and cfg.method == "k_center" and 0 < size < sum(available.values()):
        left_N = np.flatnonzero(reasons_N == _STAYS)
        centres = _centres(cfg, pool, left_N, draws_N, quotas=quotas, size=size)
        reasons_N[left_N] = _NOT_A_CENTER
        reasons_N[left_N[centres.chosen]] = _STAYS
    else:
        left_N, centres = np.empty(0, dtype=np.int64), None
        surplus = _OVER_WEIGHT if cfg.num_problems is None else _NOT_DRAWN
        for source, own_M in members.items():
            reasons_N[own_M[quotas[source] :]] = surplus
        in_quota_M = np.flatnonzero(reasons_N == _STAYS)
        reasons_N[in_quota_M[np.argsort(draws_N[in_quota_M])[size:]]] = _NOT_DRAWN
    notes = tuple(_notes(cfg, available, size))
    return Selection(pool=pool, reasons_N=reasons_N, left_N=left_N, centres=centres, notes=notes)


def mix(available: Mapping[str, int], weights: Mapping[str, float], *, most: int | None = None) -> dict[str, int]:
    """Return the largest counts with these shares, at most `most` in all; a source without items is left out.

    Counts differ from the exact shares by less than one.
    """
    # `repr` gives the decimal as written in the settings: 0.1 is exactly one tenth, and no count is off by one.
    exact = {name: Fraction(repr(weights[name])) for name, count in available.items() if count}
    counts = dict.fromkeys(available, 0)
    if not exact:
        return counts
    total_weight = sum(exact.values(), Fraction(0))
    size = min(floor(available[name] / weight * total_weight) for name, weight in exact.items())
    size = size if most is None else min(size, most)
    ideal = {name: size * weight / total_weight for name, weight in exact.items()}
    counts |= {name: floor(count) for name, count in ideal.items()}
    by_remainder = sorted(ideal, key=lambda name: (counts[name] - ideal[name], name))
    for name in by_remainder[: size - sum(counts.values())]:
        counts[name] += 1
    return counts


def _centres(
    cfg: SelectConfig,
    pool: Pool,
    left_N: Indices,
    draws_N: Indices,
    *,
    quotas: Mapping[str, int],
    size: int,
) -> Centres:
    """Return the centres among the problems `left_N`, as places in that list."""
    # M: the problems left, sorted by id: of two equally far problems the lower id wins, whatever the order of the pool.
    ids = [pool.problem_ids[index] for index in left_N.tolist()]
    by_id_M = np.array(sorted(range(len(ids)), key=ids.__getitem__), dtype=np.int64)
    rank_M = np.empty_like(by_id_M)
    rank_M[by_id_M] = np.arange(len(by_id_M))
    is_left_N = np.zeros(len(draws_N), dtype=np.bool_)
    is_left_N[left_N] = True
    vectors_MD = embed(cfg.embedding, lambda: compress(pool.questions(), is_left_N), rank_M)
    number_of = {source: number for number, source in enumerate(quotas)}
    groups_M = np.array([number_of[pool.sources[index]] for index in left_N[by_id_M].tolist()], dtype=np.int64)
    counts = list(quotas.values())
    # The first centre is drawn among the sources that may give one.
    draws_M = np.where(np.array(counts)[groups_M] > 0, draws_N[left_N[by_id_M]], np.iinfo(np.int64).max)
    centres = k_center(vectors_MD, size, first=int(draws_M.argmin()), groups_N=groups_M, quotas=counts)
    for _ in range(cfg.refine_steps):
        centres = refined(vectors_MD, centres, groups_M)
    return Centres(
        chosen=by_id_M[centres.chosen],
        nearest_N=by_id_M[centres.nearest_N[rank_M]],
        similarity_N=centres.similarity_N[rank_M],
    )


def _draws(pool: Pool, seed: int) -> Indices:
    """Return a seeded hash of each problem's id; those with the lowest are drawn first."""
    draws = (seed_for(seed, "data/select", problem_id) for problem_id in pool.problem_ids)
    return np.fromiter(draws, dtype=np.int64, count=len(pool.problem_ids))


def _members(pool: Pool, draws_N: Indices) -> dict[str, Indices]:
    """Return the problems of each source in the order in which they are drawn."""
    number_of = {source: number for number, source in enumerate(dict.fromkeys(pool.sources))}
    numbers_N = np.fromiter((number_of[source] for source in pool.sources), dtype=np.int64, count=len(draws_N))
    order_N = np.lexsort((draws_N, numbers_N))
    starts = np.searchsorted(numbers_N[order_N], np.arange(1, len(number_of)))
    return dict(zip(number_of, np.split(order_N, starts), strict=True)) if number_of else {}


def _notes(cfg: SelectConfig, available: Mapping[str, int], num_kept: int) -> Iterator[str]:
    for name in cfg.weights:
        if not available.get(name):
            yield f"source {name}: no problem was left to select, so its weight had no effect"
    if cfg.num_problems is not None and num_kept < cfg.num_problems:
        yield f"select.num_problems = {cfg.num_problems:,}, but sources and weights allow {num_kept:,} problems only"


def _require_all(key: str, values: Mapping[str, float], names: Sequence[str]) -> None:
    missing = sorted(set(names) - values.keys())
    if values and missing:
        raise ConfigError(f"select.{key}: has no value for source {missing[0]!r}")


# ---- embed ----
# Embed questions as short vectors of 8-bit integers, whose cosine similarity tells how much they have in common.


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
