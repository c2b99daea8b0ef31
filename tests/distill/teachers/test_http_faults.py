"""A server on loopback with every fault that we know of: none loses, shortens or repeats a sample."""

from __future__ import annotations

import itertools
import json
import logging
import socket
import time
from collections.abc import Iterator
from email.utils import formatdate

import pytest
from scripted_server import DONE, GOOD, STREAM, Answer, Piece, ScriptedServer, event, streamed
from test_http_teacher import REPLY, ask, ask_all, make_config, reason

from klear_core.distill.teachers.http_teacher import HttpTeacher
from klear_core.distill.teachers.teacher import TeacherFailure, TeacherRejectsError, Usage
from klear_core.errors import ConfigError
from klear_core.types import TeacherReply

pytestmark = pytest.mark.slow

WHOLE = streamed(*STREAM)
HALF = STREAM[:3]
KEEP_ALIVE = b": keep-alive\n\n"


def test_a_reply_may_last_far_longer_than_any_silence(server: ScriptedServer) -> None:
    pieces: list[Piece] = [STREAM[0]]
    for _ in range(16):
        pieces += [0.25, event({"reasoning_content": "so "})]
    server.script = [streamed(*pieces, *STREAM[3:])]
    (sample,) = ask_all(make_config(server.base_url, {"silence_timeout_s": 3}))
    assert isinstance(sample.result, TeacherReply)
    assert sample.result.reasoning == ("so " * 16).strip()
    assert sample.usage == Usage(attempts=1, replies=1, input_tokens=5, output_tokens=9, unseeded=1)


def endless(piece: bytes, pause_s: float) -> Iterator[Piece]:
    for _ in itertools.count():
        yield piece
        yield pause_s


FAULTS = {
    "silence": [streamed(*HALF, 60.0), streamed(*HALF, *[KEEP_ALIVE, 0.05] * 1200)],
    "timeout": [streamed(60.0), streamed(*[KEEP_ALIVE, 0.05] * 1200)],
    "connection_lost": [
        streamed(*HALF, hangs_up=True),
        streamed(hangs_up=True),
        Answer(hangs_up=True),
        Answer(body=GOOD[:40], headers={"Content-Encoding": "gzip"}),
    ],
    "broken_off": [streamed(*HALF), streamed(*HALF, DONE)],
    "malformed": [
        streamed(*HALF, b'data: {"choices": [{"del', b"\n\n"),
        streamed(*HALF, b"data: \xff\xfe\x00\n\n"),
        streamed(b"\x00\x01\x02\xff" * 100),
        Answer(body="<html>Bad gateway</html>", headers={"Content-Type": "text/html"}),
        Answer(body=GOOD[:40]),
        Answer(body=""),
    ],
    "stream_error": [streamed(*HALF, b'data: {"error": {"message": "engine died"}}\n\n', DONE)],
    "interrupted": [streamed(*HALF, event(finish_reason="abort"), DONE)],
    "http_500": [Answer(status=500, body="oops")],
    "http_502": [Answer(status=502, body="<html>")],
    "http_503": [Answer(status=503, body="loading")],
    "http_429": [Answer(status=429, body="slow down", headers={"Retry-After": "0"})],
}


@pytest.mark.parametrize(("expected", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults])
def test_a_fault_costs_an_attempt_and_the_next_one_sends_the_same_request(
    server: ScriptedServer, expected: str, fault: Answer
) -> None:
    server.script = [fault, WHOLE]
    retries: dict[str, int] = {}
    # the fault alone reaches this deadline; the reply after it comes at once, and on a slow machine in a later attempt
    deadlines = {"silence_timeout_s": 0.5} if expected == "silence" else {"first_token_timeout_s": 1.5}
    deadlines = deadlines if expected in ("silence", "timeout") else {}
    cfg = make_config(server.base_url, deadlines | {"max_attempts": 6})
    (sample,) = ask_all(cfg, look=lambda teacher: retries.update(teacher.retries))
    assert sample.result == REPLY
    assert expected in retries
    assert len(server.requests) == sample.usage.attempts == 1 + sum(retries.values())
    assert all(request == server.requests[0] for request in server.requests)


