"""The batch script for Slurm, run by bash with stand-ins for Slurm, Ray and Klear."""

import os
import signal
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from klear_core.config.load import load_profile, validate
from klear_core.config.pipeline import PipelineConfig
from klear_core.errors import ConfigError
from klear_core.pipeline.submission.request import PROFILE, Submission, name_of
from klear_core.pipeline.submission.shell import ray, slurm

NAME = "klear-1128-053012"
STAND_INS = {
    # Ray's launcher runs what follows --
    "srun": '[[ "$*" = *" ray stop "* ]] && exit; while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
    "klear": 'echo "klear $*" >>"$CALLS"; trap "exit 75" USR1; eval "$KLEAR"',
    # Slurm queues no job again that was submitted with --no-requeue, whoever asks
    "scontrol": 'echo "scontrol $*" >>"$CALLS"; ! grep -q "#SBATCH --no-requeue" "$SCRIPT" && eval "${SCONTROL:-true}"',
    "sleep": ":",  # between two questions to the controller
}


def submission(folder: Path, **submit: object) -> Submission:
    settings = {"workspace": {"root": str(folder), "submit": submit}}
    return Submission(name=NAME, folder=folder / NAME, config=validate(settings, origin="test"))


def options_of(**submit: object) -> set[str]:
    script = slurm(submission(Path("/shared"), **submit), workdir=Path("/shared/klear")).files["job.sh"]
    return {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}


class Job:
    """A submission as Slurm would run it."""

    def __init__(self, tmp_path: Path, **submit: object) -> None:
        self.folder, self.calls, bin_ = tmp_path / NAME, tmp_path / "calls", tmp_path / "bin"
        submit.setdefault("slurm", {"setup": f"export PATH={bin_}:/usr/bin:/bin; head=10.0.0.1"})
        prepared = slurm(submission(tmp_path, **submit), workdir=tmp_path)
        for folder, texts in ((self.folder, prepared.files), (bin_, STAND_INS)):
            for path, text in texts.items():
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
                file.chmod(0o755)

    def start(self, klear: str, scontrol: str = "true", restarts: int = 0) -> "subprocess.Popen[bytes]":
        script = str(self.folder / "job.sh")
        env = {**os.environ, "SLURM_JOB_ID": "7", "CALLS": str(self.calls), "KLEAR": klear, "SCONTROL": scontrol}
        env |= {"SCRIPT": script, "SLURM_RESTART_COUNT": str(restarts)}
        return subprocess.Popen(["bash", script], env=env, stdout=subprocess.DEVNULL)

    def requeued(self) -> int:
        """How often Slurm was asked to queue the job again."""
        return self.calls.read_text().count("scontrol requeue 7")


@pytest.mark.parametrize(
    ("retry", "ends", "is_requeued"),
    [
        (["interruption"], "exit 0", False),
        (["interruption"], "exit 75", True),
        (["interruption"], "trap - USR1; kill -USR1 $$", True),  # the warning comes before the run listens
        (["error"], "exit 75", False),
        (["interruption"], "exit 1", False),
        (["error"], "exit 1", True),
        (["error"], "kill -KILL $$", True),
        (["error", "interruption"], "exit 2", False),  # the settings are wrong
        (["error", "interruption"], "exit 130", False),  # cancelled
        (["interruption"], 'kill -KILL "$PPID" $$', True),  # node lost: nobody wrote a status
    ],
)
def test_a_run_is_queued_again_after_the_events_of_retry(tmp_path, retry, ends, is_requeued):
    job = Job(tmp_path, retry=retry)
    status = job.start(ends).wait(60)
    assert job.requeued() == is_requeued
    assert (status == 0) == (ends == "exit 0" or is_requeued)


def test_the_warning_before_the_time_limit_reaches_the_run_which_saves_and_is_queued_again(tmp_path):
    job = Job(tmp_path)
    started = tmp_path / "started"
    process = job.start(f"touch {started}; while :; do read -rt 0.05 <> <(:); done")
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 0
    assert (job.folder / "status").read_text() == "75\n"
    assert job.requeued() == 1


