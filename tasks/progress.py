"""Show a stage's progress and result on the console and in Prefect."""

from __future__ import annotations

import contextvars
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar
from uuid import UUID

from klear_core.artifacts.manifest import ArtifactRef, Manifest
from klear_core.errors import reporting
from tasks.mlflow_backend import without_password
from tasks.tracking import RunInfo

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import ArtifactCreate

FIRST_AFTER_S = 2.0
"""Seconds of a stage without a progress artifact, so that short stages have none."""
EVERY_S = 5.0
"""Seconds between two updates of the artifact."""
TIMEOUT_S = 2.0
"""Seconds to wait for the answer to an update."""
CLOSE_S = 5.0
"""Seconds to wait at a stage's end for the last state to reach the server."""


class Console:
    """Shows a run's stages to a person, one stage at a time; this one shows nothing, which is the default."""

    def stage_started(self, stage: str, *, attempt: int) -> None:
        """Show that a stage is being built; `attempt` is above 1 if it continues earlier work."""

    def stage_progress(self, stage: str, done: int, total: int, note: str) -> None:
        """Show `done` of `total` units of the running stage; called often."""

    def stage_pace(self, line: str) -> None:
        """Show a line about the running stage, where there is no bar; called once a minute."""

    def stage_done(self, stage: str, ref: ArtifactRef, *, was_reused: bool, wall_s: float) -> None:
        """Show that a stage has its artifact."""

    def stage_failed(self, stage: str, error: BaseException, attempt: Attempt) -> None:
        """Show that the running stage failed; it is retried if `attempt.next_in_s` is not None."""


class _Several(Console):
    """Passes all calls to several consoles, whose errors (a closed terminal) neither end a stage nor hide its error."""

    def __init__(self) -> None:
        self.consoles: list[Console] = []

    def stage_started(self, stage: str, *, attempt: int) -> None:
        """Pass it on."""
        for each in self.consoles:
            with reporting(f"the start of {stage} could not be shown"):
                each.stage_started(stage, attempt=attempt)

    def stage_progress(self, stage: str, done: int, total: int, note: str) -> None:
        """Pass it on."""
        for each in self.consoles:
            with reporting(f"the progress of {stage} could not be shown", level=logging.DEBUG):
                each.stage_progress(stage, done, total, note)

    def stage_pace(self, line: str) -> None:
        """Pass it on."""
        for each in self.consoles:
            with reporting("the pace of a stage could not be shown", level=logging.DEBUG):
                each.stage_pace(line)

    def stage_done(self, stage: str, ref: ArtifactRef, *, was_reused: bool, wall_s: float) -> None:
        """Pass it on."""
        for each in self.consoles:
            with reporting(f"the end of {stage} could not be shown"):
                each.stage_done(stage, ref, was_reused=was_reused, wall_s=wall_s)

    def stage_failed(self, stage: str, error: BaseException, attempt: Attempt) -> None:
        """Pass it on."""
        for each in self.consoles:
            with reporting(f"the failure of {stage} could not be shown"):
                each.stage_failed(stage, error, attempt)


_shown_on = _Several()


@contextmanager
def shown_on(console: Console) -> Iterator[None]:
    """Show the stages of this process on `console`, too, while the block runs."""
    _shown_on.consoles.append(console)
    try:
        yield
    finally:
        _shown_on.consoles.remove(console)


