"""Reading chat completions; no server needed. How the endpoint is asked is in test_http_teacher.py."""

from __future__ import annotations

import json

import pytest
from scripted_server import DONE, STREAM, event, usage_event

from klear_core.distill.teachers.reply_stream import BadReplyError, ReplyReader
from klear_core.types import TeacherReply


def read_reply(body: bytes, *, max_tokens: int = 100) -> TeacherReply:
    """Read a response that arrives at once, and once more byte by byte: the result must be the same."""
    whole, slow = ReplyReader(max_tokens=max_tokens), ReplyReader(max_tokens=max_tokens)
    whole.feed(body)
    for i in range(len(body)):
        slow.feed(body[i : i + 1])
    reply = whole.finish()
    assert slow.finish() == reply
    return reply


def read_whole(*chunks: bytes) -> TeacherReply:
    reader = ReplyReader(max_tokens=100)
    for chunk in chunks:
        reader.feed(chunk)
    return reader.finish()


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


OTHER_TAGS = [
    "<thinking>\n2+2=4\n</thinking>\n4",
    "<thought>2+2=4</thought>4",
    "<reasoning>2+2=4</reasoning>4",
    "<seed:think>2+2=4</seed:think>4",
    "◁think▷2+2=4◁/think▷4",
    "[THINK]2+2=4[/THINK]4",
    "<|channel|>analysis<|message|>2+2=4<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
]


@pytest.mark.parametrize("content", OTHER_TAGS)
def test_the_tags_of_other_models_are_split_off_too(content: str) -> None:
    assert read_reply(payload({"content": content})) == TeacherReply(
        reasoning="2+2=4", answer="4", finish_reason="stop", num_tokens=42
    )
    cut = read_reply(payload({"content": content[: content.index("=4")]}, "length"))
    assert (cut.reasoning, cut.answer, cut.finish_reason) == ("2+2", "", "length")
    inside = f"The tag is {content}"
    assert read_reply(payload({"content": inside})).answer == inside


def test_the_end_and_the_reasoning_may_stand_elsewhere_in_the_choice() -> None:
    for ending in ({"stop_reason": "end_turn"}, {"finish_reason": None, "native_finish_reason": "STOP"}):
        choice = {"message": {"content": "4"}, "reasoning_content": "2+2=4", **ending}
        body = json.dumps({"choices": [choice], "usage": {"completion_tokens": 42}}).encode()
        assert read_reply(body) == TeacherReply(reasoning="2+2=4", answer="4", finish_reason="stop", num_tokens=42)


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
        (b"", "malformed", "no chat completion"),
        (b'{"choices": [{"message": {"content": "4', "malformed", "JSONDecodeError"),
        (b'{"error": "overloaded"}', "stream_error", "overloaded"),
        (b"[1, 2]", "malformed", "not a chat completion"),
        (b'{"choices": [], "usage": {"completion_tokens": 1}}', "malformed", "no chat completion"),
        (b'{"choices": 3}', "malformed", "choices is int"),
        (b'{"type": "ping"}', "malformed", "no chat completion"),
        (b'{"message": "overloaded", "code": 500}', "malformed", "no chat completion"),
        (b'{"object": "error", "message": "overloaded"}', "stream_error", "overloaded"),
        (b'event: error\ndata: {"type": "error", "message": "overloaded"}\n\n', "stream_error", "overloaded"),
        (payload({"content": "4"}).replace(b'"4"', b'"\xff"'), "malformed", "UnicodeDecodeError"),
        (payload({"content": ""}, "insufficient_system_resource"), "interrupted", "insufficient_system_resource"),
        (b"".join(STREAM[:4]), "broken_off", "after 3 pieces"),
        (b"".join(STREAM[:4]) + DONE, "broken_off", "after 3 pieces"),
        (STREAM[1] + b'data: {"choices": [{"del\n\n' + STREAM[4], "malformed", "JSONDecodeError"),
        (STREAM[1] + b"data: \xff\xfe{}\n\n", "malformed", "starts with b'\\xff\\xfe"),
        (STREAM[1] + b'data: {"error": {"message": "engine died"}}\n\n' + DONE, "stream_error", "engine died"),
    ],
)
def test_what_is_no_whole_answer_is_a_failure_with_its_reason(body: bytes, reason: str, detail: str) -> None:
    with pytest.raises(BadReplyError) as caught:
        read_whole(body)
    assert caught.value.reason == reason
    assert detail in caught.value.detail


