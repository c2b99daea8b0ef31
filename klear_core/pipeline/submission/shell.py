"""Write the batch script of Slurm, and the command that submits a job to a Ray cluster."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from klear_core.config.submit import SubmitConfig, in_seconds
from klear_core.errors import ConfigError
from klear_core.pipeline.submission.request import PROFILE, Prepared, Submission, profile_files
from klear_core.stopping import LIMIT_STATUS, REQUEUE_STATUS

_WARN_S = 300
"""Seconds before the end of an allocation at which the run is asked to save a checkpoint."""
_FINAL = f"0 | 2 | {LIMIT_STATUS} | 130 | 143"
"""Exit statuses after which a run is not started again: done, wrong settings, a limit of its own, cancelled."""
_MAY_BE_REPLACED = {"mincpus", "mem", "gpus-per-node"}
"""Options that `slurm.sbatch` may give in a form of the site's own, such as `gpus-per-node = "h100:8"`."""

# ---- Slurm ----


def slurm(submission: Submission, *, workdir: Path) -> Prepared:
    """Return the batch script, and the script of the driver that it starts on the first node."""
    files = {"job.sh": _job(submission, workdir), "driver.sh": _driver(submission), **profile_files(submission)}
    name, script = submission.name, str(submission.folder / "job.sh")
    return Prepared(
        files=files,
        commands=(("sbatch", "--parsable", script),),
        watch=(
            f"squeue --name {name}",
            f"tail -f {shlex.quote(str(submission.folder / 'log'))}",
            f"scancel --name {name}",
        ),
    )


