"""The `klear` command. Each subcommand imports its modules when it runs, so that `klear --help` is fast."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.commands import LOOK, RUN, SCORE, SERVE, chat, evaluations, replay, show, sweep, ui
from flows.process import (
    bypass_proxies_for_loopback,
    escape_unprintable,
    exit_at_once_when_interrupted,
    reliable_interrupts,
)
from flows.run_commands import disk, gc, runs
from klear_core.errors import ConfigError, KlearError, chain_of, meant
from klear_core.stopping import LIMIT_STATUS, REQUEUE_STATUS, LimitReached, Requeued

if TYPE_CHECKING:
    from klear_core.artifacts.store import CheckedBy
    from klear_core.config.pipeline import PipelineConfig

_BENCHMARKS = Path(__file__).parents[1] / "tests" / "bench"
"""Benchmark files of a checkout: `measure()` returns mappings with name, value, unit, target, ok and versions."""

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False)
"""Commands in `klear --help` are in panels: run, score, look, serve."""
rl_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Replay saved steps of an RL stage.")
app.add_typer(rl_app, name="rl", rich_help_panel=RUN)
app.add_typer(evaluations)

Profile = Annotated[
    str,
    typer.Argument(
        metavar="PROFILE",
        help="A folder of TOML files, such as configs/laptop, or the name of one under configs/: laptop.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; the value is TOML. May be repeated."),
]
Only = Annotated[str | None, typer.Option(help="This stage alone, on the artifacts that exist and on given results.")]
From = Annotated[
    str | None,
    typer.Option("--from", help="Start at this stage; artifacts of the stages before it must exist or be given."),
]
Until = Annotated[str | None, typer.Option(help="Stop after this stage.")]


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"klear {version('klear')}")
        raise typer.Exit


@app.callback()
def klear(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Turn a base language model into a reasoning model. Scores have confidence intervals; all answers are kept.

    Begin with: klear run laptop
    """


@app.command(rich_help_panel=RUN)
def run(
    profile: Profile,
    overrides: Overrides = None,
    only: Only = None,
    from_: From = None,
    until: Until = None,
    rerun_from: Annotated[
        str | None,
        typer.Option(
            "--rerun-from", help="Run this stage and all that depend on it again, though nothing has changed."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run, and stop.")] = False,
) -> None:
    """Run the pipeline. Existing artifacts are reused, and a stage that was killed resumes where it stopped.

    klear run configs/laptop

    klear run configs/laptop --set seed=1 --set rl.loss.beta_low=0.5

    klear run configs/laptop --until curate --set 'curate.sources=["problems.jsonl"]'
    """
    from flows.environment import StageSelection
    from flows.plan_view import show_plan
    from flows.run import carry_out
    from klear_core.pipeline.graph import stages_of

    config = _config(profile, overrides)
    selection = StageSelection(only=only, from_=from_, until=until, rerun_from=rerun_from)
    if dry_run:
        chosen, again = selection.of(stages_of(config))
        show_plan(config, chosen, again=again)
    else:
        carry_out(config, selection)


@app.command(rich_help_panel=RUN)
def submit(  # noqa: PLR0913, PLR0917  options of a command
    profile: Profile,
    to: Annotated[Literal["slurm", "ray", "kube", "prefect"], typer.Option("--to", help="Where the run starts.")],
    overrides: Overrides = None,
    only: Only = None,
    from_: From = None,
    until: Until = None,
    queue: Annotated[str | None, typer.Option(help="Slurm's partition, Kueue's queue, Prefect's work pool.")] = None,
    priority: Annotated[str | None, typer.Option(help="Slurm's QOS, Kueue's priority, Prefect's work queue.")] = None,
    deadline: Annotated[str | None, typer.Option(help="End the run this long after submission: 24h.")] = None,
    retry: Annotated[
        str | None, typer.Option(help="Start it again after these events: no-capacity,error,interruption.")
    ] = None,
    retry_for: Annotated[str | None, typer.Option("--for", help="Start it again for this long: 6h.")] = None,
    idle_kill: Annotated[str | None, typer.Option(help="End the run if its GPUs compute less: 10%/1h.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print plan, files and commands, and stop.")] = False,
) -> None:
    """Start a run on a cluster: plan it for the nodes of workspace.submit, write its files, and submit them.

    klear submit klear_8b --to slurm --queue gpu --set workspace.submit.gpus_per_node=8 --dry-run

    klear submit klear_8b --to kube --retry error,interruption --for 2d --deadline 5d
    """
    from flows.environment import StageSelection
    from flows.submit import submit as submit_run

    given = {
        "queue": queue,
        "priority": priority,
        "deadline": deadline,
        "retry": None if retry is None else [word.strip() for word in retry.split(",") if word.strip()],
        "retry_for": retry_for,
        "idle_kill": idle_kill,
    }
    # As TOML in quotes: a queue may be called 7 or true.
    asked = [
        f"workspace.submit.{name}={json.dumps(value, ensure_ascii=False)}"
        for name, value in given.items()
        if value not in (None, "")
    ]
    config = _config(profile, [*(overrides or []), *asked])
    submit_run(config, to, StageSelection(only=only, from_=from_, until=until), is_dry_run=dry_run)


@app.command(rich_help_panel=RUN)
def ablate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A grid, such as configs/ablations/losses_hot.toml, or its name: losses_hot."
        ),
    ],
    overrides: Overrides = None,
    profile: Annotated[
        str | None, typer.Option(help="Another profile that the grid has settings for, such as klear_8b.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count what would run, and stop.")] = False,
) -> None:
    """Run a profile in variants, at several learning rates and seeds, and compare them in a table with intervals.

    klear ablate configs/ablations/losses_hot.toml

    klear ablate configs/ablations/losses_hot.toml --set workspace.root=/data/klear

    klear ablate accuracy_filter --profile klear_8b --dry-run
    """
    from flows.ablate import GridOptions, ablate_grid

    ablate_grid(GridOptions(file=file, profile=profile, overrides=tuple(overrides or ()), is_dry_run=dry_run))


