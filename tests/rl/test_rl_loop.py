"""The whole stage in this process: it learns, resumes, looks ahead no further than allowed, and keeps its books."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rl_builders import (
    Recorder,
    constant_rate,
    low_byte_judge,
    problem,
    problem_artifact,
    rl_config,
    same_weights,
    weights,
)
from safetensors.torch import load_file

from klear_core.artifacts.bucket import LeaseTimes
from klear_core.artifacts.manifest import LedgerStep, ReasonCounts, StageSummary
from klear_core.artifacts.object_store import ObjectStore
from klear_core.artifacts.records import read_shard, shard_name, write_shard
from klear_core.config.evaluate import SamplingConfig, TorchEngineConfig
from klear_core.config.rl import RlCheckpointConfig, RlConfig, RlRuntime, RolloutConfig
from klear_core.config.settings import RareYieldLimits
from klear_core.config.verify import VerifyConfig
from klear_core.errors import DataError
from klear_core.generate.decoder.torch_engine import TorchEngine
from klear_core.generate.engine import SamplingParams, TrainableEngine, WeightSource
from klear_core.metrics import METRICS_FILE, MetricsFile, NullTelemetry, read_metrics
from klear_core.rl.interfaces import LearnerHandle, LearnerLost, LocalLearner, LocalWorkers, RlSetup, Workers
from klear_core.rl.loop import check_trained_share, count_step, run_rl, train_rl
from klear_core.rl.rollout import Lookahead, StepRollouts
from klear_core.rl.state import RlState
from klear_core.rl.step_metrics import ShownRollout
from klear_core.scores import RATES_FOLDER
from klear_core.stopping import Requeued, checkpoint_first, requeued_by_signal
from klear_core.train.base_model import model_folder
from klear_core.train.checkpoint import Counters
from klear_core.types import Completion, Domain, Judge, Outcome, PassRate, Problem, TrainSample, Verdict

PROBLEMS = [problem(f"q{i}") for i in range(6)]


def run(
    cfg: RlConfig,
    base: Path,
    workdir: Path,
    *,
    telemetry: Recorder | None = None,
    judge: Judge = low_byte_judge,
    workers: Workers | None = None,
) -> tuple[RlState, Recorder]:
    telemetry = telemetry or Recorder()
    job = RlSetup(cfg=cfg, model=base, seed=0, workdir=workdir)
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
    assert {
        "rl/reward/mean",
        "rl/pass/rate",
        "rl/groups/kept",
        "rl/entropy/mean",
        "rl/clip/low_frac",
        "rl/mismatch/k3",
    } <= names


@pytest.mark.parametrize("curriculum", [None, {}], ids=["uniform", "curriculum"])
def test_a_killed_run_goes_on_to_the_same_weights_and_the_same_books(
    base: Path, tmp_path: Path, curriculum: dict[str, float] | None
) -> None:
    cfg = rl_config(num_steps=4, curriculum=curriculum)
    whole, _ = run(cfg, base, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(cfg, base, tmp_path / "killed", telemetry=Recorder(fail_at=3))
    resumed, telemetry = run(cfg, base, tmp_path / "killed")
    assert telemetry.steps == [3, 4]
    assert resumed.counters() == whole.counters()
    assert bool(resumed.curriculum.seen) == (curriculum is not None)
    assert same_weights(tmp_path / "whole", tmp_path / "killed")


def delayed(**changes: object) -> RlConfig:
    """Four steps on samples that are two versions old, from the third step on."""
    sampling = SamplingConfig(max_new_tokens=8)
    rollout = RolloutConfig(groups_per_step=4, samples_per_group=4, mode="delayed", sampling=sampling)
    return rl_config(**{"num_steps": 4, "max_staleness": 2, "rollout": rollout} | changes)


def test_delayed_steps_train_on_samples_of_exactly_as_many_versions_before(base: Path, tmp_path: Path) -> None:
    state, telemetry = run(delayed(), base, tmp_path / "once")
    assert telemetry.column("rl/staleness/mean") == telemetry.column("rl/staleness/max") == [0, 1, 2, 2]
    assert state.position == 4 * 4  # every prompt was asked once
    run(delayed(), base, tmp_path / "again")
    assert same_weights(tmp_path / "once", tmp_path / "again")


def test_a_delay_of_none_is_the_same_run_as_rounds(base: Path, tmp_path: Path) -> None:
    run(delayed(max_staleness=0), base, tmp_path / "delayed")
    run(rl_config(num_steps=4), base, tmp_path / "rounds")
    assert same_weights(tmp_path / "delayed", tmp_path / "rounds")


def test_a_curriculum_that_samples_ahead_resumes_with_the_state_of_its_checkpoint(base: Path, tmp_path: Path) -> None:
    """Of four prompts a step, each is drawn from one pool, and each step's groups are remembered once."""
    cfg = rl_config(num_steps=5, max_staleness=1, curriculum={"half_life_steps": 1e9})
    with pytest.raises(KeyboardInterrupt):
        run(cfg, base, tmp_path, telemetry=Recorder(fail_at=3))
    state, telemetry = run(cfg, base, tmp_path)
    assert telemetry.steps == [3, 4, 5]
    assert sum(state.reasons.of("pool").values()) == state.position == 5 * 4
    assert sum(seen.judged for seen in state.curriculum.seen.values()) == pytest.approx(5 * 4 * 4)


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
    async def start(self, job: RlSetup) -> tuple[LearnerHandle, TrainableEngine]:
        learner, engine = await super().start(job)
        assert isinstance(learner, LocalLearner)
        return DyingLearner(learner._learner, num_threads=1), engine


