"""Rows as the published data sets have them, with every column that their cards list: those that fit and those that do not."""

import json

import pytest
from pydantic import ValidationError

from klear_core.config.data import FileSource
from klear_core.data.candidates import Candidate
from klear_core.data.formats.detect import schema_for
from klear_core.data.sources import is_without_references, read_source
from klear_core.types import (
    AssertTests,
    CallTests,
    CodeReference,
    Domain,
    Dropped,
    MathReference,
    StdinTests,
    UnverifiableReference,
)

TRACE = "<think>hm</think> so it is \\boxed{3}"
STDIN = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
BY_STDIN = (
    "Generate an executable Python function generated from the given prompt. The function should take stdin as input "
    "and print the output. Simply call the function after the definition."
)
BOXED = "Return your final response within \\boxed{}."
BY_CALL = (
    "Generate an executable Python function generated from the given prompt. "
    "Return the function body without invoking it at the final solution."
)


HUGE = 10**400
"""A whole number that is too large for a float."""


def talk(prompt, user="user"):
    return [{"from": user, "value": prompt}, {"from": "assistant", "value": TRACE}]


def verl(source, ability, prompt, truth, **more):
    chat = [{"content": prompt, "role": "user"}]
    reward = {"ground_truth": truth, "style": "rule"}
    return {"data_source": source, "prompt": chat, "ability": ability, "reward_model": reward, "extra_info": more}


NUMINA = {
    "problem": "What is 1+1?",
    "solution": "It is $\\boxed{2}$.",
    "answer": "2",
    "problem_type": "Algebra",
    "question_type": "math-word-problem",
    "problem_is_valid": "Yes",
    "solution_is_valid": "Yes",
    "source": "olympiads",
    "synthetic": False,
}
OPENR1 = {key: value for key, value in NUMINA.items() if not key.endswith(("_valid", "synthetic"))} | {
    "uuid": "u-1",
    "is_reasoning_complete": [True],
    "generations": [TRACE],
    "correctness_math_verify": [False],
    "correctness_llama": None,
    "finish_reasons": None,
    "correctness_count": 0,
    "messages": [{"content": "What is 1+1?", "role": "user"}, {"content": TRACE, "role": "assistant"}],
}
NUMINA_COT = {key: OPENR1[key] for key in ("source", "problem", "solution", "messages")}
METADATA = {
    "problem": "What is 1+1?",
    "deepseek_reasoning": TRACE,
    "deepseek_solution": TRACE,
    "ground_truth_solution": "So \\boxed{2}.",
    "domain": "math",
    "source": "numina_math",
    "test_cases": None,
    "starter_code": None,
}
OCR = {
    "id": "a1",
    "input": "Add.",
    "output": TRACE,
    "source": "codeforces",
    "license": "cc-by-4.0",
    "dataset": "taco",
    "split": "train",
    "difficulty": "HARD",
    "solution": "print(3)",
}
OCR_2 = {key: OCR[key] for key in ("id", "solution", "source", "license", "dataset", "split", "difficulty")} | {
    "question_id": "q1",
    "question": "-",
    "r1_generation": TRACE,
    "qwq_critique": "",
    "judgement": "right",
    "pass_rate": "1.0",
    "index": "17",
}
TACO = {
    "question": "Add.",
    "solutions": "[]",
    "starter_code": "",
    "input_output": STDIN,
    "difficulty": "VERY_HARD",
    "raw_tags": "[]",
    "name": None,
    "source": "codechef",
    "tags": "[]",
    "skill_types": "[]",
    "url": "u",
    "Expected Auxiliary Space": None,
    "time_limit": "2.0 seconds",
    "date": None,
    "picture_num": None,
    "memory_limit": "256.0 megabytes",
    "Expected Time Complexity": None,
}
APPS = {key: TACO[key] for key in ("question", "solutions", "input_output", "url", "starter_code")} | {
    "problem_id": 3,
    "difficulty": "interview",
}
CODEFORCES = {
    "id": "1/A",
    "aliases": None,
    "contest_id": "1",
    "contest_name": "Round 1",
    "contest_type": "ICPC",
    "contest_start": 1,
    "contest_start_year": 2010,
    "index": "A",
    "time_limit": 1.0,
    "memory_limit": 64.0,
    "title": "Sum",
    "description": "Add.",
    "input_format": "Two numbers.",
    "output_format": "Their sum.",
    "interaction_format": None,
    "note": "Easy.",
    "examples": [{"input": "1 2", "output": "3"}],
    "editorial": None,
    "rating": 700,
    "tags": ["math"],
    "testset_size": 1,
    "official_tests": [{"input": "1 2\n", "output": "3\n"}],
    "official_tests_complete": True,
    "input_mode": "stdio",
    "generated_checker": None,
    "executable": True,
    "generated_tests": 0,
}

