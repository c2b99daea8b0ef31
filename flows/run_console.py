"""Show a run on the terminal: a line for each stage, warnings, and a progress bar."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from flows.launch import LOGGERS
from klear_core.errors import KlearError
from klear_core.report.text import number
from tasks.interrupts import is_interrupt

if TYPE_CHECKING:
    from klear_core.artifacts.manifest import ArtifactRef
    from tasks.task import Attempt

_MAX_COUNTS = 4


class _Warnings(logging.Handler):
    """Prints each warning of our loggers on a line of its own."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message."""
        self._console.print(f"  [yellow]![/] {escape(record.getMessage())}", soft_wrap=True)


class RunConsole:
    """Shows one line per finished stage, warnings, and a progress bar for the running stage, until `close`."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.num_made = 0
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(
            *columns, TextColumn("{task.fields[note]}", style="dim"), console=self.console, transient=True
        )
        self._task: TaskID | None = None
        self._warnings = _Warnings(self.console)
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self._warnings)

    def stage_started(self, stage: str, *, attempt: int) -> None:
        """Start a progress bar; print a line where the output is not a terminal."""
        self._end_bar()
        again = f" (attempt {attempt}, goes on)" if attempt > 1 else ""
        if not self.console.is_terminal:  # output to a file: print lines, no bars
            self.console.print(f"  … {stage}{again}")
            return
        self._progress.start()
        self._task = self._progress.add_task(f"{stage}{again}", total=None, note="")

    def stage_progress(self, stage: str, done: int, total: int, note: str) -> None:  # noqa: ARG002  one stage at a time
        """Update the bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total, note=escape(note))

    def stage_done(self, stage: str, ref: ArtifactRef, *, was_reused: bool, wall_s: float) -> None:
        """Print one line: the artifact and its counts, and whether it was made or reused."""
        self._end_bar()
        self.num_made += not was_reused
        mark, when = ("[dim]=[/]", "reused") if was_reused else ("[green]✓[/]", f"{wall_s:.1f} s")
        counts = [f"{name} {number(value)}" for name, value in ref.counts.items()]
        if self.console.is_terminal:
            line = self._done_line(mark, stage, when, ref, counts[:_MAX_COUNTS])
            self.console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
        else:  # a file has no width to fit
            self.console.print(self._done_line(mark, stage, when, ref, counts), soft_wrap=True)

    @staticmethod
    def _done_line(mark: str, stage: str, when: str, ref: ArtifactRef, counts: Sequence[str]) -> str:
        return f"  {mark} {stage:<17}{when:>9}  [dim]{ref.fingerprint[:8]}[/]  {escape(', '.join(counts))}"

    def stage_failed(self, stage: str, error: BaseException, attempt: Attempt) -> None:
        """Print one line; with several attempts, also the reason and the next delay. The CLI prints the final error."""
        self._end_bar()
        line = f"  [red]✗[/] {stage}"
        if attempt.of > 1 and not is_interrupt(error):
            line += f" (attempt {attempt.number} of {attempt.of}): {escape(_first_line(error))}"
        if attempt.next_in_s is not None:
            line += f"; next attempt in about {attempt.next_in_s:.0f} s"
        self.console.print(line, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar and stop printing warnings."""
        self._end_bar()
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self._warnings)

    def _end_bar(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
            self._progress.stop()


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with its type unless it is a KlearError."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if isinstance(error, KlearError) else f"{type(error).__name__}: {lines[0]}"