def test_a_lost_learner_costs_only_the_steps_since_its_checkpoint(base: Path, tmp_path: Path) -> None:
    runtime = RlRuntime(device="cpu", checkpoint=RlCheckpointConfig(every_steps=2))
    cfg = rl_config(num_steps=4, runtime=runtime)
    run(cfg, base, tmp_path / "whole")
    state, telemetry = run(cfg, base, tmp_path / "lost", workers=DyingWorkers())
    assert state.step == 4
    assert telemetry.steps == [1, 2, 3, 3, 4]  # the third was logged, lost with the learner, and done again
    assert same_weights(tmp_path / "whole", tmp_path / "lost")


class DriverIsLost(LocalLearner):
    """The process ends right after the second step's checkpoint: of its node only the store's copies are left."""

    async def save(self, counters: Counters) -> None:
        await super().save(counters)
        if self._learner.version == 2:
            os._exit(9)


class WorkersOfALostDriver(LocalWorkers):
    async def start(self, job: RlSetup) -> tuple[LearnerHandle, TrainableEngine]:
        learner, engine = await super().start(job)
        assert isinstance(learner, LocalLearner)
        return DriverIsLost(learner._learner, num_threads=1), engine


class RowsToFile(NullTelemetry):
    """Writes rows where a stage's telemetry does."""

    def __init__(self, workdir: Path) -> None:
        self._file = MetricsFile(workdir / METRICS_FILE)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._file.append(metrics, step=step)


def test_after_a_lost_driver_another_node_has_the_rows_and_answers_of_all_steps_that_count(
    base: Path, tmp_path: Path
) -> None:
    def store(node: str) -> ObjectStore:
        times = LeaseTimes(expiry_s=0.5, poll_s=0.05)
        return ObjectStore(tmp_path / node, (tmp_path / "store").as_uri(), times=times, share_work_s=3600)

    def build(node: str, workers: LocalWorkers) -> list[int]:
        with store(node).create("rl", "f1") as slot:
            job = RlSetup(cfg=rl_config(num_steps=4), model=base, seed=0, workdir=slot.workdir)
            asyncio.run(run_rl(job, PROBLEMS, low_byte_judge, RowsToFile(slot.workdir), workers))
            assert {file.stem for file in (slot.workdir / "scratch" / "shown").iterdir()} >= {
                f"{step:08d}" for step in (1, 2, 3, 4)
            }
            return [int(row["step"] or 0) for row in read_metrics(slot.workdir / METRICS_FILE)]

    lost = os.fork()
    if lost == 0:
        build("a", WorkersOfALostDriver())
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(lost, 0)[1]) == 9
    assert build("b", LocalWorkers()) == [1, 2, 3, 4]


