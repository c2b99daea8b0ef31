"""Reading chat completions; no server needed. How the endpoint is asked is in test_http_teacher.py."""

from __future__ import annotations

import json

import pytest

from klear_core.distill.http import read_reply
from klear_core.distill.teacher import TeacherFailure
from klear_core.types import TeacherReply


def payload(message: dict[str, object], finish_reason: object = "stop", usage: object = None) -> bytes:
    usage = {"prompt_tokens": 5, "completion_tokens": 42} if usage is None else usage
    return json.dumps(
        {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}], "usage": usage}
    ).encode()


def test_thinking_in_a_field_of_its_own_is_deepseeks_way() -> None:
    reply = read_reply(payload({"role": "assistant", "content": "\n\nIt is 4.", "reasoning_content": "2+2=4\n"}))
    assert reply == TeacherReply(reasoning="2+2=4", answer="It is 4.", finish_reason="stop", num_tokens=42)


def test_newer_servers_call_that_field_reasoning() -> None:
    reply = read_reply(payload({"content": "4", "reasoning": "2+2=4"}))
    assert reply == TeacherReply(reasoning="2+2=4", answer="4", finish_reason="stop", num_tokens=42)


@pytest.mark.parametrize("content", ["<think>\n2+2=4\n</think>\n\n4", "2+2=4</think>4"])
def test_thinking_between_tags_is_split_off_also_if_the_template_opened_them(content: str) -> None:
    assert read_reply(payload({"content": content})) == TeacherReply(
        reasoning="2+2=4", answer="4", finish_reason="stop", num_tokens=42
    )


def test_thinking_that_never_ended_has_no_answer() -> None:
    reply = read_reply(payload({"content": "<think>\nhm, \\boxed{3}? no,"}, "length"))
    assert reply == TeacherReply(reasoning="hm, \\boxed{3}? no,", answer="", finish_reason="length", num_tokens=42)


def test_content_without_tags_is_all_answer() -> None:
    assert read_reply(payload({"content": "4"})) == TeacherReply(
        reasoning="", answer="4", finish_reason="stop", num_tokens=42
    )


@pytest.mark.parametrize(
    ("body", "reason", "detail"),
    [
        (b"<html>Bad gateway</html>", "malformed", "<html>Bad gateway"),
        (b"", "malformed", "EOF"),
        (b'{"error": "overloaded"}', "malformed", "choices: Field required"),
        (
            b'{"choices": [], "usage": {"completion_tokens": 1}}',
            "malformed",
            "choices: List should have at least 1 item",
        ),
        (payload({"content": ["a", "b"]}), "malformed", "choices.0.message.content"),
        (payload({"content": "4"}, None), "malformed", "choices.0.finish_reason"),
        (payload({"content": "4"}, usage={}), "malformed", "usage.completion_tokens: Field required"),
        (payload({"content": "4"}).replace(b'"4"', b'"\\ud800"'), "malformed", "hex escape"),
        (payload({"content": ""}, "content_filter"), "content_filter", "content_filter"),
        (payload({"content": ""}, "insufficient_system_resource"), "interrupted", "insufficient_system_resource"),
    ],
)
def test_what_is_no_whole_answer_is_a_failure_with_its_reason(body: bytes, reason: str, detail: str) -> None:
    failure = read_reply(body)
    assert isinstance(failure, TeacherFailure)
    assert failure.reason == reason
    assert detail in failure.detail
