"""Load, check and call functions of the user's own. They are imported in child processes only.

python -m klear_core.verify.user_code judge|reward SETTINGS    imports it and prints what is wrong with it as JSON;
a reward is also called on a trivial answer
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib
import inspect
import json
import math
import numbers
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from klear_core.config.rewards import CustomReward
from klear_core.config.verify import CustomJudge, UserFunction, module_file, source_digest
from klear_core.errors import ConfigError
from klear_core.stopping import IS_LINUX
from klear_core.types import AnswerToJudge, JudgedAnswer, Outcome, Verdict
from klear_core.verify.client import Fault, UserTask

IMPORT_TIMEOUT_S = 120.0
"""Seconds for the import of a user's module, which may load large libraries."""

OUT_OF_MEMORY = 77
"""Exit status of a worker whose function needed more memory than it may have."""

TRIAL = JudgedAnswer(
    problem_id="trial",
    source="trial",
    question="What is 7906 + 1?",
    answers=("7907",),
    text="<think>\nOne more than 7906 is 7907.\n</think>\n\\boxed{7907}",
    score=1.0,
    num_tokens=12,
    finish_reason="stop",
)
"""The trivial answer that a reward must give a value before a run."""
_CALLED = "its call on a trivial answer"

Function = Callable[[Any], float]


_LOADED: dict[str, Function] = {}
"""Functions of this process by `module:function`; a worker imports each once."""


def compute(task: UserTask) -> Verdict | Fault:
    """Return a function's value as the score of a verdict, or a Fault of kind `broke_off` if it raises or returns none.

    Runs in a worker's main thread. Beyond the function's `timeout_s` the kernel kills the process, whatever it does.
    A process that runs out of memory exits, because the objects that filled it may still be alive at the next call.
    """
    cfg = task.function
    try:
        if cfg.function not in _LOADED:
            _LOADED[cfg.function] = _load_unchanged(cfg, task.digest)
        return Verdict(outcome=Outcome.SCORED, score=_value(cfg, task.answer))
    except BaseException as e:  # noqa: BLE001  the user's code may raise anything: FunctionTimedOut is no Exception
        if _is_out_of_memory(e):
            os._exit(OUT_OF_MEMORY)
        return Fault(kind="broke_off", detail=_described(e))


def _value(cfg: CustomReward | CustomJudge, answer: JudgedAnswer | AnswerToJudge) -> float:
    with ended_after(cfg.timeout_s):
        value = _LOADED[cfg.function](answer)
    return _number(value, cfg)


def limit_memory(memory_mb: int) -> None:
    """Limit what this process may allocate from now on; each process that it starts has the same limit.

    Only private writable memory counts: libraries such as torch map gigabytes that take no memory. Linux alone counts
    it; elsewhere there is no limit.
    """
    if not IS_LINUX:
        return
    status = Path("/proc/self/status").read_text()
    (allocated,) = (line for line in status.splitlines() if line.startswith("VmData:"))
    limit = (int(allocated.split()[1]) << 10) + (memory_mb << 20)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def memory_message(cfg: UserFunction) -> str:
    """Say that a function exceeded its limit of memory."""
    return f"{cfg.function} needs more memory than its memory_mb = {cfg.memory_mb}"


def check_judges(judges: Iterable[CustomJudge]) -> None:
    """Run `check` for each judge; its ConfigError names the judge."""
    for judge in judges:
        try:
            check(judge)
        except ConfigError as e:
            raise ConfigError(f"{judge.key}: {e}") from e


