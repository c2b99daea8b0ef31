"""Load, check and call functions of the user's own. They are imported in child processes only.

python -m klear_core.verify.user_code MODULE:FUNCTION        imports it and prints what is wrong with it as JSON
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import numbers
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from klear_core.config.rl import CustomReward
from klear_core.config.user_code import module_file, source_digest
from klear_core.errors import ConfigError
from klear_core.types import JudgedAnswer, Outcome, Verdict
from klear_core.verify.work import RewardTask

IMPORT_TIMEOUT_S = 120.0
"""Seconds for the import of a user's module, which may load large libraries."""

Reward = Callable[[JudgedAnswer], float]

_LOADED: dict[str, Reward] = {}
"""Functions of this process by `module:function`; a worker imports each once."""


def compute(task: RewardTask) -> Verdict:
    """Return a reward's value as the score of a verdict, JUDGE_FAILED if there is none. Runs in a worker's main thread.

    Beyond the reward's `timeout_s` the kernel kills the process, whatever the function does.
    """
    reward = task.reward
    try:
        if reward.function not in _LOADED:
            _LOADED[reward.function] = _load_unchanged(reward, task.digest)
        # The default action ends the process; a Python handler could not interrupt code that is not Python.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, reward.timeout_s)
        try:
            value = _LOADED[reward.function](task.answer)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return Verdict(outcome=Outcome.SCORED, score=_number(value, reward))
    except Exception as e:  # noqa: BLE001  the user's code may raise anything
        return Verdict(outcome=Outcome.JUDGE_FAILED, score=0.0, detail=_described(e))


def check(function: str) -> None:
    """Import the function in a child process. ConfigError if it cannot be imported or called with one argument."""
    module_file(function.partition(":")[0])
    command = [sys.executable, "-m", "klear_core.verify.user_code", function]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"its import does not end within {IMPORT_TIMEOUT_S:g} s") from None
    lines = ended.stdout.splitlines()
    if ended.returncode != 0 or not lines:
        raise ConfigError(f"its import ended the process (exit status {ended.returncode}): {ended.stderr[-300:]}")
    problem = json.loads(lines[-1])
    if problem:
        raise ConfigError(problem)


def main() -> None:
    """Print what is wrong with the function named on the command line, as JSON; null if nothing is."""
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the module may print while it is imported
    try:
        load(sys.argv[1])
        problem = None
    except Exception as e:  # noqa: BLE001  the user's code may raise anything
        problem = str(e) if isinstance(e, ConfigError) else f"its import failed: {_described(e)}"
    report.write(f"{json.dumps(problem)}\n")
    report.close()


def load(name: str) -> Reward:
    """Import `module:function` and return the function. Raise ConfigError if it cannot take one answer."""
    module_name, _, function_name = name.partition(":")
    file = module_file(module_name)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module = importlib.import_module(module_name)
    if not module.__file__ or Path(module.__file__).resolve() != file.resolve():
        raise ConfigError(f"module {module_name!r} is {module.__file__}, and not {file}, whose content is hashed")
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{file} has no function {function_name!r}")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(f"{function_name!r} in {file} is a coroutine or generator; it must return a number")
    try:
        inspect.signature(function).bind(object())
    except TypeError as e:
        raise ConfigError(f"{function_name!r} in {file} must take one answer, and nothing else: {e}") from e
    return function  # type: ignore[no-any-return]


def _load_unchanged(reward: CustomReward, digest: str) -> Reward:
    function = load(reward.function)
    if source_digest(reward.module) != digest:
        raise ConfigError(f"the source of {reward.function} changed while the stage ran")
    return function


def _number(value: object, reward: CustomReward) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"it returned {type(value).__name__}, and not a number")
    number = float(value)
    if not math.isfinite(number) or not reward.min_value <= number <= reward.max_value:
        raise ValueError(f"it returned {number:g}, which is not between {reward.min_value:g} and {reward.max_value:g}")
    return number


def _described(error: Exception) -> str:
    """Return the error in one line, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:400] + place


if __name__ == "__main__":
    main()
