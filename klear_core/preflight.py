"""What would stop a run, found in the first second instead of the third hour."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from klear_core.config.data import FileSource, Source
from klear_core.config.distill import HttpTeacherConfig
from klear_core.config.engine import TorchEngineConfig, VllmEngineConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.train import HfModelConfig, TinyModelConfig, TrainRuntime
from klear_core.errors import ConfigError, DataError
from klear_core.estimate import model_size

_MIN_FREE_GB = 1.0


def problems_with(config: PipelineConfig) -> list[str]:
    """Everything that is known to be missing or contradictory, each with the key, its value and the fix; empty if none."""
    return list(
        dict.fromkeys(
            [
                *_missing_sources(config),
                *_model_problems(config),
                *_teacher_problems(config),
                *_length_problems(config),
                *_engine_problems(config),
                *_context_problems(config),
                *_weight_problems(config),
                *_domain_problems(config),
                *_workspace_problems(config),
            ]
        )
    )


def _all_sources(config: PipelineConfig) -> Iterator[tuple[str, Source]]:
    yield from ((f"benchmark {b.name!r}", b.source) for b in config.benchmarks)
    yield from (("curate.sources", source) for source in config.curate.sources)
    if config.curate_rl is not None:
        yield from (("curate_rl.sources", source) for source in config.curate_rl.sources)


def _missing_sources(config: PipelineConfig) -> Iterator[str]:
    from klear_core.data.sources import check_source

    for where, source in _all_sources(config):
        if isinstance(source, FileSource) and not Path(source.path).is_file():
            yield f"{where}: {source.path}: no such file"
            continue
        try:
            check_source(source)
        except (ConfigError, DataError) as e:
            yield f"{where}: {e}"
    if not config.benchmarks:
        yield "benchmarks: none, so there is nothing to evaluate on and nothing to keep out of training"


def _model_problems(config: PipelineConfig) -> Iterator[str]:
    if isinstance(config.model, HfModelConfig) and not (Path(config.model.path) / "config.json").is_file():
        yield f"model.path = {config.model.path!r}: no config.json there; it must be a Hugging Face model folder on disk"


def _teacher_problems(config: PipelineConfig) -> Iterator[str]:
    teacher = config.distill.teacher
    if isinstance(teacher, HttpTeacherConfig) and teacher.api_key_env and teacher.api_key_env not in os.environ:
        yield f"distill.teacher.api_key_env = {teacher.api_key_env!r}: this environment variable is not set"


def _length_problems(config: PipelineConfig) -> Iterator[str]:
    window = config.model.max_position_embeddings
    if window is None:
        return
    lengths = {"sft.max_tokens": config.sft.max_tokens, "evaluate.sampling.max_new_tokens": config.evaluate.sampling.max_new_tokens}
    lengths |= {f"{name}.rollout.sampling.max_new_tokens": rl.rollout.sampling.max_new_tokens for name, rl in _rl_stages(config)}
    for key, length in lengths.items():
        if length > window:
            yield f"{key} = {length} is more than model.max_position_embeddings = {window}"


def _engine_problems(config: PipelineConfig) -> Iterator[str]:
    import importlib.util

    engines = {"evaluate.engine": config.evaluate.engine} | {f"{name}.rollout.engine": rl.rollout.engine for name, rl in _rl_stages(config)}
    for key, engine in engines.items():
        if isinstance(engine, VllmEngineConfig) and importlib.util.find_spec("vllm") is None:
            yield f"{key}.kind = 'vllm': vLLM is not installed here; pip install -e '.[gpu]'"
        if isinstance(engine, VllmEngineConfig) and isinstance(config.model, TinyModelConfig) and config.model.head_dim < 32:
            yield f"{key}.kind = 'vllm' needs model.head_dim of 32 or more, not {config.model.head_dim}"
        if isinstance(engine, TorchEngineConfig) and config.evaluate.sampling.max_new_tokens > 8192 and key.startswith("evaluate"):
            yield f"{key}.kind = 'torch' keeps a static cache; for answers of more than 8192 tokens use kind = 'vllm'"


def _context_problems(config: PipelineConfig) -> Iterator[str]:
    size = model_size(config)
    runtimes: dict[str, TrainRuntime] = {"sft": config.sft.runtime} | {name: rl.runtime for name, rl in _rl_stages(config)}
    for stage, runtime in runtimes.items():
        try:
            if size is not None:
                runtime.check_heads(size.num_heads, "the model")
        except ConfigError as e:
            yield f"{stage}.{e}"


def _weight_problems(config: PipelineConfig) -> Iterator[str]:
    from klear_core.data.sources import source_name

    names = [source_name(source) for source in config.curate.sources]
    for name in config.sft.source_weights:
        if name not in names:
            yield f"sft.source_weights: {name!r} is none of curate.sources, which are: {', '.join(names)}"


def _domain_problems(config: PipelineConfig) -> Iterator[str]:
    tools = {"auto": ("firejail", "bwrap"), "firejail": ("firejail",), "bubblewrap": ("bwrap",), "rlimits-only": ()}[config.verify.sandbox]
    judges_code = any(rl.domain == "code" for _, rl in _rl_stages(config))
    if judges_code and tools and not any(map(shutil.which, tools)):
        missing = " or ".join(tools)
        yield f"verify.sandbox = {config.verify.sandbox!r}: {missing} is not installed; apt-get install firejail (klear doctor tells more)"


def _workspace_problems(config: PipelineConfig) -> Iterator[str]:
    root = Path(config.workspace.root).expanduser().absolute()
    existing = next(p for p in (root, *root.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield f"workspace.root = {config.workspace.root!r}: {existing} is not a folder that can be written to"
        return
    free_gb = shutil.disk_usage(existing).free / 1e9
    if free_gb < _MIN_FREE_GB:
        yield f"workspace.root = {config.workspace.root!r}: {free_gb:.2f} GB free there, {_MIN_FREE_GB:g} GB needed at the very least"


def _rl_stages(config: PipelineConfig) -> list[tuple[str, RlConfig]]:
    return [("rl", config.rl)] + ([("rl_code", config.rl_code)] if config.rl_code is not None else [])
