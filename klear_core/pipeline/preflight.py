"""Find what would stop a run, in the first second instead of the third hour.

Only stages that would run are checked: an artifact that exists is reused, even if its teacher or sandbox is gone.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

from klear_core.artifacts.manifest import read_manifest
from klear_core.config.data import FileSource, Source
from klear_core.config.distill import HttpTeacherConfig
from klear_core.config.engine import TorchEngineConfig, VllmEngineConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.train import HfModelConfig, ModelConfig, TinyModelConfig
from klear_core.errors import ArtifactError, ConfigError, KlearError, ResourceError
from klear_core.hf_config import HfConfig, check_architecture, read_hf_config
from klear_core.pipeline.ahead import PendingWork
from klear_core.pipeline.capacity import device_problems, disk_problem
from klear_core.types import Domain

T = TypeVar("T")

_LONG_ANSWER = 8192
"""Answers longer than this many tokens need an engine with a paged cache, which the torch engine lacks."""


def require_ready(
    config: PipelineConfig, chosen: Collection[str] | None = None, *, again: Collection[str] = ()
) -> None:
    """Raise ConfigError with everything that would stop the run, before anything is spent."""
    problems = problems_with(config, chosen, again=again)
    if problems:
        raise ConfigError("\n       ".join(["this profile cannot run here yet:", *problems]))


def problems_with(
    config: PipelineConfig, chosen: Collection[str] | None = None, *, again: Collection[str] = ()
) -> list[str]:
    """Return everything known to be missing or contradictory, each with its key, value and fix; empty if nothing is.

    `chosen` names the stages to run (None: all of them), `again` those to build even if they exist.
    """
    work = PendingWork.of(config, chosen, again)
    return list(dict.fromkeys(problem for check in _CHECKS for problem in check(work)))


def _input_problems(work: PendingWork) -> Iterator[str]:
    for stage, missing in work.unmade_inputs:
        named = " and ".join(map(repr, missing))
        yield f"stage {stage!r} needs {named}, not there or not whole for these settings: run up to that first, with --until {missing[-1]}"


def _file_problems(work: PendingWork) -> Iterator[str]:
    for stage, where, source in work.sources():
        if stage in work.files_of and isinstance(source, FileSource) and not Path(source.path).is_file():
            yield f"{where}: {source.path}: no such file"
    for stage, curate in work.curations():
        for source in curate.decontaminate.also if stage in work.files_of else ():
            if not Path(source.path).is_file():
                yield f"{stage}.decontaminate.also: {source.path}: no such file"


def _source_problems(work: PendingWork) -> Iterator[str]:
    from klear_core.data.sources import check_names, check_questions, check_source

    for stage, where, source in work.sources():
        if stage in work.stages and _is_there(source):
            yield from _complaints(where, check_source, source)
    for stage, curate in work.curations():
        if stage in work.stages:
            yield from _complaints(f"{stage}.sources", check_names, curate.sources)
            for source in filter(_is_there, curate.decontaminate.also):
                yield from _complaints(f"{stage}.decontaminate.also", check_questions, source)
    if not work.config.benchmarks and (work.evaluates or "curate" in work.stages):
        yield "benchmarks: none, so there is nothing to evaluate on and nothing to keep out of training"


def _benchmark_problems(work: PendingWork) -> Iterator[str]:
    """Compare row counts, which are not in a fingerprint: benchmarks built before one was expected are reused."""
    from klear_core.data.benchmarks import num_rows

    if work.benchmarks is None:
        return
    try:
        found = num_rows(read_manifest(work.benchmarks))
    except ArtifactError:
        return  # damaged: it will be built again, and counted then
    for benchmark in work.config.benchmarks:
        expected = benchmark.expected_rows
        if expected is not None and expected != found[benchmark.name]:
            yield f"benchmark {benchmark.name!r}: expected_rows = {expected}, but it has {found[benchmark.name]} rows in {work.benchmarks}"


def _weight_problems(work: PendingWork) -> Iterator[str]:
    from klear_core.data.sources import source_name

    names = [source_name(source) for source in work.config.curate.sources]
    for name in work.config.sft.source_weights if "sft" in work.stages else ():
        if name not in names:
            yield f"sft.source_weights: {name!r} is none of curate.sources, which are: {', '.join(names)}"


def _model_problems(work: PendingWork) -> Iterator[str]:
    model = work.config.model
    if "base" not in work.files_of or not isinstance(model, HfModelConfig):
        return
    if not (Path(model.path) / "config.json").is_file():
        yield f"model.path = {model.path!r}: no config.json there; it must be a Hugging Face model folder on disk"
        return
    yield from _complaints(f"model.path = {model.path!r}", check_architecture, Path(model.path))


def _teacher_problems(work: PendingWork) -> Iterator[str]:
    teacher = work.config.distill.teacher
    if "distill" not in work.stages or not isinstance(teacher, HttpTeacherConfig):
        return
    if teacher.api_key_env and teacher.api_key_env not in os.environ:
        yield f"distill.teacher.api_key_env = {teacher.api_key_env!r}: this environment variable is not set"
        return
    from klear_core.distill.http import check_endpoint

    yield from _complaints("distill.teacher", check_endpoint, teacher)


def _length_problems(work: PendingWork) -> Iterator[str]:
    """Check lengths against the window, the same for all models: the configured one, or the folder's if it is wider."""
    window = _window(work.config.model)
    if window is None:
        return
    if "sft" in work.stages and work.config.sft.max_tokens > window:
        yield f"sft.max_tokens = {work.config.sft.max_tokens} is more than model.max_position_embeddings = {window}"
    for key, engine, sampling in work.engines():
        room, of_what = window, f"model.max_position_embeddings = {window}"
        if isinstance(engine, VllmEngineConfig) and engine.yarn_factor is not None:
            room, of_what = (
                round(window * engine.yarn_factor),
                f"{of_what} times {key}.engine.yarn_factor = {engine.yarn_factor:g}",
            )
        if isinstance(engine, VllmEngineConfig) and engine.max_model_len is not None:
            if engine.max_model_len > room:
                yield f"{key}.engine.max_model_len = {engine.max_model_len} is more than {of_what}"
            else:
                room, of_what = engine.max_model_len, f"{key}.engine.max_model_len = {engine.max_model_len}"
        if sampling.max_new_tokens > room:
            yield f"{key}.sampling.max_new_tokens = {sampling.max_new_tokens} is more than {of_what}"


