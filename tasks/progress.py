"""Show a stage's progress on the console, if there is one, and on the run's page in Prefect."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from tasks.latest import Latest
from tasks.prefect_client import fail_fast_client

if TYPE_CHECKING:
    from klear_core.artifacts.manifest import ArtifactRef
    from tasks.task import Attempt

FIRST_AFTER_S = 2.0
"""Seconds of a stage without a progress artifact, so that short stages have none."""
EVERY_S = 5.0
"""Seconds between two updates of the artifact."""
TIMEOUT_S = 2.0
"""Seconds to wait for the answer to an update."""
CLOSE_S = 5.0
"""Seconds to wait at a stage's end for the last state to reach the server."""


class Console(Protocol):
    """Shows a run's stages to a person, one stage at a time."""

    def stage_started(self, stage: str, *, attempt: int) -> None:
        """Show that a stage is being built; `attempt` is above 1 if it continues earlier work."""

    def stage_progress(self, stage: str, done: int, total: int, note: str) -> None:
        """Show `done` of `total` units of the running stage; called often."""

    def stage_done(self, stage: str, ref: ArtifactRef, *, was_reused: bool, wall_s: float) -> None:
        """Show that a stage has its artifact."""

    def stage_failed(self, stage: str, error: BaseException, attempt: Attempt) -> None:
        """Show that the running stage failed; it is retried if `attempt.next_in_s` is not None."""


class SilentConsole:
    """Shows nothing; the default."""

    def stage_started(self, stage: str, *, attempt: int) -> None:
        """Ignore."""

    def stage_progress(self, stage: str, done: int, total: int, note: str) -> None:
        """Ignore."""

    def stage_done(self, stage: str, ref: ArtifactRef, *, was_reused: bool, wall_s: float) -> None:
        """Ignore."""

    def stage_failed(self, stage: str, error: BaseException, attempt: Attempt) -> None:
        """Ignore."""


_console: Console = SilentConsole()


def set_console(console: Console) -> None:
    """Show the stages of this process on `console`."""
    global _console  # noqa: PLW0603  a process has one terminal
    _console = console


def console() -> Console:
    """Return the console that shows the stages of this process."""
    return _console


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

    def show(self, shown: Shown) -> None:
        """Create or update the artifact on the server, in one short attempt."""
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        with fail_fast_client(timeout_s=TIMEOUT_S) as client:
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
            self.artifact_id = client.create_artifact(wanted).id


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
