import json
import re

import pytest

from klear_core.config.data import FileSource
from klear_core.data.candidates import Candidate
from klear_core.data.formats.detect import SCHEMAS, schema_for
from klear_core.data.formats.fields import RowError, bare_answer
from klear_core.data.sources import read_source
from klear_core.errors import ConfigError
from klear_core.types import AssertTests, CodeReference, Domain, MathReference, StdinTests

CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 1+1?"}]


def read_one(row, tmp_path, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (found,) = read_source(FileSource(path=str(path), **settings), seed=0)
    return found


MATH_ROWS = {
    "klear_bench of AIME 2024": {"messages": CHAT[1:], "meta": {"answer": "2", "solution": "1+1 is 2"}},
    "klear_bench of AIME 2025": {"messages": CHAT[1:], "meta": {"solution": "2"}},
    "klear_bench of HMMT": {"id": 0, "messages": CHAT[1:], "solution": "\\boxed{2}", "answer": "2"},
    "gsm8k": {"question": "What is 1+1?", "answer": "One and one is <<1+1=2>>2.\n#### 2"},
    "math500": {
        "problem": "What is 1+1?",
        "answer": "2",
        "subject": "Algebra",
        "level": 3,
        "solution": "",
        "unique_id": "x",
    },
    "amc23": {"id": 1, "problem": "What is 1+1?", "question": "What is 1+1?", "answer": 2.0, "url": "u"},
    "deepscaler": {"problem": "What is 1+1?", "answer": "2", "difficulty": 3.0, "type": "Algebra"},
    "deepmath": {
        "prompt": "What is 1+1?",
        "messages": json.dumps(CHAT),
        "ground_truth": "2",
        "difficulty": "6.0",
        "tag": "x",
    },
    "nemo": {"id": "x", "problem": "What is 1+1?", "expected_answer": "$2$."},
    "verl with an instruction": {
        "data_source": "deepscaler",
        "prompt": [
            {
                "role": "user",
                "content": "What is 1+1? Let's think step by step and output the final answer within \\boxed{}.",
            },
        ],
        "ability": "math",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 0},
    },
    "verl with a template and a bare question": {
        "question": "What is 1+1?",
        "answer": "2",
        "level": 3,
        "data_source": "simplelr_qwen",
        "prompt": [{"role": "user", "content": "<|im_start|>user\nWhat is 1+1?<|im_end|>"}],
        "ability": "math",
        "reward_model": {"ground_truth": "2"},
    },
    "klear_rl": {
        "data_source": "math_longcot_math_verify",
        "prompt": [{"role": "user", "content": "What is 1+1?"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "__index_level_0__": 7,
    },
    "problem": {"id": "a", "question": "What is 1+1?", "reference": {"kind": "math", "answers": ["2"]}},
}


@pytest.mark.parametrize("name", MATH_ROWS)
def test_every_math_format_is_recognised_and_gives_the_same_problem(name, tmp_path):
    found = read_one(MATH_ROWS[name], tmp_path)
    assert isinstance(found, Candidate), found
    assert (found.question, found.reference, found.domain) == (
        "What is 1+1?",
        MathReference(answers=("2",)),
        Domain.MATH,
    )
    assert schema_for(FileSource(path="x"), MATH_ROWS[name], where="x").name == name.split()[0]


@pytest.mark.parametrize(
    ("name", "rating"),
    [
        ("math500", 0.6),
        ("deepscaler", 0.6),
        ("deepmath", 0.6),
        ("verl with a template and a bare question", 0.6),
        ("gsm8k", None),
    ],
)
def test_ratings_are_shares_of_their_own_scale(name, rating, tmp_path):
    assert read_one(MATH_ROWS[name], tmp_path).rating == rating


def test_deepscaler_rates_aime_out_of_ten_and_math_out_of_five(tmp_path):
    row = {"problem": "p", "answer": "1", "difficulty": 4.0}
    assert read_one(row, tmp_path).rating == 0.4
    assert read_one(row | {"type": "Algebra"}, tmp_path).rating == 0.8
    assert read_one(row | {"difficulty": 0.0}, tmp_path).rating is None
    assert read_one(row | {"difficulty": 40}, tmp_path).reason == "bad_rating"


STDIN = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
CODE_ROWS = {
    "rllm_code": {"problem": "Add.", "tests": STDIN},
    "lcb": {
        "question_content": "Add.",
        "question_id": "1",
        "platform": "atcoder",
        "starter_code": "",
        "difficulty": "hard",
        "tests": [{"input": "1 2", "output": "3"}],
    },
    "apps": {"question": "Add.", "input_output": json.dumps(STDIN), "difficulty": "competition"},
    "klear_rl": {
        "data_source": "coder1_longcot",
        "prompt": [{"role": "user", "content": "Add."}],
        "ability": "code",
        "reward_model": {"ground_truth": json.dumps(STDIN), "style": "rule"},
    },
    "problem": {
        "question": "Add.",
        "reference": {"kind": "code", "tests": {"type": "stdin", "cases": [{"input": "1 2", "output": "3"}]}},
    },
}


@pytest.mark.parametrize("name", CODE_ROWS)
def test_every_stdin_format_gives_a_code_problem(name, tmp_path):
    found = read_one(CODE_ROWS[name], tmp_path)
    assert isinstance(found, Candidate), found
    assert found.domain is Domain.CODE
    assert found.question.startswith("Add.")
    assert isinstance(found.reference.tests, StdinTests)
    assert [(c.input.strip(), c.output.strip()) for c in found.reference.tests.cases] == [("1 2", "3")]


CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
ASSERT_ROWS = {
    "mbpp": {"text": "Add.", "test_list": ["assert add(1, 2) == 3"], "task_id": 1},
    "humaneval": {
        "prompt": "def add(a, b):\n    '''Add.'''\n",
        "test": CHECK,
        "entry_point": "add",
        "canonical_solution": "",
    },
    "leetcode": {
        "query": "Add.",
        "prompt": "",
        "test": CHECK,
        "entry_point": "Solution().add",
        "meta": {"difficulty": "Hard"},
    },
}


@pytest.mark.parametrize("name", ASSERT_ROWS)
def test_every_assertion_format_gives_a_code_problem(name, tmp_path):
    found = read_one(ASSERT_ROWS[name], tmp_path)
    assert isinstance(found, Candidate), found
    assert isinstance(found.reference, CodeReference)
    assert isinstance(found.reference.tests, AssertTests)
    assert "Add." in found.question


def test_grades_of_code_sources_are_the_middle_of_their_part_of_the_scale(tmp_path):
    assert read_one(ASSERT_ROWS["leetcode"], tmp_path).rating == pytest.approx(5 / 6)
    assert read_one(CODE_ROWS["lcb"], tmp_path).rating == pytest.approx(5 / 6)
    assert read_one(CODE_ROWS["apps"], tmp_path).rating == pytest.approx(5 / 6)
    assert read_one(CODE_ROWS["apps"] | {"difficulty": "VERY_HARD"}, tmp_path).rating == pytest.approx(0.9)


@pytest.mark.parametrize(
    "opening",
    [
        "Please solve the programming task below using a self-contained code snippet in a markdown code block.\n\n",
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct Python "
        "program that matches the specification and passes all tests.\n\n### Question:\n",
    ],
)
def test_the_openings_of_code_prompts_are_left_out_so_that_repeats_look_alike(opening, tmp_path):
    assert read_one({"problem": opening + "Add.", "tests": STDIN}, tmp_path).question == "Add."


def test_starter_code_becomes_part_of_the_question(tmp_path):
    row = CODE_ROWS["lcb"] | {"starter_code": "class Solution:\n    def add(self, a, b):\n        "}
    assert (
        read_one(row, tmp_path).question
        == "Add.\n\nComplete this code:\n```python\nclass Solution:\n    def add(self, a, b):\n```"
    )
    assert read_one(CODE_ROWS["lcb"], tmp_path).question == "Add.\n\nRead standard input, write standard output."


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gsm8k", {"answer": "no mark\nat all"}, "no_reference"),
        ("gsm8k", {"question": "  "}, "empty_field"),
        ("gsm8k", {"question": 7}, "wrong_type"),
        ("deepscaler", {"answer": None}, "no_reference"),
        ("deepscaler", {"answer": ["2"]}, "wrong_type"),
        ("deepmath", {"difficulty": "hard"}, "wrong_type"),
        ("klear_bench of AIME 2024", {"messages": CHAT + CHAT}, "not_single_turn"),
        ("klear_bench of AIME 2024", {"meta": {}}, "missing_field"),
        ("klear_rl", {"ability": "poetry", "data_source": "verses"}, "unknown_domain"),
        ("klear_rl", {"reward_model": {}}, "missing_field"),
        ("klear_rl", {"prompt": [{"role": "user", "content": "<|im_start|>user\nhi"}]}, "templated_prompt"),
        ("problem", {"reference": {"kind": "math", "answers": []}}, "bad_reference"),
        ("problem", {"reference": "2"}, "bad_reference"),
    ],
)
def test_a_row_that_does_not_fit_is_dropped_with_its_line_field_and_reason(name, change, reason, tmp_path):
    found = read_one(MATH_ROWS[name] | change, tmp_path)
    assert (found.step, found.reason) == ("read", reason)
    assert re.search(r"rows\.jsonl:1( \(id \w+\))?: ", found.detail)
    assert next(iter(change)) in found.detail or reason == "unknown_domain"


