from __future__ import annotations

import pytest

from klear_core.config.data import BenchmarkConfig, FileSource, ProceduralSource
from klear_core.config.pipeline import PipelineConfig, PromoteConfig
from klear_core.evaluate.stats.significance import GateBenchmark, gate_chances
from klear_core.pipeline.plan import detectable_lines, gate_lines


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


# ---- chances of the champion's rule ----


def test_the_chances_are_those_of_the_rule_itself() -> None:
    """`klear bench gate` counts .70 and .83 on LiveCodeBench v6 with the functions that decide; so do t tests here."""
    found = gate_chances([GateBenchmark(num_problems=131, num_samples=8, margin=4.5)], confidence=0.95)
    assert found.equal_passes == pytest.approx(0.70, abs=0.06)
    assert found.better_is_promoted == pytest.approx(0.83, abs=0.06)


def test_the_plan_says_what_the_rule_will_decide() -> None:
    aime = BenchmarkConfig(name="aime24", source=FileSource(path="a.jsonl"), expected_rows=30, num_samples=64)
    (line,) = gate_lines(PipelineConfig(benchmarks=(aime,), promote=PromoteConfig(margin=8)))
    assert line.startswith("promote: an equal model is found non-inferior in ")
    assert list(gate_lines(PipelineConfig(benchmarks=(aime,)))) == []
