from __future__ import annotations

import asyncio
import dataclasses
from datetime import UTC, datetime
from pathlib import Path

import pytest
from evaluate_fakes import UNJUDGED, FakeEngine, FakeJudge, make_problem, make_setup, render

from klear_core.artifacts.manifest import InputRecord, Manifest, StageSummary
from klear_core.artifacts.records import read_shard, read_shards, write_shard
from klear_core.artifacts.store import LocalStore
from klear_core.config.data import BenchmarkConfig, FileSource
from klear_core.config.evaluate import EvaluateConfig, EvaluateRuntime, EvaluateSamplingConfig, TorchEngineConfig
from klear_core.config.settings import result_settings
from klear_core.config.stage import EvaluateJob
from klear_core.config.verify import VerifyConfig
from klear_core.errors import DataError, JudgeError, ResourceError
from klear_core.evaluate.run import answer_benchmarks, report_scores
from klear_core.evaluate.sample import NO_EARLIER, Benchmark, EngineAnswerer, EvalSetup, earlier_answers
from klear_core.generate.engine import InferenceEngine
from klear_core.generate.factory import LocalMember, RestartLimit
from klear_core.generate.pool import EnginePool
from klear_core.metrics import NullTelemetry
from klear_core.scores import read_reports
from klear_core.types import EvalSample, Problem, Verdict

TOY = Benchmark(name="toy", problems=tuple(make_problem(i) for i in range(5)), num_samples=3)
CFG = EvaluateConfig(
    sampling=EvaluateSamplingConfig(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05, max_new_tokens=50),
    runtime=EvaluateRuntime(answers_per_shard=8, max_in_flight=1),
)


def run(
    workdir: Path, inline_eval: EvalSetup, cfg: EvaluateConfig = CFG, suite: tuple[Benchmark, ...] = (TOY,)
) -> StageSummary:
    telemetry = NullTelemetry()
    asyncio.run(answer_benchmarks(cfg, suite, inline_eval, seed=3, workdir=workdir, telemetry=telemetry))
    return report_scores(cfg, suite, VerifyConfig(), seed=3, workdir=workdir, telemetry=telemetry)


def samples(workdir: Path) -> list[EvalSample]:
    return list(read_shards(workdir / "samples", EvalSample))


def test_a_response_begins_with_what_its_prompt_opened(tmp_path: Path) -> None:
    answerer = EngineAnswerer(engine=FakeEngine(), render=render, opening="<think>\n")
    run(tmp_path, dataclasses.replace(make_setup(), answer=answerer.answer))
    assert {s.response.startswith("<think>\nanswer ") for s in samples(tmp_path)} == {True}


def test_every_problem_is_answered_n_times_and_once_greedily(tmp_path: Path) -> None:
    summary = run(tmp_path, make_setup())
    assert [(s.problem_id, s.decoding, s.sample_idx) for s in samples(tmp_path)] == [
        (p.problem_id, decoding, i)
        for p in TOY.problems
        for decoding, i in [("sampled", 0), ("sampled", 1), ("sampled", 2), ("greedy", 0)]
    ]
    (report,) = read_reports(tmp_path)
    assert (report.benchmark, report.num_problems, report.num_samples, report.seed) == ("toy", 5, 3, 3)
    right = [s.response.endswith("1") for s in samples(tmp_path) if s.decoding == "sampled"]
    assert report.avg.value == pytest.approx(sum(right) / 15)
    assert summary.counts == {"problems": 5, "answers": 20, "toy_avg_at_3": round(report.avg.value, 4)}


def test_every_sample_has_a_seed_of_its_own_and_the_profile_of_the_settings(tmp_path: Path) -> None:
    engine = FakeEngine()
    run(tmp_path, make_setup(engine))
    sampled = [p for _, p in engine.asked if p.temperature > 0]
    greedy = [p for _, p in engine.asked if p.temperature == 0]
    assert len({p.seed for p in sampled}) == 15
    assert {
        (p.num_samples, p.temperature, p.top_p, p.top_k, p.repetition_penalty, p.max_new_tokens) for p in sampled
    } == {(1, 0.6, 0.95, 20, 1.05, 50)}
    assert {(p.top_p, p.top_k, p.repetition_penalty) for p in greedy} == {(1.0, 0, 1.05)}
    assert len(greedy) == 5


def test_more_samples_do_not_change_earlier_ones(tmp_path: Path) -> None:
    more = Benchmark(name="toy", problems=TOY.problems, num_samples=4)
    run(tmp_path / "3", make_setup())
    run(tmp_path / "4", make_setup(), suite=(more,))
    assert set(samples(tmp_path / "3")) < set(samples(tmp_path / "4"))