class Watched:
    """An engine that tells what is asked of it, and sleeps as far as anybody can see."""

    def __init__(self, engine: TrainableEngine, told: list[str]) -> None:
        self._engine, self.told = engine, told
        self.version = engine.version
        self.is_asleep = False

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        assert not self.is_asleep
        if self.told[-1] != "generate":
            self.told.append("generate")
        return await self._engine.generate(prompt_ids, params)

    async def load_weights(self, weights: WeightSource, *, version: int) -> None:
        assert not self.is_asleep
        self.told.append(f"load {version}")
        await self._engine.load_weights(weights, version=version)
        self.version = version

    async def sleep(self) -> None:
        self.told.append("sleep")
        self.is_asleep = True

    async def wake(self) -> None:
        self.told.append("wake")
        self.is_asleep = False

    async def close(self) -> None:
        await self._engine.close()


class ToldLearner(LocalLearner):
    """Says when it steps, and dies in its second step if it is to."""

    def __init__(self, learner: LocalLearner, told: list[str], *, dies: bool) -> None:
        super().__init__(learner._learner, num_threads=1)
        self.told, self.dies = told, dies

    async def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        self.told.append("step")
        if self.dies and self.told.count("step") == 2:
            raise LearnerLost("the learner died")
        return await super().step(samples)


class WatchedWorkers(LocalWorkers):
    def __init__(self, engine: Watched, *, dies: bool = False) -> None:
        super().__init__(engine)
        self._told, self._dies = engine.told, dies

    async def start(self, job: RlSetup) -> tuple[LearnerHandle, TrainableEngine]:
        learner, engine = await super().start(job)
        assert isinstance(learner, LocalLearner)
        return ToldLearner(learner, self._told, dies=self._dies), engine


def told_in_two_steps(base: Path, workdir: Path, *, sleep_mode: bool, dies: bool = False) -> str:
    vllm = {"kind": "vllm", "runtime": {"sleep_mode": sleep_mode}}
    rollout = {"groups_per_step": 4, "samples_per_group": 4, "sampling": {"max_new_tokens": 8}, "engine": vllm}
    cfg = rl_config(num_steps=2, rollout=rollout)
    told: list[str] = []
    engine = Watched(TorchEngine(model_folder(base), TorchEngineConfig(), num_threads=1), told)
    run(cfg, base, workdir, workers=WatchedWorkers(engine, dies=dies))
    return ", ".join(told)


def test_engines_sleep_while_the_learner_works_and_wake_for_its_weights(base: Path, tmp_path: Path) -> None:
    step = "generate, sleep, step, wake, "
    assert told_in_two_steps(base, tmp_path, sleep_mode=True) == f"wake, load 0, {step}load 1, {step}load 2"


def test_engines_are_not_put_to_sleep_unasked(base: Path, tmp_path: Path) -> None:
    assert (
        told_in_two_steps(base, tmp_path, sleep_mode=False) == "load 0, generate, step, load 1, generate, step, load 2"
    )


def test_engines_wake_for_the_learner_that_replaces_a_lost_one(base: Path, tmp_path: Path) -> None:
    step = "generate, sleep, step, wake, "
    lost = "generate, sleep, step, "  # of the second, from whose beginning it goes on
    assert (
        told_in_two_steps(base, tmp_path, sleep_mode=True, dies=True)
        == f"wake, load 0, {step}load 1, {lost}wake, load 1, {step}load 2"
    )


class HalfAndHalf(Watched):
    """Ends every answer of a batch that was begun under an older version under the version before which it is used."""

    def __init__(self, engine: TrainableEngine, *, answers_per_batch: int) -> None:
        super().__init__(engine, ["start"])
        self.num_asked = 0
        self.answers_per_batch = answers_per_batch
        self.changed = asyncio.Condition()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        batch, self.num_asked = self.num_asked // self.answers_per_batch, self.num_asked + 1
        (completion,) = await super().generate(prompt_ids, params)
        async with self.changed:
            await self.changed.wait_for(lambda: self.version >= batch)
        half = len(completion.token_ids) // 2
        return [
            replace(
                completion,
                policy_versions=(*completion.policy_versions[:half], *[batch] * (len(completion.token_ids) - half)),
            )
        ]

    async def load_weights(self, weights: WeightSource, *, version: int) -> None:
        async with self.changed:
            await super().load_weights(weights, version=version)
            self.changed.notify_all()