WHOLE = TeacherReply(reasoning="2+2=4", answer="4", finish_reason="stop", num_tokens=9)
MESSAGE = b'"message": {"content": "4", "reasoning_content": "2+2=4"}'


def test_a_stream_is_read_like_the_reply_at_once() -> None:
    assert read_reply(b"".join(STREAM)) == WHOLE


@pytest.mark.parametrize(
    "body",
    [
        b"".join(STREAM).replace(b"\n", b"\r\n"),
        b": keep-alive\n\n" + b"event: message\nid: 7\n" + b"".join(STREAM),
        b"".join(STREAM).replace(b"data: ", b"data:"),
        b"".join(STREAM[:-1]),  # some servers send no [DONE]
        b"".join(STREAM).removesuffix(b"\n\n"),
        usage_event() + b"".join(STREAM[:-2]),  # counts first
        STREAM[3] + STREAM[1] + STREAM[2] + STREAM[4] + usage_event(),  # the answer before the reasoning
        STREAM[1] + STREAM[2] + STREAM[4] + STREAM[3] + usage_event(),  # a piece after the finish reason
        b"".join(STREAM[:-2]) + usage_event(3) + usage_event(9),  # running counts: the last one holds
        b"data:\n\n" + b"".join(STREAM[:2]) + b"data: \n\ndata: null\n\n" + b"".join(STREAM[2:]),  # empty events
        b"\xef\xbb\xbf" + b"".join(STREAM[1:]),  # a byte order mark
        b"".join(STREAM).replace(b'"choices": []', b'"choices": null'),
        b"".join(STREAM).replace(b'"index": 0', b'"index": null'),
        b"".join(STREAM).replace(b"\n", b"\r"),
        b"".join(STREAM).replace(b"\n\n", b"\r\n\r"),  # a mixture of line ends
        b"".join(STREAM).replace(b"\n\n", b"\n"),  # no empty line between events
        b"\r\n: hello\r" + b"".join(STREAM).replace(b"}\n\n", b"}\n: ping\n\n"),
        b"".join(STREAM).replace(b", ", b",\ndata: "),  # data in several lines
        b"\xef\xbb\xbf" + b"".join(STREAM).replace(b"\n", b"\r"),
        b"".join(STREAM).replace(b"null", b'"null"'),  # Qwen's own service
        STREAM[1] + b'data: {"type": "ping"}\n\n' + b"".join(STREAM[2:]),
        b"".join(STREAM[:4]) + event({}, "stop").replace(b'"delta": {}', MESSAGE) + usage_event(),  # all of it again
        b"".join(STREAM[:-2]) + event(finish_reason="") + b"".join(STREAM[-2:]),  # nothing, after the reason
        b"".join(STREAM[:-1]) + b"data: [done]\n\n",
        b"".join(STREAM[:-1]) + b'data: "[DONE]"\n\n',
        b"".join(STREAM[:-1]) + b"data: end of stream\n\n",
        b"".join(STREAM).replace(b"data: ", b" DATA : "),
        b"".join(b"data: " + json.dumps(e[6:].decode().strip()).encode() + b"\n\n" for e in STREAM[:-1]),
        json.dumps(b"".join(STREAM).decode()).encode(),
    ],
)
def test_servers_that_frame_a_stream_in_their_own_way_are_understood(body: bytes) -> None:
    assert read_reply(body) == WHOLE


