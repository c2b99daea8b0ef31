"""Answers of a student, a teacher's scores of them, and the model that learned from those: each resumes and adds up."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_engine import FakeAnswer, FakeEngine
from rl_builders import (
    ONE,
    TINY,
    Recorder,
    constant_rate,
    problem,
    problem_artifact,
    rl_config,
    same_weights,
    tiny_base,
)
from transformers import AutoModelForCausalLM

from klear_core.artifacts.records import read_shards, write_shard
from klear_core.config.evaluate import EvaluateRuntime, SamplingConfig
from klear_core.config.opd import OpdRolloutsConfig, OpdTeacherConfig, OpdTeacherRuntime, OpdTrainConfig
from klear_core.config.rl import RlConfig
from klear_core.config.train import CheckpointConfig, TrainRuntime
from klear_core.errors import ConfigError, DataError, ResourceError
from klear_core.generate.engine import InferenceEngine, SamplingParams
from klear_core.generate.factory import EngineSpec, Sampler
from klear_core.metrics import NullTelemetry
from klear_core.opd.rollouts import answers_of, sample_rollouts
from klear_core.opd.teacher_logps import with_teacher_logps, write_teacher_logps
from klear_core.rl.learner import Learner
from klear_core.rl.offline import RowStore, train_offline
from klear_core.train.base_model import model_folder, prepare_base
from klear_core.types import Domain, TrainSample

ROLLOUTS = OpdRolloutsConfig(
    samples_per_prompt=3,
    sampling=SamplingConfig(max_new_tokens=8),
    runtime=EvaluateRuntime(answers_per_shard=4),
)
TEACHER = OpdTeacherConfig(runtime=OpdTeacherRuntime(answers_per_shard=4))


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same tokens, larger."""
    folder = tmp_path_factory.mktemp("teacher")
    larger = TINY.model_copy(update={"hidden_size": 24})
    prepare_base(larger, seed=1, workdir=folder, telemetry=NullTelemetry())
    return folder


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return problem_artifact(tmp_path_factory.mktemp("problems"), [problem(f"q{i}") for i in range(5)])


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory, student: Path, problems: Path) -> Path:
    folder = tmp_path_factory.mktemp("rollouts")
    sample_rollouts(ROLLOUTS, model=student, problems=problems, workdir=folder)
    return folder


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory, student: Path, teacher: Path, rollouts: Path) -> Path:
    folder = tmp_path_factory.mktemp("scores")
    write_teacher_logps(
        TEACHER, student=student, teacher=teacher, answers=answers_of(rollouts), temperature=1.0, workdir=folder
    )
    return folder


def rows_of(folder: Path) -> list[TrainSample]:
    return list(read_shards(folder, TrainSample))


def test_teachers_score_the_answers_of_their_domain_and_the_student_learns_from_all(
    student: Path, teacher: Path, rollouts: Path, tmp_path: Path
) -> None:
    """Of five problems two are programs here, whatever they ask."""
    kinds = [problem(f"q{i}", domain=Domain.CODE if i in (1, 3) else Domain.MATH) for i in range(5)]
    problems = problem_artifact(tmp_path / "problems", kinds)
    for domain, of in ((Domain.MATH, teacher), (Domain.CODE, student)):
        write_teacher_logps(
            TEACHER, student=student, teacher=of, answers=answers_of(rollouts, problems, domain), temperature=1.0,
            workdir=tmp_path / domain,
        )  # fmt: skip
    code = rows_of(tmp_path / "code" / "scored")
    assert {row.problem_id for row in code} == {"q1", "q3"}
    for row in code:  # the student is its own teacher there
        assert row.teacher_logps == pytest.approx(row.sampler_logps, abs=1e-5)
    both = RowStore([tmp_path / "math" / "scored", tmp_path / "code" / "scored"], rows_per_step=15, seed=0)
    assert len(code) == 6
    assert sorted(row.problem_id for row in both.step(0)) == sorted(f"q{i % 5}" for i in range(15))
    only_math = problem_artifact(tmp_path / "only_math", [problem(f"q{i}") for i in range(5)])
    with pytest.raises(DataError, match="none of the 15 answers is to a code problem"):
        answers_of(rollouts, only_math, Domain.CODE)