def test_tests_that_are_absent_or_wrong_are_told_apart(tmp_path):
    questions_only = {k: v for k, v in CODE_ROWS["lcb"].items() if k != "tests"}
    assert read_one(questions_only, tmp_path).reason == "no_reference"
    elsewhere = {"prompt": "Add.", "question_id": "1", "contest_date": "d", "tests": {"fname": "559.json", "md5": "0"}}
    assert read_one(elsewhere, tmp_path).reason == "no_reference"
    assert read_one({"problem": "Add.", "tests": {"inputs": ["1"], "outputs": []}}, tmp_path).reason == "bad_reference"


def test_unknown_keys_are_fine_in_a_known_format(tmp_path):
    assert isinstance(read_one(MATH_ROWS["gsm8k"] | {"extra": [1, 2]}, tmp_path), Candidate)


def test_unknown_and_ambiguous_rows_are_config_errors_that_name_the_keys():
    with pytest.raises(ConfigError, match=r"no known row format has the keys \['prose'\].*docs/data.md"):
        schema_for(FileSource(path="x"), {"prose": 1}, where="f:1")
    with pytest.raises(ConfigError, match="could be any of gsm8k, problem; set row_schema"):
        schema_for(FileSource(path="x"), {"question": "q", "answer": "a", "reference": {}}, where="f:1")


