"""Scores while RL trains: of the step's weights, beside the rollouts, and without a change to what is learnt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
from rl_builders import Recorder, low_byte_judge, problem, problem_artifact, rl_config, same_weights
from toy_inline_evals import toy_inline_eval

from klear_core.config.evaluate import InlineEvalConfig
from klear_core.config.load import validate
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlCheckpointConfig, RlConfig, RlRuntime
from klear_core.config.settings import config_digest
from klear_core.config.stage import RlJob
from klear_core.config.verify import VerifyConfig
from klear_core.errors import ConfigError
from klear_core.evaluate.inline_eval import fixed_set, open_inline_eval
from klear_core.generate.decoder.torch_engine import TorchEngine
from klear_core.generate.engine import InferenceEngine
from klear_core.metrics import METRICS_FILE, MetricsFile, read_metrics
from klear_core.rl.interfaces import LocalWorkers, RlSetup
from klear_core.rl.loop import RlOptions, run_rl, train_rl
from klear_core.verify import JudgePool

PROBLEMS = [problem(f"q{i}") for i in range(6)]


class Points(Recorder):
    """Also keeps what is added to steps, in order with the rows."""

    def __init__(self, fail_at: int = -1) -> None:
        super().__init__(fail_at)
        self.points: list[tuple[int, dict[str, float]]] = []
        self.order: list[str] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        super().log(metrics, step=step)
        self.order.append(f"row {step}")

    def add(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.points.append((step, dict(metrics)))
        self.order.append(f"point {step}")


class FiledPoints(Points):
    """Also writes the stage's metrics file, as a stage does."""

    def __init__(self, workdir: Path, fail_at: int = -1) -> None:
        super().__init__(fail_at)
        self.file = MetricsFile(workdir / METRICS_FILE)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        super().log(metrics, step=step)
        self.file.rewind(step)
        self.file.append(metrics, step=step)

    def add(self, metrics: Mapping[str, float], *, step: int) -> None:
        super().add(metrics, step=step)
        self.file.append(metrics, step=step)


class VersionEval:
    """Reports the version of the weights at the start and at the end of its answers."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    async def __call__(self, engine: InferenceEngine) -> dict[str, float]:
        assert isinstance(engine, TorchEngine)
        before = engine.version
        await asyncio.sleep(0.05)  # the next rollouts are sampled meanwhile
        self.seen.append((before, engine.version))
        return {"avg": before / 10, "tokens_mean": 3.0}


class InterruptedEval(VersionEval):
    """Stops the run at the score of one version."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version

    async def __call__(self, engine: InferenceEngine) -> dict[str, float]:
        point = await super().__call__(engine)
        if self.seen[-1] == (self.version, self.version):
            raise KeyboardInterrupt
        return point


def curve_config(every_steps: int, *, checkpoint_every: int = 1, **changes: object) -> RlConfig:
    curve = InlineEvalConfig(benchmark="toy", num_problems=2, every_steps=every_steps)
    checkpoint = RlCheckpointConfig(every_steps=checkpoint_every)
    return rl_config(runtime=RlRuntime(device="cpu", checkpoint=checkpoint, curve=curve), **changes)


def run(cfg: RlConfig, base: Path, workdir: Path, telemetry: Points, inline_eval: VersionEval | None) -> None:
    setup = RlSetup(cfg=cfg, model=base, seed=0, workdir=workdir)
    asyncio.run(run_rl(setup, PROBLEMS, low_byte_judge, telemetry, LocalWorkers(), RlOptions(inline_eval=inline_eval)))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_model_is_scored_before_step_1_every_few_steps_and_at_the_end_each_time_by_one_version(
    base: Path, tmp_path: Path, max_staleness: int
) -> None:
    inline_eval, telemetry = VersionEval(), Points()
    run(curve_config(2, num_steps=5, max_staleness=max_staleness), base, tmp_path, telemetry, inline_eval)
    assert inline_eval.seen == [(0, 0), (2, 2), (4, 4), (5, 5)]
    assert telemetry.points == [(step, {"rl/eval/avg": step / 10, "rl/eval/tokens_mean": 3.0}) for step in (0, 2, 4, 5)]
    # a point is logged when it is known, after the row of its own step and before the row of the next
    assert telemetry.order == [
        *("point 0", "row 1", "row 2", "point 2", "row 3", "row 4", "point 4", "row 5", "point 5")
    ]