def test_a_line_separator_of_unicode_inside_a_piece_ends_no_line() -> None:
    piece = json.dumps({"choices": [{"index": 0, "delta": {"content": "a\u2028b\x85c"}}]}, ensure_ascii=False)
    body = b"data: " + piece.encode() + b"\n\n" + event(finish_reason="stop")
    assert read_reply(body).answer == "a\u2028b\x85c"


def test_a_character_split_over_two_pieces_is_joined() -> None:
    halves = b"".join(b'data: {"choices": [{"delta": {"content": "\\u%s"}}]}\n\n' % h for h in (b"d83d", b"de00"))
    assert read_reply(halves + event(finish_reason="stop")).answer == "\U0001f600"


def test_tags_in_the_stream_are_split_off_also_beside_a_field_of_reasoning() -> None:
    end = event(finish_reason="stop")
    tagged = event({"content": "<think>2+2"}) + event({"content": "=4</th"}) + event({"content": "ink>4"}) + end
    assert (read_reply(tagged).reasoning, read_reply(tagged).answer) == ("2+2=4", "4")
    both = read_reply(event({"reasoning": "first"}) + tagged)
    assert (both.reasoning, both.answer) == ("first\n\n2+2=4", "4")


def test_tokens_are_estimated_where_the_server_counts_none() -> None:
    (reader := ReplyReader(max_tokens=100)).feed(b"".join(STREAM[:-2]))
    assert reader.finish().num_tokens == 3  # three pieces
    assert not reader.has_usage
    (reader := ReplyReader(max_tokens=100)).feed(payload({"content": "x" * 400}, usage={}))
    assert reader.finish().num_tokens == 100  # four characters a token


@pytest.mark.parametrize("count", [-1, 2**64 - 1, pytest.param(10**400, id="huge"), "9", 9.5, None])
def test_a_count_that_is_no_number_of_tokens_is_estimated(count: object) -> None:
    usage = {"prompt_tokens": count, "completion_tokens": count}
    body = b"".join(STREAM[:5]) + b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n" + DONE
    reader = ReplyReader(max_tokens=100)
    reader.feed(body)
    assert reader.finish().num_tokens == 3
    assert (reader.has_usage, reader.input_tokens) == (False, None)


def test_refusals_are_replies_with_their_reason() -> None:
    assert read_reply(payload({"content": ""}, "content_filter")).finish_reason == "content_filter"
    refused = read_reply(payload({"content": None, "refusal": "I cannot"}))
    assert (refused.finish_reason, refused.answer) == ("content_filter", "I cannot")


def test_a_stream_longer_than_was_asked_for_is_cut_and_truncated() -> None:
    reader = ReplyReader(max_tokens=100)
    while not reader.is_over_limit:
        reader.feed(event({"content": "la "}))
    assert reader.num_pieces == 165
    assert reader.finish().finish_reason == "length"


def test_a_line_without_an_end_is_not_read_for_ever() -> None:
    with pytest.raises(BadReplyError, match="without an end of event"):
        read_whole(*(b"data: " + b"x" * 1000 for _ in range(10_000)))


