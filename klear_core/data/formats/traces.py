"""Read published reasoning traces: the question, and one or more replies of a teacher, in the formats of data cards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from klear_core.config.data import StoredSource
from klear_core.data.datafiles import check_files, data_files, origin, parse_rows, rows_of
from klear_core.data.formats.code_rows import QuestionTables
from klear_core.data.formats.fields import (
    Fields,
    RowError,
    best_fit,
    contest_id,
    head_of,
    is_from_user,
    keys,
    message_text,
    text_at,
    user_message,
    value_at,
)
from klear_core.data.formats.trace_rows import TRACE_SCHEMAS
from klear_core.data.readers import FileRow
from klear_core.errors import ConfigError
from klear_core.prompts import THINK_CLOSE, THINK_OPEN, split_response
from klear_core.types import Domain, Dropped, TeacherFinish, problem_id_of

# ---- traces ----


_THOUGHT_OPEN, _THOUGHT_CLOSE = "<|begin_of_thought|>", "<|end_of_thought|>"
_SOLUTION_OPEN, _SOLUTION_CLOSE = "<|begin_of_solution|>", "<|end_of_solution|>"
"""Tags of Sky-T1 and of OpenThoughts-114k."""
_REPLY_ROLES = ("assistant", "gpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One published reply."""

    reasoning: str
    answer: str
    finish_reason: TeacherFinish = "stop"
    published_verdict: str = ""
    """The row's own verdict on it: `right`, `wrong`, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTrace:
    """One row: a question with its replies."""

    question: str
    domain: Domain
    replies: tuple[Reply, ...]
    row: str
    """Place of the row in its source."""
    contest_id: str

    @property
    def problem_id(self) -> str:
        """Return the id that a problem with this question has."""
        return problem_id_of(self.question, self.domain)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """One row format: the keys that identify it, and its field readers, which raise RowError."""

    name: str
    signatures: tuple[frozenset[str], ...]
    """A row has this format if it has all keys of one of these sets."""
    question: Callable[[Fields], str]
    replies: Callable[[Fields], Sequence[Reply]]
    domain: Callable[[Fields], Domain | None] = field(default=lambda _fields: None)


def format_of(first_row: Fields, *, where: str) -> TraceFormat:
    """Return the format that fits the keys of a row best; ConfigError if none fits, or several equally well."""
    signatures = {f.name: f.signatures for f in FORMATS}
    name = best_fit(first_row, signatures, where=where, remedy="remove the columns of all but one")
    for found in FORMATS:
        if found.name == name:
            return found
    known = ", ".join(signatures)
    raise ConfigError(
        f"{where}: no known format of traces has the keys {sorted(first_row)}; known formats: {known}. Rows with "
        "`messages` (a user's and an assistant's message, the thinking in <think> tags) can always be read"
    )


def read_traces(source: StoredSource) -> Iterator[PublishedTrace | Dropped]:
    """Yield all rows of a source in order, each as a trace or a drop record; the first row determines the format."""
    complete = QuestionTables(source.lookup).completed
    yield from _rows(source, complete)


def check_traces(source: StoredSource) -> None:
    """Raise ConfigError or DataError if files of a source are missing or cut short, or none of its first rows is a
    trace. Of a Hub source that is not in the cache only the names of its files are checked."""
    if source.row_schema != "auto":
        raise ConfigError(
            f"{origin(source)}: row_schema = {source.row_schema!r} is for prompts; the format of traces is detected"
        )
    if check_files(source) is None:
        return
    head = head_of(_rows(source, QuestionTables(source.lookup).checked))
    if not head:
        raise ConfigError(f"{origin(source)}: holds no row")
    dropped = [row for row in head if isinstance(row, Dropped)]
    if len(dropped) == len(head):
        raise ConfigError(
            f"{origin(source)}: none of the first {len(head)} rows can be used as a trace; {dropped[0].detail}"
        )


def split_reply(text: str) -> Reply:
    """Split a reply in reasoning and answer at its tags; without tags all of it is the answer.

    A reply whose thinking never ends ran out of tokens.
    """
    if _THOUGHT_CLOSE in text:
        before, _, after = text.partition(_THOUGHT_CLOSE)
        is_whole = _SOLUTION_OPEN not in after or _SOLUTION_CLOSE in after
        answer = after.replace(_SOLUTION_OPEN, "").replace(_SOLUTION_CLOSE, "").strip()
        reasoning = before.replace(_THOUGHT_OPEN, "").strip()
        return Reply(reasoning=reasoning, answer=answer, finish_reason="stop" if is_whole else "length")
    if _THOUGHT_OPEN in text:
        return Reply(reasoning=text.replace(_THOUGHT_OPEN, "").strip(), answer="", finish_reason="length")
    if THINK_CLOSE in text:
        split = split_response(text)
        return Reply(reasoning=_without_tags(split.reasoning), answer=split.answer)
    if THINK_OPEN in text:
        return Reply(reasoning=text.partition(THINK_OPEN)[2].strip(), answer="", finish_reason="length")
    return Reply(reasoning="", answer=text.strip())


def _without_tags(reasoning: str) -> str:
    """Return the thinking without tags around it, of which some rows have several pairs; SFT writes one of its own."""
    bare = reasoning.strip()
    while bare.startswith(THINK_OPEN) or bare.endswith(THINK_CLOSE):
        bare = bare.removeprefix(THINK_OPEN).removesuffix(THINK_CLOSE).strip()
    return bare


def _rows(source: StoredSource, complete: Callable[[Fields], Fields]) -> Iterator[PublishedTrace | Dropped]:
    found: TraceFormat | None = None
    stated = None if source.domain is None else Domain(source.domain)

    def parse(row: FileRow) -> PublishedTrace:
        nonlocal found
        found = found or format_of(row.fields, where=row.where)
        return _trace(row, complete(row.fields), found, stated)

    return parse_rows(rows_of(data_files(source)), parse, limit=source.limit)


def _trace(row: FileRow, fields: Fields, found: TraceFormat, stated: Domain | None) -> PublishedTrace:
    replies = tuple(found.replies(fields))
    if not replies:
        raise RowError("no_reply", found.name, "the row has no reply")
    return PublishedTrace(
        question=found.question(fields),
        # The domain is only part of the id here: nothing is judged, so that science and puzzles can be learnt too.
        domain=_domain(found, fields) or stated or Domain.MATH,
        replies=replies,
        row=row.where,
        contest_id=contest_id(fields),
    )


def _domain(found: TraceFormat, fields: Fields) -> Domain | None:
    try:
        return found.domain(fields)
    except RowError:
        return None


def _text(*path: str) -> Callable[[Fields], str]:
    return lambda fields: text_at(fields, *path)


def _reply_at(*path: str) -> Callable[[Fields], Sequence[Reply]]:
    return lambda fields: (split_reply(text_at(fields, *path)),)


def _two_fields(reasoning: str, answer: str) -> Callable[[Fields], Sequence[Reply]]:
    """Return a reader of replies whose thinking and answer are in two columns, with or without tags."""

    def replies(fields: Fields) -> Sequence[Reply]:
        thinking = _without_tags(text_at(fields, reasoning))
        return (Reply(reasoning=thinking, answer=str(value_at(fields, answer) or "").strip()),)

    return replies


def _question_in(*path: str) -> Callable[[Fields], str]:
    return lambda fields: user_message(fields, *path)


def _replies_in(*path: str) -> Callable[[Fields], Sequence[Reply]]:
    """Return a reader of the only assistant message in a chat; its thinking may be in `reasoning_content`."""

    def replies(fields: Fields) -> Sequence[Reply]:
        messages = value_at(fields, *path)
        if not isinstance(messages, list):
            raise RowError("wrong_type", ".".join(path), f"expected a list, found {type(messages).__name__}")
        said = [m for m in messages if isinstance(m, Mapping) and (m.get("role") or m.get("from")) in _REPLY_ROLES]
        if len(said) != 1:
            raise RowError("not_single_turn", ".".join(path), f"expected one assistant message, found {len(said)}")
        if not any(map(is_from_user, messages[: messages.index(said[0])])):
            raise RowError("not_single_turn", ".".join(path), "the assistant's message comes before the user's")
        text = message_text(said[0])
        thinking = said[0].get("reasoning_content") or said[0].get("reasoning")
        if isinstance(thinking, str) and thinking.strip():
            # Some rows have the thinking a second time, in tags at the beginning of the text.
            is_repeated = text.startswith((THINK_OPEN, _THOUGHT_OPEN))
            reply = split_reply(text) if is_repeated else Reply(reasoning="", answer=text)
            return (replace(reply, reasoning=_without_tags(thinking)),)
        return (split_reply(text),)

    return replies


def _completion_question(fields: Fields) -> str:
    """Return the prompt of TRL's rows, which is a text or a list of messages."""
    return text_at(fields, "prompt") if isinstance(fields.get("prompt"), str) else user_message(fields, "prompt")