def _engine_problems(work: PendingWork) -> Iterator[str]:
    from klear_core.generate.qwen3.shape import read_shape

    model = work.config.model
    for key, engine, sampling in work.engines():
        if isinstance(engine, VllmEngineConfig) and importlib.util.find_spec("vllm") is None:
            yield f"{key}.engine.kind = 'vllm': vLLM is not installed here; pip install -e '.[gpu]'"
        if isinstance(engine, VllmEngineConfig) and isinstance(model, TinyModelConfig) and model.head_dim < 32:
            yield f"{key}.engine.kind = 'vllm' needs model.head_dim of 32 or more, not {model.head_dim}"
        if isinstance(engine, TorchEngineConfig) and sampling.max_new_tokens > _LONG_ANSWER:
            yield f"{key}.engine.kind = 'torch' has no paged cache; for answers of more than {_LONG_ANSWER} tokens use kind = 'vllm'"
        if isinstance(engine, TorchEngineConfig) and isinstance(model, HfModelConfig) and _hf_config(model):
            yield from _complaints(f"{key}.engine", read_shape, Path(model.path))


def _context_problems(work: PendingWork) -> Iterator[str]:
    heads = _num_heads(work.config.model)
    if heads is None:
        return
    for stage, runtime in work.trainings():
        try:
            runtime.check_heads(heads, "the model")
        except ConfigError as e:
            yield f"{stage}.{e}"


