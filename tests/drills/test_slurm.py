"""A run on a real Slurm, of one node in namespaces of its own, is killed or asked to stop, and is queued again to the same weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from small_runs import CHECKPOINT_EVERY, SMALL, assert_same, steps_in, work

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("slurmctld") is None or os.getuid() != 0, reason="needs root, slurm-wlm and munge"),
]
_IN_TIME_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """A controller and a node."""

    process: psutil.Process
    """A process in their namespaces."""
    workspace: Path

    def __call__(self, *command: str, is_checked: bool = True) -> str:
        """Run a command beside them and return its output."""
        enter = ["nsenter", "--target", str(self.process.pid), "--net", "--pid", "--mount", f"--wdns={ROOT}"]
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | {k: os.environ[k] for k in ("PATH", "HOME")}
        ended = subprocess.run([*enter, "--", *command], capture_output=True, text=True, check=False, env=env)
        assert not is_checked or ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def klear(self, *args: str) -> str:
        """Run a klear command in the workspace."""
        settings = (*SMALL, f"workspace.root={self.workspace}", "workspace.submit.cpus_per_node=4")
        words = [word for setting in settings for word in ("--set", setting)]
        return self(sys.executable, "-c", "from flows.cli import main; main()", *args, *words)

    def states(self) -> str:
        """The states of the jobs that Slurm knows."""
        return self("squeue", "--noheader", "--format=%T %R", "--states=all")

    @property
    def log(self) -> str:
        """What the job has printed."""
        [folder] = (self.workspace / "submissions").iterdir()
        file = folder / "log"
        return file.read_text() if file.exists() else ""

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait; a job that is queued again may start at once instead of after Slurm's two minutes."""
        deadline = time.monotonic() + _IN_TIME_S
        while not is_so():
            states = self.states()
            assert time.monotonic() < deadline, states + self.log
            assert "PENDING" in states or "RUNNING" in states or "COMPLETING" in states, states + self.log
            if "BeginTime" in states:
                self("scontrol", "update", "JobId=1", "StartTime=now", is_checked=False)
            time.sleep(0.2)

    def until_it_trains(self, kind: str) -> None:
        """Wait for a step after a checkpoint."""
        self.until(lambda: max(steps_in(work(self.workspace, kind)), default=0) > CHECKPOINT_EVERY[kind])


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    folder = tmp_path / "slurm"
    script = Path(__file__).parent / "slurm_here.sh"
    started = psutil.Popen(["bash", str(script), str(folder), "bash", "-c", "while sleep 1; do :; done"])
    try:
        deadline = time.monotonic() + 180
        while not (inside := started.children()):  # the first process of the namespaces, which collects zombies
            assert started.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        here = Slurm(process=inside[0], workspace=tmp_path / "ws")
        while "idle" not in here("sinfo", is_checked=False):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield here
    finally:
        for process in started.children():
            process.kill()  # the first process of the namespace: all others end with it
        started.wait(30)


def ended(slurm: Slurm) -> bool:
    return "✓ rl" in slurm.log and "COMPLETED" in slurm("scontrol", "show", "job", "1", is_checked=False)


def test_a_run_whose_driver_is_killed_is_queued_again_to_the_same_weights(slurm: Slurm, straight: Path):
    shown = slurm.klear("submit", "configs/smoke", "--to", "slurm", "--until", "rl", "--retry", "error,interruption")
    assert "submitted smoke-" in shown
    slurm.until_it_trains("sft")
    [driver] = (slurm.workspace / "submissions").glob("*/driver.pid")
    slurm("kill", "-KILL", driver.read_text().strip())
    slurm.until(lambda: "ended with 137 (error): queued again" in slurm.log)
    slurm.until_it_trains("rl")
    slurm("scontrol", "requeue", "1")  # as preemption does
    slurm.until(lambda: "RUNNING" in slurm.states())
    while not ended(slurm):
        slurm.until(lambda: "RUNNING" not in slurm.states() or "✓ rl" in slurm.log)
    assert_same(slurm.workspace, straight, "sft", attempts=2)
    assert_same(slurm.workspace, straight, "rl", attempts=2)
    assert json.loads(slurm("scontrol", "show", "job", "1").partition("Restarts=")[2].split()[0]) == 2


def test_a_run_that_is_asked_to_stop_saves_a_checkpoint_and_is_queued_again_to_the_same_weights(
    slurm: Slurm, straight: Path
):
    slurm.klear("submit", "configs/smoke", "--to", "slurm", "--until", "rl")
    slurm.until_it_trains("rl")
    slurm("scancel", "--signal=USR1", "--batch", "1")  # what Slurm sends before the time limit
    slurm.until(lambda: "ended with 75 (interruption): queued again" in slurm.log)
    slurm.until(lambda: "✓ rl" in slurm.log)
    assert_same(slurm.workspace, straight, "rl", attempts=2)


def test_curation_waits_while_the_controller_is_away(slurm: Slurm):
    def answer(job: str) -> str:
        code = "import sys; from klear_core.data.curation.executors import ask_queue; print(ask_queue(sys.argv[1]))"
        return slurm(sys.executable, "-c", code, job).split("\n")[-2]

    job = slurm("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600").strip()
    assert (answer(job), answer("99")) == ("queued", "ended")
    slurm("scontrol", "shutdown", "slurmctld")
    assert answer(job) == "no answer"