def test_the_warning_before_the_run_has_begun_ends_the_step_and_the_job_is_queued_again(tmp_path):
    job = Job(tmp_path, slurm={"setup": f"export PATH={tmp_path / 'bin'}:/usr/bin:/bin; head=10.0.0.1"})
    (tmp_path / "bin" / "srun").write_text(
        '#!/bin/bash\n[[ "$*" = *" ray stop "* ]] && exit; touch "$CALLS"; while :; do read -rt 0.05 <> <(:); done\n'
    )
    process = job.start("exit 0")
    while not job.calls.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 0
    assert job.requeued() == 1


def test_a_controller_that_does_not_answer_once_is_asked_again(tmp_path):
    job = Job(tmp_path)
    asked = tmp_path / "asked"
    assert job.start("exit 75", scontrol=f"[ -f {asked} ] || {{ touch {asked}; exit 1; }}").wait(60) == 0
    assert job.requeued() == 2


def test_errors_are_counted_and_interruptions_are_not(tmp_path):
    job = Job(tmp_path, retry=["error", "interruption"], max_retries=1)
    ends = ["exit 1", "exit 75", "exit 75", "exit 1"]
    assert [job.start(end).wait(60) for end in ends] == [0, 0, 0, 1]


def test_a_run_is_not_queued_again_after_the_time_for_retries(tmp_path):
    job = Job(tmp_path, retry_for="1h")
    (job.folder / "begun").write_text(str(int(time.time()) - 3601))
    assert job.start("exit 75").wait(60) == 1
    assert job.requeued() == 0


def test_a_job_that_gets_its_nodes_later_than_was_asked_for_does_not_run(tmp_path):
    job = Job(tmp_path, retry=["no-capacity"], retry_for="2h")
    submitted = time.time() - 2 * 3600 - 5
    os.utime(job.folder / "job.sh", (submitted, submitted))
    assert job.start("exit 0").wait(60) == 3
    (job.folder / "begun").touch()  # it has run, and is queued again
    assert job.start("exit 0").wait(60) == 0
    assert job.calls.read_text().count("klear run") == 1


def test_the_run_has_the_profile_of_the_submission_and_the_address_of_the_head(tmp_path):
    job = Job(tmp_path)
    assert job.start('echo "$RAY_ADDRESS $RAY_AUTH_MODE" >>"$CALLS"').wait(60) == 0
    assert job.calls.read_text().splitlines() == [f"klear run {job.folder}/profile", "10.0.0.1:6379 token"]


def test_the_options_of_sbatch_are_those_of_the_settings():
    asked = options_of(
        nodes=4, gpus_per_node=8, queue="gpu", priority="high", deadline="2h", slurm={"time_limit": "90m", "sbatch": {"account": "us"}}
    )  # fmt: skip
    assert asked >= {"nodes=4", "gpus-per-node=8", "partition=gpu", "qos=high", "deadline=now+7200", "time=90"}
    assert asked >= {"account=us", "ntasks-per-node=1", "exclusive", "requeue", "signal=B:USR1@300"}


def test_values_of_options_are_quoted_as_sbatch_reads_them_and_flags_have_none():
    """Debian's Slurm 22.05 has read these."""
    job = slurm(
        submission(Path("""/a b'c %j "d"""), slurm={"sbatch": {"comment": r"my \ run", "hold": ""}}), workdir=Path("/w")
    )
    lines = [line for line in job.files["job.sh"].splitlines() if line.startswith("#SBATCH")]
    assert f"""#SBATCH --output="/a b'c %%j \\"d/{NAME}/log\"""" in lines
    assert r'#SBATCH --comment="my \\ run"' in lines
    assert "#SBATCH --hold" in lines
    with pytest.raises(ConfigError, match="one line"):
        options_of(queue="gpu\ntouch /tmp/x")
    with pytest.raises(ConfigError, match="sbatch"):
        options_of(slurm={"sbatch": {"account=us\nrm": "x"}})