CALLS = [{"id": "1", "function": {"name": "python", "arguments": "print(4)"}}]
UNUSABLE = {
    "the model calls a tool": streamed(*HALF, event({"tool_calls": CALLS}, "tool_calls"), DONE),
    "unknown finish_reason 'vibes'": streamed(*STREAM[:4], event(finish_reason="vibes"), DONE),
    "content of an unknown shape": Answer(body=GOOD.replace('"4"', '[{"type": "image", "url": "x"}]')),
    "no chat completion": Answer(body='{"message": {"role": "assistant", "content": "4"}, "done": true}'),
}


@pytest.mark.parametrize("defect", UNUSABLE)
def test_a_reply_in_a_shape_that_would_come_again_is_paid_once_kept_and_names_its_endpoint(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture, defect: str
) -> None:
    server.script = [UNUSABLE[defect]]
    notes: list[str] = []
    cfg = make_config(server.base_url, {"max_attempts": 6})
    (sample,) = ask_all(cfg, look=lambda teacher: notes.extend(teacher.notes))
    assert isinstance(sample.result, TeacherReply)
    assert defect in sample.result.defect
    assert (sample.usage.attempts, len(server.requests), notes) == (1, 1, [])
    with caplog.at_level(logging.WARNING):
        ask_all(cfg, num_samples=3, look=lambda teacher: notes.extend(teacher.notes))
    (note,) = notes
    assert note.startswith(f"{server.base_url}: 3 replies were paid for and cannot be used: {defect}")
    assert caplog.text.count("are paid for and cannot be used") == 1


def test_what_was_received_before_a_reply_broke_off_is_paid_for(server: ScriptedServer) -> None:
    server.script = [streamed(*HALF, hangs_up=True), WHOLE]
    priced = {"endpoints": [{"base_url": server.base_url, "input_price": 1e6, "output_price": 2e6}]}
    cfg = make_config(server.base_url).model_copy(update={"math_instruction": ""})
    cfg = cfg.model_validate(cfg.model_dump() | {"runtime": cfg.runtime.model_dump() | priced})
    (sample,) = ask_all(cfg, question="2+2?")
    estimated_input = len(str([{"role": "user", "content": "2+2?"}])) / 4
    assert sample.usage.input_tokens == pytest.approx(5 + estimated_input, abs=1)
    assert sample.usage.output_tokens == 2 + 9  # two pieces, and the whole reply
    assert sample.usage.cost == pytest.approx(sample.usage.input_tokens + 2 * 11)


def test_token_counts_that_never_come_do_not_cost_the_reply(server: ScriptedServer) -> None:
    for broken in (streamed(*STREAM[:-2], hangs_up=True), streamed(*STREAM[:-2], 60.0)):
        server.script = [broken]
        (sample,) = ask_all(make_config(server.base_url, {"max_attempts": 1, "silence_timeout_s": 2}))
        assert isinstance(sample.result, TeacherReply)
        assert (sample.result.answer, sample.usage.estimated) == ("4", 1)


def test_a_server_that_ignores_the_limit_is_cut_off_and_the_reply_counts_as_truncated(server: ScriptedServer) -> None:
    server.script = [Answer(pieces=lambda: endless(event({"content": "la "}) * 10, 0.0))]
    (result,) = ask(make_config(server.base_url, max_tokens=50))
    assert isinstance(result, TeacherReply)
    assert result.finish_reason == "length"
    assert 50 < result.num_tokens < 50_000


def test_replies_that_come_in_another_order_belong_to_their_requests(server: ScriptedServer) -> None:
    def answer(text: str, delay_s: float) -> Answer:
        return Answer(body=GOOD.replace('"4"', json.dumps(text)), delay_s=delay_s)

    server.script = [answer("slow", 1.0), answer("fast", 0.0)]
    cfg = make_config(server.base_url, {"min_concurrency": 2})
    results = ask(cfg, num_samples=2)
    by_seed = {request["seed"]: text for request, text in zip(server.requests, ("slow", "fast"), strict=True)}
    server.script = [Answer()]
    server.requests.clear()
    ask(make_config(server.base_url, {"max_concurrency": 1}), num_samples=2)  # one after the other: in sample order
    expected = [by_seed[request["seed"]] for request in server.requests]
    assert [result.answer for result in results if isinstance(result, TeacherReply)] == expected


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_nothing_is_sent_to_a_server_before_the_time_it_named(server: ScriptedServer, form: str) -> None:
    value = "1" if form == "seconds" else formatdate(time.time() + 3, usegmt=True)
    server.script = [Answer(status=429, headers={"Retry-After": value}), WHOLE]
    results = ask(make_config(server.base_url, {"max_concurrency": 1}), num_samples=3)
    assert list(results) == [REPLY] * 3
    assert server.times[1] - server.times[0] >= 0.9
    assert server.most_at_once == 1


