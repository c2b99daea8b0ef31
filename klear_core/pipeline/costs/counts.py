"""Count what stages will get, from settings and files alone: the most problems, answers and rows there may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from klear_core.config.curate import CurateConfig
from klear_core.config.data import (
    BenchmarkConfig,
    DatasetsSource,
    FileSource,
    GymSource,
    HubSource,
    ProceduralSource,
    PuzzleSource,
    Source,
)
from klear_core.config.data_jobs import CurateJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import Stage
from klear_core.config.train import SftConfig
from klear_core.pipeline.graph import stage_of_problems, stages_of


def sft_steps(config: PipelineConfig) -> int | None:
    """Return the most steps that SFT takes; None if nothing bounds them."""
    rows, sft = sft_rows(config, config.sft), config.sft
    bounds = [sft.max_steps] if sft.max_steps else []
    if rows:
        bounds.append(math.ceil(rows / sft.rows_per_step))
    return min(bounds, default=None)


def sft_rows(config: PipelineConfig, sft: SftConfig) -> int | None:
    """Return the most rows in all epochs of SFT, as if every source were repeated as often as the most repeated one."""
    traces = num_traces(config)
    most_often = max([1.0, *sft.source_weights.values()])
    return None if traces is None else math.ceil(traces * most_often) * sft.num_epochs


def count_rows(source: Source) -> int | None:
    """Return the number of rows a source will give, if it is known without reading the source through."""
    match source:
        case ProceduralSource(num_problems=n) | PuzzleSource(num_problems=n) | GymSource(num_problems=n):
            return n
        case FileSource(limit=limit) | HubSource(limit=limit) | DatasetsSource(limit=limit):
            from klear_core.data.sources import files_here

            files = files_here(source)
            total = 0 if files else None
            for file in files:
                count = _rows_in(file.path)
                total = None if total is None or count is None else total + count
            return limit if total is None else min(total, limit or total)


def _rows_in(path: Path) -> int | None:
    """Return the rows of a file where counting is cheap; None for other formats, which would have to be parsed."""
    if path.suffix == ".parquet" and path.is_file():
        import pyarrow.parquet as pq

        return int(pq.read_metadata(path).num_rows)
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as f:
            return sum(1 for line in f if line.strip())
    return None


def _num_problems(config: PipelineConfig) -> int | None:
    """Return the largest number of problems that distillation may get; None if it is not known."""
    return _num_rows(config.given.curate) if config.given.curate else _num_curated(config.curate)


def _num_curated(curate: CurateConfig) -> int | None:
    """Return the largest number of problems that a curation may keep; None if it is not known."""
    from klear_core.data.curation.selection import sources_to_read
    from klear_core.data.sources import source_name

    select = curate.select
    total = 0
    for source in sources_to_read(curate):
        count, cap = count_rows(source), select.caps.get(source_name(source))
        if count is None and cap is None:
            # One source of unknown size makes the sum unknown: only the limit for all of them is left.
            return select.num_problems
        total += min(known for known in (count, cap) if known is not None)
    return min(total, select.num_problems or total)


def _num_rows(sources: Sequence[Source]) -> int | None:
    """Return the rows of all sources together; None if the number of one is not known."""
    counts = [count_rows(source) for source in sources]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def num_traces(config: PipelineConfig) -> int | None:
    """Return the most traces that there may be for SFT, as if all were kept; None if it is not known."""
    if config.given.distill:
        return _num_rows(config.given.distill)
    problems = _num_problems(config)
    limit = config.distill.max_problems
    asked = limit if problems is None else min(problems, limit or problems)
    return None if asked is None else asked * config.distill.samples_per_problem


def num_problems_of(stage: Stage, config: PipelineConfig) -> int | None:
    """Return the largest number of problems that a stage may get; RL's may be others than those of distillation."""
    job = stage_of_problems(stages_of(config), stage).job
    given = [use.source for use in job.sources_in(stage.section)]
    return _num_curated(job.curate) if isinstance(job, CurateJob) else _num_rows(given)


def num_opd_answers(stage: Stage, config: PipelineConfig) -> int | None:
    """Return the most answers of the student that are scored; None if it is not known. `stage` samples them."""
    assert config.opd is not None
    cfg = config.opd.rollouts
    problems = num_problems_of(stage, config)
    asked = cfg.num_prompts if problems is None else min(problems, cfg.num_prompts or problems)
    return None if asked is None else asked * cfg.samples_per_prompt


def benchmark_rows(benchmark: BenchmarkConfig) -> int | None:
    """Return the most problems of a benchmark, or of the part that is scored; None if nothing bounds them."""
    rows, part = benchmark.expected_rows or count_rows(benchmark.source), benchmark.num_problems
    return part if rows is None else min(rows, part or rows)
