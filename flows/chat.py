"""`klear chat`: ask a model that a run made a question of your own."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import DownloadColumn, Progress
from rich.text import Text

from flows.find import find_artifact
from flows.named_model import can_sample_in_torch, on_hub
from klear_core.artifacts.model_files import check_model, download
from klear_core.config.engine import LocalEngineConfig, TorchEngineConfig, VllmEngineConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.cpus import usable_cpus
from klear_core.errors import ArtifactError, ConfigError, DataError
from klear_core.generate.chat import ChatModel, ChatParams, open_chat
from klear_core.pipeline.graph import stages_of
from klear_core.prompts import THINK_CLOSE
from klear_core.report.text import visible
from klear_core.train.base import model_folder, wanted_window
from klear_core.types import Completion

Engine = Literal["auto", "torch", "vllm"]
_ENGINES: dict[str, LocalEngineConfig] = {"torch": TorchEngineConfig(), "vllm": VllmEngineConfig()}


def chat(which: str, question: str | None, params: ChatParams, *, root: Path, engine: Engine) -> None:
    """Print the answers to the question or, without one, to every line of standard input.

    A line that the model cannot take does not stop the others; DataError at the end if there was one.
    """
    if params.num_samples > 1 and params.temperature == 0:
        raise ConfigError(
            f"--samples {params.num_samples} at --temperature 0: greedy answers are all the same; raise the temperature"
        )
    if question is not None and not question.strip():
        raise ConfigError("klear chat: the question is empty; without one, each line of standard input is a question")
    console = Console(highlight=False, soft_wrap=True)
    folder, window = _find_model(which, root, Console(stderr=True))
    if engine == "auto":
        engine = "torch" if can_sample_in_torch(folder) else "vllm"
    with asyncio.Runner() as runner:
        model = runner.run(
            open_chat(folder, _ENGINES[engine], num_threads=usable_cpus(), seed=params.seed, window=window)
        )
        try:
            if question is not None:
                _show(console, runner.run(model.ask(question, params)))
            else:
                _answer_lines(runner, model, params, console)
        finally:
            runner.run(model.close())


def _find_model(which: str, root: Path, console: Console) -> tuple[Path, int | None]:
    """Return the Hugging Face folder that `which` names, and its training window if the model's config states less.

    A model of the Hub is downloaded into the Hub's cache, unless it is there.
    """
    if (Path(which) / "config.json").is_file():
        return Path(which), None
    try:
        artifact = find_artifact(which, root)
    except ArtifactError as not_here:
        try:
            published = on_hub(which, console)
            if published is None:
                raise
            check_model(published)
        except ConfigError as e:
            raise ConfigError(f"{not_here}; and as a model of the Hub: {e}") from e
        with Progress(*Progress.get_default_columns(), DownloadColumn(), console=console, transient=True) as bars:
            bar = bars.add_task(published.repo, total=None)
            return download(published, lambda done, total: bars.update(bar, completed=done, total=total)), None
    try:
        return model_folder(artifact), wanted_window(artifact)
    except ArtifactError as e:
        makers = [stage.name for stage in stages_of(PipelineConfig()) if stage.job.makes_model]
        raise ArtifactError(f"{e}; models are made by the stages {', '.join(makers)}") from e


def _answer_lines(runner: asyncio.Runner, model: ChatModel, params: ChatParams, console: Console) -> None:
    num_failed = 0
    for question in _lines():
        try:
            _show(console, runner.run(model.ask(question, params)))
        except DataError as e:
            num_failed += 1
            print(f"error: {e}", file=sys.stderr)  # noqa: T201
    if num_failed:
        raise DataError(f"{num_failed} of the questions could not be asked")


def _lines() -> Iterator[str]:
    """Yield the non-empty lines of standard input; on a terminal, prompt for each."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 must not end the reading
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if line:
            yield line


def _show(console: Console, completions: list[Completion]) -> None:
    """Print the model's text: thinking dimmed, the answer bold, a ruler line above each of several samples."""
    for index, completion in enumerate(completions, 1):
        if len(completions) > 1:
            console.print(Text(f"── {index} of {len(completions)}", style="dim"))
        thinking, tag, answer = completion.text.rpartition(THINK_CLOSE)
        console.print(Text.assemble((visible(thinking + tag), "dim"), (visible(answer), "bold")))
        if completion.finish_reason == "length":
            print(f"cut off after {len(completion.token_ids)} tokens", file=sys.stderr)  # noqa: T201
