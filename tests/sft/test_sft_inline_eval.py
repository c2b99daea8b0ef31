"""Scores while SFT trains: of the models of some steps, beside a training that neither waits nor learns otherwise."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from safetensors.torch import load_file
from sft_scorers import CountingScorer, opened, with_curve
from sft_traces import config, inputs
from toy_inline_evals import toy_inline_eval

from klear_core.cluster.nodes import EnginePlan, plan_scorer
from klear_core.cluster.placement import Node
from klear_core.config.evaluate import (
    InlineEvalConfig,
    LocalEngineConfig,
    TorchEngineConfig,
    TorchEngineRuntime,
    VllmEngineConfig,
    VllmRuntime,
)
from klear_core.config.load import validate
from klear_core.config.pipeline import PipelineConfig, ScorerConfig
from klear_core.config.settings import config_digest
from klear_core.config.stage import SftJob
from klear_core.config.train import SftConfig, TrainRuntime
from klear_core.errors import ConfigError, ResourceError
from klear_core.evaluate.inline_eval import process_scorer
from klear_core.metrics import METRICS_FILE, MetricsFile, read_metrics
from klear_core.sft.loop import train_sft
from klear_core.train.inline_eval import ModelScorer

Given = tuple[Path, Path]


class Telemetry:
    """Writes the metrics file as a stage does; raises at a step if told to, as a kill would."""

    def __init__(self, workdir: Path, die_at: int | None = None) -> None:
        workdir.mkdir(exist_ok=True)
        self.file = MetricsFile(workdir / METRICS_FILE)
        self.die_at = die_at
        self.is_first = True
        self.last_step = threading.Event()
        self.num_steps = -1

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if self.is_first:
            self.file.rewind(step)
        self.is_first = False
        self.file.append(metrics, step=step)
        if step == self.die_at:
            raise KeyboardInterrupt
        if step == self.num_steps:
            self.last_step.set()

    def add(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.file.append(metrics, step=step)

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Ignore."""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    return inputs(tmp_path_factory.mktemp("inputs"))


def curve_config(every_steps: int) -> SftConfig:
    return with_curve(config(every_steps=3, max_steps=5), every_steps=every_steps)


def run(
    given: Given, workdir: Path, cfg: SftConfig, telemetry: Telemetry, scorer: ModelScorer | None
) -> tuple[str, ...]:
    model, traces = given
    beside = {} if scorer is None else {"open_scorer": opened(scorer)}
    train = {"model": model, "traces": traces, "seed": 5, "workdir": workdir, "telemetry": telemetry}
    return train_sft(cfg, run_ranks=run_ranks, **train, **beside).notes  # type: ignore[arg-type]


def points(workdir: Path) -> list[tuple[int, float]]:
    rows = read_metrics(workdir / METRICS_FILE)
    return [(int(row["step"] or 0), row["sft/eval/avg"] or 0.0) for row in rows if "sft/eval/avg" in row]


def losses(workdir: Path) -> list[float | None]:
    rows = read_metrics(workdir / METRICS_FILE)
    return [row["sft/loss/train"] for row in rows if "sft/loss/train" in row]


def waiting(workdir: Path) -> list[Path]:
    return list((workdir / "scratch" / "curve").iterdir())


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def weights(workdir: Path) -> dict[str, torch.Tensor]:
    return load_file(workdir / "model" / "model.safetensors")


def test_the_base_is_scored_as_step_0_then_every_few_steps_and_the_model_that_is_saved(
    given: Given, tmp_path: Path
) -> None:
    scorer = CountingScorer()
    assert run(given, tmp_path / "with", curve_config(2), Telemetry(tmp_path / "with"), scorer) == ()
    assert points(tmp_path / "with") == [(0, 1.0), (2, 2.0), (4, 3.0), (5, 4.0)]
    assert same(scorer.seen[0], load_file(given[0] / "model" / "model.safetensors"))
    assert same(scorer.seen[-1], weights(tmp_path / "with"))
    assert waiting(tmp_path / "with") == []
    # the training itself does not notice
    run(given, tmp_path / "without", curve_config(2), Telemetry(tmp_path / "without"), None)
    assert same(weights(tmp_path / "with"), weights(tmp_path / "without"))
    assert not (tmp_path / "without" / "scratch" / "curve").exists()
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