def test_an_answer_sampled_across_an_update_trains_and_is_as_old_as_its_oldest_token(
    base: Path, tmp_path: Path
) -> None:
    async def main() -> Recorder:
        telemetry = Recorder()
        engine = HalfAndHalf(TorchEngine(model_folder(base), TorchEngineConfig(), num_threads=1), answers_per_batch=16)
        job = RlSetup(cfg=rl_config(num_steps=4, max_staleness=1), model=base, seed=0, workdir=tmp_path)
        await run_rl(job, PROBLEMS, low_byte_judge, telemetry, LocalWorkers(engine))
        return telemetry

    telemetry = asyncio.run(main())
    trained = [row for row in telemetry.rows[1:] if row["rl/rollouts/trained"]]
    assert trained
    assert all(row["rl/staleness/max"] == 1 for row in trained)
    assert all("rl/rollouts/dropped_stale" not in row for row in trained)


@pytest.mark.parametrize("bound", [1, 2])
def test_staleness_reaches_its_bound_and_stays_there(base: Path, tmp_path: Path, bound: int) -> None:
    state, telemetry = run(rl_config(num_steps=6, max_staleness=bound), base, tmp_path)
    assert max(row["rl/staleness/max"] for row in telemetry.rows if row["rl/rollouts/trained"]) == bound
    assert "stale" not in state.reasons.of("rollout")


@pytest.mark.parametrize("killed_at", [None, 3])
def test_continuous_rollouts_train_all_steps_within_the_bound_and_resume(
    base: Path, tmp_path: Path, killed_at: int | None
) -> None:
    rollout = {"groups_per_step": 4, "samples_per_group": 4, "sampling": {"max_new_tokens": 8}, "mode": "continuous"}
    cfg = rl_config(num_steps=5, max_staleness=2, rollout=rollout | {"max_rounds": 3})
    if killed_at is not None:
        with pytest.raises(KeyboardInterrupt):
            run(cfg, base, tmp_path, telemetry=Recorder(fail_at=killed_at))
    state, telemetry = run(cfg, base, tmp_path)
    assert telemetry.steps == list(range(killed_at or 1, 6))
    assert max(row["rl/staleness/max"] for row in telemetry.rows if row["rl/rollouts/trained"]) <= 2
    groups, answers = state.reasons.of("group"), state.reasons.of("rollout")
    assert "stale" not in answers
    assert sum(answers.values()) == 4 * sum(groups.values())
    assert sum(groups.values()) == state.position  # every prompt that was asked


def notes_of(state: RlState, cfg: RlConfig) -> tuple[str, ...]:
    choice = LedgerStep(step="choose_domain", unit="problem", num_in=6, num_out=6, dropped={})
    return state.summary(choice, minibatches_per_step=cfg.minibatches_per_step, seed=0).notes


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "every ratio was 1" in r.getMessage()
    ]


