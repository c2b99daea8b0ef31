"""Read one row of another program's file of answers as a problem with its answers; one function for each layout."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from klear_core.data.formats.code_rows import CODE_SCHEMAS, with_instructions
from klear_core.data.formats.fields import (
    Fields,
    RowError,
    answer_at,
    bare_answer,
    best_fit,
    keys,
    text_at,
    user_message,
    value_at,
)
from klear_core.data.formats.math_rows import THOUSANDS_COMMA
from klear_core.data.formats.references import reference_from_cell
from klear_core.types import Domain, FinishReason, MathReference, Reference, UnverifiableReference
from klear_core.verify.math.answer_text import boxed_texts

# ---- layout fields ----
# Read the fields that several layouts of answer files have in common: references, scores, counts and texts.


_AFTER_HASHES = re.compile(r"####\s*(\S.*)\s*\Z")
"""On the last line: elsewhere it is a heading of Markdown."""


def math_reference(value: object, where: str) -> MathReference:
    """Return the reference that a target states: the answer itself, or at the end of a worked solution."""
    if isinstance(value, list | tuple) and value and not any(isinstance(v, list | tuple | Mapping) for v in value):
        answers = [math_reference(v, where).answers[0] for v in value]
        return MathReference(answers=tuple(dict.fromkeys(answers)))
    text = answer_at({where: value}, where)
    # GSM8K's solutions end in `#### 1,234`.
    after_hashes = _AFTER_HASHES.search(text)
    if after_hashes and not boxed_texts(after_hashes[1]):
        return MathReference(answers=(THOUSANDS_COMMA.sub("", after_hashes[1].strip()),))
    # The last box: a worked solution may box results on its way.
    boxes = [box for box in boxed_texts(text) if box]
    return MathReference(answers=(bare_answer(boxes[-1] if boxes else text),))


def score_in(value: object) -> float | None:
    """Return a stated score of one answer: 0 or 1, also as true or false, or as text; None for anything else."""
    if isinstance(value, str):  # a cell of CSV is text
        return {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}.get(value.strip().lower())
    if isinstance(value, bool | int | float) and value in (0, 1):
        return float(value)
    return None


def count_in(value: object) -> int | None:
    """Return a stated count: an integer from 0 on; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return None


def texts_in(value: object, where: str) -> tuple[str, ...]:
    """Return the answers in a field: a text, or lists of texts at any depth."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise RowError("no_text", where, "holds no generated text: a task that only scores given choices")
    found: list[str] = []
    for part in value:
        found += texts_in(part, where)
    return tuple(found)


def response_in(fields: Fields, key: str, *, where: str = "") -> str:
    """Return an answer's text, which may be empty: a model can answer nothing."""
    value = value_at(fields, key)
    if not isinstance(value, str):
        raise RowError("wrong_type", where + key, f"an answer must be text, not {type(value).__name__}")
    return value


def first_text(fields: Fields, *names: str) -> str:
    """Return the first of these fields that is text or an integer; empty if there is none."""
    for name in names:
        if isinstance(fields.get(name), str | int):
            return str(fields[name])
    return ""


def row_name(key: str, name: str) -> str:
    """Return the name of a row; empty if `name` is."""
    return f"{key} {name}" if name else ""


def literal(value: object, *, opening: str = "[") -> object:
    """Return a list, or what else `opening` begins, that a column holds as its text; other values unchanged."""
    if isinstance(value, str) and value.startswith(opening):
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
    return value


# ---- layout rows ----


Layout = Literal[
    "klear",
    "lm-eval",
    "lighteval",
    "matharena",
    "qwen-math",
    "evalchemy",
    "livecodebench",
    "nemo-skills",
    "inspect",
    "rows",
]

_QUESTION_KEYS = ("question", "problem", "prompt", "query", "input")
"""Keys of a question, in any case: AIME 2024 has `Problem`."""
PROGRAM_KEYS = frozenset({"entry_point", "canonical_solution", "test_list", "test_cases", "public_test_cases"})
"""Keys of a document that state a programming task."""
_NO_ANSWERS = ("cot", "tool_call", "internal_tool_call")
"""Types of messages in MathArena's conversations that are not an answer."""
_OPTION = re.compile("[A-F]")
_IN_PARENTHESES = re.compile(r"\(.*?\)")
_NEMO_SCORES = ("symbolic_correct", "is_correct", "judge_correct")
"""Verdicts of NeMo-Skills, of its versions since 0.6 and before."""
_METRIC_KEYS = ("exact_match", "math_verify", "extractive_match", "pass@1", "acc")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedAnswer:
    """The part of a generation that is an answer's own, not its problem's."""

    text: str
    num_tokens: int | None = None
    score: float | None = None
    """Score that the file states; None if it states none."""
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRow:
    """A problem and its answers, as one row of a file holds them."""

    question: str
    reference: Reference
    answers: tuple[StatedAnswer, ...]
    problem: str
    """Name of the problem in the file."""
    row: str = ""
    """Name of the row, which no other row of its file may have; empty if the rows of a problem are further samples."""
    model: str = ""
    """Name of the model in files with answers of several."""
    benchmark: str = ""
    """Name of the benchmark in files that state it; empty: the file's name says it."""


