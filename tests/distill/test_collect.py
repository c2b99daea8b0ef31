from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from distill_fakes import FAILED, UNJUDGED, FakeJudge, FakeTeacher, make_problem, make_reply

from klear_core.artifacts.manifest import LedgerStep, StageSummary
from klear_core.artifacts.records import read_shards, write_shard
from klear_core.config.distill import DistillConfig, DistillRuntime, HttpTeacherConfig, SelectConfig
from klear_core.config.settings import YieldLimits, result_settings
from klear_core.config.verify import VerifyConfig
from klear_core.distill.collect import build_teacher, choose_problems, collect_traces, distill
from klear_core.errors import ConfigError, DataError, JudgeError, TeacherError
from klear_core.metrics import NullTelemetry
from klear_core.types import Difficulty, Dropped, Problem, TeacherTrace

PROBLEMS = [make_problem(i, Difficulty.EASY if i % 2 else Difficulty.HARD) for i in range(10)]


def make_config(**changes: object) -> DistillConfig:
    return DistillConfig(**{"runtime": DistillRuntime(traces_per_shard=4, max_in_flight=3), **changes})  # type: ignore[arg-type]


class Recorder(NullTelemetry):
    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.progressed: list[tuple[int, int]] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def progress(self, done: int, total: int, note: str = "") -> None:
        self.progressed.append((done, total))


def run(
    cfg: DistillConfig,
    workdir: Path,
    teacher: FakeTeacher,
    judge: FakeJudge | None = None,
    problems: Sequence[Problem] = PROBLEMS,
    telemetry: NullTelemetry | None = None,
) -> StageSummary:
    telemetry = telemetry or NullTelemetry()
    return asyncio.run(
        collect_traces(
            cfg, teacher, (judge or FakeJudge()).judge_async, problems, seed=7, workdir=workdir, telemetry=telemetry
        )
    )


def traces(workdir: Path) -> list[TeacherTrace]:
    return list(read_shards(workdir / "traces", TeacherTrace))


def drops(workdir: Path) -> list[Dropped]:
    return list(read_shards(workdir / "dropped", Dropped))


def steps(summary: StageSummary) -> dict[str, LedgerStep]:
    return {s.step: s for s in summary.ledger}


def test_every_sample_becomes_a_judged_trace_in_problem_order(tmp_path: Path) -> None:
    summary = run(make_config(samples_per_problem=2), tmp_path, FakeTeacher())
    assert [(t.problem_id, t.sample_idx) for t in traces(tmp_path)] == [
        (p.problem_id, i) for p in PROBLEMS for i in (0, 1)
    ]
    assert all(t.verdict.is_correct for t in traces(tmp_path))
    assert drops(tmp_path) == []
    assert summary.counts == {"problems": 10, "traces": 20, "tokens": 60, "teacher_accuracy": 1.0}


def test_the_judge_sees_the_whole_r1_shape(tmp_path: Path) -> None:
    judge = FakeJudge()
    run(make_config(), tmp_path, FakeTeacher(), judge, PROBLEMS[1:2])
    assert judge.judged == ["<think>\n1=1\n</think>\n\n\\boxed{1}"]


def test_the_ledger_follows_every_sample_from_asking_to_selection(tmp_path: Path) -> None:
    script = {
        "p000": [FAILED],
        "p001": [make_reply("\\boxed{99}")],  # wrong, easy
        "p002": [make_reply("\\boxed{99}")],  # wrong, hard
        "p003": [make_reply(finish_reason="length")],
        "p004": [make_reply(reasoning="")],
    }
    cfg = make_config(select=SelectConfig(easy="correct_only"), max_failure_rate=0.5)
    summary = run(cfg, tmp_path, FakeTeacher(script), FakeJudge({"p005": UNJUDGED}))
    assert summary.ledger == (
        LedgerStep(step="ask", unit="trace", num_in=10, num_out=9, dropped={"timeout": 1}),
        LedgerStep(step="complete", unit="trace", num_in=9, num_out=7, dropped={"no_reasoning": 1, "truncated": 1}),
        LedgerStep(step="judge", unit="trace", num_in=7, num_out=6, dropped={"judge_failed": 1}),
        LedgerStep(
            step="select",
            unit="trace",
            num_in=6,
            num_out=5,
            dropped={"wrong_easy": 1},
            noted={"wrong_but_kept_hard": 1},
        ),
    )
    assert {d.problem_id: d.reason for d in drops(tmp_path)} == {
        "p000": "timeout",
        "p001": "wrong_easy",
        "p003": "truncated",
        "p004": "no_reasoning",
        "p005": "judge_failed",
    }
    assert summary.counts["teacher_accuracy"] == round(4 / 6, 4)