def store_evaluation(artifacts: Path, job: EvaluateJob, fingerprint: str) -> None:
    """A finished evaluation of the model "m" with these settings."""
    store = LocalStore(artifacts)
    with store.create(job.kind, fingerprint) as slot:
        run(slot.workdir, make_setup(), job.evaluate)
        manifest = Manifest(
            kind=job.kind,
            fingerprint=fingerprint,
            stage="evaluate_sft",
            code_version=job.code_version,
            config=job.model_dump(mode="json"),
            result_config=result_settings(job),
            inputs=(InputRecord(role="model", kind="sft", fingerprint="m"),),
            git_commit=None,
            git_dirty=False,
            versions={},
            seeds={},
            counts={},
            ledger=(),
            notes=(),
            mlflow_run_id=None,
            created_at=datetime.now(UTC),
            attempts=1,
            wall_s=1.0,
        )
        slot.publish(manifest)


def test_a_larger_n_takes_the_answers_of_an_earlier_evaluation_and_samples_the_others(tmp_path: Path) -> None:
    benchmarks = (BenchmarkConfig(name="toy", source=FileSource(path="toy.jsonl"), num_samples=3),)
    job = EvaluateJob(seed=3, evaluate=CFG, verify=VerifyConfig(), benchmarks=benchmarks)
    store_evaluation(tmp_path, job, "abcdef01")
    more = dataclasses.replace(TOY, num_samples=5)
    larger = job.model_copy(update={"benchmarks": (benchmarks[0].model_copy(update={"num_samples": 5}),)})
    begun = dataclasses.replace(more, earlier=earlier_answers(tmp_path, larger, model="m"))

    engine = FakeEngine()
    summary = run(tmp_path / "more", make_setup(engine), suite=(begun,))
    assert len(engine.asked) == 10  # two more for each of five problems; the greedy ones are there
    run(tmp_path / "at_once", make_setup(), suite=(more,))
    assert samples(tmp_path / "more") == samples(tmp_path / "at_once")
    assert read_reports(tmp_path / "more") == read_reports(tmp_path / "at_once")
    note = "toy: 20 of 30 answers were sampled by earlier evaluations (abcdef) and judged again"
    assert note in summary.notes


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        ({"seed": 4}, "m"),
        ({"evaluate": CFG.model_copy(update={"sampling": EvaluateSamplingConfig(temperature=0.7)})}, "m"),
        ({"evaluate": CFG.model_copy(update={"engine": TorchEngineConfig(dtype="bfloat16")})}, "m"),
        ({}, "another"),
    ],
)
def test_answers_of_another_seed_sampling_engine_or_model_are_sampled_anew(
    tmp_path: Path, changes: dict[str, object], model: str
) -> None:
    job = EvaluateJob(seed=3, evaluate=CFG, verify=VerifyConfig(), benchmarks=())
    store_evaluation(tmp_path, job, "abcdef01")
    assert len(earlier_answers(tmp_path, job, model="m").responses) == 20
    assert earlier_answers(tmp_path, job.model_copy(update=changes), model=model) == NO_EARLIER


def test_answers_of_a_damaged_evaluation_are_not_used(tmp_path: Path) -> None:
    job = EvaluateJob(seed=3, evaluate=CFG, verify=VerifyConfig(), benchmarks=())
    store_evaluation(tmp_path, job, "abcdef01")
    shard = next((tmp_path / "evaluate" / "abcdef01" / "samples").glob("*.parquet"))
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-1])
    assert earlier_answers(tmp_path, job, model="m") == NO_EARLIER


def test_greedy_can_be_left_out(tmp_path: Path) -> None:
    run(tmp_path, make_setup(), cfg=CFG.model_copy(update={"greedy": False}))
    assert {s.decoding for s in samples(tmp_path)} == {"sampled"}
    assert read_reports(tmp_path)[0].greedy is None


def test_the_report_carries_the_whole_decoding_profile(tmp_path: Path) -> None:
    run(tmp_path, make_setup())
    profile = read_reports(tmp_path)[0].decoding
    assert profile.sampling == CFG.sampling
    assert profile.engine == CFG.engine
    assert "one seed a sample" in profile.seed_policy


def test_a_finished_shard_is_not_asked_again_and_the_result_is_that_of_one_run(tmp_path: Path) -> None:
    expected = run(tmp_path / "straight", make_setup())
    with pytest.raises(RuntimeError, match="power cut"):
        run(tmp_path / "broken", make_setup(FakeEngine({3: RuntimeError("power cut")})))
    done = {s.problem_id for s in samples(tmp_path / "broken")}
    assert done == {"p000", "p001"}  # 4 answers a problem; the first shard of 6 was whole, the second broke at its last

    second = FakeEngine()
    assert run(tmp_path / "broken", make_setup(second)) == expected
    assert len(second.asked) == 20 - 6
    assert samples(tmp_path / "broken") == samples(tmp_path / "straight")
    assert read_reports(tmp_path / "broken") == read_reports(tmp_path / "straight")


@pytest.mark.parametrize("change", ["one_less", "one_twice", "another_problem"])
def test_a_stored_shard_without_its_planned_answers_is_refused_before_the_first_token(
    tmp_path: Path, change: str
) -> None:
    run(tmp_path, make_setup())
    shards = sorted((tmp_path / "samples").glob("*.parquet"))
    stored = read_shard(shards[0], EvalSample)
    other = dataclasses.replace(stored[0], problem_id="p009")
    changed = {"one_less": stored[1:], "one_twice": [*stored, stored[0]], "another_problem": [other, *stored[1:]]}
    write_shard(shards[0], changed[change])
    shards[1].unlink()
    engine = FakeEngine()
    with pytest.raises(DataError, match=rf"{shards[0].name}: holds \d of \d planned answers to benchmark 'toy'"):
        run(tmp_path, make_setup(engine))
    assert not engine.asked


