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
from hostile_programs import CALLS, HOSTILE_FILES, SCRIPTS, SPINNING, WAITING
from verify_builders import ADD_CALL, ADD_STDIN, fenced, problem

from klear_core.config.verify import CodeConfig, SandboxConfig, VerifyConfig, VerifyRuntime
from klear_core.types import CodeReference
from klear_core.verify import JudgePool

RARE = (
    SPINNING
    | WAITING
    | {"fork bomb", "memory bomb in many processes", "endless result", "output bomb", "error output bomb"}
)  # they take seconds each
FOLDERS = (
    "/tmp",
    "/dev/shm",
    "/var/tmp",
    "/run/firejail/sandbox",
    "/run/firejail/name",
    "/run/firejail/network",
    "/run/firejail/x11",
)
SHORT_AND_SMALL = VerifyConfig(
    code=CodeConfig(cpu_s=0.5, wall_factor=1.5, max_timeouts=1, memory_mb=512),
    limits=SandboxConfig(total_memory_mb=512),
    runtime=VerifyRuntime(math_workers=1, code_workers=2),
)
BATCH, GROWTH_LIMIT_MB = 50, 4.0


def hostile_turns() -> Iterator[tuple[str, CodeReference]]:
    """Programs without end, every tenth of the rare kind up to two hundred of them."""
    programs = [(name, text, ADD_STDIN) for name, text in SCRIPTS.items()] + [
        (name, text, ADD_CALL) for name, text in CALLS.items()
    ]
    rare, common = (
        itertools.cycle([(t, r) for name, t, r in programs if (name in RARE) == is_rare]) for is_rare in (True, False)
    )
    for i in itertools.count():
        yield next(rare) if i % 10 == 9 and i < 2000 else next(common)


def judge_batch(pool: JudgePool, turns: Iterator[tuple[str, CodeReference]]) -> None:
    for future in [pool.submit(problem(reference), fenced(text)) for text, reference in itertools.islice(turns, BATCH)]:
        assert future.result().score == 0.0


def memory_mb() -> float:
    """Anonymous memory of this process, the judging process and its largest worker: what a leak makes grow.

    Pages that a fork shares count in each process, so that it is no growth when one of them writes to its own (a collector that first
    visits what was there before the fork copies megabytes). Jails come and go and are left out.
    """
    gc.collect()
    server = judging_process()
    return (
        anonymous_mb(psutil.Process())
        + anonymous_mb(server)
        + max(anonymous_mb(worker) for worker in server.children())
    )


def anonymous_mb(process: psutil.Process) -> float:
    """0 for a process that has just ended."""
    try:
        memory = process.memory_info()
    except psutil.NoSuchProcess:
        return 0.0
    return (memory.rss - memory.shared) / 2**20


def judging_process() -> psutil.Process:
    return next(p for p in psutil.Process().children() if "klear_core.verify.server" in p.cmdline())


def growth_mb(samples: list[float]) -> float:
    """How much higher the second half's lowest sample is than the first half's: peaks and sawteeth count for nothing."""
    half = len(samples) // 2
    return min(samples[half:]) - min(samples[:half])


def descriptors() -> int:
    """Of this process and of the judging process."""
    return psutil.Process().num_fds() + judging_process().num_fds()


def files() -> set[str]:
    return {
        str(path)
        for folder in FOLDERS
        if os.access(folder, os.R_OK) and Path(folder).is_dir()
        for path in Path(folder).glob("*")
    }


def own_processes() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True)}


def check_leaks(count: int) -> None:
    processes_before = own_processes()
    descriptors_before = len(os.listdir("/proc/self/fd"))
    files_before = files()
    with watched_jails() as jails, JudgePool(SHORT_AND_SMALL) as pool:
        turns = hostile_turns()
        judge_batch(pool, turns)
        open_when_warm, samples = descriptors(), []
        for _ in range(count // BATCH):
            judge_batch(pool, turns)
            samples.append(memory_mb())
        print(f"memory in MB after each {BATCH} programs:", " ".join(f"{mb:.1f}" for mb in samples))
        assert growth_mb(samples) < GROWTH_LIMIT_MB
        assert descriptors() <= open_when_warm + 2
    deadline = time.monotonic() + 60
    while own_processes() - processes_before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert own_processes() - processes_before == set()
    assert len(os.listdir("/proc/self/fd")) <= descriptors_before
    left = {Path(path).name for path in files() - files_before}
    dead = {
        name for name in left & jails if not psutil.pid_exists(int(name))
    }  # ours are gone: one that lives took its number later
    assert dead | {name for name in left if name.startswith(HOSTILE_FILES)} == set()


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
def test_hundreds_of_hostile_programs_leave_nothing(sandbox_name: str) -> None:
    check_leaks(200)  # and a batch before: every program, some many times


@pytest.mark.bench
@pytest.mark.timeout(7200)
def test_ten_thousand_hostile_programs_leave_nothing(sandbox_name: str) -> None:
    check_leaks(10_000)