def console() -> Console:
    """Return what passes on to all consoles that show the stages of this process."""
    return _shown_on


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Content of a progress artifact."""

    percent: float
    text: str


class PrefectProgress:
    """A progress artifact on the task run's page, for stages that take longer than 2 s.

    `update` never waits for the server: updates replace each other until a background thread delivers one. `close`
    waits up to 5 s for the last one.
    """

    def __init__(self, stage: str, artifact: ProgressArtifact | None, *, first_after_s: float = FIRST_AFTER_S) -> None:
        """Show nothing if `artifact` is None."""
        self.stage = stage
        self._artifact = artifact
        self._due_at = time.monotonic() + first_after_s
        self._latest: Latest[Shown] | None = None
        self._last: tuple[int, int] | None = None

    def update(self, done: int, total: int, note: str) -> None:
        """Show `done` of `total`."""
        self._last = (done, total)
        if self._artifact is None or time.monotonic() < self._due_at:
            return
        if self._latest is None:
            self._latest = Latest(self._artifact.show, every_s=EVERY_S)
        self._latest.put(Shown(percent=_percent(done, total), text=f"{self.stage}: {done} of {total} {note}".strip()))

    def close(self, *, is_done: bool) -> None:
        """Show that the stage is done, or how far it was when it failed."""
        if self._latest is None or self._last is None:
            return
        done, total = self._last
        ended = Shown(percent=_percent(done, total), text=f"{self.stage}: ended at {done} of {total}")
        self._latest.put(Shown(percent=100.0, text=f"{self.stage}: done") if is_done else ended)
        self._latest.close(wait_s=CLOSE_S)


@dataclass(slots=True, kw_only=True)
class ProgressArtifact:
    """The progress artifact of one task run, created at its first use."""

    key: str
    flow_run_id: UUID | None
    task_run_id: UUID
    artifact_id: UUID | None = None
    is_uncertain: bool = False
    """Whether a server that then was gone may have made the artifact: its answer was never seen."""

    def show(self, shown: Shown) -> None:
        """Create or update the artifact on the server, in one short attempt."""
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        with fail_fast_client(timeout_s=TIMEOUT_S) as client:
            if self.is_uncertain and self.artifact_id is None:
                self.artifact_id = self._made_before(client)
            if self.artifact_id is not None:
                client.update_artifact(self.artifact_id, ArtifactUpdate(data=shown.percent, description=shown.text))
                return
            wanted = ArtifactCreate(
                key=self.key,
                type="progress",
                data=shown.percent,
                description=shown.text,
                flow_run_id=self.flow_run_id,
                task_run_id=self.task_run_id,
            )
            self.is_uncertain = True
            self.artifact_id = client.create_artifact(wanted).id

    def _made_before(self, client: SyncPrefectClient) -> UUID | None:
        from prefect.client.schemas import filters

        ours = filters.ArtifactFilter(
            key=filters.ArtifactFilterKey(any_=[self.key]),
            task_run_id=filters.ArtifactFilterTaskRunId(any_=[self.task_run_id]),
        )
        return next((artifact.id for artifact in client.read_artifacts(artifact_filter=ours)), None)


def artifact_of_current_run(stage: str) -> ProgressArtifact | None:
    """Return the progress artifact of the current task run; None outside of one."""
    from prefect.context import TaskRunContext

    context = TaskRunContext.get()
    if context is None:
        return None
    run = context.task_run
    return ProgressArtifact(key=f"{stage.replace('_', '-')}-progress", flow_run_id=run.flow_run_id, task_run_id=run.id)


def _percent(done: int, total: int) -> float:
    return min(100.0, 100 * done / max(total, 1))


# ---- a line a minute, where there is no bar ----


LINE_EVERY_S = 60.0
"""Seconds between two lines about a stage that works."""
_SHORTEST_S = 5.0
"""Reports within fewer seconds have no rate: the first ones often come together."""


@dataclass(slots=True, kw_only=True)
class Pace:
    """Progress of a stage and its speed; all times are seconds of one clock."""

    stage: str
    started_s: float
    done: int = 0
    total: int = 0
    """0 if it is not known."""
    note: str = ""
    first: tuple[float, int] | None = None
    """Time and units of the first report of these units, before which an earlier attempt may have done some."""
    last_s: float = 0.0
    """Time of the last report."""

    def update(self, done: int, total: int, note: str, *, now_s: float) -> None:
        """Note a report. Another total, or fewer units than before, begins other units."""
        if self.first is None or total != self.total or done < self.done:
            self.first = (now_s, done)
        self.done, self.total, self.note, self.last_s = done, total, note, now_s

    @property
    def per_s(self) -> float | None:
        """Units a second since the first report; None while all reports are of a few seconds."""
        if self.first is None or self.done <= self.first[1] or self.last_s - self.first[0] < _SHORTEST_S:
            return None
        return (self.done - self.first[1]) / (self.last_s - self.first[0])

    @property
    def left_s(self) -> float | None:
        """Seconds left at this speed; None if that or the total is not known, or if all is done."""
        return (self.total - self.done) / self.per_s if self.per_s is not None and self.done < self.total else None

    def line(self, now_s: float) -> str:
        """Return what is done, the rate and the time left: `rl: 34 of 80, 3.2 a minute, about 14 min left, ...`."""
        if self.first is None:
            return f"{self.stage}: working for {_duration(now_s - self.started_s)}"
        parts = [f"{self.stage}: {self.done:,}{f' of {self.total:,}' if self.total else ''}"]
        per_s = self.per_s
        if per_s is not None:
            parts.append(_rate(per_s))
        if self.left_s is not None:
            parts.append(f"about {_duration(self.left_s)} left")
        if self.note:
            parts.append(self.note)
        if now_s - self.last_s >= LINE_EVERY_S:
            parts.append(f"nothing new for {_duration(now_s - self.last_s)}")
        return ", ".join(parts)


class ProgressLines:
    """Says once a minute how far a stage is, from a thread of its own: also while a long step reports nothing."""

    def __init__(self, stage: str, say: Callable[[str], None], *, every_s: float = LINE_EVERY_S) -> None:
        """`say` gets the lines, in the caller's context."""
        self._pace = Pace(stage=stage, started_s=time.monotonic())
        self._say, self._every_s = say, every_s
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        context = contextvars.copy_context()  # by which Prefect knows the run of a log record
        self._thread = threading.Thread(target=context.run, args=(self._work,), name="pace", daemon=True)
        self._thread.start()

    def update(self, done: int, total: int, note: str) -> None:
        """Note `done` of `total` units."""
        with self._lock:
            self._pace.update(done, total, note, now_s=time.monotonic())

    def close(self) -> None:
        """Say no more lines."""
        self._is_over.set()
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        while not self._is_over.wait(self._every_s):
            with self._lock:
                line = self._pace.line(time.monotonic())
            with reporting("the pace of a stage could not be said", level=logging.DEBUG):
                self._say(line)


