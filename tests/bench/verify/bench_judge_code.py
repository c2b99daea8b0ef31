"""Programs judged a second on ten small tests: our pool, and one firejail with one interpreter for each test.

Both sides use the same firejail flags, the same interpreter and the same number of workers, and must give the same verdicts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from klear_core.config.verify import SandboxConfig, VerifyConfig, VerifyRuntime
from klear_core.types import CodeReference, StdinCase, StdinTests
from klear_core.verify import JudgePool
from klear_core.verify.sandbox.jail_command import account_for, clean_environment, jail_command

NUM_PROGRAMS, NUM_TESTS, NUM_PER_TEST_PROGRAMS = 200, 10, 16
WORKERS = 2 * (os.cpu_count() or 1)
CASES = tuple(StdinCase(input=f"{i} {i * i}\n", output=f"{i + i * i}\n") for i in range(NUM_TESTS))
REFERENCE = CodeReference(tests=StdinTests(cases=CASES))


def measure() -> list[dict[str, object]]:
    """Programs a second of both sides; two programs in three are right, every third fails its later tests."""
    programs = [_program(i) for i in range(NUM_PROGRAMS)]
    per_test_rate, per_test_scores = _per_test(programs[:NUM_PER_TEST_PROGRAMS])
    shared_rate, shared_scores = _pool(programs, programs_per_jail=SandboxConfig().programs_per_jail)
    single_rate, single_scores = _pool(programs[:60], programs_per_jail=1)
    agree = per_test_scores == shared_scores[:NUM_PER_TEST_PROGRAMS] and single_scores == shared_scores[:60]
    firejail = subprocess.run(["firejail", "--version"], capture_output=True, text=True, check=True).stdout.split()[2]
    versions = {"firejail": firejail, "python": sys.version.split()[0], "cores": os.cpu_count(), "workers": WORKERS}
    entries = [
        ("judge_code/programs_per_s/pool", shared_rate, "programs/s", "-", True),
        ("judge_code/programs_per_s/jail_each", single_rate, "programs/s", "-", True),
        ("judge_code/programs_per_s/firejail_per_test", per_test_rate, "programs/s", "-", True),
        (
            "judge_code/pool_over_per_test/ratio",
            shared_rate / per_test_rate,
            "times",
            ">= 5",
            shared_rate >= 5 * per_test_rate,
        ),
        ("judge_code/jail_each_over_per_test/ratio", single_rate / per_test_rate, "times", "-", True),
        ("judge_code/verdicts/same", float(agree), "of all", "= 1", agree),
    ]
    return [
        {"name": n, "value": v, "unit": u, "target": t, "ok": ok, "versions": versions} for n, v, u, t, ok in entries
    ]


def _program(i: int) -> str:
    wrong = "if a > 4: a += 1\n" if i % 3 == 2 else ""
    return f"# candidate {i}\na, b = map(int, input().split())\n{wrong}print(a + b)\n"


def _per_test(programs: list[str]) -> tuple[float, list[float]]:
    limits = SandboxConfig()
    account = account_for(limits)
    command = jail_command("firejail", limits, account)[:-2]  # ours without the supervisor
    environment = clean_environment(account)

    def score(program: str) -> float:
        passed = 0
        for case in CASES:
            program_command = [*command, "-c", program]
            run = subprocess.run(
                program_command, check=False, input=case.input, capture_output=True, text=True, env=environment, cwd="/"
            )
            passed += run.returncode == 0 and run.stdout.strip() == case.output.strip()
        return passed / NUM_TESTS

    started = time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as threads:
        scores = list(threads.map(score, programs))
    return len(programs) / (time.perf_counter() - started), scores


def _pool(programs: list[str], *, programs_per_jail: int) -> tuple[float, list[float]]:
    cfg = VerifyConfig(
        sandbox="firejail",
        limits=SandboxConfig(programs_per_jail=programs_per_jail),
        runtime=VerifyRuntime(code_workers=WORKERS),
    )
    with JudgePool(cfg) as pool:
        for future in [pool.submit_program("bench", REFERENCE, program) for program in programs[: 2 * WORKERS]]:
            future.result()
        started = time.perf_counter()
        futures = [pool.submit_program("bench", REFERENCE, program) for program in programs]
        scores = [future.result().score for future in futures]
        return len(programs) / (time.perf_counter() - started), scores
