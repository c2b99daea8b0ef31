"""Find the text, the reasoning and the end of a chat completion in the shapes that servers give them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from klear_core.types import TeacherFinish

_FINISH_WORDS: tuple[tuple[TeacherFinish | Literal["interrupted"], str], ...] = (
    ("content_filter", "filter safety refus sensitive recitation block prohibited spii toxic guardrail moderat policy"),
    (
        "interrupted",
        "abort cancel error insufficient time_?out timed interrupt overload network unavailable preempt rate",
    ),
    ("tool_calls", "tool function"),
    ("length", "length max limit truncat incomplete not_complete unfinished context window budget"),
    ("stop", "stop eos eot end im_end s$ complete done finish success normal"),
)
"""How a reply ended, by how a word in its reason begins; the first that fits counts (`stopped_by_length`).

They are those of OpenAI, Anthropic, Gemini, Mistral, Cohere, Together, TGI and others. A reply that the server gave up
is interrupted: the same request may get a whole one."""
_FINISH = [(finish, re.compile(f"(?:^|_)(?:{'|'.join(words.split())})")) for finish, words in _FINISH_WORDS]
REASONING_FIELDS = (
    "reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks", "reasoning_text", "thoughts",
    "reasoningContent",
)  # fmt: skip
"""Where servers put the reasoning beside the content: DeepSeek and older servers, vLLM, Ollama, OpenRouter, LiteLLM and
others. Some send several of them with the same text, so the first that has any counts."""
REASONING_NAME = re.compile(
    r"(?!.*(?:finish|stop|end|token|time|effort|signature|encrypt|duration|budget|count|id$))"
    r".*(?:think|thought|reason|cot$|analysis)", re.I
)  # fmt: skip
"""Other names of the reasoning (`thinking_content`, `chain_of_thought`); those of its length or its end are none."""
CONTENT_FIELDS = ("content", "parts", "text", "output_text")
"""Where a message has its text; the first that is filled counts."""
EXTRA_FIELDS = ("provider_specific_fields", "extra_content", "model_extra", "extra_fields", "additional_kwargs")
"""Objects of a message in which gateways put the fields that are not OpenAI's."""
_OTHER_FIELDS = frozenset(
    ["role", "name", "id", "type", "object", "status", "logprobs", "annotations", "refusal", "tool_calls",
     "function_call", *CONTENT_FIELDS, *EXTRA_FIELDS]
)  # fmt: skip
"""Fields of a message that are read, or hold no text."""
END_FIELDS = (
    "finish_reason", "stop_reason", "native_finish_reason", "finishReason", "stopReason", "done_reason",
    "finish_details",
)  # fmt: skip
"""Where servers say how a reply ended; the first that is filled counts."""
_TEXT_KEYS = (
    "text", "content", "thinking", "reasoning", "summary", "value", "refusal", "reasoningContent", "reasoningText",
    "parts", "thought",
)  # fmt: skip
"""Where a part of a list has its text, or further parts."""
_MOST_NESTED = 8
"""Depth of parts within parts. Published shapes have three."""
_NO_TEXT_KEYS = frozenset(["type", "id", "index", "format", "signature", "data", "annotations", "logprobs", "status"])
"""What parts without a text have: the signature of a thought, or one that is encrypted."""
_OTHER_TEXT_KEYS = """
message response text output output_text content content_block delta completion generated_text generation candidates
outputs results item token
"""
_OTHER_PROTOCOLS = frozenset(_OTHER_TEXT_KEYS.split())
"""Where other protocols have their text: Ollama's own, Anthropic's, OpenAI's Responses, Gemini's, TGI's."""
PartKind = Literal["content", "reasoning", "refusal", "tool", "unknown"]
Part = tuple[PartKind, str]


