"""Published test formats: each is read into what it says, a malformed one is refused with a reason."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from klear_core.config.data import FileSource
from klear_core.data.candidates import Candidate
from klear_core.data.formats.references import (
    code_reference_from_row,
    code_reference_from_tests,
    reference_from_cell,
    reference_from_json,
)
from klear_core.data.sources import read_source
from klear_core.errors import DataError
from klear_core.types import (
    AssertTests,
    CallCase,
    CallTests,
    CodeReference,
    CustomReference,
    Domain,
    MathReference,
    StdinCase,
    StdinTests,
    domain_of,
)

SHARED = Path(__file__).parents[3].parent / "shared"
ONE_STDIN = StdinTests(cases=(StdinCase(input="1 2\n", output="3\n"),))
DEEP = "-" * 100_000 + "1"
"""A program that is nested more deeply than Python's parser can read."""
ONE_CALL = CallTests(fn_name="add", cases=(CallCase(args_json="[1, 2]", expected_json="3"),))


def packed(cases: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


LCB_STDIN = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
LCB_CALL = [{"input": "1\n2", "output": "3", "testtype": "functional"}]

ROWS: dict[str, tuple[dict[str, Any], object]] = {
    "APPS": ({"input_output": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})}, ONE_STDIN),
    "APPS with a function": (
        {"input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]})},
        ONE_CALL,
    ),
    "TACO with a function": ({"input_output": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}}, ONE_CALL),
    "lines as lists": ({"tests": {"inputs": [["1 2", ""]], "outputs": [["3", ""]]}}, ONE_STDIN),
    "KlearReasoner": (
        {"reward_model": {"ground_truth": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})}},
        ONE_STDIN,
    ),
    "DeepCoder": ({"tests": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}])}, ONE_STDIN),
    "DeepCoder with a function": (
        {"tests": [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}]},
        ONE_CALL,
    ),
    "LiveCodeBench public": ({"public_test_cases": json.dumps(LCB_STDIN), "private_test_cases": ""}, ONE_STDIN),
    "LiveCodeBench private": ({"public_test_cases": "[]", "private_test_cases": packed(LCB_STDIN)}, ONE_STDIN),
    "LiveCodeBench function": (
        {"public_test_cases": json.dumps(LCB_CALL), "metadata": '{"func_name": "add"}'},
        ONE_CALL,
    ),
    "CodeContests": (
        {
            "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": None,
        },
        ONE_STDIN,
    ),
    "rLLM functional": (
        {"tests": {"functional": "assert add(1, 2) == 3"}},
        AssertTests(programs=("assert add(1, 2) == 3",)),
    ),
    "MBPP": (
        {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": "import math"},
        AssertTests(programs=("import math\nassert add(1, 2) == 3",)),
    ),
    "Klear stdin": (
        {"kind": "code", "tests": {"type": "stdin", "cases": [{"input": "1 2\n", "output": "3\n"}]}},
        ONE_STDIN,
    ),
    "Klear call": (
        {"kind": "code", "tests": {"type": "call", "fn_name": "add", "cases": [{"args": [1, 2], "expected": 3}]}},
        ONE_CALL,
    ),
}


@pytest.mark.parametrize("source", ROWS)
def test_a_published_row_is_read(source: str) -> None:
    row, tests = ROWS[source]
    assert code_reference_from_row(row).tests == tests


def test_limits_of_the_problem_are_kept() -> None:
    row = {
        "public_tests": {"input": ["1"], "output": ["1"]},
        "time_limit": {"seconds": 2, "nanos": 500_000_000},
        "memory_limit_bytes": 256 << 20,
    }
    reference = code_reference_from_row(row)
    assert (reference.time_limit_s, reference.memory_limit_mb) == (2.5, 256)


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ({"seconds": None, "nanos": None}, None),
        ({"seconds": None, "nanos": 500_000_000}, 0.5),
        ({"seconds": 10**400, "nanos": 0}, None),
        ({"seconds": "2", "nanos": {}}, None),
        pytest.param(10**400, None, id="huge"),
        (float("inf"), None),
        (-1, None),
    ],
)
def test_a_limit_that_no_program_could_have_is_none(limit: object, seconds: float | None) -> None:
    tests = {"input": ["1"], "output": ["1"]}
    row = {"public_tests": tests, "time_limit": limit, "memory_limit_bytes": 10**400}
    reference = code_reference_from_row(row)
    assert (reference.time_limit_s, reference.memory_limit_mb) == (seconds, None)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), pytest.param(10**400, id="huge"), True, "fast"])