NO_TESTS = {"input": [], "output": []}
CODE_CONTESTS = {
    "name": "1_A. Sum",
    "description": "Add.",
    "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
    "private_tests": NO_TESTS,
    "generated_tests": NO_TESTS,
    "source": 2,
    "difficulty": 7,
    "solutions": {"language": [3], "solution": ["print(3)"]},
    "incorrect_solutions": {"language": [], "solution": []},
    "cf_contest_id": 1,
    "cf_index": "A",
    "cf_points": 500.0,
    "cf_rating": 700,
    "cf_tags": ["math"],
    "is_description_translated": False,
    "untranslated_description": "",
    "time_limit": {"seconds": 2, "nanos": 0},
    "memory_limit_bytes": 256000000,
    "input_file": "",
    "output_file": "",
}

MATH = {
    "problem_answer AceReason-Math": {"problem": "What is 1+1?", "answer": "2"},
    "problem_answer DeepScaleR": {"problem": "What is 1+1?", "answer": "2", "solution": ""},
    "big_math": {
        "problem": "What is 1+1?",
        "answer": "2",
        "source": "gsm8k",
        "domain": ["Arithmetic"],
        "llama8b_solve_rate": 0.75,
    },
    "numinamath": NUMINA,
    "numinamath OpenR1": OPENR1,
    "numinamath in a table with OpenR1": NUMINA | {"problem_is_valid": None, "solution_is_valid": None},
    "numinamath_cot": NUMINA_COT,
    "open_thoughts_metadata": METADATA,
    "verl Skywork-OR1": verl("train-math-x", "math", "What is 1+1?", '["2"]', index=1, model_difficulty={"x": 3}),
    "verl DAPO": verl(
        "math_dapo",
        "MATH",
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is 1+1?\n\nRemember to put your "
        'answer on its own line after "Answer:".',
        "2",
        index="i",
    ),
    "klear_rl MathSub": verl("math_longcot_math_verify", "math", "What is 1+1?", "2") | {"__index_level_0__": 5},
}
del MATH["klear_rl MathSub"]["extra_info"]


