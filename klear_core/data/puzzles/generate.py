"""Generate the problems of a puzzle source, with references for the math judge and for the code judge."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

from klear_core.code_tests import CallCase, CallTests, CodeReference
from klear_core.config.data import PuzzleFamily, PuzzleSource
from klear_core.data.candidates import Candidate
from klear_core.data.puzzles.brackets import count_brackets, parse_brackets, solve_brackets, write_brackets
from klear_core.data.puzzles.programs import calls_of, count_programs, parse_programs, write_programs
from klear_core.data.puzzles.residues import count_residues, parse_residues, solve_residues, write_residues
from klear_core.data.spaces import Share, problems_by_level, questions_in_turn
from klear_core.errors import ConfigError
from klear_core.seeding import seed_for
from klear_core.types import Domain, MathReference, Reference, domain_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Functions that number the questions of each level, and return the reference of a question."""

    count: Callable[[int], int]
    """Returns the number of questions of a level; 0 if the family has no such level."""
    write: Callable[[int, int], str | None]
    """Returns the question with a level and a number; None if that question is unusable."""
    reference: Callable[[str], Reference]
    hardest_level: int
    """Level from which problems are rated 1, the hardest."""


def generate_puzzles(cfg: PuzzleSource, *, seed: int) -> Iterator[Candidate]:
    """Yield `cfg.num_problems` distinct problems of the split, cycling through the levels; `seed` determines the draws.

    Raise ConfigError if a level has fewer problems than its share.
    """
    family = FAMILIES[cfg.family]

    def rng_of(level: int) -> Random:
        return Random(seed_for(seed, "data/puzzles", cfg.name, level))  # noqa: S311

    for index, (level, question) in enumerate(questions_in_turn(_shares(cfg), rng_of)):
        reference = family.reference(question)
        yield Candidate(
            source=cfg.name,
            domain=domain_of(reference),
            question=question,
            reference=reference,
            rating=min(level / family.hardest_level, 1.0),
            row=f"number {index}",
        )


def check_puzzles(cfg: PuzzleSource) -> None:
    """Raise ConfigError if the settings name invalid levels or ask for more problems than exist."""
    _shares(cfg)


def puzzle_domain(family: PuzzleFamily) -> Domain:
    """Return the domain of a family's problems."""
    return Domain.CODE if family == "programs" else Domain.MATH


def _shares(cfg: PuzzleSource) -> dict[int, Share]:
    family = FAMILIES[cfg.family]
    if (
        not cfg.levels
        or len(set(cfg.levels)) != len(cfg.levels)
        or any(n < 1 or not family.count(n) for n in cfg.levels)
    ):
        raise ConfigError(
            f"source {cfg.name!r}: levels = {cfg.levels!r}; it must list different levels of {cfg.family!r}, "
            "each at least 1 and, for 'residues', at most 12"
        )
    return {level: _share(cfg, level, n) for level, n in problems_by_level(cfg.levels, cfg.num_problems).items()}


def _share(cfg: PuzzleSource, level: int, num_problems: int) -> Share:
    """Return the problems of one level; raise ConfigError if there are fewer than wanted."""
    family = FAMILIES[cfg.family]
    share = Share(
        split=cfg.split,
        num_problems=num_problems,
        size=family.count(level),
        question=partial(family.write, level),
    )
    available = share.available()
    if available is not None and available < num_problems:
        raise ConfigError(
            f"source {cfg.name!r}: {num_problems} {cfg.split} problems of {cfg.family!r} at level {level} wanted, "
            f"but there are only {available}; lower num_problems or name more levels"
        )
    return share


def _brackets_reference(question: str) -> MathReference:
    text = parse_brackets(question)
    assert text is not None, question
    return MathReference(answers=(solve_brackets(text),))


def _residues_reference(question: str) -> MathReference:
    puzzle = parse_residues(question)
    assert puzzle is not None, question
    return MathReference(answers=(solve_residues(puzzle),))


def _programs_reference(question: str) -> CodeReference:
    pipeline = parse_programs(question)
    assert pipeline is not None, question
    cases = [
        CallCase(args_json=json.dumps([numbers]), expected_json=json.dumps(pipeline.run(numbers)))
        for numbers in calls_of(question)
    ]
    return CodeReference(tests=CallTests(fn_name="f", cases=tuple(cases)))


FAMILIES: dict[PuzzleFamily, Family] = {
    "brackets": Family(count=count_brackets, write=write_brackets, reference=_brackets_reference, hardest_level=8),
    "residues": Family(count=count_residues, write=write_residues, reference=_residues_reference, hardest_level=12),
    "programs": Family(count=count_programs, write=write_programs, reference=_programs_reference, hardest_level=4),
}