def _rate(per_s: float) -> str:
    if per_s >= 1:
        return f"{per_s:,.1f} a second"
    return f"{60 * per_s:.1f} a minute" if 60 * per_s >= 1 else f"{3600 * per_s:.1f} an hour"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


# ---- delivery of the newest value ----


T = TypeVar("T")

log = logging.getLogger(__name__)


class Latest(Generic[T]):
    """A slot for one value: `put` replaces an undelivered value, and a daemon thread delivers the newest one."""

    def __init__(self, deliver: Callable[[T], None], *, every_s: float) -> None:
        """Deliver at most every `every_s`, in the caller's context; log an error and retry with the newest value."""
        self._deliver, self._every_s = deliver, every_s
        self._waiting: list[T] = []  # one value at most; not `T | None`, because None may be a value
        self._is_closed = False
        self._changed = threading.Condition()
        context = contextvars.copy_context()  # Prefect's settings are context variables
        self._thread = threading.Thread(target=context.run, args=(self._work,), name="latest", daemon=True)
        self._thread.start()

    def put(self, value: T) -> None:
        """Set the value to deliver, replacing an older one that still waits."""
        with self._changed:
            self._waiting = [value]
            self._changed.notify()

    def close(self, *, wait_s: float) -> None:
        """Deliver the waiting value; return when done, or after `wait_s` (the thread is a daemon)."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(wait_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                value = self._waiting.pop()
            self._try(value)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, timeout=self._every_s)

    def _try(self, value: T) -> None:
        is_delivered = False
        with reporting("not delivered", level=logging.DEBUG):
            self._deliver(value)
            is_delivered = True
        with self._changed:
            if not (is_delivered or self._waiting or self._is_closed):
                self._waiting = [value]


# ---- a finished stage's page in Prefect ----


_TIMEOUT_S = 10.0
_undelivered: list[ArtifactCreate] = []
"""Summaries that the server has not accepted yet; they are sent again with the next one and at the run's end."""


def show_in_prefect(info: RunInfo, manifest: Manifest, ref: ArtifactRef) -> None:
    """Send a Markdown artifact and, if there is a ledger, a table. Outside a Prefect run, do nothing.

    The next stage does not wait for a server that is down: what it does not accept now waits for `deliver_summaries`.
    """
    from prefect.client.schemas.actions import ArtifactCreate
    from prefect.context import TaskRunContext

    context = TaskRunContext.get()
    if context is None:
        return
    key = f"klear-{info.stage.replace('_', '-')}"
    run = {"flow_run_id": context.task_run.flow_run_id, "task_run_id": context.task_run.id}
    summary = {
        "type": "markdown",
        "data": summary_markdown(manifest, ref),
        "description": f"{info.stage} of {info.run_name}",
    }
    # Made here, with the ids of this task run: sent later from elsewhere, they still are on its page.
    _undelivered.append(ArtifactCreate.model_validate({"key": key} | summary | run))
    if manifest.ledger:
        ledger = {"type": "table", "data": json.dumps(ledger_rows(manifest)), "description": "where everything went"}
        _undelivered.append(ArtifactCreate.model_validate({"key": f"{key}-ledger"} | ledger | run))
    deliver_summaries()