def test_an_answer_that_ends_at_the_window_is_scored_to_its_last_token(student: Path, tmp_path: Path) -> None:
    window = TINY.max_position_embeddings
    cfg = ROLLOUTS.model_copy(update={"sampling": SamplingConfig(max_new_tokens=window), "samples_per_prompt": 1})
    one = problem_artifact(tmp_path / "problems", [problem("q")])
    made = sample_rollouts(cfg, model=student, problems=one, workdir=tmp_path / "rollouts")
    (answer,) = answers_of(tmp_path / "rollouts")
    assert len(answer.token_ids) == window
    assert made.counts["cut"] == 1
    write_teacher_logps(
        TEACHER, student=student, teacher=student, answers=[answer], temperature=1.0, workdir=tmp_path / "scores"
    )
    (row,) = rows_of(tmp_path / "scores" / "scored")
    assert row.teacher_logps == pytest.approx(row.sampler_logps, abs=1e-5)


def learner_logps(model: Path, rows: Sequence[TrainSample], workdir: Path) -> list[list[float]]:
    """The learner's log-probs of each row's answer."""
    learner = Learner(rl_config(), model, seed=0, workdir=workdir, world=ONE)
    return [torch.cat([found.logp_N for found in learner.logps([row])]).tolist() for row in rows]


class Failing:
    """An engine that gives up after a number of requests, as a machine that is switched off."""

    def __init__(self, engine: InferenceEngine, num_requests: int) -> None:
        self.engine, self.left, self.asked = engine, num_requests, 0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list:
        if self.left == 0:
            raise ResourceError("switched off")
        self.left, self.asked = self.left - 1, self.asked + 1
        return await self.engine.generate(prompt_ids, params)

    async def close(self) -> None:
        await self.engine.close()


def fake_start(num_requests: int) -> tuple[list[Failing], object]:
    """Start engines that answer by the seed, and give up after so many requests; the list holds those that were started."""
    started: list[Failing] = []

    async def start(_spec: EngineSpec) -> Sampler:
        engine = FakeEngine(lambda _prompt, params, _i: FakeAnswer(text=f"{params.seed % 997}"))
        started.append(Failing(engine, num_requests))
        return Sampler(engine=started[-1], limit=1)

    return started, start


def test_rollouts_have_the_log_probs_of_the_student_and_no_reward(
    student: Path, rollouts: Path, tmp_path: Path
) -> None:
    rows = rows_of(rollouts / "rollouts")
    assert len(rows) == 15
    assert sorted({row.problem_id for row in rows}) == [f"q{i}" for i in range(5)]
    for row, logps in zip(rows, learner_logps(student, rows, tmp_path), strict=True):
        assert row.sampler_logps[row.num_prompt_tokens :] == pytest.approx(logps, abs=1e-4)
        assert (row.advantage, row.is_positive, row.has_teacher) == (0.0, False, False)


def test_scores_are_the_log_probs_that_the_teacher_would_have_as_a_learner(
    teacher: Path, rollouts: Path, scores: Path, tmp_path: Path
) -> None:
    rows = rows_of(scores / "scored")
    bare = [replace(row, teacher_logps=(), top_ids=(), top_logps=()) for row in rows]
    assert bare == rows_of(rollouts / "rollouts")
    for row, logps in zip(rows, learner_logps(teacher, rows, tmp_path), strict=True):
        assert row.teacher_logps[: row.num_prompt_tokens] == (0.0,) * row.num_prompt_tokens
        assert row.teacher_logps[row.num_prompt_tokens :] == pytest.approx(logps, abs=1e-4)


def test_rollouts_resume_by_shard_with_the_same_result(student: Path, problems: Path, tmp_path: Path) -> None:
    def run(name: str, num_requests: int) -> int:
        started, start = fake_start(num_requests)
        try:
            sample_rollouts(ROLLOUTS, model=student, problems=problems, workdir=tmp_path / name, start_sampler=start)
        except ResourceError:
            return -started[0].asked
        return started[0].asked

    assert run("whole", 100) == 15
    assert run("cut", 10) == -10
    num_done = len(rows_of(tmp_path / "cut" / "rollouts"))
    assert 0 < num_done <= 10
    assert run("cut", 100) == 15 - num_done
    assert rows_of(tmp_path / "cut" / "rollouts") == rows_of(tmp_path / "whole" / "rollouts")


