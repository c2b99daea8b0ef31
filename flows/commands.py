"""The commands of `klear` about results, and those that serve until Ctrl-C; `run_commands` has those about runs.

Importing this loads no work of theirs.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from klear_core.config.settings import expanded
from klear_core.errors import ConfigError

RUN, SCORE, LOOK, SERVE = "Run", "Score", "Look", "Serve"
"""Panels of `klear --help`."""

evaluations = typer.Typer(rich_markup_mode="rich")


def workspace_folder(root: Path | None) -> Path | None:
    """Return the folder that `--root` names, below the home folder where it begins with `~`, as `workspace.root` may.

    ConfigError if a file is there.
    """
    root = root and expanded(root)
    if root is not None and root.exists() and not root.is_dir():
        raise ConfigError(f"--root {root}: a file; name the folder of a workspace")
    return root


Root = Annotated[Path, typer.Option(callback=workspace_folder, help="Workspace to look in.")]
ChampionOf = Annotated[
    str, typer.Option("--model", help="Registered model in MLflow, as promote.registered_model names it.")
]
LayoutOption = Annotated[
    Literal[
        "klear", "lm-eval", "lighteval", "matharena", "qwen-math", "evalchemy", "livecodebench", "nemo-skills",
        "inspect", "rows",
    ]
    | None,
    typer.Option(help="Layout of another program's files; by default detected from the first row."),
]  # fmt: skip
FieldsOption = Annotated[
    str,
    typer.Option(
        metavar="'KEY=PLACE ...'",
        help="Places of the values in files of any layout: 'question=… answer=… response=… score=…', in quotes.",
    ),
]


@evaluations.command(rich_help_panel=SCORE)
def rejudge(
    which: Annotated[
        str,
        typer.Argument(
            metavar="ANSWERS",
            help="A stage (its newest evaluation), a fingerprint, a folder, or a file of another program.",
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="verify.KEY=VALUE", help="Override a judge setting.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the result; by default below rejudged/ in the workspace.")
    ] = None,
    layout: LayoutOption = None,
    fields: FieldsOption = "",
    num_samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Stop if a problem has fewer stored samples than this.")
    ] = None,
    root: Root = Path("runs"),
) -> None:
    """Judge stored answers again with another judge or setting, and show what changed, answer by answer.

    klear rejudge rl --set verify.math.box=required

    klear rejudge samples_gsm8k_2026-01-31.jsonl --set verify.tags=none     (lm-evaluation-harness)
    """
    from flows.stored_answers import rejudge_answers

    rejudge_answers(which, overrides or [], root=root, layout=layout, fields=fields, out=out, num_samples=num_samples)


@evaluations.command(rich_help_panel=LOOK)
def answers(
    which: Annotated[
        list[str],
        typer.Argument(metavar="ANSWERS...", help="Stages, fingerprints, folders, or files of another program."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the page; by default below answers/ in the workspace.")
    ] = None,
    layout: LayoutOption = None,
    fields: FieldsOption = "",
    inspect: Annotated[
        Path | None, typer.Option(help="Write them to this folder as logs of Inspect instead, for `inspect view`.")
    ] = None,
    root: Root = Path("runs"),
) -> None:
    """Write a page with every answer of one or several evaluations: filter by flipped, cut off, disagreed, no answer.

    klear answers sft rl

    klear answers evaluate_rl samples_aime24.jsonl --root /data/klear

    klear answers mine.jsonl --fields 'question=prompt answer=gold response=outputs score=correct'

    klear answers rl --inspect logs
    """
    from flows.stored_answers import view_answers

    view_answers(which, root=root, layout=layout, fields=fields, out=out, inspect=inspect)


@evaluations.command(rich_help_panel=SCORE)
def compare(
    which: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...", help="The fingerprint or folder of a run's report, or a workspace (its newest run)."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the page; by default below compared/ in the workspace.")
    ] = None,
    root: Root = Path("runs"),
) -> None:
    """Put runs side by side on one page: scores, paired differences, flipped answers, curves, cost and settings.

    klear compare 06a1a551 9cd23e10

    klear compare runs /data/other_runs
    """
    from flows.compare import compare as compare_runs

    compare_runs(which, root=root, out=out)


@evaluations.command(rich_help_panel=SCORE)
def gate(
    old: Annotated[
        str, typer.Argument(help="The evaluation to compare with: its folder, its fingerprint, or a model's.")
    ],
    new: Annotated[str, typer.Argument(help="The evaluation to decide on, named likewise.")],
    policy: Annotated[
        Path | None,
        typer.Option(help="TOML file: margin, margins, tiers and gain (docs/promotion.md); by default none."),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print the verdict and its figures as JSON.")] = False,
    root: Root = Path("runs"),
) -> None:
    """Check that an evaluation is no worse than another one. Exit status: 0 passed, 1 failed, 3 inconclusive, 2 error.

    klear gate sft rl

    klear gate evaluate/06a1a551 evaluate/9cd23e10 --policy gate.toml
    """
    from flows.compare import gate_evaluations

    raise typer.Exit(gate_evaluations(old, new, policy, is_json=is_json, root=root))


@evaluations.command(rich_help_panel=LOOK)
def champion(root: Root = Path("runs"), model: ChampionOf = "klear") -> None:
    """Show the champion in MLflow's model registry, the evidence that it was promoted on, and earlier champions.

    klear champion

    klear champion --root /data/klear --model math
    """
    from flows.compare import show_champion

    show_champion(model, root=root)


@evaluations.command(rich_help_panel=SERVE)
def rollback(
    why: Annotated[str, typer.Option(help="Reason, for the record.")],
    by: Annotated[str, typer.Option(help="Person, for the record; by default the name of the user.")] = "",
    root: Root = Path("runs"),
    model: ChampionOf = "klear",
) -> None:
    """Make the previous champion the champion again. The model that is rolled back is not promoted again.

    klear rollback --why "answers in Chinese"
    """
    from flows.compare import roll_back

    roll_back(model, root=root, why=why, by=by)


@evaluations.command(rich_help_panel=SERVE)
def publish(
    model: Annotated[str, typer.Argument(help="A stage that makes a model (its newest), a fingerprint, or a folder.")],
    to: Annotated[str, typer.Option(help="A new folder, or a name on the Hub, owner/name, to upload to.")],
    licence: Annotated[
        str, typer.Option(help="Licence of the model, as the Hub spells it: apache-2.0; by default the base model's.")
    ] = "",
    is_private: Annotated[
        bool, typer.Option("--private/--public", help="Whether a repository that is made on the Hub is private.")
    ] = True,
    gguf: Annotated[
        Literal["f16", "q8_0"] | None,
        typer.Option(help="Write a GGUF file beside it, for llama.cpp and Ollama, of 16 or 8 bits a weight."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="A stage, such as distill, whose problems or traces to write as a data set beside it, TO-data.",
        ),
    ] = None,
    root: Root = Path("runs"),
) -> None:
    """Write a model as a Hugging Face folder with a card: scores with intervals, data, licences, lineage, settings.

    klear publish rl --to ./published/my-model --licence apache-2.0

    klear publish rl --to ./published/my-model --gguf q8_0

    klear publish rl --to my-name/my-model     (needs HF_TOKEN)
    """
    from flows.compare import publish as publish_model

    publish_model(model, to, root=root, licence=licence, is_private=is_private, gguf=gguf, data=data or [])


@evaluations.command(rich_help_panel=SCORE)
def evaluate(  # noqa: PLR0913, PLR0917  one option each
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face folder, a GGUF file, owner/name or owner/name@revision on the Hub, a stage, or the "
            "address of an OpenAI-compatible server."
        ),
    ],
    model_name: Annotated[
        str | None, typer.Option("--model", "--model-name", help="Its name at the server, if MODEL is an address.")
    ] = None,
    benchmarks: Annotated[
        list[str] | None,
        typer.Option("--benchmarks", help="A file of problems, or a name such as aime24; may be repeated."),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Profile whose benchmarks, sampling and judges to use, such as klear_8b.")
    ] = None,
    num_samples: Annotated[
        int | None,
        typer.Option("--samples", min=1, help="Number of answers to each problem; by default that of the benchmark."),
    ] = None,
    num_problems: Annotated[
        int | None,
        typer.Option(
            "--problems", min=1, help="Number of problems of each benchmark, drawn by the seed; default: all."
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Prompt of all benchmarks, such as boxed, or a template with {question}."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens of an answer; default: that of the profile or model, else 32,768."),
    ] = None,
    engine: Annotated[
        Literal["auto", "torch", "vllm"],
        typer.Option(
            help="auto: torch for folders of Llama, Qwen2, Qwen3 without scaled positions and answers of at most 8,192 "
            "tokens; vLLM for others."
        ),
    ] = "auto",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; may be repeated.")
    ] = None,
    root: Annotated[Path, typer.Option(callback=workspace_folder, help="Workspace for the result.")] = Path("runs"),
) -> None:
    """Score any model on benchmarks, with intervals; nothing is trained.

    klear evaluate models/Qwen3-8B --benchmarks aime24 --benchmarks mine.jsonl

    klear evaluate owner/name --benchmarks math500.jsonl --samples 4 --engine vllm

    klear evaluate http://127.0.0.1:8000/v1 --model r1 --benchmarks aime24
    """
    from flows.evaluate_model import EvaluateOptions, evaluate_model

    options = EvaluateOptions(
        model=model,
        model_name=model_name,
        benchmarks=benchmarks or [],
        profile=profile,
        num_samples=num_samples,
        num_problems=num_problems,
        prompt=prompt,
        max_tokens=max_tokens,
        engine=engine,
        overrides=overrides or [],
        root=root,
    )
    evaluate_model(options)


# ---- look ----


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
    root: Root = Path("runs"),
    num_records: Annotated[
        int, typer.Option("--records", min=0, help="Number of records to print from each table.")
    ] = 2,
) -> None:
    """Show an artifact: its manifest, its ledger and its first records; or everything about one problem.

    klear show evaluate_sft --root /data/klear

    klear show 3f2a91 --records 5

    klear show problem 91b0c2
    """
    from flows.show import show_artifact, show_problem

    if artifact == "problem":
        show_problem(problem_id or "", root=root)
        return
    if problem_id is not None:
        raise ConfigError(f"show {artifact} {problem_id}: only `klear show problem` takes a second argument")
    show_artifact(artifact, root=root, num_records=num_records)


def chat(
    model: Annotated[
        str,
        typer.Argument(
            help="A stage (base, sft, rl: its newest model), an artifact, a folder or GGUF file of any model, or "
            "owner/name on the Hub."
        ),
    ],
    question: Annotated[
        str | None, typer.Argument(help="The question; without it, every line of standard input is one.")
    ] = None,
    root: Root = Path("runs"),
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Sampling temperature; 0 is greedy.")] = 0.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer; by default what the model's window leaves.")
    ] = None,
    num_samples: Annotated[int, typer.Option("--samples", min=1, help="Number of answers to each question.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    engine: Annotated[
        Literal["auto", "torch", "vllm"],
        typer.Option(help="auto: torch for Llama, Qwen2, Qwen3 without scaled positions; vLLM for others."),
    ] = "auto",
) -> None:
    """Ask a model of this workspace, any model folder, or a model of the Hub, a question of your own.

    klear chat rl 'mod 10: 3,+4,*7,-2,+5=?'

    klear chat sft --temperature 1 --samples 4 < questions.txt

    klear chat owner/name@revision 'What is 2+2?' --engine vllm
    """
    from flows.evaluate_model import chat as ask
    from klear_core.generate.chat import ChatParams

    params = ChatParams(temperature=temperature, max_tokens=max_tokens, num_samples=num_samples, seed=seed)
    ask(model, question, params, root=root, engine=engine)


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
    root: Root = Path("runs"),
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of learner processes; by default that of the run.")
    ] = None,
) -> None:
    """Train other losses on a saved step of a run, and show what would have differed. Samples nothing.

    klear rl replay 40

    klear rl replay 40 --loss clip --loss gppo,beta_low=0.25 --loss dgpo,high_root=3 --root /data/klear
    """
    from flows.compare import replay_step

    replay_step(step, artifact, losses or [], root=root, num_workers=workers)


# ---- serve ----


def ui(
    root: Annotated[Path, typer.Option(callback=workspace_folder, help="Workspace whose runs to look at.")] = Path(
        "runs"
    ),
    runs_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page of all runs.")] = 5001,
    prefect_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the Prefect UI.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the MLflow UI.")] = 5000,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all, without a password.")] = "127.0.0.1",
) -> None:
    """Serve a page of all runs of a workspace, and its Prefect and MLflow UIs, until Ctrl-C.

    klear ui

    klear ui --root /data/klear --prefect-port 4201
    """
    from flows.servers import UiPorts, serve_uis

    serve_uis(root, ports=UiPorts(runs=runs_port, prefect=prefect_port, mlflow=mlflow_port), host=host)


def sweep(
    pool: Annotated[str, typer.Option(help="Work pool whose crashed runs to restart.")] = "klear",
) -> None:
    """Restart crashed runs of a work pool until Ctrl-C. Start it beside the worker; the server is at PREFECT_API_URL.

    klear sweep --pool klear
    """
    from flows.sweep import sweep_until_interrupted

    sweep_until_interrupted(pool, lambda line: typer.echo(f"{datetime.now():%H:%M:%S} {line}"))
