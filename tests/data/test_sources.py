import json
import re
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from klear_core.config.data import FileSource, ProceduralSource
from klear_core.data.candidates import Candidate
from klear_core.data.formats.detect import suggested_line
from klear_core.data.sources import (
    check_questions,
    check_source,
    check_sources,
    domains_of,
    read_questions,
    read_source,
    source_name,
)
from klear_core.errors import ConfigError
from klear_core.types import CodeReference, Domain, Dropped, MathReference

ROOT = Path(__file__).parents[2]


def file_of(tmp_path, rows, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


GOOD = {"question": "What is 1+1?", "answer": "#### 2"}


def test_every_row_comes_out_as_a_candidate_or_as_a_drop(tmp_path):
    path = file_of(tmp_path, [GOOD, "oops\n", {"question": "q", "answer": "?"}, GOOD])
    found = list(read_source(FileSource(path=path), seed=0))
    assert [type(f) for f in found] == [Candidate, Dropped, Dropped, Candidate]
    assert [(f.problem_id, f.reason) for f in found if isinstance(f, Dropped)] == [
        (f"{path}:2", "not_json"),
        (f"{path}:3", "no_reference"),
    ]


def test_every_row_of_the_readmes_example_can_be_used():
    example = "tests/files/problems.jsonl"
    assert example in (ROOT / "README.md").read_text()
    found = list(read_source(FileSource(path=str(ROOT / example)), seed=0))
    assert [type(row.reference) for row in found if isinstance(row, Candidate)] == [
        MathReference,
        MathReference,
        CodeReference,
    ]


def test_a_broken_first_line_does_not_decide_the_format(tmp_path):
    found = list(read_source(FileSource(path=file_of(tmp_path, ["oops\n", GOOD])), seed=0))
    assert [type(f) for f in found] == [Dropped, Candidate]


def test_the_limit_counts_rows_whether_good_or_bad(tmp_path):
    path = file_of(tmp_path, [GOOD, "oops\n", GOOD, GOOD])
    assert len(list(read_source(FileSource(path=path, limit=3), seed=0))) == 3


def test_a_source_is_called_by_its_name_or_its_files_stem(tmp_path):
    path = file_of(tmp_path, [GOOD])
    assert source_name(FileSource(path=path)) == "rows"
    assert source_name(FileSource(path=path, name="mine")) == "mine"
    assert {c.source for c in read_source(FileSource(path=path, name="mine"), seed=0)} == {"mine"}


def test_questions_are_read_also_where_there_is_no_reference(tmp_path):
    path = file_of(tmp_path, [{"question": "q", "answer": "?"}, GOOD, {"question": "", "answer": "#### 1"}])
    found = list(read_questions(FileSource(path=path)))
    assert found[:2] == ["q", "What is 1+1?"]
    assert found[2].reason == "empty_field"


def test_checking_passes_when_one_of_the_first_rows_is_good(tmp_path):
    check_source(FileSource(path=file_of(tmp_path, ["oops\n", GOOD])))
    check_source(ProceduralSource())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no row"),
        (["oops\n"] * 9, r"none of the first 9 rows can be used.*rows\.jsonl:1"),
        ([{"question": "q", "answer": "a\nb"}] * 2, "none of the first 2 rows can be used.*no '#### '"),
        ([{"prose": 1}], "no known row format"),
    ],
)
def test_a_file_that_cannot_be_used_is_found_by_its_first_rows(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        check_source(FileSource(path=file_of(tmp_path, rows)))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"choices": ["0", "4", "2"], "answer": 1}, "options_left_out"),  # cais/mmlu: the answer is an index
        ({"options": {"A": "3", "B": "5"}, "answer": "5"}, "options_left_out"),  # GBaker/MedQA-USMLE-4-options
        ({"choices": {"text": ["3", "5"], "label": ["A", "B"]}, "answer": "B"}, "options_left_out"),
        ({"images": [{"bytes": "x"}], "answer": "5"}, "not_text"),  # hiyouga/geometry3k
        ({"image": "data:image/png;base64,AA", "answer": "5"}, "not_text"),  # cais/hle
    ],
)
def test_a_question_whose_options_or_image_are_in_another_column_is_not_one_without_them(row, reason, tmp_path):
    empty = {"choices": [], "options": None, "images": [], "image": ""}
    path = file_of(tmp_path, [{"question": "Which is prime?", **row}, {"question": "1+1?", **empty, "answer": 2}])
    lost, whole = read_source(FileSource(path=path), seed=0)
    assert (lost.reason, whole.question) == (reason, "1+1?")
    mapped = FileSource(path=path, fields={"question": "question", "answer": "answer"})
    assert [row.question for row in read_source(mapped, seed=0)] == ["Which is prime?", "1+1?"]


def test_options_that_the_question_shows_are_not_left_out(tmp_path):
    options = [["4", "5", "6"], ["$4$", "5", "6"]]  # one is written in another way
    rows = [
        {"problem": f"{i}: Which is prime? A) 4 B) 5 C) 6", "options": o, "answer": "B"} for i, o in enumerate(options)
    ]
    found = read_source(FileSource(path=file_of(tmp_path, rows)), seed=0)
    assert [row.reference.answers for row in found] == [("B",), ("B",)]


def test_a_missing_file_is_a_config_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.jsonl: no such file"):
        check_source(FileSource(path=str(tmp_path / "gone.jsonl")))