def test_a_retry_after_of_hours_is_cut(server: ScriptedServer) -> None:
    server.script = [Answer(status=503, headers={"Retry-After": "36000"}), WHOLE]
    assert list(ask(make_config(server.base_url, {"max_retry_after_s": 0.1}))) == [REPLY]


def test_a_full_server_takes_no_attempts_from_those_that_wait_while_it_serves_others(server: ScriptedServer) -> None:
    busy, served = Answer(status=429, body="full"), streamed(*STREAM[:2], 1.0, *STREAM[2:])
    server.script = [served, *[busy] * 12, WHOLE]
    runtime = {"max_attempts": 1, "min_concurrency": 2, "max_backoff_s": 0.05, "first_backoff_s": 0.05}
    results = ask(make_config(server.base_url, runtime | {"max_attempts": 13}), num_samples=2)
    assert list(results) == [REPLY, REPLY]


def two_endpoints(first: str, second: str, **changes: object) -> dict[str, object]:
    return {"endpoints": [{"base_url": first, **changes}, {"base_url": second}]}


def make_fleet(runtime: dict[str, object]) -> object:
    cfg = make_config("http://x")
    return cfg.model_validate({"model": "r1", "runtime": cfg.runtime.model_dump() | runtime})


@pytest.fixture
def other() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


def test_an_endpoint_that_fails_is_left_out_and_the_other_serves_its_requests(
    server: ScriptedServer, other: ScriptedServer
) -> None:
    server.script, other.script = [Answer(status=500)], [WHOLE]
    fleet = make_fleet(two_endpoints(server.base_url, other.base_url) | {"left_out_s": 600.0, "max_concurrency": 1})
    assert ask(fleet, num_samples=30) == [REPLY] * 30  # type: ignore[arg-type]
    assert len(server.requests) == 3
    assert len(other.requests) == 30


def test_an_endpoint_that_rejects_us_is_given_up_and_named(server: ScriptedServer, other: ScriptedServer) -> None:
    server.script, other.script = [Answer(status=402, body="no money")], [WHOLE]
    fleet = make_fleet(two_endpoints(server.base_url, other.base_url))
    notes: list[str] = []
    results = ask(fleet, num_samples=5, look=lambda teacher: notes.extend(teacher.notes))  # type: ignore[arg-type]
    assert list(results) == [REPLY] * 5
    assert len(server.requests) == 1
    assert f"{server.base_url} was given up: the account has no balance left" in notes[0]