THOUGHT = {"type": "thinking", "thinking": "2+2=4", "signature": "EqoB"}
MESSAGES: dict[str, dict[str, object]] = {
    "parts": {"reasoning_content": "2+2=4", "content": [{"type": "text", "text": "4"}]},
    "several parts": {
        "reasoning": "2+2=4",
        "content": [{"type": "text", "text": ""}, "", {"type": "text", "text": "4"}],
    },
    "one part": {"reasoning": "2+2=4", "content": {"type": "output_text", "text": "4", "annotations": []}},
    "a value": {"reasoning": "2+2=4", "content": [{"type": "text", "text": {"value": "4"}}]},
    "Mistral": {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "2+2=4"}]}, {"text": "4"}]},
    "Anthropic": {"content": [THOUGHT, {"type": "redacted_thinking", "data": "Eq"}, {"type": "text", "text": "4"}]},
    "Ollama": {"thinking": "2+2=4", "content": "4"},
    "OpenRouter": {
        "reasoning_details": [
            {"type": "reasoning.text", "text": "2+2=4", "format": "unknown", "index": 0},
            {"type": "reasoning.encrypted", "data": "Eq"},
        ],
        "content": "4",
    },
    "a summary": {"reasoning_details": [{"type": "reasoning.summary", "summary": "2+2=4"}], "content": "4"},
    "both": {"reasoning": "2+2=4", "reasoning_details": [{"type": "reasoning.text", "text": "2+2=4"}], "content": "4"},
    "LiteLLM": {"reasoning_content": "2+2=4", "thinking_blocks": [THOUGHT], "content": "4"},
    "LiteLLM's parts": {"reasoning_content": "2+2=4", "content": [THOUGHT, {"type": "text", "text": "4"}]},
    "an object": {"reasoning": {"content": "2+2=4"}, "content": "4"},
    "no tools": {"reasoning": "2+2=4", "content": "4", "tool_calls": [], "function_call": None, "refusal": False},
    "LiteLLM's own field": {"content": "4", "provider_specific_fields": {"reasoning_content": "2+2=4"}},
    "LangChain": {"content": "4", "additional_kwargs": {"reasoning_content": "2+2=4"}},
    "camel case": {"content": "4", "reasoningContent": "2+2=4"},
    "Bedrock": {
        "content": [{"reasoningContent": {"reasoningText": {"text": "2+2=4", "signature": "Eq"}}}, {"text": "4"}]
    },
    "Gemini": {"content": [{"text": "2+2=4", "thought": True}, {"text": "4"}]},
    "a list as the thinking": {"reasoning_content": [{"type": "text", "text": "2+2=4"}], "content": ["4"]},
    "a field named after it": {"content": "4", "thinking_content": "2+2=4"},
    "a chain of thought": {"content": "4", "chain_of_thought": "2+2=4"},
    "steps": {"content": "4", "reasoning_steps": [{"thought": "2+2=4"}]},
    "an analysis": {"content": "4", "analysis": "2+2=4"},
    "Gemini's parts": {"parts": [{"text": "2+2=4", "thought": True}, {"text": "4"}]},
    "Gemini's object": {"content": {"role": "model", "parts": [{"text": "2+2=4", "thought": True}, {"text": "4"}]}},
    "a text beside no content": {"content": None, "text": "4", "reasoning": "2+2=4"},
    "a part named after its type": {"reasoning": "2+2=4", "content": [{"type": "markdown", "markdown": "4"}]},
    "sources beside the text": {
        "reasoning": "2+2=4",
        "content": [{"type": "text", "text": "4"}, {"type": "citations", "citations": [{"url": "x"}]}],
    },
    "tools without a name": {
        "reasoning": "2+2=4",
        "content": "4",
        "tool_calls": [None, {"index": 0, "type": "function", "function": {"name": None, "arguments": ""}}],
        "function_call": {"name": None, "arguments": None},
    },
    "a tag with an attribute": {"content": '<think time="3">2+2=4</think>4'},
    "tags in capitals": {"content": "<THINK>2+2=4</THINK>4"},
    "tags in parts": {"content": [{"type": "text", "text": "<think>2+2=4</think>"}, {"type": "text", "text": "4"}]},
}