def test_naming_the_format_overrides_the_guess(tmp_path):
    both = {"question": "q", "answer": "x\n#### 2", "reference": {"kind": "math", "answers": ["3"]}}
    assert read_one(both, tmp_path, row_schema="gsm8k").reference == MathReference(answers=("2",))
    assert read_one(both, tmp_path, row_schema="problem").reference == MathReference(answers=("3",))


@pytest.mark.parametrize("answer", ["2", 2, r"\\frac{1}{2}", "x = 2"])
def test_questions_with_bare_answers_are_not_taken_for_gsm8k(tmp_path, answer):
    """`question` and `answer` are GSM8K's columns, whose answers are worked solutions."""
    row = {"question": "What is 1+1?", "answer": answer}
    assert read_one(row, tmp_path).reference == MathReference(answers=(str(answer),))


def test_a_worked_solution_without_its_last_line_is_told_what_to_call_its_columns(tmp_path):
    found = read_one({"question": "What is 1+1?", "answer": "One and one.\nThat is two."}, tmp_path)
    assert "if answers are bare, call the column of the questions `problem`" in found.detail


def test_thousands_commas_of_gsm8k_are_removed_but_not_those_of_lists(tmp_path):
    assert read_one(MATH_ROWS["gsm8k"] | {"answer": "#### 1,080"}, tmp_path).reference.answers == ("1080",)
    assert read_one(MATH_ROWS["gsm8k"] | {"answer": "#### -109,200,000"}, tmp_path).reference.answers == ("-109200000",)


@pytest.mark.parametrize(
    ("published", "bare"),
    [("$3 \\sqrt{6}$.", "3 \\sqrt{6}"), ("$1$ and $2$", "$1$ and $2$"), ("3.5", "3.5"), ("$", "$"), (" 7 ", "7")],
)
def test_dollar_signs_around_a_whole_answer_are_removed(published, bare):
    assert bare_answer(published) == bare


def test_every_format_has_one_entry():
    names = [s.name for s in SCHEMAS]
    assert len(names) == len(set(names))
    assert "auto" not in names


def test_row_errors_say_where():
    assert str(RowError("r", "a.b", "missing")) == "a.b: missing"


ODD_VALUES = (
    None,
    True,
    7,
    -1,
    10**400,
    float("inf"),
    "",
    "text",
    "9" * 5000,
    [],
    [None],
    [{}],
    {},
    {"a": []},
    [["x"]],
)


@pytest.mark.parametrize("row", [*MATH_ROWS.values(), *CODE_ROWS.values(), *ASSERT_ROWS.values()])
def test_odd_values_anywhere_in_a_row_lead_to_a_drop_or_a_problem_never_to_a_crash(row, tmp_path):
    path = tmp_path / "rows.jsonl"
    changed = [row | {key: odd} for key in row for odd in ODD_VALUES]
    changed += [
        row | {key: value | {inner: odd}}
        for key, value in row.items()
        if isinstance(value, dict)
        for inner in value
        for odd in ODD_VALUES
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in (row, *changed)))
    found = list(
        read_source(
            FileSource(path=str(path), row_schema=schema_for(FileSource(path="x"), row, where="x").name), seed=0
        )
    )
    assert len(found) == len(changed) + 1
    assert isinstance(found[0], Candidate)
    assert all(isinstance(f.question, str) and f.question for f in found if isinstance(f, Candidate))
    assert all(f.rating is None or 0 <= f.rating <= 1 for f in found if isinstance(f, Candidate))