def test_an_endpoint_that_refuses_what_the_other_accepts_is_put_aside_and_named(
    server: ScriptedServer, other: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.script, other.script = [Answer(status=400, body="max_tokens is above 8192")], [WHOLE]
    fleet = make_fleet(two_endpoints(server.base_url, other.base_url) | {"max_concurrency": 1})
    notes: list[str] = []
    with caplog.at_level(logging.WARNING):
        results = ask(fleet, num_samples=30, look=lambda teacher: notes.extend(teacher.notes))  # type: ignore[arg-type]
    assert list(results) == [REPLY] * 30
    assert len(other.requests) == 30
    assert 3 <= len(server.requests) < 10
    expected = f"{server.base_url} was given up: it refuses requests that other endpoints accept"
    assert expected in notes[0]
    assert "above 8192" in notes[0]
    assert expected in caplog.text


def test_a_request_that_one_endpoint_refuses_goes_to_the_other(server: ScriptedServer, other: ScriptedServer) -> None:
    server.script, other.script = [WHOLE, Answer(status=400, body="prompt too long"), WHOLE], [WHOLE]
    fleet = make_fleet(two_endpoints(server.base_url, other.base_url) | {"max_concurrency": 1})
    notes: list[str] = []
    results = ask(fleet, num_samples=10, look=lambda teacher: notes.extend(teacher.notes))  # type: ignore[arg-type]
    assert list(results) == [REPLY] * 10
    assert len(server.requests) + len(other.requests) == 11
    assert notes == []


def test_a_request_that_every_endpoint_refuses_fails_alone_with_what_each_said(
    server: ScriptedServer, other: ScriptedServer
) -> None:
    server.script = [WHOLE, Answer(status=400, body="too long")]
    other.script = [WHOLE, Answer(status=422, body="over the limit")]
    fleet = make_fleet(two_endpoints(server.base_url, other.base_url) | {"max_concurrency": 1})
    results = ask(fleet, num_samples=6)  # type: ignore[arg-type]
    assert list(results).count(REPLY) == 2
    failures = [result for result in results if result != REPLY]
    assert [reason(failure) for failure in failures] == ["rejected"] * 4
    for failure in failures:
        assert isinstance(failure, TeacherFailure)
        assert f"{server.base_url}: HTTP 400: 'too long'" in failure.detail
        assert f"{other.base_url}: HTTP 422: 'over the limit'" in failure.detail
    assert (len(server.requests), len(other.requests)) == (5, 5)


def test_endpoints_that_all_refuse_the_first_requests_stop_the_stage_with_what_each_said(
    server: ScriptedServer, other: ScriptedServer
) -> None:
    server.script = [Answer(status=400, body="no top_p")]
    other.script = [Answer(status=400, body="top_p is unknown")]
    fleet = make_fleet(two_endpoints(server.base_url, other.base_url))
    with pytest.raises(TeacherRejectsError, match="accepts no request with these settings") as caught:
        ask(fleet, num_samples=20)  # type: ignore[arg-type]
    assert f"{server.base_url}: HTTP 400: 'no top_p'" in str(caught.value)
    assert f"{other.base_url}: HTTP 400: 'top_p is unknown'" in str(caught.value)


def test_a_refused_request_does_not_wait_for_an_endpoint_that_never_answered(server: ScriptedServer) -> None:
    server.script = [Answer(status=400, body="max_tokens is above 8192")]
    runtime = {"left_out_s": 600.0, "max_attempts": 30, "max_backoff_s": 0.05, "max_concurrency": 1}
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        fleet = make_fleet(two_endpoints(server.base_url, f"http://127.0.0.1:{taken.getsockname()[1]}/v1") | runtime)
        with pytest.raises(TeacherRejectsError, match=r"accepts no request with these settings.*above 8192"):
            ask(fleet, num_samples=3)  # type: ignore[arg-type]


def test_a_refused_request_ends_when_the_only_endpoint_left_to_ask_is_given_up(
    server: ScriptedServer, other: ScriptedServer
) -> None:
    server.script = [Answer(status=402, body="no money", delay_s=1.0)]
    other.script = [Answer(status=400, body="too long"), WHOLE]
    fleet = make_fleet(two_endpoints(server.base_url, other.base_url) | {"max_concurrency": 1})
    results = ask(fleet, num_samples=2)  # type: ignore[arg-type]
    assert list(results).count(REPLY) == 1
    assert [reason(result) for result in results if result != REPLY] == ["rejected"]


def test_refusals_stop_nothing_while_the_server_sends_another_reply(server: ScriptedServer) -> None:
    refused = Answer(status=400, body="prompt too long", delay_s=0.5)
    server.script = [streamed(*STREAM[:2], 2.0, *STREAM[2:]), refused]
    results = ask(make_config(server.base_url, {"min_concurrency": 5}), num_samples=5)
    assert list(results).count(REPLY) == 1
    assert [reason(result) for result in results if result != REPLY] == ["rejected"] * 4


def test_requests_follow_the_weights_while_all_have_room(server: ScriptedServer, other: ScriptedServer) -> None:
    server.script = other.script = [Answer(delay_s=0.5)]
    fleet = make_fleet(two_endpoints(server.base_url, other.base_url, weight=3.0) | {"min_concurrency": 16})
    ask(fleet, num_samples=16)  # type: ignore[arg-type]
    assert (len(server.requests), len(other.requests)) == (12, 4)


def test_an_endpoint_may_call_the_model_by_another_name(server: ScriptedServer) -> None:
    fleet = make_fleet({"endpoints": [{"base_url": server.base_url, "model": "deepseek-reasoner"}]})
    ask(fleet)  # type: ignore[arg-type]
    assert server.requests[0]["model"] == "deepseek-reasoner"


KEY = "sk-very-secret-0123456789"


@pytest.mark.parametrize("answer", [Answer(status=500), Answer(status=400), Answer(status=401), Answer(body=GOOD[:20])])
def test_a_key_that_the_server_repeats_is_in_no_result_log_or_exception(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: Answer
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    server.script = [Answer(status=answer.status, body=answer.body, echoes_headers=True)]
    seen: list[str] = []

    def look(teacher: HttpTeacher) -> None:
        seen.append(f"{teacher!r} {vars(teacher)!r} {teacher.notes} {teacher.retries} {teacher.cfg!r}")

    try:
        seen.append(repr(ask_all(make_config(server.base_url, api_key_env="TEACHER_KEY"), num_samples=2, look=look)))
    except TeacherRejectsError as error:
        seen.append(repr(error) + repr(error.__context__))
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert KEY not in caplog.text + "".join(seen)


@pytest.mark.parametrize("num_before", [70, 280, 290, 299])
def test_no_beginning_of_a_key_is_left_where_an_error_is_cut(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    for body in (json.dumps({"error": "x" * num_before + KEY}), "x" * num_before + KEY):
        server.script = [Answer(body=body)]
        seen = repr(ask_all(make_config(server.base_url, api_key_env="TEACHER_KEY")))
        assert "xxx" in seen
        assert KEY[:6] not in seen


def test_a_placeholder_for_a_key_changes_no_reply(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "EMPTY")
    server.script = [streamed(event({"reasoning": "EMPTY = 0"}), event({"content": "grid[0] = EMPTY"}), *STREAM[4:])]
    (reply,) = ask(make_config(server.base_url, api_key_env="TEACHER_KEY"))
    assert isinstance(reply, TeacherReply)
    assert (reply.reasoning, reply.answer) == ("EMPTY = 0", "grid[0] = EMPTY")
    assert server.headers[0]["authorization"] == "Bearer EMPTY"


def test_a_key_in_a_reply_is_masked(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    server.script = [streamed(event({"reasoning": "hm"}), event({"content": f"it is {KEY}."}), *STREAM[4:])]
    (reply,) = ask(make_config(server.base_url, api_key_env="TEACHER_KEY"))
    assert isinstance(reply, TeacherReply)
    assert reply.answer == "it is [key]."


def test_an_unusable_key_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", f"{KEY}\nx")
    with pytest.raises(ConfigError, match="TEACHER_KEY") as caught:
        HttpTeacher(make_config("http://x", api_key_env="TEACHER_KEY"))
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("url", ["https://user:pass@host/v1", "https://host/v1?key=abc", "host/v1"])
def test_an_address_that_could_hold_a_key_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        make_config(url)


def test_a_budget_is_never_exceeded_and_what_is_left_of_it_is_used(server: ScriptedServer) -> None:
    server.script = [Answer(delay_s=0.02)]
    budget = {"budget": {"max_tokens": 1000}, "min_concurrency": 8}
    usage = Usage()
    samples = ask_all(make_config(server.base_url, budget, max_tokens=100), num_samples=100, question="2+2?")
    for sample in samples:
        usage += sample.usage
    num_over = sum(reason(s.result) == "over_budget" for s in samples if not isinstance(s.result, TeacherReply))
    assert 0 < num_over == 100 - len(server.requests)
    assert 1000 - 400 < usage.tokens <= 1000


def test_an_endpoint_that_costs_nothing_serves_on_when_the_money_is_spent(
    server: ScriptedServer, other: ScriptedServer
) -> None:
    server.script = other.script = [WHOLE]
    fleet = two_endpoints(server.base_url, other.base_url, output_price=1e6)
    runtime = {"budget": {"max_cost": 120.0}, "max_concurrency": 1}
    cfg = make_fleet(fleet | runtime).model_copy(update={"max_tokens": 50})  # type: ignore[attr-defined]
    samples = ask_all(cfg, num_samples=30)
    assert [sample.result for sample in samples] == [REPLY] * 30
    assert len(server.requests) == 8  # 9 each, while there is room for 50
    assert sum(sample.usage.cost for sample in samples) == 8 * 9
