"""`klear runs`: list the runs of a workspace or store from their records, and act on one of them. Needs no server."""

from __future__ import annotations

import json
import os
import signal
import time
import webbrowser
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal
from uuid import UUID

import typer
from pydantic import JsonValue, TypeAdapter
from rich.console import Console
from rich.markup import escape

from flows.environment import StageSelection
from flows.servers import check_prefect
from klear_core.artifacts.index import catalog
from klear_core.artifacts.run_history import CONFIG, LOG, SILENT_AFTER, RunHistory, RunRecord
from klear_core.artifacts.store import LocalStore
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import ReportJob
from klear_core.errors import ArtifactError, ConfigError, reporting
from klear_core.scores import Range, duration, interval_text, percent

_MAX_DIFFERENT = 4
"""Most settings in the name of a run."""
_MAX_VALUE_CHARS = 24
_GONE_IN_S = 60.0
_POLL_S = 0.1
_FOLLOW_S = 0.5
_CLIENT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """A run as the list shows it."""

    record: RunRecord
    label: str
    """The settings in which it differs from other runs of its profile."""
    pin: str
    """Its tag, if it is pinned."""

    @property
    def progress(self) -> str:
        """The stage that runs with what is left of it, or the number of finished stages."""
        r = self.record
        if r.state in ("running", "silent") and r.stage:
            units = f" {r.done:,} of {r.total:,}" if r.total else ""
            left = f", {duration(r.left_s)} left" if r.left_s is not None else ""
            if r.silence > SILENT_AFTER:  # also of a process on this machine that is stopped or hangs
                left = f", no sign of life for {r.silence // timedelta(minutes=1):,} min"
            return f"{r.stage}{units}{left}"
        num_done = sum(stage.state != "open" for stage in r.stages)
        where = f", ended in {r.stage}" if r.state != "done" and r.stage else ""
        return f"{num_done} of {len(r.stages)} stages{where}"

    @property
    def score(self) -> str:
        """The last model's score on each benchmark, with its interval."""
        return "; ".join(
            f"{s.model} {s.benchmark} {percent(s.value)} ({interval_text(Range(low=s.low, high=s.high))})"
            for s in self.record.scores
        )

    @property
    def cost(self) -> str:
        """GPU-hours so far, with their price."""
        hours, price = self.record.gpu_hours, self.record.price_per_gpu_hour
        if not hours:
            return ""
        return f"{hours:.1f} GPU-h" + (f", {hours * price:,.2f}" if price is not None else "")

    def fields(self) -> dict[str, JsonValue]:
        """Return the run as JSON."""
        own: dict[str, JsonValue] = self.record.model_dump(mode="json", exclude={"settings"})
        hours, price = self.record.gpu_hours, self.record.price_per_gpu_hour
        cost = None if price is None else round(hours * price, 2)
        return own | {"differs_by": self.label, "pin": self.pin, "gpu_hours": round(hours, 3), "cost": cost}


def list_runs(root: Path, *, store: str | None = None) -> list[ShownRun]:
    """Return all runs, newest first. Those without a record, of earlier versions, are taken from their reports."""
    history = RunHistory.of(root, store=store)
    records = history.records()
    known = {stage.fingerprint for record in records for stage in record.stages}
    for entry in catalog(LocalStore(root / "artifacts")).values():
        if entry.kind == ReportJob.kind and entry.fingerprint not in known:
            with suppress(ArtifactError):  # damaged since it was listed
                records.append(_adopted(history, root / "artifacts" / entry.name))
    records.sort(key=lambda record: record.started_at, reverse=True)
    labels, pins = labels_of(records), history.pins()
    return [ShownRun(record=record, label=labels[record.run_id], pin=pins.get(record.run_id, "")) for record in records]


def _adopted(history: RunHistory, report: Path) -> RunRecord:
    """Write the record of a run that has none, so that its report is read once."""
    from tasks.run_record import record_of_report  # with it all that a run imports, which most lists do not need

    record = record_of_report(report)
    with reporting("the run of an earlier version has no record"):
        history.folder(record.run_id).mkdir(parents=True, exist_ok=True)
        history.write(record)
    return record