@pytest.mark.parametrize(
    ("deadline", "time_limit", "minutes"), [("5d", "24h", 60), ("5d", "30m", 15), ("7m", None, 3), ("1d", "3d", 60)]
)
def test_slurm_may_shorten_an_allocation_to_end_by_the_deadline(deadline, time_limit, minutes):
    """Else it removes a job whose whole time limit does not fit, at once or when the job is queued again."""
    assert f"time-min={minutes}" in options_of(deadline=deadline, slurm={"time_limit": time_limit})


def test_a_run_that_is_not_retried_after_interruptions_ends_if_slurm_has_queued_it_again(tmp_path):
    """Slurm does so after a preemption or a lost node, if a job may be queued again at all, as after an error."""
    assert "no-requeue" in options_of(retry=[])
    job = Job(tmp_path, retry=["error"])
    assert job.start("exit 1").wait(60) == 0
    assert job.start("exit 1", restarts=1).wait(60) == 0  # after the error
    assert job.start("exit 0", restarts=3).wait(60) == 1  # two errors, and a preemption
    assert job.calls.read_text().count("klear run") == 2
    (tmp_path / "other").mkdir()
    interruptible = Job(tmp_path / "other", retry=["error", "interruption"])
    assert interruptible.start("exit 0", restarts=3).wait(60) == 0


def test_the_profile_of_a_submission_is_the_run(tmp_path):
    config = load_profile(Path("configs/smoke"), ["workspace.submit.idle_kill=10%/1h", "hardware.mfu=0.5"])
    files = ray(Submission(name=NAME, folder=tmp_path, config=config)).files
    (tmp_path / "run.toml").write_text(files[PROFILE])
    assert load_profile(tmp_path) == config


def test_a_job_is_not_queued_again_shortly_before_its_deadline(tmp_path):
    soon = datetime.now(UTC) + timedelta(minutes=9)
    job = Job(tmp_path, ends_at=soon.isoformat())
    assert job.start("exit 75").wait(60) == 3
    assert job.requeued() == 0


@pytest.mark.parametrize(
    ("submit", "ends", "status", "num_runs"),
    [
        ({"retry": ["error"]}, ["exit 1", "kill -KILL $$", "exit 0"], 0, 3),
        ({"retry": ["error"], "max_retries": 1}, ["exit 1", "exit 1", "exit 0"], 1, 2),
        ({"retry": []}, ["exit 1", "exit 0"], 1, 1),
        ({"retry": ["error"]}, ["exit 2", "exit 0"], 2, 1),  # the settings are wrong
        ({"retry": ["error"]}, ["exit 3", "exit 0"], 3, 1),  # its deadline
    ],
)
def test_a_ray_job_runs_its_profile_again_after_errors(tmp_path, submit, ends, status, num_runs):
    prepared = ray(submission(tmp_path, **submit))
    assert prepared.commands[0][-3:] == ("--", "bash", "run.sh")
    (tmp_path / "run.sh").write_text(prepared.files["run.sh"])
    runs = "\n".join(f"[ $n = {i} ] && {end}" for i, end in enumerate(ends, 1))
    stand_ins = {"klear": f'echo "klear $*" >>calls; n=$(wc -l <calls)\n{runs}', "sleep": ":"}
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ended = subprocess.run(["bash", "run.sh"], cwd=tmp_path, env=env, capture_output=True, check=False)
    assert ended.returncode == status
    assert (tmp_path / "calls").read_text() == "klear run ./profile\n" * num_runs


def test_a_name_is_a_label_of_dns_that_fits_a_raycronjob():
    config = PipelineConfig(name="8b_with_a_very_long_name_of_a_profile_indeed")
    name = name_of(config, datetime(2026, 11, 28, 5, 30, 12, tzinfo=UTC))
    assert name == "klear-8b-with-a-very-lon-1128-053012"
    assert len(name) == 36
