"""`klear evaluate`: score any model on benchmarks with one command, as a run of the pipeline that trains nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from flows.find import find_artifact
from flows.named_model import can_sample_in_torch, on_hub
from flows.resolve import profile_folder
from flows.watched import carry_out
from klear_core.artifacts.hub import commit_of
from klear_core.artifacts.manifest import MANIFEST
from klear_core.config.known_benchmarks import KNOWN_BENCHMARKS
from klear_core.config.load import apply_override, read_profile, validate
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.sections import unused_overrides
from klear_core.data.rowfiles import stem_of
from klear_core.errors import ConfigError
from klear_core.pipeline.graph import stages_of
from klear_core.train.base import model_folder

_SECTIONS = ("benchmarks", "evaluate", "verify", "judge", "seed", "data_until")
"""Sections of a profile that an evaluation has."""
_STAGE_SECTIONS = ("evaluate", "promote")
"""Sections of the stages that an evaluation may have."""
_ROWS = ("given.curate", "given.curate_rl", "given.distill")
"""Given problems and traces, which an evaluation does not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of `klear evaluate`."""

    model: str
    benchmarks: Sequence[str]
    profile: str | None
    num_samples: int | None
    max_tokens: int | None
    engine: Literal["auto", "torch", "vllm"]
    overrides: Sequence[str]
    root: Path


def evaluate_model(asked: Asked) -> None:
    """Evaluate the model and print its scores; resume what an earlier such command left unfinished."""
    console = Console(highlight=False, soft_wrap=True)
    given = _given(asked.model, asked.root, console)
    config = evaluation_config(asked, given)
    carry_out(config, [stage.name for stage in stages_of(config)])
    console.print(f"answers  klear answers evaluate_model --root {shlex.quote(config.workspace.root)}", markup=False)


def evaluation_config(asked: Asked, given: Mapping[str, Any]) -> PipelineConfig:
    """Return the config of a run that scores a given model alone; ConfigError names a benchmark that is not there.

    Sampling and judges are those of the profile, without one the defaults, which are the paper's.
    """
    tree: dict[str, Any] = {"name": "evaluate", "given": {"evaluate": dict(given)}}
    if asked.profile is not None:
        profile = read_profile(profile_folder(asked.profile))
        tree |= {key: profile[key] for key in _SECTIONS if key in profile}
    tree["benchmarks"] = _benchmarks(asked, tree.get("benchmarks", []))
    tree["workspace"] = {"root": str(asked.root)}
    # A profile has chosen its engine; "auto" looks at the model only where there is none.
    engine = _engine(asked.engine, given) if asked.profile is None or asked.engine != "auto" else None
    if engine is not None:
        tree = apply_override(tree, f"evaluate.engine.kind={engine}")
    if asked.max_tokens is not None:
        tree = apply_override(tree, f"evaluate.sampling.max_new_tokens={asked.max_tokens}")
    _refuse_unused(asked.overrides)
    for override in asked.overrides:
        tree = apply_override(tree, override)
    return validate(tree, origin="klear evaluate")


def _refuse_unused(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a setting that only a training has, so that nobody believes that it had an effect."""
    unused = unused_overrides(overrides, _STAGE_SECTIONS)
    for override in overrides:
        key = override.partition("=")[0].strip()
        rows = next((name for name in _ROWS if f"{key}.".startswith(f"{name}.")), "")
        if rows:
            unused[override] = rows
    for override, section in unused.items():
        raise ConfigError(
            f"--set {override!r}: klear evaluate trains nothing and uses no setting of {section}; it uses those of "
            f"{', '.join(_SECTIONS)}, promote, workspace, hardware and given"
        )


def _benchmarks(asked: Asked, of_profile: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings of the benchmarks asked for: files, or names in the profile; without any, the profile's."""
    if not asked.benchmarks and not of_profile:
        raise ConfigError("klear evaluate: name what to score it on: --benchmarks FILE, or a name such as aime24")
    # a known benchmark has its own name if the profile gives it none
    named = {str(benchmark.get("name") or benchmark.get("known")): dict(benchmark) for benchmark in of_profile}
    chosen = [_benchmark(name, named) for name in asked.benchmarks] or list(named.values())
    if asked.num_samples is not None:
        chosen = [benchmark | {"num_samples": asked.num_samples} for benchmark in chosen]
    return chosen


def _benchmark(name: str, named: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    if name in named:
        return named[name]
    path = Path(name)
    if path.exists():
        return {"name": _as_name(path), "source": {"kind": "file", "path": str(path)}}
    known, _, copy = name.partition("=")
    if known in KNOWN_BENCHMARKS:
        return {"known": known, "source": copy} if copy else _on_hub(known)
    names = ", ".join({**named, **KNOWN_BENCHMARKS})
    raise ConfigError(
        f"--benchmarks {name}: no such file, and no benchmark of that name; names: {names}; "
        "NAME=FILE reads one of these from a local copy"
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


def _given(model: str, root: Path, console: Console) -> dict[str, Any]:
    """Return the settings that name the model: a folder, a repository of the Hub, or a model of the workspace."""
    # An artifact's folder holds its model in a folder below; the last line finds it.
    if Path(model).is_dir() and not (Path(model) / MANIFEST).is_file():
        return {"kind": "folder", "path": str(Path(model).resolve())}
    # `artifacts/sft` could be a folder as well as a name on the Hub.
    published = None if Path(model).is_dir() else on_hub(model, console)
    if published is not None:
        return {"kind": "hub", "repo": published.repo, "revision": published.revision}
    return {"kind": "folder", "path": str(model_folder(find_artifact(model, root).absolute()))}


def _engine(engine: Literal["auto", "torch", "vllm"], given: Mapping[str, Any]) -> str:
    """Return the engine to use: the one asked for, else torch for folders of Qwen3 models and vLLM for others."""
    if engine != "auto":
        return engine
    if given["kind"] == "hub":
        return "vllm"  # its family is not known before it is downloaded
    return "torch" if can_sample_in_torch(Path(given["path"])) else "vllm"