@pytest.mark.parametrize("name", MESSAGES)
def test_every_shape_of_content_and_reasoning_is_read_whole_and_streamed(name: str) -> None:
    message = MESSAGES[name]
    assert read_reply(payload(message, usage={"completion_tokens": 9})) == WHOLE
    assert read_reply(event(message) + event(finish_reason="stop") + usage_event()) == WHOLE
    fields = [event({key: value}) for key, value in message.items() if value]
    assert read_reply(b"".join(fields) + event(finish_reason="stop") + usage_event()) == WHOLE


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("stop STOP eos eos_token end_turn stop_sequence end-turn endTurn COMPLETE FINISH_REASON_STOP", "stop"),
        ("end_of_turn eot <|eot_id|> <|im_end|> stop:eos END_OF_SEQUENCE_TOKEN Finished <eos> </s>", "stop"),
        ("length max_tokens MAX_TOKENS model_length max-tokens max_output_tokens hit_max_tokens", "length"),
        ("stopped_by_length not-complete output_truncated contextLengthExceeded", "length"),
        ("content_filter content-filter SAFETY refusal sensitive RECITATION BLOCKED_BY_POLICY", "content_filter"),
        ("tool_calls tool-calls tool_use function_call", "stop"),  # no tool is called
    ],
)
def test_each_servers_word_for_the_end_is_known(words: str, expected: str) -> None:
    message: dict[str, object] = {"content": "4", "reasoning": "2+2=4"}
    for word in words.split():
        reply = read_reply(payload(message, word))
        assert (reply.finish_reason, reply.answer, reply.defect) == (expected, "4", ""), word
        streamed_reply = read_reply(event(message) + event(finish_reason=word))
        assert (streamed_reply.finish_reason, streamed_reply.answer) == (expected, "4"), word
    assert read_reply(payload(message, {"type": "max_tokens"})).finish_reason == "length"


BODY = {"choices": [{"index": "0", "message": {"content": "4", "reasoning": "2+2=4"}, "finish_reason": "stop"}]}
STEPS = [
    {"choices": [{"index": 0, "delta": {"reasoning": "2+2=4"}}]},
    {"choices": [{"delta": {"content": "4"}, "finishReason": "STOP"}]},
]
WRAPPED: list[object] = [
    BODY,
    [BODY],
    {"data": BODY},
    {"code": 0, "msg": "ok", "result": BODY},
    {"response": [BODY]},
    STEPS,
    {"code": 200, "data": {"result": BODY}},
    {"statusCode": 200, "body": json.dumps(BODY)},
    json.dumps(BODY),
    {"choices": {"0": BODY["choices"][0]}},
    {"choices": [BODY["choices"][0] | {"index": 1}]},
    {"choices": [{"message": {"content": "4", "reasoning": "2+2=4"}}], "finish_reason": "stop"},
    {"choices": [{"content": "4", "reasoning": "2+2=4", "finish_reason": "stop"}]},
    {"choices": [{"delta": {"content": ""}} | BODY["choices"][0]]},
]


@pytest.mark.parametrize("body", WRAPPED)
def test_a_completion_in_a_list_or_in_an_object_of_a_gateway_is_read(body: object) -> None:
    reply = read_reply(json.dumps(body).encode())
    assert (reply.reasoning, reply.answer, reply.finish_reason) == ("2+2=4", "4", "stop")


@pytest.mark.parametrize("end", ["finishReason", "stop_reason", "done_reason", "finish_details"])
def test_the_end_may_have_another_name(end: str) -> None:
    choice = {"message": {"content": "4", "reasoning": "2+2=4"}, end: {"type": "stop"} if "details" in end else "stop"}
    assert read_reply(json.dumps({"choices": [choice]}).encode()).finish_reason == "stop"


def test_a_stream_of_lines_of_json_is_read_and_one_without_its_end_was_broken_off() -> None:
    lines = [json.dumps(step).encode() + b"\n" for step in STEPS]
    reply = read_reply(b"".join(lines))
    assert (reply.reasoning, reply.answer, reply.finish_reason) == ("2+2=4", "4", "stop")
    with pytest.raises(BadReplyError, match="broken off"):
        read_whole(lines[0] + lines[0])


def test_a_stream_of_messages_that_grow_is_read_once() -> None:
    grown = [("2+2", "", None), ("2+2=4", "", None), ("2+2=4", "It", None), ("2+2=4", "It is 4.", "stop")]
    events = [
        {"choices": [{"message": {"reasoning_content": thought, "content": text}, "finish_reason": end}]}
        for thought, text, end in grown
    ]
    reply = read_reply(b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events))
    assert (reply.reasoning, reply.answer, reply.finish_reason) == ("2+2=4", "It is 4.", "stop")