def check(cfg: UserFunction) -> None:
    """Import the function in a child process, and call a reward there on a trivial answer.

    ConfigError if it cannot be imported, called with one argument, or give that answer a value.
    """
    module_file(cfg.module)
    kind = "reward" if isinstance(cfg, CustomReward) else "judge"
    command = [sys.executable, "-m", "klear_core.verify.user_code", kind, cfg.model_dump_json()]
    limit_s = IMPORT_TIMEOUT_S + (longest_s(cfg.timeout_s) if kind == "reward" else 0)
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"its import does not end within {IMPORT_TIMEOUT_S:g} s") from None
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    what = _CALLED if lines == [None] and kind == "reward" else "its import"
    if ended.returncode == OUT_OF_MEMORY:
        raise ConfigError(f"{what} failed: {memory_message(cfg)}")
    if -ended.returncode in (RAN_OUT, RAN_OUT_OF_CPU, signal.SIGKILL) and what == _CALLED:
        raise ConfigError(f"{what} does not end within timeout_s = {cfg.timeout_s:g}")
    if ended.returncode != 0 or not lines:
        raise ConfigError(f"{what} ended the process (exit status {ended.returncode}): {ended.stderr[-300:]}")
    problem = next(filter(None, lines), None)
    if problem:
        raise ConfigError(problem)


def main() -> None:
    """Print what is wrong with the function named on the command line, as JSON; null if nothing is.

    Of a reward there are two lines: of its import, and of its call.
    """
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the module may print while it is imported
    kind, settings = sys.argv[1:]
    cfg = (CustomReward if kind == "reward" else UserFunction).model_validate_json(settings, extra="ignore")
    limit_memory(cfg.memory_mb)
    problem = _attempt("its import", lambda: _LOADED.update({cfg.function: load(cfg.function)}))
    print(json.dumps(problem), file=report, flush=True)
    if isinstance(cfg, CustomReward) and problem is None:
        problem = _attempt(_CALLED, lambda: _value(cfg, TRIAL))
        print(json.dumps(problem), file=report, flush=True)
    report.close()


def _attempt(what: str, action: Callable[[], object]) -> str | None:
    """Return why an action of the user's code failed; None if it did not."""
    try:
        action()
    except (Exception, SystemExit) as e:  # noqa: BLE001  the user's code may raise anything
        if _is_out_of_memory(e):
            os._exit(OUT_OF_MEMORY)
        return str(e) if isinstance(e, ConfigError) else f"{what} failed: {_described(e)}"
    return None


def load(name: str) -> Function:
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


def _load_unchanged(cfg: UserFunction, digest: str) -> Function:
    function = load(cfg.function)
    if source_digest(cfg.module) != digest:
        raise ConfigError(f"the source of {cfg.function} changed while the stage ran")
    return function


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed; torch says so only in the text of a RuntimeError."""
    return isinstance(error, MemoryError) or os.strerror(errno.ENOMEM).lower() in str(error).lower()


def _number(value: object, cfg: CustomReward | CustomJudge) -> float:
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        value = value.item()  # numpy's bool and arrays of one number
    if not isinstance(value, numbers.Real):
        raise TypeError(f"it returned {type(value).__name__}, and not a number")
    number = float(value)
    if not math.isfinite(number) or not cfg.min_value <= number <= cfg.max_value:
        raise ValueError(f"it returned {number:g}, which is not between {cfg.min_value:g} and {cfg.max_value:g}")
    return number


def _described(error: BaseException) -> str:
    """Return the error in one line, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:400] + place


# ---- deadline ----
# End this process at a deadline that Python code in it cannot move, by timers of the kernel that send no SIGALRM.


RAN_OUT = signal.SIGRTMAX if sys.platform == "linux" else signal.SIGALRM
"""Signal that ends a process at its deadline. Libraries with timeouts use SIGALRM; nothing uses SIGRTMAX."""

RAN_OUT_OF_CPU = signal.SIGXCPU
"""Signal that ends a process whose main thread computed for nearly all of the time that it had."""

_CPU_SHARE = 0.9
"""Share of a deadline that a busy main thread may compute; below 1, so that this limit comes before the deadline."""

_MAX_STARVED = 4
"""Most deadlines that are added to a deadline for the time in which the process waited for a core."""