def read_one(row, tmp_path, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (found,) = read_source(FileSource(path=str(path), **settings), seed=0)
    return found


@pytest.mark.parametrize("name", MATH)
def test_published_math_rows_give_question_and_answer(name, tmp_path):
    found = read_one(MATH[name], tmp_path)
    assert isinstance(found, Candidate), found
    assert (found.question, found.reference) == ("What is 1+1?", MathReference(answers=("2",)))
    assert schema_for(FileSource(path="x"), MATH[name], where="x").name == name.split()[0]


CODE = {
    "apps TACO": TACO,
    "apps APPS": APPS,
    "code_contests": CODE_CONTESTS,
    "codeforces": CODEFORCES,
    "open_thoughts_metadata": METADATA | {"domain": "code", "problem": "Add.", "test_cases": STDIN},
    "rllm_code TACO in DeepCoder": {"problem": "Add.", "tests": STDIN, "solutions": ["x"]},
    "rllm_code LiveCodeBench in DeepCoder": {
        "problem": "Add.",
        "starter_code": "",
        "tests": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin", "metadata": {}}]),
        "metadata": {},
    },
    "rllm_code PrimeIntellect in DeepCoder": {
        "problem": "Add.",
        "solutions": ["x"],
        "tests": json.dumps([{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n", "fn_name": None}]),
    },
    "verl Skywork-OR1": verl(
        "train-code-taco", "code", "Add.\n\n### Answer: (use the provided format with backticks)\n\n", STDIN
    ),
}


@pytest.mark.parametrize("name", CODE)
def test_published_code_rows_give_statement_and_tests(name, tmp_path):
    found = read_one(CODE[name], tmp_path)
    assert isinstance(found, Candidate), found
    assert found.question.startswith("Add.")
    assert "### Answer" not in found.question
    assert isinstance(found.reference.tests, StdinTests)
    assert [(c.input, c.output) for c in found.reference.tests.cases] == [("1 2\n", "3\n")]
    assert schema_for(FileSource(path="x"), CODE[name], where="x").name == name.split()[0]


CALLS = {
    "PrimeIntellect": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}],
    "Skywork": {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"},
    "LiveCodeBench": [
        {"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}},
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_the_same_in_every_packing(name, tmp_path):
    found = read_one({"problem": "Add.", "tests": json.dumps(CALLS[name])}, tmp_path)
    assert isinstance(found.reference.tests, CallTests)
    (case,) = found.reference.tests.cases
    assert (found.reference.tests.fn_name, case.args_json, case.expected_json) == ("add", "[1, 2]", "3")


def test_skyworks_assertions_run_without_its_prelude_of_imports(tmp_path):
    truth = {
        "import_prefix": "import sortedcontainers\nINF = 7\n",
        "test_code": "def check(candidate):\n    assert candidate(1) == INF\n",
        "entry_point": "Solution().add",
    }
    for tests, program in ((truth, "INF = 7"), ({"assert_case": ["assert add(1) == 2"]}, "assert add(1) == 2")):
        found = read_one(verl("train-code-leetcode", "code", "Add.", json.dumps(tests)), tmp_path)
        assert isinstance(found.reference.tests, AssertTests)
        assert program in found.reference.tests.programs[0]
        assert "sortedcontainers" not in found.reference.tests.programs[0]


TRACES = {
    "open_thoughts 114k math": (
        {"system": "s", "conversations": talk(BOXED + " Why?")},
        "math",
        "Why?",
    ),
    "open_thoughts 114k stdin": (
        {"system": "s", "conversations": talk(BY_STDIN + "Add.")},
        "code",
        "Add.\n\nRead standard input, write standard output.",
    ),
    "open_thoughts 114k call": (
        {"system": "s", "conversations": talk(BY_CALL + "Add.\ndef f():")},
        "code",
        "Add.\ndef f():",
    ),
    "open_thoughts 3": (
        {"difficulty": None, "source": "x", "domain": "math", "conversations": talk("Why?", "human")},
        "math",
        "Why?",
    ),
    "acereason_sft": ({"category": "math", "source": "x", "input": "Why?", "output": TRACE}, "math", "Why?"),
    "open_code_reasoning": (OCR, "code", "Add."),
    "open_code_reasoning_2": (OCR_2 | {"question": "Add."}, "code", "Add."),
}


@pytest.mark.parametrize("name", TRACES)
def test_prompts_of_traces_are_kept_and_their_answers_are_no_references(name, tmp_path):
    row, domain, question = TRACES[name]
    found = read_one(row, tmp_path)
    assert isinstance(found, Candidate), found
    assert (found.question, found.domain) == (question, Domain(domain))
    assert isinstance(found.reference, UnverifiableReference)
    assert schema_for(FileSource(path="x"), row, where="x").name == name.split()[0]
    assert is_without_references(FileSource(path=str(tmp_path / "rows.jsonl")))


LONG_CALL = f'{{"fn_name": "f", "inputs": [[{"7" * 4301}]], "outputs": [[1]]}}'
LONG_LINE = json.dumps({"fn_name": "f", "inputs": ["7" * 4301], "outputs": ["1"]})
UNVERIFIABLE = {
    "a proof": (NUMINA | {"answer": "proof"}, "'proof'"),
    "an answer not found": (NUMINA | {"answer": "notfound"}, "'notfound'"),
    "a proof with an answer": (NUMINA | {"question_type": "proof"}, "asks for a proof"),
    "a doubtful solution": (NUMINA | {"solution_is_valid": "Incomplete"}, "'Incomplete'"),
    "two boxes": (NUMINA_COT | {"solution": "\\boxed{1} or \\boxed{2}"}, "2 different"),
    "no box": (NUMINA_COT | {"solution": "Trivial."}, "no different boxed"),
    "no tests in TACO": (TACO | {"input_output": json.dumps({"inputs": [], "outputs": []})}, "no tests"),
    "empty tests in APPS": (APPS | {"input_output": ""}, "no tests"),
    "an integer too long for Python in APPS": (APPS | {"input_output": LONG_CALL}, "4,300 digits"),
    "an integer too long for Python in a line of APPS": (APPS | {"input_output": LONG_LINE}, "4,300 digits"),
    "an integer too long for Python in OpenThoughts": (
        METADATA | {"domain": "code", "test_cases": LONG_CALL},
        "4,300 digits",
    ),
    "no tests in OpenThoughts": (METADATA | {"domain": "code"}, "no tests"),
    "no tests in CodeContests": (CODE_CONTESTS | {"public_tests": NO_TESTS}, "no tests"),
    "cut official tests": (CODEFORCES | {"official_tests_complete": False}, "missing or cut"),
    "several right outputs": (CODEFORCES | {"generated_checker": "print(1)"}, "several outputs"),
    "an interactor": (CODEFORCES | {"interaction_format": "Ask."}, "interactor"),
    "tests in files": (CODEFORCES | {"input_mode": "file"}, "'file'"),
}


@pytest.mark.parametrize("name", UNVERIFIABLE)
def test_a_prompt_that_cannot_be_judged_is_kept_with_the_reason(name, tmp_path):
    row, why = UNVERIFIABLE[name]
    found = read_one(row, tmp_path)
    assert isinstance(found, Candidate), found
    assert isinstance(found.reference, UnverifiableReference)
    assert why in found.reference.why
    assert found.domain is found.reference.domain


@pytest.mark.parametrize(
    ("stated", "limits"),
    [
        ({"time_limit": 1.5, "memory_limit": 64.0}, (1.5, 64)),
        ({"time_limit": 2, "memory_limit": 256}, (2.0, 256)),
        ({"time_limit": None, "memory_limit": None}, (None, None)),
        ({"time_limit": 0.0, "memory_limit": 0.5}, (None, None)),
        ({"time_limit": "fast", "memory_limit": float("inf")}, (None, None)),
        ({"time_limit": HUGE, "memory_limit": HUGE}, (None, None)),
        ({"time_limit": 1e6, "memory_limit": 1e9}, (None, None)),
    ],
)
def test_the_limits_of_a_codeforces_problem_are_those_of_its_tests(stated, limits, tmp_path):
    reference = read_one(CODEFORCES | stated, tmp_path).reference
    assert (reference.time_limit_s, reference.memory_limit_mb) == limits


@pytest.mark.parametrize(
    ("stated", "limits"),
    [
        ({}, (2.0, 256)),
        ({"time_limit": "0.5 - 1 seconds", "memory_limit": "131.072 megabytes"}, (1.0, 131)),
        ({"time_limit": "1 second", "memory_limit": "1 gigabyte"}, (1.0, 1024)),
        ({"time_limit": "1500 ms", "memory_limit": "65536 KB"}, (1.5, 64)),
        ({"time_limit": 3, "memory_limit": 512.0}, (3.0, 512)),
        ({"time_limit": None, "memory_limit": None}, (None, None)),
        ({"time_limit": "", "memory_limit": "256"}, (None, None)),
        ({"time_limit": "0.0 seconds", "memory_limit": "100 bytes"}, (None, None)),
        ({"time_limit": f"{'9' * 400} seconds", "memory_limit": "2 floppies"}, (None, None)),
    ],
)
@pytest.mark.parametrize("tests", [STDIN, json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]})])
def test_the_limits_of_a_taco_problem_are_those_of_its_tests(stated, limits, tests, tmp_path):
    reference = read_one(TACO | {"input_output": tests} | stated, tmp_path).reference
    assert (reference.time_limit_s, reference.memory_limit_mb) == limits


def test_an_apps_problem_has_the_limits_of_the_settings(tmp_path):
    reference = read_one(APPS, tmp_path).reference
    assert (reference.time_limit_s, reference.memory_limit_mb) == (None, None)


MISFITS = {
    "numinamath": (NUMINA | {"problem_is_valid": "Problem not solved"}, "marked_invalid"),
    "numinamath OpenR1": (OPENR1 | {"problem": None}, "wrong_type"),
    "numinamath_cot": (NUMINA_COT | {"problem": " "}, "empty_field"),
    "problem_answer": ({"problem": "p", "answer": ""}, "no_reference"),
    "big_math": (MATH["big_math"] | {"llama8b_solve_rate": 7}, "bad_rating"),
    "open_thoughts_metadata": (METADATA | {"domain": "biology"}, "other_domain"),
    "open_thoughts science": (TRACES["open_thoughts 3"][0] | {"domain": "science"}, "other_domain"),
    "open_thoughts of unknown domain": ({"conversations": talk("Why?")}, "unknown_domain"),
    "open_thoughts of two turns": ({"conversations": talk("Why?") * 2}, "not_single_turn"),
    "open_thoughts empty": ({"conversations": talk(BY_CALL)}, "empty_field"),
    "acereason_sft": (TRACES["acereason_sft"][0] | {"category": "chat"}, "other_domain"),
    "open_code_reasoning": (OCR | {"input": "-", "index": "4"}, "question_elsewhere"),
    "open_code_reasoning_2": (OCR_2, "question_elsewhere"),
    "apps": (TACO | {"input_output": '{"inputs": ["1"], "outputs": []}'}, "bad_reference"),
    "code_contests": (CODE_CONTESTS | {"public_tests": {"input": ["1"], "output": []}}, "bad_reference"),
    "codeforces": (CODEFORCES | {"description": None}, "wrong_type"),
    "rllm_code": ({"problem": "Add.", "tests": '[{"fn_name": "f", "input": [1], "output": [2]}, 7]'}, "bad_reference"),
    "verl": (verl("math_dapo", "MATH", "q", "[]") | {"reward_model": {"ground_truth": []}}, "no_reference"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_published_row_that_does_not_fit_is_dropped_by_reason(name, tmp_path):
    row, reason = MISFITS[name]
    found = read_one(row, tmp_path)
    assert isinstance(found, Dropped), found
    assert found.reason == reason


def test_the_domain_of_a_source_stands_in_for_rows_that_do_not_state_theirs(tmp_path):
    row = {"conversations": talk("Why?"), "source": "automath"}
    assert read_one(row, tmp_path, domain="math").domain is Domain.MATH
    stated = {"conversations": talk(BY_CALL + "Add.")}
    assert read_one(stated, tmp_path, domain="math").domain is Domain.CODE


def test_an_answer_that_looks_like_a_list_is_one_answer(tmp_path):
    for truth, answers in (("[1, 2]", ("[1, 2]",)), ('["1", "2"]', ("1", "2")), ("[0,1)", ("[0,1)",))):
        assert read_one(verl("math_dapo", "MATH", "q", truth), tmp_path).reference.answers == answers


def test_ratings_of_published_sources_are_shares_of_their_scale(tmp_path):
    assert read_one(CODEFORCES, tmp_path).rating == pytest.approx(0.2)
    assert read_one(OCR, tmp_path).rating == pytest.approx(0.7)
    assert read_one(MATH["big_math"], tmp_path).rating == 0.25
    assert read_one(MATH["big_math"] | {"llama8b_solve_rate": None}, tmp_path).rating is None


MAPPED = {"question": "data.chat", "answer": "meta.truth.value", "rating": "stars", "rating_top": 5}


def mapped(row, tmp_path, **places):
    return read_one(row, tmp_path, row_schema="mapped", fields=MAPPED | places)


def test_a_declared_mapping_reads_nested_fields_messages_and_json_text(tmp_path):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "Why?"}]
    row = {"data": {"chat": chat}, "meta": json.dumps({"truth": {"value": 7.0}}), "stars": 4, "a.b": "dotted"}
    found = mapped(row, tmp_path)
    assert (found.question, found.reference, found.rating) == ("Why?", MathReference(answers=("7",)), 0.8)
    assert mapped(row, tmp_path, question="data.chat.1.content").question == "Why?"
    assert mapped(row, tmp_path, question="a.b").question == "dotted"


def test_messages_in_a_mapped_place_may_be_json_text(tmp_path):
    chat = json.dumps([{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}])
    row = {"data": {"chat": chat}, "meta": {"truth": {"value": 7}}, "stars": None}
    assert mapped(row, tmp_path).question == "Why?"
    row["data"]["chat"] = "[1, 2] and [3]: which is longer?"
    assert mapped(row, tmp_path).question == row["data"]["chat"]
    row["data"]["chat"] = "[1, 2, 3]"
    assert mapped(row, tmp_path).question == "[1, 2, 3]"


@pytest.mark.parametrize("place", ["chat", "text.q"])
def test_half_a_character_in_a_mapped_question_costs_that_row_alone(place, tmp_path):
    half = "\ud800 Why?"
    row = {"chat": json.dumps([{"role": "user", "content": half}]), "text": json.dumps({"q": half}), "a": "7"}
    for question, is_whole in ((half, False), ("\ud83d\ude00 Why?", True)):
        kept = {key: text.replace(json.dumps(half)[1:-1], json.dumps(question)[1:-1]) for key, text in row.items()}
        found = mapped(kept, tmp_path, question=place, answer="a", rating="")
        assert isinstance(found, Candidate) if is_whole else found.reason == "not_utf8"


def test_messages_of_a_table_that_has_both_layouts_are_read(tmp_path):
    empty = {"role": None, "content": None}
    chat = [message | empty for message in talk("Why?", "human")]
    assert read_one({"conversations": chat}, tmp_path, domain="math").question == "Why?"
    chat = [{"role": "user", "content": "Why?", "from": None, "value": None}]
    assert read_one({"conversations": chat}, tmp_path, domain="math").question == "Why?"


def test_code_contests_problems_that_use_files_are_kept_without_their_tests(tmp_path):
    for name in ("input_file", "output_file"):
        found = read_one(CODE_CONTESTS | {name: "sum.txt"}, tmp_path)
        assert isinstance(found.reference, UnverifiableReference)
        assert "sum.txt" in found.reference.why


def test_a_declared_mapping_reads_tests_and_starter_code(tmp_path):
    row = {"q": "Add.", "t": STDIN, "name": "", "start": "def add():"}
    places = {"question": "q", "tests": "t", "starter_code": "start"}
    found = read_one(row, tmp_path, row_schema="mapped", fields=places)
    assert isinstance(found.reference, CodeReference)
    assert found.question.endswith("```python\ndef add():\n```")
    bare = read_one(row, tmp_path, row_schema="mapped", fields={"question": "q"}, domain="code")
    assert isinstance(bare.reference, UnverifiableReference)


@pytest.mark.parametrize(
    ("row", "reason", "place"),
    [
        ({"data": {}, "meta": {}}, "missing_field", "data.chat"),
        ({"data": {"chat": ""}, "meta": {}}, "empty_field", "data.chat"),
        ({"data": {"chat": "q"}, "meta": {"truth": {"value": None}}}, "no_reference", "meta.truth.value"),
        ({"data": {"chat": "q"}, "meta": {"truth": {"value": {}}}}, "wrong_type", "meta.truth.value"),
        ({"data": {"chat": "q"}, "meta": {"truth": {"value": 1}}, "stars": 9}, "bad_rating", "stars"),
    ],
)
def test_a_row_that_a_mapping_does_not_fit_is_dropped_with_its_place(row, reason, place, tmp_path):
    found = mapped(row | {"stars": row.get("stars")}, tmp_path)
    assert (found.reason, f": {place}: " in found.detail) == (reason, True)


def test_a_mapped_answer_can_be_any_value_for_a_judge_of_ones_own(tmp_path):
    row = {"q": "Reach 24.", "truth": {"numbers": [2, 6, 6], "target": 24}}
    places = {"question": "q", "answer": "truth", "judge": "countdown"}
    found = read_one(row, tmp_path, row_schema="mapped", fields=places).reference
    assert (found.judge, json.loads(found.value_json), found.domain) == ("countdown", row["truth"], "math")
    with pytest.raises(ValidationError, match="judge = 'countdown' needs `answer`"):
        read_one(row, tmp_path, row_schema="mapped", fields={"question": "q", "judge": "countdown"})


@pytest.mark.parametrize("settings", [{"row_schema": "mapped"}, {"row_schema": "gsm8k", "fields": {"question": "q"}}])
def test_a_mapping_and_its_format_belong_together(settings):
    with pytest.raises(ValueError, match="belong together"):
        FileSource(path="x", **settings)


ODD_VALUES = (None, True, 7, -1, HUGE, 1e400, "", "text", "[", "9" * 5000, [], [None], [{}], {}, {"a": []}, [["x"]])


@pytest.mark.parametrize("row", [*MATH.values(), *CODE.values(), *(row for row, _, _ in TRACES.values())])
def test_odd_values_in_published_rows_lead_to_a_drop_or_a_problem_never_to_a_crash(row, tmp_path):
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
    name = schema_for(FileSource(path="x"), row, where="x").name
    found = list(read_source(FileSource(path=str(path), row_schema=name), seed=0))
    assert len(found) == len(changed) + 1
    assert all(f.question for f in found if isinstance(f, Candidate))