def test_scores_resume_by_shard_with_the_same_result(
    student: Path, teacher: Path, rollouts: Path, scores: Path, tmp_path: Path
) -> None:
    def run(num_requests: int) -> int:
        started: list[Failing] = []

        async def start(spec: EngineSpec) -> Sampler:
            from klear_core.generate.factory import start_here

            started.append(Failing((await start_here(spec)).engine, num_requests))
            return Sampler(engine=started[-1], limit=1)

        try:
            write_teacher_logps(
                TEACHER,
                student=student,
                teacher=teacher,
                answers=answers_of(rollouts),
                temperature=1.0,
                workdir=tmp_path,
                start_sampler=start,
            )
        except ResourceError:
            return -started[0].asked
        return started[0].asked

    assert run(10) == -10
    num_done = len(rows_of(tmp_path / "scored"))
    assert 0 < num_done <= 10
    assert run(100) == 15 - num_done
    assert rows_of(tmp_path / "scored") == rows_of(scores / "scored")


def test_prompts_that_are_too_long_or_not_needed_are_counted(student: Path, tmp_path: Path) -> None:
    asked = problem_artifact(tmp_path / "p", [problem(name) for name in ("a", "b", "c" * 60)])
    cfg = ROLLOUTS.model_copy(update={"max_prompt_tokens": 60, "num_prompts": 1})
    _, start = fake_start(100)
    summary = sample_rollouts(cfg, model=student, problems=asked, workdir=tmp_path / "r", start_sampler=start)
    (ledger,) = summary.ledger
    assert (ledger.num_in, ledger.num_out) == (3, 1)
    assert sum(ledger.dropped.values()) == 2
    none = cfg.model_copy(update={"max_prompt_tokens": 5})
    with pytest.raises(DataError, match="none of its 3 problems has a prompt of at most"):
        sample_rollouts(none, model=student, problems=asked, workdir=tmp_path / "n", start_sampler=start)


def test_what_a_teachers_vocabulary_is_rounded_up_by_is_no_token_to_learn(
    student: Path, rollouts: Path, tmp_path: Path
) -> None:
    """As Qwen2.5-7B teaches its 0.5B: the same tokens, and more rows behind them."""
    folder = model_folder(tiny_base(tmp_path / "teacher"))
    hf = AutoModelForCausalLM.from_pretrained(folder)
    hf.resize_token_embeddings(384, mean_resizing=False)
    hf.get_input_embeddings().weight.data[320:].normal_(0, 0.1)
    hf.save_pretrained(folder)
    write_teacher_logps(
        TEACHER, student=student, teacher=folder, answers=answers_of(rollouts), temperature=1.0, workdir=tmp_path
    )
    rows = rows_of(tmp_path / "scored")
    assert {i for row in rows for i in row.top_ids} <= set(range(320))
    assert {logp for row in rows for i, logp in zip(row.top_ids, row.top_logps, strict=True) if logp < -100} == {-1e4}
    cfg = OpdTrainConfig(num_steps=1, rows_per_step=8, dtype="float32", runtime=TrainRuntime(device="cpu"))
    train_offline(cfg.as_rl(ROLLOUTS), rows_per_step=8, model=student, rows=[tmp_path], workdir=tmp_path / "opd")


def test_a_prompt_that_fills_the_window_is_counted_as_too_long(student: Path, tmp_path: Path) -> None:
    asked = problem_artifact(tmp_path / "p", [problem(name) for name in ("a", "c" * TINY.max_position_embeddings)])
    (ledger,) = sample_rollouts(ROLLOUTS, model=student, problems=asked, workdir=tmp_path / "r").ledger
    assert ledger.dropped == {"long_prompt": 1}


