"""`klear evaluate` and `klear chat`: score any model on benchmarks, or ask it a question."""

from __future__ import annotations

import asyncio
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.text import Text

from flows.curate_files import shown_progress
from flows.environment import StageSelection, profile_folder
from flows.run import carry_out, make_or_reuse
from flows.show import FoundModel, find_model
from flows.stored_answers import newest_evaluation
from klear_core.artifacts.hub import commit_of
from klear_core.artifacts.manifest import read_manifest
from klear_core.artifacts.model_files import check_model, download
from klear_core.config.data import BenchmarkConfig
from klear_core.config.data_jobs import unused_overrides
from klear_core.config.evaluate import LONGEST_TORCH_ANSWER, EvaluateConfig, EvaluateSamplingConfig
from klear_core.config.known_benchmarks import KNOWN_BENCHMARKS
from klear_core.config.load import apply_override, apply_overrides, read_profile, validate
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.train import HubModelConfig
from klear_core.config.verify import VerifyConfig, has_benchmark_default, sections_of_evaluation
from klear_core.cpus import usable_cpus
from klear_core.data.readers import stem_of
from klear_core.errors import ArtifactError, ConfigError, DataError
from klear_core.generate.chat import ChatModel, ChatParams, EngineChoice, chat_engine, open_chat
from klear_core.generate.decoder.shape import is_supported
from klear_core.hf_config import read_hf_config
from klear_core.pipeline.preflight.exposure import (
    TrainingQuestions,
    given_contamination,
    overlap_with_training,
    questions_of_one_form,
)
from klear_core.prompts import THINK_CLOSE
from klear_core.scores import visible
from klear_core.train.base_model import model_folder
from klear_core.types import Completion

_SECTIONS = ("benchmarks", "evaluate", "verify", "judge", "seed", "data_until")
"""Sections of a profile that an evaluation has."""
_STAGE_SECTIONS = ("evaluate", "promote")
"""Sections of the stages that an evaluation may have."""
_ROWS = ("given.curate", "given.curate_rl", "given.distill")
"""Given problems and traces, which an evaluation does not read."""
_MANY_PARAMS = 50_000_000
"""Parameters from which on our sampler uses all cores. Ours, between 0.17M, where two threads are slower, and 135M."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    """The options of `klear evaluate`."""

    model: str
    model_name: str | None = None
    """Name of the model at the server, if `model` is an address."""
    benchmarks: Sequence[str]
    profile: str | None
    num_samples: int | None
    num_problems: int | None = None
    prompt: str | None = None
    max_tokens: int | None
    engine: Literal["auto", "torch", "vllm"]
    overrides: Sequence[str]
    root: Path


def evaluate_model(options: EvaluateOptions) -> None:
    """Evaluate the model and print its scores; resume what an earlier such command left unfinished."""
    console = Console(highlight=False, soft_wrap=True)
    if options.model.startswith(("http://", "https://")):  # the address of a server
        config = evaluation_config(options, {})
    elif options.model_name is not None:
        raise ConfigError(f"--model {options.model_name}: {options.model} is no address of a server, http://...")
    else:
        found = find_model(options.model, options.root, console)
        inherited = None if options.profile is not None or found.artifact is None else settings_of(found.artifact)
        config = evaluation_config(options, found.as_given(), inherited)
        if inherited is not None:
            console.print(_inherited_line(inherited, config), markup=False)
        if found.artifact is not None:
            config = compared_with_training(config, found.artifact, console)
    carry_out(config, StageSelection())
    console.print(f"answers  klear answers evaluate_model --root {shlex.quote(str(options.root))}", markup=False)


def _served(options: EvaluateOptions) -> dict[str, Any]:
    """Return the engine that is a server at the address asked for."""
    model = options.model
    if not options.model_name:
        raise ConfigError(f"{model} is a server: name its model, --model NAME, as {model}/models lists it")
    if options.engine != "auto":
        raise ConfigError(f"--engine {options.engine}: the model at {model} is served there, by whatever engine")
    return {"kind": "served", "base_url": model, "model": options.model_name}


def evaluation_config(
    options: EvaluateOptions, given: Mapping[str, Any], inherited: InheritedSettings | None = None
) -> PipelineConfig:
    """Return the config of a run that scores a given model alone, or the one at an address; `given` is then empty.

    ConfigError names a benchmark that is not there.

    Sampling and judges are those of the profile, without one those that the model brings, else the defaults, which are
    the paper's.
    """
    tree: dict[str, Any] = {"name": "evaluate"}
    if given:
        tree["given"] = {"evaluate": dict(given)}
    if options.profile is not None:
        profile = read_profile(profile_folder(options.profile))
        tree |= {key: profile[key] for key in _SECTIONS if key in profile}
    if inherited is not None:
        tree |= inherited.sections
    tree["benchmarks"] = _benchmarks(options, tree.get("benchmarks", []))
    tree["workspace"] = {"root": str(options.root)}
    # A profile has chosen its engine; "auto" looks at the model only where there is none.
    has_engine = options.profile is not None or inherited is not None
    if not given:
        tree["evaluate"] = {**tree.get("evaluate", {}), "engine": _served(options)}
    max_tokens = options.max_tokens or (_tokens_of_window(given) if given and not has_engine else None)
    if max_tokens is not None:
        tree = apply_override(tree, f"evaluate.sampling.max_new_tokens={max_tokens}")
    _refuse_unused(options.overrides)
    if given and (not has_engine or options.engine != "auto"):
        engine = _engine(options, given, tree)
        tree = apply_override(tree, f"evaluate.engine.kind={engine}")
        if engine == "torch" and not has_engine:
            tree = apply_override(tree, f"evaluate.runtime.num_threads={_threads(given)}")
    return validate(apply_overrides(tree, options.overrides), origin="klear evaluate")


def _tokens_of_window(given: Mapping[str, Any]) -> int | None:
    """Return the window of a model here if it is less than the paper's budget, which no answer could have then."""
    if given["kind"] == "hub":
        return None  # not known before it is downloaded
    window = read_hf_config(Path(given["path"])).window(given.get("max_position_embeddings"))
    return window if window < EvaluateSamplingConfig().max_new_tokens else None


