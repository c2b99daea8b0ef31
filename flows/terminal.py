"""Run the pipeline in this process and show it on the terminal."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
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

from flows.environment import LOGGERS, PipelineResult, page_of
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.errors import ArtifactError, KlearError
from klear_core.pipeline.graph import fingerprints_of, open_store, stages_of, with_inputs
from klear_core.scores import number
from tasks.tracking import is_interrupt

if TYPE_CHECKING:
    from tasks.progress import Attempt


def carry_out(
    config: PipelineConfig,
    chosen: Sequence[str],
    *,
    only: str | None = None,
    from_: str | None = None,
    until: str | None = None,
    rerun_from: str | None = None,
) -> None:
    """Make the chosen stages or reuse their artifacts, and print the result. The options are those of `klear run`."""
    from flows import console
    from klear_core.pipeline.graph import set_moved_aside, stages_again, stages_of
    from klear_core.pipeline.preflight.checks import require_ready

    again = stages_again(stages_of(config), rerun_from, chosen)
    require_ready(config, chosen, again=again)  # the flow checks again, but only after seconds of imports
    set_moved_aside(config, chosen)
    reused = None if again else reuse_all(config, chosen)
    if reused is not None:
        console.show_result(config, reused, num_made=0)
        return
    with watched(config.workspace, needs_ray=runs_rl(config, chosen, again)) as watcher:
        from flows.pipeline import run_pipeline

        result = run_pipeline(config, only=only, from_=from_, until=until, rerun_from=rerun_from)
    console.show_result(config, result, num_made=watcher.num_made)


@contextmanager
def watched(workspace: WorkspaceConfig, *, needs_ray: bool) -> Iterator[RunConsole]:
    """Prepare Prefect in this process and show the stages on the terminal; an interrupt exits with status 130.

    Order matters: the environment is set before Prefect is imported, and the server starts while the imports run.
    """
    from flows.environment import check_prefect, check_ray, check_tracking, own_server, prepare_environment
    from flows.outages import close_killed_runs

    check_prefect()
    check_tracking(workspace)
    if needs_ray:
        check_ray()
    prepare_environment(workspace)
    server = own_server(workspace)
    import flows.pipeline  # noqa: F401  takes seconds; the server starts meanwhile
    from tasks.progress import set_console

    if server is not None:
        server.wait_until_ready()
        close_killed_runs()
    watcher = RunConsole()
    set_console(watcher)
    try:
        yield watcher
    finally:
        watcher.close()
        _leave_if_interrupted(sys.exc_info()[1])


def runs_rl(config: PipelineConfig, chosen: Collection[str] | None = None, again: Collection[str] = ()) -> bool:
    """Return whether a run trains with RL, and so needs Ray, rather than reusing all of its RL stages."""
    from klear_core.config.stage import RlJob
    from klear_core.pipeline.plan import PendingWork

    return any(PendingWork.of(config, chosen, again).pending(RlJob))


def _leave_if_interrupted(error: BaseException | None) -> None:
    from tasks.tracking import is_interrupt

    if is_interrupt(error):
        typer.echo("\ninterrupted; the same command goes on from here", err=True)
        raise typer.Exit(130)


# ---- run console ----
# Show a run on the terminal: a line for each stage, warnings, and a progress bar.


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


# ---- reuse ----
# Detect and show a run with nothing left to make, without importing Prefect, MLflow, Ray or torch.


def reuse_all(config: PipelineConfig, chosen: Sequence[str]) -> PipelineResult | None:
    """Print and return the result of a run that has nothing to make; None if it has, see `intact_artifacts`."""
    refs = intact_artifacts(config, chosen)
    if refs is None:
        return None
    console = RunConsole()
    for name in chosen:
        console.stage_done(name, refs[name], was_reused=True, wall_s=0.0)
    console.close()
    result = {name: refs[name] for name in chosen}
    report = page_of(stages_of(config), result)
    return PipelineResult(refs=result, mlflow_run_id=None, report=report, flow_run_id="")


def intact_artifacts(config: PipelineConfig, chosen: Sequence[str]) -> dict[str, ArtifactRef] | None:
    """Return the artifacts of the chosen stages and their inputs if all exist and pass the checks of a run, else None.

    A run on them is no flow run, because it has nothing that Prefect could retry, cancel or show. None also if
    PREFECT_API_URL names a server, which should list every run, or if a chosen stage asks the registry.
    """
    if os.environ.get("PREFECT_API_URL"):
        return None
    stages = stages_of(config)
    if any(stage.job.asks_registry for stage in stages if stage.name in chosen):
        return None
    needed = {*chosen} | {name for stage in stages if stage.name in chosen for name in stage.inputs.values()}
    ids = fingerprints_of(with_inputs(stages, needed), config.workspace)
    store = open_store(config.workspace)
    refs = {}
    try:
        for name in needed:  # find all before verifying any, because verification may read every byte
            ref = store.find(ids[name].kind, ids[name].fingerprint)
            if ref is None:
                return None
            refs[name] = ref
        for ref in refs.values():
            store.verify(ref)
    except ArtifactError:
        return None  # a full run reports the damage, moves the artifact aside and makes it again
    return refs
