"""Base answers in the window that the models trained from it will have: a longer one is asked for in the settings, not in its folder."""

from pathlib import Path

import pytest

from klear_core.config.data import BenchmarkConfig, ProceduralSource
from klear_core.config.data_jobs import BenchmarksRuntime
from klear_core.config.evaluate import EvaluateConfig, EvaluateSamplingConfig
from klear_core.config.train import HfModelConfig, TinyModelConfig
from klear_core.config.verify import VerifyConfig
from klear_core.data.benchmarks import prepare_benchmarks
from klear_core.errors import DataError
from klear_core.evaluate.run import evaluate_model
from klear_core.evaluate.sample import read_suite
from klear_core.metrics import NullTelemetry
from klear_core.train.base_model import model_folder, prepare_base

CHAINS = BenchmarkConfig(name="chains", source=ProceduralSource(num_problems=2, num_operations=(2,)), num_samples=1)


def answers_of_base(root: Path, *, window: int | None) -> int:
    """Of a folder whose own 16 positions hold no question."""
    prepare_base(
        TinyModelConfig(num_layers=1, max_position_embeddings=16),
        seed=0,
        workdir=root / "tiny",
        telemetry=NullTelemetry(),
    )
    pointed = HfModelConfig(path=str(model_folder(root / "tiny")), max_position_embeddings=window)
    for stage in ("base", "benchmarks"):
        (root / stage).mkdir()
    prepare_base(pointed, seed=0, workdir=root / "base", telemetry=NullTelemetry())
    prepare_benchmarks(
        [CHAINS], seed=0, runtime=BenchmarksRuntime(), workdir=root / "benchmarks", telemetry=NullTelemetry()
    )
    summary = evaluate_model(
        EvaluateConfig(sampling=EvaluateSamplingConfig(max_new_tokens=4), greedy=False),
        VerifyConfig(),
        read_suite(root / "benchmarks", [CHAINS]),
        model=root / "base",
        seed=0,
        workdir=root / "out",
        telemetry=NullTelemetry(),
    )
    return int(summary.counts["answers"])


def test_base_is_scored_in_the_window_that_its_trained_models_get(tmp_path: Path) -> None:
    assert answers_of_base(tmp_path, window=256) == 2


def test_without_a_wider_window_a_question_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"benchmark 'chains', problem .*: the engine rejected the request"):
        answers_of_base(tmp_path, window=None)
