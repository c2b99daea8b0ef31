"""Evaluation with an engine on each of two Ray nodes: what one in the process answers, and an engine that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from klear_core.artifacts.records import read_shards
from klear_core.config.evaluate import (
    EvaluateConfig,
    EvaluateRuntime,
    EvaluateSamplingConfig,
    TorchEngineConfig,
    TorchEngineRuntime,
)
from klear_core.config.train import TinyModelConfig
from klear_core.config.verify import VerifyConfig
from klear_core.evaluate.run import EnginesAndJudges, answer_suite
from klear_core.evaluate.sample import Benchmark
from klear_core.metrics import NullTelemetry
from klear_core.train.base_model import prepare_base
from klear_core.types import Difficulty, Domain, EvalSample, MathReference, Problem
from tasks.resources import open_engines_and_judges

pytest.importorskip("ray")
from two_nodes import actors_of, two_nodes

pytestmark = pytest.mark.slow

RUNTIME = EvaluateRuntime(num_engines=2, answers_per_shard=8)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with two_nodes():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("model")
    prepare_base(TinyModelConfig(num_layers=1), seed=0, workdir=workdir, telemetry=NullTelemetry())
    return workdir


def suite() -> list[Benchmark]:
    names = {"first": 4, "second": 3}
    return [
        Benchmark(name=name, num_samples=4, problems=tuple(problem(f"{name}-{i}") for i in range(count)))
        for name, count in names.items()
    ]


def problem(name: str) -> Problem:
    reference = MathReference(answers=("1",))
    return Problem(
        problem_id=name,
        question=f"Say {name}.",
        reference=reference,
        source="t",
        domain=Domain.MATH,
        difficulty=Difficulty.UNKNOWN,
    )


class KillsOneEngine(NullTelemetry):
    """Ends an engine's process once so many answers are there."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.killed: list[psutil.Process] = []

    def progress(self, done: int, total: int, note: str = "") -> None:
        if done >= self.after and not self.killed:
            self.killed = actors_of("EngineActor")[:1]
            for process in self.killed:
                process.kill()


def answers(model: Path, workdir: Path, *, is_pool: bool, telemetry: NullTelemetry | None = None) -> list[EvalSample]:
    cfg = EvaluateConfig(
        # few at a time, so that a kill finds some half finished and others not begun
        engine=TorchEngineConfig(runtime=TorchEngineRuntime(device="cpu", max_batch_size=2)),
        sampling=EvaluateSamplingConfig(max_new_tokens=48),
        max_unscored_rate=1.0,
        runtime=RUNTIME,
    )

    def run(compute: EnginesAndJudges) -> None:
        watcher = telemetry or NullTelemetry()
        answer_suite(model, cfg, suite(), VerifyConfig(), compute=compute, seed=5, workdir=workdir, telemetry=watcher)

    if is_pool:
        with open_engines_and_judges(cfg.engine, RUNTIME, model, section="evaluate") as compute:
            run(compute)
    else:
        run(EnginesAndJudges(section="evaluate"))
    return list(read_shards(workdir / "samples", EvalSample))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[EvalSample]:
    return answers(model, tmp_path_factory.mktemp("one"), is_pool=False)


def test_two_engines_on_two_nodes_answer_what_one_in_the_process_answers(
    cluster: None, model: Path, expected: list[EvalSample], tmp_path: Path
) -> None:
    assert answers(model, tmp_path, is_pool=True) == expected
    assert not psutil.wait_procs(actors_of("EngineActor"), timeout=90)[1]


def test_an_engine_killed_in_mid_run_is_replaced_and_the_answers_are_the_same(
    cluster: None, model: Path, expected: list[EvalSample], tmp_path: Path
) -> None:
    killer = KillsOneEngine(after=6)
    assert answers(model, tmp_path, is_pool=True, telemetry=killer) == expected
    assert killer.killed
