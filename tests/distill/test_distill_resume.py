"""Paid replies outlive a run that stops at any point, and the budget holds over all runs together."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from distill_fakes import FAILED, FakeTeacher, collect, make_problem, make_reply
from scripted_server import STREAM, ScriptedServer, event, streamed

from klear_core.artifacts.manifest import StageSummary
from klear_core.artifacts.records import read_shards
from klear_core.config.distill import DistillConfig, DistillRuntime, HttpTeacherConfig, SelectConfig
from klear_core.config.settings import YieldLimits
from klear_core.distill.shards import UnusedReply
from klear_core.distill.teachers.teacher import OVER_BUDGET, BudgetError, Teacher, TeacherFailure, Usage
from klear_core.types import Dropped, TeacherTrace

PROBLEMS = [make_problem(i) for i in range(10)]
ONE_AT_A_TIME = DistillRuntime(traces_per_shard=8, max_in_flight=1)


def run(cfg: DistillConfig, workdir: Path, teacher: Teacher | None = None) -> StageSummary:
    return collect(cfg, PROBLEMS, workdir, teacher)


def traces(workdir: Path) -> list[TeacherTrace]:
    return list(read_shards(workdir / "traces", TeacherTrace))


def remote(*broken: str) -> FakeTeacher:
    return FakeTeacher({problem_id: RuntimeError("power cut") for problem_id in broken}, is_costly=True)


def stopped_at_p005(workdir: Path) -> DistillConfig:
    """Stop a run in the middle of its second shard."""
    cfg = DistillConfig(samples_per_problem=2, runtime=ONE_AT_A_TIME)
    with pytest.raises(RuntimeError, match="power cut"):
        run(cfg, workdir, remote("p005"))
    return cfg


def test_a_stopped_run_pays_again_for_nothing_that_it_received(tmp_path: Path) -> None:
    cfg = stopped_at_p005(tmp_path / "stopped")
    again = remote()
    summary = run(cfg, tmp_path / "stopped", again)
    assert again.asked == {f"p{i:03d}": 2 for i in range(5, 10)}
    assert again.num_expected == 10  # those that are asked, so that the last ones leave no engine idle
    assert summary == run(cfg, tmp_path / "straight", remote())
    assert traces(tmp_path / "stopped") == traces(tmp_path / "straight")
    assert summary.counts["paid_tokens"] == 20 * 5
    assert summary.counts["cost"] == 10.0
    names = [sorted(path.name for path in (tmp_path / run).rglob("*")) for run in ("stopped", "straight")]
    assert names[0] == names[1]
    assert "journal" not in names[0]


def test_another_shard_size_loses_no_paid_reply(tmp_path: Path) -> None:
    cfg = DistillConfig(samples_per_problem=2, runtime=ONE_AT_A_TIME)
    with pytest.raises(RuntimeError):
        run(cfg, tmp_path, remote("p002"))
    again = remote()
    run(cfg.model_copy(update={"runtime": DistillRuntime(traces_per_shard=2)}), tmp_path, again)
    assert "p000" not in again.asked
    assert len(traces(tmp_path)) == 20


@pytest.mark.parametrize("damage", [b'{"problem_id": "p004", "sam', b"\x00\xff garbage\n", b"{}\n"])
def test_a_line_that_a_kill_left_unfinished_is_skipped(tmp_path: Path, damage: bytes) -> None:
    cfg = stopped_at_p005(tmp_path)
    (journal,) = (tmp_path / "journal").iterdir()
    journal.write_bytes(journal.read_bytes() + damage)
    again = remote("p007")
    with pytest.raises(RuntimeError):
        run(cfg, tmp_path, again)  # appends to the damaged file
    assert "p004" not in again.asked
    last = remote()
    assert run(cfg, tmp_path, last).counts["traces"] == 20
    assert set(last.asked) == {"p007", "p008", "p009"}


def test_half_a_last_line_costs_that_reply_alone(tmp_path: Path) -> None:
    cfg = stopped_at_p005(tmp_path)
    (journal,) = (tmp_path / "journal").iterdir()
    journal.write_bytes(journal.read_bytes()[:-20])
    again = remote()
    run(cfg, tmp_path, again)
    assert again.asked == {"p004": 1} | {f"p{i:03d}": 2 for i in range(5, 10)}


def test_a_failed_sample_is_requested_again_and_what_it_used_stays_counted(tmp_path: Path) -> None:
    cfg = DistillConfig(runtime=DistillRuntime(traces_per_shard=10, max_in_flight=1), max_failure_rate=0.1)
    failing = FakeTeacher({"p003": [FAILED], "p004": [FAILED]}, is_costly=True)
    with pytest.raises(Exception, match="2 of the 10 answers"):
        run(cfg, tmp_path, failing)
    again = remote()
    summary = run(cfg, tmp_path, again)
    assert set(again.asked) == {"p003"} | {f"p{i:03d}" for i in range(4, 10)}
    assert again.earlier == Usage(attempts=5, replies=3, input_tokens=10, output_tokens=15, cost=2.5)
    assert summary.counts["paid_tokens"] == 12 * 5


def test_paid_replies_that_are_no_traces_are_kept_with_their_reason(tmp_path: Path) -> None:
    script = {
        "p000": [make_reply(finish_reason="length")],
        "p001": [make_reply(reasoning="")],
        "p002": [make_reply("I cannot", finish_reason="content_filter", reasoning="")],
        "p003": [make_reply("", reasoning="")],
        "p004": [make_reply("")],
        "p005": [make_reply("\\boxed{99}")],
        "p006": [make_reply("print(6)", finish_reason="tool_calls", defect="the model calls a tool")],
        "p007": [make_reply("It is 7.", finish_reason="other", defect="unknown finish_reason 'vibes'")],
    }
    cfg = DistillConfig(
        select=SelectConfig(hard="correct_only"), runtime=DistillRuntime(complete=YieldLimits(stop_below=0.2))
    )
    summary = run(cfg, tmp_path / "a", FakeTeacher(script, is_costly=True))
    unused = list(read_shards(tmp_path / "a" / "unused", UnusedReply))
    reasons = ["truncated", "no_reasoning", "refused", "empty", "no_answer", "wrong_hard", "tool_calls", "other_shape"]
    assert [reply.reason for reply in unused] == reasons
    assert (unused[2].answer, unused[2].finish_reason) == ("I cannot", "content_filter")
    assert [reply.answer for reply in unused[6:]] == ["print(6)", "It is 7."]
    details = [drop.detail for drop in read_shards(tmp_path / "a" / "dropped", Dropped)][6:]
    assert details == [
        "sample 0: 3 tokens, the model calls a tool",
        "sample 0: 3 tokens, unknown finish_reason 'vibes'",
    ]
    assert sum(step.num_in - step.num_out for step in summary.ledger) == 8
    assert summary.ledger[0].num_in == 10 == summary.counts["traces"] + 8

    teacher = {"base_url": "http://x", "model": "m", "keep_incomplete": ["no_reasoning", "no_answer", "refused"]}
    kept = cfg.model_copy(
        update={
            "teacher": HttpTeacherConfig.model_validate(teacher),
            "select": SelectConfig(keep_truncated=True),
        }
    )
    summary = run(kept, tmp_path / "b", FakeTeacher(script, is_costly=True))
    assert summary.ledger[1].dropped == {"empty": 1, "tool_calls": 1, "other_shape": 1}
    noted = {f"{reason}_but_kept": 1 for reason in ("truncated", "no_reasoning", "refused", "no_answer")}
    assert summary.ledger[1].noted == noted


def test_a_repaired_teacher_is_asked_for_the_lost_replies_alone(tmp_path: Path) -> None:
    cfg = DistillConfig(
        runtime=DistillRuntime(traces_per_shard=5, max_in_flight=1, complete=YieldLimits(stop_below=0.9))
    )
    silent = {f"p{i:03d}": [make_reply(reasoning="")] for i in range(2)}
    with pytest.raises(Exception, match="2 no_reasoning"):
        run(cfg, tmp_path, FakeTeacher(silent, is_costly=True))
    repaired = remote()
    summary = run(cfg, tmp_path, repaired)
    assert set(repaired.asked) == {"p000", "p001"}
    assert (summary.counts["traces"], summary.counts["paid_tokens"]) == (10, 12 * 5)


def with_budget(server: ScriptedServer, **budget: object) -> DistillConfig:
    """One token in, nine out: `STREAM` says so, and `max_tokens` allows no more."""
    endpoint = {"base_url": server.base_url, "input_price": 1e6, "output_price": 1e6}
    runtime = {"endpoints": [endpoint], "max_concurrency": 1, "min_concurrency": 1, "budget": budget}
    settings = {"model": "r1", "max_tokens": 9, "math_instruction": "", "runtime": runtime}
    return DistillConfig(teacher=HttpTeacherConfig.model_validate(settings), runtime=DistillRuntime(traces_per_shard=4))


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["max_tokens", "max_cost"])
def test_a_spent_budget_stops_the_stage_and_a_larger_one_continues_it(
    tmp_path: Path, server: ScriptedServer, limit: str
) -> None:
    server.script = [streamed(*STREAM)]
    with pytest.raises(BudgetError, match=r"[4-6] of 10 samples were requested.*raise distill\.teacher\.runtime"):
        run(with_budget(server, **{limit: 120}), tmp_path)
    num_paid = len(server.requests)
    assert 4 <= num_paid <= 6  # each uses 14, and needs room for its longest prompt besides
    with pytest.raises(BudgetError):
        run(with_budget(server, **{limit: 120}), tmp_path)
    assert len(server.requests) == num_paid
    summary = run(with_budget(server, **{limit: 400}), tmp_path)
    assert len(server.requests) == 10
    assert (summary.counts["traces"], summary.counts["paid_tokens"]) == (10, 140)


@pytest.mark.slow
def test_what_a_budget_paid_for_is_published_if_that_is_enough(tmp_path: Path, server: ScriptedServer) -> None:
    server.script = [streamed(*STREAM)]
    cfg = with_budget(server, max_tokens=150, publish_from=0.6)
    summary = run(cfg, tmp_path)
    num_paid = len(server.requests)
    assert 6 <= num_paid <= 8
    assert summary.ledger[0].dropped == {"over_budget": 10 - num_paid}
    assert len(traces(tmp_path)) == num_paid
    over = [drop for drop in read_shards(tmp_path / "dropped", Dropped) if drop.reason == "over_budget"]
    assert len(over) == 10 - num_paid
    # before it is published, a larger budget still completes it
    summary = run(with_budget(server, max_tokens=1000), tmp_path)
    assert len(server.requests) == 10
    assert (summary.counts["traces"], summary.ledger[0].dropped) == (10, {})


@pytest.mark.slow
def test_a_larger_budget_pays_again_for_no_reply_that_is_no_trace(tmp_path: Path, server: ScriptedServer) -> None:
    whole, cut = streamed(*STREAM), streamed(*STREAM[:4], event(finish_reason="length"), *STREAM[5:])
    server.script = [*[whole] * 6, cut, whole]  # the budget ends in the shard of the seventh problem
    run(with_budget(server, max_tokens=150, publish_from=0.6), tmp_path)
    summary = run(with_budget(server, max_tokens=1000), tmp_path)
    assert len(server.requests) == 10
    assert (summary.counts["traces"], summary.counts["paid_tokens"]) == (9, 140)
    assert summary.ledger[1].dropped == {"truncated": 1}


def spent(*missing: int) -> FakeTeacher:
    """A paid teacher whose budget has no room for these problems."""
    failure = TeacherFailure(reason=OVER_BUDGET, detail="spent")
    return FakeTeacher({f"p{i:03d}": [failure] for i in missing}, is_costly=True)


def publishing_from(share: float, *, max_in_flight: int = 10) -> DistillConfig:
    runtime = {"budget": {"max_tokens": 100, "publish_from": share}}
    settings = {"model": "r1", "base_url": "http://localhost/v1", "runtime": runtime}
    return DistillConfig(
        teacher=HttpTeacherConfig.model_validate(settings),
        runtime=DistillRuntime(traces_per_shard=4, max_in_flight=max_in_flight),
    )


def test_a_budget_that_is_spent_at_once_loses_no_paid_reply_of_any_shard(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="7 of 10 samples were requested"):
        run(publishing_from(1.0), tmp_path, spent(2, 5, 9))  # one problem of each of the three shards
    again = spent(2, 5, 9)
    summary = run(publishing_from(0.7, max_in_flight=1), tmp_path, again)
    assert (summary.counts["traces"], summary.counts["paid_tokens"]) == (7, 10 * 5 + 3 * 5)
    assert set(again.asked) == {"p002", "p005", "p009"}


@pytest.mark.parametrize("num_missing", [1, 3, 4])
def test_the_share_that_the_message_names_is_enough(tmp_path: Path, num_missing: int) -> None:
    teacher = spent(*range(num_missing))
    problems = PROBLEMS[: 9 if num_missing == 3 else 10]
    with pytest.raises(BudgetError) as caught:
        collect(publishing_from(1.0), problems, tmp_path, teacher)
    (share,) = re.findall(r"to at most ([0-9.]+) to go on", str(caught.value))
    assert float(share) == pytest.approx(1 - num_missing / len(problems), abs=0.001)
    summary = collect(publishing_from(float(share)), problems, tmp_path, teacher)
    assert summary.counts["traces"] == len(problems) - num_missing


@pytest.mark.slow
def test_the_key_is_in_no_file_of_the_stage(
    tmp_path: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sk-very-secret-0123456789"
    monkeypatch.setenv("TEACHER_KEY", key)
    echo = STREAM[3].replace(b'"4"', b'"Bearer %s"' % key.encode())
    server.script = [streamed(*STREAM[:3], echo, *STREAM[4:])]
    settings = {"base_url": server.base_url, "model": "r1", "api_key_env": "TEACHER_KEY"}
    cfg = DistillConfig(teacher=HttpTeacherConfig.model_validate(settings))
    summary = run(cfg, tmp_path)
    assert traces(tmp_path)[0].answer == "Bearer [key]"
    assert key not in summary.model_dump_json() + cfg.model_dump_json()
    assert not [path for path in tmp_path.rglob("*.*") if key.encode() in path.read_bytes()]


@pytest.mark.slow
def test_a_server_that_may_ignore_seeds_is_noted_once(tmp_path: Path, server: ScriptedServer) -> None:
    server.script = [streamed(*STREAM)]
    cfg = with_budget(server)
    (note,) = [note for note in run(cfg, tmp_path / "a").notes if "seed" in note]
    assert note.startswith("no reply of r1 has a system_fingerprint: its server may ignore seeds")
    vouched = [piece.replace(b'{"choices"', b'{"system_fingerprint": "fp", "choices"') for piece in STREAM]
    server.script = [streamed(*vouched)]
    assert not [note for note in run(cfg, tmp_path / "b").notes if "seed" in note]


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux tells how many bytes a process has read")
def test_a_resumed_run_reads_each_finished_shard_once(tmp_path: Path) -> None:
    noise = Random(0)
    long_texts = {f"p{i:03d}": [make_reply(reasoning=noise.randbytes(1 << 19).hex())] for i in range(8)}
    cfg = DistillConfig(runtime=DistillRuntime(traces_per_shard=1, max_in_flight=1))
    with pytest.raises(RuntimeError, match="power cut"):
        run(cfg, tmp_path, FakeTeacher(long_texts | {"p008": RuntimeError("power cut")}))
    num_bytes = sum(file.stat().st_size for file in (tmp_path / "traces").iterdir())
    assert num_bytes > 3e6  # what else is read is small beside it
    before = bytes_read()
    assert run(cfg, tmp_path, FakeTeacher()).counts["traces"] == 10
    assert 0.9 < (bytes_read() - before) / num_bytes < 1.3


def bytes_read() -> int:
    """Bytes that this process has read from files and elsewhere, cached ones included."""
    return int(Path("/proc/self/io").read_text().split()[1])