def completions_in(value: object, depth: int = 0) -> list[object]:
    """Return the chat completions of a body, which may be in a list, or in an object of a gateway's own."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") and is_json(value.encode(errors="replace")):
        value = json.loads(value)
    if _is_completion(value):
        return [value]
    if depth == _MOST_NESTED or not isinstance(value, (dict, list)) or (isinstance(value, dict) and value.get("error")):
        return []
    inside = value.values() if isinstance(value, dict) else value
    return [completion for one in inside for completion in completions_in(one, depth + 1)]


def is_call(value: object) -> bool:
    """Return whether a field of calls has any: a call without a name and arguments is none."""
    if isinstance(value, dict):
        return any(is_call(inside) for key, inside in value.items() if key not in ("id", "type", "index"))
    return any(map(is_call, value)) if isinstance(value, list) else bool(value)


def is_text_like(value: object) -> bool:
    """Return whether a field is filled with what may hold text; numbers and flags do not."""
    return bool(value) and isinstance(value, (str, list, dict))


def may_have_text(name: str, value: object) -> bool:
    """Return whether a message's field may have a text that is not read."""
    is_read = name in _OTHER_FIELDS or REASONING_NAME.match(name)
    return is_text_like(value) and not is_read


def _is_completion(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("choices"), (list, dict))


def has_other_text(event: object) -> bool:
    """Return whether an event has something where another protocol has its text."""
    if not isinstance(event, dict):
        return False
    # A text as the message is that of an error or a gateway; a reply's is an object.
    return any(
        event[key] for key in _OTHER_PROTOCOLS & event.keys() if key != "message" or isinstance(event[key], dict)
    )


def parts_of(value: object, kind: PartKind) -> list[Part]:
    """Return the texts of a message's field, each with its kind."""
    if isinstance(value, str):  # nearly all pieces
        return [(kind, value)] if value else []
    return list(_parts(value, kind))


def _parts(value: object, kind: PartKind, depth: int = 0) -> Iterator[Part]:
    """Yield the texts of a message's field, each with its kind: a text, a part with a type, or a list of such parts."""
    if value is None or value in ("", [], {}):
        return
    if isinstance(value, str):
        yield kind, value
    elif isinstance(value, list) and depth < _MOST_NESTED:
        for part in value:
            yield from _parts(part, kind, depth + 1)
    elif isinstance(value, dict) and depth < _MOST_NESTED:
        yield from _parts_of_dict(value, kind, depth)
    else:
        yield "unknown", json.dumps(value)


def _parts_of_dict(part: dict[str, Any], kind: PartKind, depth: int) -> Iterator[Part]:
    name = str(part.get("type") or "").lower()
    if re.search(r"encrypted|redacted|signature|citation|annotation|grounding", name):
        return  # nobody can read it, or it is no text of the model
    if re.search(r"tool|function", name):
        yield "tool", json.dumps(part)
        return
    if re.search(r"image|audio|video|file", name):
        yield "unknown", json.dumps(part)
        return
    if re.search(r"think|thought|reason", name) or part.get("thought") is True or "reasoningContent" in part:
        kind = "reasoning"
    elif "refusal" in name:
        kind = "refusal"
    keys = [key for key in (*_TEXT_KEYS, str(part.get("type"))) if key in part and part[key] is not True]
    if not keys:
        if not part.keys() <= _NO_TEXT_KEYS:
            yield "unknown", json.dumps(part)
        return
    filled = next((key for key in keys if part[key]), keys[0])
    yield from _parts(part[filled], kind, depth + 1)


def finish_of(word: str) -> TeacherFinish | Literal["interrupted"] | None:
    """Return how a reply ended by the server's word for it, or None for an unknown one."""
    return next((finish for finish, words in _FINISH if words.search(word)), None)


def word_of(finish_reason: object) -> str:
    """Return the server's word for how a reply ended, in lower case with underscores (`MAX_TOKENS`, `end-turn`)."""
    if isinstance(finish_reason, dict):
        finish_reason = finish_reason.get("type") or finish_reason.get("reason")
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z0-9]+", "_", str(finish_reason)[:50])
    return words.lower().strip("_").removeprefix("finish_reason_")


def joined(parts: Sequence[Part], kind: PartKind) -> str:
    """Return the text of all parts of a kind."""
    return "".join([text for its_kind, text in parts if its_kind == kind])


def is_json(data: bytes) -> bool:
    """Return whether the bytes are one whole value of JSON."""
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