def test_a_teacher_of_other_tokens_is_refused_before_it_is_loaded(
    student: Path, rollouts: Path, teacher: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_folder(teacher), other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|begin|>"))
    started, start = fake_start(100)
    with pytest.raises(
        ConfigError, match=r"1 of the student's tokens have another id, or none, for the teacher \('<\|im_start\|>'\)"
    ):
        write_teacher_logps(
            TEACHER,
            student=student,
            teacher=other,
            answers=answers_of(rollouts),
            temperature=1.0,
            workdir=tmp_path / "s",
            start_sampler=start,
        )
    assert started == []


def test_an_answer_that_the_teacher_cannot_score_stops_the_stage(rollouts: Path) -> None:
    (row, *_) = rows_of(rollouts / "rollouts")
    with pytest.raises(DataError, match="the teacher's engine refuses an answer: prompt of"):
        asyncio.run(with_teacher_logps(FakeEngine(lambda *_: FakeAnswer(text=""), max_len=5), row, temperature=1.0))
    nan = FakeEngine(lambda *_: FakeAnswer(text="", logp=float("nan")))
    with pytest.raises(DataError, match="log-probs of an answer are NaN"):
        asyncio.run(with_teacher_logps(nan, row, temperature=1.0))


def train_config(**changes: object) -> RlConfig:
    runtime = TrainRuntime(device="cpu", checkpoint=CheckpointConfig(every_steps=1))
    settings = {
        "num_steps": 6,
        "rows_per_step": 4,
        "dtype": "float32",
        "optim": constant_rate(1e-2),
        "runtime": runtime,
    }
    return OpdTrainConfig.model_validate(settings | changes).as_rl(ROLLOUTS)


def test_training_resumes_bit_for_bit(student: Path, scores: Path, tmp_path: Path) -> None:
    cfg = train_config()
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()

    def run(name: str, recorder: Recorder) -> dict[str, int | float]:
        return dict(
            train_offline(
                cfg, rows_per_step=4, model=student, rows=[scores], workdir=tmp_path / name, telemetry=recorder
            ).counts
        )

    whole = run("whole", Recorder())
    for fail_at in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            run("cut", Recorder(fail_at=fail_at))
    assert run("cut", Recorder()) == whole
    assert whole["steps"] == whole["updates"] == 6
    assert same_weights(tmp_path / "whole", tmp_path / "cut")


def test_the_student_comes_closer_to_the_teachers_distribution(student: Path, scores: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    (tmp_path / "w").mkdir()
    train_offline(
        train_config(num_steps=40), rows_per_step=15, model=student, rows=[scores], workdir=tmp_path / "w",
        telemetry=recorder,
    )  # fmt: skip
    gaps = recorder.column("opd/distill/kl")
    assert 0 < gaps[-1] < 0.5 * gaps[0]


def test_without_likeliest_tokens_the_student_learns_from_log_ratios(
    student: Path, scores: Path, tmp_path: Path
) -> None:
    (tmp_path / "bare" / "scored").mkdir(parents=True)
    bare = [replace(row, top_ids=(), top_logps=()) for row in rows_of(scores / "scored")]
    write_shard(tmp_path / "bare" / "scored" / "00000-of-00001.parquet", bare)
    scores = tmp_path / "bare"
    recorder = Recorder()
    (tmp_path / "w").mkdir()
    summary = train_offline(
        train_config(num_steps=40, minibatches_per_step=2),
        rows_per_step=15,
        model=student,
        rows=[scores],
        workdir=tmp_path / "w",
        telemetry=recorder,
    )
    gaps = recorder.column("opd/distill/kl")
    rows = rows_of(scores / "scored")
    num_tokens = sum(row.num_loss_tokens for row in rows)
    before = sum(sum(row.sampler_logps) - sum(row.teacher_logps) for row in rows) / num_tokens
    assert gaps[0] == pytest.approx(before, abs=0.05)  # after the first mini-batch of the step it has moved
    assert abs(gaps[-1]) < 0.5 * abs(gaps[0])
    assert summary.counts["trained_tokens"] == 40 * sum(row.num_tokens for row in rows)


def test_rows_of_a_step_follow_from_its_number_and_every_epoch_has_each_row_once(scores: Path) -> None:
    store = RowStore([scores / "scored"], rows_per_step=5, seed=3)
    again = RowStore([scores / "scored"], rows_per_step=5, seed=3)
    epochs = [[row for step in range(3 * e, 3 * e + 3) for row in store.step(step)] for e in (0, 1)]
    for rows in epochs:
        assert sorted(map(repr, rows)) == sorted(map(repr, rows_of(scores / "scored")))
    assert epochs[0] != epochs[1]
    assert again.step(4) == store.step(4)  # whatever was read before
    assert store.ledger(2).dropped == {"not_reached": 5}
    assert store.ledger(9).dropped == {}


def test_the_learner_gets_no_reward_settings(student: Path) -> None:
    cfg = train_config()
    assert (cfg.lm_coef, cfg.kl_coef, cfg.old_logps) == (0.0, 0.0, "sampler")
    assert cfg.distill is not None
    assert (cfg.runtime.device, cfg.runtime.checkpoint.every_steps) == ("cpu", 1)
