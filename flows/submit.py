"""`klear submit`: plan a run for a cluster, write what starts it there, and hand it over."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import assert_never

import typer
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.schedules import CronSchedule
from prefect.settings import PREFECT_API_URL
from prefect.utilities.templating import find_placeholders
from pydantic import ValidationError

from flows.environment import StageSelection
from flows.plan_view import show_plan
from flows.retraining import gated
from flows.servers import check_prefect, prefect_refusals
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.submit import KubeTarget, SubmitConfig
from klear_core.errors import ConfigError, KlearError, ResourceError
from klear_core.pipeline.graph import stages_of, workspace_root
from klear_core.pipeline.submission.kube import kube
from klear_core.pipeline.submission.prefect import prefect
from klear_core.pipeline.submission.request import (
    Prepared,
    Submission,
    Target,
    fit_lines,
    for_cluster,
    name_of,
    nodes_of,
    require_possible,
)
from klear_core.pipeline.submission.shell import ray, slurm

_RAY_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Variables by one of which `ray job submit` finds its cluster."""
_TIMEOUT_S = 300.0
"""Seconds within which a cluster must have taken a run."""
_SLURM_SILENCE_S = 180.0
"""Seconds for which a controller of Slurm that does not answer is asked again before anything is handed over."""
_SLURM_PAUSE_S = 1.0
_IS_SILENT = r"Unable to contact slurm|Communication \w+ failure|Socket timed out|Zero Bytes|standby mode"
_HAS_NO_NODES = r"not available|nodes are busy"
_FOR_EVER = r"Partition(Config|NodeLimit|TimeLimit)|BadConstraints|Max\w+PerJob|Invalid(QOS|Account)"
"""Reasons of squeue that no wait ends."""
_CRON_NAMES = {
    name: number
    for first, names in ((0, "sun mon tue wed thu fri sat"), (1, "jan feb mar apr may jun jul aug sep oct nov dec"))
    for number, name in enumerate(names.split(), first)
}


def submit(config: PipelineConfig, target: Target, selection: StageSelection, *, is_dry_run: bool) -> None:
    """Show the plan of a run on its nodes, and submit it, or print what would be submitted.

    Raise ConfigError, before anything is written, with what would stop the run.
    """
    require_possible(target, config)
    if target == "kube" and config.workspace.submit.kube.schedule:
        _require_times(config.workspace.submit.kube)
        config = gated(config)
    now = datetime.now(UTC)
    config = for_cluster(config, target, now)
    chosen, _ = selection.of(stages_of(config))
    nodes = nodes_of(config.workspace.submit)
    missing = show_plan(config, chosen, nodes=nodes)
    for line in fit_lines(config, chosen):
        typer.echo(line)
    if missing:
        problems = "1 problem" if len(missing) == 1 else f"{len(missing)} problems"
        raise ConfigError(f"nothing was submitted: {problems}, named above, would stop the run")
    submission = _new(config, target, selection, now)
    prepared = _prepared(submission, target, selection)
    if is_dry_run:
        _show(submission, prepared)
        return
    _require_receiver(target, config.workspace.submit)
    programs = [_program(command[0]) for command in prepared.commands]
    if target == "slurm":
        squeue, scancel = _program("squeue"), _program("scancel")
        _require_nodes(programs[0], prepared.files["job.sh"], config.workspace.submit)
    _write(submission, prepared, with_token=target == "slurm")
    for program, command in zip(programs, prepared.commands, strict=True):
        said = _handed_over([program, *command[1:]], submission.name)
        typer.echo(said)
    if target == "slurm":
        _require_queued(said.partition(";")[0], config.workspace.submit, squeue=squeue, scancel=scancel)
    typer.echo(f"\nsubmitted {submission.name}; its files are in {submission.folder}")
    for line in prepared.watch:
        typer.echo(f"  {line}")


def _new(config: PipelineConfig, target: Target, selection: StageSelection, now: datetime) -> Submission:
    name = name_of(config, now)
    options = {"--only": selection.only, "--from": selection.from_, "--until": selection.until}
    words = tuple(word for option, stage in options.items() if stage for word in (option, stage))
    submit = config.workspace.submit
    # Elsewhere the workspace is a folder of the nodes alone, such as the volume of a pod.
    is_read_there = target == "slurm" or (target == "prefect" and submit.prefect.pool == "process")
    root = workspace_root(config.workspace) if is_read_there else Path.cwd() / "runs"
    folder = root / "submissions" / name
    return Submission(name=name, folder=folder, config=config, options=words)