def test_a_timeout_that_no_program_could_have_is_none(timeout: object) -> None:
    tests = {"inputs": ["1"], "outputs": ["1"]}
    assert code_reference_from_tests(tests | {"timeout": 4}).time_limit_s == 4.0
    assert code_reference_from_tests(tests | {"timeout": timeout}).time_limit_s is None


def test_humaneval_keeps_the_prompts_helpers_and_not_the_function_under_test() -> None:
    prompt = 'import math\n\ndef poly(x):\n    return x + 1\n\ndef root(y):\n    """Where poly is y."""\n'
    row = {
        "prompt": prompt,
        "entry_point": "root",
        "test": "def check(candidate):\n    assert poly(candidate(3)) == 3\n",
    }
    tests = code_reference_from_row(row).tests
    assert isinstance(tests, AssertTests)
    assert "def poly" in tests.programs[0]
    assert "def root" not in tests.programs[0]
    assert tests.programs[0].endswith("check(root)")


@pytest.mark.parametrize("prompt", [DEEP, "x = '" + chr(0xD800) + "'", "x = '" + chr(0) + "'"])
def test_a_prompt_that_is_no_program_gives_no_helpers(prompt: str) -> None:
    row = {"prompt": prompt, "entry_point": "root", "test": "def check(f):\n    assert f"}
    tests = code_reference_from_row(row).tests
    assert tests == AssertTests(programs=("\ndef check(f):\n    assert f\ncheck(root)",))


