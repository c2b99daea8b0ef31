from __future__ import annotations

from klear_core.config.data import BenchmarkConfig, FileSource, ProceduralSource
from klear_core.config.pipeline import PipelineConfig
from klear_core.pipeline.plan import detectable_lines


def lines_of(*benchmarks: BenchmarkConfig) -> list[str]:
    return list(detectable_lines(PipelineConfig(benchmarks=benchmarks)))


def test_the_plan_says_what_aime_can_show() -> None:
    aime = BenchmarkConfig(name="aime24", source=FileSource(path="a.jsonl"), expected_rows=30, num_samples=64)
    assert lines_of(aime) == [
        "aime24, 30 problems, n = 64: a gain of 6.2 points is shown 4 times in 5; two runs of one model differ by up to "
        "2.6 points"
    ]


def test_five_problems_can_show_nothing() -> None:
    few = BenchmarkConfig(name="few", source=ProceduralSource(num_problems=5), num_samples=64)
    assert "too few problems to show any gain" in lines_of(few)[0]


def test_a_benchmark_of_unknown_size_has_no_line() -> None:
    assert lines_of(BenchmarkConfig(name="mine", source=FileSource(path="a.jsonl"))) == []
