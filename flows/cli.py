"""The `klear` command. Each subcommand imports its modules when it runs, so that `klear --help` is fast."""

from __future__ import annotations

import sys
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from flows.evaluation_commands import evaluations
from flows.interrupts import exit_at_once_when_interrupted, heeded_interrupts
from flows.proxies import spare_own_machine
from klear_core.errors import ConfigError, KlearError

if TYPE_CHECKING:
    from klear_core.artifacts.store import CheckedBy
    from klear_core.config.pipeline import PipelineConfig

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False)
rl_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Replay saved steps of an RL stage.")
app.add_typer(rl_app, name="rl")
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


@app.command()
def run(
    profile: Profile,
    overrides: Overrides = None,
    only: Annotated[str | None, typer.Option(help="Run this stage alone, on the artifacts that exist.")] = None,
    from_: Annotated[
        str | None,
        typer.Option("--from", help="Start at this stage; the artifacts of the stages before it must exist."),
    ] = None,
    until: Annotated[str | None, typer.Option(help="Stop after this stage.")] = None,
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
    from flows import console
    from flows.watched import carry_out
    from klear_core.pipeline.graph import select_stages, stages_again, stages_of

    config = _config(profile, overrides)
    stages = stages_of(config)
    chosen = select_stages(stages, only=only, from_=from_, until=until)
    if dry_run:
        again = stages_again(stages, rerun_from, chosen)
        console.show_plan(config, chosen, again=again)
        return
    carry_out(config, chosen, only=only, from_=from_, until=until, rerun_from=rerun_from)


@app.command()
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


@app.command()
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
) -> None:
    """Validate a profile and show what a run would do: stages, reuse, damaged artifacts, tokens, memory. Runs nothing.

    klear plan configs/klear_8b

    klear plan configs/laptop --set rl.optim.lr=3e-4
    """
    from flows import console

    config = _config(profile, overrides)
    checked_by: CheckedBy = "content" if check else "size"
    console.show_plan(config, checked_by=checked_by, with_config=with_config, is_exact=is_exact)


@app.command()
def doctor(
    with_gpu: Annotated[
        bool, typer.Option("--gpu", help="Compare the fast paths of GPU and CPU with plain operations; takes a minute.")
    ] = False,
    store: Annotated[str, typer.Option(help="URL of a shared store (workspace.store) to check as well.")] = "",
) -> None:
    """Check Python, torch, C compiler, Ray, vLLM, firejail, GPU, memory and disk, and say how to fix what is wrong."""
    from flows.doctor import check_machine, check_store, show_checks

    if with_gpu:
        from flows.doctor_gpu import check_paths, show_paths

        if not show_paths(check_paths()):
            raise typer.Exit(1)
        return
    checks = check_machine()
    if store:
        checks.append(check_store(store))
    show_checks(checks)
    if any(check.is_fatal for check in checks):
        raise typer.Exit(1)


@app.command()
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


@app.command()
def show(
    artifact: Annotated[
        str,
        typer.Argument(
            help="A stage or kind (its newest artifact), a fingerprint or its first digits, a folder; or: problem."
        ),
    ],
    problem_id: Annotated[
        str | None, typer.Argument(help="After the word problem: the id of the problem or its first digits.")
    ] = None,
    root: Annotated[Path, typer.Option(help="Workspace to look in.")] = Path("runs"),
    num_records: Annotated[
        int, typer.Option("--records", min=0, help="Number of records to print from each table.")
    ] = 2,
) -> None:
    """Show an artifact: its manifest, its ledger and its first records; or everything about one problem.

    klear show evaluate_sft --root /data/klear

    klear show 3f2a91 --records 5

    klear show problem 91b0c2
    """
    from flows.problem import show_problem
    from flows.show import show_artifact

    if artifact == "problem":
        show_problem(problem_id or "", root=root)
        return
    if problem_id is not None:
        raise ConfigError(f"show {artifact} {problem_id}: only `klear show problem` takes a second argument")
    show_artifact(artifact, root=root, num_records=num_records)


