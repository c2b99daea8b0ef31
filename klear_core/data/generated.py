"""Dispatch between the kinds of generated sources, which have no files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from klear_core.config.data import GeneratedSource, ProceduralSource, PuzzleSource
from klear_core.data.candidates import Candidate
from klear_core.data.procedural import check_procedural, generate_chains
from klear_core.data.puzzles.generate import check_puzzles, generate_puzzles, puzzle_domain
from klear_core.types import Domain


def generate(source: GeneratedSource, *, seed: int) -> Iterator[Candidate]:
    """Yield the problems of a source; raise ConfigError if there are fewer than it wants."""
    match source:
        case ProceduralSource():
            return generate_chains(source, seed=seed)
        case PuzzleSource():
            return generate_puzzles(source, seed=seed)
        case _:
            assert_never(source)


def check_generated(source: GeneratedSource) -> None:
    """Raise ConfigError if the settings name invalid levels or ask for more problems than exist."""
    match source:
        case ProceduralSource():
            check_procedural(source)
        case PuzzleSource():
            check_puzzles(source)
        case _:
            assert_never(source)


def domain_of_generated(source: GeneratedSource) -> Domain:
    """Return the domain of all problems of a source."""
    match source:
        case ProceduralSource():
            return Domain.MATH
        case PuzzleSource(family=family):
            return puzzle_domain(family)
        case _:
            assert_never(source)
