"""Choose among curated problems: the best sources, caps and shares of sources, a subset of fixed size.

A draw orders problems by a seeded hash of their id, so it does not depend on files, shards or the order of rows.
Axis letter: N problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import numpy as np
import numpy.typing as npt

from klear_core.config.data import CurateConfig, SelectConfig, Source
from klear_core.data.sources import source_name
from klear_core.errors import ConfigError
from klear_core.seeding import seed_for
from klear_core.types import Dropped

SELECT = "select"
"""Ledger step of the problems that this module drops."""

_STAYS, _OVER_CAP, _OVER_WEIGHT, _NOT_DRAWN = range(4)
_SLUGS = ("", "over_cap", "over_weight", "not_drawn")


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
    kept: Mapping[str, int]
    """Number of problems that stay, by source."""
    notes: tuple[str, ...]
    """Warnings for the reader of the report."""

    def drop_of(self, index: int) -> Dropped | None:
        """Return the drop record of a problem of the pool, or None if it stays."""
        reason = _SLUGS[self.reasons_N[index]]
        if not reason:
            return None
        source = self.pool.sources[index]
        detail = f"{source}: {self.kept.get(source, 0):,} of its problems stay"
        return Dropped(problem_id=self.pool.problem_ids[index], step=SELECT, reason=reason, detail=detail)


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
    for source, own_M in members.items():
        members[source] = own_M[: quotas[source]]
        reasons_N[own_M[quotas[source] :]] = _OVER_WEIGHT if cfg.num_problems is None else _NOT_DRAWN
    if cfg.num_problems is not None:
        left_N = np.flatnonzero(reasons_N == _STAYS)
        in_order_N = left_N[np.argsort(draws_N[left_N])]
        reasons_N[in_order_N[cfg.num_problems :]] = _NOT_DRAWN
    stays_N = reasons_N == _STAYS
    kept = Counter(source for source, stays in zip(pool.sources, stays_N, strict=True) if stays)
    return Selection(pool=pool, reasons_N=reasons_N, kept=kept, notes=tuple(_notes(cfg, available, kept.total())))


def mix(available: Mapping[str, int], weights: Mapping[str, float], *, most: int | None = None) -> dict[str, int]:
    """Return the largest counts with these shares, at most `most` in all; a source without items is left out.

    Counts differ from the exact shares by less than one.
    """
    # Weights as they are written, so that 0.1 is one tenth and no count is off by one.
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


def _draws(pool: Pool, seed: int) -> npt.NDArray[np.int64]:
    """Return a seeded hash of each problem's id; those with the lowest are drawn first."""
    draws = (seed_for(seed, "data/select", problem_id) for problem_id in pool.problem_ids)
    return np.fromiter(draws, dtype=np.int64, count=len(pool.problem_ids))


def _members(pool: Pool, draws_N: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int64]]:
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
