"""Where a stage's progress shows: on the console, if there is one, and on the run's page in Prefect."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from uuid import UUID

    from klear_core.artifacts import ArtifactRef
    from tasks.task import Attempt

log = logging.getLogger(__name__)

FIRST_AFTER_S = 2.0
EVERY_S = 5.0


class Console(Protocol):
    """What a person watching a run is told. One stage at a time."""

    def stage_started(self, stage: str, *, attempt: int) -> None:
        """A stage is being built; `attempt` is above 1 if it goes on from earlier work."""

    def stage_progress(self, stage: str, done: int, total: int, note: str) -> None:
        """`done` of `total` units of the running stage; comes often."""

    def stage_done(self, stage: str, ref: ArtifactRef, *, was_reused: bool, wall_s: float) -> None:
        """A stage has its artifact."""

    def stage_failed(self, stage: str, error: BaseException, attempt: Attempt) -> None:
        """The running stage ended without an artifact; it is tried again if `attempt` says when."""


class SilentConsole:
    """Nobody watches."""

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
    """Show the stages of this process there."""
    global _console  # noqa: PLW0603  a process has one terminal
    _console = console


def console() -> Console:
    """Where stages show."""
    return _console


class PrefectProgress:
    """A progress artifact on the task run's page, for stages that take longer than a moment; made and updated sparingly."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self._artifact: UUID | None = None
        self._due_at = time.monotonic() + FIRST_AFTER_S

    def update(self, done: int, total: int, note: str) -> None:
        """Show `done` of `total`. Trouble with the API is logged and ends the updates for a while, never the stage."""
        if time.monotonic() < self._due_at:
            return
        self._due_at = time.monotonic() + EVERY_S
        import httpx
        from prefect.artifacts import create_progress_artifact, update_progress_artifact
        from prefect.context import TaskRunContext

        if TaskRunContext.get() is None:
            return
        percent, text = 100 * done / max(total, 1), f"{self.stage}: {done} of {total} {note}".strip()
        try:  # _sync: stages may call from inside an event loop of their own
            if self._artifact is None:
                key = f"{self.stage.replace('_', '-')}-progress"
                self._artifact = create_progress_artifact(progress=percent, key=key, description=text, _sync=True)  # type: ignore[call-arg, assignment]
            else:
                update_progress_artifact(self._artifact, progress=percent, description=text, _sync=True)  # type: ignore[call-arg]
        except httpx.HTTPError as e:
            log.debug("progress not shown in Prefect: %s", e)
