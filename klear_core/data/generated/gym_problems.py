"""Generate problems of reasoning-gym's tasks, in a process of its own.

Some tasks draw from Python's global generator, depend on the hash seed of the process, or print. The process is started
with a fixed hash seed and seeds that generator itself, so that the same settings make the same problems anywhere.

python -m klear_core.data.generated.gym_problems SETTINGS SEED    writes problems as JSON lines to its standard output
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from typing import Any

from klear_core.config.data import GymSource
from klear_core.config.verify import GYM_JUDGE
from klear_core.data.candidates import Candidate
from klear_core.data.generated.chains import is_held_out, problems_by_level
from klear_core.errors import ConfigError
from klear_core.seeding import seed_for
from klear_core.types import AnswerToJudge, CustomReference, Domain, MathReference, Reference
from klear_core.verify import gym

_CHUNK = 500
"""Problems of one data set; a further one has another seed. It is the package's default size."""
_DRAWS = 40
"""Draws for each problem that is wanted; one in eight is held out, and small tasks repeat themselves."""
_DRY_FACTOR = 20
"""How much longer than expected a run of draws without a new problem must be before drawing ends."""

BY_TEXT = frozenset(
    (
        "ab", "acre", "aiw", "boxnet", "caesar_cipher", "circuit_logic", "color_cube_rotation", "emoji_mystery",
        "family_relationships", "isomorphic_strings", "knight_swap", "letter_counting", "mahjong_puzzle", "maze",
        "modulo_grid", "n_queens", "needle_haystack", "propositional_logic", "ransom_note", "rectangle_count",
        "rubiks_cube", "rush_hour", "sentence_reordering", "shortest_path", "syllogism", "tsumego", "zebra_puzzles",
    )
)  # fmt: skip
"""Tasks whose problems numbers and answer do not tell apart: of 150 problems fewer than nine in ten differ in them."""
BY_MATH = frozenset(
    (
        "advanced_geometry", "aiw", "arc_1d", "base_conversion", "basic_arithmetic", "bf", "binary_alternation",
        "binary_matrix", "caesar_cipher", "calendar_arithmetic", "chain_sum", "circuit_logic", "color_cube_rotation",
        "count_bits", "count_primes", "course_schedule", "cryptarithm", "decimal_arithmetic", "dice", "futoshiki",
        "game_of_life", "gcd", "isomorphic_strings", "knight_swap", "largest_island", "lcm", "leg_counting",
        "letter_counting", "maze", "needle_haystack", "number_sequence", "number_sorting", "path_star",
        "polynomial_equations", "pool_matrix", "products", "ransom_note", "rectangle_count", "rotate_matrix",
        "rotten_oranges", "self_reference", "shortest_path", "simple_equations", "simple_geometry", "spell_backward",
        "spiral_matrix", "string_insertion", "string_manipulation", "string_splitting", "string_synthesis", "sudoku",
        "syllogism", "time_intervals",
    )
)  # fmt: skip
"""Tasks that the math judge can score by itself, as docs/data/reasoning_gym.md has them."""
_MOST_TERMS = 8
"""Numbers from which on their order counts: they are a grid or a list, and not the terms of a sum."""
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_NAME = re.compile(r"\b[A-Z][a-z]+\b")


