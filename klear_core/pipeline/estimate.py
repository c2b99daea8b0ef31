"""Estimate what a run will cost: tokens and memory by stage, from the settings alone. Upper bounds, not forecasts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.model_files import folder_of
from klear_core.config.data import BenchmarkConfig, FileSource, HubSource, ProceduralSource, Source
from klear_core.config.distill import HttpTeacherConfig
from klear_core.config.jobs import DistillJob, RlJob, SftJob, Stage, TagJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.tag import TagConfig
from klear_core.config.train import HfModelConfig, HubModelConfig, ModelConfig, TinyModelConfig, TrainRuntime
from klear_core.errors import ConfigError
from klear_core.hf_config import HfConfig, read_hf_config
from klear_core.pipeline.graph import stages_of

_TRAIN_BYTES_PER_PARAM = 16  # fp32 weights, gradients and two Adam moments
_BYTE_VOCAB = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes that a model's memory follows from."""

    num_params: int
    hidden_size: int
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """Upper bounds for one stage; None: not known beforehand.

    `max_tokens` counts tokens generated (or trained on, for sft); `memory_gb` is per process or GPU.
    """

    stage: str
    max_tokens: int | None
    memory_gb: float | None
    note: str


def estimate(config: PipelineConfig, chosen: Collection[str] | None = None) -> list[StageEstimate]:
    """Return an estimate for every chosen stage (None: all) that generates or trains, and one for all evaluations."""
    size = model_size(config.start_model)
    stages = [stage for stage in stages_of(config) if chosen is None or stage.name in chosen]
    rows = [row for stage in stages if (row := estimate_stage(config, stage, size)) is not None]
    num_models = sum(stage.job.scores_model for stage in stages)
    if num_models:
        rows.append(_evaluate(config, size, num_models=num_models))
    return rows


def estimate_stage(config: PipelineConfig, stage: Stage, size: ModelSize | None) -> StageEstimate | None:
    """Return the estimate of a stage; None if it neither generates nor trains, or evaluates (see `estimate`)."""
    match stage.job:
        case TagJob(tag=tag):
            return _tag(stage.name, tag, config)
        case DistillJob():
            return _distill(stage.name, config)
        case SftJob():
            return _sft(stage.name, config, size)
        case RlJob(rl=rl):
            return _rl(stage.name, rl, size)
        case _:
            return None


def model_size(model: ModelConfig) -> ModelSize | None:
    """Return the size from a tiny model's settings or a Hugging Face config.json; None if that cannot be read."""
    match model:
        case TinyModelConfig() as m:
            attention = m.head_dim * (2 * m.num_heads + 2 * m.num_kv_heads) * m.hidden_size
            layer = attention + 3 * m.hidden_size * m.intermediate_size
            return ModelSize(
                num_params=_BYTE_VOCAB * m.hidden_size + m.num_layers * layer,
                hidden_size=m.hidden_size,
                num_layers=m.num_layers,
            )
        case HfModelConfig() | HubModelConfig():
            try:
                return _size_of_hf(read_hf_config(folder_of(model)))
            except ConfigError:
                return None  # not downloaded yet, or the preflight says why


def count_rows(source: Source) -> int | None:
    """Return the number of rows a source will give, if it is known without reading the source through."""
    match source:
        case ProceduralSource(num_problems=n):
            return n
        case FileSource(limit=limit) | HubSource(limit=limit):
            from klear_core.data.sources import files_here

            files = files_here(source)
            total = 0 if files else None
            for file in files:
                count = _rows_in(file.path)
                total = None if total is None or count is None else total + count
            return limit if total is None else min(total, limit or total)


def _size_of_hf(config: HfConfig) -> ModelSize:
    return ModelSize(num_params=config.num_params, hidden_size=config.hidden_size, num_layers=config.num_hidden_layers)


def _rows_in(path: Path) -> int | None:
    if path.suffix == ".parquet" and path.is_file():
        import pyarrow.parquet as pq

        return int(pq.read_metadata(path).num_rows)
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as f:
            return sum(1 for line in f if line.strip())
    return None


def _num_problems(config: PipelineConfig) -> int | None:
    """Return the largest number of problems that curation may keep; None if it is not known."""
    from klear_core.data.selection import sources_to_read
    from klear_core.data.sources import source_name

    if config.given.curate:
        return _num_rows(config.given.curate)
    select = config.curate.select
    total = 0
    for source in sources_to_read(config.curate):
        count, cap = count_rows(source), select.caps.get(source_name(source))
        if count is None and cap is None:
            return select.num_problems
        total += min(known for known in (count, cap) if known is not None)
    return min(total, select.num_problems or total)


