"""Define the row formats of math sources and benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from klear_core.config.verify import IFEVAL_JUDGE
from klear_core.data.formats.fields import (
    Fields,
    RowError,
    Schema,
    answer_at,
    answers_at,
    bare_answer,
    keys,
    no_rating,
    number_at,
    rating_at,
    text_at,
    user_message,
    value_at,
)
from klear_core.seeding import seed_for
from klear_core.types import CustomReference, Domain, MathReference, Reference, UnverifiableReference
from klear_core.verify.ifeval import check_instruction
from klear_core.verify.math.answer_text import boxed_texts

_TOP_OF_MATH_LEVELS = 5
"""Highest level in MATH, which rates problems 1 to 5."""
_TOP_OF_AOPS_SCALE = 10
"""Top of the Art of Problem Solving's scale of 1 to 10, which DeepScaleR's AIME rows and DeepMath use."""

_GSM8K_ANSWER = re.compile(r"####\s*(\S.*)$", re.MULTILINE)
THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}\b)")
"""The comma of `1,234` in an answer of GSM8K."""

_NUMINA_MARKS = ("problem_is_valid", "solution_is_valid")


def _one_answer(fields: Fields, *path: str) -> MathReference:
    return MathReference(answers=(answer_at(fields, *path),))


def _gsm8k_reference(fields: Fields) -> MathReference:
    """Return the number after `####` in the worked solution, without thousands commas."""
    match = _GSM8K_ANSWER.search(text_at(fields, "answer"))
    if match is None:
        bare = "; if answers are bare, call the column of the questions `problem`"
        raise RowError("no_reference", "answer", f"no '#### ' before a final answer, as GSM8K has it{bare}")
    return MathReference(answers=(THOUSANDS_COMMA.sub("", match[1].strip()),))


def _klear_bench_reference(fields: Fields) -> MathReference:
    """Return the answer from Klear-Reasoner's benchmark files.

    AIME 2024 has it in `meta.answer`, AIME 2025 in `meta.solution` (the bare answer), HMMT in `answer`.
    """
    meta = fields.get("meta")
    if not isinstance(meta, Mapping):
        return _one_answer(fields, "answer")
    return _one_answer(fields, "meta", "answer" if "answer" in meta else "solution")


def _benchmark_question(fields: Fields) -> str:
    """Return the question of a math benchmark: a chat's only question, `problem` or `question`.

    OlympiadBench has what several of its questions share in `context`.
    """
    if "messages" in fields:
        return user_message(fields, "messages")
    question = text_at(fields, "problem" if "problem" in fields else "question")
    context = fields.get("context")
    return f"{context.strip()}\n{question}" if isinstance(context, str) and context.strip() else question


def _benchmark_reference(fields: Fields) -> Reference:
    """Return the answer of a math benchmark; for rows that have only a worked solution, the boxed answer in it."""
    if isinstance(fields.get("meta"), Mapping):
        return _klear_bench_reference(fields)
    if "final_answer" in fields:  # OlympiadBench: all elements are the answer, and not alternatives
        return MathReference(answers=(", ".join(answers_at(fields, "final_answer")),))
    for key in ("answer", "expected_answer"):
        if key in fields:
            return _one_answer(fields, key)
    return boxed_reference(fields, "solution")


def _benchmark_rating(fields: Fields) -> float | None:
    """Return the level of a MATH problem; other benchmarks have no rating that we read."""
    return rating_at(fields, "level", top=_TOP_OF_MATH_LEVELS) if "subject" in fields else None


def _deepscaler_rating(fields: Fields) -> float | None:
    """Return the rating; rows with a `type` come from MATH (levels 1 to 5), all others use the 10-point scale."""
    return rating_at(fields, "difficulty", top=_TOP_OF_MATH_LEVELS if "type" in fields else _TOP_OF_AOPS_SCALE)


def boxed_reference(fields: Fields, key: str) -> Reference:
    """Return the boxed answer of a worked solution; a solution without one single answer is unverifiable."""
    boxes = {box and box.strip() for box in boxed_texts(text_at(fields, key))}
    answer = boxes.pop() if len(boxes) == 1 else None
    if answer:
        return MathReference(answers=(bare_answer(answer),))
    return UnverifiableReference(domain=Domain.MATH, why=f"{key} has {len(boxes) or 'no'} different boxed answers")


def _numina_mark(fields: Fields, key: str) -> object:
    mark = fields.get(key)
    return "Yes" if mark is None else mark


def _numina_reference(fields: Fields) -> Reference:
    """Return the answer of a NuminaMath 1.5 row; proofs and answers marked as not found or wrong are unverifiable.

    OpenR1 has the same columns without the two marks; in a table of both they are null.
    """
    is_valid, is_solved = (_numina_mark(fields, key) for key in _NUMINA_MARKS)
    if is_valid != "Yes":
        raise RowError("marked_invalid", "problem_is_valid", f"the source says {is_valid!r}")
    why = ""
    answer = fields.get("answer")
    if answer is None or str(answer).strip().lower() in ("", "proof", "notfound"):
        why = f"the source gives the answer {answer!r}"
    elif fields.get("question_type") == "proof":
        why = "it asks for a proof"
    elif is_solved != "Yes":
        why = f"the source says of its solution {is_solved!r}"
    return UnverifiableReference(domain=Domain.MATH, why=why) if why else _one_answer(fields, "answer")


def _unsolved_share(fields: Fields) -> float | None:
    """Return the share of Llama 3.1 8B's attempts that failed; None if it was not measured."""
    if fields.get("llama8b_solve_rate") is None:
        return None
    solved = number_at(fields, "llama8b_solve_rate")
    if not 0 <= solved <= 1:
        raise RowError("bad_rating", "llama8b_solve_rate", f"{solved:g} is outside of 0 to 1")
    return 1 - solved


