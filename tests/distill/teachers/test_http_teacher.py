"""The HTTP teacher against a real server on loopback that answers by script."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from email.utils import formatdate

import pytest
from distill_fakes import make_problem
from scripted_server import DONE, STREAM, Answer, ScriptedServer, streamed

from klear_core.config.distill import HttpTeacherConfig
from klear_core.distill.teachers.http_teacher import HttpTeacher, check_endpoints
from klear_core.distill.teachers.teacher import (
    TeacherFailure,
    TeacherRejectsError,
    TeacherResult,
    TeacherSample,
    Usage,
)
from klear_core.errors import TeacherError
from klear_core.types import TeacherReply

pytestmark = pytest.mark.slow


PATIENT = {"max_attempts": 3, "first_backoff_s": 0.02, "min_concurrency": 1, "left_out_s": 0.05}
"""Deadlines that a busy machine does not reach, and short waits between attempts."""


def make_config(base_url: str, runtime: Mapping[str, object] | None = None, **changes: object) -> HttpTeacherConfig:
    settings = {"base_url": base_url, "model": "r1", "runtime": PATIENT | dict(runtime or {}), **changes}
    return HttpTeacherConfig.model_validate(settings)


def ask_all(
    cfg: HttpTeacherConfig,
    num_samples: int = 1,
    look: Callable[[HttpTeacher], None] = lambda _: None,
    **problem: object,
) -> Sequence[TeacherSample]:
    async def run() -> Sequence[TeacherSample]:
        teacher = HttpTeacher(cfg)
        try:
            samples = [teacher.sample(make_problem(0, **problem), sample_idx=i, seed=3) for i in range(num_samples)]  # type: ignore[arg-type]
            return await asyncio.gather(*samples)
        finally:
            look(teacher)
            await teacher.close()

    return asyncio.run(run())


def ask(
    cfg: HttpTeacherConfig,
    num_samples: int = 1,
    look: Callable[[HttpTeacher], None] = lambda _: None,
    **problem: object,
) -> Sequence[TeacherResult]:
    return [sample.result for sample in ask_all(cfg, num_samples, look, **problem)]


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


def test_attempts_are_bounded_and_all_send_the_same_seed(server: ScriptedServer) -> None:
    server.script = [Answer(status=500)]
    (sample,) = ask_all(make_config(server.base_url, {"max_attempts": 4}))
    assert reason(sample.result) == "http_500"
    assert len(server.requests) == 4
    assert len({str(request["seed"]) for request in server.requests}) == 1
    assert sample.usage == Usage(attempts=4)


@pytest.mark.parametrize("value", ["1", "1.0", "date"])
def test_retry_after_is_honoured_in_all_its_forms(server: ScriptedServer, value: str) -> None:
    after = formatdate(time.time() + 4, usegmt=True) if value == "date" else value
    server.script = [Answer(status=429, headers={"Retry-After": after}), Answer()]
    assert list(ask(make_config(server.base_url))) == [REPLY]
    assert server.times[1] - server.times[0] >= 0.9


@pytest.mark.parametrize("value", ["-5", "soon", "", "1e9", f"Wed, 21 Oct {'9' * 20} 07:28:00 GMT"])
def test_a_retry_after_that_is_no_time_asks_for_no_wait(server: ScriptedServer, value: str) -> None:
    server.script = [Answer(status=429, headers={"Retry-After": value}), Answer()]
    assert list(ask(make_config(server.base_url))) == [REPLY]


@pytest.mark.parametrize("fields", [b"Content-Encoding: gzip\r\nContent-Length: 600\r\n", b""])
def test_the_check_before_a_run_reads_no_body(fields: bytes) -> None:
    """Neither one that is not packed as it says, nor one without an end."""
    cut_off_after: list[int] = []

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\n" + fields + b"\r\n")
            for sent in range(600):
                try:
                    connection.sendall(b"x")
                except OSError:
                    cut_off_after.append(sent)
                    return
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=[listener])
        thread.start()
        check_endpoints(make_config(f"http://127.0.0.1:{listener.getsockname()[1]}/v1").runtime)
        thread.join()
    assert cut_off_after


def test_a_server_that_stays_busy_fails_that_sample_alone_and_counts_its_tries(server: ScriptedServer) -> None:
    server.script = [Answer(status=503, body="full")] * 3 + [Answer()]
    (first,) = ask(make_config(server.base_url))
    (second,) = ask(make_config(server.base_url))
    assert isinstance(first, TeacherFailure)
    assert first.detail == "HTTP 503: 'full', 3 tries"
    assert second == REPLY


def test_an_answer_that_does_not_come_in_time_is_a_timeout(server: ScriptedServer) -> None:
    server.script = [Answer(delay_s=60)]
    (result,) = ask(make_config(server.base_url, {"max_attempts": 2, "first_token_timeout_s": 3.0}))
    assert reason(result) == "timeout"
    assert len(server.requests) == 2


def test_a_request_that_the_server_will_not_take_fails_without_a_retry(server: ScriptedServer) -> None:
    server.script = [Answer(status=400, body="prompt too long")]
    (result,) = ask(make_config(server.base_url))
    assert isinstance(result, TeacherFailure)
    assert (result.reason, result.detail) == ("rejected", "HTTP 400: 'prompt too long'")
    assert len(server.requests) == 1


@pytest.mark.parametrize(("status", "advice"), [(401, "api_key_env"), (402, "balance"), (404, "name of the model")])
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
    ask(make_config(server.base_url, {"min_concurrency": 3, "max_concurrency": 3}), num_samples=12)
    assert len(server.requests) == 12
    assert server.most_at_once == 3


def test_a_server_that_refuses_the_first_requests_stops_the_stage_with_its_explanation(server: ScriptedServer) -> None:
    server.script = [Answer(status=400, body="max_tokens is above 8192")]
    with pytest.raises(TeacherRejectsError, match=r"accepts no request with these settings.*above 8192"):
        ask(make_config(server.base_url), num_samples=3)


def test_an_older_server_is_not_asked_for_token_counts_again(server: ScriptedServer) -> None:
    server.script = [Answer(status=400, body="unknown field stream_options"), streamed(*STREAM[:-2], DONE)]
    (sample,) = ask_all(make_config(server.base_url, {"max_attempts": 1}))
    assert sample.result == replace(REPLY, num_tokens=3)
    assert sample.usage.estimated == 1
    assert ["stream_options" in request for request in server.requests] == [True, False]
