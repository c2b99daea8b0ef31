import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

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


def alive(pids: set[int]) -> list[str]:
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
        except psutil.NoSuchProcess:
            continue
    return found


def family_of(pid: int) -> set[int]:
    return {p.pid for p in psutil.Process(pid).children(recursive=True)}


@pytest.mark.parametrize(("how", "patience_s"), [(signal.SIGINT, 15), (signal.SIGKILL, 15)], ids=["ctrl-c", "kill"])
def test_nothing_of_ray_survives_its_driver(how: signal.Signals, patience_s: float):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline().strip() == "up"
    family = family_of(driver.pid)
    assert len(family) >= 5
    os.kill(driver.pid, how)
    driver.wait(30)
    deadline = time.monotonic() + patience_s
    while alive(family) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert alive(family) == []


def test_learners_and_engines_have_the_priority_of_the_run_that_started_them():
    with ray_session(SMALL):
        import ray

        assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)


def test_prefects_sigterm_handler_survives_and_ray_is_gone_after_an_error():
    def handler(signum, frame):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(KeyError):
            fail_inside(handler)
        assert signal.getsignal(signal.SIGTERM) is handler
        assert not [p for p in psutil.Process().children(recursive=True) if "raylet" in p.name()]
    finally:
        signal.signal(signal.SIGTERM, before)


def fail_inside(handler) -> None:
    with ray_session(SMALL):
        assert signal.getsignal(signal.SIGTERM) is handler
        raise KeyError


def test_a_cluster_that_cannot_be_joined_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ResourceError, match=r"RAY_ADDRESS=127\.0\.0\.1:1 cannot be joined"), ray_session(SMALL):
        pass
