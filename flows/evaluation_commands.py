"""The commands of `klear` about evaluations that exist: judge again, look at answers, compare, promote, publish."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

evaluations = typer.Typer(rich_markup_mode="rich")

Root = Annotated[Path, typer.Option(help="Workspace to look in.")]
ChampionOf = Annotated[
    str, typer.Option("--model", help="Registered model in MLflow, as promote.registered_model names it.")
]
LayoutOption = Annotated[
    Literal["klear", "lm-eval", "lighteval", "matharena", "qwen-math", "rows"] | None,
    typer.Option(help="Layout of another program's files; by default detected from the first row."),
]


@evaluations.command()
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

    rejudge_answers(which, overrides or [], root=root, layout=layout, out=out, num_samples=num_samples)


@evaluations.command()
def answers(
    which: Annotated[
        list[str],
        typer.Argument(metavar="ANSWERS...", help="Stages, fingerprints, folders, or files of another program."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the page; by default below answers/ in the workspace.")
    ] = None,
    layout: LayoutOption = None,
    root: Root = Path("runs"),
) -> None:
    """Write a page with every answer of one or several evaluations: filter by flipped, truncated, disagreed, unparsed.

    klear answers sft rl

    klear answers evaluate_rl samples_aime24.jsonl --root /data/klear
    """
    from flows.stored_answers import view_answers

    view_answers(which, root=root, layout=layout, out=out)


@evaluations.command()
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


@evaluations.command()
def champion(root: Root = Path("runs"), model: ChampionOf = "klear") -> None:
    """Show the champion in MLflow's model registry, the evidence that it was promoted on, and earlier champions.

    klear champion

    klear champion --root /data/klear --model math
    """
    from flows.champion import show_champion

    show_champion(model, root=root)


@evaluations.command()
def rollback(
    why: Annotated[str, typer.Option(help="Reason, for the record.")],
    by: Annotated[str, typer.Option(help="Person, for the record; by default the name of the user.")] = "",
    root: Root = Path("runs"),
    model: ChampionOf = "klear",
) -> None:
    """Make the previous champion the champion again. The model that is rolled back is not promoted again.

    klear rollback --why "answers in Chinese"
    """
    from flows.champion import roll_back

    roll_back(model, root=root, why=why, by=by)


@evaluations.command()
def publish(
    model: Annotated[str, typer.Argument(help="A stage that makes a model (its newest), a fingerprint, or a folder.")],
    to: Annotated[str, typer.Option(help="A new folder, or a name on the Hub, owner/name, to upload to.")],
    licence: Annotated[
        str, typer.Option(help="Licence of the model, as the Hub spells it: apache-2.0; by default the base model's.")
    ] = "",
    is_private: Annotated[
        bool, typer.Option("--private/--public", help="Whether a repository that is made on the Hub is private.")
    ] = True,
    root: Root = Path("runs"),
) -> None:
    """Write a model as a Hugging Face folder with a card: scores with intervals, data, licences, lineage, settings.

    klear publish rl --to ./published/my-model --licence apache-2.0

    klear publish rl --to my-name/my-model     (needs HF_TOKEN)
    """
    from flows.publish import publish as publish_model

    publish_model(model, to, root=root, licence=licence, is_private=is_private)


@evaluations.command()
def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="A Hugging Face folder, owner/name or owner/name@revision on the Hub, or a stage: rl."),
    ],
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
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer; by default 32,768, or that of the profile.")
    ] = None,
    engine: Annotated[
        Literal["auto", "torch", "vllm"], typer.Option(help="auto: torch for Qwen3 folders, vLLM for other models.")
    ] = "auto",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; may be repeated.")
    ] = None,
    root: Annotated[Path, typer.Option(help="Workspace for the result.")] = Path("runs"),
) -> None:
    """Score any model on benchmarks, with intervals; nothing is trained.

    klear evaluate models/Qwen3-8B --benchmarks aime24 --benchmarks mine.jsonl

    klear evaluate owner/name --benchmarks math500.jsonl --samples 4 --engine vllm
    """
    from flows.evaluate_model import Asked, evaluate_model

    asked = Asked(
        model=model,
        benchmarks=benchmarks or [],
        profile=profile,
        num_samples=num_samples,
        max_tokens=max_tokens,
        engine=engine,
        overrides=overrides or [],
        root=root,
    )
    evaluate_model(asked)
