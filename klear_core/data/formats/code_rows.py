"""Define the row formats of code sources and benchmarks: where question, tests and rating are.

`klear_core.data.formats.references` parses the tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from klear_core.config.data import FileSource, QuestionSet
from klear_core.data.datafiles import DataFile, NoSuchSplitError, data_files
from klear_core.data.formats.code_tests import LongIntegerError
from klear_core.data.formats.fields import (
    Fields,
    RowError,
    Schema,
    grade_at,
    keys,
    megabytes_in,
    no_rating,
    program_in,
    rating_at,
    seconds_in,
    text_at,
    value_at,
)
from klear_core.data.formats.references import code_reference_from_row, code_reference_from_tests, has_no_tests
from klear_core.data.readers import BrokenRow, read_rows
from klear_core.errors import DataError
from klear_core.types import CodeReference, Domain, Reference, UnverifiableReference

_OPENING = re.compile(
    r"^\s*(?:(?:You are an expert Python programmer\. )?"
    r"You will be given a question \(problem specification\) and will generate a correct "
    r"Python program that matches the specification and passes all tests\."
    r"(?: You will NOT return anything except for the program\.?)?"
    r"|Please solve the programming task below using a self-contained code snippet in a markdown code block\.)"
    r"(?:\s*(?:### )?Question:)?\s*"
)

_CLOSING = re.compile(
    r"\s*(?:(?:let's think step by step|please reason step by step),? "
    r"and (?:output|put) (?:the|your) final answer (?:with)?in \\boxed\{+\}+\.?"
    r"|### Answer: \(use the provided format with backticks\)"
    r"|Remember to put your answer on its own line after \"Answer:\"\.?)\s*$",
    re.IGNORECASE,
)
"""Instructions that follow a question in DeepScaleR, One-Shot RLVR and Qwen, in Skywork-OR1, and in DAPO-Math."""

_DAPO_OPENING = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)

_TOP_OF_CODEFORCES = 3500
"""Rating of the hardest Codeforces problems."""

_CONTEST_TESTS = ("public_tests", "private_tests", "generated_tests")
_TEST_FIELDS = frozenset(
    [
        *_CONTEST_TESTS,
        "tests",
        "input_output",
        "test_list",
        "test",
        "public_test_cases",
        "private_test_cases",
        "reward_model",
    ]
)

_APPS_LEVELS = ("introductory", "interview", "competition")
_TACO_LEVELS = ("easy", "medium", "medium_hard", "hard", "very_hard")


def without_opening(prompt: str) -> str:
    """Strip the opening of LiveCodeBench or rLLM from a prompt, so that a problem has the same text in every source."""
    return _OPENING.sub("", prompt).strip()


def without_wrapping(prompt: str) -> str:
    """Strip the instructions of RL and trace sources before and after the question."""
    return without_opening(_CLOSING.sub("", prompt.strip()).removeprefix(_DAPO_OPENING))


def reference_in(tests: object, *, fn_name: str = "") -> Reference:
    """Return the tests in any known format, or that the problem is unverifiable if there are none, or Python cannot
    read one of their integers.

    Raise RowError if they are malformed.
    """
    if has_no_tests(tests):
        return UnverifiableReference(domain=Domain.CODE, why="the source has no tests")
    try:
        return code_reference_from_tests(tests, fn_name=fn_name)
    except LongIntegerError as e:
        return UnverifiableReference(domain=Domain.CODE, why=str(e))
    except DataError as e:
        raise RowError("bad_reference", "tests", str(e)) from e


def code_reference(fields: Fields) -> Reference:
    """Return the tests of a row in any known format, or that it is unverifiable if Python cannot read one of their
    integers; raise RowError if there are none or they are malformed.
    """
    tests = fields.get("tests")
    if isinstance(tests, Mapping) and "fname" in tests:
        raise RowError("no_reference", "tests", f"are in the file {tests['fname']!r}, which is not part of the row")
    if not _TEST_FIELDS & fields.keys():
        raise RowError("no_reference", "tests", f"no field has any; looked for {', '.join(sorted(_TEST_FIELDS))}")
    try:
        return code_reference_from_row(fields)
    except LongIntegerError as e:
        return UnverifiableReference(domain=Domain.CODE, why=str(e))
    except DataError as e:
        raise RowError("bad_reference", "tests", str(e)) from e


def with_instructions(statement: str, starter: object) -> str:
    """Append instructions: complete the starter code if there is any, else use standard input and output.

    The added text has fewer words than a decontamination n-gram (9 by default), so it alone never counts as a leak.
    """
    if isinstance(starter, str) and starter.strip():
        return f"{statement}{_COMPLETE}{starter.rstrip()}\n```"
    return f"{statement}{_BY_STDIN}"


_COMPLETE = "\n\nComplete this code:\n```python\n"
_BY_STDIN = "\n\nRead standard input, write standard output."


def without_instructions(question: str) -> tuple[str, str]:
    """Return a code question without the instructions that `with_instructions` appended, and its starter code."""
    statement, found, starter = question.rpartition(_COMPLETE)
    if found and starter.endswith("\n```"):
        return statement, starter.removesuffix("\n```")
    return question.removesuffix(_BY_STDIN), ""


def _lcb_question(fields: Fields) -> str:
    """Return the question of a LiveCodeBench row, or the prompt of a QwQ evaluation row without its opening."""
    if "question_content" not in fields:
        return without_opening(text_at(fields, "prompt"))
    return with_instructions(text_at(fields, "question_content"), value_at(fields, "starter_code"))


def _leetcode_question(fields: Fields) -> str:
    """Return a LeetCodeDataset question.

    v0.3 has separate fields for description and starter code; v0.2 joins them in `query`, as rLLM does.
    """
    if "problem_description" in fields:
        return with_instructions(text_at(fields, "problem_description"), text_at(fields, "starter_code"))
    return without_opening(text_at(fields, "query"))


def _leetcode_rating(fields: Fields) -> float | None:
    grade = grade_at(fields, "difficulty")
    return grade_at(fields, "meta", "difficulty") if grade is None else grade


def _mbpp_question(fields: Fields) -> str:
    """Return the statement with the first test appended, which shows the function's name and arguments."""
    tests = value_at(fields, "test_list")
    if not isinstance(tests, list) or not tests:
        raise RowError("no_reference", "test_list", "no test")
    return f"{_mbpp_statement(fields)}\n\nIt must pass this test:\n```python\n{tests[0]}\n```"


