"""Processes that train: what they say gets home, how they end is told, and none is left behind."""

import logging
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from klear_core.config.train import TrainRuntime
from klear_core.errors import DataError, ResourceError
from klear_core.metrics import NullTelemetry
from klear_core.train.ranks import run_ranks

TWO = TrainRuntime(device="cpu", num_workers=2)
SCRIPT = """
import sys
from functools import partial
from pathlib import Path
from klear_core.metrics import NullTelemetry
from test_ranks import TWO, wait_for_ever
from klear_core.train.ranks import run_ranks

if __name__ == "__main__":
    run_ranks(partial(wait_for_ever, Path(sys.argv[1])), TWO, NullTelemetry())
"""


class Recorder(NullTelemetry):
    def __init__(self):
        self.heard = []

    def log(self, metrics, *, step):
        self.heard.append((step, metrics))

    def progress(self, done, total, note=""):
        self.heard.append((done, total, note))


def is_running(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def write_pid(folder, world):
    (folder / f"{world.rank}.tmp").write_text(str(os.getpid()))
    (folder / f"{world.rank}.tmp").rename(folder / f"{world.rank}.pid")


def pids(folder):
    return [int(p.read_text()) for p in folder.glob("*.pid")]


def wait_until(is_so):
    while not is_so():
        time.sleep(0.05)


def speak(world, telemetry):
    telemetry.progress(1, 2, "half")
    telemetry.log({"a/b/c": 0.5}, step=7)
    logging.getLogger("klear_core.somewhere").warning("rank %d has %s", world.rank, "news")
    return world.rank, os.getpid(), world.sum(torch.tensor([1.0, 2.0]))


@pytest.mark.slow
def test_what_rank_zero_says_and_returns_comes_out_here(caplog):
    heard = Recorder()
    rank, pid, total = run_ranks(speak, TWO, heard)
    assert rank == 0
    assert pid != os.getpid()
    assert total.tolist() == [2.0, 4.0]
    assert heard.heard == [(1, 2, "half"), (7, {"a/b/c": 0.5})]
    assert [r.getMessage() for r in caplog.records if r.name == "klear_core.somewhere"] == ["rank 0 has news"]


def test_one_worker_on_the_cpu_runs_here_and_returns_its_result():
    telemetry = NullTelemetry()
    got = run_ranks(
        lambda world, t: (world.rank, world.size, t is telemetry, os.getpid()), TrainRuntime(device="cpu"), telemetry
    )
    assert got == (0, 1, True, os.getpid())


def die_alone(folder, rank, how, world, telemetry):
    write_pid(folder, world)
    world.barrier()
    if world.rank == rank:
        how()
    if rank == 1:
        world.barrier()  # as in training: torch tells us of the loss
    time.sleep(3600)  # as over NCCL: nobody does


def exit_three():
    os._exit(3)


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "how", "told"),
    [(1, exit_three, r"rank 1 \(exit code 3\)"), (0, kill_myself, r"rank 0 \(SIGKILL\)")],
    ids=["exit", "kill"],
)
def test_a_dead_rank_is_named_and_the_others_end(tmp_path, rank, how, told):
    with pytest.raises(ResourceError, match=told):
        run_ranks(partial(die_alone, tmp_path, rank, how), TWO, NullTelemetry())
    assert len(pids(tmp_path)) == 2
    assert not any(map(is_running, pids(tmp_path)))


class OddError(Exception):
    """Cannot be copied: its constructor wants more than its message."""

    def __init__(self, message, *, code):
        super().__init__(message)
        self.code = code


def fail_on_rank_one(error, world, telemetry):
    if world.rank == 1:
        raise OddError("odd", code=1) if error is None else error
    world.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (DataError("row 3 is bad"), DataError, "row 3 is bad"),
        (RuntimeError("no memory"), RuntimeError, "no memory"),
        (None, RuntimeError, "OddError: odd"),
    ],
    ids=["ours", "torch's", "odd"],
)
def test_an_error_is_raised_here_as_itself_and_says_where_it_was(error, kind, message):
    """Also a RuntimeError, though rank 0 has one of its own a moment later: that it lost its peer."""
    with pytest.raises(kind) as raised:
        run_ranks(partial(fail_on_rank_one, error), TWO, NullTelemetry())
    assert str(raised.value) == message
    (note,) = raised.value.__notes__
    assert note.startswith("On rank 1:\nTraceback")
    assert "fail_on_rank_one" in note


def wait_for_ever(folder, world, telemetry):
    write_pid(folder, world)
    time.sleep(3600)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_process_that_started_them(tmp_path, number):
    """A Ctrl-C goes to the whole group, as a terminal sends it; only the parent has something to say about it."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    wait_until(lambda: len(pids(tmp_path)) == 2 or process.poll() is not None)
    started = pids(tmp_path)
    assert len(started) == 2
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, said = process.communicate()
    wait_until(lambda: not any(map(is_running, started)))
    assert process.returncode == -number
    assert said.decode().count("KeyboardInterrupt") == (1 if number == signal.SIGINT else 0)