def show_summary(info: RunInfo, markdown: str) -> None:
    """Send the summary of a whole run as a Markdown artifact of its page."""
    from prefect.client.schemas.actions import ArtifactCreate

    about = {"key": "klear-summary", "type": "markdown", "data": markdown, "description": f"summary of {info.run_name}"}
    _undelivered.append(ArtifactCreate.model_validate(about | {"flow_run_id": info.run_id}))
    deliver_summaries()


def deliver_summaries() -> None:
    """Send the waiting summaries in order until one cannot be sent, which is logged; drop one that Prefect refuses."""
    import httpx

    if not _undelivered:
        return
    try:
        with fail_fast_client(timeout_s=_TIMEOUT_S) as client:
            while _undelivered:
                client.create_artifact(_undelivered[0])
                _undelivered.pop(0)
    except httpx.HTTPError as e:
        if isinstance(e, httpx.HTTPStatusError) and e.response.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
            refused = _undelivered.pop(0)  # else it would hold up all that come after it
            log.warning("Prefect refuses the summary %s: %s", refused.key, e)
        else:
            log.info(
                "%d summaries wait for Prefect, which cannot take them now: %s", len(_undelivered), type(e).__name__
            )


def summary_markdown(manifest: Manifest, ref: ArtifactRef) -> str:
    """Return a stage's counts (scores among them), notes and provenance as Markdown."""
    lines = [f"# {manifest.stage}", "", "| | |", "|---|---|"]
    for name, value in manifest.counts.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        lines.append(f"| {name} | {shown} |")
    lines += ["", *(f"- **Note:** {note}" for note in manifest.notes)]
    commit = "not from git"
    if manifest.git_commit:
        commit = manifest.git_commit[:12] + (" with local changes" if manifest.git_dirty else "")
    lines += [
        "",
        f"Artifact `{manifest.kind}/{manifest.fingerprint}` in `{ref.path}`, code {commit}, "
        f"made in {manifest.wall_s:.1f} s (attempt {manifest.attempts}).",
        "",
        f"MLflow: {mlflow_link(manifest.mlflow_run_id)}",
    ]
    return "\n".join(lines)


def mlflow_link(run_id: str | None) -> str:
    """Return a Markdown link to the run if MLflow is a server, otherwise the run's id."""
    server = without_password(os.environ.get("MLFLOW_TRACKING_URI", ""))
    if run_id is None:
        return "not sent yet"
    return f"[{run_id}]({server.rstrip('/')}/#/runs/{run_id})" if server.startswith("http") else f"run `{run_id}`"


def ledger_rows(manifest: Manifest) -> list[dict[str, str | int]]:
    """Return one row per step and reason."""
    rows: list[dict[str, str | int]] = []
    for step in manifest.ledger:
        rows.append({"step": step.step, "unit": step.unit, "what": "in", "count": step.num_in})
        for reason, n in step.dropped.items():
            rows.append({"step": step.step, "unit": step.unit, "what": f"dropped: {reason}", "count": n})
        for reason, n in step.noted.items():
            rows.append({"step": step.step, "unit": step.unit, "what": f"noted: {reason}", "count": n})
        rows.append({"step": step.step, "unit": step.unit, "what": "out", "count": step.num_out})
    return rows


# ---- requests to Prefect ----
# Prefect's own client retries for minutes.


@contextmanager
def fail_fast_client(*, timeout_s: float) -> Iterator[SyncPrefectClient]:
    """Yield a client that tries every request once; in the block Prefect's retries are off, for this thread only."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),  # a context variable: other threads keep their retries
        get_client(sync_client=True, httpx_settings={"timeout": timeout_s}) as client,
    ):
        yield client


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a stage, and the delay of the next if this one fails."""

    number: int
    of: int
    next_in_s: float | None
    """Mean delay in seconds before the next attempt; None if there is none."""