def test_two_sources_of_one_name_are_refused(tmp_path):
    path = file_of(tmp_path, [GOOD])
    with pytest.raises(ConfigError, match="two sources are called 'rows'"):
        check_sources([FileSource(path=path), FileSource(path=path)])
    check_sources([FileSource(path=path), FileSource(path=path, name="again")])


def test_a_set_of_bare_questions_is_fine_for_protection_only(tmp_path):
    source = FileSource(path=file_of(tmp_path, [{"question": "q", "answer": "a\nb"}]))
    check_questions(source)
    with pytest.raises(ConfigError):
        check_source(source)


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}]
UNKNOWN = {
    "plain": ({"prompt": "What is 2+2?", "answer": "4"}, {"question": "prompt", "answer": "answer"}),
    "cased": (
        {"id": 7, "Question": "What is 2+2?", "FinalAnswer": 4}, {"question": "Question", "answer": "FinalAnswer"}
    ),
    "spaced": (
        {"the question": "What is 2+2?", "gold label": "4"}, {"question": "the question", "answer": "gold label"}
    ),
    "solution": (
        {"query": "What is 2+2?", "solution": "We add 2 and 2.\nIt is 4.", "target": "4"},
        {"question": "query", "answer": "target"},
    ),
    "nested": (
        {"meta": {"source": "x", "ground_truth": "4"}, "data": {"problem_text": "What is 2+2?"}},
        {"question": "data.problem_text", "answer": "meta.ground_truth"},
    ),
    "JSON text": (
        {"text": "What is 2+2?", "info": json.dumps({"label": "4"})}, {"question": "text", "answer": "info.label"}
    ),
    "chat": ({"conversation": CHAT, "target": "4"}, {"question": "conversation", "answer": "target"}),
    "prompt as a chat": ({"prompt": CHAT, "label": "4"}, {"question": "prompt", "answer": "label"}),
    "another language": ({"aufgabe": "Was ist 2+2?", "nr": None, "loesung": "4"}, {"question": "aufgabe"}),
    "no answer": ({"prompt": "Prove that 2+2=4.", "id": 3}, {"question": "prompt"}),
    "code": (
        {"prompt": "Print 4.", "test_cases": [{"input": "", "output": "4"}]},
        {"question": "prompt", "tests": "test_cases"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_row_format_is_answered_by_the_line_that_reads_it(tmp_path, name):
    row, places = UNKNOWN[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="no known row format") as caught:
        check_source(FileSource(path=str(path)))
    line = re.search(r"fields = \{.*\}(, domain = \"math\")?", str(caught.value))
    settings = tomllib.loads("source = {" + line[0] + "}")["source"]
    assert settings["fields"].items() >= places.items()
    source = FileSource(path=str(path), **settings)
    check_source(source)
    (found,) = read_source(source, seed=0)
    assert "2+2" in found.question or name == "code"


def test_a_row_format_is_guessed_from_the_keys_alone_where_values_are_null():
    line = suggested_line(dict.fromkeys(["id", "prompt", "answer"]))
    assert line == 'fields = { question = "prompt", answer = "answer" }'
    assert suggested_line({"": 1, "a.b": {"c": 1}, "x": {"d.e": "f"}}).startswith("fields = { question = ")


def write_rows(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    elif path.suffix == ".csv":
        lines = [",".join("" if value is None else value for value in row.values()) for row in rows]
        path.write_text("\n".join([",".join(rows[0]), *lines]) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ({"problem": None, "answer": None}, "empty_row"),
        ({"problem": "Prove it.", "answer": None}, "no_reference"),
        ({"problem": None, "answer": "4"}, "wrong_type"),
    ],
)
def test_rows_of_nulls_at_the_start_of_a_file_stop_nothing(tmp_path, kind, first, reason):
    path = tmp_path / f"rows.{kind}"
    good = [{"problem": f"What is {i}+1?", "answer": str(i + 1)} for i in range(300)]
    write_rows(path, [first] * 250 + good)
    source = FileSource(path=str(path))
    check_source(source)
    assert domains_of(source) == {Domain.MATH}
    found = list(read_source(source, seed=0))
    assert [row.reason for row in found[:250]] == [reason] * 250
    assert all(isinstance(row, Candidate) for row in found[250:])


def test_an_empty_first_row_does_not_decide_the_format(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{}\n{"problem": null}\n' + json.dumps({"problem": "What is 2+2?", "answer": "4"}) + "\n")
    check_source(FileSource(path=str(path)))
    assert [getattr(row, "reason", "") for row in read_source(FileSource(path=str(path)), seed=0)] == [
        "empty_row",
        "empty_row",
        "",
    ]


@pytest.mark.parametrize("empty", [None, ""])
def test_answers_that_the_first_rows_lack_do_not_decide_the_format(tmp_path, empty):
    rows = [{"question": f"What is {n} + 1?", "answer": empty if n < 3 else str(n + 1), "meta": None} for n in range(9)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = FileSource(path=str(tmp_path / "a.parquet"))
    check_source(source)
    read = list(read_source(source, seed=0))
    assert [row.reason for row in read if isinstance(row, Dropped)] == ["no_reference"] * 3
    assert [row.reference.answers for row in read if isinstance(row, Candidate)] == [(str(n + 1),) for n in range(3, 9)]


def test_a_file_of_nothing_but_nulls_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    write_rows(path, [{"problem": None, "answer": None}] * 20)
    with pytest.raises(ConfigError, match="none of the first 20 rows can be used"):
        check_source(FileSource(path=str(path)))