def _options(submission: Submission, workdir: Path) -> list[str]:
    submit, time_limit = submission.submit, submission.submit.slurm.time_limit
    options: dict[str, str | int | None] = {
        "job-name": submission.name,
        "nodes": str(submit.nodes),
        "ntasks-per-node": "1",
        "mincpus": submit.cpus_per_node,
        "mem": "0" if submit.memory_gb_per_node is None else f"{submit.memory_gb_per_node}G",
        "gpus-per-node": submit.gpus_per_node,
        "partition": submit.queue,
        "qos": submit.priority,
        "time": time_limit and str(max(1, in_seconds(time_limit) // 60)),  # in whole minutes
        "deadline": submit.deadline and f"now+{in_seconds(submit.deadline)}",
        "time-min": submit.deadline and _shortest(submit),
        "signal": f"B:USR1@{_WARN_S}",
        "open-mode": "append",
        "chdir": str(workdir),
        "output": str(submission.folder / "log").replace("%", "%%"),
    }
    flags = ["exclusive", "requeue" if {"error", "interruption"}.intersection(submit.retry) else "no-requeue"]
    own = {*options, *flags, "requeue", "no-requeue", "array"} - _MAY_BE_REPLACED
    if taken := own & submit.slurm.sbatch.keys():
        raise ConfigError(f"workspace.submit.slurm.sbatch: {', '.join(sorted(taken))} is set by klear submit itself")
    options |= submit.slurm.sbatch
    flags += [name for name, value in submit.slurm.sbatch.items() if not value]
    return [*flags, *(f"{name}={_quoted(value)}" for name, value in options.items() if value)]


def _quoted(value: str | int) -> str:
    """Return the value of an option as sbatch reads it in a script: a backslash escapes in quotes of both kinds."""
    text = str(value)
    if "\n" in text:
        raise ConfigError(f"an option of sbatch has one line: {text!r}")
    if re.fullmatch(r"[\w@%+=:,./-]+", text, re.ASCII):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _shortest(submit: SubmitConfig) -> str:
    """Return minutes to which Slurm may shorten an allocation, so that it ends by the deadline.

    Without that, Slurm removes a job whose whole time limit no longer fits.
    """
    durations = [duration for duration in (submit.deadline, submit.slurm.time_limit) if duration]
    return str(min(60, *(max(1, in_seconds(duration) // 120) for duration in durations)))


def _job(submission: Submission, workdir: Path) -> str:
    submit, folder = submission.submit, shlex.quote(str(submission.folder))
    options = "\n".join(f"#SBATCH --{option}" for option in _options(submission, workdir))
    setup = submit.slurm.setup or f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"
    return f"""#!/bin/bash
{options}
# Starts Ray on all nodes and the run on the first one; see docs/operations.md.
folder={folder}
head=$(hostname -I); head=${{head%% *}}; head=${{head:-127.0.0.1}}   # setup may choose another address of this node
{setup}
{_unless_interrupted(submit)}unset RAY_ADDRESS
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$folder/token   # without it, whoever reaches a port runs code
export RAY_worker_niceness=0 RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600

{_unless_late(submit)}[ -f "$folder/begun" ] || date +%s >"$folder/begun"
rm -f "$folder/driver.pid" "$folder/status"

# The time is almost over, or the job is preempted: the run saves a checkpoint and exits with {REQUEUE_STATUS}. One that
# does not listen yet ends with 138, and where it has not begun the step ends.
trap 'kill -USR1 "$(cat "$folder/driver.pid")" || kill $step' USR1
# The nodes are this job's alone: a Ray that runs here is left over from a job that Slurm has ended.
srun --cpu-bind=none ray stop --force >/dev/null 2>&1
srun --cpu-bind=none ray symmetric-run --address "$head:6379" --min-nodes {submit.nodes} \\
  {_ray_options(submit)}-- bash "$folder/driver.sh" "$head:6379" &
step=$!
while kill -0 $step 2>/dev/null; do wait $step; done   # the trap ends a wait
status=$(cat "$folder/status" 2>/dev/null || echo lost)

case $status in
  {_FINAL}) exit "$status" ;;   # done; wrong settings; deadline or idle_kill; cancelled
  {REQUEUE_STATUS} | 138 | lost) reason=interruption ;;
  *) reason=error ;;
esac
case " {" ".join(submit.retry)} " in *" $reason "*) ;; *) echo "ended with $status"; exit 1 ;; esac
if [ "$status" != {REQUEUE_STATUS} ]; then
  echo "$status" >>"$folder/failures"
  if [ "$(wc -l <"$folder/failures")" -gt {submit.max_retries} ]; then echo "failed too often"; exit 1; fi
fi
age=$(($(date +%s) - $(cat "$folder/begun")))
if [ $age -gt {in_seconds(submit.retry_for)} ]; then echo "retried for $age s, no longer"; exit 1; fi
{_unless_over(submit)}echo "ended with $status ($reason): queued again" | tee -a "$folder/requeued"
# A controller that does not answer is asked again.
for _ in {{1..30}}; do scontrol requeue "$SLURM_JOB_ID" && exit 0; sleep 10; done
exit 1
"""


def _unless_interrupted(submit: SubmitConfig) -> str:
    """Return lines that end a job which Slurm itself has queued again, if it is to be so after errors alone."""
    if "error" not in submit.retry or "interruption" in submit.retry:
        return ""
    return """# After a preemption or a lost node, too, Slurm starts a job again that may be queued again at all.
if [ "${SLURM_RESTART_COUNT:-0}" -gt "$(cat "$folder/requeued" 2>/dev/null | wc -l)" ]; then
  echo "interrupted, and retry has errors alone"; exit 1
fi
"""


def _unless_late(submit: SubmitConfig) -> str:
    """Return a line that ends a job which has waited for nodes for longer than was asked for."""
    if "no-capacity" not in submit.retry:
        return ""
    return f"""latest=$(($(date +%s -r "$folder/job.sh") + {in_seconds(submit.retry_for)}))
if [ ! -f "$folder/begun" ] && [ "$(date +%s)" -gt $latest ]; then
  echo "waited for nodes for longer than {submit.retry_for}"; exit {LIMIT_STATUS}
fi
"""


def _unless_over(submit: SubmitConfig) -> str:
    """Return a line that ends a job with no time left before its deadline."""
    if submit.ends_at is None:
        return ""
    last_start = int(submit.ends_at.timestamp()) - 2 * _WARN_S
    return f'if [ "$(date +%s)" -gt {last_start} ]; then echo "its deadline is near"; exit {LIMIT_STATUS}; fi\n'


def _ray_options(submit: SubmitConfig) -> str:
    """Return what Ray may use of a node, where the settings say it; else Ray looks."""
    counts = {"--num-cpus": submit.cpus_per_node, "--num-gpus": submit.gpus_per_node}
    return "".join(f"{name}={count} " for name, count in counts.items() if count)


def _driver(submission: Submission) -> str:
    folder = shlex.quote(str(submission.folder))
    return f"""#!/bin/bash
# The run itself. Process id and exit status are kept in files: Ray's launcher ends with neither.
folder={folder}
export RAY_ADDRESS=$1
{_klear_run(submission, '"$folder"')} &
driver=$!
echo $driver >"$folder/driver.pid"
trap 'kill -TERM $driver' TERM INT
while kill -0 $driver 2>/dev/null; do wait $driver; done   # the trap ends a wait
wait $driver
status=$?
echo "$status" >"$folder/status"
exit "$status"
"""


def _klear_run(submission: Submission, folder: str) -> str:
    words = [f"{folder}/{Path(PROFILE).parent}", *map(shlex.quote, submission.options)]
    return " ".join(["klear", "run", *words])


# ---- Ray ----


def ray(submission: Submission) -> Prepared:
    """Return the command that sends the profile, with a script, to a Ray cluster and runs it on the head.

    The cluster is the one at RAY_API_SERVER_ADDRESS (`http://HEAD:8265`), or else at RAY_ADDRESS.
    """
    job = ["--submission-id", submission.name, "--working-dir", str(submission.folder), "--no-wait"]
    return Prepared(
        files={"run.sh": _restarted(submission), **profile_files(submission)},
        commands=(("ray", "job", "submit", *job, "--", "bash", "run.sh"),),
        watch=(f"ray job logs --follow {submission.name}", f"ray job stop {submission.name}"),
    )


def _restarted(submission: Submission) -> str:
    submit = submission.submit
    most = submit.max_retries if "error" in submit.retry else 0
    return f"""#!/bin/bash
# Runs the profile, and runs it again after an error: it goes on from its last checkpoint.
begun=$(date +%s) failures=0
while :; do
  {_klear_run(submission, ".")}
  status=$?
  case $status in {_FINAL}) exit $status ;; esac
  failures=$((failures + 1)) age=$(($(date +%s) - begun))
  if [ $failures -gt {most} ] || [ $age -gt {in_seconds(submit.retry_for)} ]; then exit $status; fi
  echo "ended with $status (error): started again"
  sleep 10
done
"""
