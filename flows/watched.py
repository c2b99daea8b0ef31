"""Run the pipeline in this process: prepare Prefect, show the stages on the terminal, and print the result."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import TYPE_CHECKING

import typer

from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig

if TYPE_CHECKING:
    from flows.grid import Runs
    from flows.run_console import RunConsole


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
    from flows.reuse import reuse_all
    from klear_core.pipeline.graph import stages_again, stages_of
    from klear_core.pipeline.moved import set_moved_aside
    from klear_core.pipeline.preflight import require_ready

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


def watched_if(has_work: bool, runs: Runs) -> AbstractContextManager[RunConsole]:
    """Return `watched` for a grid; without work return only a console, because comparing artifacts needs no Prefect."""
    if has_work:
        first = next(iter(runs.values()))
        return watched(
            first.config.workspace, needs_ray=any(runs_rl(run.config, run.compared.chosen) for run in runs.values())
        )
    from flows.run_console import RunConsole

    return closing(RunConsole())


@contextmanager
def watched(workspace: WorkspaceConfig, *, needs_ray: bool) -> Iterator[RunConsole]:
    """Prepare Prefect in this process and show the stages on the terminal; an interrupt exits with status 130.

    Order matters: the environment is set before Prefect is imported, and the server starts while the imports run.
    """
    from flows.launch import own_server, prepare_environment
    from flows.local_runs import close_killed_runs
    from flows.reachable import check_prefect, check_ray, check_tracking
    from flows.run_console import RunConsole

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
    from klear_core.config.jobs import RlJob
    from klear_core.pipeline.ahead import PendingWork

    return any(PendingWork.of(config, chosen, again).pending(RlJob))


def _leave_if_interrupted(error: BaseException | None) -> None:
    from tasks.interrupts import is_interrupt

    if is_interrupt(error):
        typer.echo("\ninterrupted; the same command goes on from here", err=True)
        raise typer.Exit(130)
