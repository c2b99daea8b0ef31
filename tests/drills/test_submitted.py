"""A run on a real Slurm, of two nodes in namespaces, or on Ray is killed or asked to stop, and goes on to the same weights."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from small_runs import CHECKPOINT_EVERY, IN_TIME_S, SMALL, assert_same, small_run, steps_in, work

from klear_core.config.load import validate
from klear_core.pipeline.submission.request import Submission, for_cluster
from klear_core.pipeline.submission.shell import slurm as prepare

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(shutil.which("slurmctld") is None or os.getuid() != 0, reason="needs root, slurm-wlm and munge"),
]
_AGAIN_S = 10.0
_LOOKS = 50
"""Looks at a job that has ended; one that is queued again is, for a moment, shown as such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """A controller and two nodes, n1 and n2."""

    process: psutil.Process
    """A process in the controller's namespaces."""
    folder: Path
    workspace: Path

    def __call__(self, *command: str, is_checked: bool = True, **environment: str) -> str:
        """Run a command beside the controller and return its output."""
        enter = ["nsenter", "--target", str(self.process.pid), "--net", "--pid", "--mount", f"--wdns={ROOT}"]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        folders = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": folders, "PATH": path, "HOME": os.environ["HOME"]} | environment
        ended = subprocess.run([*enter, "--", *command], capture_output=True, text=True, check=False, env=env)
        assert not is_checked or ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def on(self, node: str, *command: str, is_checked: bool = True, **environment: str) -> str:
        """Run a command on a node and return its output."""
        pid = (self.folder / "pids" / node).read_text().strip()
        enter = ["nsenter", "--target", pid, "--net", "--pid", "--mount", "--uts", f"--wdns={ROOT}", "--"]
        return self(*enter, *command, is_checked=is_checked, **environment)

    def submit(
        self, *args: str, to: str = "slurm", until: str = "rl", is_checked: bool = True, **environment: str
    ) -> str:
        """Submit the small run, up to RL, and return what is shown; of a refusal also the error."""
        settings = (*SMALL, f"workspace.root={self.workspace}", "workspace.submit.cpus_per_node=4")
        words = [word for setting in settings for word in ("--set", setting)]
        command = [sys.executable, "-c", "from flows.cli import main; main()", "submit", "configs/smoke", "--to", to]
        shell = () if is_checked else ("sh", "-c", 'exec "$@" 2>&1', "sh")
        options = ("--until", until, *words, *args)
        return self.on("n1", *shell, *command, *options, is_checked=is_checked, **environment)

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
        """Wait; a job that is queued again may start after three seconds instead of Slurm's two minutes.

        In the second in which it ended, nodes refuse it: "Job credential revoked".
        """
        deadline, num_ended, moved_s = time.monotonic() + IN_TIME_S, 0, 0.0
        while not is_so():
            states = self.states()
            assert time.monotonic() < deadline, states + self.log
            has_ended = re.search("PENDING|RUNNING|COMPLETING", states) is None
            num_ended = num_ended + 1 if has_ended else 0
            assert num_ended < _LOOKS, states + self.log
            if "BeginTime" in states and time.monotonic() - moved_s > _AGAIN_S:
                self("scontrol", "update", "JobId=1", "StartTime=now+3", is_checked=False)
                moved_s = time.monotonic()
            time.sleep(0.2)

    def until_it_trains(self, kind: str) -> None:
        """Wait for a step after a checkpoint."""
        self.until(lambda: max(steps_in(work(self.workspace, kind)), default=0) > CHECKPOINT_EVERY[kind])


@pytest.fixture
def slurm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    folder = tmp_path / "slurm"
    script = Path(__file__).parent / "slurm_here.sh"
    env = os.environ | {"ACCOUNTING": getattr(request, "param", "")}
    started = psutil.Popen(["bash", str(script), str(folder), "2", "bash", "-c", "while sleep 1; do :; done"], env=env)
    try:
        deadline = time.monotonic() + 180
        while not (inside := started.children()):  # the first process of the namespaces, which collects zombies
            assert started.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        here = Slurm(process=inside[0], folder=folder, workspace=tmp_path / "ws")
        while "idle n[1-2]" not in here("sinfo", "--noheader", "--format=%T %N", is_checked=False):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield here
    finally:
        for process in started.children():
            process.kill()  # the first process of the namespace: all others end with it
        started.wait(30)


def ended(slurm: Slurm) -> bool:
    return "✓ rl" in slurm.log and "COMPLETED" in slurm("scontrol", "show", "job", "1", is_checked=False)


