from pathlib import Path

from klear_core.artifacts.records import write_shard
from klear_core.config.data import BenchmarkConfig, ProceduralSource
from klear_core.config.evaluate import EvaluateConfig, EvaluateSamplingConfig
from klear_core.config.train import TinyModelConfig
from klear_core.config.verify import VerifyConfig
from klear_core.evaluate.run import evaluate_model
from klear_core.evaluate.sample import read_suite
from klear_core.metrics import NullTelemetry
from klear_core.train.base_model import prepare_base
from klear_core.types import CodeReference, Difficulty, Domain, Problem, StdinCase, StdinTests


def test_code_judged_with_less_isolation_marks_the_artifact(tmp_path: Path) -> None:
    tests = StdinTests(cases=(StdinCase(input="1 2\n", output="3\n"),))
    problem = Problem(
        problem_id="p",
        source="s",
        domain=Domain.CODE,
        question="Print the sum.",
        reference=CodeReference(tests=tests),
        difficulty=Difficulty.EASY,
    )
    write_shard(tmp_path / "benchmarks" / "sums" / "00000-of-00001.parquet", [problem])
    prepare_base(TinyModelConfig(num_layers=1), seed=0, workdir=tmp_path / "base", telemetry=NullTelemetry())
    summary = evaluate_model(
        EvaluateConfig(sampling=EvaluateSamplingConfig(temperature=1.0, max_new_tokens=4), greedy=False),
        VerifyConfig(sandbox="rlimits-only"),
        read_suite(tmp_path / "benchmarks", (BenchmarkConfig(name="sums", source=ProceduralSource(), num_samples=1),)),
        model=tmp_path / "base",
        seed=0,
        workdir=tmp_path / "out",
        telemetry=NullTelemetry(),
    )
    assert any("rlimits-only" in note for note in summary.notes)