def test_plain_pytest_functions_are_called() -> None:
    program = "from solution import add\nimport pytest\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    tests = code_reference_from_tests({"pytest": program}).tests
    assert tests == AssertTests(programs=("def test_add():\n    assert add(1, 2) == 3\ntest_add()",))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "empty"),
        ({}, "empty"),
        ({"inputs": [], "outputs": []}, "empty"),
        ({"inputs": ["1"], "outputs": []}, "one length"),
        ({"inputs": "1", "outputs": "1"}, "lists"),
        ({"inputs": [1], "outputs": [2]}, "text"),
        ({"inputs": ["1"], "outputs": ["1"], "surprise": 1}, "surprise"),
        ({"inputs_file": "a", "outputs_file": "b"}, "inline"),
        ({"surprise": 1}, "surprise"),
        ("{not json", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (7, "int"),
        ([{"input": "1"}], "unknown|output|object"),
        ([{"input": "1", "output": 2}], "text"),
        ({"functional": ""}, "assertions"),
        ({"functional": []}, "assertions"),
        ({"functional": "assert ("}, "not Python"),
        ({"pytest": "def test_x(tmp_path):\n    assert 1"}, "fixtures"),
        ({"functional": DEEP}, "not Python"),
        ({"pytest": f"def test_x():\n    assert {DEEP}"}, "not Python"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "list"),
    ],
)
def test_malformed_tests_are_refused_with_a_reason(value: object, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        code_reference_from_tests(value)


@pytest.mark.parametrize(
    "payload",
    ["###", base64.b64encode(b"nonsense").decode(), base64.b64encode(zlib.compress(pickle.dumps(Path))).decode()],
)
def test_a_packed_column_that_is_no_text_is_refused(payload: str) -> None:
    with pytest.raises(DataError, match="private_test_cases"):
        code_reference_from_row({"public_test_cases": "[]", "private_test_cases": payload})


def test_references_in_klears_form() -> None:
    assert reference_from_json({"kind": "math", "answers": ["1", "one"]}) == MathReference(answers=("1", "one"))
    full = {
        "kind": "code",
        "tests": ROWS["Klear stdin"][0]["tests"],
        "time_limit_s": 1,
        "memory_limit_mb": 64,
        "is_order_free": True,
        "checker": "x",
    }
    assert reference_from_json(full) == CodeReference(
        tests=ONE_STDIN, time_limit_s=1.0, memory_limit_mb=64, is_order_free=True, checker="x"
    )


@pytest.mark.parametrize(
    "value",
    [
        None,
        "73",
        {},
        {"kind": "math"},
        {"kind": "math", "answers": []},
        {"kind": "math", "answers": [7]},
        {"kind": "math", "answers": ["7"], "more": 1},
        {"kind": "code"},
        {"kind": "code", "tests": {"type": "magic"}},
        {"kind": "code", "tests": {"type": ["stdin"]}},
        {"kind": "code", "tests": {"type": "stdin", "cases": []}},
        {"kind": "code", "tests": {"type": "stdin", "cases": [{"input": "1"}]}},
        {"kind": "code", "tests": {"type": "stdin", "cases": [{"input": "1", "output": "1"}], "more": 1}},
        {"kind": "code", "tests": {"type": "call", "fn_name": "a b", "cases": [{"args": [], "expected": 1}]}},
        {"kind": "code", "tests": {"type": "asserts", "code": "assert 1"}, "time_limit_s": -1},
        {"kind": "code", "tests": {"type": "asserts", "code": "assert 1"}, "time_limit_s": 10**400},
        {"kind": "code", "tests": {"type": "asserts", "code": "assert 1"}, "memory_limit_mb": 1.5},
        {"kind": "code", "tests": {"type": "asserts", "code": "assert 1"}, "memory_limit_mb": 10**400},
        {"kind": "code", "tests": {"type": "asserts", "code": "assert 1"}, "checker": 1},
        {"kind": "code", "tests": {"type": "asserts", "code": "assert 1"}, "surprise": 1},
    ],
)
def test_references_that_do_not_fit_are_refused(value: object) -> None:
    with pytest.raises(DataError):
        reference_from_json(value)


@pytest.mark.parametrize(
    "name", ["code-contests/code_contests.json", "code-codeforces/codeforces.json", "code-rllm-leetcode/leetcode.json"]
)
def test_published_files_are_read_whole(name: str) -> None:
    path = SHARED / "data" / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    for row in json.loads(path.read_text()):
        code_reference_from_row(row)


def test_rows_of_klears_form_are_read_from_a_table_which_has_the_keys_of_all_rows(tmp_path: Path) -> None:
    references = [
        {"kind": "math", "answers": ["7"]},
        {"kind": "code", "tests": {"type": "call", "fn_name": "f", "cases": [{"args": [1], "expected": 2}]}},
        {"kind": "custom", "judge": "puzzle", "value": {"target": 24, "hint": None}},
    ]
    rows = [{"question": f"Problem {i}?", "reference": one} for i, one in enumerate(references)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    texts = [row | {"reference": json.dumps(row["reference"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "texts.parquet")
    for name in ("rows.parquet", "texts.parquet"):
        found = list(read_source(FileSource(path=str(tmp_path / name)), seed=0))
        assert [one.reference for one in found if isinstance(one, Candidate)] == list(
            map(reference_from_json, references)
        )


def test_tests_that_are_stored_elsewhere_are_refused_with_the_file_to_read() -> None:
    stored = {"path": "a.tests", "offset": 0, "num_bytes": 9, "kind": "stdin", "num_tests": 1, "num_chars": 9}
    with pytest.raises(DataError, match=r"read kept\.parquet of `klear curate`"):
        reference_from_cell(json.dumps({"tests": stored, "time_limit_s": None}))


@pytest.mark.parametrize("text", ['{"judge": "a", "domain": "math", "value_json": "{"}', "[1]", "{", '{"tests": []}'])
def test_json_text_that_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(DataError):
        reference_from_cell(text)


def test_tests_given_as_a_list_are_refused_as_a_list() -> None:
    value = {"kind": "code", "tests": [{"type": "stdin", "inputs": ["1"], "outputs": ["2"]}]}
    with pytest.raises(DataError, match="must be one object with a type, not list"):
        reference_from_json(value)


def test_a_reference_for_a_judge_of_ones_own_holds_any_json_value() -> None:
    value = {"target": 24, "numbers": [2, 6, 6.5], "note": "π"}
    found = reference_from_json({"kind": "custom", "judge": "countdown", "value": value})
    assert isinstance(found, CustomReference)
    assert (found.judge, found.domain, json.loads(found.value_json)) == ("countdown", Domain.MATH, value)
    assert domain_of(reference_from_json({"kind": "custom", "judge": "x", "value": None, "domain": "code"})) == "code"


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ({"kind": "custom", "value": 1}, "reference must be"),
        ({"kind": "custom", "judge": "countdown"}, "reference must be"),
        ({"kind": "custom", "judge": "countdown", "value": 1, "weight": 2}, "reference must be"),
        ({"kind": "custom", "judge": "a b", "value": 1}, "must be the name of one of verify.judges, not 'a b'"),
        ({"kind": "custom", "judge": "a\n", "value": 1}, "must be the name of one of verify.judges"),
        ({"kind": "custom", "judge": "a", "value": 1, "domain": "art"}, "must be math or code, not 'art'"),
        ({"kind": "custom", "judge": "a", "value": {1, 2}}, "reference.value must be JSON"),
        ({"kind": "countdown", "value": 1}, "reference must be"),
    ],
)
def test_a_reference_for_a_judge_of_ones_own_in_another_form_is_refused(reference: object, why: str) -> None:
    with pytest.raises(DataError, match=why):
        reference_from_json(reference)
