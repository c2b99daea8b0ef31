"""Make the data sets of reasoning-gym's tasks, and score answers by their own scorers; the one door to that package.

Some scorers evaluate the model's text as Python or with sympy, which would run any program that it holds. Here they can
read literals, and formulas of numbers, names and sympy's functions; nothing else reaches the interpreter.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import json
import re
from collections.abc import Mapping
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from klear_core.config.data import REASONING_GYM
from klear_core.errors import ConfigError
from klear_core.types import AnswerToJudge

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

Entry = dict[str, Any]
"""A problem as the package has it: `question`, `answer` (None if it has none) and `metadata`."""


# ---- data sets ----


def tasks() -> list[str]:
    """Return the names of all tasks. Raise ConfigError as `open_dataset` does."""
    # `composite` mixes other tasks; here, several sources do.
    return sorted(set(_library().factory.DATASETS) - {"composite"})


def open_dataset(
    task: str, config: Mapping[str, Any], *, level: int | None = None, seed: int = 0, size: int = 1
) -> ProceduralDataset:
    """Return a task's data set, at a level of its curriculum or with its default configuration.

    Raise ConfigError if the package is missing or of another version, or if it has no such task, level or setting.
    """
    if task not in tasks():
        raise ConfigError(f"reasoning-gym {REASONING_GYM} has no task {task!r}; it has {', '.join(tasks())}")
    dataset_class, config_class = _library().factory.DATASETS[task]
    known = {field.name for field in dataclasses.fields(config_class)} - {"seed", "size"}
    unknown = set(config) - known
    if unknown:
        raise ConfigError(f"config of task {task!r}: no setting {min(unknown)!r}; it has {', '.join(sorted(known))}")
    try:
        if level is None:
            settings = config_class(seed=seed, size=size, **config)
        else:
            settings = dataclasses.replace(_at_level(task, level, seed=seed, size=size), **config)
        return dataset_class(settings)
    except (AssertionError, TypeError, ValueError) as e:
        at = "" if level is None else f" at level {level}"
        raise ConfigError(f"task {task!r}{at} refuses its configuration {dict(config)}: {e}") from e


def num_levels(task: str) -> int:
    """Return the number of levels of a task's curriculum; 0 if it has none."""
    if task not in _library().factory.CURRICULA:
        return 0
    curriculum = _library().factory.create_curriculum(task)
    return max(len(attribute.levels) for attribute in curriculum.attributes.values())


def _at_level(task: str, level: int, *, seed: int, size: int) -> Any:
    top = num_levels(task) - 1
    if level > top:
        has = f"levels 0 to {top}" if top >= 0 else "no levels"
        raise ConfigError(f"levels: task {task!r} has {has}, and not {level}")
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode

    curriculum = _library().factory.create_curriculum(task)
    curriculum.set_global_level(level)
    # By default a level contains all lower ones, which would make it no measure of difficulty.
    highest = DefaultCurriculumContext(mode=RangeAttributeMode.UPPER_BOUND)
    return curriculum.generate_configuration({"seed": seed, "size": size}, context=highest)


@functools.cache
def _library() -> Any:
    """Return the package, once its evaluations of text are replaced by safe ones."""
    try:
        found = version("reasoning-gym")
    except PackageNotFoundError:
        raise ConfigError(
            "problems of kind = \"reasoning_gym\" need the package reasoning-gym: pip install 'klear[gym]'"
        ) from None
    if found != REASONING_GYM:
        raise ConfigError(
            f"reasoning-gym {found} is installed, and other versions than {REASONING_GYM} may make and judge other "
            "problems: pip install 'klear[gym]'"
        )
    library = importlib.import_module("reasoning_gym")
    _make_safe()
    return library


# ---- entries ----
# Write a problem as JSON, so that its scorer gets back what the generator made: tuples are no lists to it.


def reference_value(task: str, config: Mapping[str, Any], level: int | None, entry: Entry) -> dict[str, Any]:
    """Return the value of a reference that `score` judges by, as JSON holds it. Raise TypeError if JSON cannot."""
    return {
        "version": REASONING_GYM,
        "task": task,
        "level": level,
        "config": dict(config),
        "answer": entry["answer"],
        "entry": _encoded(entry),
    }


