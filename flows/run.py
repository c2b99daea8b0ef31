"""`klear run`: run the pipeline in this process and show it on the terminal, or show what exists already."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich import progress as bars
from rich.console import Console
from rich.markup import escape

from flows.environment import LOGGERS, PipelineResult, StageSelection, page_of, prepare_environment
from flows.servers import (
    check_prefect,
    check_prefect_access,
    check_ray,
    check_store,
    check_tracking,
    is_temporary_server,
    own_server,
)
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.config.stage import ReportJob, RlJob
from klear_core.errors import ArtifactError, ConfigError, KlearError, chain_of, is_interrupt, reporting
from klear_core.pipeline.downloads import download_lines, downloads_of, pending_jobs
from klear_core.pipeline.graph import fingerprints_of, open_store, set_moved_aside, stages_of, with_inputs
from klear_core.pipeline.plan import PendingWork
from klear_core.pipeline.preflight.checks import require_ready
from klear_core.scores import number
from klear_core.stopping import LimitReached
from tasks.progress import Attempt, shown_on
from tasks.progress import Console as StageConsole
from tasks.tracking import RunInfo, report_inputs

if TYPE_CHECKING:
    from klear_core.report.run.facts import ReportInputs


def carry_out(config: PipelineConfig, selection: StageSelection) -> None:
    """Make the selected stages or reuse their artifacts, and print the result."""
    result, num_made = make_or_reuse(config, selection)
    show_result(config, result, num_made=num_made)


def make_or_reuse(config: PipelineConfig, selection: StageSelection) -> tuple[PipelineResult, int]:
    """Make the selected stages or reuse their artifacts; return the result and how many were made."""
    chosen, again = selection.of(stages_of(config))
    require_ready(config, chosen, again=again)  # the flow checks again, but only after seconds of imports
    set_moved_aside(config, chosen)
    reused = None if again else reuse_all(config, chosen)
    if reused is not None:
        return reused, 0
    for line in download_lines(downloads_of(pending_jobs(config, chosen, again))):
        typer.echo(f"to download: {line}")
    with prefect_run(config.workspace, needs_ray=runs_rl(config, chosen, again)) as console:
        from flows.pipeline import run_pipeline

        result = run_pipeline(config, selection)
    return result, console.num_made


@contextmanager
def prefect_run(workspace: WorkspaceConfig, *, needs_ray: bool) -> Iterator[RunConsole]:
    """Yield the console of a run, with Prefect prepared in this process; an interrupt exits with status 130.

    Order matters: the environment is set before Prefect is imported, and the server starts while the imports run.
    """
    from flows.outages import close_killed_runs

    check_prefect()
    check_tracking(workspace)
    check_store(workspace)
    if needs_ray:
        check_ray()
    prepare_environment(workspace)
    server = own_server(workspace)
    import flows.pipeline  # noqa: F401  takes seconds; the server starts meanwhile

    if server is not None:
        server.wait_until_ready()
        with reporting("runs that were killed are not shown as Crashed"):
            close_killed_runs()
    else:
        check_prefect_access()
    console = RunConsole()
    try:
        with shown_on(console):
            yield console
    finally:
        was_interrupted = is_interrupt(sys.exc_info()[1])
        with reporting("the console could not be closed"):
            console.close()
        if was_interrupted:
            if not any(isinstance(cause, LimitReached) for cause in chain_of(sys.exc_info()[1])):
                typer.echo("\ninterrupted; the same command goes on from here", err=True)
            raise typer.Exit(130)


def runs_rl(config: PipelineConfig, chosen: Collection[str], again: Collection[str] = ()) -> bool:
    """Return whether a run trains with RL, and so needs Ray, rather than reusing all of its RL stages."""
    return any(PendingWork.of(config, chosen, again).pending(RlJob))


# ---- reuse ----
# A run with nothing left to make imports neither Prefect, MLflow, Ray nor torch.


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


# ---- result ----


def show_result(config: PipelineConfig, result: PipelineResult, *, num_made: int) -> None:
    """Print the scores, warnings, the report's path, and commands to inspect the run and ask its model."""
    from flows.show import name_of
    from klear_core.report.run.facts import read_facts
    from klear_core.report.run.final_table import score_table
    from klear_core.report.run.shown_answers import product_of

    console = Console(highlight=False, soft_wrap=True)
    facts = read_facts(_report_inputs(config, result))
    console.print()
    console.print(score_table(facts, with_claims=result.report is not None))
    if num_made == 0:
        console.print("\nall stages reused: nothing has changed since the last run")
    console.print()
    if result.report is not None:
        console.print(f"report   {escape(str(_short(result.report)))}")
    root = escape(shlex.quote(config.workspace.root))  # in commands to copy
    api_url = os.environ.get("PREFECT_API_URL", "")
    if not api_url or is_temporary_server(api_url):  # the user's own server shows the run already
        console.print(
            f"open     klear ui --root {root}      Prefect on http://127.0.0.1:4200, MLflow on http://127.0.0.1:5000"
        )
    trained = [stage.name for stage in facts.stages if stage.stage.job.method()]
    shown = trained[0] if trained else list(result.refs)[-1]
    console.print(f"inspect  klear show {shown} --root {root}")
    product = product_of(facts)
    if product is not None:
        stage = product.stage.name
        which = name_of(result.refs[stage].path, stage, product.root)
        console.print(f"model    {escape(str(product.folder))}")
        console.print(f"ask it   {escape(product.command(which))}")


