"""What Ray prints on its own is in the log, and not between our lines."""

from __future__ import annotations

import logging
import threading

import pytest

from flows.run import RunConsole
from tasks.resources import RAYS_THREAD, ray_messages_logged

DIED = "\x1b[33m(raylet)\x1b[0m A worker died or was killed while executing a task by an unexpected system error."
MEMORY = "\x1b[33m(raylet)\x1b[0m 2 Workers (tasks / actors) killed due to memory pressure (OOM)"


def say(*lines: str) -> None:
    """Print from a thread with the name of Ray's."""

    def work() -> None:
        for line in lines:
            print(line)

    thread = threading.Thread(target=work, name=RAYS_THREAD)
    thread.start()
    thread.join()


def test_lost_workers_go_to_the_log_and_lack_of_memory_is_a_warning(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO), ray_messages_logged():
        say(DIED, "", MEMORY)
        print("ours")
    assert capsys.readouterr().out == "ours\n"
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "Ray: (raylet) A worker died or was killed while executing a task by an unexpected system error."),
        ("WARNING", "Ray: (raylet) 2 Workers (tasks / actors) killed due to memory pressure (OOM)"),
    ]


def test_of_a_dead_raylet_one_line_is_shown_and_the_tail_of_its_log_is_only_logged(caplog: pytest.LogCaptureFixture):
    dead = "(raylet) Raylet is terminated. Termination is unexpected. Possible reasons include: (1) SIGKILL by the user"
    tail = ("[state-dump] DebugString() time ms: 0", "[2026-11-24 I 2 2] (raylet) worker_pool.cc:811: Job 01 started.")
    with caplog.at_level(logging.INFO), ray_messages_logged():
        say(dead, *tail)
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO", "INFO"]


def test_a_warning_is_shown_by_a_console_that_writes_to_the_same_terminal(capsys: pytest.CaptureFixture[str]):
    console = RunConsole()
    with ray_messages_logged():
        say(MEMORY)
    console.close()
    assert (
        capsys.readouterr().out == "  ! Ray: (raylet) 2 Workers (tasks / actors) killed due to memory pressure (OOM)\n"
    )


def test_afterwards_all_is_printed_as_before(capsys: pytest.CaptureFixture[str]):
    with ray_messages_logged():
        pass
    say(DIED)
    assert capsys.readouterr().out == f"{DIED}\n"


@pytest.mark.slow
def test_the_installed_ray_says_so_from_that_thread(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    import os
    import time

    from tasks.resources import Needs, ray_session

    with caplog.at_level(logging.INFO), ray_session(Needs(num_cpus=1, object_store_bytes=100 << 20)):
        import ray

        @ray.remote(max_restarts=0)
        class Doomed:
            def die(self) -> None:
                os._exit(1)

        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(Doomed.remote().die.remote())
        deadline = time.monotonic() + 120
        while not any(r.getMessage().startswith("Ray: (raylet)") for r in caplog.records):
            assert time.monotonic() < deadline, capfd.readouterr().out
            time.sleep(0.2)
    assert "(raylet)" not in capfd.readouterr().out
    assert all(r.levelno < logging.WARNING for r in caplog.records if r.getMessage().startswith("Ray: "))