def test_what_could_not_be_judged_is_judged_again_but_not_sampled_again(tmp_path: Path) -> None:
    cfg = CFG.model_copy(update={"max_unscored_rate": 1.0})
    flaky = FakeJudge(lambda p, r: UNJUDGED if p.problem_id == "p001" else None)
    run(tmp_path, make_setup(judge=flaky), cfg=cfg)
    assert read_reports(tmp_path)[0].unscored_problems == ("p001",)

    engine, judge = FakeEngine(), FakeJudge()
    run(tmp_path, make_setup(engine, judge), cfg=cfg)
    assert not engine.asked
    assert judge.judged == ["p001"] * 4
    assert read_reports(tmp_path)[0].unscored_problems == ()


def test_too_many_unscored_answers_stop_the_stage_with_the_outcomes(tmp_path: Path) -> None:
    cfg = CFG.model_copy(update={"max_unscored_rate": 0.1})  # 2 of 20
    flaky = FakeJudge(lambda p, r: UNJUDGED if p.problem_id == "p002" else None)
    engine = FakeEngine()
    with pytest.raises(
        JudgeError, match=r"'toy': 3 of 20 answers.*\(3 judge_failed\).*max_unscored_rate = 0.1.*p002: worker died"
    ):
        run(tmp_path, make_setup(engine, flaky), cfg=cfg)
    assert max(number for number, _ in engine.asked) == 2
    run(tmp_path, make_setup(), cfg=cfg)
    assert len(samples(tmp_path)) == 20


def test_each_benchmark_has_its_own_report_and_shards(tmp_path: Path) -> None:
    other = Benchmark(name="toy_2", problems=TOY.problems[:1], num_samples=1)
    run(tmp_path, make_setup(), suite=(TOY, other))
    assert [(r.benchmark, r.num_problems) for r in read_reports(tmp_path)] == [("toy", 5), ("toy_2", 1)]
    assert len(samples(tmp_path)) == 22
    assert sorted(p.name for p in (tmp_path / "samples").iterdir())[-1] == "toy_2-00000-of-00001.parquet"


def test_sampling_and_judging_overlap(tmp_path: Path) -> None:
    """The second answer is being sampled before the first has been judged."""
    second_asked = asyncio.Event()

    class SlowJudge(FakeJudge):
        async def judge_async(self, problem: object, response: str) -> object:  # type: ignore[override]
            await second_asked.wait()
            return await super().judge_async(problem, response)  # type: ignore[arg-type]

    class Watched(FakeEngine):
        async def generate(self, prompt_ids: object, params: object) -> object:  # type: ignore[override]
            if len(self.asked) == 1:
                second_asked.set()
            return await super().generate(prompt_ids, params)  # type: ignore[arg-type]

    cfg = CFG.model_copy(update={"runtime": EvaluateRuntime(max_in_flight=2)})
    run(tmp_path, make_setup(Watched(), SlowJudge()), cfg=cfg)
    assert len(samples(tmp_path)) == 20


def test_engines_are_closed_after_the_last_answer_while_judges_work(tmp_path: Path) -> None:
    class Closing(FakeEngine):
        async def close(self) -> None:
            closed.append(self)
            is_closed.set()

    class SlowJudge(FakeJudge):
        async def judge_async(self, problem: Problem, response: str) -> Verdict:
            await is_closed.wait()
            return await super().judge_async(problem, response)

    async def build() -> InferenceEngine:
        return Closing()

    async def drive() -> None:
        pool = EnginePool([LocalMember("engine 0", build, limit=4)], RestartLimit(0, window_s=1, key="none").count)
        await pool.start()
        answerer = EngineAnswerer(engine=pool, render=render)
        setup = dataclasses.replace(make_setup(judge=SlowJudge()), answer=answerer.answer, expect=pool.expect)
        cfg = CFG.model_copy(update={"runtime": EvaluateRuntime(max_in_flight=100)})
        answering = answer_benchmarks(cfg, (TOY,), setup, seed=3, workdir=tmp_path, telemetry=NullTelemetry())
        await asyncio.wait_for(answering, 20)
        await pool.close()

    closed: list[Closing] = []
    is_closed = asyncio.Event()
    asyncio.run(drive())
    assert len(samples(tmp_path)) == 20
    assert len(closed) == 1


def test_a_problem_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="benchmark 'toy', problem p002: the engine rejected the request: prompt of 600 tokens"
    ):
        run(tmp_path, make_setup(FakeEngine({2: ValueError("prompt of 600 tokens")})))


def test_an_answer_that_the_engine_cut_off_is_never_scored(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="problem p002: the engine aborted the request"):
        run(tmp_path, make_setup(FakeEngine({2: ("half", "abort")})))
