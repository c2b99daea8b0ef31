"""Read a chat completion as it arrives: server-sent events, or one JSON body from a server that does not stream.

A whole reply in a shape that is not read is returned with its text, because another request would return it again.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from typing import Any, TypeGuard

from klear_core.distill.teachers.reply_shapes import (
    CONTENT_FIELDS,
    END_FIELDS,
    EXTRA_FIELDS,
    REASONING_FIELDS,
    REASONING_NAME,
    Part,
    PartKind,
    completions_in,
    finish_of,
    has_other_text,
    is_call,
    is_json,
    is_text_like,
    joined,
    may_have_text,
    parts_of,
    word_of,
)
from klear_core.distill.teachers.teacher import split_tags
from klear_core.types import TeacherFinish, TeacherReply

_CHARS_A_TOKEN = 4
"""Characters of an average token, to estimate tokens where the server counts none (OpenAI's rule of thumb)."""
_MOST_CHARS_A_TOKEN = 20
"""Most characters a token, on average, in any reply. Above it the server has ignored `max_tokens`."""
_MOST_TOKENS = 2**31
"""A larger count is a server's mistake, such as -1 as an unsigned number; no file of ours could hold it."""
_UNSAID = frozenset(["", "null", "none", "finish_reason_unspecified", "unspecified"])
"""Words for a reply that has not ended."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")
_EMPTY_EVENTS = (b"", b"null")
"""Events without content, which some servers and proxies send to keep a connection open."""


class BadReplyError(Exception):
    """The bytes are no whole reply. `reason` is the slug to count by."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class ReplyReader:
    """Assembles one reply from the bytes of a response; no network, no clock.

    Whether the body is a stream is decided by its first character, because servers and proxies mislabel both.
    """

    def __init__(self, *, max_tokens: int) -> None:
        self.input_tokens: int | None = None
        self.has_usage = False
        self.has_fingerprint = False
        self.is_done = False
        """Whether the stream's last event has come."""
        self.num_pieces = 0
        """Pieces of text so far; servers send one token a piece, or a few."""
        self._max_tokens = max_tokens
        self._max_pending = 2**20 + 8 * _MOST_CHARS_A_TOKEN * max_tokens
        self._output_tokens = 0
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._num_chars = 0
        self._tool_calls: list[str] = []
        self._unread_parts: list[str] = []
        """Parts of the message in unknown shapes, as JSON."""
        self._beside: list[str] = []
        """Fields of messages without content, as JSON."""
        self._unread_events: list[str] = []
        """Events, or whole bodies, with text in the places of other protocols, as JSON."""
        self._held: dict[PartKind, list[str]] = {
            "content": self._content,
            "reasoning": self._reasoning,
            "refusal": self._content,
            "tool": self._tool_calls,
            "unknown": self._unread_parts,
        }
        self._reasoning_place = ""
        self._has_deltas = False
        self._has_choices = False
        self._choice_index: str | None = None
        """Index of the choice that is read: the first that came, because one is asked for."""
        self._finish_reason = ""
        """The server's word, in lower case with underscores."""
        self._is_refused = False
        self._start = b""
        self._line = bytearray()
        """Bytes of the line that is not complete yet, or of the whole body if that is JSON."""
        self._data: list[bytes] = []
        """Data lines of the current event."""
        self._is_json: bool | None = None
        self._is_after_return = False
        """Whether the last line ended in a carriage return, of which a line feed may be the second half."""

    @property
    def is_stream(self) -> bool:
        """Return whether the reply comes piece by piece."""
        return self._is_json is False

    @property
    def is_finished(self) -> bool:
        """Return whether the server said how the reply ended; only token counts can follow."""
        return bool(self._finish_reason)

    @property
    def is_over_limit(self) -> bool:
        """Return whether the reply is longer than `max_tokens`: the server ignores it, and may never stop."""
        is_too_many = self.num_pieces > self._max_tokens + 64
        return is_too_many or self._num_chars > _MOST_CHARS_A_TOKEN * (self._max_tokens + 64)

    @property
    def output_tokens(self) -> int:
        """Return the tokens received so far: the server's count, or an estimate."""
        return self._output_tokens or max(self.num_pieces, estimate_tokens(self._num_chars))

    def feed(self, chunk: bytes) -> None:
        """Read more bytes. Raise BadReplyError if they cannot belong to a reply."""
        # Kept for messages: `_line` no longer has the start of a stream when it ends.
        if len(self._start) < 100:
            self._start += chunk[:100]
        if self._is_json is None:
            self._line += chunk
            if _BYTE_ORDER_MARK.startswith(bytes(self._line)):
                return  # the rest of the mark may follow
            self._line = self._line.removeprefix(_BYTE_ORDER_MARK)
            first = self._line.lstrip()[:1]
            if not first:
                return
            # An array is no reply. Read as JSON it is reported as such, and not as a stream without events.
            self._is_json = bytes(first) in (b"{", b"[", b'"')
            chunk = b""
        self._line += chunk
        if not self._is_json:
            self._read_lines()
        num_pending = len(self._line) + sum(map(len, self._data))
        if num_pending > self._max_pending:
            raise BadReplyError("malformed", f"more than {self._max_pending} bytes without an end of event")

    def finish(self) -> TeacherReply:
        """Return the reply at the end of the response. Raise BadReplyError if it is not whole."""
        if self._is_json:
            self._read_body(bytes(self._line))
        # The last event may lack its empty line. A stream that was cut here ends within an event.
        elif not self.is_over_limit:
            self._read_line(bytes(self._line))
            self._read_line(b"")
        if self.is_over_limit and not self._finish_reason:
            self._finish_reason = "length"
        if self._unread_events and not self._has_choices:
            return self._reply("other", f"no chat completion: {self._unread_events[0][:200]}")
        if not self._finish_reason:
            if not self.num_pieces:
                raise BadReplyError("malformed", f"no chat completion; it starts with {self._start[:100]!r}")
            if self._is_json:  # it is whole, so the server says so every time
                return self._reply("other", "no finish_reason")
            raise BadReplyError("broken_off", f"broken off after {self.num_pieces} pieces, without a finish reason")
        finish = finish_of(self._finish_reason)
        if finish == "interrupted" or not (finish or self.num_pieces or self._beside):
            raise BadReplyError("interrupted", f"finish_reason {self._finish_reason!r}")
        return self._reply(*self._ending(finish))

    def _ending(self, finish: TeacherFinish | None) -> tuple[TeacherFinish, str]:
        """Return how the reply ended, and why it cannot be used if its shape is at fault."""
        if finish is None:
            return "other", f"unknown finish_reason {self._finish_reason!r}"
        if self._unread_parts:
            return "other", f"content of an unknown shape: {self._unread_parts[0][:200]}"
        if finish == "stop" and self._beside and not (self._content or self._tool_calls or self._is_refused):
            return "other", f"no content: {self._beside[-1][:200]}"
        if self._is_refused:
            return "content_filter", ""
        if self.is_over_limit:
            return "length", ""
        if self._tool_calls and finish in ("stop", "tool_calls"):
            return "tool_calls", "the model calls a tool"
        # No tools are offered: a server that says `tool_calls` and sends none took something in the answer for a call.
        return "stop" if finish == "tool_calls" else finish, ""

    def _reply(self, finish_reason: TeacherFinish, defect: str) -> TeacherReply:
        (content, is_whole), (reasoning, is_whole_too) = _text(self._content), _text(self._reasoning)
        # Servers without a reasoning parser leave the tags in the content.
        reasoning, answer = split_tags(content, reasoning)
        if not (is_whole and is_whole_too) and not defect:
            finish_reason, defect = "other", "half a surrogate pair in the text"
        apart = "\n".join([*self._tool_calls, *self._unread_parts, *self._unread_events, *self._beside])
        return TeacherReply(
            reasoning=reasoning,
            answer="\n".join(filter(None, [answer, apart])) if defect else answer,
            finish_reason=finish_reason,
            num_tokens=self.output_tokens,
            defect=defect,
        )

    def _read_lines(self) -> None:
        """Read all lines that are complete; they end in LF, CR LF or CR alone."""
        if self._is_after_return and self._line:
            self._line = self._line.removeprefix(b"\n")
            self._is_after_return = False
        if b"\n" not in self._line and b"\r" not in self._line:
            return
        # The second half of the last CR LF may be in the next chunk. Its line is complete without it.
        self._is_after_return = self._line.endswith(b"\r")
        # Lines are bytes until they are complete: a chunk may end within a character.
        *lines, rest = _LINE_END.split(self._line) if b"\r" in self._line else self._line.split(b"\n")
        self._line = bytearray(rest)
        for line in lines:
            self._read_line(bytes(line))

    def _read_line(self, line: bytes) -> None:
        """Read one line of a stream: an empty one ends an event; comments and other fields are ignored."""
        if line:
            field, _, value = line.partition(b":")
            if field.strip().lower() != b"data":
                return
            value = value.lstrip(b" ")
            if self._data and value.startswith((b"{", b"[DONE]")) and is_json(b"\n".join(self._data)):
                self._end_event()  # a server that sends no empty lines
            self._data.append(value)
            return
        self._end_event()

    def _end_event(self) -> None:
        if self._data:
            event = b"\n".join(self._data).strip()
            self._data = []
            if event == b"[DONE]":
                self.is_done = True
            elif event not in _EMPTY_EVENTS:
                self._read_event(event)

    def _read_body(self, body: bytes) -> None:
        """Read a body of JSON: one reply, or a stream with an event a line or in a list."""
        lines = [line for line in body.splitlines() if line.strip()]
        if len(lines) > 1 and all(line.lstrip().startswith(b"{") and is_json(line) for line in lines):
            self._is_json = False
            for line in lines:
                self._read_event(line)
        else:
            self._read_event(body)

    def _read_event(self, payload: bytes) -> None:
        try:
            event = json.loads(payload)
        except (ValueError, RecursionError) as e:  # also bytes that are no UTF-8
            if self._finish_reason:
                return  # a mark of the end in the server's own words
            raise BadReplyError("malformed", f"{type(e).__name__}: {e}; it starts with {payload[:100]!r}") from e
        if isinstance(event, str):
            self._read_encoded(event.strip().encode(errors="surrogatepass"))
            return
        for completion in completions_in(event) or [event]:
            self._read_completion(completion, payload)

    def _read_encoded(self, text: bytes) -> None:
        """Read what was encoded twice: an event, or a whole stream, as a string of JSON."""
        if text[:1] in (b"{", b"["):
            self._read_event(text)
            return
        self._is_json = False
        for line in (*text.splitlines(), b""):
            self._read_line(line)

    def _read_completion(self, event: object, payload: bytes) -> None:
        if not isinstance(event, dict):
            self._keep_unread(event)  # the native protocol of TGI answers with a list
            if not self._unread_events:
                raise BadReplyError("malformed", f"not a chat completion; it starts with {payload[:100]!r}")
            return
        if event.get("error") or "error" in (event.get("object"), event.get("type")):
            said = event.get("error") or event.get("message") or event
            raise BadReplyError("stream_error", f"the server says {str(said)[:300]!r}")
        self.has_fingerprint |= bool(event.get("system_fingerprint"))
        self._read_usage(event.get("usage"))
        choices = event.get("choices") or []  # null beside the token counts of some servers
        if isinstance(choices, dict):  # one choice, or several by their numbers
            are_numbered = all(key.isdigit() for key in choices)
            choices = list(choices.values()) if are_numbered else [choices]
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise BadReplyError("malformed", f"choices is {type(choices).__name__} of what is no choice")
        if not choices:
            self._keep_unread(event)
        for choice in choices:
            # One is asked for; a server may send more, or call the only one null.
            index = str(choice.get("index") or 0)
            if self._choice_index in (None, index):
                self._choice_index = index
                self._read_choice(choice, event)

    def _read_choice(self, choice: dict[str, Any], event: dict[str, Any]) -> None:
        self._has_choices = True
        num_pieces = self.num_pieces
        if delta := choice.get("delta"):
            self._read_message(delta)
            self._has_deltas |= self.num_pieces > num_pieces
        # Some servers end a stream with the whole message, whose pieces have come before.
        if not self._has_deltas:
            texts = (choice[name] for name in ("message", "messages", *CONTENT_FIELDS) if choice.get(name))
            message = next(texts, None)
            beside = {name: choice[name] for name in choice if REASONING_NAME.match(name)}
            inside = message if isinstance(message, dict) else {"content": message}
            self._read_message(beside | inside, is_whole=True)
        holders = itertools.product((choice, event), END_FIELDS)
        if reason := next((holder[name] for holder, name in holders if holder.get(name)), None):
            word = word_of(reason)
            if word not in _UNSAID:  # some servers send an empty one with every piece
                self._finish_reason = word

    def _read_message(self, message: object, *, is_whole: bool = False) -> None:
        if not isinstance(message, dict):
            message = {"content": message}
        apart = self._reasoning_apart(message)
        content = next((message[name] for name in CONTENT_FIELDS if message.get(name)), None)
        inside = parts_of(content, "content")
        thought = "" if isinstance(content, str) else joined(inside, "reasoning")
        # LiteLLM sends the thinking among the parts of the content, too.
        if thought and (thought == joined(apart, "reasoning") or self._is_repeated(thought, "content")):
            inside = [part for part in inside if part[0] != "reasoning"]
        parts = [*apart, *inside]
        self._add(self._new_parts(parts) if is_whole else parts)
        others = {name: value for name, value in message.items() if may_have_text(name, value)}
        if others and not self._content:
            self._beside.append(json.dumps(others))
        if refusal := message.get("refusal"):
            self._is_refused = True
            self._add(parts_of("" if refusal is True else refusal, "refusal"))
        for name in ("tool_calls", "function_call"):
            if is_call(message.get(name)):
                self._add([("tool", json.dumps(message[name]))])

    def _new_parts(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts of a whole message less what came before: some servers send all of it so far each time."""
        new = [part for part in parts if part[0] not in ("content", "reasoning")]
        for kind in ("reasoning", "content"):
            text, before = joined(parts, kind), "".join(self._held[kind])
            new.append((kind, text.removeprefix(before)))
        return [part for part in new if part[1]]

    def _reasoning_apart(self, message: dict[str, Any]) -> list[Part]:
        """Return the reasoning in a field of its own, unless the pieces in another place had it before."""
        holders = [message, *(message[name] for name in EXTRA_FIELDS if isinstance(message.get(name), dict))]
        for holder in holders:
            for name in (*REASONING_FIELDS, *filter(REASONING_NAME.match, holder)):
                parts = parts_of(holder[name], "reasoning") if is_text_like(holder.get(name)) else []
                # Alone, encrypted thinking is no reasoning, and another field may have it in plain text.
                if text := joined(parts, "reasoning"):
                    return [] if self._is_repeated(text, name) else parts
        return []

    def _is_repeated(self, thought: str, place: str) -> bool:
        """Return whether the whole reasoning so far came in another place."""
        self._reasoning_place = self._reasoning_place or place
        return place != self._reasoning_place and thought == "".join(self._reasoning)

    def _add(self, parts: Sequence[Part]) -> None:
        for kind, text in parts:
            self._is_refused |= kind == "refusal"
            self._held[kind].append(text)
            self.num_pieces += 1
            self._num_chars += len(text)

    def _keep_unread(self, value: object) -> None:
        """Keep the text of another protocol. Other events without a choice are pings and counts."""
        parts = value if isinstance(value, list) else [value]
        if any(map(has_other_text, parts)) and sum(map(len, self._unread_events)) < self._max_pending:
            self._unread_events.append(json.dumps(value))

    def _read_usage(self, usage: object) -> None:
        """Take the counts of the last usage that has any; vLLM can send one with every piece."""
        if not isinstance(usage, dict):
            return
        output, given = usage.get("completion_tokens"), usage.get("prompt_tokens")
        if _is_count(output):
            self._output_tokens, self.has_usage = output, True
        if _is_count(given):
            self.input_tokens = given


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value <= _MOST_TOKENS


def estimate_tokens(num_chars: int) -> int:
    """Return about how many tokens a text of this length has."""
    return math.ceil(num_chars / _CHARS_A_TOKEN)


def _text(parts: list[str]) -> tuple[str, bool]:
    """Join the pieces, and return whether they are text: a lone half of a surrogate pair is replaced.

    The halves of a pair may have come in two pieces.
    """
    units = "".join(parts).encode("utf-16-le", "surrogatepass")
    try:
        return units.decode("utf-16-le"), True
    except UnicodeDecodeError:
        return units.decode("utf-16-le", "replace"), False
