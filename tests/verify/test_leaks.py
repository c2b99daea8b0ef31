# ruff: noqa: E501
"""After thousands of hostile programs nothing is left: no process, no descriptor, no file, no memory."""

import contextlib
import gc
import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hostile_programs import CALLS, SCRIPTS
from verify_builders import ADD_CALL, ADD_STDIN, fenced, problem

from klear_core.config.verify import CodeConfig, SandboxConfig, VerifyConfig, VerifyRuntime
from klear_core.verify import JudgePool, build_verifier

SLOW = {  # each of these takes its whole time limit, which says nothing about leaks that the others do not
    "fork bomb", "quiet fork bomb", "memory bomb in many processes", "endless loop", "endless sleep", "catastrophic C call", "signals ignored",
    "signals blocked", "thread that never ends", "thread bomb", "daemon that keeps the output open", "stops itself", "os.execv", "CPU in children",
    "quits in a thread", "memfd bomb", "output bomb", "error output bomb", "half a frame", "endless frame", "endless result", "huge integer",
}  # fmt: skip
FOLDERS = ("/tmp", "/dev/shm", "/var/tmp", "/run/firejail/sandbox", "/run/firejail/name", "/run/firejail/network", "/run/firejail/x11")
SHORT_AND_SMALL = VerifyConfig(
    code=CodeConfig(cpu_s=0.5, wall_factor=1.5, max_timeouts=1, memory_mb=512),
    limits=SandboxConfig(total_memory_mb=512),
    runtime=VerifyRuntime(math_workers=1, code_workers=2),
)
WARM_UP, MEMORY_SLACK_MB = 100, 24


def judge_hostile(pool: JudgePool, count: int) -> None:
    """`count` programs, every tenth of the slow kind up to two hundred of them, never more than 200 in flight."""
    quick = [(text, ADD_STDIN) for name, text in SCRIPTS.items() if name not in SLOW] + [
        (t, ADD_CALL) for n, t in CALLS.items() if n not in SLOW
    ]
    slow = [(text, ADD_STDIN) for name, text in SCRIPTS.items() if name in SLOW]
    slow_turns, quick_turns = itertools.cycle(slow), itertools.cycle(quick)
    done = 0
    while done < count:
        batch = [next(slow_turns) if done + i < 2000 and i % 10 == 9 else next(quick_turns) for i in range(min(100, count - done))]
        for future in [pool.submit(problem(reference), fenced(text)) for text, reference in batch]:
            assert future.result().score == 0.0
        done += len(batch)


def memory_mb() -> float:
    """Of this process and of the judging processes, without the jails, which come and go."""
    gc.collect()
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(p.memory_full_info().uss for p in family if p.is_running() and "python" in p.name() and "-I" not in p.cmdline()) / 2**20


def descriptors() -> int:
    """Of this process and of the judging process."""
    server = [p for p in psutil.Process().children() if "klear_core.verify.server" in p.cmdline()]
    return sum(p.num_fds() for p in [psutil.Process(), *server])


def files() -> set[str]:
    return {str(path) for folder in FOLDERS if os.access(folder, os.R_OK) and Path(folder).is_dir() for path in Path(folder).glob("*")}


def own_processes() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True)}


def check_leaks(count: int) -> None:
    processes_before = own_processes()
    descriptors_before = len(os.listdir("/proc/self/fd"))
    files_before = files()
    with watched_jails() as jails, build_verifier(SHORT_AND_SMALL) as pool:
        judge_hostile(pool, WARM_UP)
        warm = memory_mb(), descriptors()
        judge_hostile(pool, count)
        assert memory_mb() < warm[0] + MEMORY_SLACK_MB
        assert descriptors() <= warm[1] + 2
    deadline = time.monotonic() + 60
    while own_processes() - processes_before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert own_processes() - processes_before == set()
    assert len(os.listdir("/proc/self/fd")) <= descriptors_before
    assert {path for path in files() - files_before if "klear" in path or Path(path).name in jails} == set()


@contextlib.contextmanager
def watched_jails() -> Iterator[set[str]]:
    """The process ids of the firejails below us, by which firejail names its files: others may be judging on this machine."""
    seen: set[str] = set()
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.wait(0.05):
            for server in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    seen.update(str(p.pid) for p in server.children(recursive=True) if p.name() == "firejail")

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        is_done.set()
        watcher.join()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hundreds_of_hostile_programs_leave_nothing(sandbox_name: str) -> None:
    check_leaks(300)


@pytest.mark.bench
@pytest.mark.timeout(7200)
def test_ten_thousand_hostile_programs_leave_nothing(sandbox_name: str) -> None:
    check_leaks(10_000)
