"""IFEval's judge against the published functions.

Expected values are those of google-research's instruction_following_eval (its copy in geronimi73/instruction-eval at
45e51ff), computed once. The published answers of text-bison to all 541 prompts were compared outside of this suite: 1,494 verdicts
(747 instructions, strict and loose) without a difference.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from klear_core.config.data import BenchmarkConfig
from klear_core.config.verify import IFEVAL_JUDGE, CustomJudge, VerifyConfig
from klear_core.data.benchmarks import load_benchmark
from klear_core.errors import DataError
from klear_core.types import CustomReference, Problem
from klear_core.verify.ifeval import follows, follows_loosely
from klear_core.verify.judge_pool import JudgePool

for library in ("langdetect", "nltk", "punkt"):
    pytest.importorskip(library)

CASES: list[tuple[str, dict[str, object], dict[str, str]]] = [
    (
        "keywords:existence",
        {"keywords": ["red", "b.ue"]},
        {"Red and blue.": "yes", "red only": "no", "RED BLUE": "yes"},
    ),
    (
        "keywords:frequency",
        {"keyword": "cat", "frequency": 2, "relation": "at least"},
        {"Cat, concatenate": "yes", "one cat": "no"},
    ),
    (
        "keywords:frequency",
        {"keyword": " cat ", "frequency": 2, "relation": "less than"},
        {"Cat, concatenate": "no", "one cat": "yes"},
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["hot"]},
        {"a shot": "yes", "It is HOT.": "no", "*hot*\nfine": "loose"},
    ),
    (
        "keywords:letter_frequency",
        {"letter": "A", "let_frequency": 3, "let_relation": "at least"},
        {"banana": "yes", "Anna": "no", "Aaa": "yes"},
    ),
    (
        "keywords:letter_frequency",
        {"letter": "a", "let_frequency": 3, "let_relation": "less than"},
        {"banana": "no", "Anna": "yes"},
    ),
    (
        "language:response_language",
        {"language": "de"},
        {
            "Das ist ein langer Satz auf Deutsch, den man erkennen kann.": "yes",
            "This is a long sentence in English that one can tell.": "no",
            "1234": "yes",
        },
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        {"Dr. Smith came. He left!": "no", "One. Two. Three.": "yes", "Is it? Yes. No.": "yes"},
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        {"Mr. Jones paid $3.50 to U.S. Steel.": "yes", "One. Two.": "no"},
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        {
            "a\n***\nb": "yes",
            "***\na\n***\nb\n***": "yes",
            "a\n***\n\n***\nb": "no",
            "a\n\nb": "no",
            "Sure:\n***\na\n***\nb": "loose",
        },
    ),
    (
        "length_constraints:number_words",
        {"num_words": 4, "relation": "at least"},
        {"don't do it": "yes", "one two-three": "no", "a b c": "no"},
    ),
    (
        "length_constraints:number_words",
        {"num_words": 4, "relation": "less than"},
        {"don't do it": "no", "a b c": "yes", "Here it is:\na b c": "loose"},
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Why"},
        {
            "One.\n\nWhy, two.": "yes",
            'One.\n\n"why\'s" two.': "yes",
            "One.\n\n\n\nWhy two.": "no",
            "Why.": "no",
            "One.\n\nWhy two.\n\n": "yes",
            "Sure!\n\nOne.\n\nWhy two.": "loose",
        },
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        {"[name] of [place]": "yes", "[a [b]]": "no", "[][]": "yes"},
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        {"Bye.\nP.S. Hi": "yes", "Bye. p. s. hi": "yes", "PS: hi": "no"},
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        {"Bye.\nP.P.S Hi": "yes", "P. P. S.": "yes", "P.S. hi": "no"},
    ),
    ("detectable_content:postscript", {"postscript_marker": "Note:"}, {"note: x": "yes", "no te": "no"}),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        {"* a\n* b": "yes", "- a\n  * b": "yes", "* a\n** b": "no", "List:\n---\n* a": "yes", "* a\n* b\n- c": "loose"},
    ),
    (
        "detectable_format:constrained_response",
        {},
        {"I think: My answer is yes. Really.": "yes", "My answer is Yes.": "no"},
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        {"*a* and *b*": "yes", "**a**": "no", "**a** **b**": "yes", "** ** *a*": "no"},
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        {
            "Section 1\na\nSection 2\nb": "yes",
            "Section1 a Section2 b": "yes",
            "SECTION 1 SECTION 2": "no",
            "Section one Section two": "no",
        },
    ),
    (
        "detectable_format:json_format",
        {},
        {
            '```json\n{"a": 1}\n```': "yes",
            '{"a": 1}': "yes",
            "```JSON\n[1]```": "yes",
            "{a: 1}": "no",
            'Here:\n{"a": 1}': "loose",
            "12": "yes",
        },
    ),
    ("detectable_format:title", {}, {"<<poem of joy>>": "yes", "<< >>": "no", "<poem>": "no", "<<a\nb>>": "no"}),
    (
        "combination:two_responses",
        {},
        {
            "a******b": "yes",
            "a\n******\na": "no",
            "******a******b******": "yes",
            "a******b******c": "no",
            "a******\n******b": "no",
            "a***b": "no",
        },
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Say hi."},
        {" say HI. Hello": "yes", "Hi. Say hi.": "no", "Sure!\nSay hi. Hello": "loose"},
    ),
    (
        "startend:end_checker",
        {"end_phrase": " Any questions? "},
        {
            "Done. any questions?": "yes",
            '"Any questions?"': "yes",
            "Any questions? No.": "no",
            "Any questions?\nBye": "loose",
        },
    ),
    ("startend:quotation", {}, {'"a"': "yes", ' "a" ': "yes", '"': "no", '"a" b': "no", 'Sure:\n"a"': "loose"}),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 3, "capital_relation": "at least"},
        {"A NEW CAR": "yes", "I AM NOT sure": "yes", "NASA's FBI-CIA": "no", "WON'T GO": "yes"},
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 3, "capital_relation": "less than"},
        {"A NEW CAR": "no", "A NEW car": "yes"},
    ),
    (
        "change_case:english_capital",
        {},
        {
            "THIS IS A LONG SENTENCE IN ENGLISH.": "yes",
            "This is a sentence in English.": "no",
            "DAS IST EIN LANGER SATZ AUF DEUTSCH.": "no",
        },
    ),
    (
        "change_case:english_lowercase",
        {},
        {
            "this is a long sentence in english.": "yes",
            "this is a long sentence in English.": "no",
            "das ist ein langer satz auf deutsch.": "no",
            "1234": "no",
        },
    ),
    ("punctuation:no_comma", {}, {"a b": "yes", "a, b": "no", "First, this:\na b": "loose"}),
]
"""Instruction, its settings, and texts that follow it (`yes`), follow it by the loose rule alone, or do not."""


@pytest.mark.parametrize(("name", "settings", "texts"), CASES)
def test_an_instruction_is_checked_as_in_the_published_code(
    name: str, settings: dict[str, object], texts: dict[str, str]
) -> None:
    strict = {text: follows(text, name, settings) for text in texts}
    assert strict == {text: verdict == "yes" for text, verdict in texts.items()}
    loose = {text: follows_loosely(text, name, settings) for text in texts}
    assert loose == {text: verdict != "no" for text, verdict in texts.items()}


def test_the_table_has_all_25_instructions_and_an_empty_text_follows_none() -> None:
    assert len({name for name, _, _ in CASES}) == 25
    assert not any(follows(" \n", name, settings) for name, settings, _ in CASES)


ROW = {
    "key": 1,
    "prompt": "Name two colours, without commas, in at least 4 words.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [
        {"num_words": None, "relation": None, "num_highlights": None},  # the Hub's table has all keys in every row
        {"num_words": 4, "relation": "at least", "num_highlights": None},
    ],
}


def ifeval(path: Path, row: dict[str, object], row_schema: str = "auto") -> Problem:
    path.write_text(json.dumps(row) + "\n")
    source = {"kind": "file", "path": str(path), "row_schema": row_schema}
    (problem,) = load_benchmark(BenchmarkConfig.model_validate({"name": "b", "source": source}), seed=0)
    return problem


@pytest.mark.parametrize(
    ("said", "strict", "loose"),
    [
        ("Red and dark blue", 1.0, 1.0),
        ("Sure, here they are:\nRed and dark blue", 0.0, 1.0),
        ("Red and blue", 0.0, 0.0),
    ],
)
def test_an_answer_is_right_if_it_follows_all_instructions_after_the_thinking(
    tmp_path: Path, said: str, strict: float, loose: float
) -> None:
    with JudgePool(VerifyConfig()) as judges:
        for schema, score in (("auto", strict), ("ifeval_loose", loose)):
            problem = ifeval(tmp_path / "b.jsonl", ROW, schema)
            assert isinstance(problem.reference, CustomReference)
            assert problem.question == ROW["prompt"]
            # Commas in the thinking count for nothing.
            assert judges.judge(problem, f"<think>\nred, green, blue\n</think>\n\n{said}").score == score


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction_id_list": ["no:such", "punctuation:no_comma"]}, "no instruction 'no:such'"),
        ({"kwargs": [{"num_words": 1}, {"num_words": 4, "relation": "at least"}]}, "does not take"),
        ({"kwargs": [{}, {"num_words": 4, "relation": "more than"}]}, "does not take"),
        ({"kwargs": [{}]}, "settings for each of instruction_id_list"),
    ],
)
def test_a_row_whose_instructions_cannot_be_checked_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        ifeval(tmp_path / "b.jsonl", ROW | change)


def test_known_ifeval_has_541_prompts_and_its_judge_keeps_its_name() -> None:
    known = BenchmarkConfig.model_validate({"known": "ifeval", "source": {"kind": "hub", "revision": "0" * 40}})
    assert (known.expected_rows, known.num_samples) == (541, 1)
    with pytest.raises(ValueError, match="'ifeval' is a judge of Klear's own"):
        VerifyConfig(judges=(CustomJudge(name=IFEVAL_JUDGE.name, function="mine:judge"),))
