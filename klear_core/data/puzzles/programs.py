"""Small programs over a list: `f(a): at least 4, add 3, reverse, sum`. The number of operations is the level.

The answer is a Python function, judged by calls. Off-by-one comparisons pass the calls whose lists lack the boundary
value, so programs can be right in part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import add, ge, gt, itemgetter, le, lt, mul
from random import Random

from klear_core.seeding import seed_for

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
