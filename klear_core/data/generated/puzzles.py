"""Generate problems with long solutions: nested brackets, residues by search, and small programs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import comb, gcd
from operator import add, ge, gt, itemgetter, le, lt, mul
from random import Random
from typing import assert_never

from klear_core.config.data import GeneratedSource, GymSource, ProceduralSource, PuzzleFamily, PuzzleSource
from klear_core.data.candidates import Candidate
from klear_core.data.generated.chains import (
    Share,
    chain_shares,
    generate_chains,
    problems_by_level,
    questions_in_turn,
)
from klear_core.data.generated.gym_problems import check_gym, generate_gym
from klear_core.errors import ConfigError, DataError
from klear_core.seeding import seed_for
from klear_core.types import CallCase, CallTests, CodeReference, Domain, MathReference, Reference, domain_of

# ---- brackets ----
# Nested brackets modulo 7: `mod 7: ((3+4)*(5-2))=?`. The number of operations is the level.
#
# A solution copies the whole expression once for each operation, so its length grows with the square of the level.


MODULUS = 7
"""147 different operations, few enough for a model of half a million parameters to learn in minutes."""
OPERATORS = "+-*"

_BRACKETS = re.compile(r"mod 7: (?P<text>[-+*()0-6]+)=\?")
INNERMOST = re.compile(r"\(([0-6])([-+*])([0-6])\)")
"""A bracket of two digits; groups 1 to 3 are left digit, operator and right digit."""


def count_brackets(level: int) -> int:
    """Return the number of expressions with `level` operations."""
    return int(MODULUS ** (level + 1) * len(OPERATORS) ** level * _num_shapes(level))


def write_brackets(level: int, index: int) -> str:
    """Return the question with this number."""
    digits: list[str] = []
    operators: list[str] = []
    for _ in range(level + 1):
        index, digit = divmod(index, MODULUS)
        digits.append(str(digit))
    for _ in range(level):
        index, operator = divmod(index, len(OPERATORS))
        operators.append(OPERATORS[operator])
    return f"mod {MODULUS}: {_nested(level, index, iter(digits), iter(operators))}=?"


def parse_brackets(question: str) -> str | None:
    """Return the expression of a question; None if it is no question of this family."""
    match = _BRACKETS.fullmatch(question)
    return match["text"] if match else None


def solve_brackets(text: str) -> str:
    """Return the value of an expression, a digit; raise DataError if its brackets do not match."""
    while found := INNERMOST.search(text):
        text = replace_operation(text, found, value_of(found[1], found[2], found[3]))
    if len(text) != 1:
        raise DataError(f"brackets do not match: {text!r} is left")
    return text


def replace_operation(text: str, found: re.Match[str], value: int) -> str:
    """Return the expression with `value` in place of the bracket that was found."""
    return f"{text[: found.start()]}{value}{text[found.end() :]}"


def value_of(left: str, operator: str, right: str) -> int:
    """Return the value of one operation, in 0..6."""
    a, b = int(left), int(right)
    values = {"+": a + b, "-": a - b, "*": a * b}
    return values[operator] % MODULUS


def _nested(level: int, shape: int, digits: Iterator[str], operators: Iterator[str]) -> str:
    """Return the expression whose shape has this number among the binary trees with `level` inner nodes."""
    if level == 0:
        return next(digits)
    for num_left in range(level):
        num_right = level - 1 - num_left
        num_shapes = _num_shapes(num_left) * _num_shapes(num_right)
        if shape < num_shapes:
            left, right = divmod(shape, _num_shapes(num_right))
            operator = next(operators)
            return (
                f"({_nested(num_left, left, digits, operators)}{operator}"
                f"{_nested(num_right, right, digits, operators)})"
            )
        shape -= num_shapes
    raise AssertionError((level, shape))


def _num_shapes(level: int) -> int:
    """Return the number of binary trees with `level` inner nodes (Catalan numbers)."""
    return comb(2 * level, level) // (level + 1)


# ---- residues ----
# Congruences solved by search: `mod 13: 5+7x=4, least x=?` asks for the least positive x. The answer is the level.
#
# A solution tries x = 1, 2, ... in order, so its length grows with the answer, which the question does not show.
# After a wrong sum the search may miss the target and continue through all residues until it meets the target again.


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


# ---- programs ----
# Small programs over a list: `f(a): at least 4, add 3, reverse, sum`. The number of operations is the level.
#
# The answer is a Python function, judged by calls. Off-by-one comparisons pass the calls whose lists lack the boundary
# value, so programs can be right in part.


NUM_CALLS = 6
_LENGTHS = (5, 7)
_LARGEST = 9
"""Lists have 5 to 7 values from 0 to 9: a given boundary value is in about half of them."""
_MIN_RESULTS = 3
"""Different results that the calls must have, so that no constant passes many of them."""

Numbers = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a pipeline, in words, in Python, and as a function."""

    words: str
    code: str
    """A condition on x, an expression of x, or an expression of the list a."""
    form: str
    """Line of Python around the code: `[x for x in a if {}]`."""
    run: Callable[[Numbers], Numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The last word of a pipeline: the value that the function returns."""

    words: str
    code: str
    run: Callable[[Numbers], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A stated task: operations in order, and the ending."""

    operations: tuple[Operation, ...]
    ending: Ending

    def run(self, numbers: Numbers) -> object:
        """Return the right result for a list."""
        for operation in self.operations:
            numbers = operation.run(numbers)
        return self.ending.run(numbers)


_COMPARISONS = {"above": (">", gt), "at least": (">=", ge), "below": ("<", lt), "at most": ("<=", le)}


def _keep(words: str, code: str, is_kept: Callable[[int], bool]) -> Operation:
    return Operation(words=words, code=code, form="[x for x in a if {}]", run=lambda a: [x for x in a if is_kept(x)])


def _map(words: str, code: str, change: Callable[[int], int]) -> Operation:
    return Operation(words=words, code=code, form="[{} for x in a]", run=lambda a: [change(x) for x in a])


def _rearrange(words: str, code: str, run: Callable[[Numbers], Numbers]) -> Operation:
    return Operation(words=words, code=code, form="{}", run=run)


def _comparisons(k: int) -> Iterator[Operation]:
    for words, (sign, compare) in _COMPARISONS.items():
        yield _keep(f"{words} {k}", f"x{sign}{k}", lambda x, compare=compare: compare(x, k))  # type: ignore[misc]


def _operations() -> Iterator[Operation]:
    for k in range(1, 9):
        yield from _comparisons(k)
    for k in range(2, 5):
        yield _map(f"add {k}", f"x+{k}", partial(add, k))
        yield _map(f"times {k}", f"x*{k}", partial(mul, k))
    for k in range(1, 4):
        yield _rearrange(f"first {k}", f"a[:{k}]", itemgetter(slice(k)))
        yield _rearrange(f"skip {k}", f"a[{k}:]", itemgetter(slice(k, None)))
    yield _keep("odd", "x%2==1", lambda x: x % 2 == 1)
    yield _keep("even", "x%2==0", lambda x: x % 2 == 0)
    yield _rearrange("reverse", "a[::-1]", itemgetter(slice(None, None, -1)))
    yield _rearrange("sort", "sorted(a)", sorted)


OPERATIONS = tuple(_operations())
ENDINGS: tuple[Ending, ...] = (
    Ending(words="list", code="a", run=lambda a: a),
    Ending(words="sum", code="sum(a)", run=sum),
    Ending(words="count", code="len(a)", run=len),
)
_OPERATION_OF = {operation.words: operation for operation in OPERATIONS}
_ENDING_OF = {ending.words: ending for ending in ENDINGS}
_OPENING = "f(a): "


def count_programs(level: int) -> int:
    """Return the number of pipelines with `level` operations, unusable ones included."""
    return int(len(OPERATIONS) ** level * len(ENDINGS))


def write_programs(level: int, index: int) -> str | None:
    """Return the question with this number; None if too few of its calls have different results."""
    index, ending = divmod(index, len(ENDINGS))
    words = [ENDINGS[ending].words]
    for _ in range(level):
        index, operation = divmod(index, len(OPERATIONS))
        words.insert(-1, OPERATIONS[operation].words)
    question = _OPENING + ", ".join(words)
    pipeline = parse_programs(question)
    assert pipeline is not None, question
    results = {str(pipeline.run(numbers)) for numbers in calls_of(question)}
    return question if len(results) >= _MIN_RESULTS else None


def parse_programs(question: str) -> Pipeline | None:
    """Return the pipeline of a question; None if it is no question of this family."""
    *words, last = question.removeprefix(_OPENING).split(", ")
    is_known = all(word in _OPERATION_OF for word in words) and last in _ENDING_OF
    if not question.startswith(_OPENING) or not words or not is_known:
        return None
    return Pipeline(operations=tuple(_OPERATION_OF[word] for word in words), ending=_ENDING_OF[last])


def calls_of(question: str) -> list[Numbers]:
    """Return the lists with which the question's function is called."""
    rng = Random(seed_for(0, "data/puzzles/calls", question))  # noqa: S311
    return [_numbers(rng) for _ in range(NUM_CALLS)]


def _numbers(rng: Random) -> Numbers:
    length = rng.randint(*_LENGTHS)
    return [rng.randint(0, _LARGEST) for _ in range(length)]


# ---- generate ----


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
    drawn = questions_in_turn(_shares(cfg), seed, "data/puzzles", cfg.name)
    for index, (level, question) in enumerate(drawn):
        reference = family.reference(question)
        yield Candidate(
            source=cfg.name,
            domain=domain_of(reference),
            question=question,
            reference=reference,
            rating=min(level / family.hardest_level, 1.0),
            row=f"number {index}",
        )


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


# ---- generated ----
# Dispatch between the kinds of generated sources, which have no files.


def generate(source: GeneratedSource, *, seed: int) -> Iterator[Candidate]:
    """Yield the problems of a source; raise ConfigError if there are fewer than it wants."""
    match source:
        case ProceduralSource():
            return generate_chains(source, seed=seed)
        case PuzzleSource():
            return generate_puzzles(source, seed=seed)
        case GymSource():
            return generate_gym(source, seed=seed)
        case _:
            assert_never(source)


def check_generated(source: GeneratedSource) -> None:
    """Raise ConfigError if the settings name invalid levels or ask for more problems than exist."""
    match source:
        case ProceduralSource():
            chain_shares(source)
        case PuzzleSource():
            _shares(source)
        case GymSource():
            check_gym(source)
        case _:
            assert_never(source)


def domain_of_generated(source: GeneratedSource) -> Domain:
    """Return the domain of all problems of a source."""
    match source:
        case ProceduralSource():
            return Domain.MATH
        case PuzzleSource(family=family):
            return puzzle_domain(family)
        case GymSource():
            return Domain.MATH
        case _:
            assert_never(source)
