"""Read a chat completion as it arrives: server-sent events, or one JSON body from a server that does not stream."""

from __future__ import annotations

import json
import math
from typing import Any, TypeGuard

from klear_core.distill.teachers.teacher import split_tags
from klear_core.types import TeacherFinish, TeacherReply

_CHARS_A_TOKEN = 4
"""Characters of an average token, to estimate tokens where the server counts none (OpenAI's rule of thumb)."""
_MOST_CHARS_A_TOKEN = 20
"""Most characters a token, on average, in any reply. Above it the server has ignored `max_tokens`."""
_MOST_TOKENS = 2**31
"""A larger count is a server's mistake, such as -1 as an unsigned number; no file of ours could hold it."""
_FINISH: dict[str, TeacherFinish] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "length": "length",
    "content_filter": "content_filter",
}
"""Together says `eos`, and older versions of TGI `eos_token`, where others say `stop`."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
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
        self._finish_reason = ""
        self._is_refused = False
        self._start = b""
        self._line = bytearray()
        """Bytes of the line that is not complete yet, or of the whole body if that is JSON."""
        self._data: list[bytes] = []
        """Data lines of the current event."""
        self._is_json: bool | None = None

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
            self._is_json = bytes(first) in (b"{", b"[")
            chunk = b""
        self._line += chunk
        if not self._is_json and b"\n" in self._line:
            # Lines are bytes until they are complete: a chunk may end within a character.
            *lines, rest = self._line.split(b"\n")
            self._line = bytearray(rest)
            for line in lines:
                self._read_line(bytes(line.removesuffix(b"\r")))
        num_pending = len(self._line) + sum(map(len, self._data))
        if num_pending > self._max_pending:
            raise BadReplyError("malformed", f"more than {self._max_pending} bytes without an end of event")

    def finish(self) -> TeacherReply:
        """Return the reply at the end of the response. Raise BadReplyError if it is not whole."""
        if self._is_json:
            self._read_event(bytes(self._line))
        # The last event may lack its empty line. A stream that was cut here ends within an event.
        elif not self.is_over_limit:
            self._read_line(bytes(self._line))
            self._read_line(b"")
        if self.is_over_limit and not self._finish_reason:
            self._finish_reason = "length"
        if not self._finish_reason:
            if not self.num_pieces:
                raise BadReplyError("malformed", f"no chat completion; it starts with {self._start[:100]!r}")
            raise BadReplyError("broken_off", f"broken off after {self.num_pieces} pieces, without a finish reason")
        if self._finish_reason not in _FINISH:
            raise BadReplyError("interrupted", f"finish_reason {self._finish_reason[:50]!r}")
        return self._reply()

    def _reply(self) -> TeacherReply:
        content, reasoning = _text(self._content), _text(self._reasoning)
        # Servers without a reasoning parser leave the tags in the content.
        reasoning, answer = split_tags(content, reasoning)
        finish_reason = _FINISH[self._finish_reason]
        if self._is_refused:
            finish_reason = "content_filter"
        elif self.is_over_limit:
            finish_reason = "length"
        return TeacherReply(
            reasoning=reasoning,
            answer=answer,
            finish_reason=finish_reason,
            num_tokens=self.output_tokens,
        )

    def _read_line(self, line: bytes) -> None:
        """Read one line of a stream: an empty one ends an event; comments and other fields are ignored."""
        if line:
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
            return
        if self._data:
            event = b"\n".join(self._data).strip()
            self._data = []
            if event == b"[DONE]":
                self.is_done = True
            elif event not in _EMPTY_EVENTS:
                self._read_event(event)

    def _read_event(self, payload: bytes) -> None:
        try:
            event = json.loads(payload)
        except (ValueError, RecursionError) as e:  # also bytes that are no UTF-8
            raise BadReplyError("malformed", f"{type(e).__name__}: {e}; it starts with {payload[:100]!r}") from e
        if not isinstance(event, dict):
            raise BadReplyError("malformed", f"not a chat completion; it starts with {payload[:100]!r}")
        if event.get("error"):
            raise BadReplyError("stream_error", f"the server says {str(event['error'])[:300]!r}")
        self.has_fingerprint |= bool(event.get("system_fingerprint"))
        self._read_usage(event.get("usage"))
        choices = event.get("choices") or []  # null beside the token counts of some servers
        if not isinstance(choices, list):
            raise BadReplyError("malformed", f"choices is {type(choices).__name__}")
        for choice in choices:
            if not isinstance(choice, dict):
                raise BadReplyError("malformed", f"a choice is {type(choice).__name__}")
            if not choice.get("index"):  # one is asked for; a server may send more, or call the only one null
                self._read_choice(choice)

    def _read_choice(self, choice: dict[str, Any]) -> None:
        message = choice.get("delta") or choice.get("message") or {}
        if not isinstance(message, dict):
            raise BadReplyError("malformed", f"a message is {type(message).__name__}")
        # DeepSeek and older servers call it reasoning_content, vLLM reasoning; some send both, with the same text
        self._add(message.get("reasoning_content") or message.get("reasoning"), self._reasoning, "reasoning")
        self._add(message.get("content"), self._content, "content")
        if message.get("refusal"):
            self._is_refused = True
            self._add(message["refusal"], self._content, "refusal")
        finish_reason = choice.get("finish_reason")
        if finish_reason:  # some servers send an empty one with every piece
            self._finish_reason = str(finish_reason)

    def _add(self, text: object, parts: list[str], field: str) -> None:
        if text is None or text == "":
            return
        if not isinstance(text, str):
            raise BadReplyError("malformed", f"{field} is {type(text).__name__}")
        parts.append(text)
        self.num_pieces += 1
        self._num_chars += len(text)

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


def _text(parts: list[str]) -> str:
    """Join the pieces; the halves of a surrogate pair may have come in two of them."""
    try:
        return "".join(parts).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError as e:
        raise BadReplyError("malformed", "half a surrogate pair in the text") from e