def test_a_message_whose_text_is_under_an_unknown_name_is_kept_with_its_reason() -> None:
    for message in ({"content": None, "audio": {"transcript": "It is 4."}}, {"say": "It is 4.", "reasoning": "2+2=4"}):
        for body in (payload(message), event(message) + event(finish_reason="stop")):
            reply = read_reply(body)
            assert reply.finish_reason == "other"
            assert "no content" in reply.defect
            assert "It is 4." in reply.answer
    beside: dict[str, object] = {"reasoning": "2+2=4", "content": "4", "obfuscation": "xyz"}
    assert read_reply(event(beside) + event(finish_reason="stop")).defect == ""


CALL = {"id": "1", "type": "function", "function": {"name": "python", "arguments": "print(4)"}}


@pytest.mark.parametrize(
    ("body", "finish_reason", "defect", "text"),
    [
        (payload({"content": "hm", "tool_calls": [CALL]}, "tool_calls"), "tool_calls", "calls a tool", "hm"),
        (payload({"content": None, "tool_calls": [CALL]}, "tool_calls"), "tool_calls", "calls a tool", "print(4)"),
        (
            payload({"content": [{"type": "tool_use", "input": "print(4)"}]}, "tool_use"),
            "tool_calls",
            "tool",
            "print(4)",
        ),
        (payload({"content": "It is 4."}, "vibes"), "other", "unknown finish_reason 'vibes'", "It is 4."),
        (payload({"content": [{"type": "image", "url": "x"}, "4"]}), "other", "unknown shape", "4"),
        (payload({"content": "It is 4."}, None), "other", "no finish_reason", "It is 4."),
        (payload({"content": 4}), "other", "unknown shape: 4", "4"),
        (payload({"content": "a"}).replace(b'"a"', b'"a\\ud800"'), "other", "surrogate", "a\ufffd"),
        (
            b'{"model": "r1", "message": {"content": "It is 4."}, "done": true}',
            "other",
            "no chat completion",
            "It is 4.",
        ),
        (b'{"output": [{"content": [{"text": "It is 4."}]}]}', "other", "no chat completion", "It is 4."),
        (b'[{"generated_text": "It is 4."}]', "other", "no chat completion", "It is 4."),
        (b'data: {"type": "content_block_delta", "delta": {"text": "It is 4."}}\n\n', "other", "no chat", "It is 4."),
    ],
)
def test_a_whole_reply_in_another_shape_keeps_its_text_and_says_what_is_wrong(
    body: bytes, finish_reason: str, defect: str, text: str
) -> None:
    reply = read_reply(body)
    assert reply.finish_reason == finish_reason
    assert defect in reply.defect
    assert text in reply.answer


def test_an_unknown_end_without_any_text_is_no_reply() -> None:
    with pytest.raises(BadReplyError, match="vibes"):
        read_whole(payload({"content": ""}, "vibes"))


ODD = (
    None,
    True,
    7,
    -1.5,
    "",
    "text",
    [],
    [None],
    [[["x"]]],
    {},
    {"a": []},
    {"type": "text"},
    [{"type": 3, "text": {}}],
)


def test_odd_values_anywhere_lead_to_a_reply_or_a_failure_never_to_a_crash() -> None:
    fields = ("content", "reasoning", "thinking", "reasoning_details", "refusal", "tool_calls", "role")
    choices = [{"message": {"content": "4", field: odd}, "finish_reason": "stop"} for field in fields for odd in ODD]
    choices += [{"message": {"content": "4"}, "finish_reason": "stop", key: odd} for key in ("message", "delta", "text",
                "finish_reason", "index") for odd in ODD]  # fmt: skip
    bodies = [{"choices": [choice]} for choice in choices]
    bodies += [{"choices": [choices[0]], key: odd} for key in ("choices", "usage", "error", "object") for odd in ODD]
    for body in map(json.dumps, bodies):
        for sent in (body.encode(), b"data: " + body.encode() + b"\n\n"):
            try:
                reply = read_reply(sent)
            except BadReplyError:
                continue
            assert reply.answer or reply.reasoning or not reply.defect, body
