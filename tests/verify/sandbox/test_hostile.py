"""Hostile programs: each is contained, none earns a point it did not compute, and the jail goes on judging afterwards."""

import dataclasses
import os
import time
from pathlib import Path

import psutil
import pytest
from hostile_programs import ASSERTED, CALLS, FILLING, HOSTILE_FILES, SCRIPTS, SPINNING, WAITING
from verify_builders import ADD_ASSERTS, ADD_CALL, ADD_STDIN, code_config, fenced, problem, stdin_reference

from klear_core.config.verify import CodeConfig, SandboxConfig, VerifyConfig, VerifyRuntime
from klear_core.types import CallTests, CodeReference, Outcome, StdinTests, Verdict
from klear_core.verify import JudgePool

EVIDENCE = ("OPEN", "READ", "KILLED", "LIMITED", "RENICED", "RAISED", "LINKED", "UNSHARED", "TRACED", "SHARED", "ROOT")
PROGRAMS: list[tuple[str, str, CodeReference]] = [
    *((f"script: {name}", text, ADD_STDIN) for name, text in SCRIPTS.items()),
    *((f"call: {name}", text, ADD_CALL) for name, text in CALLS.items()),
    *((f"assert: {name}", text, ADD_ASSERTS) for name, text in ASSERTED.items()),
]
GOOD_SCRIPT = "a, b = map(int, input().split())\nprint(a + b)"


SHORT_S = 0.2  # with WALL_FACTOR: 3 s of wall clock
ROOMY_S, WALL_FACTOR = 30.0, 5.0


@pytest.fixture(scope="module")
def verdicts(sandbox_name: str) -> dict[str, Verdict]:
    """All hostile programs at once, with good ones in between.

    Time is short only for programs that nothing but time ends: how the others end must not depend on the machine's speed.
    """
    code = CodeConfig(cpu_s=ROOMY_S, wall_factor=WALL_FACTOR, time_limit_scale=1.0, max_timeouts=1, memory_mb=256)
    limits = SandboxConfig(output_mb=1, total_memory_mb=1024)
    with JudgePool(
        VerifyConfig(code=code, limits=limits, runtime=VerifyRuntime(math_workers=1, code_workers=4))
    ) as pool:
        futures = {}
        for i, (name, text, reference) in enumerate(PROGRAMS):
            futures[name] = pool.submit(problem(with_limits(name, reference)), fenced(text))
            if i % 3 == 0:
                futures[f"good {i}"] = pool.submit(problem(ADD_STDIN), fenced(GOOD_SCRIPT))
        return {name: future.result() for name, future in futures.items()}


def with_limits(name: str, reference: CodeReference) -> CodeReference:
    bare_name = name.partition(": ")[2]
    if bare_name in FILLING and isinstance(reference.tests, StdinTests | CallTests):
        # One test: filling the memory again shows nothing new, and takes the most time of all.
        return dataclasses.replace(
            reference, tests=dataclasses.replace(reference.tests, cases=reference.tests.cases[:1])
        )
    return dataclasses.replace(reference, time_limit_s=SHORT_S) if bare_name in SPINNING | WAITING else reference


@pytest.mark.slow
def test_no_hostile_program_earns_a_point(verdicts: dict[str, Verdict]) -> None:
    earned = {
        name: v
        for name, v in verdicts.items()
        if not name.startswith("good") and (v.outcome is not Outcome.SCORED or v.score > 0)
    }
    assert earned == {}


@pytest.mark.slow
def test_no_hostile_program_reached_what_it_must_not(verdicts: dict[str, Verdict]) -> None:
    reached = {name: v.detail for name, v in verdicts.items() if any(word in v.detail for word in EVIDENCE)}
    assert reached == {}


@pytest.mark.slow
def test_good_programs_in_between_pass(verdicts: dict[str, Verdict]) -> None:
    spoilt = {name: v for name, v in verdicts.items() if name.startswith("good") and v.score != 1.0}
    assert spoilt == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("script: endless loop", "CPU time"),
        ("script: endless sleep", "wall clock"),
        ("script: output bomb", "MB of output"),
        ("script: memory bomb", "MemoryError"),
        ("script: memory bomb in many processes", "too much memory in all"),
        ("script: ctypes crash", "signal 11"),
        ("script: abort", "killed by signal"),
        ("script: thread that never ends", "wall clock"),
        ("call: huge result", "MB of output"),
        ("call: cyclic result", "RecursionError"),
    ],
)
def test_the_detail_says_how_a_program_ended(verdicts: dict[str, Verdict], name: str, words: str) -> None:
    assert words in verdicts[name].detail


def test_huge_input_is_read_whole(code_pool: JudgePool) -> None:
    reference = stdin_reference(("7\n" * 4_000_000, "28000000\n"))
    assert code_pool.judge(problem(reference), fenced("import sys\nprint(sum(map(int, sys.stdin)))")).score == 1.0


def test_input_that_nobody_reads_harms_nothing(code_pool: JudgePool) -> None:
    assert code_pool.judge(problem(stdin_reference(("x" * (20 << 20), "1\n"))), fenced("print(1)")).score == 1.0


def test_nothing_is_left_of_a_pool_that_judged_hostile_programs(sandbox_name: str) -> None:
    before = _own_descendants()
    files = _files_in_shared_folders()
    descriptors = len(os.listdir("/proc/self/fd"))
    with JudgePool(code_config(cpu_s=0.5, max_timeouts=1)) as pool:
        chosen = ["daemon by double fork", "fork bomb", "signals ignored", "disk bomb", "thread bomb"]
        for future in [pool.submit(problem(ADD_STDIN), fenced(SCRIPTS[name])) for name in chosen]:
            future.result()
    deadline = time.monotonic() + 60
    while _own_descendants() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _own_descendants() - before == set()
    assert _files_in_shared_folders() - files == set()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def _own_descendants() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True)}


def _files_in_shared_folders() -> set[str]:
    return {str(p) for folder in ("/tmp", "/dev/shm", "/var/tmp") for p in Path(folder).glob(HOSTILE_FILES + "*")}