@app.command()
def chat(
    model: Annotated[
        str,
        typer.Argument(
            help="A stage (base, sft, rl: its newest model), an artifact, a model folder, or owner/name on the Hub."
        ),
    ],
    question: Annotated[
        str | None, typer.Argument(help="The question; without it, every line of standard input is one.")
    ] = None,
    root: Annotated[Path, typer.Option(help="Workspace to look in.")] = Path("runs"),
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Sampling temperature; 0 is greedy.")] = 0.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer; by default what the model's window leaves.")
    ] = None,
    num_samples: Annotated[int, typer.Option("--samples", min=1, help="Number of answers to each question.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    engine: Annotated[
        Literal["auto", "torch", "vllm"], typer.Option(help="auto: torch for Qwen3 models, vLLM for others.")
    ] = "auto",
) -> None:
    """Ask a model of this workspace, any model folder, or a model of the Hub, a question of your own.

    klear chat rl 'mod 10: 3,+4,*7,-2,+5=?'

    klear chat sft --temperature 1 --samples 4 < questions.txt

    klear chat owner/name@revision 'What is 2+2?' --engine vllm
    """
    from flows.chat import chat as ask
    from klear_core.generate.chat import ChatParams

    params = ChatParams(temperature=temperature, max_tokens=max_tokens, num_samples=num_samples, seed=seed)
    ask(model, question, params, root=root, engine=engine)


@rl_app.command()
def replay(
    step: Annotated[int, typer.Argument(min=1, help="RL step as logged; it must be in rl.runtime.save_steps.")],
    losses: Annotated[
        list[str] | None,
        typer.Option(
            "--loss",
            metavar="KIND[,KEY=VALUE]",
            help="Loss to try; may be repeated. Default: all losses with their defaults.",
        ),
    ] = None,
    artifact: Annotated[
        str,
        typer.Option("--of", help="An RL stage (its newest artifact), a fingerprint or its first digits, or a folder."),
    ] = "rl",
    root: Annotated[Path, typer.Option(help="Workspace to look in.")] = Path("runs"),
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of learner processes; by default that of the run.")
    ] = None,
) -> None:
    """Train other losses on a saved step of a run, and show what would have differed. Samples nothing.

    klear rl replay 40

    klear rl replay 40 --loss clip --loss gppo,beta_low=0.25 --loss dgpo,high_root=3 --root /data/klear
    """
    from flows.replay import replay_step

    replay_step(step, artifact, losses or [], root=root, num_workers=workers)


@app.command()
def ui(
    root: Annotated[Path, typer.Option(help="Workspace whose runs to look at.")] = Path("runs"),
    prefect_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the Prefect UI.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the MLflow UI.")] = 5000,
) -> None:
    """Serve the Prefect and MLflow UIs of a workspace, until Ctrl-C.

    klear ui

    klear ui --root /data/klear --prefect-port 4201
    """
    from flows.ui import serve_uis

    serve_uis(root, prefect_port=prefect_port, mlflow_port=mlflow_port)


@app.command()
def sweep(
    pool: Annotated[str, typer.Option(help="Work pool whose crashed runs to restart.")] = "klear",
) -> None:
    """Restart crashed runs of a work pool until Ctrl-C. Start it beside the worker; the server is at PREFECT_API_URL.

    klear sweep --pool klear
    """
    from flows.sweep import sweep_until_interrupted

    sweep_until_interrupted(pool, lambda line: typer.echo(f"{datetime.now():%H:%M:%S} {line}"))


@app.command()
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
    from flows import console

    console.judge(file, overrides or [], out=out, bare_code=bare_code)


@app.command()
def bench(name: Annotated[str, typer.Argument(help="Name of a file bench_NAME.py under tests/bench.")]) -> None:
    """Run one benchmark of this checkout and print a table, then a JSON line per measurement.

    klear bench sampler
    """
    from flows.bench import run_bench

    run_bench(name)


def main() -> None:
    """Run the command line; a KlearError ends in one message and exit status 2 if it is permanent, else 1."""
    spare_own_machine()
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with heeded_interrupts():
            app(standalone_mode=True)
    except KlearError as e:
        errors.print(f"[bold red]error:[/] {_escaped(str(e))}")
        sys.exit(2 if e.is_permanent else 1)
    finally:
        exit_at_once_when_interrupted()


def _config(profile: str, overrides: list[str] | None) -> PipelineConfig:
    from flows.resolve import profile_folder
    from klear_core.config.load import load_profile

    return load_profile(profile_folder(profile), overrides or [])


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