def generate_gym(cfg: GymSource, *, seed: int) -> Iterator[Candidate]:
    """Yield `cfg.num_problems` problems of the split that differ in content, cycling through the levels.

    Raise ConfigError if the task, a level or a setting is unknown, or if it has too few different problems.
    """
    command = [sys.executable, "-m", "klear_core.data.generated.gym_problems", cfg.model_dump_json(), str(seed)]
    environment = os.environ | {"PYTHONHASHSEED": "0", "MPLBACKEND": "agg"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, env=environment, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield from as_candidates(cfg, map(json.loads, process.stdout))
            if process.wait() != 0:
                errors.seek(0)
                lines = errors.read().strip().splitlines() or ["it was killed"]
                raise ConfigError(f"source {cfg.name!r}: {lines[-1]}")
        finally:
            process.kill()  # the caller may have taken only the first problems


def check_gym(cfg: GymSource) -> None:
    """Raise ConfigError if package, task, a level or a setting is unknown, or if the judge cannot judge the task."""
    if len(set(cfg.levels)) != len(cfg.levels):
        raise ConfigError(f"source {cfg.name!r}: levels = {cfg.levels!r} names a level twice")
    for level in cfg.levels or (None,):
        try:
            gym.open_dataset(cfg.task, cfg.config, level=level)
        except ConfigError as e:
            raise ConfigError(f"source {cfg.name!r}: {e}") from e
    if cfg.judge == "math" and cfg.task not in BY_MATH:
        raise ConfigError(
            f"source {cfg.name!r}: judge = 'math' calls wrong answers to {cfg.task!r} right, or right ones wrong "
            "(docs/data/reasoning_gym.md has examples, and the tasks that it can judge): set judge = 'own'"
        )


def content_of(task: str, question: str, answer: str | None) -> str:
    """Return what makes a problem, the same in other words, with other names or in another order of a few numbers.

    Where numbers and answer do not tell problems apart it is the text, in which only names may differ.
    """
    if task not in BY_TEXT:
        numbers = _NUMBER.findall(question)
        is_grid = len(numbers) > _MOST_TERMS
        return json.dumps([task, numbers if is_grid else sorted(numbers), answer])
    names: dict[str, int] = {}
    text = _NAME.sub(lambda found: f"#{names.setdefault(found[0], len(names))}", question)
    return json.dumps([task, " ".join(text.lower().split()), answer and answer.lower()])


def as_candidates(cfg: GymSource, problems: Iterable[dict[str, Any]]) -> Iterator[Candidate]:
    """Yield the problems of `problems_here` as the source has them."""
    for index, row in enumerate(problems):
        level, top, text = row["level"], row["top_level"], row["question"]
        rating = None if level is None else level / max(top, 1)
        yield Candidate(
            source=cfg.name,
            domain=Domain.MATH,
            question=f"{text}\n\n{cfg.instruction}" if cfg.instruction else text,
            reference=_reference(cfg, row["value"]),
            rating=rating,
            row=f"number {index}",
        )


def _reference(cfg: GymSource, value: dict[str, Any]) -> Reference:
    if cfg.judge == "math":
        return MathReference(answers=(value["answer"],))
    return CustomReference(judge=GYM_JUDGE.name, domain=Domain.MATH, value_json=json.dumps(value))


# ---- inside the process ----


def main() -> None:
    """Write the problems of a source to standard output, a JSON object a line, or the reason why it has too few."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some tasks print
    cfg, seed = GymSource.model_validate_json(sys.argv[1]), int(sys.argv[2])
    try:
        for row in problems_here(cfg, seed):
            output.write(f"{json.dumps(row)}\n")
        output.close()
    except (ConfigError, BrokenPipeError) as e:
        sys.exit(str(e))


def problems_here(cfg: GymSource, seed: int) -> Iterator[dict[str, Any]]:
    """Yield level, number of the highest level, question and reference value of each problem, made in this process."""
    levels: tuple[int | None, ...] = cfg.levels or (None,)
    wanted = problems_by_level(tuple(range(len(levels))), cfg.num_problems)
    seen: set[str] = set()
    drawn = {level: _drawn(cfg, seed, level, wanted[i], seen) for i, level in enumerate(levels)}
    top = gym.num_levels(cfg.task) - 1
    for level in islice(cycle(levels), cfg.num_problems):
        question, value = next(drawn[level])
        yield {"level": level, "top_level": top, "question": question, "value": value}


def _drawn(
    cfg: GymSource, seed: int, level: int | None, wanted: int, seen: set[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield question and reference value of new problems of the split; `seen` has the content of all before."""
    num_drawn = num_refused = num_found = num_dry = 0
    most = _DRAWS * wanted + 4 * _CHUNK
    while num_found < wanted:
        chunk_seed = seed_for(seed, "data/reasoning_gym", cfg.name, str(level), num_drawn) % 2**31
        dataset = gym.open_dataset(cfg.task, cfg.config, level=level, seed=chunk_seed, size=_CHUNK)
        for index in range(_CHUNK):
            if num_found == wanted:
                return
            num_drawn += 1
            num_dry += 1
            random.seed(chunk_seed + index)  # list_functions draws from the global generator
            entry = dataset[index]
            content = content_of(cfg.task, entry["question"], entry["answer"])
            if is_held_out(content) != (cfg.split == "heldout") or content in seen:
                continue
            seen.add(content)
            value = gym.reference_value(cfg.task, cfg.config, level, entry)
            if _is_usable(cfg, value):
                num_found += 1
                num_dry = 0
                yield entry["question"], value
            else:
                num_refused += 1
        if (
            num_drawn > most
            or num_refused > wanted + _CHUNK
            or _is_exhausted(num_dry, wanted - num_found, most - num_drawn)
        ):
            at = "" if level is None else f" at level {level}"
            why = f"; {num_refused} more have an answer that the judge does not accept" if num_refused else ""
            raise ConfigError(
                f"{wanted} {cfg.split} problems of {cfg.task!r}{at} wanted, but {num_drawn} draws gave only "
                f"{num_found} that differ{why}; lower num_problems, or name more levels or a wider config"
            )


def _is_exhausted(num_dry: int, num_missing: int, num_left: int) -> bool:
    """Return whether `num_dry` draws without a new problem show that the draws left will not find all missing ones.

    The share of draws that are new only falls. To find the missing ones it must be `num_missing / num_left` or more,
    and then a run as long as this has a probability of at most exp(-_DRY_FACTOR), 2e-9.
    """
    return num_dry * num_missing > _DRY_FACTOR * num_left


def _is_usable(cfg: GymSource, value: dict[str, Any]) -> bool:
    """Return whether the reference's own answer is right to its judge; problems without one are judged by rules."""
    if value["answer"] is None:
        return cfg.judge == "own"
    if cfg.judge == "math":
        return True  # tried as every math reference is, before answers are judged by it
    answer = AnswerToJudge(
        problem_id="", source=cfg.name, question="", reference=json.loads(json.dumps(value)),
        answer=value["answer"], box=value["answer"], response="",
    )  # fmt: skip
    with contextlib.suppress(Exception):  # whatever a scorer raises on its own answer, it is of no use
        return gym.score(answer) >= 1.0
    return False


if __name__ == "__main__":
    main()