def test_kept_exceptions_are_noted(tmp_path: Path) -> None:
    script = {"p000": [make_reply("\\boxed{0}", finish_reason="length")]}
    cfg = make_config(select=SelectConfig(keep_truncated=True, keep_unjudged=True), max_failure_rate=1.0)
    summary = steps(run(cfg, tmp_path, FakeTeacher(script), FakeJudge({"p001": UNJUDGED})))
    assert len(traces(tmp_path)) == 10
    assert summary["complete"].noted == {"truncated_but_kept": 1}
    assert summary["judge"].noted == {"judge_failed_but_kept": 1}


def test_a_finished_shard_is_not_asked_again_and_the_result_is_that_of_one_run(tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    cfg = make_config(runtime=DistillRuntime(traces_per_shard=4, max_in_flight=1))
    expected = run(cfg, straight, FakeTeacher())

    first = FakeTeacher({"p006": RuntimeError("power cut")})
    with pytest.raises(RuntimeError, match="power cut"):
        run(cfg, broken, first)
    assert [p.name for p in sorted((broken / "traces").iterdir())] == [
        "00000-of-00003.parquet",
        "00001-of-00003.parquet",
    ]

    second = FakeTeacher()
    assert run(cfg, broken, second) == expected
    assert set(second.asked) == {"p006", "p007", "p008", "p009"}
    assert traces(broken) == traces(straight)
    assert drops(broken) == drops(straight)


def test_a_changed_shard_size_asks_for_nothing_again(tmp_path: Path) -> None:
    run(make_config(), tmp_path, FakeTeacher())
    again = FakeTeacher()
    run(make_config(runtime=DistillRuntime(traces_per_shard=1)), tmp_path, again)
    assert not again.asked


def test_too_many_teacher_failures_stop_the_stage_and_keep_the_finished_shards(tmp_path: Path) -> None:
    cfg = make_config(runtime=DistillRuntime(traces_per_shard=4, max_in_flight=1), max_failure_rate=0.2)
    teacher = FakeTeacher({"p004": [FAILED], "p005": [FAILED]})
    with pytest.raises(
        TeacherError,
        match=r"2 of the 3 answers of a shard failed \(2 timeout\).*max_failure_rate = 0.2.*p005.*run again",
    ):
        run(cfg, tmp_path, teacher)
    assert "p006" not in teacher.asked
    again = FakeTeacher()
    run(cfg, tmp_path, again)
    assert set(again.asked) == {f"p{i:03d}" for i in range(3, 10)}
    assert len(traces(tmp_path)) == 10


def test_too_many_judge_failures_stop_the_stage_even_if_unjudged_traces_are_kept(tmp_path: Path) -> None:
    cfg = make_config(select=SelectConfig(keep_unjudged=True))
    with pytest.raises(JudgeError, match="1 judge_failed"):
        run(cfg, tmp_path, FakeTeacher(), FakeJudge({"p000": UNJUDGED}))


def test_wrong_and_truncated_replies_are_no_failures(tmp_path: Path) -> None:
    script = {f"p{i:03d}": [make_reply("\\boxed{99}", finish_reason="stop" if i % 2 else "length")] for i in range(10)}
    summary = run(make_config(max_failure_rate=0.0), tmp_path, FakeTeacher(script))
    assert steps(summary)["complete"].dropped == {"truncated": 5}


def test_progress_counts_problems_and_metrics_come_with_every_shard(tmp_path: Path) -> None:
    recorder = Recorder()
    script = {"p001": [make_reply("\\boxed{99}")]}
    run(make_config(), tmp_path, FakeTeacher(script), telemetry=recorder)
    assert sorted(recorder.progressed) == [(i, 10) for i in range(1, 11)]
    assert [step for step, _ in recorder.rows] == [1, 2, 3]
    last = recorder.rows[-1][1]
    assert last["distill/trace/count"] == 10
    assert last["distill/trace/tokens_mean"] == 3
    assert last["distill/accuracy/all"] == 0.9
    assert last["distill/accuracy/easy"] == 0.8
    assert all(name.count("/") == 2 for name in last)


def test_fewer_problems_are_drawn_by_seed_and_stay_in_order() -> None:
    chosen = choose_problems(PROBLEMS, max_problems=4, seed=1)
    assert len(chosen) == 4
    assert [p.problem_id for p in chosen] == sorted(p.problem_id for p in chosen)
    assert chosen == choose_problems(PROBLEMS, max_problems=4, seed=1)
    assert chosen != choose_problems(PROBLEMS, max_problems=4, seed=2)
    assert choose_problems(PROBLEMS, max_problems=None, seed=1) == PROBLEMS


def write_chains(folder: Path, answers: Sequence[int]) -> None:
    problems = [make_problem(a, question=f"mod 10: {a},+1,-1=?") for a in answers]
    write_shard(folder / "problems" / "a.parquet", problems)


def test_the_stage_reads_problems_and_judges_with_the_real_judge(tmp_path: Path) -> None:
    write_chains(tmp_path / "in", range(6))
    cfg = DistillConfig(samples_per_problem=2, max_problems=5)
    summary = distill(
        cfg, VerifyConfig(), problems=tmp_path / "in", seed=0, workdir=tmp_path / "out", telemetry=NullTelemetry()
    )
    assert steps(summary)["limit"].dropped == {"over_max_problems": 1}
    assert steps(summary)["ask"].num_in == 10
    assert summary.seeds == {"distill": 0}
    for trace in traces(tmp_path / "out"):
        assert trace.verdict.is_correct == (trace.answer == f"\\boxed{{{int(trace.problem_id[1:])}}}")


def distilled(cfg: DistillConfig, folder: Path) -> StageSummary:
    return distill(
        cfg, VerifyConfig(), problems=folder / "in", seed=0, workdir=folder / "out", telemetry=NullTelemetry()
    )


def test_problems_of_one_difficulty_are_distilled_alone(tmp_path: Path) -> None:
    easy, hard = Difficulty.EASY, Difficulty.HARD
    problems = [make_problem(a, hard if a < 4 else easy, question=f"mod 10: {a},+1,-1=?") for a in range(6)]
    write_shard(tmp_path / "in" / "problems" / "a.parquet", problems)
    summary = distilled(DistillConfig(difficulties=(hard,), max_problems=3), tmp_path)
    assert {trace.difficulty for trace in traces(tmp_path / "out")} == {hard}
    assert steps(summary)["limit"].dropped == {"other_difficulty": 2, "over_max_problems": 1}
    with pytest.raises(DataError, match="none of its 6 problems is tagged unknown"):
        distilled(DistillConfig(difficulties=(Difficulty.UNKNOWN,)), tmp_path)


def test_without_difficulties_the_settings_are_those_of_earlier_versions() -> None:
    assert "difficulties" not in result_settings(DistillConfig())
    assert result_settings(DistillConfig(difficulties=(Difficulty.EASY,)))["difficulties"] == ["easy"]


def test_no_problem_at_all_is_an_error_that_says_where_to_look(tmp_path: Path) -> None:
    write_chains(tmp_path / "in", ())
    with pytest.raises(DataError, match="no problem to distill"):
        distill(
            DistillConfig(),
            VerifyConfig(),
            problems=tmp_path / "in",
            seed=0,
            workdir=tmp_path / "out",
            telemetry=NullTelemetry(),
        )


def test_a_problem_that_the_procedural_teacher_cannot_read_stops_with_the_reason(tmp_path: Path) -> None:
    write_shard(tmp_path / "in" / "problems" / "a.parquet", [make_problem(0, question="What is love?")])
    with pytest.raises(TeacherError, match=r"1 unsupported.*not a chain problem: 'What is love\?'"):
        distill(
            DistillConfig(),
            VerifyConfig(),
            problems=tmp_path / "in",
            seed=0,
            workdir=tmp_path / "out",
            telemetry=NullTelemetry(),
        )


def test_a_missing_api_key_is_a_config_error_that_names_the_variable() -> None:
    settings = {"base_url": "http://localhost/v1", "model": "m", "api_key_env": "NO_SUCH_KEY_HERE"}
    with pytest.raises(ConfigError, match="'NO_SUCH_KEY_HERE': this environment variable is not set"):
        build_teacher(HttpTeacherConfig.model_validate(settings))


def silent(num_silent: int, problems: Sequence[Problem] = PROBLEMS) -> FakeTeacher:
    """A teacher that gives no reasoning for the first problems."""
    return FakeTeacher(
        {p.problem_id: [make_reply(f"\\boxed{{{i}}}", reasoning="")] for i, p in enumerate(problems[:num_silent])}
    )


@pytest.mark.parametrize("stop_below", [0.0, 0.5])
def test_a_teacher_without_reasoning_stops_the_stage_whatever_the_floor(tmp_path: Path, stop_below: float) -> None:
    cfg = make_config(runtime=DistillRuntime(traces_per_shard=4, complete=YieldLimits(stop_below=stop_below)))
    with pytest.raises(DataError) as caught:
        run(cfg, tmp_path, silent(10))
    told = str(caught.value)
    assert told.startswith(
        "0 of 10 answers of the teacher are complete and judged; lost: 10 no_reasoning; the first: problem p00"
    )
    assert "serve it with a reasoning parser" in told


def test_below_the_floor_distillation_stops_and_above_it_warns(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"4 of 10 .*6 no_reasoning.*40\.0%, less than distill\.runtime\.complete\.stop_below = 0\.5"
    ):
        run(make_config(), tmp_path / "below", silent(6))
    summary = run(make_config(), tmp_path / "at", silent(5))
    assert [note[:43] for note in summary.notes] == ["5 of 10 answers of the teacher are complete"]
    assert steps(summary)["complete"].dropped == {"no_reasoning": 5}
    assert run(make_config(), tmp_path / "above", silent(1)).notes == ()


def test_a_large_distillation_stops_early(tmp_path: Path) -> None:
    problems = [make_problem(i) for i in range(1000)]
    cfg = make_config(runtime=DistillRuntime(traces_per_shard=50, max_in_flight=8))
    teacher = silent(1000, problems)
    with pytest.raises(DataError, match="0 of 200 answers"):
        run(cfg, tmp_path, teacher, problems=problems)
    assert len(teacher.asked) <= 210


def test_a_repaired_teacher_is_asked_again_about_what_was_lost_and_about_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        run(make_config(), tmp_path, silent(8))
    repaired = FakeTeacher()
    summary = run(make_config(), tmp_path, repaired)
    assert (summary.counts["traces"], summary.notes) == (10, ())
    assert {p.problem_id for p in PROBLEMS[:8]} <= set(repaired.asked)
    again = FakeTeacher()
    run(make_config(), tmp_path, again)
    assert not again.asked


def test_a_policy_that_keeps_nothing_is_an_error_and_a_teacher_that_is_never_right_is_told(tmp_path: Path) -> None:
    wrong = {p.problem_id: [make_reply("\\boxed{99}")] for p in PROBLEMS}
    picky = SelectConfig(easy="correct_only", hard="correct_only")
    with pytest.raises(
        DataError,
        match=r"0 of 10 complete answers are kept by distill\.select; lost: 5 wrong_\w+, 5 wrong_\w+; the first: pr",
    ):
        run(make_config(select=picky), tmp_path / "picky", FakeTeacher(wrong))
    summary = run(make_config(), tmp_path / "all", FakeTeacher(wrong))
    assert summary.notes == ("none of 10 judged answers of the teacher is right: check the references",)