def labels_of(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return for each run the settings in which it differs from others of its profile: `seed=1, rl.loss.kind="clip"`.

    A setting that a run does not name has its default.
    """
    by_profile: dict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        by_profile[record.profile].append(record)
    labels = {}
    for group in by_profile.values():
        values: dict[str, set[str]] = defaultdict(set)
        for record in group:
            for key, value in record.settings.items():
                values[key].add(value)
        num_having = Counter(key for record in group for key in record.settings)
        different = {key for key in values if len(values[key]) > 1 or num_having[key] < len(group)}
        for record in group:
            own = [f"{key}={_short(value)}" for key, value in record.settings.items() if key in different]
            more = f", {len(own) - _MAX_DIFFERENT} more" if len(own) > _MAX_DIFFERENT else ""
            labels[record.run_id] = ", ".join(own[:_MAX_DIFFERENT]) + more
    return labels


def _short(value: str) -> str:
    return value if len(value) <= _MAX_VALUE_CHARS else f"{value[:_MAX_VALUE_CHARS]}…"


def show_runs(root: Path, *, store: str | None, num_shown: int, as_json: bool) -> None:
    """Print the newest runs as a table, or all as JSON."""
    runs = list_runs(root, store=store)
    if as_json:
        typer.echo(json.dumps([run.fields() for run in runs], ensure_ascii=False, indent=1))
        return
    console = Console(highlight=False)
    if not runs:
        console.print(f"no run in {escape(str(root))} yet; --root names another workspace")
        return
    for run in runs[:num_shown]:
        for line in lines_of(run):
            console.print(line, soft_wrap=True)
    if len(runs) > num_shown:
        console.print(f"and {len(runs) - num_shown} older runs: --number shows more")


def lines_of(run: ShownRun) -> Iterator[str]:
    """Yield the lines of a run for a terminal: what it is and how far; scores; machine; why it waits or failed."""
    r = run.record
    colour = _COLOURS.get(r.state, "default")
    label = f" [{run.label}]" if run.label else ""
    pinned = f"  pinned: {run.pin}" if run.pin else ""
    start = f"{r.started_at.astimezone():%Y-%m-%d %H:%M}"
    yield (
        f"{r.run_id[:8]}  [{colour}]{r.state:<9}[/] {start}  [bold]{escape(r.name + label)}[/]  "
        f"{escape(run.progress + pinned)}"
    )
    busy = "" if r.gpu_busy is None else f"GPUs busy {percent(r.gpu_busy, 0)}"
    for part in (run.score, ", ".join(filter(None, (busy, run.cost))), *r.why.splitlines(), r.report):
        if part:
            yield f"          {escape(part)}"


_COLOURS = {"done": "green", "failed": "red", "killed": "red", "silent": "yellow", "cancelled": "yellow"}


# ---- one run ----


def print_log(which: str, root: Path, *, follows: bool) -> None:
    """Print the log of a run, and what is added to it until the run ends."""
    history = RunHistory.of(root)
    record = _found(history, which, root)
    file = history.folder(record.run_id) / LOG
    if not file.is_file():
        where = f"; it ran on {record.host}" if record.host and record.host != os.uname().nodename else ""
        raise ConfigError(f"run {record.run_id[:8]} has no log in {root}{where}")
    with file.open(encoding="utf-8", errors="replace") as lines:
        while True:
            is_live = follows and history.find(record.run_id).state == "running"
            for line in lines:
                typer.echo(line, nl=False)
            if not is_live:
                return
            time.sleep(_FOLLOW_S)


def open_report(which: str, root: Path) -> None:
    """Open a run's report in the browser, and print its path."""
    record = _found(RunHistory.of(root), which, root)
    if not Path(record.report).is_file():
        raise ConfigError(f"run {record.run_id[:8]} ({record.state}) has no report yet")
    typer.echo(record.report)
    webbrowser.open(Path(record.report).absolute().as_uri())


def pin_run(which: str, root: Path, *, tag: str) -> None:
    """Keep a run's artifacts from being collected; with an empty tag, let them be collected again."""
    history = RunHistory.of(root)
    record = _found(history, which, root)
    if tag:
        history.pin(record.run_id, tag)
    else:
        history.unpin(record.run_id)


def cancel(which: str, root: Path) -> None:
    """Cancel a running run, and return once its process is gone; what it has done is kept."""
    history = RunHistory.of(root)
    record = _found(history, which, root)
    if record.state not in ("running", "silent"):
        raise ConfigError(f"run {record.run_id[:8]} is not running: {record.state}")
    if record.has_worker:
        _set_state(record, "CANCELLING")
    elif record.host != os.uname().nodename:
        raise ConfigError(f"run {record.run_id[:8]} is on {record.host}: cancel it there")
    else:
        os.kill(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GONE_IN_S
    while history.find(record.run_id).state == "running" and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    state = history.find(record.run_id).state
    typer.echo(f"{record.run_id[:8]} {state}; `klear runs retry {record.run_id[:8]}` goes on from here")


def retry(which: str, root: Path) -> None:
    """Start a run again that failed or ended early: finished stages are reused, and the interrupted one goes on."""
    history = RunHistory.of(root)
    record = _found(history, which, root)
    if record.state in ("running", "silent"):
        raise ConfigError(f"run {record.run_id[:8]} is {record.state}: cancel it first")
    if record.has_worker:
        _set_state(record, "SCHEDULED")
        typer.echo(f"{record.run_id[:8]} will be started by its worker: {record.run_url}")
        return
    file = history.folder(record.run_id) / CONFIG
    if not file.is_file():
        raise ConfigError(f"run {record.run_id[:8]} left no settings here; repeat its command where it ran")
    from flows.run import carry_out
    from klear_core.pipeline.submission.request import ending_at

    asked = dict(record.selection)
    asked.pop("rerun_from", None)  # done already: what it set aside is made now
    selection = TypeAdapter(StageSelection).validate_python(asked)
    config = PipelineConfig.model_validate_json(file.read_bytes())
    carry_out(ending_at(config, None), selection)  # its deadline was that of the submission


def _found(history: RunHistory, which: str, root: Path) -> RunRecord:
    list_runs(root)  # runs of earlier versions get their record
    return history.find(which)


def _set_state(record: RunRecord, kind: Literal["CANCELLING", "SCHEDULED"]) -> None:
    """Do what the Cancel or Retry button of Prefect's UI does."""
    if not os.environ.get("PREFECT_API_URL"):
        raise ConfigError(
            f"run {record.run_id[:8]} belongs to a Prefect server: set PREFECT_API_URL to its address "
            f"({record.run_url})"
        )
    check_prefect()
    from prefect import states
    from prefect.client.schemas.objects import State

    from tasks.progress import fail_fast_client

    state: State[None] = (
        states.Cancelling() if kind == "CANCELLING" else states.AwaitingRetry(message="klear runs retry")
    )
    with fail_fast_client(timeout_s=_CLIENT_S) as client:
        client.set_flow_run_state(UUID(record.run_id), state, force=kind == "SCHEDULED")
