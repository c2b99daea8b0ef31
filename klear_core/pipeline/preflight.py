"""Find what would stop a run, in the first second instead of the third hour.

Only stages that would run are checked: an artifact that exists is reused, even if its teacher or sandbox is gone.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from klear_core.artifacts.files import matching_files
from klear_core.artifacts.manifest import read_manifest
from klear_core.artifacts.model_files import check_model, folder_of
from klear_core.cluster.nodes import joins_a_cluster
from klear_core.config.data import FileSource, GeneratedSource, Source
from klear_core.config.data_jobs import BenchmarksJob, CurateJob
from klear_core.config.distill import HttpTeacherConfig
from klear_core.config.engine import TorchEngineConfig, VllmEngineConfig
from klear_core.config.given_jobs import GivenModelJob, GivenTracesJob, origin_of
from klear_core.config.jobs import BaseJob, DistillJob, EvaluateJob, RlJob, SftJob, TagJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import EngineUse, SourceUse, Stage
from klear_core.config.train import HfModelConfig, HubModelConfig, ModelConfig, TinyModelConfig
from klear_core.config.user_code import UserFunction
from klear_core.distill.keys import MAKE_BLOCK, NO_KEYS, BlockKeys
from klear_core.errors import ArtifactError, ConfigError, KlearError
from klear_core.hf_config import HfConfig, read_hf_config
from klear_core.pipeline.ahead import PendingWork
from klear_core.pipeline.capacity import disk_problem, machine_problems, num_engines_problems
from klear_core.pipeline.exposure import exposures
from klear_core.pipeline.fits import memory_problems
from klear_core.pipeline.placed import placement_problems
from klear_core.types import Domain

T = TypeVar("T")

_LONG_ANSWER = 8192
"""Answers longer than this many tokens need an engine with a paged cache, which the torch engine lacks."""
_JUDGING = (BenchmarksJob, TagJob, DistillJob, RlJob, EvaluateJob)
"""Jobs of stages that judge answers; benchmarks are judged to check their references."""


def require_ready(
    config: PipelineConfig,
    chosen: Collection[str] | None = None,
    *,
    again: Collection[str] = (),
    keys: BlockKeys | None = None,
) -> None:
    """Raise ConfigError with everything that would stop the run, before anything is spent."""
    problems = problems_with(config, chosen, again=again, keys=keys)
    if problems:
        raise ConfigError("\n       ".join(["this profile cannot run here yet:", *problems]))


def problems_with(
    config: PipelineConfig,
    chosen: Collection[str] | None = None,
    *,
    again: Collection[str] = (),
    keys: BlockKeys | None = None,
) -> list[str]:
    """Return everything known to be missing or contradictory, each with its key, value and fix; empty if nothing is.

    `chosen` names the stages to run (None: all of them), `again` those to build even if they exist. `keys` are the
    teachers' API keys by Prefect block; None leaves those unchecked.
    """
    work = replace(PendingWork.of(config, chosen, again), keys=keys)
    return list(dict.fromkeys(problem for check in _CHECKS for problem in check(work)))


def _input_problems(work: PendingWork) -> Iterator[str]:
    for stage, missing in work.unmade_inputs:
        named = " and ".join(map(repr, missing))
        yield (
            f"stage {stage!r} needs {named}, not there or not whole for these settings: "
            f"run up to that first, with --until {missing[-1]}"
        )


def _file_problems(work: PendingWork) -> Iterator[str]:
    for use in _sources_of(work.needed):
        if isinstance(use.source, FileSource) and not _is_there(use.source):
            yield f"{use.key}: {use.source.path}: no such file"
        if not isinstance(use.source, GeneratedSource):
            tables = [path for path in use.source.lookup.values() if not _is_path_there(path)]
            yield from (f"{use.key}: lookup: {path}: no such file" for path in tables)
    for stage, job in work.needs(CurateJob):
        for source in job.curate.decontaminate.also:
            if not _is_there(source):
                yield f"{stage.section}.decontaminate.also: {source.path}: no such file"


def _source_problems(work: PendingWork) -> Iterator[str]:
    from klear_core.data.selection import check_selection
    from klear_core.data.sources import check_names, check_questions, check_source

    for use in _sources_of(work.stages):
        if _is_there(use.source):
            yield from _complaints(use.key, check_source, use.source)
    curations = list(work.pending(CurateJob))
    for stage, job in curations:
        yield from _complaints(f"{stage.section}.sources", check_names, job.curate.sources)
        yield from _complaints(stage.section, check_selection, job.curate)
        for source in filter(_is_there, job.curate.decontaminate.also):
            yield from _complaints(f"{stage.section}.decontaminate.also", check_questions, source)
    if not work.config.benchmarks and (work.evaluates or curations):
        yield "benchmarks: none, so there is nothing to evaluate on and nothing to keep out of training"


def _given_trace_problems(work: PendingWork) -> Iterator[str]:
    from klear_core.data.sources import check_names
    from klear_core.data.traces import check_traces

    for stage, job in work.pending(GivenTracesJob):
        yield from _complaints(stage.section, check_names, job.runtime.sources)
        for source in job.runtime.sources:
            if _is_there(source):
                yield from _complaints(stage.section, check_traces, source)
            else:
                yield f"{stage.section}: {origin_of(source)}: no such file"


def _unjudged_rl_problems(work: PendingWork) -> Iterator[str]:
    """Find RL that would have no problem to learn from, because no source of its problems has references."""
    from klear_core.data.sources import is_without_references

    makers = {stage.name: [use.source for use in stage.sources()] for stage in work.stages}
    for stage in work.stages:
        sources = makers.get(stage.inputs.get("problems", ""))
        if not isinstance(stage.job, RlJob) or not sources:
            continue
        try:
            can_judge = not all(map(is_without_references, sources))
        except KlearError:
            continue  # a bad source is reported by `_source_problems`
        if not can_judge:
            yield (
                f"{stage.section}: its problems come from sources without answers or tests, so that no answer could be "
                "judged; name others in curate_rl.sources"
            )


def _benchmark_problems(work: PendingWork) -> Iterator[str]:
    """Compare row counts of reused benchmarks: the expected count is in no fingerprint, so it may have changed."""
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
            num_found = found[benchmark.name]
            where = f"{num_found} rows in {work.benchmarks}"
            yield f"benchmark {benchmark.name!r}: expected_rows = {expected}, but it has {where}"


def _reference_problems(work: PendingWork) -> Iterator[str]:
    """Check the references of reused benchmarks for a judge that has changed since: it is not in their fingerprint."""
    from klear_core.data.benchmarks import recheck_references

    if work.benchmarks is not None and work.evaluates:
        check = partial(recheck_references, runtime=BenchmarksJob.of(work.config).runtime)
        yield from _complaints("benchmarks", check, work.benchmarks)


def _weight_problems(work: PendingWork) -> Iterator[str]:
    from klear_core.data.sources import source_name

    given = work.config.given.distill or work.config.given.curate
    names = [source_name(source) for source in given or work.config.curate.sources]
    key = "the given sources" if given else "curate.sources"
    for stage, job in work.pending(SftJob):
        for name in job.sft.source_weights:
            if name not in names:
                there = ", ".join(names)
                yield f"{stage.section}.source_weights: {name!r} is none of {key}, which are: {there}"


def _prompt_filter_problems(work: PendingWork) -> Iterator[str]:
    tagged = {stage.name for stage, _ in work.needs(TagJob)}
    for stage, job in work.pending(RlJob):
        if job.rl.prompts.needs_pass_rates and stage.inputs["problems"] not in tagged:
            yield (
                f"{stage.section}.prompts: min_pass_rate and max_pass_rate compare pass rates, and nothing "
                f"measures those "
                f"of {stage.inputs['problems']!r}: set [tag_rl], or [tag] where RL has no prompts of its own"
            )


def _reward_problems(work: PendingWork) -> Iterator[str]:
    for stage, job in work.pending(RlJob):
        for reward in job.rl.reward.custom:
            yield from _function_problems(f"{stage.section}.reward.custom, function = {reward.function!r}", reward)


def _function_problems(key: str, cfg: UserFunction) -> Iterator[str]:
    """Import a user's function in a child process, so that side effects of the import do not reach this process."""
    from klear_core.verify.user_code import check

    missing = [path for path in cfg.files if not Path(path).exists()]
    yield from (f"{key}: files: {path}: no such file" for path in missing)
    yield from _complaints(key, check, cfg)


