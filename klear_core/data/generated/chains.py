"""Generate chain problems: a start value and a list of + - * operations modulo m, with exact answers.

`mod 10: 3,+4,*7,-2=?` starts at 3, adds 4, multiplies by 7 and subtracts 2, left to right without precedence.
The number of operations sets the difficulty.
The text is short because every character is one token of the byte-level laptop model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from random import Random
from typing import Literal, assert_never

from klear_core.config.data import ProceduralSource
from klear_core.data.candidates import Candidate
from klear_core.errors import ConfigError, DataError
from klear_core.seeding import seed_for
from klear_core.types import Domain, MathReference

Operator = Literal["+", "-", "*"]

_HARDEST_LEVEL = 10
"""Number of operations from which a chain is rated 1, the hardest."""

_CHAIN = re.compile(r"mod (?P<modulus>\d+): (?P<start>\d+)(?P<steps>(?:,[-+*]\d+)+)=\?")
_STEP = re.compile(r",([-+*])(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStep:
    """One operation on the running value."""

    operator: Operator
    operand: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainProblem:
    """A start value and the steps that follow; all values are in 0..modulus-1."""

    modulus: int
    start: int
    steps: tuple[ChainStep, ...]


def generate_chains(cfg: ProceduralSource, *, seed: int) -> Iterator[Candidate]:
    """Yield `cfg.num_problems` distinct problems of the split, cycling through the levels; `seed` determines the draws.

    Raise ConfigError if a level has fewer problems than its share.
    """
    drawn = questions_in_turn(chain_shares(cfg), seed, "data/procedural", cfg.name)
    for index, (level, question) in enumerate(drawn):
        yield Candidate(
            source=cfg.name,
            domain=Domain.MATH,
            question=question,
            reference=MathReference(answers=(str(solve_chain(parse_chain(question))[-1]),)),
            rating=min(level / _HARDEST_LEVEL, 1.0),
            row=f"number {index}",
        )


def write_chain(chain: ChainProblem) -> str:
    """Return the question's text; `parse_chain` is the inverse."""
    steps = "".join(f",{s.operator}{s.operand}" for s in chain.steps)
    return f"mod {chain.modulus}: {chain.start}{steps}=?"


def parse_chain(question: str) -> ChainProblem:
    """Parse a question into its chain problem; raise DataError if it is not one."""
    match = _CHAIN.fullmatch(question.strip())
    if match is None:
        raise DataError(f"not a chain problem: {question[:100]!r}; one looks like 'mod 10: 3,+4,*7=?'")
    steps = tuple(ChainStep(operator=op, operand=int(number)) for op, number in _STEP.findall(match["steps"]))
    return ChainProblem(modulus=int(match["modulus"]), start=int(match["start"]), steps=steps)


def solve_chain(chain: ChainProblem) -> tuple[int, ...]:
    """Return the running value after each step; the last one is the answer."""
    values: list[int] = []
    value = chain.start
    for step in chain.steps:
        value = apply_step(value, step, chain.modulus)
        values.append(value)
    return tuple(values)


def apply_step(value: int, step: ChainStep, modulus: int) -> int:
    """Return the next running value, in 0..modulus-1."""
    match step.operator:
        case "+":
            return (value + step.operand) % modulus
        case "-":
            return (value - step.operand) % modulus
        case "*":
            return (value * step.operand) % modulus
        case _:
            assert_never(step.operator)


@cache
def all_steps(modulus: int) -> tuple[ChainStep, ...]:
    """Return all steps that a problem may contain, without those that keep (+0, -0, *1) or erase (*0) the value."""
    moves: dict[Operator, range] = {"+": range(1, modulus), "-": range(1, modulus), "*": range(2, modulus)}
    steps: list[ChainStep] = []
    for operator, operands in moves.items():
        steps += [ChainStep(operator=operator, operand=n) for n in operands]
    return tuple(steps)


def chain_shares(cfg: ProceduralSource) -> dict[int, Share]:
    """Return the problems of each level; raise ConfigError for invalid levels or more problems than exist."""
    levels = cfg.num_operations
    if not levels or min(levels) < 1 or len(set(levels)) != len(levels):
        raise ConfigError(
            f"source {cfg.name!r}: num_operations = {levels!r}; "
            "it must list different numbers of operations, each at least 1"
        )
    return {level: _share(cfg, level, n) for level, n in problems_by_level(levels, cfg.num_problems).items()}