# ---- choices ----
# Read multiple-choice questions: the options follow the question by letter, and the reference is a letter.


_OPTION_LETTERS = "ABCDEFGHIJ"
_GPQA_OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def _with_options(question: str, options: Sequence[str]) -> str:
    """Return a question with its options below it, as simple-evals writes them."""
    listed = [f"{letter}) {option}" for letter, option in zip(_OPTION_LETTERS, options, strict=False)]
    return "\n".join([question, "", *listed])


def _gpqa_options(fields: Fields) -> list[str]:
    """Return the options in an order drawn from the row alone; the published columns have the right one first.

    Every run asks the same questions, whatever its seed, so that scores can be compared problem by problem.
    """
    question, options = text_at(fields, "Question"), [text_at(fields, key) for key in _GPQA_OPTIONS]
    if len(set(options)) < len(options):
        raise RowError("bad_options", "Correct Answer", f"two options of {question[:60]!r} are the same")
    return sorted(options, key=lambda option: seed_for(0, "data/options", question, option))


def _gpqa_reference(fields: Fields) -> MathReference:
    right = _gpqa_options(fields).index(text_at(fields, "Correct Answer"))
    return MathReference(answers=(_OPTION_LETTERS[right],))


def _mmlu_pro_options(fields: Fields) -> list[str]:
    options = value_at(fields, "options")
    if not isinstance(options, list) or not 2 <= len(options) <= len(_OPTION_LETTERS):
        raise RowError("bad_options", "options", f"expected a list of 2 to 10 options, found {options!r:.80}")
    return [str(option).strip() for option in options]


def _mmlu_pro_reference(fields: Fields) -> MathReference:
    """Return the letter of the right option; the row states it twice, which must agree."""
    letter, index = text_at(fields, "answer"), value_at(fields, "answer_index")
    if letter not in _OPTION_LETTERS[: len(_mmlu_pro_options(fields))] or index != _OPTION_LETTERS.index(letter):
        raise RowError("bad_reference", "answer", f"answer {letter!r} and answer_index {index!r} name no one option")
    return MathReference(answers=(letter,))


def _ifeval_reference(fields: Fields, rule: Literal["strict", "loose"]) -> CustomReference:
    """Return the instructions of an IFEval row with their settings, of which a table has null for all others."""
    names, settings = value_at(fields, "instruction_id_list"), value_at(fields, "kwargs")
    if not isinstance(names, list) or not isinstance(settings, list) or not names or len(names) != len(settings):
        raise RowError("bad_reference", "kwargs", "expected settings for each of instruction_id_list")
    instructions = []
    for name, stated in zip(names, settings, strict=True):
        used = {key: value for key, value in dict(stated or {}).items() if value is not None}
        try:
            check_instruction(str(name), used)
        except ValueError as e:
            raise RowError("bad_reference", "instruction_id_list", str(e)) from e
        instructions.append([name, used])
    value = json.dumps({"rule": rule, "instructions": instructions})
    return CustomReference(judge=IFEVAL_JUDGE.name, domain=Domain.MATH, value_json=value)