def test_on_policy_single_updates_are_remarked_upon_once_in_the_run_and_in_its_notes(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = rl_config(minibatches_per_step=1, old_logps="learner")
    state, _ = run(cfg, base, tmp_path)
    assert [w[:27] for w in warnings_in(caplog)] == ["step 1: every ratio was 1: "]
    assert "every ratio was 1" in notes_of(state, cfg)[0]


def test_steps_without_an_update_do_not_repeat_the_remark(caplog: pytest.LogCaptureFixture) -> None:
    progress = RlState()
    collected = StepRollouts(groups=(), kept=(), reasons=ReasonCounts(), position=0, seconds=0.0)
    for num_updates in (0, 1, 0, 0, 1):
        ratios = {"rl/ratio/max": 1.0, "rl/ratio/min": 1.0} if num_updates else {}
        metrics = {"rl/optim/updates": num_updates, "rl/optim/skipped": 0, **ratios}
        count_step(progress, metrics, collected, minibatches_per_step=1)
    assert [w[:27] for w in warnings_in(caplog)] == ["step 2: every ratio was 1: "]


def test_several_updates_a_step_are_nothing_to_remark_upon(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = rl_config(minibatches_per_step=2, old_logps="learner")
    assert notes_of(run(cfg, base, tmp_path)[0], cfg) == ()
    assert warnings_in(caplog) == []


def test_a_prompt_that_fills_the_models_window_is_left_out_and_ends_no_run(base: Path, tmp_path: Path) -> None:
    """`max_prompt_tokens` is 4,096 by default, and the window 64."""
    problems = [*PROBLEMS, replace(problem("long"), question="x" * 100)]
    job = RlSetup(cfg=rl_config(), model=base, seed=0, workdir=tmp_path)
    state = asyncio.run(run_rl(job, problems, low_byte_judge, Recorder(), LocalWorkers()))
    assert state.step == 3
    assert state.reasons.of("group")["prompt_too_long"] >= 1


def test_steps_without_a_survivor_change_nothing_and_end_cleanly(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def all_right(_problem: Problem, _response: str) -> Verdict:
        return Verdict(outcome=Outcome.SCORED, score=1.0)

    state, telemetry = run(rl_config(), base, tmp_path, judge=all_right)
    assert telemetry.column("rl/groups/kept") == [0, 0, 0]
    assert state.steps_without_update == 3
    assert notes_of(state, rl_config()) == (
        "3 of 3 steps changed nothing: no group to train on, or only skipped updates",
    )
    assert warnings_in(caplog) == []
    (file,) = (base / "model").glob("*.safetensors")
    assert all(torch.equal(w, weights(tmp_path)[k]) for k, w in load_file(file).items())


def test_state_survives_as_plain_numbers() -> None:
    state = RlState(step=3, position=12, largest_ratio_gap=0.25)
    state.reasons.count("group", "trained", 5)
    assert RlState.of(state.counters()) == state


def test_skipped_updates_are_counted_over_all_steps_and_noted() -> None:
    state = RlState()
    for updates, skipped in ((3, 1), (4, 0), (0, 4)):
        state.add_step(
            {"rl/optim/updates": updates, "rl/optim/skipped": skipped}, ReasonCounts(), position=0, sampled_tokens=0
        )
    choice = LedgerStep(step="choose_domain", unit="problem", num_in=0, num_out=0)
    notes = state.summary(choice, minibatches_per_step=2, seed=0).notes
    assert any(note.startswith("5 updates were skipped") for note in notes)
    assert any(note.startswith("1 of 3 steps changed nothing") for note in notes)


def test_the_stage_leaves_a_model_sample_answers_and_books_that_add_up(base: Path, tmp_path: Path) -> None:
    problems = problem_artifact(tmp_path / "problems", [*PROBLEMS, problem("print('hi')", domain=Domain.CODE)])
    workdir = tmp_path / "work"
    summary = train(rl_config(group_filter={"zero_advantage": "off"}), base, problems, workdir)
    choice, groups, rollouts = summary.ledger
    assert choice.dropped == {"other_domain": 1}
    assert groups.num_in == 12
    assert rollouts.num_in == 48
    assert summary.counts["steps"] == 3
    shown = read_shard(workdir / "sample_rollouts.parquet", ShownRollout)
    assert sorted({s.step for s in shown}) == [1, 2, 3]
    assert weights(workdir)


def test_a_curriculum_reads_the_tags_and_its_pools_are_in_the_ledger(base: Path, tmp_path: Path) -> None:
    """q0 to q3 were tagged, half right: mixed. The step asks five of six problems, the new ones among them or not."""
    problems = problem_artifact(tmp_path / "problems", PROBLEMS)
    tags = [PassRate(problem_id=f"q{i}", num_correct=8, num_scored=16) for i in range(4)]
    write_shard(problems / RATES_FOLDER / shard_name(0, 1), tags)
    rollout = {"groups_per_step": 5, "samples_per_group": 4, "sampling": {"max_new_tokens": 8}}
    cfg = rl_config(num_steps=1, curriculum={}, rollout=rollout, group_filter={"zero_advantage": "off"})
    _, asked, groups, _ = train(cfg, base, problems, tmp_path / "work").ledger
    assert (asked.step, asked.num_in, asked.num_out, asked.dropped) == ("curriculum", 6, 5, {"never_finished": 1})
    assert sum(groups.noted.values()) == groups.num_in == 5
    assert groups.noted.keys() == {"from_mixed", "from_new"}
    assert groups.noted["from_mixed"] in (3, 4)


def train(cfg: RlConfig, base: Path, problems: Path, workdir: Path) -> StageSummary:
    """The whole stage with the real judge, to whom an untrained model says nothing right."""
    setup, seen = RlSetup(cfg=cfg, model=base, seed=0, workdir=workdir), NullTelemetry()
    return train_rl(setup, VerifyConfig(), problems=problems, telemetry=seen, workers=LocalWorkers())


class Signalled(Recorder):
    """Sends SIGUSR1 to this process when a step is logged."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        super().log(metrics, step=step)
        if step == 2:
            signal.raise_signal(signal.SIGUSR1)


def test_a_run_that_is_to_move_saves_its_step_and_goes_on_to_the_same_weights(base: Path, tmp_path: Path) -> None:
    runtime = RlRuntime(
        device="cpu",
        checkpoint=RlCheckpointConfig(every_steps=100, asynchronous=True),
        informative=RareYieldLimits(stop_below=0),
    )
    cfg = rl_config(num_steps=4, runtime=runtime)
    whole, _ = run(cfg, base, tmp_path / "whole")
    with requeued_by_signal(), pytest.raises(Requeued), checkpoint_first():
        run(cfg, base, tmp_path / "moved", telemetry=Signalled())
    assert [folder.name for folder in (tmp_path / "moved" / "scratch" / "checkpoints").iterdir()] == ["step-00000002"]
    resumed, telemetry = run(cfg, base, tmp_path / "moved")
    assert telemetry.steps == [3, 4]
    assert resumed.counters() == whole.counters()
    assert same_weights(tmp_path / "whole", tmp_path / "moved")


def test_a_stage_in_which_no_group_taught_anything_is_an_error_whatever_the_floor(base: Path, tmp_path: Path) -> None:
    problems = problem_artifact(tmp_path / "problems", PROBLEMS)
    runtime = RlRuntime(
        device="cpu", checkpoint=RlCheckpointConfig(every_steps=1), informative=RareYieldLimits(stop_below=0)
    )
    told = r"0 of 12 prompts were trained on in 3 steps \(last pass rate 0\.00\); lost: 12 zero_advantage; the first: step 3, problem q\d"
    for _ in range(2):  # the second time from its last checkpoint
        with pytest.raises(DataError, match=told):
            train(rl_config(runtime=runtime), base, problems, tmp_path / "work")


def test_a_long_run_that_teaches_nothing_stops_early(base: Path, tmp_path: Path) -> None:
    problems = problem_artifact(tmp_path / "problems", PROBLEMS)
    with pytest.raises(DataError, match="0 of 80 prompts were trained on in 20 steps"):
        train(rl_config(num_steps=1000), base, problems, tmp_path / "work")


@pytest.mark.parametrize(("num_taught", "num_warnings"), [(100, 0), (99, 1), (10, 1)])
def test_groups_that_seldom_teach_are_a_warning_and_surplus_is_no_loss(
    tmp_path: Path, num_taught: int, num_warnings: int
) -> None:
    state = RlState(step=3)
    state.reasons.count("group", "trained", num_taught)
    state.reasons.count("group", "zero_advantage", 1000 - num_taught)
    state.reasons.count("group", "surplus", 5000)
    assert len(check_trained_share(state, RareYieldLimits(), shown=tmp_path)) == num_warnings
    state.reasons.count("group", "too_hard", 1000 * num_taught)
    with pytest.raises(DataError, match="too_hard"):
        check_trained_share(state, RareYieldLimits(), shown=tmp_path)


def test_lookahead_collects_in_order_and_never_further_than_allowed() -> None:
    started: list[int] = []

    async def collect() -> StepRollouts:
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
                ahead.advance()
        return seen  # type: ignore[return-value]

    assert asyncio.run(drive()) == [0, 1, 2, 3]
    assert started == [0, 1, 2, 3]