def test_a_run_on_two_nodes_that_is_killed_and_preempted_is_queued_again_to_the_same_weights(
    slurm: Slurm, tmp_path: Path
):
    two = ("--set", "sft.runtime.num_workers=2", "--set", "rl.runtime.num_workers=2")
    (tmp_path / "straight").mkdir()
    straight = small_run(tmp_path / "straight", "--until", "rl", *two)
    assert straight.process.wait(IN_TIME_S) == 0, straight.output
    nodes = ("--set", "workspace.submit.nodes=2")
    # on a busy machine Ray, which waits 30 s for itself, may not start
    many = ("--set", "workspace.submit.max_retries=20")
    assert "submitted smoke-" in slurm.submit(*two, *nodes, *many, "--retry", "error,interruption", "--deadline", "1d")
    slurm.until_it_trains("sft")
    assert slurm.on("n2", "pgrep", "-fc", "ray::")
    [driver] = (slurm.workspace / "submissions").glob("*/driver.pid")
    slurm.on("n1", "kill", "-KILL", driver.read_text().strip())
    slurm.until(lambda: "ended with 137 (error): queued again" in slurm.log)
    slurm.until_it_trains("rl")
    before = restarts(slurm)
    slurm("sbatch", "--partition=first", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    slurm.until(lambda: restarts(slurm) > before)  # preempted
    slurm.until(lambda: ended(slurm))
    assert_same(slurm.workspace, tmp_path / "straight" / "ws", "sft", attempts=2)
    assert_same(slurm.workspace, tmp_path / "straight" / "ws", "rl", attempts=2)


def restarts(slurm: Slurm) -> int:
    return int(slurm("scontrol", "show", "job", "1").partition("Restarts=")[2].split()[0])


def test_a_run_that_is_asked_to_stop_saves_a_checkpoint_and_is_queued_again_to_the_same_weights(
    slurm: Slurm, straight: Path
):
    slurm.submit()
    slurm.until_it_trains("rl")
    slurm("scancel", "--signal=USR1", "--batch", "1")  # what Slurm sends before the time limit
    slurm.until(lambda: "ended with 75 (interruption): queued again" in slurm.log)
    slurm.until(lambda: "✓ rl" in slurm.log)
    assert_same(slurm.workspace, straight, "rl", attempts=2)


def test_a_run_whose_gpus_are_idle_is_ended_by_idle_kill_and_not_queued_again(slurm: Slurm):
    """Slurm's nodes have a GPU each by its settings alone, and a stand-in for nvidia-smi says how busy it is."""
    bin_ = slurm.folder / "bin"
    bin_.mkdir()
    (bin_ / "nvidia-smi").write_text(f"#!/bin/sh\ncat {slurm.folder}/busy\n")
    (bin_ / "nvidia-smi").chmod(0o755)
    (slurm.folder / "busy").write_text("97\n")
    limit = ("--idle-kill", "10%/1m", "--retry", "error,interruption", "--queue", "first")
    path = f"{bin_}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    long = ("--set", "workspace.submit.gpus_per_node=1", "--set", "rl.num_steps=1000")
    slurm.submit(*limit, *long, PATH=path)
    slurm.until_it_trains("sft")
    assert "Partition=first" in (job := slurm("scontrol", "show", "job", "1"))
    assert re.search("gres.gpu=1|gpu:1", job)
    (slurm.folder / "busy").write_text("3\n")
    slurm.until(lambda: "its GPUs computed less than 10% in 1m: idle_kill" in slurm.log)
    while "RUNNING" in (job := slurm("scontrol", "show", "job", "1")) or "COMPLETING" in job:
        time.sleep(0.5)
    assert "queued again" not in slurm.log
    assert "Restarts=0" in job
    assert "ExitCode=3:0" in job


@pytest.mark.skipif(find_spec("aiohttp_cors") is None, reason="needs klear[cluster]: Ray takes jobs by its dashboard")
def test_a_ray_job_whose_driver_is_killed_runs_again_to_the_same_weights(slurm: Slurm, straight: Path):
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "only-here", "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:8265"}
    deadline = time.monotonic() + IN_TIME_S
    head = ("ray", "start", "--head", "--num-cpus=4", "--disable-usage-stats")
    while "Ray runtime started" not in (said := slurm.on("n1", *head, is_checked=False, **token)):
        assert time.monotonic() < deadline, said  # on a busy machine it may miss the 30 s that it gives itself
        slurm.on("n1", "ray", "stop", "--force", is_checked=False)
    while "[]" not in slurm.on("n1", "ray", "job", "list", is_checked=False, **token):
        assert time.monotonic() < deadline
        time.sleep(1)
    name = slurm.submit("--retry", "error", to="ray", **token).partition("\nsubmitted ")[2].partition(";")[0]
    driver = "klear run ./profile"

    def status() -> str:
        return slurm.on("n1", "ray", "job", "list", is_checked=False, **token)

    while max(steps_in(work(slurm.workspace, "rl")), default=0) <= CHECKPOINT_EVERY["rl"]:
        assert time.monotonic() < deadline, status()
        assert "FAILED" not in (now := status()), slurm.on("n1", "ray", "job", "logs", name, **token) + now
        time.sleep(0.2)
    slurm.on("n1", "pkill", "-KILL", "-f", driver)
    deadline = time.monotonic() + IN_TIME_S
    while "SUCCEEDED" not in (now := status()):
        assert time.monotonic() < deadline, now
        assert "FAILED" not in now, slurm.on("n1", "ray", "job", "logs", name, **token)
        time.sleep(2)
    assert_same(slurm.workspace, straight, "rl", attempts=2)