def _judge_problems(work: PendingWork) -> Iterator[str]:
    """Find judges of the user's own that cannot be called, and references whose judge is none of them."""
    from klear_core.data.sources import judges_of

    if not any(isinstance(stage.job, _JUDGING) for stage in work.stages):
        return
    judges = work.config.verify.judges
    for judge in judges:
        yield from _function_problems(judge.key, judge)
    names = [judge.name for judge in judges]
    for use in _sources_of(work.needed):
        unknown = _or_nothing(judges_of, use.source).difference(names) if _is_there(use.source) else ()
        for name in sorted(unknown):
            yield (
                f"{use.key}: its references name the judge {name!r}, and verify.judges has "
                f"{', '.join(names) or 'none'}; bind it with [[verify.judges]], name and function"
            )


def _model_problems(work: PendingWork) -> Iterator[str]:
    for _, job in work.needs(BaseJob):
        if isinstance(job.model, HfModelConfig):
            yield from _complaints(f"model.path = {job.model.path!r}", check_model, job.model)
        elif isinstance(job.model, HubModelConfig):
            yield from _complaints("model", check_model, job.model)
    for stage, given in work.needs(GivenModelJob):
        yield from _complaints(stage.section, check_model, given.model())


def _exposure_problems(work: PendingWork) -> Iterator[str]:
    """Refuse scores on benchmarks that the lineage of a given model shows to be left out of decontamination."""
    if not work.evaluates:
        return
    despite = work.config.given.score_despite
    for exposure in exposures(work.config):
        refused = [name for name in exposure.missed if name not in despite]
        if refused:
            yield (
                f"{exposure.stage.section}: {exposure.warning}; to score it all the same, set given.score_despite = "
                f"{refused}"
            )


