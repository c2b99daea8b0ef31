"""The commands of `klear` that inspect results: show an artifact, ask a model, replay a step of RL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from klear_core.errors import ConfigError


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