def _completion(fields: Fields) -> Sequence[Reply]:
    """Return the completion of TRL's rows, which is a text or the rest of the prompt's messages."""
    prompt, completion = value_at(fields, "prompt"), value_at(fields, "completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return _replies_in("messages")({"messages": [*prompt, *completion]})
    return (split_reply(text_at(fields, "completion")),)


def _input_question(fields: Fields) -> str:
    """Return the prompt of Llama-Nemotron, which is a text in some files and a list of messages in others."""
    return text_at(fields, "input") if isinstance(fields.get("input"), str) else user_message(fields, "input")


def _generations(fields: Fields) -> Sequence[Reply]:
    """Return the replies of OpenR1-Math; `finish_reasons` and `correctness_math_verify` are lists beside them, or
    null."""
    texts = value_at(fields, "generations")
    if not isinstance(texts, list):
        raise RowError("wrong_type", "generations", f"expected a list, found {type(texts).__name__}")
    whole, right = fields.get("is_reasoning_complete"), fields.get("correctness_math_verify")
    replies = []
    for index, text in enumerate(texts):
        reply = split_reply("" if text is None else str(text))
        finish: TeacherFinish = "length" if _flag_at(whole, index) is False else reply.finish_reason
        verdict = _as_verdict(_flag_at(right, index))
        replies.append(replace(reply, finish_reason=finish, published_verdict=verdict))
    return replies


def _graded_samples(fields: Fields) -> Sequence[Reply]:
    """Return the samples of SkyThought's evaluations: lists `code` and `score`."""
    texts, scores = value_at(fields, "code"), fields.get("score")
    if not isinstance(texts, list):
        raise RowError("wrong_type", "code", f"expected a list, found {type(texts).__name__}")
    replies = []
    for index, text in enumerate(texts):
        verdict = _as_verdict(_flag_at(scores, index))
        replies.append(replace(split_reply("" if text is None else str(text)), published_verdict=verdict))
    return replies


def _prompt(fields: Fields) -> str:
    """Return the question of a plain pair; an instruction's `input` (Alpaca) belongs to it."""
    question = text_at(fields, _first_key(fields, "prompt", "question", "instruction"))
    given = fields.get("input") if "instruction" in fields else None
    return f"{question}\n\n{given.strip()}" if isinstance(given, str) and given.strip() else question


def _first_key(fields: Fields, *names: str) -> str:
    return next((name for name in names if name in fields), names[0])  # the first is missed where none is there


def _flag_at(values: object, index: int) -> bool | None:
    is_there = isinstance(values, list) and index < len(values) and isinstance(values[index], bool)
    return bool(values[index]) if is_there else None  # type: ignore[index]


def _as_verdict(is_right: bool | None) -> str:
    return {None: "", True: "right", False: "wrong"}[is_right]


_SCHEMAS = {schema.name: schema for schema in TRACE_SCHEMAS}


def _as_prompts(
    schema: str, replies: Callable[[Fields], Sequence[Reply]], signatures: tuple[frozenset[str], ...] = ()
) -> TraceFormat:
    """Return the format whose questions are read as those of the prompts in the same rows, without their wrapping."""
    of = _SCHEMAS[schema]  # type: ignore[index]
    return TraceFormat(
        name=schema,
        signatures=signatures or of.signatures,
        question=of.question,
        replies=replies,
        domain=of.domain,
    )


FORMATS = (
    TraceFormat(  # plain chats; nvidia/Nemotron-Post-Training-Dataset-v1 and -v2
        name="messages",
        signatures=keys("messages", "messages conversations"),
        question=_question_in("messages"),
        replies=_replies_in("messages"),
    ),
    # plain ShareGPT chats; open-thoughts/OpenThoughts-114k, OpenThoughts2-1M, OpenThoughts3-1.2M
    _as_prompts("open_thoughts", _replies_in("conversations")),
    _as_prompts(  # open-thoughts/OpenThoughts-114k, subset metadata
        "open_thoughts_metadata",
        _two_fields("deepseek_reasoning", "deepseek_solution"),
        keys("problem deepseek_reasoning deepseek_solution domain"),
    ),
    TraceFormat(  # open-r1/OpenR1-Math-220k; it has `messages` too, with the first of the generations
        name="openr1_math",
        signatures=keys("problem generations is_reasoning_complete"),
        question=_text("problem"),
        replies=_generations,
        domain=lambda _fields: Domain.MATH,
    ),
    TraceFormat(  # nvidia/Llama-Nemotron-Post-Training-Dataset
        name="llama_nemotron",
        signatures=keys("input output category generator"),
        question=_input_question,
        replies=_reply_at("output"),
        domain=lambda fields: Domain(text_at(fields, "category")) if fields["category"] in ("math", "code") else None,
    ),
    _as_prompts("acereason_sft", _reply_at("output")),
    _as_prompts("open_code_reasoning", _reply_at("output")),
    _as_prompts("open_code_reasoning_2", _reply_at("r1_generation")),
    TraceFormat(  # simplescaling/s1K-1.1
        name="s1k",
        signatures=keys("question deepseek_thinking_trajectory deepseek_attempt"),
        question=_text("question"),
        replies=_two_fields("deepseek_thinking_trajectory", "deepseek_attempt"),
    ),
    TraceFormat(  # rasbt/reasoning-from-scratch: thinking and answer as the endpoint returned them
        name="message_thinking",
        signatures=keys("problem message_thinking message_content"),
        question=_text("problem"),
        replies=_two_fields("message_thinking", "message_content"),
        domain=lambda _fields: Domain.MATH,
    ),
    TraceFormat(  # NovaSky-AI/SkyThought: samples of an evaluation in the layout of Qwen2.5-Math
        name="graded_samples",
        signatures=keys("question code score"),
        question=_text("question"),
        replies=_graded_samples,
        domain=lambda _fields: Domain.MATH,
    ),
    TraceFormat(  # TRL's rows for SFT
        name="prompt_completion",
        signatures=keys("prompt completion", "prompt completion response"),
        question=_completion_question,
        replies=_completion,
    ),
    TraceFormat(
        name="prompt_response",
        signatures=keys("prompt response", "question response", "instruction output"),
        question=_prompt,
        replies=lambda fields: (split_reply(text_at(fields, _first_key(fields, "response", "output"))),),
    ),
)