def _teacher_problems(work: PendingWork) -> Iterator[str]:
    for stage, job in work.pending(DistillJob):
        teacher, key = job.distill.teacher, f"{stage.section}.teacher"
        if not isinstance(teacher, HttpTeacherConfig):
            continue
        keys = [endpoint.api_key_env for endpoint in teacher.runtime.endpoints if endpoint.api_key_env]
        missing = [name for name in keys if not os.environ.get(name)]
        for name in missing:
            yield f"{key}.api_key_env = {name!r}: this environment variable is not set"
        blocks = [endpoint.api_key_block for endpoint in teacher.runtime.endpoints if endpoint.api_key_block]
        unmade = [name for name in blocks if work.keys is not None and name not in work.keys]
        for name in unmade:
            yield f"{key}.api_key_block = {name!r}: Prefect has no such block; {MAKE_BLOCK}"
        if missing or unmade or (blocks and work.keys is None):
            continue
        from klear_core.distill.http import check_endpoints

        yield from _complaints(key, partial(check_endpoints, keys=work.keys or NO_KEYS), teacher)


def _length_problems(work: PendingWork) -> Iterator[str]:
    """Check lengths against the model's window: the configured one, or the folder's if it is wider."""
    window = _window(work.config.start_model)
    for stage, job in work.pending(SftJob):
        max_tokens = job.sft.max_tokens
        if window is not None and max_tokens > window:
            yield f"{stage.section}.max_tokens = {max_tokens} is more than model.max_position_embeddings = {window}"
    for use in work.engines():
        yield from _too_long_answers(use, use.model or work.config.start_model)


def _too_long_answers(use: EngineUse, model: ModelConfig) -> Iterator[str]:
    key, engine, sampling = use.key, use.engine, use.sampling
    room = _window(model)
    if room is None:
        return
    of_what = f"{'its ' if use.model else 'model.'}max_position_embeddings = {room}"
    if isinstance(engine, VllmEngineConfig) and engine.yarn_factor is not None:
        if engine.yarn_original_window is not None:
            of_what = f"{key}.engine.yarn_original_window = {engine.yarn_original_window}"
        room = engine.stretched(room)
        of_what = f"{of_what} times {key}.engine.yarn_factor = {engine.yarn_factor:g}"
    if isinstance(engine, VllmEngineConfig) and engine.max_model_len is not None:
        if engine.max_model_len > room:
            yield f"{key}.engine.max_model_len = {engine.max_model_len} is more than {of_what}"
        else:
            room, of_what = engine.max_model_len, f"{key}.engine.max_model_len = {engine.max_model_len}"
    if sampling.max_new_tokens > room:
        yield f"{key}.sampling.max_new_tokens = {sampling.max_new_tokens} is more than {of_what}"


