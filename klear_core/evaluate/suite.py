"""List the answers that an evaluation has to sample: benchmarks, their problems, and n samples of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from klear_core.artifacts.records import read_shards
from klear_core.artifacts.shards import Shard, plan_shards
from klear_core.config.benchmark import BenchmarkConfig
from klear_core.config.evaluate import EvaluateConfig
from klear_core.types import Problem

SAMPLES_FOLDER = "samples"
"""Folder of an evaluation with the answers to the plain questions."""
TEMPLATES_FOLDER = "templates"
"""Folder of an evaluation with a folder for each prompt template, which has the answers to the questions in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark's problems, and the number of samples per problem."""

    name: str
    problems: tuple[Problem, ...]
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAnswer:
    """One answer to sample."""

    benchmark: str
    problem: Problem
    decoding: Literal["sampled", "greedy"]
    sample_idx: int
    template: str = ""
    """Name of the prompt template; empty for the plain question."""


def read_suite(folder: Path, configs: Sequence[BenchmarkConfig]) -> list[Benchmark]:
    """Read these benchmarks from the benchmarks' artifact folder."""
    return [read_benchmark(folder, cfg) for cfg in configs]


def read_benchmark(folder: Path, cfg: BenchmarkConfig) -> Benchmark:
    """Read one benchmark from the benchmarks' artifact folder; its problems are unique, and there is at least one."""
    problems = tuple(read_shards(folder / cfg.name, Problem))
    return Benchmark(name=cfg.name, problems=problems, num_samples=cfg.num_samples)


def plan_answers(cfg: EvaluateConfig, benchmark: Benchmark, workdir: Path) -> list[Shard[PlannedAnswer]]:
    """Return all answers to sample for a benchmark's plain questions, problem by problem, cut into shards."""
    # The order must be the same in every run: a finished shard is known by its place in it.
    answers: list[PlannedAnswer] = []
    for problem in benchmark.problems:
        answers += _samples(benchmark, problem)
        if cfg.greedy:
            answers.append(PlannedAnswer(benchmark=benchmark.name, problem=problem, decoding="greedy", sample_idx=0))
    return plan_shards(
        workdir / SAMPLES_FOLDER, answers, items_per_shard=cfg.runtime.answers_per_shard, prefix=f"{benchmark.name}-"
    )


def plan_template(
    cfg: EvaluateConfig, benchmark: Benchmark, template: str, workdir: Path
) -> list[Shard[PlannedAnswer]]:
    """Return all answers to sample for a benchmark's questions in one of `cfg.templates`, cut into shards."""
    answers: list[PlannedAnswer] = []
    for problem in benchmark.problems:
        answers += _samples(benchmark, problem, template)
    return plan_shards(
        workdir / TEMPLATES_FOLDER / template,
        answers,
        items_per_shard=cfg.runtime.answers_per_shard,
        prefix=f"{benchmark.name}-",
    )


def plan_suite(cfg: EvaluateConfig, suite: Sequence[Benchmark], workdir: Path) -> list[Shard[PlannedAnswer]]:
    """Return all answers to sample for all benchmarks and templates, cut into shards."""
    shards: list[Shard[PlannedAnswer]] = []
    for benchmark in suite:
        shards += plan_answers(cfg, benchmark, workdir)
        for template in cfg.templates:
            shards += plan_template(cfg, benchmark, template, workdir)
    return shards


def _samples(benchmark: Benchmark, problem: Problem, template: str = "") -> list[PlannedAnswer]:
    return [
        PlannedAnswer(benchmark=benchmark.name, problem=problem, decoding="sampled", sample_idx=i, template=template)
        for i in range(benchmark.num_samples)
    ]