def _prepared(submission: Submission, target: Target, selection: StageSelection) -> Prepared:
    match target:
        case "slurm":
            return slurm(submission, workdir=Path.cwd())
        case "ray":
            return ray(submission)
        case "kube":
            return kube(submission, ray_version=version("ray"))
        case "prefect":
            chosen = {"only": selection.only, "from_": selection.from_, "until": selection.until}
            asked = {name: stage for name, stage in chosen.items() if stage}
            prepared = prefect(submission, workdir=str(Path.cwd()), selection=asked)
            _require_no_placeholder(prepared.files["prefect.yaml"])
            return prepared
        case _:
            assert_never(target)


def _require_no_placeholder(deployments: str) -> None:
    """Raise ConfigError for a text that `prefect deploy` would replace by a block, a variable or the environment."""
    found = sorted(placeholder.full_match for placeholder in find_placeholders(yaml.safe_load(deployments)))
    if found:
        raise ConfigError(f"prefect deploy would replace {', '.join(found)}: change that setting, or the folder")


def _show(submission: Submission, prepared: Prepared) -> None:
    for path, text in prepared.files.items():
        typer.echo(f"\n# ---- {submission.folder / path}\n{text}", nl=False)
    typer.echo("\n# ---- commands")
    for command in prepared.commands:
        typer.echo(shlex.join(command))


def _require_times(target: KubeTarget) -> None:
    """Raise ConfigError for times at which nothing would ever start, which KubeRay would only note in its object."""
    is_interval = target.schedule.startswith("@every ")  # Prefect does not know it
    try:
        CronSchedule(cron="@daily" if is_interval else target.schedule, timezone=target.time_zone)
    except ValidationError as e:
        [key] = e.errors()[0]["loc"]
        name = "schedule" if key == "cron" else "time_zone"
        said = "no times as cron writes them" if key == "cron" else "no time zone, such as Europe/Berlin"
        raise ConfigError(f"workspace.submit.kube.{name} = {getattr(target, name)!r}: {said}") from e
    part = _unknown_to_kuberay(target.schedule)
    if part:
        raise ConfigError(
            f"workspace.submit.kube.schedule = {target.schedule!r}: KubeRay cannot read {part}; Sunday is 0, a range"
            " ends after it begins, and @every counts hours, minutes or seconds: @every 36h"
        )


def _unknown_to_kuberay(schedule: str) -> str:
    """Return a part that Prefect's reader of cron takes and KubeRay's (robfig/cron, ParseStandard) does not."""
    if schedule.startswith("@"):
        is_known = not schedule.startswith("@every ") or re.fullmatch(r"@every (\d+(\.\d+)?[hms])+", schedule)
        return "" if is_known else schedule
    *_, days = fields = [field.split(",") for field in schedule.lower().split()]
    for part in (part for field in fields for part in field):
        ends = [str(_CRON_NAMES.get(end, end)) for end in part.partition("/")[0].split("-")]
        if ends[0] in ("*", "?"):
            continue
        if not all(end.isdecimal() for end in ends) or ends != sorted(ends, key=int):
            return part
        if part in days and int(ends[-1]) > _CRON_NAMES["sat"]:
            return part
    return ""


def _require_receiver(target: Target, submit: SubmitConfig) -> None:
    """Raise ConfigError if it is not known who takes the run.

    Without an address Ray's command takes whatever cluster runs on this machine, and Prefect's a database of its own.
    """
    if target == "ray" and not any(os.environ.get(name) for name in _RAY_ADDRESSES):
        raise ConfigError(
            f"{_RAY_ADDRESSES[0]}: not set; it names the cluster that takes the run, for example http://HEAD:8265"
        )
    if target == "prefect":
        if not PREFECT_API_URL.value():
            raise ConfigError(
                "PREFECT_API_URL: not set; it names the server that takes the run, for example"
                " http://127.0.0.1:4200/api"
            )
        check_prefect(remedy="start that server")
        _require_pool(submit)


def _require_pool(submit: SubmitConfig) -> None:
    """Raise ConfigError unless Prefect's server has the work pool, of the right type, and the work queue."""
    with prefect_refusals(), get_client(sync_client=True) as client:
        pools = {pool.name: pool for pool in client.read_work_pools(limit=200)}
        pool = pools.get(submit.queue)
        queues = {queue.name for queue in client.read_work_queues(work_pool_name=pool.name)} if pool else set()
    if pool is None:
        there = ", ".join(sorted(pools)) or "none"
        raise ConfigError(f"workspace.submit.queue = {submit.queue!r}: no work pool; there are: {there}")
    if pool.type != submit.prefect.pool:
        raise ConfigError(
            f"workspace.submit.prefect.pool = {submit.prefect.pool!r}: the pool {pool.name} is of type {pool.type}"
        )
    if submit.priority and submit.priority not in queues:
        raise ConfigError(
            f"workspace.submit.priority = {submit.priority!r}: no work queue of {pool.name}; there are:"
            f" {', '.join(sorted(queues))}"
        )


