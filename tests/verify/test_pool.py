# ruff: noqa: E501
"""The pool: scores by setting, streaming, async, health, and what happens when a judging process dies."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from verify_builders import ADD_STDIN, boxed, code_config, fenced, math_problem, problem, stdin_reference

from klear_core.config.verify import CodeConfig, MathConfig, SandboxConfig, VerifyConfig, VerifyRuntime
from klear_core.errors import JudgeError, SandboxError
from klear_core.types import Domain, Outcome, UnverifiableReference, Verdict
from klear_core.verify import JudgeHealth, JudgePool
from klear_core.verify.client import CheckSandbox, JudgeClient
from klear_core.verify.code.judge import verdict_of

ONE_WORKER = VerifyConfig(math=MathConfig(cpu_s=60.0), runtime=VerifyRuntime(math_workers=1, code_workers=1))
PATIENCE_S = 120.0
HALF_RIGHT = "a, b = map(int, input().split())\nprint(3)"


def server_of(pool: JudgePool) -> psutil.Process:
    return psutil.Process(pool._calls._client._link.process.pid)


@pytest.fixture(scope="module")
def math_worker() -> Iterator[JudgePool]:
    """One pool for the tests that leave it as it is."""
    with JudgePool(ONE_WORKER) as pool:
        yield pool


@pytest.mark.parametrize(("score", "expected"), [("soft", 1 / 3), ("hard", 0.0)])
def test_the_score_of_one_test_in_three(score: str, expected: float) -> None:
    verdict = verdict_of(1, 3, "", CodeConfig.model_validate({"score": score}))
    assert verdict.score == pytest.approx(expected)


def test_a_program_is_scored_by_the_tests_that_it_passes(code_pool: JudgePool) -> None:
    assert code_pool.judge(problem(ADD_STDIN), fenced(HALF_RIGHT)).score == pytest.approx(1 / 3)


@pytest.mark.parametrize("score", ["soft", "hard"])
def test_an_answer_without_its_tag_scores_as_one_without_a_program(score: str) -> None:
    with JudgePool(code_config(score=score)) as pool:
        untagged = pool.judge(problem(ADD_STDIN), "```python\nprint(1)\n```")
        without_program = pool.judge(problem(ADD_STDIN), "<think> x </think> I do not know.")
    assert (untagged.outcome, without_program.outcome) == (Outcome.NO_ANSWER, Outcome.NO_ANSWER)
    assert (untagged.score, without_program.score) == (0.0, 0.0)


def test_the_hard_score_stops_at_the_first_failure(sandbox_name: str) -> None:
    with JudgePool(code_config(score="hard")) as pool:
        verdict = pool.judge(problem(ADD_STDIN), fenced(HALF_RIGHT))
    assert (verdict.score, "stopped after 2" in verdict.detail) == (0.0, True), verdict


def test_tests_after_too_many_timeouts_are_not_run(sandbox_name: str) -> None:
    reference = stdin_reference(*((str(i), "1") for i in range(6)))
    with JudgePool(code_config(cpu_s=0.2, max_timeouts=2)) as pool:
        assert "stopped after 2" in pool.judge(problem(reference), fenced("while True: pass")).detail


def test_missing_code_is_no_answer(code_pool: JudgePool) -> None:
    assert code_pool.judge(problem(ADD_STDIN), "<think>```python\nprint(3)\n```").outcome is Outcome.NO_ANSWER
    assert code_pool.judge(problem(ADD_STDIN), "</think>print(3)").outcome is Outcome.NO_ANSWER


def test_a_caller_that_is_cancelled_leaves_no_error_behind(
    math_worker: JudgePool, caplog: pytest.LogCaptureFixture
) -> None:
    """RL cancels the answers of a group that it needs no more, some of which are being judged."""

    async def cancel_one_and_ask_again(pool: JudgePool) -> Verdict:
        first = asyncio.create_task(pool.judge_async(math_problem(r"\sqrt{2}+x"), boxed(r"x+\sqrt{2}")))
        await asyncio.sleep(0)  # it submits the answer and waits
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return await pool.judge_async(math_problem(r"\sqrt{3}+x"), boxed(r"x+\sqrt{3}"))

    assert asyncio.run(cancel_one_and_ask_again(math_worker)).score == 1.0
    assert [record.getMessage() for record in caplog.records] == []


def test_easy_verdicts_start_no_process() -> None:
    with JudgePool(ONE_WORKER) as pool:
        assert [pool.judge(math_problem("7"), boxed(a)).score for a in ("7", "8", "07")] == [1.0, 0.0, 1.0]
        assert pool.submit(math_problem("7"), "<think>\nFirst I add").result(timeout=0).outcome is Outcome.NO_ANSWER
        assert pool._calls._client._link is None


def test_the_first_verdict_comes_before_the_last_answer_is_submitted(math_worker: JudgePool) -> None:
    first = math_worker.submit(math_problem(r"\sqrt{8}"), boxed(r"2\sqrt{2}"))
    assert first.result(timeout=PATIENCE_S).score == 1.0
    assert math_worker.submit(math_problem(r"\sqrt{12}"), boxed(r"2\sqrt{3}")).result(timeout=PATIENCE_S).score == 1.0


def test_async_judging_overlaps(math_worker: JudgePool) -> None:
    async def judge_all(pool: JudgePool) -> list[Verdict]:
        return await asyncio.gather(
            *(pool.judge_async(math_problem("x+1"), boxed(f"x+{i + 1}-{i}")) for i in range(1, 20))
        )

    assert [v.score for v in asyncio.run(judge_all(math_worker))] == [1.0] * 19


def test_judging_from_many_threads(math_worker: JudgePool) -> None:
    scores: list[float] = []

    def judge_one() -> None:
        scores.append(math_worker.judge(math_problem(r"\sqrt{8}"), boxed(r"2\sqrt{2}")).score)

    threads = [threading.Thread(target=judge_one) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == [1.0] * 16


def test_a_judging_process_that_is_killed_is_replaced_and_the_answer_judged() -> None:
    with JudgePool(ONE_WORKER) as pool:
        assert pool.judge(math_problem(r"\sqrt{8}"), boxed(r"2\sqrt{2}")).score == 1.0
        server_of(pool).kill()
        assert pool.judge(math_problem(r"\sqrt{8}"), boxed(r"\sqrt{2}+\sqrt{2}")).score == 1.0


def test_a_worker_that_is_killed_is_replaced_and_the_answer_judged(sandbox_name: str) -> None:
    with JudgePool(code_config()) as pool:
        pool.check_sandbox()  # from here on only workers start jails
        server = server_of(pool)
        slow = pool.submit(problem(stdin_reference(("", "1\n"))), fenced("import time\ntime.sleep(2)\nprint(1)"))
        deadline = time.monotonic() + PATIENCE_S
        while not (workers := [p for p in server.children() if p.children()]) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(workers[0].pid, signal.SIGKILL)
        assert slow.result(timeout=PATIENCE_S).score == 1.0


def test_closing_twice_and_judging_again_is_fine() -> None:
    pool = JudgePool(ONE_WORKER)
    assert pool.judge(math_problem(r"\sqrt{8}"), boxed(r"2\sqrt{2}")).score == 1.0
    pool.close()
    pool.close()
    assert pool.judge(math_problem(r"\sqrt{8}"), boxed(r"2\sqrt{2}")).score == 1.0
    pool.close()


def test_closing_with_an_answer_pending_judges_it_no_more() -> None:
    pool = JudgePool(ONE_WORKER)
    pending = pool.submit(math_problem("73"), boxed("9^{9^{9^{9}}}"))
    pool.close()
    verdict = pending.result(timeout=PATIENCE_S)
    assert (verdict.outcome, verdict.detail) == (Outcome.JUDGE_FAILED, "the judges were closed")
    assert pool._calls._client._link is None


def test_a_task_that_was_sent_cannot_be_cancelled_else_its_verdict_would_end_the_reader() -> None:
    client = JudgeClient(VerifyConfig(sandbox="rlimits-only", limits=SandboxConfig(python="/nowhere/python")))
    given_up, waited_for = client.submit(CheckSandbox()), client.submit(CheckSandbox())
    assert not given_up.cancel()
    assert waited_for.result(timeout=PATIENCE_S).kind == "no_sandbox"
    client.close()


def test_the_judging_process_reads_on_while_its_answers_are_not_read() -> None:
    """Else two full sockets deadlock: a callback waits for a lock whose holder waits for a process that waits for the callback's thread."""
    client = JudgeClient(VerifyConfig(sandbox="rlimits-only", limits=SandboxConfig(python="/nowhere/python")))
    goes_on = threading.Event()
    futures = [client.submit(CheckSandbox())]
    futures[0].add_done_callback(lambda _: goes_on.wait())
    sender = threading.Thread(
        target=lambda: futures.extend(client.submit(CheckSandbox()) for _ in range(20_000)), daemon=True
    )
    sender.start()
    sender.join(PATIENCE_S)
    was_sent = not sender.is_alive()
    goes_on.set()
    assert {f.result(timeout=PATIENCE_S).kind for f in futures} == {"no_sandbox"}
    client.close()
    assert was_sent