@app.command(rich_help_panel=RUN)
def plan(
    profile: Profile,
    overrides: Overrides = None,
    with_config: Annotated[
        bool, typer.Option("--config", help="Also print all settings with their values, defaults included, as JSON.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Read artifacts byte by byte; without this option names and sizes are compared."),
    ] = False,
    is_exact: Annotated[
        bool, typer.Option("--exact", help="Measure the memory of each training on fake tensors, in up to a minute.")
    ] = False,
    only: Only = None,
    from_: From = None,
    until: Until = None,
) -> None:
    """Validate a profile and show what a run would do: stages, reuse, damaged artifacts, tokens, memory. Runs nothing.

    klear plan configs/klear_8b

    klear plan configs/laptop --set rl.optim.lr=3e-4
    """
    from flows.environment import StageSelection
    from flows.plan_view import show_plan
    from klear_core.pipeline.graph import stages_of

    config = _config(profile, overrides)
    chosen, _ = StageSelection(only=only, from_=from_, until=until).of(stages_of(config))
    checked_by: CheckedBy = "content" if check else "size"
    show_plan(config, chosen, checked_by=checked_by, with_config=with_config, is_exact=is_exact)


@app.command(rich_help_panel=RUN)
def doctor(
    with_gpu: Annotated[
        bool,
        typer.Option(
            "--gpu", help="Ask driver, torch, vLLM and the nodes, and compare all fast paths with plain operations."
        ),
    ] = False,
    store: Annotated[str, typer.Option(help="URL of a shared store (workspace.store) to check as well.")] = "",
) -> None:
    """Check Python, torch, C compiler, Ray, vLLM, firejail, GPU, memory and disk, and say how to fix what is wrong."""
    from flows.doctor import check_machine, check_paths, check_store, show_checks, show_paths

    checks = [] if with_gpu else check_machine()
    if store:
        checks.append(check_store(store))
    if with_gpu and not any(check.is_fatal for check in checks):
        from flows.doctor_gpu import check_gpu_machine

        checks += check_gpu_machine()
    show_checks(checks)
    if any(check.is_fatal for check in checks):
        raise typer.Exit(1)
    if with_gpu and not show_paths(check_paths()):
        raise typer.Exit(1)