_GRACE_S = 1.0
"""Seconds from the last RAN_OUT to SIGKILL, which ends a process that blocks or handles every signal that it can."""

_CLOCK_MONOTONIC = 1
_CLOCK_THREAD_CPUTIME = 3


class _SigEvent(ctypes.Structure):
    """C's `struct sigevent`, which has 64 bytes."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal_number", ctypes.c_int),
        ("notify", ctypes.c_int),  # 0 is SIGEV_SIGNAL: send the signal to the process
        ("rest", ctypes.c_char * 48),
    )


class _TimerSpec(ctypes.Structure):
    """C's `struct itimerspec`."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Have the kernel end this process if the block takes longer, whatever the block does with its signals.

    A block that computes all the time is ended by RAN_OUT_OF_CPU, one that waits by RAN_OUT. Time spent waiting for a
    core does not count, up to a bound: a busy machine must not decide which of the two it is. Main thread only. An
    alarm that the block leaves running is cancelled: it would end a later block. Other systems than Linux have only the
    alarm, which the block could cancel.
    """
    signal.signal(RAN_OUT, signal.SIG_DFL)
    if sys.platform != "linux":
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return
    libc, cpu, gentle, hard = _timers()
    ends_at, starved_before = time.monotonic() + seconds, _starved_s()

    def on_deadline(_signum: int, _frame: FrameType | None) -> None:
        starved_s = min(_starved_s() - starved_before, _MAX_STARVED * seconds)
        left_s = ends_at + starved_s - time.monotonic()
        if left_s > 0:
            _set(libc, gentle, left_s)
            return
        signal.signal(RAN_OUT, signal.SIG_DFL)
        os.kill(os.getpid(), RAN_OUT)

    signal.signal(RAN_OUT, on_deadline)
    signal.signal(RAN_OUT_OF_CPU, signal.SIG_DFL)
    _set(libc, cpu, seconds * _CPU_SHARE)
    _set(libc, gentle, seconds)
    _set(libc, hard, longest_s(seconds))
    try:
        yield
    finally:
        _set(libc, cpu, 0)
        _set(libc, gentle, 0)
        _set(libc, hard, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def longest_s(seconds: float) -> float:
    """Return the wall clock after which a block of this deadline has ended in any case."""
    return seconds * (1 + _MAX_STARVED) + _GRACE_S


def _starved_s() -> float:
    """Return the seconds in which this thread was ready to run and had no core; 0 if the kernel does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


@functools.cache
def _timers() -> tuple[ctypes.CDLL, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]:
    """Return the C library and this process's timers. A forked child has no timers: call this only in a worker."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "timer_create"):
        libc = ctypes.CDLL("librt.so.1", use_errno=True)  # before glibc 2.34
    cpu = _created(libc, RAN_OUT_OF_CPU, _CLOCK_THREAD_CPUTIME)
    return libc, cpu, _created(libc, RAN_OUT), _created(libc, signal.SIGKILL)


def _created(libc: ctypes.CDLL, signal_number: int, clock: int = _CLOCK_MONOTONIC) -> ctypes.c_void_p:
    timer = ctypes.c_void_p()
    event = _SigEvent(signal_number=signal_number)
    if libc.timer_create(clock, ctypes.byref(event), ctypes.byref(timer)) != 0:
        raise OSError(ctypes.get_errno(), f"timer_create: {os.strerror(ctypes.get_errno())}")
    return timer


def _set(libc: ctypes.CDLL, timer: ctypes.c_void_p, seconds: float) -> None:
    """Start a timer; 0 stops it."""
    whole = int(seconds)
    spec = _TimerSpec(value_s=whole, value_ns=int((seconds - whole) * 1e9))
    if libc.timer_settime(timer, 0, ctypes.byref(spec), None) != 0:
        raise OSError(ctypes.get_errno(), f"timer_settime: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
