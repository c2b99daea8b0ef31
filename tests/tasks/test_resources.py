import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from processes import alive, title

from klear_core.errors import ResourceError
from tasks.resources import Needs, ray_session

pytestmark = pytest.mark.slow

SMALL = Needs(num_cpus=3, object_store_bytes=100 << 20)

DRIVER = """
import time
from tasks.resources import Needs, ray_session

with ray_session(Needs(num_cpus=3, object_store_bytes=100 << 20)):
    import ray

    @ray.remote
    class Actor:
        def hello(self): return 1

    actors = [Actor.remote() for _ in range(2)]
    ray.get([a.hello.remote() for a in actors])
    print("up", flush=True)
    time.sleep(600)
"""


def family_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def wait_until_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that are still there after a minute."""
    deadline = time.monotonic() + 60
    while (left := alive(processes)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_nothing_of_ray_survives_its_driver(how: signal.Signals):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert driver.stdout is not None
    assert driver.stdout.readline().strip() == "up"
    family = family_of(driver.pid)
    assert len(family) >= 5
    os.kill(driver.pid, how)
    driver.wait(60)
    assert wait_until_gone(family) == []


ASKED = """
import signal, time
from tasks.resources import Needs, ray_session

asked = []
signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
with ray_session(Needs(num_cpus=1, object_store_bytes=100 << 20)):
    import ray

    print("up", flush=True)
    while not asked:
        time.sleep(0.01)
    for _ in range(20):  # the rest of a training step
        ray.get(ray.remote(lambda: bytes(1 << 20)).remote())
        time.sleep(0.1)
raise SystemExit(42)
"""


def test_a_signal_to_all_processes_lets_the_run_end_by_itself():
    driver = subprocess.Popen(
        [sys.executable, "-c", ASKED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert driver.stdout is not None
    assert driver.stdout.readline().strip() == "up"
    family = family_of(driver.pid)
    for process in [driver, *family]:
        process.send_signal(signal.SIGTERM)
    assert driver.wait(60) == 42
    assert wait_until_gone(family) == []


def test_learners_and_engines_have_the_priority_of_the_run_that_started_them():
    with ray_session(SMALL):
        import ray

        assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)


def test_logs_of_a_ray_that_was_started_here_stay_after_an_error_alone():
    before = logs_of_ray()
    with pytest.raises(KeyError), ray_session(SMALL):
        raise KeyError
    with_kept = logs_of_ray()
    (kept,) = with_kept - before
    with ray_session(SMALL):
        assert len(logs_of_ray() - with_kept) == 1
    assert logs_of_ray() == with_kept
    shutil.rmtree(kept)


def logs_of_ray() -> set[Path]:
    return set(Path(tempfile.gettempdir(), "ray").glob(f"session_*_{os.getpid()}"))


def test_prefects_sigterm_handler_survives_and_ray_is_gone_after_an_error():
    def handler(signum, frame):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(KeyError):
            fail_inside(handler)
        assert signal.getsignal(signal.SIGTERM) is handler
        assert is_caught(signal.SIGTERM)  # by the system's account: Ray's shutdown is no Python code
        assert wait_until_gone([p for p in family_of(os.getpid()) if "raylet" in title(p)]) == []
    finally:
        signal.signal(signal.SIGTERM, before)


def is_caught(number: signal.Signals) -> bool:
    caught = re.search(r"^SigCgt:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert caught is not None
    return bool(int(caught[1], 16) >> (number - 1) & 1)


def fail_inside(handler) -> None:
    with ray_session(SMALL):
        assert signal.getsignal(signal.SIGTERM) is handler
        raise KeyError


def test_a_cluster_that_cannot_be_joined_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ResourceError, match=r"RAY_ADDRESS: 127\.0\.0\.1:1 does not answer"), ray_session(SMALL):
        pass


def test_a_ray_that_does_not_start_in_its_own_time_is_an_error_that_may_pass(monkeypatch: pytest.MonkeyPatch):
    """On a busy machine. Ray's wait of 30 s cannot be set, and its error has no class of its own."""
    import ray

    def time_out(**_settings: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", time_out)
    message = r"cannot be started on this machine: The current node timed out"
    with pytest.raises(ResourceError, match=message) as caught, ray_session(SMALL):
        pass
    assert not caught.value.is_permanent