def _mbpp_question_with_tests(fields: Fields) -> str:
    """Return the statement with all tests of `test_list`, as MBPP's authors prompt.

    Two of its 500 test problems differ by their later tests alone.
    """
    tests = value_at(fields, "test_list")
    if not isinstance(tests, list) or not tests:
        raise RowError("no_reference", "test_list", "no test")
    listed = "\n".join(map(str, tests))
    return f"{_mbpp_statement(fields)}\n\nIt must pass these tests:\n```python\n{listed}\n```"


def _mbpp_statement(fields: Fields) -> str:
    """Return the statement, which is in `text`, in the sanitised files and in MBPP+ in `prompt`."""
    return text_at(fields, "text" if "text" in fields else "prompt")


def _apps_reference(fields: Fields) -> Reference:
    tests = value_at(fields, "input_output")
    return reference_in(tests) if has_no_tests(tests) else _with_limits(code_reference(fields), fields)


def _with_limits(reference: Reference, fields: Fields) -> Reference:
    """Return the reference with the limits that the row states: numbers in Codeforces, `2.0 seconds` in TACO."""
    if not isinstance(reference, CodeReference):
        return reference
    seconds, megabytes = seconds_in(fields.get("time_limit")), megabytes_in(fields.get("memory_limit"))
    if seconds is not None:
        reference = replace(reference, time_limit_s=seconds)
    if megabytes is not None:
        reference = replace(reference, memory_limit_mb=megabytes)
    return reference


def _rllm_question(fields: Fields) -> str:
    """Return the question with the starter code that DeepCoder's LiveCodeBench rows hold beside it."""
    question = without_opening(text_at(fields, "problem"))
    starter = fields.get("starter_code")
    if not isinstance(starter, str) or not starter.strip() or starter.strip() in question:
        return question
    return with_instructions(question, starter)


def _codeforces_question(fields: Fields) -> str:
    """Return the statement with its formats, examples and note, as OpenCodeReasoning puts them together."""
    parts = [text_at(fields, "description")]
    for title, key in (("Input", "input_format"), ("Output", "output_format")):
        if fields.get(key):
            parts.append(f"{title}\n\n{text_at(fields, key)}")
    examples = fields.get("examples")
    for example in examples if isinstance(examples, list) else []:
        if isinstance(example, Mapping):
            parts.append(f"Example\n\nInput\n\n{example.get('input')}\n\nOutput\n\n{example.get('output')}")
    if fields.get("note"):
        parts.append(f"Note\n\n{text_at(fields, 'note')}")
    return with_instructions("\n\n".join(parts), None)