STAND_INS = {
    # Ray's launcher runs what follows -- on the first node.
    "ray": """[ "$1" = symmetric-run ] || exit 0
[ "$SLURM_PROCID" = 0 ] || { while [ ! -f $NOTES/over ]; do sleep 0.2; done; exit; }
rm -f $NOTES/over; while [ "$1" != -- ]; do shift; done; shift
echo "$(hostname) of $SLURM_NNODES" >>$NOTES/starts
"$@"; status=$?; touch $NOTES/over; exit $status""",
    "klear": 'trap "exit 75" USR1; while sleep 0.2; do :; done',
}


def stand_in_job(slurm: Slurm, *, time_limit: str | None = None, **submit: object) -> None:
    """Submit a job of two nodes as `klear submit` writes it, with stand-ins for Ray and Klear."""
    notes, bin_ = slurm.folder / "notes", slurm.folder / "bin"
    target = {"setup": f"export NOTES={notes} PATH={bin_}:$PATH", "time_limit": time_limit}
    settings = {"nodes": 2, "slurm": target} | submit
    config = validate({"workspace": {"root": str(slurm.workspace), "submit": settings}}, origin="test")
    config = for_cluster(config, "slurm", datetime.now(UTC))
    submission = Submission(name="run", folder=slurm.workspace / "submissions" / "run", config=config)
    prepared = prepare(submission, workdir=slurm.folder)
    notes.mkdir()
    for folder, texts in ((submission.folder, prepared.files), (bin_, STAND_INS)):
        for path, text in texts.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
            file.chmod(0o755)
    slurm(*prepared.commands[0])
    slurm.until(lambda: starts(slurm) == 1)


def starts(slurm: Slurm) -> int:
    """How often the run was started."""
    file = slurm.folder / "notes" / "starts"
    return file.read_text().count(" of 2\n") if file.exists() else 0