def _cuda_problems(work: PendingWork) -> Iterator[str]:
    """Check the devices of this process. Those of a Ray cluster at RAY_ADDRESS are known only after joining it."""
    devices = {f"{stage}.runtime": runtime.device for stage, runtime in work.trainings()}
    devices |= {
        f"{key}.engine.runtime": engine.runtime.device
        for key, engine, _ in work.engines()
        if isinstance(engine, TorchEngineConfig)
    }
    for key, device in devices.items():
        if device == "cuda" and (key.startswith(("sft.", "evaluate.")) or not _joins_a_cluster()):
            from klear_core.train.model import pick_device

            yield from _complaints(key, pick_device, device)


def _gpu_problems(work: PendingWork) -> Iterator[str]:
    from klear_core.cluster.placement import gpus_here, is_direct, plan_gpus

    sft = work.config.sft.runtime
    if "sft" in work.stages and sft.num_workers > 1 and sft.device != "cpu" and 0 < gpus_here() < sft.num_workers:
        yield f"sft.runtime.num_workers = {sft.num_workers}: every worker needs a GPU of its own, and this machine has {gpus_here()}"
    for stage, rl in work.rl_stages() if not _joins_a_cluster() else ():
        try:
            is_direct(rl, plan_gpus(rl, gpus_here()))
        except ResourceError as e:
            yield f"{stage}.runtime: {e}"


def _sandbox_problems(work: PendingWork) -> Iterator[str]:
    stages = list(_stages_that_judge_code(work))
    if not stages:
        return
    from klear_core.verify.sandbox.selftest import proven_backend

    yield from _complaints(
        f"verify.sandbox, for the code problems of {', '.join(stages)}", proven_backend, work.config.verify
    )


def _workspace_problems(work: PendingWork) -> Iterator[str]:
    where = work.config.workspace.root
    root = Path(where).expanduser().absolute()
    existing = next(p for p in (root, *root.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield f"workspace.root = {where!r}: {existing} is not a folder that can be written to"
        return
    free_gb = shutil.disk_usage(existing).free / 1e9
    problem = disk_problem(work, free_gb=free_gb)
    if problem is not None:
        yield problem


def _stages_that_judge_code(work: PendingWork) -> Iterator[str]:
    if "distill" in work.stages and any(map(_has_code, work.config.curate.sources)):
        yield "distill"
    yield from (stage for stage, rl in work.rl_stages() if rl.domain == "code")
    if work.evaluates and any(_has_code(b.source) for b in work.config.benchmarks):
        yield "evaluate"


def _has_code(source: Source) -> bool:
    from klear_core.data.sources import domains_of

    try:
        return Domain.CODE in domains_of(source)
    except KlearError:
        return False  # a bad source is reported by `_source_problems`


def _complaints(where: str, check: Callable[[T], object], subject: T) -> Iterator[str]:
    try:
        check(subject)
    except KlearError as e:
        yield f"{where}: {e}"


def _is_there(source: Source) -> bool:
    """Return whether a source can be read; `_file_problems` reports a missing file, so no other check should."""
    return not isinstance(source, FileSource) or Path(source.path).is_file()


def _joins_a_cluster() -> bool:
    return bool(os.environ.get("RAY_ADDRESS"))


def _hf_config(model: ModelConfig) -> HfConfig | None:
    """Return None for a tiny model, and without a readable config.json, which `_model_problems` reports."""
    try:
        return read_hf_config(Path(model.path)) if isinstance(model, HfModelConfig) else None
    except ConfigError:
        return None


def _window(model: ModelConfig) -> int | None:
    hf = _hf_config(model)
    return hf.window(model.max_position_embeddings) if hf else model.max_position_embeddings


def _num_heads(model: ModelConfig) -> int | None:
    if isinstance(model, TinyModelConfig):
        return model.num_heads
    hf = _hf_config(model)
    return hf.num_attention_heads if hf else None


_CHECKS = (
    _input_problems,
    _file_problems,
    _source_problems,
    _benchmark_problems,
    _model_problems,
    _teacher_problems,
    _length_problems,
    _engine_problems,
    _context_problems,
    _weight_problems,
    _cuda_problems,
    device_problems,
    _gpu_problems,
    _sandbox_problems,
    _workspace_problems,
)