def _codeforces_reference(fields: Fields) -> Reference:
    """Return the official tests if they decide about a program, else why the problem is unverifiable."""
    why = ""
    if fields.get("interaction_format"):
        why = "the program talks to an interactor"
    elif fields.get("input_mode") not in (None, "stdio"):
        why = f"input mode is {fields['input_mode']!r}"
    elif fields.get("generated_checker"):
        why = "several outputs are right, and its generated checker is not run"
    elif not fields.get("official_tests") or not fields.get("official_tests_complete"):
        why = "the official tests are missing or cut"
    if why:
        return UnverifiableReference(domain=Domain.CODE, why=why)
    return _with_limits(reference_in(fields["official_tests"]), fields)


def _contests_reference(fields: Fields) -> Reference:
    """Return the tests if they decide about a program that reads standard input, else why it is unverifiable."""
    if fields.get("input_file") or fields.get("output_file"):
        why = f"the program reads {fields.get('input_file')!r} and writes {fields.get('output_file')!r}"
        return UnverifiableReference(domain=Domain.CODE, why=why)
    sets = [fields.get(key) for key in _CONTEST_TESTS]
    if all(tests is None or tests == {"input": [], "output": []} for tests in sets):
        return UnverifiableReference(domain=Domain.CODE, why="the source has no tests")
    return code_reference(fields)


def code_rating(fields: Fields) -> float | None:
    """Return the midpoint of the level's interval on [0, 1]; APPS has three levels, TACO five."""
    level = str(fields.get("difficulty")).lower()
    scale = next((s for s in (_APPS_LEVELS, _TACO_LEVELS) if level in s), None)
    return None if scale is None else (scale.index(level) + 0.5) / len(scale)


CODE_SCHEMAS = (
    Schema(  # agentica-org/DeepCoder-Preview-Dataset and what rLLM packs alike
        name="rllm_code",
        signatures=keys("problem tests"),
        question=_rllm_question,
        reference=code_reference,
        rating=no_rating,
    ),
    Schema(
        name="lcb",
        signatures=keys("question_content question_id platform starter_code", "prompt question_id contest_date tests"),
        question=_lcb_question,
        reference=code_reference,
        rating=lambda fields: grade_at(fields, "difficulty"),
    ),
    Schema(  # BAAI/TACO, codeparrot/apps
        name="apps",
        signatures=keys("question input_output"),
        question=lambda fields: with_instructions(text_at(fields, "question"), fields.get("starter_code")),
        reference=_apps_reference,
        rating=code_rating,
    ),
    Schema(  # deepmind/code_contests
        name="code_contests",
        signatures=keys("description public_tests private_tests generated_tests"),
        question=lambda fields: with_instructions(text_at(fields, "description"), None),
        reference=_contests_reference,
        rating=lambda fields: rating_at(fields, "cf_rating", top=_TOP_OF_CODEFORCES),
    ),
    Schema(  # open-r1/codeforces
        name="codeforces",
        signatures=keys("description input_format output_format examples official_tests"),
        question=_codeforces_question,
        reference=_codeforces_reference,
        rating=lambda fields: rating_at(fields, "rating", top=_TOP_OF_CODEFORCES),
    ),
    Schema(
        name="mbpp",
        signatures=keys("text test_list", "prompt test_list"),
        question=_mbpp_question,
        reference=code_reference,
        rating=no_rating,
        solution=lambda fields: program_in(fields.get("code")),
    ),
    Schema(  # the benchmark; never detected, but named
        name="mbpp_benchmark",
        signatures=(),
        question=_mbpp_question_with_tests,
        reference=code_reference,
        rating=no_rating,
    ),
    Schema(  # evalplus/mbppplus: `test` is one program, which has the tests of `test_list` and many more
        name="mbpp_plus",
        signatures=keys("prompt test_list test"),
        question=_mbpp_question_with_tests,
        reference=lambda fields: reference_in({"functional": text_at(fields, "test")}),
        rating=no_rating,
        solution=lambda fields: program_in(fields.get("code")),
    ),
    Schema(
        name="humaneval",
        signatures=keys("prompt test entry_point canonical_solution"),
        question=lambda fields: f"Complete this function:\n```python\n{text_at(fields, 'prompt')}\n```",
        reference=code_reference,
        rating=no_rating,
        solution=lambda fields: program_in(f"{fields.get('prompt')}{fields.get('canonical_solution')}"),
    ),
    Schema(
        name="leetcode",
        signatures=keys("query test entry_point"),
        question=_leetcode_question,
        reference=code_reference,
        rating=_leetcode_rating,
        # The prompt has the imports and classes that the solution uses.
        solution=lambda fields: program_in(f"{fields.get('prompt') or ''}\n{fields.get('completion') or ''}"),
    ),
)