MATH_SCHEMAS = (
    Schema(  # nvidia/AceReason-Math, agentica-org/DeepScaleR-Preview-Dataset
        name="problem_answer",
        signatures=keys("problem answer"),
        question=lambda fields: text_at(fields, "problem"),
        reference=lambda fields: _one_answer(fields, "answer"),
        rating=no_rating,
    ),
    Schema(  # SynthLabsAI/Big-Math-RL-Verified
        name="big_math",
        signatures=keys("problem answer llama8b_solve_rate"),
        question=lambda fields: text_at(fields, "problem"),
        reference=lambda fields: _one_answer(fields, "answer"),
        rating=_unsolved_share,
    ),
    Schema(  # AI-MO/NuminaMath-CoT
        name="numinamath_cot",
        signatures=keys("source problem solution messages"),
        question=lambda fields: text_at(fields, "problem"),
        reference=lambda fields: boxed_reference(fields, "solution"),
        rating=no_rating,
    ),
    Schema(  # AI-MO/NuminaMath-1.5; open-r1/OpenR1-Math-220k, which keeps its columns and adds traces
        name="numinamath",
        signatures=keys(
            "problem solution answer problem_type question_type source",
            "problem solution answer problem_type question_type source messages",
        ),
        question=lambda fields: text_at(fields, "problem"),
        reference=_numina_reference,
        rating=no_rating,
    ),
    Schema(
        name="klear_bench",
        signatures=keys("messages meta", "messages answer"),
        question=lambda fields: user_message(fields, "messages"),
        reference=_klear_bench_reference,
        rating=no_rating,
    ),
    Schema(  # the columns of all math benchmarks in klear_core/config/known_benchmarks.py; never detected, but named
        name="math_benchmark",
        signatures=(),
        question=_benchmark_question,
        reference=_benchmark_reference,
        rating=_benchmark_rating,
    ),
    Schema(
        name="gsm8k",
        signatures=keys("question answer"),
        question=lambda fields: text_at(fields, "question"),
        reference=_gsm8k_reference,
        rating=no_rating,
    ),
    Schema(
        name="math500",
        signatures=keys("problem answer subject level"),
        question=lambda fields: text_at(fields, "problem"),
        reference=lambda fields: _one_answer(fields, "answer"),
        rating=lambda fields: rating_at(fields, "level", top=_TOP_OF_MATH_LEVELS),
    ),
    Schema(
        name="amc23",
        signatures=keys("problem question answer"),
        question=lambda fields: text_at(fields, "problem"),
        reference=lambda fields: _one_answer(fields, "answer"),
        rating=no_rating,
    ),
    Schema(
        name="deepscaler",
        signatures=keys("problem answer difficulty"),
        question=lambda fields: text_at(fields, "problem"),
        reference=lambda fields: _one_answer(fields, "answer"),
        rating=_deepscaler_rating,
    ),
    Schema(
        name="deepmath",
        signatures=keys("prompt messages ground_truth difficulty"),
        question=lambda fields: text_at(fields, "prompt"),
        reference=lambda fields: _one_answer(fields, "ground_truth"),
        rating=lambda fields: rating_at(fields, "difficulty", top=_TOP_OF_AOPS_SCALE),
    ),
    Schema(
        name="nemo",
        signatures=keys("problem expected_answer"),
        question=lambda fields: text_at(fields, "problem"),
        reference=lambda fields: _one_answer(fields, "expected_answer"),
        rating=no_rating,
    ),
    Schema(  # Idavidrein/gpqa
        name="gpqa",
        signatures=(frozenset({"Question", *_GPQA_OPTIONS}),),
        question=lambda fields: _with_options(text_at(fields, "Question"), _gpqa_options(fields)),
        reference=_gpqa_reference,
        rating=no_rating,
        cluster=lambda fields: str(fields.get("Subdomain") or ""),
    ),
    Schema(  # TIGER-Lab/MMLU-Pro
        name="mmlu_pro",
        signatures=keys("question options answer answer_index category"),
        question=lambda fields: _with_options(text_at(fields, "question"), _mmlu_pro_options(fields)),
        reference=_mmlu_pro_reference,
        rating=no_rating,
        cluster=lambda fields: str(fields.get("category") or ""),
    ),
    Schema(  # google/IFEval
        name="ifeval",
        signatures=keys("key prompt instruction_id_list kwargs"),
        question=lambda fields: text_at(fields, "prompt"),
        reference=lambda fields: _ifeval_reference(fields, "strict"),
        rating=no_rating,
    ),
    Schema(  # the same rows; never detected, but named
        name="ifeval_loose",
        signatures=(),
        question=lambda fields: text_at(fields, "prompt"),
        reference=lambda fields: _ifeval_reference(fields, "loose"),
        rating=no_rating,
    ),
)
