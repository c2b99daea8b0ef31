import json
from pathlib import Path

import pytest

from klear_core.config.data import FileSource, ProceduralSource
from klear_core.data.candidates import Candidate
from klear_core.data.sources import (
    check_questions,
    check_source,
    check_sources,
    read_questions,
    read_source,
    source_name,
)
from klear_core.errors import ConfigError
from klear_core.types import CodeReference, Dropped, MathReference

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
        (["oops\n"] * 9, r"none of the first 5 rows can be used.*rows\.jsonl:1"),
        ([{"question": "q", "answer": "?"}] * 2, "none of the first 2 rows can be used.*no '#### '"),
        ([{"prose": 1}], "no known row format"),
    ],
)
def test_a_file_that_cannot_be_used_is_found_by_its_first_rows(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        check_source(FileSource(path=file_of(tmp_path, rows)))


def test_a_missing_file_is_a_config_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.jsonl: no such file"):
        check_source(FileSource(path=str(tmp_path / "gone.jsonl")))


def test_two_sources_of_one_name_are_refused(tmp_path):
    path = file_of(tmp_path, [GOOD])
    with pytest.raises(ConfigError, match="two sources are called 'rows'"):
        check_sources([FileSource(path=path), FileSource(path=path)])
    check_sources([FileSource(path=path), FileSource(path=path, name="again")])


def test_a_set_of_bare_questions_is_fine_for_protection_only(tmp_path):
    source = FileSource(path=file_of(tmp_path, [{"question": "q", "answer": "?"}]))
    check_questions(source)
    with pytest.raises(ConfigError):
        check_source(source)