def _engine_problems(work: PendingWork) -> Iterator[str]:
    from klear_core.generate.qwen3.shape import read_shape

    for use in work.engines():
        key, engine, sampling = use.key, use.engine, use.sampling
        model = use.model or work.config.start_model
        if isinstance(engine, VllmEngineConfig) and importlib.util.find_spec("vllm") is None:
            yield f"{key}.engine.kind = 'vllm': vLLM is not installed here; pip install -e '.[gpu]'"
        if isinstance(engine, VllmEngineConfig) and isinstance(model, TinyModelConfig) and model.head_dim < 32:
            yield f"{key}.engine.kind = 'vllm' needs model.head_dim of 32 or more, not {model.head_dim}"
        if isinstance(engine, TorchEngineConfig) and sampling.max_new_tokens > _LONG_ANSWER:
            remedy = f"for answers of more than {_LONG_ANSWER} tokens use kind = 'vllm'"
            yield f"{key}.engine.kind = 'torch' has no paged cache; {remedy}"
        if isinstance(engine, TorchEngineConfig) and not isinstance(model, TinyModelConfig) and _hf_config(model):
            yield from _complaints(f"{key}.engine", read_shape, folder_of(model))


def _context_problems(work: PendingWork) -> Iterator[str]:
    heads = _num_heads(work.config.start_model)
    if heads is None:
        return
    for stage, runtime in work.trainings():
        try:
            runtime.check_attention_heads(heads, "the model")
        except ConfigError as e:
            yield f"{stage}.{e}"


def _cuda_problems(work: PendingWork) -> Iterator[str]:
    """Check the devices of this machine; a stage on a Ray cluster at RAY_ADDRESS is refused where it is placed."""
    if joins_a_cluster():
        return
    devices = {f"{section}.runtime": runtime.device for section, runtime in work.trainings()}
    devices |= {
        f"{use.key}.engine.runtime": use.engine.runtime.device
        for use in work.engines()
        if isinstance(use.engine, TorchEngineConfig)
    }
    for key, device in devices.items():
        if device == "cuda":
            from klear_core.train.model import pick_device

            yield from _complaints(key, pick_device, device)


def _sandbox_problems(work: PendingWork) -> Iterator[str]:
    stages = list(dict.fromkeys(_sections_that_judge_code(work)))
    if not stages:
        return
    from klear_core.verify.sandbox.selftest import checked_backend

    yield from _complaints(
        f"verify.sandbox, for the code problems of {', '.join(stages)}", checked_backend, work.config.verify
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


def _sections_that_judge_code(work: PendingWork) -> Iterator[str]:
    has_code_prompts = any(map(_has_code, work.config.curate.sources))
    has_code_benchmarks = any(_has_code(benchmark.source) for benchmark in work.config.benchmarks)
    for stage in work.stages:
        match stage.job:
            case DistillJob() | TagJob() if has_code_prompts:
                yield stage.section
            case RlJob(rl=rl) if rl.domain == "code":
                yield stage.section
            case EvaluateJob() if has_code_benchmarks:
                yield stage.section


def _sources_of(stages: Sequence[Stage]) -> Iterator[SourceUse]:
    for stage in stages:
        yield from stage.sources()


def _has_code(source: Source) -> bool:
    from klear_core.data.sources import domains_of

    return Domain.CODE in _or_nothing(domains_of, source)


def _or_nothing(read: Callable[[Source], frozenset[T]], source: Source) -> frozenset[T]:
    """Return what is read from a source; nothing from a bad one, which `_source_problems` reports."""
    try:
        return read(source)
    except KlearError:
        return frozenset()


def _complaints(where: str, check: Callable[[T], object], subject: T) -> Iterator[str]:
    try:
        check(subject)
    except KlearError as e:
        yield f"{where}: {e}"


def _is_there(source: Source) -> bool:
    """Return whether a source can be read; `_file_problems` reports a missing file, so no other check should."""
    if not isinstance(source, FileSource):
        return True
    return _is_path_there(source.path)


def _is_path_there(path: str) -> bool:
    return Path(path).exists() or bool(matching_files(path))


def _hf_config(model: ModelConfig) -> HfConfig | None:
    """Return None for a tiny model, and without a readable config.json, which `_model_problems` reports."""
    try:
        return None if isinstance(model, TinyModelConfig) else read_hf_config(folder_of(model))
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
    _given_trace_problems,
    _unjudged_rl_problems,
    _benchmark_problems,
    _reference_problems,
    _model_problems,
    _exposure_problems,
    _teacher_problems,
    _length_problems,
    _engine_problems,
    _context_problems,
    _weight_problems,
    _prompt_filter_problems,
    _reward_problems,
    _judge_problems,
    _cuda_problems,
    machine_problems,
    num_engines_problems,
    memory_problems,
    placement_problems,
    _sandbox_problems,
    _workspace_problems,
)