def _encoded(value: Any) -> Any:
    """Return a value as JSON holds it; what JSON does not have is a list whose first item is its type."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case dict():
            return ["dict", *([_encoded(k), _encoded(v)] for k, v in value.items())]
        case list() | tuple():
            return [type(value).__name__, *map(_encoded, value)]
        case Fraction():
            return ["Fraction", *value.as_integer_ratio()]
        case set() | frozenset():
            return ["set", *map(_encoded, sorted(value, key=repr))]
        case _:
            raise TypeError(f"a {type(value).__name__} in the problem cannot be written as JSON")


def _decoded(value: Any) -> Any:
    match value:
        case ["dict", *pairs]:
            return {_decoded(k): _decoded(v) for k, v in pairs}
        case ["list", *items]:
            return [_decoded(item) for item in items]
        case ["tuple", *items]:
            return tuple(_decoded(item) for item in items)
        case ["Fraction", int(top), int(bottom)]:
            return Fraction(top, bottom)
        case ["set", *items]:
            return {_decoded(item) for item in items}
        case _:
            return value


# ---- scores ----


_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NOT_A_NUMBER = re.compile(r"(?<![a-z])nan(?:j|(?![a-z]))", re.IGNORECASE)
"""Text that Python reads as a number with which no comparison holds: some scorers then pay in full."""
_TEXT_COMMAND = re.compile(r"\\(?:text|texttt|mathrm|mathtt)\{([^{}]*)\}")


def score(answer: AnswerToJudge) -> float:
    """Return the score by the task's own scorer of what is in the last box, else in the last `<answer>` tag.

    Without either it is 0: several scorers pay for a right answer that is only mentioned.
    """
    value = answer.reference
    if value["version"] != REASONING_GYM:
        raise ConfigError(f"the problem is of reasoning-gym {value['version']}, and {REASONING_GYM} is used")
    text = answer_text(answer)
    if text is None or (_NOT_A_NUMBER.search(text) and not _NOT_A_NUMBER.search(str(value["answer"]))):
        return 0.0
    scorer = _scorer(value["task"], json.dumps(value["config"]), value["level"])
    return float(scorer.score_answer(text, _decoded(value["entry"])))


def answer_text(answer: AnswerToJudge) -> str | None:
    r"""Return the text to score, without spaces or a `\text{}` around it; None without an answer."""
    if answer.box is not None:
        text = answer.box.strip()
        command = _TEXT_COMMAND.fullmatch(text)
        return command[1].strip() if command else text
    tags = _ANSWER_TAG.findall(answer.answer)
    return tags[-1].strip() if tags else None


@functools.lru_cache(maxsize=64)
def _scorer(task: str, config_json: str, level: int | None) -> ProceduralDataset:
    return open_dataset(task, json.loads(config_json), level=level)


# ---- safe evaluation ----


_LITERALS = ("string_insertion", "spiral_matrix", "binary_matrix")
"""Modules of `reasoning_gym.algorithmic` that read the model's list by `eval`; `games.n_queens` is another."""
_FORMULAS = {
    "games.countdown": "parse_expr",
    "games.puzzle24": "parse_expr",
    "algebra.simple_integration": "sympy",
    "algebra.intermediate_integration": "sympy",
    "algebra.polynomial_multiplication": "sp",
}
"""Modules that read the model's formula by sympy's `parse_expr`, which calls `eval`, and their name for it or sympy."""
_MORE_FUNCTIONS = frozenset(("sqrt", "cbrt", "root", "Rational"))
_FORMULA_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load, ast.Name, ast.Call, ast.Constant,
)  # fmt: skip


def _make_safe() -> None:
    for name in (*(f"algorithmic.{name}" for name in _LITERALS), "games.n_queens"):
        vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = ast.literal_eval
    for name, library in _FORMULAS.items():
        module = vars(importlib.import_module(f"reasoning_gym.{name}"))
        known = module[library]
        is_function = library == "parse_expr"
        module[library] = read_formula if is_function else SimpleNamespace(**vars(known) | {"parse_expr": read_formula})


def read_formula(text: str, *args: Any, **settings: Any) -> Any:
    """Return sympy's reading of a formula. Raise ValueError if it has more than numbers, names and functions."""
    from sympy.parsing.sympy_parser import parse_expr

    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        _refuse_code(node)
    return parse_expr(text, *args, **settings)


def _refuse_code(node: ast.AST) -> None:
    import sympy

    if not isinstance(node, _FORMULA_NODES):
        raise ValueError(f"a formula has no {type(node).__name__}")
    # A function of sympy would evaluate a text that it gets.
    if isinstance(node, ast.Constant) and not isinstance(node.value, int | float | complex):
        raise ValueError(f"a formula has no constant {node.value!r}")
    if isinstance(node, ast.Name) and node.id.startswith("_"):
        raise ValueError(f"a formula has no name {node.id!r}")
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        is_function = name in _MORE_FUNCTIONS or isinstance(getattr(sympy, name, None), sympy.FunctionClass)
        if node.keywords or not is_function:
            raise ValueError(f"a formula has no function {name!r}")