def _short(path: Path) -> Path:
    """Return the path relative to the working directory if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _report_inputs(config: PipelineConfig, result: PipelineResult) -> ReportInputs:
    info = RunInfo(
        workspace=config.workspace,
        run_id=result.flow_run_id,
        run_name=config.name,
        stage="",
        started_at=datetime.now(UTC),
    )
    return report_inputs(info, ReportJob.of(config), _refs_to_show(config, result))


def _refs_to_show(config: PipelineConfig, result: PipelineResult) -> Mapping[str, ArtifactRef]:
    """Return the run's artifacts without its report; if it scored a model, and made no report, add all scores."""
    stages, store = stages_of(config), open_store(config.workspace)
    refs = {stage.name: result.refs[stage.name] for stage in stages if stage.name in result.refs and not stage.job.page}
    evaluations = [stage.name for stage in stages if stage.job.scores_model]
    if result.report is not None or refs.keys().isdisjoint(evaluations):
        return refs
    try:
        ids = fingerprints_of(stages, config.workspace)
    except ConfigError:  # another stage's source is missing, so fingerprints of its scores are unknown
        return refs
    for name in evaluations:
        own = ids[name]
        if name in refs or store.damage(own.kind, own.fingerprint):
            continue
        found = store.find(own.kind, own.fingerprint)
        if found is not None:
            refs[name] = found
    return refs


# ---- console ----


_MAX_COUNTS = 4


class _Warnings(logging.Handler):
    """Prints each warning of our loggers on a line of its own."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message."""
        try:
            self._console.print(f"  [yellow]![/] {escape(record.getMessage())}", soft_wrap=True)
        except Exception:  # noqa: BLE001  logging never raises
            self.handleError(record)


class RunConsole(StageConsole):
    """Shows one line per finished stage, warnings, and a progress bar for the running stage, until `close`."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.num_made = 0
        columns = (
            bars.SpinnerColumn(),
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
        )
        self._progress = bars.Progress(
            *columns, bars.TextColumn("{task.fields[note]}", style="dim"), console=self.console, transient=True
        )
        self._task: bars.TaskID | None = None
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

    def stage_pace(self, line: str) -> None:
        """Print the line where the output is not a terminal."""
        if not self.console.is_terminal:
            self.console.print(f"    {escape(line)}", soft_wrap=True)

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
