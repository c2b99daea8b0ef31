"""A teacher scores the answers of each RL step: as it scores stored ones, bit for bit after a kill, and RL follows it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fake_engine import FakeAnswer, FakeEngine
from rl_builders import (
    TINY,
    Recorder,
    constant_rate,
    low_byte_judge,
    problem,
    problem_artifact,
    random_samples,
    rl_config,
    same_weights,
    tiny_base,
)

from klear_core.config.evaluate import SamplingConfig
from klear_core.config.opd import OpdTeacherConfig
from klear_core.config.rl import RlConfig, RolloutConfig, TeacherTermConfig
from klear_core.config.verify import VerifyConfig
from klear_core.errors import ConfigError, DataError
from klear_core.generate.engine import SamplingParams
from klear_core.generate.factory import EngineSpec, Sampler, start_here
from klear_core.metrics import NullTelemetry
from klear_core.opd.teacher_logps import live_teacher, with_teacher_logps
from klear_core.rl.interfaces import LocalWorkers, RlSetup
from klear_core.rl.loop import OpenTeacher, RlOptions, run_rl, train_rl
from klear_core.train.base_model import prepare_base
from klear_core.types import Completion, TrainSample

SAMPLING = SamplingConfig(max_new_tokens=4)
TEACHER = OpdTeacherConfig(top_k=4)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same tokens, larger."""
    folder = tmp_path_factory.mktemp("teacher")
    prepare_base(TINY.model_copy(update={"hidden_size": 24}), seed=1, workdir=folder, telemetry=NullTelemetry())
    return folder


def opens(student: Path, teacher: Path, workdir: Path, cfg: OpdTeacherConfig = TEACHER) -> OpenTeacher:
    return partial(live_teacher, cfg, student=student, teacher=teacher, sampling=SAMPLING, workdir=workdir)


def config(**changes: object) -> RlConfig:
    rollout = RolloutConfig(groups_per_step=4, samples_per_group=6, sampling=SAMPLING)
    return rl_config(rollout=rollout, **{"distill": TeacherTermConfig(coef=1.0), "num_steps": 4, **changes})


def run(cfg: RlConfig, student: Path, workdir: Path, teacher: OpenTeacher, telemetry: Recorder) -> Recorder:
    setup = RlSetup(cfg=cfg, model=student, seed=0, workdir=workdir)
    problems = [problem(f"q{i}") for i in range(6)]
    asyncio.run(run_rl(setup, problems, low_byte_judge, telemetry, LocalWorkers(), RlOptions(open_teacher=teacher)))
    return telemetry


def test_rows_of_a_step_are_scored_as_stored_answers_are_and_keep_their_order(
    student: Path, teacher: Path, tmp_path: Path
) -> None:
    rows = random_samples(5)

    async def scored() -> tuple[tuple[TrainSample, ...], list[TrainSample]]:
        async with opens(student, teacher, tmp_path)() as score:
            assert score is not None
            together = await score(rows)
        spec = EngineSpec.of_model(TEACHER.engine, teacher, num_threads=1, seed=0, workdir=tmp_path, answer_tokens=9)
        sampler: Sampler = await start_here(spec)
        alone = [await with_teacher_logps(sampler.engine, row, temperature=1.0, num_top=4) for row in rows]
        await sampler.engine.close()
        return together, alone

    together, alone = asyncio.run(scored())
    assert list(together) == alone
    assert [replace(row, teacher_logps=(), top_ids=(), top_logps=()) for row in together] == list(rows)


class Refusing(FakeEngine):
    """Has room for no answer."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        raise ValueError("too long")


def test_an_answer_that_the_teacher_refuses_is_an_error_that_names_its_problem(
    student: Path, teacher: Path, tmp_path: Path
) -> None:
    async def start(_spec: EngineSpec) -> Sampler:
        return Sampler(engine=Refusing(lambda _prompt, _params, _i: FakeAnswer(text="")), limit=2)

    async def score() -> None:
        async with partial(opens(student, teacher, tmp_path), start_sampler=start)() as scores:
            await scores(random_samples(5))

    with pytest.raises(DataError, match=r"^problem \w+: the teacher's engine refuses an answer: too long$"):
        asyncio.run(score())


def test_a_killed_run_goes_on_to_the_same_weights(student: Path, teacher: Path, tmp_path: Path) -> None:
    cfg, open_teacher = config(), opens(student, teacher, tmp_path)
    run(cfg, student, tmp_path / "whole", open_teacher, Recorder())
    with pytest.raises(KeyboardInterrupt):
        run(cfg, student, tmp_path / "killed", open_teacher, Recorder(fail_at=3))
    assert run(cfg, student, tmp_path / "killed", open_teacher, Recorder()).steps == [3, 4]
    assert same_weights(tmp_path / "whole", tmp_path / "killed")


def test_the_policy_comes_closer_to_the_teacher(student: Path, teacher: Path, tmp_path: Path) -> None:
    cfg = config(num_steps=12, optim=constant_rate(5e-3), distill=TeacherTermConfig(coef=50.0))
    open_teacher = opens(student, teacher, tmp_path, OpdTeacherConfig(top_k=20))
    gaps = run(cfg, student, tmp_path / "run", open_teacher, Recorder()).column("rl/distill/kl")
    assert gaps[-1] < 0.75 * gaps[0]


def test_the_term_and_its_teacher_need_each_other(student: Path, teacher: Path, tmp_path: Path) -> None:
    problems = problem_artifact(tmp_path / "problems", [problem("q")])
    for cfg, given in (
        (config(), {}),
        (config(distill=None), {"open_teacher": opens(student, teacher, tmp_path)}),
    ):
        setup = RlSetup(cfg=cfg, model=student, workdir=tmp_path)
        with pytest.raises(ConfigError, match="need each other"):
            train_rl(setup, VerifyConfig(), problems=problems, **given)