def test_training_waits_for_no_score_and_the_models_queue(given: Given, tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path)
    telemetry.num_steps = 5

    class Slow(CountingScorer):
        def score(self, model: Path) -> dict[str, float]:
            assert telemetry.last_step.wait(60), "training waits for the first score"
            return super().score(model)

    scorer = Slow()
    run(given, tmp_path, curve_config(1), telemetry, scorer)
    assert [step for step, _ in points(tmp_path)] == [0, 1, 2, 3, 4, 5]
    assert same(scorer.seen[-1], weights(tmp_path))


def test_a_score_that_fails_is_told_and_costs_no_training(
    given: Given, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        notes = run(given, tmp_path, curve_config(2), Telemetry(tmp_path), CountingScorer(fail_at=1))
    assert notes == ("the curve has no score after step 2: the engine died",)
    assert "sft: the model after step 2 could not be scored: the engine died" in caplog.messages
    assert [step for step, _ in points(tmp_path)] == [0, 4, 5]
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_score_that_cannot_be_logged_is_told_and_costs_no_training(given: Given, tmp_path: Path) -> None:
    class Full(Telemetry):
        def add(self, metrics: Mapping[str, float], *, step: int) -> None:
            raise OSError("no space left on device")

    notes = run(given, tmp_path, curve_config(5), Full(tmp_path), CountingScorer())
    assert notes == ("the curve may lack its last scores: no space left on device",)
    assert min(waiting(tmp_path)).name == "step-00000000"  # the next attempt scores it
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_model_that_cannot_be_written_is_told_and_costs_no_training(given: Given, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "curve").write_text("a file where the folder should be")
    notes = run(given, tmp_path, curve_config(5), Telemetry(tmp_path), CountingScorer())
    assert notes == ("the curve has no score after step 0, 5: the model could not be written",)
    assert points(tmp_path) == []


@pytest.mark.parametrize("die_at", [2, 4, 5])  # before the first checkpoint, after it, at the last step
def test_a_killed_run_keeps_its_points_and_scores_none_of_them_twice(given: Given, tmp_path: Path, die_at: int) -> None:
    scorer = CountingScorer()
    with pytest.raises(KeyboardInterrupt):
        run(given, tmp_path, curve_config(2), Telemetry(tmp_path, die_at), scorer)
    assert scorer.stopped.is_set()
    run(given, tmp_path, curve_config(2), Telemetry(tmp_path), scorer)
    assert [step for step, _ in points(tmp_path)] == [0, 2, 4, 5]
    assert waiting(tmp_path) == []
    run(given, tmp_path / "whole", curve_config(2), Telemetry(tmp_path / "whole"), unbroken := CountingScorer())
    assert same(scorer.seen[-1], unbroken.seen[-1])


def test_an_error_of_the_training_stops_the_scorer(given: Given, tmp_path: Path) -> None:
    class Endless(CountingScorer):
        def score(self, model: Path) -> dict[str, float]:
            assert self.stopped.wait(60)
            raise ResourceError("stopped")

    with pytest.raises(KeyboardInterrupt):
        run(given, tmp_path, curve_config(2), Telemetry(tmp_path, die_at=1), Endless())
    assert points(tmp_path) == []


@pytest.mark.slow
def test_a_process_scores_a_model_and_tells_why_it_cannot(given: Given, tmp_path: Path) -> None:
    folder = given[0] / "model"
    scorer_config = ScorerConfig(engine=TorchEngineConfig(runtime=TorchEngineRuntime(device="cpu")), num_threads=1)
    with process_scorer(toy_inline_eval(tmp_path, scorer=scorer_config), folder, seed=0) as scorer:
        point = scorer.score(folder)
        assert point["avg"] == point["avg_rerun_low"] == 0.0  # it knows nothing yet
        assert 0 < point["avg_rerun_high"] <= point["avg_high"] < 1
        assert point["tokens_mean"] <= 6
        with pytest.raises(ResourceError, match=r"the scoring process ended with exit status 1: .*no-such-model"):
            scorer.score(tmp_path / "no-such-model")
        scorer.stop()
        with pytest.raises(ResourceError, match="stopped"):
            scorer.score(folder)


def test_a_curve_is_in_no_fingerprint_and_names_a_benchmark_that_there_is(tmp_path: Path) -> None:
    source = toy_inline_eval(tmp_path).source
    plain = PipelineConfig(benchmarks=(source,))
    tree = {"benchmarks": [source.model_dump(mode="json")], "sft": {"runtime": {"curve": {"benchmark": "toy"}}}}
    drawn = PipelineConfig.model_validate(tree)
    jobs = [SftJob.of(cfg) for cfg in (plain, drawn)]
    assert config_digest(jobs[0]) == config_digest(jobs[1])
    assert jobs[0].runtime.curve is None
    assert jobs[1].runtime.curve is not None
    assert jobs[1].runtime.curve.scorer is not None
    assert jobs[1].runtime.curve.scorer.engine == drawn.evaluate.engine
    assert SftJob.model_validate_json(jobs[1].model_dump_json()) == jobs[1]
    tree["sft"] = {"runtime": {"curve": {"benchmark": "other"}}}
    with pytest.raises(
        ConfigError, match=r"sft\.runtime\.curve\.benchmark = 'other' is none of the benchmarks, .*: toy"
    ):
        validate(tree, origin="profile")


@pytest.mark.parametrize(
    ("every_steps", "num_steps", "steps"), [(2, 5, [0, 2, 4, 5]), (2, 4, [0, 2, 4]), (10, 3, [0, 3]), (1, 1, [0, 1])]
)
def test_points_are_counted_as_they_are_due(every_steps: int, num_steps: int, steps: list[int]) -> None:
    curve = InlineEvalConfig(benchmark="toy", every_steps=every_steps)
    assert [step for step in range(num_steps + 1) if curve.is_due(step, num_steps=num_steps)] == steps
    assert curve.num_points(num_steps) == len(steps)


TORCH, VLLM = TorchEngineConfig(), VllmEngineConfig()
VLLM_2 = VllmEngineConfig(runtime=VllmRuntime(tensor_parallel=2))
SMALL, LARGE = 10_000_000, 8_000_000_000


def nodes(gpus_of_nodes: list[int]) -> list[Node]:
    return [Node(name=f"node {i}", num_cpus=8, num_gpus=gpus) for i, gpus in enumerate(gpus_of_nodes)]


@pytest.mark.parametrize(
    ("engine", "runtime", "gpus_of_nodes", "num_params", "expected"),
    [
        (TORCH, {}, [0], SMALL, 0),  # no GPU at all
        (VLLM, {}, [0], SMALL, 0),
        (TORCH, {"num_workers": 2}, [3], LARGE, 1),
        (VLLM, {"num_workers": 2}, [3], LARGE, 1),
        (TORCH, {"num_workers": 2}, [2], SMALL, 0),  # the learner has both
        (VLLM, {"num_workers": 2, "device": "cpu"}, [1], LARGE, 1),
        (VLLM_2, {"num_workers": 4}, [3, 3], LARGE, 2),  # the ranks fill the first node
    ],
)
def test_the_scorer_gets_a_gpu_that_the_learner_leaves_free(
    engine: LocalEngineConfig, runtime: dict[str, Any], gpus_of_nodes: list[int], num_params: int, expected: int
) -> None:
    plan = plan_scorer(engine, TrainRuntime.model_validate(runtime), nodes(gpus_of_nodes), num_params, key="sft")
    assert plan == EnginePlan(num_engines=1, gpus_per_engine=expected)


@pytest.mark.parametrize(("engine", "num_params"), [(VLLM, SMALL), (TORCH, LARGE)])
def test_a_scorer_without_a_free_gpu_is_refused_with_the_setting_to_change(
    engine: LocalEngineConfig, num_params: int
) -> None:
    with pytest.raises(
        ResourceError, match=r"sft\.runtime\.curve.* needs 1 of 2 GPUs, and the learner's 2 ranks leave 0"
    ):
        plan_scorer(engine, TrainRuntime(num_workers=2), nodes([2]), num_params, key="sft")


def test_the_gpus_of_a_scorer_must_be_left_free_on_one_node() -> None:
    runtime = TrainRuntime(num_workers=4, context_parallel=2)
    with pytest.raises(
        ResourceError, match=r"4 ranks leave 2 \(1, 1 on the nodes; those of an engine must be on one\): lower sft.run"
    ):
        plan_scorer(VLLM_2, runtime, nodes([3, 3]), LARGE, key="sft")