def _num_rows(sources: Sequence[Source]) -> int | None:
    counts = [count_rows(source) for source in sources]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _num_traces(config: PipelineConfig) -> int | None:
    if config.given.distill:
        return _num_rows(config.given.distill)
    problems = _num_problems(config)
    limit = config.distill.max_problems
    asked = limit if problems is None else min(problems, limit or problems)
    return None if asked is None else asked * config.distill.samples_per_problem


def _tag(stage: str, tag: TagConfig, config: PipelineConfig) -> StageEstimate:
    problems = _num_problems(config)
    answers = None if problems is None else problems * tag.samples_per_problem
    tokens = None if answers is None else answers * tag.sampling.max_new_tokens
    note = f"{answers or 'unknown number of'} answers of the tagger"
    return StageEstimate(stage=stage, max_tokens=tokens, memory_gb=None, note=note)


def _distill(stage: str, config: PipelineConfig) -> StageEstimate:
    traces = _num_traces(config)
    teacher = config.distill.teacher
    if not isinstance(teacher, HttpTeacherConfig):
        return StageEstimate(
            stage=stage,
            max_tokens=None,
            memory_gb=None,
            note=f"{traces or 'unknown number of'} traces by the procedural teacher",
        )
    tokens = None if traces is None else traces * teacher.max_tokens
    return StageEstimate(
        stage=stage,
        max_tokens=tokens,
        memory_gb=None,
        note=f"{teacher.model}: {traces or 'unknown number of'} traces",
    )


def _sft(stage: str, config: PipelineConfig, size: ModelSize | None) -> StageEstimate:
    traces = _num_traces(config)
    rows = [
        n
        for n in (
            traces and traces * config.sft.num_epochs,
            config.sft.max_steps and config.sft.max_steps * config.sft.rows_per_step,
        )
        if n
    ]
    tokens = min(rows) * config.sft.max_tokens if rows else None
    memory = _train_memory_gb(size, config.sft.runtime, is_bf16=config.sft.dtype == "bfloat16")
    return StageEstimate(
        stage=stage, max_tokens=tokens, memory_gb=memory, note=f"rows of up to {config.sft.max_tokens} tokens"
    )


def _rl(stage: str, cfg: RlConfig, size: ModelSize | None) -> StageEstimate:
    prompts_a_round = round(cfg.rollout.groups_per_step * cfg.rollout.oversample)
    rollouts = cfg.num_steps * cfg.rollout.max_rounds * prompts_a_round * cfg.rollout.samples_per_group
    memory = _train_memory_gb(size, cfg.runtime, is_bf16=cfg.dtype == "bfloat16")
    return StageEstimate(
        stage=stage,
        max_tokens=rollouts * cfg.rollout.sampling.max_new_tokens,
        memory_gb=memory,
        note=f"at most {rollouts} rollouts in {cfg.num_steps} steps",
    )


def _evaluate(config: PipelineConfig, size: ModelSize | None, *, num_models: int) -> StageEstimate:
    counts = [_benchmark_rows(b) for b in config.benchmarks]
    bytes_per_param = 2 if config.evaluate.engine.kind == "vllm" else 4
    memory = None if size is None else size.num_params * bytes_per_param / 1e9
    if None in counts:
        return StageEstimate(stage="evaluate", max_tokens=None, memory_gb=memory, note="a benchmark file is missing")
    answers = 0
    for num_problems, benchmark in zip(counts, config.benchmarks, strict=True):
        answers += (num_problems or 0) * (benchmark.num_samples + config.evaluate.greedy)
    tokens = num_models * answers * config.evaluate.sampling.max_new_tokens
    return StageEstimate(
        stage="evaluate",
        max_tokens=tokens,
        memory_gb=memory,
        note=f"{num_models} models, {answers} answers each; weights only",
    )


def _benchmark_rows(benchmark: BenchmarkConfig) -> int | None:
    return benchmark.expected_rows or count_rows(benchmark.source)


def _train_memory_gb(size: ModelSize | None, runtime: TrainRuntime, *, is_bf16: bool) -> float | None:
    """Return gigabytes for weights, gradients and Adam moments, sharded over the workers, and one micro-batch.

    Activations take about 34 values of the hidden size per token and layer (Korthikanti et al., arXiv 2205.05198,
    without the attention scores), 2 with activation checkpointing; context parallelism divides the tokens.
    """
    if size is None:
        return None
    num_tokens = runtime.tokens_per_microbatch / runtime.context_parallel
    values = (2 if runtime.activation_checkpointing else 34) * size.hidden_size * size.num_layers * num_tokens
    return (size.num_params * _TRAIN_BYTES_PER_PARAM / runtime.num_workers + values * (2 if is_bf16 else 4)) / 1e9