def _klear(fields: Fields) -> AnswerRow:
    messages = value_at(fields, "messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        raise RowError("no_answer", "messages", "do not end with the assistant's")
    meta = fields.get("meta")
    stated = meta if isinstance(meta, Mapping) else fields
    # AIME 2024 has it in meta.answer, AIME 2025 the bare answer in meta.solution, HMMT in answer
    key = "answer" if "answer" in stated else "solution"
    if key not in stated:
        raise RowError("no_reference", "meta", "has neither answer nor solution")
    return AnswerRow(
        question=user_message(fields, "messages"),
        reference=math_reference(stated.get(key), key),
        answers=(StatedAnswer(text=response_in(last, "content")),),
        problem=first_text(fields, "id"),
    )


def _lm_eval(fields: Fields) -> AnswerRow:
    doc = value_at(fields, "doc")
    known = doc if isinstance(doc, Mapping) else {}
    is_program = bool(PROGRAM_KEYS & known.keys())
    texts = texts_in(_generated(value_at(fields, "resps")), "resps")
    if is_program:  # a model continues a prompt that has begun the program; the filter puts both together
        whole = texts_in(value_at(fields, "filtered_resps"), "filtered_resps")
        texts = tuple(text if "```" in text else f"```python\n{text}\n```" for text in whole)
    metrics = fields.get("metrics")
    names = [*metrics, *_METRIC_KEYS] if isinstance(metrics, list) else list(_METRIC_KEYS)
    score = None
    if len(texts) == 1:  # a metric of several answers together says nothing about each
        score = score_in(next((fields[name] for name in names if name in fields), None))
    if is_program:
        question, reference = programming_task(known)
    else:
        question = first_text({str(key).lower(): value for key, value in known.items()}, *_QUESTION_KEYS).strip()
        reference = math_reference(_list_of_texts(value_at(fields, "target")), "target")
    return AnswerRow(
        question=question,
        reference=reference,
        answers=tuple(StatedAnswer(text=text, score=score) for text in texts),
        problem=first_text(fields, "doc_id"),
        row=row_name("doc_id", first_text(fields, "doc_id")),
    )


def programming_task(doc: Fields) -> tuple[str, Reference]:
    """Return question and tests of a document that is a row of a benchmark of programs, as that benchmark has them."""
    schemas = {schema.name: schema for schema in CODE_SCHEMAS}
    name = best_fit(doc, {name: schema.signatures for name, schema in schemas.items()}, where="doc", remedy="")
    if name is None:
        raise RowError("no_reference", "doc", "is a programming task without tests in a known format")
    schema = schemas["mbpp_benchmark" if name == "mbpp" else name]  # the benchmark shows its tests in the question
    return schema.question(doc), schema.reference_of(doc, domain=Domain.CODE)


def _generated(responses: object) -> object:
    """Return the responses of a document; raise RowError if they are the log-likelihoods of given choices.

    The harness writes these as texts, too: `[[["-1.5", "False"]], ...]`, one pair a choice, where answers to a request
    are `["..."]`.
    """
    requests = responses if isinstance(responses, list) else []
    if any(isinstance(one, list) for request in requests if isinstance(request, list) for one in request):
        raise RowError("no_text", "resps", "holds no generated text: a task that only scores given choices")
    return responses


def _list_of_texts(target: object) -> object:
    """Return the accepted answers that the harness wrote as the text of a list (`['1/2', '0.5']`); others unchanged."""
    answers = literal(target)
    is_list = isinstance(answers, list) and bool(answers) and all(isinstance(answer, str) for answer in answers)
    return answers if is_list else target


def _lighteval(fields: Fields) -> AnswerRow:
    if "model_response" not in fields:
        texts = texts_in(literal(value_at(fields, "predictions")), "predictions")  # a list, before 0.10 as its text
        gold = literal(value_at(fields, "gold"))
        question = first_text(fields, "example", "full_prompt")
        return _lighteval_row(fields, question, gold, texts, tokens=[])
    doc, response = value_at(fields, "doc"), value_at(fields, "model_response")
    if not isinstance(doc, Mapping) or not isinstance(response, Mapping):
        raise RowError("wrong_type", "doc", "doc and model_response must be objects")
    choices, index = doc.get("choices"), doc.get("gold_index")
    indices = index if isinstance(index, list) else [index]
    wanted = [i for i in indices if isinstance(i, int)]
    if not isinstance(choices, list) or not wanted or max(wanted) >= len(choices):
        raise RowError("no_reference", "doc.gold_index", f"{index!r:.60} does not point into doc.choices")
    texts = texts_in(response.get("text"), "model_response.text")
    tokens = response.get("output_tokens")
    question = first_text(doc, "query")
    return _lighteval_row(fields, question, [choices[i] for i in wanted], texts, tokens=tokens or [])


def _lighteval_row(fields: Fields, question: str, gold: object, texts: tuple[str, ...], *, tokens: object) -> AnswerRow:
    metrics = literal(fields.get("metric") or fields.get("metrics"), opening="{")
    stated = _stated_metric(metrics) if isinstance(metrics, Mapping) and len(texts) == 1 else None
    lists = tokens if isinstance(tokens, list) and len(tokens) == len(texts) else [None] * len(texts)
    answers: list[StatedAnswer] = []
    for text, ids in zip(texts, lists, strict=True):
        num_tokens = len(ids) if isinstance(ids, list) else None
        answers.append(StatedAnswer(text=text, num_tokens=num_tokens, score=stated))
    return AnswerRow(
        question=question.strip(),
        reference=math_reference(gold, "gold"),
        answers=tuple(answers),
        problem=question,
        # The layout has no ids. By a constant name a second row with the same question is refused as a repetition.
        row="this question",
    )


def _stated_metric(metrics: Mapping[str, object]) -> float | None:
    """Return a metric of 0 or 1: a known one if there is one, else the only one."""
    named = [metrics[key] for key in _METRIC_KEYS if key in metrics]
    values = named or list(metrics.values())
    return score_in(values[0]) if named or len(values) == 1 else None


def _matharena(fields: Fields) -> AnswerRow:
    answers: list[StatedAnswer] = []
    problem = first_text(fields, "problem_idx", "idx")
    row = row_name("problem", problem)
    conversations = fields.get("messages")
    if isinstance(conversations, list):
        # Fewer answers than were asked for would be scored as if they were all.
        num_asked = count_in(fields.get("N"))
        if num_asked is not None and num_asked > len(conversations):
            raise RowError("too_few", "messages", f"hold {len(conversations)} of the N = {num_asked} answers")
        scores, costs = fields.get("correct"), fields.get("detailed_costs")
        for i, messages in enumerate(conversations):
            last = messages[-1] if isinstance(messages, list) and messages else None
            if not isinstance(last, Mapping):
                raise RowError("no_answer", f"messages.{i}", "holds no message")
            _require_answer(last, f"messages.{i}")
            cost = costs[i] if isinstance(costs, list) and i < len(costs) else {}
            score = scores[i] if isinstance(scores, list) and i < len(scores) else None
            tokens = count_in(cost.get("output_tokens")) if isinstance(cost, Mapping) else None
            text = response_in(last, "content", where=f"messages.{i}.")
            answers.append(StatedAnswer(text=text, num_tokens=tokens, score=score_in(score)))
    else:
        number = first_text(fields, "idx_answer")
        row = f"{row}, idx_answer {number}" if row and number else ""
        answers.append(
            StatedAnswer(
                text=response_in(fields, "answer"),
                num_tokens=count_in(fields.get("output_tokens")),
                score=score_in(fields.get("correct")),
            )
        )
    return AnswerRow(
        question=text_at(fields, "problem") if fields.get("problem") else "",
        reference=math_reference(value_at(fields, "gold_answer"), "gold_answer"),
        answers=tuple(answers),
        problem=problem,
        row=row,
        model=first_text(fields, "model_name"),
    )


def _require_answer(message: Fields, where: str) -> None:
    """Raise RowError unless a conversation's last message is an answer: a failed request leaves the question alone."""
    role, kind = message.get("role", "assistant"), message.get("type")
    if role != "assistant" or kind in _NO_ANSWERS:
        said_by = f"{role} ({kind})" if kind else role
        raise RowError("no_answer", where, f"ends with a message of {said_by}, not with the model's answer")


def _qwen_math(fields: Fields) -> AnswerRow:
    texts = texts_in(value_at(fields, "code"), "code")
    key = _qwen_key(fields)
    return AnswerRow(
        question=text_at(fields, "question"),
        reference=math_reference(value_at(fields, key), key),
        answers=scored(texts, fields.get("score")),
        problem=first_text(fields, "idx"),
        row=row_name("idx", first_text(fields, "idx")),
    )


def _qwen_key(fields: Fields) -> str:
    """Return the key of the answer: `gt` is the one that the harness compared with, and often lost parts of it.

    But of a choice, `answer` may be the number of the option (MMLU-STEM) or its text, and it may have a unit in
    parentheses (`9 (apples)`, ASDiv), which answers need not have.
    """
    answer, compared = first_text(fields, "answer"), first_text(fields, "gt")
    is_option = _OPTION.fullmatch(compared) is not None
    has_unit = bool(compared) and _IN_PARENTHESES.sub("", answer).strip() == compared
    return "gt" if is_option or has_unit else _first_key(fields, "answer", "gt")


def _evalchemy(fields: Fields) -> AnswerRow:
    """Read one of the examples that evalchemy keeps in its file of scores; `layouts` takes them out of it."""
    example = value_at(fields, "example")
    assert isinstance(example, Mapping), example
    key = _first_key(example, "expected_answer", "answer", "gold", "target")
    texts = texts_in(example.get("model_outputs", example.get("model_output")), "model_outputs")
    return AnswerRow(
        question=first_text(example, *_QUESTION_KEYS).strip(),
        reference=math_reference(value_at(example, key), key),
        answers=scored(texts, example.get("score")),
        problem=first_text(example, "id", "index"),
        benchmark=first_text(fields, "task"),
    )


def _livecodebench(fields: Fields) -> AnswerRow:
    """Read a problem of LiveCodeBench's runner: its files have no tests, and verdicts in those of `--evaluate`."""
    question = with_instructions(text_at(fields, "question_content"), fields.get("starter_code"))
    programs = fields.get("code_list")
    said = fields.get("output_list")
    if not isinstance(said, list) or not said:  # submissions of programs alone (`custom_evaluator`)
        said = None
        if isinstance(programs, list):
            said = [f"```python\n{program}\n```" for program in programs]
    return AnswerRow(
        question=question,
        reference=UnverifiableReference(domain=Domain.CODE, why="LiveCodeBench's files of answers have no tests"),
        answers=scored(texts_in(said, "output_list"), fields.get("graded_list")),
        problem=first_text(fields, "question_id"),
        row=row_name("question_id", first_text(fields, "question_id")),
    )


def _nemo_skills(fields: Fields) -> AnswerRow:
    key = _first_key(fields, "problem", "question")
    stated = next((fields[name] for name in _NEMO_SCORES if name in fields), None)
    answer = StatedAnswer(
        text=response_in(fields, "generation"),
        num_tokens=count_in(fields.get("num_generated_tokens")),
        score=score_in(stated),
    )
    return AnswerRow(
        question=text_at(fields, key),
        reference=math_reference(value_at(fields, "expected_answer"), "expected_answer"),
        answers=(answer,),
        problem=first_text(fields, "id"),
    )


def _first_key(fields: Fields, *names: str) -> str:
    """Return the first of these keys that has a value; the first of all if none has, for the error to name it."""
    return next((name for name in names if fields.get(name) not in (None, "")), names[0])


def scored(texts: Sequence[str], stated: object) -> tuple[StatedAnswer, ...]:
    """Return the answers with their scores: a list of as many, or one score of a single answer."""
    scores = stated if isinstance(stated, list | tuple) else [stated]
    if len(scores) != len(texts):
        scores = [None] * len(texts)
    return tuple(StatedAnswer(text=text, score=score_in(score)) for text, score in zip(texts, scores, strict=True))


def _plain_rows(fields: Fields) -> AnswerRow:
    return AnswerRow(
        question=first_text(fields, "question"),
        reference=reference_from_cell(value_at(fields, "reference")),
        answers=(StatedAnswer(text=response_in(fields, "response")),),
        problem=first_text(fields, "id"),
    )


SIGNATURES: dict[Layout, tuple[frozenset[str], ...]] = {
    "rows": keys("id response reference"),
    "lm-eval": keys("doc target resps"),
    "lighteval": keys("doc model_response", "predictions gold"),
    # `gold_answer` tells MathArena's `messages` from those of `klear`
    "matharena": keys(
        "problem gold_answer answer", "gold_answer messages", "gold_answer messages answer", "gold_answer messages meta"
    ),
    "qwen-math": keys("question code answer", "question code gt"),
    "klear": keys("messages meta", "messages answer"),
    "evalchemy": keys("task example"),
    "livecodebench": keys("question_content output_list", "question_content code_list"),
    "nemo-skills": keys("problem generation expected_answer", "question generation expected_answer"),
    "inspect": keys("eval sample"),
}
READERS: dict[Layout, Callable[[Fields], AnswerRow]] = {
    "klear": _klear,
    "lm-eval": _lm_eval,
    "lighteval": _lighteval,
    "matharena": _matharena,
    "qwen-math": _qwen_math,
    "evalchemy": _evalchemy,
    "livecodebench": _livecodebench,
    "nemo-skills": _nemo_skills,
    "rows": _plain_rows,
}
