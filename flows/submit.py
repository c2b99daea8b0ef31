"""`klear submit`: plan a run for a cluster, write what starts it there, and hand it over."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import assert_never

import httpx
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
from flows.servers import check_prefect
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.submit import KubeTarget, SubmitConfig
from klear_core.errors import ConfigError, ResourceError
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
    _write(submission, prepared, with_token=target == "slurm")
    for program, command in zip(programs, prepared.commands, strict=True):
        typer.echo(_handed_over([program, *command[1:]], submission.name))
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
    try:
        with get_client(sync_client=True) as client:
            pools = {pool.name: pool for pool in client.read_work_pools(limit=200)}
            pool = pools.get(submit.queue)
            queues = {queue.name for queue in client.read_work_queues(work_pool_name=pool.name)} if pool else set()
    except httpx.HTTPStatusError as e:
        remedy = "; set PREFECT_API_AUTH_STRING" if e.response.status_code == httpx.codes.UNAUTHORIZED else ""
        raise ConfigError(f"PREFECT_API_URL: that server answers with {e.response.status_code}{remedy}") from e
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