@cache  # it counts the problems of small levels, and a run asks several times
def _share(cfg: ProceduralSource, level: int, num_problems: int) -> Share:
    """Return the problems of one level; raise ConfigError if there are fewer than wanted."""
    share = Share(
        split=cfg.split,
        num_problems=num_problems,
        size=cfg.modulus * len(all_steps(cfg.modulus)) ** level,
        question=lambda index: write_chain(_chain(cfg.modulus, level, index)),
    )
    available = share.available()
    if available is not None and available < num_problems:
        raise ConfigError(
            f"source {cfg.name!r}: {num_problems} {cfg.split} problems of {level} operations "
            f"modulo {cfg.modulus} wanted, but there are only {available}; "
            "lower num_problems or raise num_operations or modulus"
        )
    return share


def _chain(modulus: int, level: int, index: int) -> ChainProblem:
    """Decode an index into a chain, reading its digits in the mixed base (modulus, num_steps, num_steps, ...)."""
    moves = all_steps(modulus)
    index, start = divmod(index, modulus)
    steps: list[ChainStep] = []
    for _ in range(level):
        index, which = divmod(index, len(moves))
        steps.append(moves[which])
    return ChainProblem(modulus=modulus, start=start, steps=tuple(steps))


# ---- drawing problems ----
# Draw distinct problems from numbered spaces, without those of the other split.


HELD_OUT_ONE_IN = 8


def is_held_out(question: str) -> bool:
    """Return whether a question is in the held-out split: one in eight is, by a hash of its text alone."""
    digest = hashlib.blake2b(question.encode(), digest_size=8, person=b"heldout").digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The problems that one level of difficulty contributes to a source."""

    split: Literal["train", "heldout"]
    num_problems: int
    """Problems wanted."""
    size: int
    """Problems of this level, of both splits; they are numbered from 0."""
    question: Callable[[int], str | None]
    """Returns the text of a number's question; None if the number stands for no usable problem."""

    @property
    def is_small(self) -> bool:
        """Return whether the space is small enough to enumerate; in a larger one rejection sampling ends soon."""
        return self.size <= 4 * HELD_OUT_ONE_IN * self.num_problems

    def available(self) -> int | None:
        """Return how many problems the split has; None if they are too many to count."""
        if not self.is_small:
            return None
        return sum(self._usable(index) is not None for index in range(self.size))

    def draw(self, rng: Random) -> Iterator[str]:
        """Yield questions of the split in random order, none twice."""
        for index in self._indices(rng):
            question = self._usable(index)
            if question is not None:
                yield question

    def _usable(self, index: int) -> str | None:
        question = self.question(index)
        if question is None or is_held_out(question) != (self.split == "heldout"):
            return None
        return question

    def _indices(self, rng: Random) -> Iterator[int]:
        if self.is_small:  # a random permutation: rejection would be slow once most indices are seen
            yield from rng.sample(range(self.size), self.size)
            return
        seen: set[int] = set()
        while True:
            index = rng.randrange(self.size)
            if index not in seen:
                seen.add(index)
                yield index


def problems_by_level(levels: tuple[int, ...], num_problems: int) -> dict[int, int]:
    """Return the number of problems of each level, as equal as possible; the first levels may have one more."""
    return {level: len(range(i, num_problems, len(levels))) for i, level in enumerate(levels)}


def questions_in_turn(shares: Mapping[int, Share], seed: int, where: str, name: str) -> Iterator[tuple[int, str]]:
    """Yield level and question of all problems, cycling through the levels.

    Each level has a random generator of its own, by the seed, the kind of source (`where`) and the source's name.
    """
    rngs = {level: Random(seed_for(seed, where, name, level)) for level in shares}  # noqa: S311
    drawn = {level: share.draw(rngs[level]) for level, share in shares.items()}
    num_problems = sum(share.num_problems for share in shares.values())
    for level in islice(cycle(drawn), num_problems):
        yield level, next(drawn[level])