@app.command(rich_help_panel=RUN)
def curate(
    sources: Annotated[list[str], typer.Argument(help="Files, folders or globs of problems in a published format.")],
    out: Annotated[Path, typer.Option(help="Folder for the result; new, empty, or of an earlier such command.")],
    benchmarks: Annotated[
        list[str] | None, typer.Option("--benchmark", help="File of benchmark questions to drop; may be repeated.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Curate files alone: read, deduplicate, decontaminate and tag them, and say where every row went.

    klear curate math/*.parquet gsm8k.jsonl --benchmark aime24.jsonl --out curated

    klear curate prompts.jsonl --out curated --set curate.dedup.near.threshold=0.8
    """
    from flows.curate_files import curate_files

    curate_files(sources, benchmarks or [], overrides or [], out=out)


@app.command(rich_help_panel=SCORE)
def judge(
    file: Annotated[
        Path,
        typer.Argument(help="JSONL (also .gz, .zst), JSON, Parquet or Arrow; a row has id, response and reference."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="verify.KEY=VALUE", help="Override a judge setting.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the verdicts, one row per answer: id, outcome, score, detail.")
    ] = None,
    bare_code: Annotated[
        bool, typer.Option("--bare-code", help="Responses are programs, without a fence around them.")
    ] = False,
) -> None:
    """Judge the answers in a file and print a table of outcomes.

    klear judge answers.jsonl --out verdicts.jsonl

    klear judge programs.jsonl --bare-code --set verify.code.score=hard

    klear judge short_answers.jsonl --set verify.tags=none     (models that write no think tags)
    """
    from flows.stored_answers import judge as judge_answers

    judge_answers(file, overrides or [], out=out, bare_code=bare_code)


# Panels and commands in `klear --help` are in the order of these calls.
app.add_typer(runs, name="runs", rich_help_panel=LOOK)
app.command(rich_help_panel=LOOK)(show)
app.command(rich_help_panel=LOOK)(chat)
app.command(rich_help_panel=LOOK)(disk)
rl_app.command()(replay)
app.command(rich_help_panel=SERVE)(ui)
app.command(rich_help_panel=SERVE)(sweep)
app.command(rich_help_panel=SERVE)(gc)


@app.command(rich_help_panel=RUN)
def bench(
    name: Annotated[str, typer.Argument(help="Name of a file bench_NAME.py under tests/bench.")],
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder of a model to measure; by default one of the demo's size.")
    ] = None,
) -> None:
    """Run one benchmark of this checkout and print a table, then a JSON line per measurement.

    klear bench sampler --model models/SmolLM2-135M
    """
    if not _BENCHMARKS.is_dir():
        raise ConfigError(f"klear bench needs a checkout of the repository: there is no {_BENCHMARKS}")
    files = {path.stem.removeprefix("bench_"): path for path in sorted(_BENCHMARKS.rglob("bench_*.py"))}
    if name not in files:
        raise ConfigError(f"no benchmark {name!r}; {meant(name, [*files], 'benchmarks')}")
    measure = runpy.run_path(str(files[name]))["measure"]
    options = {} if model is None else {"model": model}
    if options and "model" not in signature(measure).parameters:
        raise ConfigError(f"klear bench {name} measures no given model; leave --model out")
    measures: Sequence[Mapping[str, object]] = measure(**options)
    table = Table("measure", "value", "unit", "target", "ok", box=None)
    for m in measures:
        value = f"{m['value']:.4g}" if isinstance(m["value"], float) else str(m["value"])
        table.add_row(str(m["name"]), value, str(m["unit"]), str(m["target"]), "yes" if m["ok"] else "NO")
    Console().print(table)
    for m in measures:
        print(json.dumps(m))


def main() -> None:
    """Run the command line; a KlearError ends in one message and exit status 2 if it is permanent, else 1.

    An interrupt ends with status 130, SIGUSR1 with REQUEUE_STATUS, a limit of the run with LIMIT_STATUS.
    """
    bypass_proxies_for_loopback()
    escape_unprintable()
    try:
        try:
            _run_command()
        finally:
            exit_at_once_when_interrupted()
    except KeyboardInterrupt as e:  # another signal, while the end of the command was being told or its handlers set
        exit_at_once_when_interrupted()
        sys.exit(_status_of(e))


def _run_command() -> None:
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with reliable_interrupts():
            app(standalone_mode=True)
    except KlearError as e:
        errors.print(f"[bold red]error:[/] {escape(str(e))}")
        sys.exit(2 if e.is_permanent else 1)
    except PermissionError as e:  # any path of a command may be in a folder of somebody else
        if e.filename is None:
            raise
        errors.print(f"[bold red]error:[/] {escape(f'{e.filename}: {e.strerror}')}")
        sys.exit(2)
    except (SystemExit, KeyboardInterrupt) as e:  # click exits for an interrupt, unless a second one follows
        status = _status_of(e)
        if status is not None:
            sys.exit(status)
        raise


def _status_of(end: BaseException) -> int | None:
    """Return the exit status of a command that a signal or a limit has ended; None if nothing of that kind did."""
    causes = tuple(chain_of(end))
    for kind, status in ((Requeued, REQUEUE_STATUS), (LimitReached, LIMIT_STATUS), (KeyboardInterrupt, 130)):
        if any(isinstance(cause, kind) for cause in causes):
            return status
    return None


def _config(profile: str, overrides: list[str] | None) -> PipelineConfig:
    from flows.environment import profile_folder
    from klear_core.config.data_jobs import sections_used, unused_overrides
    from klear_core.config.load import load_profile
    from klear_core.pipeline.downloads import pinned
    from klear_core.pipeline.graph import stages_of

    config = pinned(load_profile(profile_folder(profile), overrides or []))
    used = sections_used((stage.name, stage.kind) for stage in stages_of(config))
    warnings = Console(stderr=True, highlight=False, soft_wrap=True)
    for override, section in unused_overrides(overrides or [], used).items():
        told = f"--set {override!r}: no stage of this run uses settings of {section}"
        warnings.print(f"[yellow]warning[/] {escape(told)}")
    return config