def test_a_killed_run_scores_the_checkpoint_that_it_goes_on_from(base: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(curve_config(2, num_steps=4), base, tmp_path, Points(fail_at=3), VersionEval())
    telemetry = Points()
    run(curve_config(2, num_steps=4), base, tmp_path, telemetry, VersionEval())
    assert telemetry.order == ["point 2", "row 3", "row 4", "point 4"]


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
@pytest.mark.parametrize("checkpoint_every", [2, 99])
def test_a_killed_run_has_each_point_once(base: Path, tmp_path: Path, fail_at: int, checkpoint_every: int) -> None:
    """The point of the weights that it goes on from is there if the kill came after the next step's update."""
    cfg = curve_config(1, num_steps=4, checkpoint_every=checkpoint_every)
    killed, resumed = FiledPoints(tmp_path, fail_at=fail_at), FiledPoints(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(cfg, base, tmp_path, killed, VersionEval())
    run(cfg, base, tmp_path, resumed, VersionEval())
    points = [row["step"] for row in read_metrics(tmp_path / METRICS_FILE) if "rl/eval/avg" in row]
    assert points == [0, 1, 2, 3, 4]
    begun = (fail_at - 1) // checkpoint_every * checkpoint_every
    assert [step for step, _ in resumed.points] == list(range(begun + 1, 5))


def test_a_run_killed_while_its_last_model_is_scored_gets_this_score_when_it_goes_on(
    base: Path, tmp_path: Path
) -> None:
    cfg = curve_config(2, num_steps=2)
    with pytest.raises(KeyboardInterrupt):
        run(cfg, base, tmp_path, FiledPoints(tmp_path), InterruptedEval(version=2))
    for _ in range(2):  # the second has all points
        run(cfg, base, tmp_path, FiledPoints(tmp_path), VersionEval())
        points = [row["step"] for row in read_metrics(tmp_path / METRICS_FILE) if "rl/eval/avg" in row]
        assert points == [0, 2]


def test_real_scores_have_intervals_and_leave_the_weights_as_they_are_without(base: Path, tmp_path: Path) -> None:
    problems = problem_artifact(tmp_path / "problems", PROBLEMS)
    group_filter = {"zero_advantage": "off"}  # the real judge finds nothing right in what this model says
    opened = partial(open_inline_eval, toy_inline_eval(tmp_path), JudgePool, seed=0)
    telemetry = Points()
    for name, inline_eval in (("with", {"open_inline_eval": opened}), ("without", {})):
        setup = RlSetup(
            cfg=curve_config(1, num_steps=2, group_filter=group_filter), model=base, seed=0, workdir=tmp_path / name
        )
        train_rl(setup, VerifyConfig(), problems=problems, telemetry=telemetry, workers=LocalWorkers(), **inline_eval)  # type: ignore[arg-type]
    assert [step for step, _ in telemetry.points] == [0, 1, 2]
    for _, point in telemetry.points:
        assert point["rl/eval/avg"] == point["rl/eval/avg_rerun_low"] == 0.0
        assert 0 < point["rl/eval/avg_rerun_high"] <= point["rl/eval/avg_high"] < 1
        assert point["rl/eval/tokens_mean"] <= 6
        assert point["rl/eval/unscored_frac"] == 0.0
    assert same_weights(tmp_path / "with", tmp_path / "without")


def test_the_fixed_set_is_drawn_by_the_seed_and_a_larger_one_holds_a_smaller(tmp_path: Path) -> None:
    few, more = (
        fixed_set(toy_inline_eval(tmp_path), seed=0),
        fixed_set(toy_inline_eval(tmp_path, num_problems=7), seed=0),
    )
    assert few == fixed_set(toy_inline_eval(tmp_path), seed=0)
    assert more[:4] == few
    assert fixed_set(toy_inline_eval(tmp_path), seed=1) != few
    assert len(fixed_set(toy_inline_eval(tmp_path, num_problems=99), seed=0)) == 10


def test_a_curve_is_in_no_fingerprint_and_names_a_benchmark_that_there_is(tmp_path: Path) -> None:
    job = toy_inline_eval(tmp_path)
    plain = PipelineConfig(benchmarks=(job.source,))
    tree = {"benchmarks": [job.source.model_dump(mode="json")], "rl": {"runtime": {"curve": {"benchmark": "toy"}}}}
    drawn = PipelineConfig.model_validate(tree)
    jobs = [RlJob.of(cfg, "rl") for cfg in (plain, drawn)]
    assert config_digest(jobs[0]) == config_digest(jobs[1])
    assert jobs[0].runtime.curve is None
    assert jobs[1].runtime.curve is not None
    assert jobs[1].runtime.curve.source == job.source
    assert RlJob.model_validate_json(jobs[1].model_dump_json()) == jobs[1]
    tree["rl"] = {"runtime": {"curve": {"benchmark": "other"}}}
    with pytest.raises(
        ConfigError, match=r"rl\.runtime\.curve\.benchmark = 'other' is none of the benchmarks, .*: toy"
    ):
        validate(tree, origin="profile")
