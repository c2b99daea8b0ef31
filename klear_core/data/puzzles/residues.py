"""Congruences solved by search: `mod 13: 5+7x=4, least x=?` asks for the least positive x. The answer is the level.

A solution tries x = 1, 2, ... in order, so its length grows with the answer, which the question does not show.
After a wrong sum the search may miss the target and continue through all residues until it meets the target again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from math import gcd

MODULI = (11, 13)
"""Primes of two digits; 266 different sums, few enough for a small model to learn in minutes."""

_RESIDUE = re.compile(r"mod (?P<modulus>\d+): (?P<start>\d+)\+(?P<step>\d+)x=(?P<target>\d+), least x=\?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Residues:
    """The congruence start + step * x = target; step and modulus have no common factor, so one x in 1..modulus fits."""

    modulus: int
    start: int
    step: int
    target: int


def count_residues(level: int) -> int:
    """Return the number of congruences whose answer is `level`."""
    return len(_openings(level))


def write_residues(level: int, index: int) -> str:
    """Return the question with this number."""
    modulus, start, step = _openings(level)[index]
    target = (start + step * level) % modulus
    return f"mod {modulus}: {start}+{step}x={target}, least x=?"


def parse_residues(question: str) -> Residues | None:
    """Return the congruence of a question; None if it is no question of this family."""
    match = _RESIDUE.fullmatch(question)
    if match is None:
        return None
    numbers = {name: int(text) for name, text in match.groupdict().items()}
    return Residues(**numbers) if gcd(numbers["step"], numbers["modulus"]) == 1 else None


def solve_residues(puzzle: Residues) -> str:
    """Return the least positive x."""
    distance = (puzzle.target - puzzle.start) * pow(puzzle.step, -1, puzzle.modulus) % puzzle.modulus
    return str(distance or puzzle.modulus)


@cache
def _openings(level: int) -> tuple[tuple[int, int, int], ...]:
    """Return modulus, start and step of all congruences with this answer."""
    return tuple(
        (modulus, start, step)
        for modulus in MODULI
        for start in range(modulus)
        for step in range(1, modulus)
        if level < modulus and gcd(step, modulus) == 1
    )
