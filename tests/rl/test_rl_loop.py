"""The whole stage in this process: it learns, resumes, looks ahead no further than allowed, and keeps its books."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rl_builders import Recorder, constant_rate, low_byte_judge, problem, problem_artifact, rl_config, same_weights, weights
from safetensors.torch import load_file

from klear_core.config.engine import SamplingConfig
from klear_core.config.rl import RlCheckpointConfig, RlConfig, RlRuntime, RolloutConfig
from klear_core.config.verify import VerifyConfig
from klear_core.errors import DataError
from klear_core.generate.engine import TrainableEngine
from klear_core.metrics import NullTelemetry
from klear_core.records import read_shard
from klear_core.rl.describe import ShownRollout
from klear_core.rl.loop import Lookahead, choose_problems, run_rl, train_rl
from klear_core.rl.progress import Progress
from klear_core.rl.rollout import Collected, Judge
from klear_core.rl.workers import LearnerHandle, LearnerLost, LocalLearner, LocalWorkers, RlRun, Workers
from klear_core.types import Domain, Outcome, Problem, TrainSample, Verdict

PROBLEMS = [problem(f"q{i}") for i in range(6)]


def run(
    cfg: RlConfig,
    base: Path,
    workdir: Path,
    *,
    telemetry: Recorder | None = None,
    judge: Judge = low_byte_judge,
    workers: Workers | None = None,
) -> tuple[Progress, Recorder]:
    telemetry = telemetry or Recorder()
    job = RlRun(cfg=cfg, model=base, seed=0, workdir=workdir)
    return asyncio.run(run_rl(job, PROBLEMS, judge, telemetry, workers or LocalWorkers())), telemetry


def test_reward_rises_on_a_task_that_can_be_learnt(base: Path, tmp_path: Path) -> None:
    rollout = RolloutConfig(groups_per_step=6, samples_per_group=16, sampling=SamplingConfig(max_new_tokens=4))
    cfg = rl_config(num_steps=15, optim=constant_rate(1e-2), rollout=rollout)
    _, telemetry = run(cfg, base, tmp_path)
    rates = telemetry.column("rl/pass/rate")
    assert rates[0] < 0.6
    assert sum(rates[-3:]) / 3 > sum(rates[:3]) / 3 + 0.2


def test_every_step_logs_the_same_well_formed_names(base: Path, tmp_path: Path) -> None:
    _, telemetry = run(rl_config(), base, tmp_path)
    assert telemetry.steps == [1, 2, 3]
    names = set(telemetry.rows[0])
    assert all(name.count("/") == 2 and name.startswith("rl/") for name in names)
    assert {"rl/reward/mean", "rl/pass/rate", "rl/groups/kept", "rl/entropy/mean", "rl/clip/low_frac", "rl/mismatch/k3"} <= names


def test_a_killed_run_goes_on_to_the_same_weights_and_the_same_books(base: Path, tmp_path: Path) -> None:
    cfg = rl_config(num_steps=4)
    whole, _ = run(cfg, base, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(cfg, base, tmp_path / "killed", telemetry=Recorder(fail_at=3))
    resumed, telemetry = run(cfg, base, tmp_path / "killed")
    assert telemetry.steps == [3, 4]
    assert resumed.counters() == whole.counters()
    assert same_weights(tmp_path / "whole", tmp_path / "killed")


def test_a_finished_run_is_not_run_again(base: Path, tmp_path: Path) -> None:
    first, _ = run(rl_config(), base, tmp_path)
    again, telemetry = run(rl_config(), base, tmp_path)
    assert telemetry.rows == []
    assert again.counters() == first.counters()


class DyingLearner(LocalLearner):
    """Loses its state once, in the fourth step, as a killed process would."""

    deaths = 0

    async def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        if self._learner.version == 3 and self.deaths == 0:
            self.deaths += 1
            raise LearnerLost("the learner died")
        return await super().step(samples)


class DyingWorkers(LocalWorkers):
    async def start(self, job: RlRun) -> tuple[LearnerHandle, TrainableEngine]:
        learner, engine = await super().start(job)
        assert isinstance(learner, LocalLearner)
        return DyingLearner(learner._learner, num_threads=1), engine


def test_a_lost_learner_costs_only_the_steps_since_its_checkpoint(base: Path, tmp_path: Path) -> None:
    runtime = RlRuntime(device="cpu", checkpoint=RlCheckpointConfig(every_steps=2))
    cfg = rl_config(num_steps=4, runtime=runtime)
    run(cfg, base, tmp_path / "whole")
    progress, telemetry = run(cfg, base, tmp_path / "lost", workers=DyingWorkers())
    assert progress.step == 4
    assert telemetry.steps == [1, 2, 3, 3, 4]  # the third was logged, lost with the learner, and done again
    assert same_weights(tmp_path / "whole", tmp_path / "lost")


@pytest.mark.parametrize("bound", [1, 2])
def test_staleness_reaches_its_bound_and_stays_there(base: Path, tmp_path: Path, bound: int) -> None:
    progress, telemetry = run(rl_config(num_steps=6, max_staleness=bound), base, tmp_path)
    assert max(telemetry.column("rl/staleness/max")) == bound
    assert "stale" not in progress.fates.of("rollout")


def test_on_policy_single_updates_are_remarked_upon(base: Path, tmp_path: Path) -> None:
    cfg = rl_config(minibatches_per_step=1, old_logps="learner")
    progress, _ = run(cfg, base, tmp_path)
    choice = choose_problems(problem_artifact(tmp_path / "problems", PROBLEMS) / "problems", cfg)[1]
    assert "every ratio was 1" in progress.summary(cfg, choice, seed=0).notes[0]


def test_steps_without_a_survivor_change_nothing_and_end_cleanly(base: Path, tmp_path: Path) -> None:
    async def all_right(_problem: Problem, _response: str) -> Verdict:
        return Verdict(outcome=Outcome.SCORED, score=1.0)

    progress, telemetry = run(rl_config(), base, tmp_path, judge=all_right)
    assert telemetry.column("rl/groups/kept") == [0, 0, 0]
    assert progress.steps_without_update == 3
    (file,) = (base / "model").glob("*.safetensors")
    assert all(torch.equal(w, weights(tmp_path)[k]) for k, w in load_file(file).items())


def test_progress_survives_as_plain_numbers() -> None:
    progress = Progress(step=3, position=12, largest_ratio_gap=0.25)
    progress.fates.group("trained", 5)
    assert Progress.of(progress.counters()) == progress


def test_the_stage_leaves_a_model_sample_answers_and_books_that_add_up(base: Path, tmp_path: Path) -> None:
    problems = problem_artifact(tmp_path / "problems", [*PROBLEMS, problem("print('hi')", domain=Domain.CODE)])
    workdir = tmp_path / "work"
    summary = train_rl(
        rl_config(),
        VerifyConfig(),
        model=base,
        problems=problems,
        seed=0,
        workdir=workdir,
        telemetry=NullTelemetry(),
        workers=LocalWorkers(),
    )
    choice, groups, rollouts = summary.ledger
    assert choice.dropped == {"other_domain": 1}
    assert groups.num_in == 12
    assert rollouts.num_in == 48
    assert summary.counts["steps"] == 3
    shown = read_shard(workdir / "sample_rollouts.parquet", ShownRollout)
    assert sorted({s.step for s in shown}) == [1, 2, 3]
    assert weights(workdir)


def test_a_domain_without_problems_is_refused(tmp_path: Path) -> None:
    folder = problem_artifact(tmp_path, PROBLEMS) / "problems"
    with pytest.raises(DataError, match="none of its 6 problems is of domain 'code'"):
        choose_problems(folder, rl_config(domain="code"))


def test_lookahead_collects_in_order_and_never_further_than_allowed() -> None:
    started: list[int] = []

    async def collect() -> Collected:
        started.append(len(started))
        await asyncio.sleep(0)
        return started[-1]  # type: ignore[return-value]

    async def drive() -> list[int]:
        seen = []
        async with Lookahead(collect, depth=1, num_batches=4) as ahead:
            for step in range(4):
                seen.append(await ahead.next())
                for _ in range(10):
                    await asyncio.sleep(0)
                assert len(started) <= step + 2
                ahead.allow_another()
        return seen  # type: ignore[return-value]

    assert asyncio.run(drive()) == [0, 1, 2, 3]
    assert started == [0, 1, 2, 3]