# ---- question tables ----
# Look up the questions of OpenCodeReasoning, whose rows name a data set, a split and a row instead of the question.


ELSEWHERE = "-"
"""Value in place of a question whose licence forbids a copy."""

_QUESTION_KEYS = ("input", "question")
"""Columns of the question in the first and the second release."""
_FORMATS = {"taco": "apps", "apps": "apps", "code_contests": "code_contests", "open-r1/codeforces": "codeforces"}
"""Row formats of the data sets."""
_COLUMNS = frozenset(["question", "starter_code", "description", "input_format", "output_format", "examples", "note"])
"""Columns from which the questions of these formats are made. Columns of tests, which take gigabytes, are not read."""
_MOST_DIGITS = 18
"""Digits of the number of a row, at most."""
_STAND_IN = "a question that is looked up later"


class QuestionTables:
    """The questions of the data sets that a source's `lookup` names; a split is read when a row first refers to it.

    They are worded as if their data set were a source itself, so that the same problem from both is an exact copy.
    """

    def __init__(self, paths: Mapping[QuestionSet, str]) -> None:
        self._paths = dict[str, str](paths.items())
        self._questions: dict[tuple[str, str], list[str]] = {}
        self._missing: dict[tuple[str, str], str] = {}
        """Splits that the data sets lack, and why they are not found."""

    def completed(self, fields: Fields) -> Fields:
        """Return the row with its question, if `lookup` has its data set. Raise RowError if the question is missing."""
        key = self._key_to_fill(fields)
        return {**fields, key: self._question_of(fields)} if key else fields

    def checked(self, fields: Fields) -> Fields:
        """Return the row with a stand-in for its question, after a check that the files which hold it exist."""
        key = self._key_to_fill(fields)
        if not key:
            return fields
        self._files_of(*_place(fields))
        return {**fields, key: _STAND_IN}

    def _key_to_fill(self, fields: Fields) -> str:
        if str(fields.get("dataset")) not in self._paths:
            return ""
        return next((key for key in _QUESTION_KEYS if fields.get(key) == ELSEWHERE), "")

    def _question_of(self, fields: Fields) -> str:
        place, index = _place(fields), _index(fields)
        if place not in self._questions:
            self._questions[place] = self._read(*place)
        questions = self._questions[place]
        where = f"split {place[1]!r} of {place[0]} in {self._paths[place[0]]}"
        if index >= len(questions):
            raise RowError("question_not_found", "index", f"{index}, but {where} has {len(questions)} rows")
        if not questions[index]:
            raise RowError("question_not_found", "index", f"row {index} of {where} has no question")
        return questions[index]

    def _read(self, name: str, split: str) -> list[str]:
        """Return the questions by row, from 0; empty where a row has none or cannot be read."""
        schema = next(schema for schema in CODE_SCHEMAS if schema.name == _FORMATS[name])
        questions: list[str] = []
        for file in self._files_of(name, split):
            for row in read_rows(file.path, label=file.label, columns=_COLUMNS):
                questions.append("" if isinstance(row, BrokenRow) else _question_in(row.fields, schema))
        return questions

    def _files_of(self, name: str, split: str) -> list[DataFile]:
        """Return the files of a split. Raise RowError if the data set has none."""
        place = name, split
        if place not in self._missing:
            try:
                return data_files(FileSource(path=self._paths[name], split=split))
            except NoSuchSplitError as e:
                self._missing[place] = str(e)
        raise RowError("question_not_found", "split", self._missing[place])


def _place(fields: Fields) -> tuple[str, str]:
    return text_at(fields, "dataset"), text_at(fields, "split")


def _index(fields: Fields) -> int:
    """Return the number of the row in its split, from 0; it is published as text."""
    index = str(value_at(fields, "index"))
    if not index.isdecimal() or len(index) > _MOST_DIGITS:
        raise RowError("wrong_type", "index", f"expected the number of a row, found {index[:60]!r}")
    return int(index)


def _question_in(fields: Fields, schema: Schema) -> str:
    try:
        return schema.question(fields)
    except RowError:
        return ""