def _refuse_unused(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a setting that only a training has, so that nobody believes that it had an effect."""
    unused = unused_overrides(overrides, _STAGE_SECTIONS)
    for override in overrides:
        key = override.partition("=")[0].strip()
        rows = next((name for name in _ROWS if f"{key}.".startswith(f"{name}.")), "")
        if rows:
            unused[override] = rows
        section, _, setting = key.partition(".")
        if section == "verify" and has_benchmark_default(setting):
            raise ConfigError(
                f"--set {override!r}: evaluation does not take this from verify; set judge.evaluate.{setting}"
            )
    for override, section in unused.items():
        raise ConfigError(
            f"--set {override!r}: klear evaluate trains nothing and uses no setting of {section}; it uses those of "
            f"{', '.join(_SECTIONS)}, promote, workspace, hardware and given"
        )


def _benchmarks(options: EvaluateOptions, there: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings of the benchmarks asked for: files, known names, or names of those given here.

    Without any asked for, the latter: of the profile, or of the model's last evaluation.
    """
    if not options.benchmarks and not there:
        raise ConfigError("klear evaluate: name what to score it on: --benchmarks FILE, or a name such as aime24")
    # a known benchmark has its own name if a profile gives it none
    named = {str(benchmark.get("name") or benchmark.get("known")): dict(benchmark) for benchmark in there}
    chosen = [_benchmark(name, named) for name in options.benchmarks] or list(named.values())
    if options.num_samples is not None:
        chosen = [benchmark | {"num_samples": options.num_samples} for benchmark in chosen]
    if options.prompt is not None:
        chosen = [benchmark | {"prompt": options.prompt} for benchmark in chosen]
    if options.num_problems is not None:
        chosen = [_part(benchmark, options.num_problems) for benchmark in chosen]
    return chosen


def _part(settings: Mapping[str, Any], num_problems: int) -> dict[str, Any]:
    """Return the settings of a part of a benchmark, under a name that no score of the whole has."""
    try:
        whole = BenchmarkConfig.model_validate(settings)
    except ValidationError:
        return {**settings, "num_problems": num_problems}  # which `validate` refuses, with the key
    # It is no published benchmark any more.
    part = whole.model_copy(
        update={
            "name": f"{whole.name}_part_{num_problems}",
            "known": "",
            "published": whole.published_on,
            "num_problems": num_problems,
        }
    )
    return part.model_dump(mode="json")


def _benchmark(name: str, named: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    if name in named:
        return named[name]
    path = Path(name)
    if path.exists():
        return {"name": _as_name(path), "source": {"kind": "file", "path": str(path)}}
    known, _, copy = name.partition("=")
    if known in KNOWN_BENCHMARKS:
        return {"known": known, "source": copy} if copy else _on_hub(known)
    if known.startswith("reasoning_gym/"):
        return {"known": known}
    names = ", ".join({**named, **KNOWN_BENCHMARKS})
    raise ConfigError(
        f"--benchmarks {name}: no such file, and no benchmark of that name; names: {names}; "
        "NAME=FILE reads one of these from a local copy, reasoning_gym/TASK generates one"
    )


def _on_hub(known: str) -> dict[str, Any]:
    """Return the settings of a known benchmark from the Hub, at the commit that we know, else at its present one."""
    benchmark = KNOWN_BENCHMARKS[known]
    revision = benchmark.revision or commit_of(benchmark.repo, "main", repo_type="dataset")
    return {"known": known, "source": {"kind": "hub", "repo": benchmark.repo, "revision": revision}}


def _as_name(path: Path) -> str:
    """Return a benchmark's name for a file: small letters, digits and underscores."""
    name = re.sub(r"[^a-z0-9]+", "_", stem_of(path).lower()).strip("_")
    if not name:
        raise ConfigError(
            f"--benchmarks {path}: a benchmark is named by its file, with letters a to z, digits and underscores; this "
            "name has none: rename the file, or link to it by another name"
        )
    return name


# ---- what a model of the workspace brings ----


@dataclass(frozen=True, slots=True, kw_only=True)
class InheritedSettings:
    """Settings for the evaluation of a model of this workspace, and where they were taken from."""

    sections: Mapping[str, Any]
    origin: str


def settings_of(artifact: Path) -> InheritedSettings | None:
    """Return the settings with which a model was scored last or, if it never was, with which it was trained by RL.

    None if it was neither, or by a version whose settings are not these.
    """
    with suppress(ArtifactError, KeyError, ValidationError):
        scored = read_manifest(newest_evaluation(artifact))
        evaluate = EvaluateConfig.model_validate(scored.config["evaluate"]).model_copy(update={"templates": {}})
        verify = VerifyConfig.model_validate(scored.config["verify"])
        benchmarks = TypeAdapter(list[BenchmarkConfig]).validate_python(scored.config["benchmarks"])
        sections = {
            "seed": scored.config["seed"],  # generated benchmarks are those of a seed
            "benchmarks": [benchmark.model_dump(mode="json") for benchmark in benchmarks],
            "evaluate": evaluate.model_dump(mode="json"),
            **sections_of_evaluation(verify),
        }
        return InheritedSettings(sections=sections, origin=f"its evaluation {scored.fingerprint[:8]}")
    with suppress(ArtifactError, KeyError, ValidationError):
        trained = read_manifest(artifact)
        rollout = RlConfig.model_validate(trained.config["rl"]).rollout
        return InheritedSettings(
            sections={"evaluate": rollout.model_dump(mode="json", include={"sampling", "engine"})},
            origin=f"its training {trained.fingerprint[:8]}",
        )
    return None


def _inherited_line(inherited: InheritedSettings, config: PipelineConfig) -> str:
    sampling, engine = config.evaluate.sampling, config.evaluate.engine.kind
    judges = ", judge settings" if "verify" in inherited.sections else ""
    return (
        f"taken    from {inherited.origin}: temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, at most "
        f"{sampling.max_new_tokens:,} tokens, engine {engine}{judges}"
    )


def _share(num_found: int, num_questions: int) -> str:
    return f"{num_found:,} of its {num_questions:,} questions {'is' if num_found == 1 else 'are'}"


def compared_with_training(config: PipelineConfig, artifact: Path, console: Console) -> PipelineConfig:
    """Compare benchmarks that the model's training data was not kept apart from with that data; print what is found.

    Return the config that declares them as compared, with the number of questions in common, which the report says.
    """
    missed = {name for exposure in given_contamination(config) for name in exposure.missed}
    benchmarks = [b for b in config.benchmarks if b.name in missed and b.name not in config.given.score_despite]
    if not benchmarks:
        return config
    overlap = overlap_with_training(artifact, benchmarks, seed=config.seed)
    if overlap is None:
        return config  # preflight says what is not known
    given = config.given.evaluate
    assert given is not None, "an evaluation scores a given model"
    declared = () if given.decontaminated_against == "unknown" else given.decontaminated_against
    clean = tuple(name for name, questions in overlap.found.items() if not questions)
    seen = {name: len(questions) for name, questions in overlap.found.items() if questions}
    for name, questions in overlap.found.items():
        found = (
            f"{_share(len(questions), overlap.num_questions[name])} there: {questions[0]!r}"
            if questions
            else "none is there"
        )
        console.print(
            f"compared {name} with the {overlap.num_prompts:,} questions that the model was trained on: {found}",
            markup=False,
        )
    facts: dict[str, object] = {"questions_seen": given.questions_seen | seen}
    if clean:
        facts["decontaminated_against"] = (*declared, *clean)
    evaluated = config.given.model_copy(update={"evaluate": given.model_copy(update=facts)})
    return config.model_copy(update={"given": evaluated})


def _engine(options: EvaluateOptions, given: Mapping[str, Any], tree: Mapping[str, Any]) -> str:
    """Return the engine to use: the one asked for, else torch for folders and answers that it takes, and vLLM."""
    if options.engine != "auto":
        return options.engine
    if given["kind"] == "hub":
        return "vllm"  # its family is not known before it is downloaded
    match reduce(apply_override, options.overrides, tree):
        case {"evaluate": {"sampling": {"max_new_tokens": int(longest)}}}:
            is_short = longest <= LONGEST_TORCH_ANSWER
        case _:
            is_short = EvaluateSamplingConfig().max_new_tokens <= LONGEST_TORCH_ANSWER
    return "torch" if is_short and is_supported(Path(given["path"])) else "vllm"


def _threads(given: Mapping[str, Any]) -> int:
    """Return the threads of our sampler for a model."""
    is_large = given["kind"] == "hub" or read_hf_config(Path(given["path"])).num_params >= _MANY_PARAMS
    return usable_cpus() if is_large else 1


# ---- klear chat ----


def chat(which: str, question: str | None, params: ChatParams, *, root: Path, engine: EngineChoice) -> None:
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
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    found = find_model(which, root, errors)
    folder = found.folder or _fetched(found, which, root)
    cfg = chat_engine(engine, folder)
    trained_on = None if found.artifact is None else questions_of_one_form(found.artifact)
    with asyncio.Runner() as runner:
        model = runner.run(open_chat(folder, cfg, num_threads=usable_cpus(), seed=params.seed, window=found.window))
        try:
            ask = partial(_ask, runner, model, params, console, trained_on)
            if question is not None:
                ask(question)
            else:
                _answer_lines(ask)
        finally:
            runner.run(model.close())


def _answer_lines(ask: Callable[[str], None]) -> None:
    num_failed = 0
    for question in _lines():
        try:
            ask(question)
        except DataError as e:
            num_failed += 1
            print(f"error: {e}", file=sys.stderr)  # noqa: T201
    if num_failed:
        raise DataError(f"{num_failed} of the questions could not be asked")


def _ask(
    runner: asyncio.Runner,
    model: ChatModel,
    params: ChatParams,
    console: Console,
    trained_on: TrainingQuestions | None,
    question: str,
) -> None:
    """Ask one question and print its answers, a single one as it comes; say first if the model never saw the like."""
    why = None if trained_on is None else trained_on.why_unlike(question)
    if why is not None:
        print(f"note: {visible(why)}", file=sys.stderr)  # noqa: T201
    stream = _Stream(console)
    completions = runner.run(model.ask(question, params, stream.show))
    _show(console, completions, stream)


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


class _Stream:
    """Prints an answer as it grows: thinking dimmed, the answer bold."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_shown = 0

    def show(self, text: str) -> None:
        """Print what has come since the last call, but for the last characters, which may begin an end of thinking."""
        self._print(text, until=len(text) - len(THINK_CLOSE))

    def end(self, text: str) -> None:
        """Print the rest, and end the line."""
        self._print(text, until=len(text))
        self._console.out("")

    def _print(self, text: str, *, until: int) -> None:
        start, end = self._num_shown, max(until, self._num_shown)
        close = text.rfind(THINK_CLOSE)
        # All is the answer once it is known that no thinking ended; until then it is taken for thinking.
        border = 0 if until == len(text) else end
        if close >= 0:
            border = close + len(THINK_CLOSE)
        border = min(max(border, start), end)
        for part, style in ((text[start:border], "dim"), (text[border:end], "bold")):
            if part:
                self._console.out(visible(part), style=style, end="", highlight=False)
        self._console.file.flush()
        self._num_shown = end


def _show(console: Console, completions: list[Completion], stream: _Stream) -> None:
    """Print the texts that are not printed yet, a ruler line above each of several samples."""
    for index, completion in enumerate(completions, 1):
        if len(completions) > 1:
            console.print(Text(f"── {index} of {len(completions)}", style="dim"))
            stream = _Stream(console)
        stream.end(completion.text)
        if completion.finish_reason == "length":
            print(f"cut off after {len(completion.token_ids)} tokens", file=sys.stderr)  # noqa: T201


def _fetched(found: FoundModel, which: str, root: Path) -> Path:
    """Return the folder of a model that is a GGUF file, or of the Hub; it is made once and then found again."""
    if found.published is not None:
        return _downloaded(found.published, which, root)
    tree = {"name": "chat", "given": {"evaluate": found.as_given()}, "workspace": {"root": str(root)}}
    config = validate(tree, origin="klear chat")
    with redirect_stdout(sys.stderr):  # standard output is for answers
        result, _ = make_or_reuse(config, StageSelection(only="model"))
    return model_folder(result.refs["model"].path)


def _downloaded(published: HubModelConfig, which: str, root: Path) -> Path:
    """Return the folder of a model of the Hub, downloaded into the Hub's cache unless it is there."""
    try:
        check_model(published, is_trained=False)
    except ConfigError as e:
        raise ConfigError(f"no artifact {which!r} under {root}; and as a model of the Hub: {e}") from e
    with shown_progress(published.repo) as show:
        return download(published, lambda done, total: show(done, total, ""))