def test_nothing_runs_on_when_the_caller_is_killed() -> None:
    script = (
        "from klear_core.verify import JudgePool\nfrom klear_core.config.verify import *\nfrom klear_core.types import *\nimport time\n"
        "pool = JudgePool(VerifyConfig(math=MathConfig(cpu_s=60.0), runtime=VerifyRuntime(math_workers=1)))\n"
        "p = Problem(problem_id='p', source='s', domain=Domain.MATH, question='', reference=MathReference(answers=('1/2',)), difficulty=Difficulty.EASY)\n"
        "pool.judge(p, '</think>0.5')\nprint(pool._calls._client._link.process.pid, flush=True)\ntime.sleep(1000)"
    )
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    server = psutil.Process(int(caller.stdout.readline()))
    family = [server, *server.children(recursive=True)]
    caller.kill()
    caller.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def test_health_stops_a_stage_whose_judges_fail_too_often() -> None:
    health = JudgeHealth(max_failed_frac=0.2, min_failed_count=3)
    good = Verdict(outcome=Outcome.SCORED, score=1.0)
    failed = Verdict(outcome=Outcome.JUDGE_FAILED, score=0.0, detail="the reason")
    for verdict in [*[good] * 8, failed, failed]:
        health.record(verdict)
    with pytest.raises(JudgeError, match=r"3 of 11.*the reason"):
        health.record(failed)
    assert health.counts == {Outcome.SCORED: 8, Outcome.JUDGE_FAILED: 3}


