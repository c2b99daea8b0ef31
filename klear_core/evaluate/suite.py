"""List the answers that an evaluation has to sample: benchmarks, their problems, and n samples of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from klear_core.artifacts.records import read_shards
from klear_core.artifacts.shards import Shard, plan_shards
from klear_core.config.data import BenchmarkConfig
from klear_core.config.evaluate import EvaluateConfig
from klear_core.types import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark's problems, and the number of samples per problem."""

    name: str
    problems: tuple[Problem, ...]
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One answer to sample."""

    benchmark: str
    problem: Problem
    decoding: Literal["sampled", "greedy"]
    sample_idx: int


def load_benchmark(folder: Path, cfg: BenchmarkConfig) -> Benchmark:
    """Read one benchmark from the benchmarks' artifact folder; its problems are unique, and there is at least one."""
    return Benchmark(
        name=cfg.name, problems=tuple(read_shards(folder / cfg.name, Problem)), num_samples=cfg.num_samples
    )


def plan_answers(cfg: EvaluateConfig, benchmark: Benchmark, workdir: Path) -> list[Shard[Ask]]:
    """Return all answers to sample for a benchmark, problem by problem, cut into shards."""
    asks = [ask for problem in benchmark.problems for ask in _asks(cfg, benchmark, problem)]
    return plan_shards(
        workdir / "samples", asks, items_per_shard=cfg.runtime.answers_per_shard, prefix=f"{benchmark.name}-"
    )


def _asks(cfg: EvaluateConfig, benchmark: Benchmark, problem: Problem) -> Iterable[Ask]:
    for i in range(benchmark.num_samples):
        yield Ask(benchmark=benchmark.name, problem=problem, decoding="sampled", sample_idx=i)
    if cfg.greedy:
        yield Ask(benchmark=benchmark.name, problem=problem, decoding="greedy", sample_idx=0)