def test_a_job_of_two_nodes_is_queued_again_after_a_killed_driver_preemption_and_its_time_limit(slurm: Slurm):
    stand_in_job(slurm, retry=["error", "interruption"], time_limit="6m")
    slurm.on("n1", "pkill", "-KILL", "-f", "bin/klear run")
    slurm.until(lambda: starts(slurm) == 2)
    assert "ended with 137 (error): queued again" in slurm.log
    slurm("sbatch", "--partition=first", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    slurm.until(lambda: starts(slurm) == 3)
    slurm.until(lambda: starts(slurm) == 4)  # Slurm sends USR1 five minutes before the end, after one minute
    assert "ended with 75 (interruption): queued again" in slurm.log
    assert "Restarts=3" in slurm("scontrol", "show", "job", "1")


def test_a_job_is_queued_again_for_as_long_as_it_was_asked_to_be(slurm: Slurm):
    stand_in_job(slurm, retry=["error"], retry_for="2m", max_retries=9)
    began = time.monotonic()
    slurm.on("n1", "pkill", "-KILL", "-f", "bin/klear run")
    slurm.until(lambda: starts(slurm) == 2)
    assert "ended with 137 (error): queued again" in slurm.log
    time.sleep(max(0.0, 125 - (time.monotonic() - began)))
    slurm.on("n1", "pkill", "-KILL", "-f", "bin/klear run")
    while "RUNNING" in (now := slurm("scontrol", "show", "job", "1")) or "COMPLETING" in now:
        time.sleep(0.5)
    assert re.search(r"retried for 1[2-9]\d s, no longer", slurm.log)
    assert "Restarts=1" in now
    assert starts(slurm) == 2


def test_slurm_ends_a_job_at_its_deadline_and_it_is_not_queued_again(slurm: Slurm):
    stand_in_job(slurm, deadline="7m", time_limit="1d", retry=["error", "interruption"])
    while "RUNNING" in (now := slurm("scontrol", "show", "job", "1")):
        time.sleep(1)
    assert "its deadline is near" in slurm.log
    assert "Restarts=0" in now


with_accounting = pytest.mark.skipif(shutil.which("slurmdbd") is None, reason="needs slurmdbd and mariadb-server")
ACCOUNT = ("--set", "workspace.submit.slurm.sbatch={account='us'}")


@with_accounting
@pytest.mark.parametrize("slurm", ["enforce"], indirect=True)
def test_the_qos_of_a_job_is_the_priority_that_was_asked_for(slurm: Slurm):
    slurm("sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    two = (*ACCOUNT, "--set", "workspace.submit.nodes=2")
    for priority in ("small", "high"):
        nodes = two if priority == "high" else ACCOUNT
        assert "PENDING (" in slurm.submit(*nodes, "--priority", priority, "--queue", "all")
    jobs = [job for job in slurm("scontrol", "--oneliner", "show", "job").splitlines() if "JobName=smoke" in job]
    for job, qos in zip(jobs, ("small", "high"), strict=True):
        assert {"Account=us", f"QOS={qos}", "Partition=all"} <= set(job.split())
    small, high = (int(re.findall(r" Priority=(\d+)", job)[0]) for job in jobs)
    assert high > small  # so it starts first, though it came second
    assert "nothing was submitted: sbatch: allocation failure: Invalid qos specification" in (
        slurm.submit(*ACCOUNT, "--priority", "none", is_checked=False)
    )
    assert "nothing was submitted: sbatch: error: QOSMaxNodePerJobLimit" in (
        slurm.submit(*two, "--priority", "small", is_checked=False)
    )
    assert slurm.states().count("PENDING") == len(jobs)


@with_accounting
@pytest.mark.parametrize("slurm", ["", "kept"], indirect=True)
def test_a_qos_that_slurm_would_drop_is_refused(slurm: Slurm):
    assert "without that QOS" in slurm.submit("--priority", "none", is_checked=False)
    assert set(re.findall("[A-Z]{6,}", slurm.states())) <= {"CANCELLED", "COMPLETING"}


def test_a_job_waits_for_nodes_that_are_missing_if_that_is_asked_for(slurm: Slurm):
    slurm("scontrol", "update", "NodeName=n1,n2", "State=DRAIN", "Reason=drill")
    assert "nothing was submitted" in slurm.submit(until="benchmarks", is_checked=False)
    begun = time.monotonic()
    for wait in ("5m", "1m"):
        shown = slurm.submit("--retry", "no-capacity", "--for", wait, until="benchmarks")
        assert f"waits for nodes, for {wait} at most" in shown
        assert "PENDING (ReqNodeNotAvail" in shown
    too_many = ("--set", "workspace.submit.nodes=3", "--retry", "no-capacity")
    refused = slurm.submit(*too_many, until="benchmarks", is_checked=False)
    assert re.search(r"for ever \(Partition(Config|NodeLimit)\)", refused), refused  # the second once Slurm has tried
    time.sleep(max(0.0, 70 - (time.monotonic() - begun)))
    slurm("scontrol", "update", "NodeName=n1,n2", "State=RESUME")
    [first, late, *_] = sorted((slurm.workspace / "submissions").iterdir())
    deadline = time.monotonic() + IN_TIME_S
    while not (first / "log").exists() or "✓ benchmarks" not in (first / "log").read_text():
        assert time.monotonic() < deadline, slurm.states()
        time.sleep(0.5)
    assert "waited for nodes for longer than 1m" in (late / "log").read_text()


def test_curation_waits_while_the_controller_is_away(slurm: Slurm):
    def answer(job: str) -> str:
        code = "import sys; from klear_core.data.curation.executors import ask_queue; print(ask_queue(sys.argv[1]))"
        return slurm(sys.executable, "-c", code, job).split("\n")[-2]

    job = slurm("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600").strip()
    assert (answer(job), answer("99")) == ("queued", "ended")
    slurm("scontrol", "shutdown", "slurmctld")
    assert answer(job) == "no answer"