def test_wrong_answers_stop_nothing_and_bad_references_count_as_failures() -> None:
    health = JudgeHealth(max_failed_frac=0.1, min_failed_count=1)
    for outcome in (Outcome.SCORED, Outcome.NO_ANSWER):
        for _ in range(100):
            health.record(Verdict(outcome=outcome, score=0.0))
    bad = Verdict(outcome=Outcome.BAD_REFERENCE, score=0.0, detail="the reason")
    for _ in range(22):
        health.record(bad)
    with pytest.raises(JudgeError, match=r"23 of 223.*bad_reference: the reason"):
        health.record(bad)


def test_references_that_cannot_be_used_are_noted_before_anything_is_spent() -> None:
    with JudgePool(ONE_WORKER) as pool:
        (note,) = pool.prepare([math_problem("7"), math_problem(r"\sqrt{2}"), math_problem(r"\frac{1")])
    assert note.startswith(
        "1 of 3 references cannot be used (1 bad_reference), their answers get no score: problem p0: no"
    )


def test_running_with_less_isolation_is_noted() -> None:
    assert JudgePool(ONE_WORKER).notes == ()
    assert "rlimits-only" in JudgePool(VerifyConfig(sandbox="rlimits-only")).notes[0]


def test_math_alone_needs_no_sandbox_and_no_process() -> None:
    with JudgePool(VerifyConfig(sandbox="firejail", limits=SandboxConfig(python="/nowhere/python"))) as pool:
        assert pool.prepare([math_problem("7")]) == ()


def test_code_without_a_working_sandbox_is_refused_before_anything_is_spent() -> None:
    broken = VerifyConfig(sandbox="rlimits-only", limits=SandboxConfig(python="/nowhere/python"))
    with JudgePool(broken) as pool, pytest.raises(SandboxError, match="/nowhere/python"):
        pool.prepare([problem(ADD_STDIN)])


def test_a_problem_without_reference_gets_its_own_outcome_and_needs_no_sandbox() -> None:
    bare = UnverifiableReference(domain=Domain.CODE, why="the source has no tests")
    with JudgePool(VerifyConfig(sandbox="firejail", limits=SandboxConfig(python="/nowhere/python"))) as pool:
        assert pool.prepare([problem(bare)]) == ()
        verdict = pool.judge(problem(bare), "no answer at all")
    assert verdict.outcome is Outcome.UNVERIFIABLE
    assert not verdict.outcome.counts_for_model
    assert verdict.detail == "problem p0: the source has no tests"
