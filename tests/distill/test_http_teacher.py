"""The HTTP teacher against a real server on loopback that answers by script."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from email.utils import formatdate

import pytest
from distill_fakes import make_problem
from scripted_server import Answer, ScriptedServer

from klear_core.config.distill import HttpTeacherConfig
from klear_core.config.engine import HttpRuntime
from klear_core.distill.http import HttpTeacher
from klear_core.distill.teacher import TeacherFailure, TeacherRejectsError, TeacherResult
from klear_core.errors import TeacherError
from klear_core.types import TeacherReply

pytestmark = pytest.mark.slow


def make_config(base_url: str, *, runtime: HttpRuntime | None = None, **changes: object) -> HttpTeacherConfig:
    runtime = runtime or HttpRuntime(max_retries=2, timeout_s=5)
    return HttpTeacherConfig(base_url=base_url, model="r1", runtime=runtime, **changes)  # type: ignore[arg-type]


def ask(
    cfg: HttpTeacherConfig,
    num_samples: int = 1,
    look: Callable[[HttpTeacher], None] = lambda _: None,
    **problem: object,
) -> Sequence[TeacherResult]:
    async def run() -> Sequence[TeacherResult]:
        teacher = HttpTeacher(cfg, backoff_s=0.02)
        try:
            return await teacher.solve(make_problem(0, **problem), num_samples=num_samples, seed=3)  # type: ignore[arg-type]
        finally:
            look(teacher)
            await teacher.close()

    return asyncio.run(run())


def reason(result: TeacherResult) -> str:
    assert isinstance(result, TeacherFailure), result
    return result.reason


REPLY = TeacherReply(reasoning="2+2=4", answer="4", finish_reason="stop", num_tokens=9)


def test_a_request_carries_the_question_the_instruction_and_the_decoding(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    results = ask(
        make_config(server.base_url + "/", api_key_env="TEACHER_KEY", max_tokens=100), num_samples=2, question="2+2?"
    )
    assert list(results) == [REPLY, REPLY]
    first, second = server.requests
    assert first["model"] == "r1"
    assert first["messages"] == [
        {"role": "user", "content": "2+2?\n\nPlease reason step by step, and put your final answer within \\boxed{}."}
    ]
    assert (first["temperature"], first["top_p"], first["max_tokens"]) == (0.6, 0.95, 100)
    assert first["seed"] != second["seed"]
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_the_question_goes_alone_and_unseeded_if_so_set(server: ScriptedServer) -> None:
    ask(make_config(server.base_url, math_instruction="", send_seed=False), question="2+2?")
    assert server.requests[0]["messages"] == [{"role": "user", "content": "2+2?"}]
    assert "seed" not in server.requests[0]
    assert "authorization" not in server.headers[0]


def test_another_instruction_is_another_prompt_version() -> None:
    versions = {
        HttpTeacher(make_config("http://x", math_instruction=text)).prompt_version for text in ("", "Box it.", "Think.")
    }
    assert len(versions) == 3


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_a_busy_server_is_asked_again(server: ScriptedServer, status: int) -> None:
    server.script = [Answer(status=status, body="busy"), Answer()]
    retries: dict[str, int] = {}
    assert list(ask(make_config(server.base_url), look=lambda t: retries.update(t.retries))) == [REPLY]
    assert retries == {f"http_{status}": 1}


def test_a_lost_connection_is_asked_again(server: ScriptedServer) -> None:
    server.script = [Answer(hangs_up=True), Answer()]
    assert list(ask(make_config(server.base_url))) == [REPLY]
    assert len(server.requests) == 2


def test_waits_double_with_jitter(server: ScriptedServer) -> None:
    server.script = [Answer(status=500)]
    (result,) = ask(make_config(server.base_url, runtime=HttpRuntime(max_retries=3, timeout_s=5)))
    assert reason(result) == "http_500"
    waits = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    assert len(waits) == 3
    assert all(wait >= 0.02 * 2**i * 0.5 for i, wait in enumerate(waits))


@pytest.mark.parametrize("value", ["1", "date"])
def test_retry_after_is_honoured_in_both_its_forms(server: ScriptedServer, value: str) -> None:
    after = formatdate(time.time() + 4, usegmt=True) if value == "date" else value
    server.script = [Answer(status=429, headers={"Retry-After": after}), Answer()]
    assert list(ask(make_config(server.base_url))) == [REPLY]
    assert server.times[1] - server.times[0] >= 0.9


def test_a_server_that_stays_busy_fails_that_sample_alone_and_counts_its_tries(server: ScriptedServer) -> None:
    server.script = [
        Answer(status=503, body="full"),
        Answer(status=503, body="full"),
        Answer(status=503, body="full"),
        Answer(),
    ]
    first, second = ask(
        make_config(server.base_url, runtime=HttpRuntime(max_concurrency=1, max_retries=2, timeout_s=5)), num_samples=2
    )
    assert isinstance(first, TeacherFailure)
    assert first.detail == "HTTP 503: 'full', 3 tries"
    assert second == REPLY


def test_an_answer_that_does_not_come_in_time_is_a_timeout(server: ScriptedServer) -> None:
    server.script = [Answer(delay_s=60)]
    (result,) = ask(make_config(server.base_url, runtime=HttpRuntime(max_retries=1, timeout_s=0.1)))
    assert reason(result) == "timeout"


def test_a_malformed_reply_is_a_failure_and_not_asked_again(server: ScriptedServer) -> None:
    server.script = [Answer(body="<html>")]
    (result,) = ask(make_config(server.base_url))
    assert reason(result) == "malformed"
    assert len(server.requests) == 1


def test_a_request_that_the_server_will_not_take_fails_without_a_retry(server: ScriptedServer) -> None:
    server.script = [Answer(status=400, body="prompt too long")]
    (result,) = ask(make_config(server.base_url))
    assert isinstance(result, TeacherFailure)
    assert (result.reason, result.detail) == ("rejected", "HTTP 400: 'prompt too long'")
    assert len(server.requests) == 1


@pytest.mark.parametrize(("status", "advice"), [(401, "api_key_env"), (402, "balance"), (404, "distill.teacher.model")])
def test_a_teacher_that_refuses_us_ends_the_stage_for_good_with_advice(
    server: ScriptedServer, status: int, advice: str
) -> None:
    server.script = [Answer(status=status, body="no")]
    with pytest.raises(TeacherRejectsError, match=advice) as caught:
        ask(make_config(server.base_url))
    assert caught.value.is_permanent
    assert len(server.requests) == 1


def test_an_unreachable_teacher_is_an_error_with_the_address_the_tries_and_the_fix() -> None:
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(
            TeacherError, match=rf"'r1' at {url}/chat/completions cannot be reached after 3 tries.*base_url"
        ) as caught:
            ask(make_config(url))
    assert not caught.value.is_permanent


def test_no_more_requests_run_at_a_time_than_allowed(server: ScriptedServer) -> None:
    server.script = [Answer(delay_s=0.3)]
    ask(make_config(server.base_url, runtime=HttpRuntime(max_concurrency=3, timeout_s=5)), num_samples=12)
    assert len(server.requests) == 12
    assert server.most_at_once == 3
