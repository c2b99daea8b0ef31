"""Say before a run which differences its benchmarks can show."""

from __future__ import annotations

from collections.abc import Iterator

from klear_core.config.benchmark import BenchmarkConfig
from klear_core.config.data import GeneratedSource
from klear_core.config.pipeline import PipelineConfig
from klear_core.evaluate.power import detectable


def detectable_lines(config: PipelineConfig) -> Iterator[str]:
    """Yield a sentence for each benchmark whose number of problems the config has."""
    for benchmark in config.benchmarks:
        num_problems = _num_problems(benchmark)
        if num_problems is None:
            continue
        n = benchmark.num_samples
        found = detectable(num_problems, n, confidence=config.evaluate.confidence)
        start = f"{benchmark.name}, {num_problems:,} problems, n = {n}: "
        if found.gain is None:
            seen = "too few problems to show any gain"
        else:
            seen = f"a gain of {100 * found.gain:.1f} points is shown 4 times in 5"
        yield f"{start}{seen}; two runs of one model differ by up to {100 * found.rerun:.1f} points"


def _num_problems(benchmark: BenchmarkConfig) -> int | None:
    if isinstance(benchmark.source, GeneratedSource):
        return benchmark.source.num_problems
    return benchmark.expected_rows
