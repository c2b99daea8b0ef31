"""The commands of `klear` about all runs of a workspace: `klear runs`, `klear disk`, `klear gc`.

Importing this loads no work of theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.commands import Root, workspace_folder

runs = typer.Typer(rich_markup_mode="rich", invoke_without_command=True)
"""`klear runs` lists them; its commands act on one, given by its id, the first digits of that, or its name."""
WhichRun = Annotated[
    str, typer.Argument(metavar="RUN", help="Id of a run, its first digits, or its name (the newest).")
]

RunRoot = Annotated[
    Path | None, typer.Option("--root", callback=workspace_folder, help="Workspace to look in; by default runs.")
]


@runs.callback()
def list_runs(
    context: typer.Context,
    root: Root = Path("runs"),
    store: Annotated[
        str | None, typer.Option(help="URL of a shared store; by default the one that the workspace was used with.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all runs as JSON.")] = False,
    num_shown: Annotated[int, typer.Option("--number", min=1, help="Number of runs to show, newest first.")] = 20,
) -> None:
    """List the runs: state, stage and time left, score with interval, GPUs, cost, and why one waits or failed.

    klear runs --root /data/klear

    klear runs logs 3f2a91 --follow     (also cancel, retry, open, pin)
    """
    context.obj = root  # klear runs --root X logs RUN
    if context.invoked_subcommand is None:
        from flows.runs import show_runs

        show_runs(root, store=store, num_shown=num_shown, as_json=as_json)


@runs.command()
def logs(
    context: typer.Context,
    which: WhichRun,
    follows: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    root: RunRoot = None,
) -> None:
    """Print the log of a run."""
    from flows.runs import print_log

    print_log(which, root or context.obj, follows=follows)


@runs.command()
def cancel(context: typer.Context, which: WhichRun, root: RunRoot = None) -> None:
    """Cancel a run; what it has done is kept, and a retry goes on from there."""
    from flows.runs import cancel as cancel_run

    cancel_run(which, root or context.obj)


@runs.command()
def retry(context: typer.Context, which: WhichRun, root: RunRoot = None) -> None:
    """Start a run again that failed, was cancelled or was killed, with the settings that it had."""
    from flows.runs import retry as retry_run

    retry_run(which, root or context.obj)


@runs.command("open")
def open_(context: typer.Context, which: WhichRun, root: RunRoot = None) -> None:
    """Open the report of a run in the browser, also that of a failed one, and print its path."""
    from flows.runs import open_report

    open_report(which, root or context.obj)


@runs.command()
def pin(
    context: typer.Context,
    which: WhichRun,
    tag: Annotated[str, typer.Option(help="Why it is kept, such as paper.")] = "pinned",
    root: RunRoot = None,
) -> None:
    """Keep all artifacts of a run: `klear gc` leaves them."""
    from flows.runs import pin_run

    pin_run(which, root or context.obj, tag=tag)


@runs.command()
def unpin(context: typer.Context, which: WhichRun, root: RunRoot = None) -> None:
    """Let the artifacts of a run be collected again."""
    from flows.runs import pin_run

    pin_run(which, root or context.obj, tag="")


def disk(root: Root = Path("runs")) -> None:
    """Show what takes space: kinds of artifacts, unfinished work, trash, databases, and what each run alone holds.

    klear disk --root /data/klear
    """
    from flows.disk import show_disk

    show_disk(root.absolute())


def gc(
    is_carried_out: Annotated[
        bool, typer.Option("--yes", help="Move it to the trash, and delete what has been there for a week.")
    ] = False,
    last: Annotated[int, typer.Option(min=0, help="Number of runs, the newest, whose artifacts are kept.")] = 10,
    which: Annotated[
        str, typer.Option("--restore", metavar="NAME", help="Take back from the trash: all, or an artifact's name.")
    ] = "",
    root: Root = Path("runs"),
) -> None:
    """Show what nothing needs: not the champion, nor a pinned run, the last runs, or one that lives. --yes removes it.

    klear gc

    klear gc --last 3 --yes

    klear gc --restore sft/3f2a91
    """
    from flows.disk import Rules, collect_garbage, restore

    if which:
        restore(root.absolute(), which)
    else:
        collect_garbage(root.absolute(), Rules(last=last), is_dry_run=not is_carried_out)