def _require_nodes(sbatch: str, script: str, submit: SubmitConfig) -> None:
    """Raise ResourceError unless Slurm would take the job; `sbatch --test-only` queues nothing, so it can be repeated.

    Slurm queues a job whose nodes are missing, too. Only `retry = ["no-capacity"]` asks for that.
    """
    deadline, was_silent = time.monotonic() + _SLURM_SILENCE_S, False
    while True:
        said = _objection(sbatch, script)
        is_silent = re.search(_IS_SILENT, said) is not None
        was_silent |= is_silent
        # A controller that has just started does not know its nodes yet.
        is_asked_again = is_silent or (was_silent and re.search(_HAS_NO_NODES, said))
        if not is_asked_again or time.monotonic() > deadline:
            break
        typer.echo(f"Slurm is asked again: {said}")
        time.sleep(_SLURM_PAUSE_S)
    if not said:
        return
    if not re.search(_HAS_NO_NODES, said):
        raise ResourceError(f"nothing was submitted: sbatch: {said}")
    if "no-capacity" not in submit.retry:
        raise ResourceError(f"nothing was submitted: sbatch: {said}; with --retry no-capacity it waits for nodes")
    typer.echo(f"Slurm: {said}; the job waits for nodes, for {submit.retry_for} at most")


def _objection(sbatch: str, script: str) -> str:
    """Return why Slurm would not take the job now; empty, with its guess of a start shown, if it would."""
    command = [sbatch, "--test-only"]
    try:
        ended = subprocess.run(
            command, input=script, capture_output=True, text=True, check=False, timeout=_SLURM_SILENCE_S
        )
    except subprocess.TimeoutExpired as e:
        raise ResourceError(f"nothing was submitted: sbatch did not answer in {e.timeout:.0f} s") from e
    said = "; ".join(ended.stderr.replace("sbatch: ", "").strip().splitlines())
    if ended.returncode:
        return said or f"status {ended.returncode}"
    typer.echo(f"Slurm: {said}")
    return ""


def _require_queued(job: str, submit: SubmitConfig, *, squeue: str, scancel: str) -> None:
    """Show how Slurm has queued the job; cancel it, and raise, if it would wait for ever, or lacks its QOS.

    A Slurm without accounting takes any QOS, and drops it.
    """
    look = [squeue, "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r|%q"]
    ended = subprocess.run(look, capture_output=True, text=True, check=False)
    state, reason, qos = [*ended.stdout.strip().split("|"), "", ""][:3]
    if ended.returncode or not state:
        typer.echo(f"squeue does not tell how it is queued: {ended.stderr.strip()}", err=True)
        return
    wrong: KlearError | None = None
    if submit.priority and qos != submit.priority:
        wrong = ConfigError(
            f"workspace.submit.priority = {submit.priority!r}: this Slurm has taken job {job} without that QOS, for it"
            " does not keep accounts, or does not enforce them; the job was cancelled"
        )
    elif re.search(_FOR_EVER, reason):
        wrong = ResourceError(
            f"nothing is queued: Slurm would keep job {job} for ever ({reason}), so it was cancelled; change nodes,"
            " slurm.time_limit, --queue or --priority"
        )
    if wrong is not None:
        subprocess.run([scancel, job], capture_output=True, check=False)
        raise wrong
    typer.echo(f"{state} ({reason})")


def _program(name: str) -> str:
    """Return the path of a program in PATH or beside this Python."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise ConfigError(f"nothing was submitted: there is no command {name} on this machine")
    return found


def _write(submission: Submission, prepared: Prepared, *, with_token: bool) -> None:
    try:
        submission.folder.parent.mkdir(parents=True, exist_ok=True)
        submission.folder.mkdir()
    except FileExistsError as e:
        raise ResourceError(f"another run was submitted as {submission.name} in this second; repeat it") from e
    except OSError as e:
        raise ConfigError(f"nothing was submitted: {submission.folder} cannot be made: {e.strerror}") from e
    for path, text in prepared.files.items():
        file = submission.folder / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    if with_token:
        descriptor = os.open(submission.folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file_of_token:
            file_of_token.write(secrets.token_urlsafe(32))


def _handed_over(command: Sequence[str], name: str) -> str:
    """Run a command of the cluster and return its last line. A cluster that does not answer may have taken the run."""
    program = Path(command[0]).name
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as e:
        raise ResourceError(
            f"{program} did not answer in {_TIMEOUT_S:.0f} s; look for {name} before you repeat it"
        ) from e
    if ended.returncode:
        lines = [line.strip() for line in (ended.stderr.strip() or ended.stdout.strip()).splitlines() if line.strip()]
        if "Traceback (most recent call last)" in ended.stderr:
            lines = lines[-1:]
        said = "; ".join(lines)[-2000:]
        raise ResourceError(
            f"{' '.join([program, *command[1:3]])} failed; look for {name} before you repeat it: {said}"
        )
    return (ended.stdout.strip().splitlines() or [""])[-1]
