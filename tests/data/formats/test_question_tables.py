"""OpenCodeReasoning names its questions by data set, split and row; they are looked up in rows of the published layout."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from klear_core.artifacts.records import read_shards
from klear_core.config.curate import CurateConfig
from klear_core.config.data import FileSource
from klear_core.config.data_jobs import CurateJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.data.candidates import Candidate
from klear_core.data.curation.curate import curate
from klear_core.data.sources import check_source, domains_of, read_source
from klear_core.errors import ConfigError
from klear_core.metrics import NullTelemetry
from klear_core.types import Domain, Dropped, Problem

NO_TESTS = {"input": [], "output": []}
STDIN = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})


def taco(question: str) -> dict[str, object]:
    return {"question": question, "solutions": "[]", "starter_code": "", "input_output": STDIN, "difficulty": "EASY"}


def contest(description: str) -> dict[str, object]:
    tests = dict.fromkeys(("public_tests", "private_tests", "generated_tests"), NO_TESTS)
    return {"name": "1_A. Sum", "description": description, "difficulty": 7, **tests}


def codeforces(description: str | None) -> dict[str, object]:
    formats = {"input_format": "Two numbers.", "output_format": "Their sum.", "note": None, "editorial": None}
    return {"id": "1/A", "description": description, **formats, "examples": [{"input": "1 2", "output": "3"}]} | {
        "official_tests": [{"input": "1 2", "output": "3"}],
    }


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, str]:
    """The four data sets as they are published: shards of Arrow and Parquet, and JSON lines, by split."""
    root = tmp_path / "sets"
    for name, rows in (
        ("taco/train/data-00000-of-00002.arrow", [taco("Add."), taco("Subtract.")]),
        ("taco/train/data-00001-of-00002.arrow", [taco("Multiply."), taco("")]),
        ("taco/test/data-00000-of-00001.arrow", [taco("Divide.")]),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(root / name), "wb") as f, pa.ipc.new_stream(f, table.schema) as writer:
            writer.write_table(table)
    for name, row in (
        ("code_contests/data/train-00000-of-00001.parquet", contest("Sort.")),
        ("codeforces/data/train-00000-of-00001.parquet", codeforces("Sum up.")),
    ):
        (root / name).parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist([row]), root / name)
    (root / "apps").mkdir()
    (root / "apps" / "train.jsonl").write_text(json.dumps(taco("Reverse.")) + "\n")
    (root / "apps" / "test.jsonl").write_text("{half a row\n" + json.dumps(taco("Rotate.")) + "\n")
    paths = {name: str(root / name) for name in ("taco", "apps", "code_contests")}
    return paths | {"open-r1/codeforces": str(root / "codeforces")}


def first_release(dataset: str, split: str, index: str, *, question: str = "-") -> dict[str, object]:
    return {
        "id": f"{dataset}-{split}-{index}", "input": question, "output": "<think>hm</think> print(3)",
        "source": "codeforces", "license": "cc-by-4.0", "dataset": dataset, "split": split, "difficulty": "HARD",
        "solution": "print(3)", "index": index,
    }  # fmt: skip


def second_release(dataset: str, split: str, index: str) -> dict[str, object]:
    row = first_release(dataset, split, index)
    renamed = {"question": row.pop("input"), "r1_generation": row.pop("output")}
    return row | renamed | {"question_id": "q1", "qwq_critique": "", "judgement": "right", "pass_rate": "1.0"}


def source_of(tmp_path: Path, rows: list[dict[str, object]], **settings: object) -> FileSource:
    file = tmp_path / "ocr.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileSource.model_validate({"path": str(file)} | settings)


PLACES = {
    ("taco", "train", "0"): "Add.",
    ("taco", "train", "2"): "Multiply.",
    ("taco", "test", "0"): "Divide.",
    ("apps", "train", "0"): "Reverse.",
    ("apps", "test", "1"): "Rotate.",
    ("code_contests", "train", "0"): "Sort.",
    ("open-r1/codeforces", "train", "0"): "Sum up.\n\nInput\n\nTwo numbers.\n\nOutput\n\nTheir sum.",
}


@pytest.mark.parametrize("release", [first_release, second_release])
def test_a_question_is_looked_up_by_data_set_split_and_row(sets, tmp_path, release):
    source = source_of(tmp_path, [release(*place) for place in PLACES], lookup=sets)
    found = list(read_source(source, seed=0))
    assert all(isinstance(one, Candidate) for one in found), found
    for candidate, question in zip(found, PLACES.values(), strict=True):
        assert candidate.question.startswith(question)
        assert candidate.domain is Domain.CODE


def test_a_looked_up_question_is_the_one_that_its_own_data_set_gives(sets, tmp_path):
    (found,) = read_source(source_of(tmp_path, [first_release("taco", "train", "1")], lookup=sets), seed=0)
    own = list(read_source(FileSource(path=sets["taco"], split="train"), seed=0))[1]
    assert (found.question, found.problem_id) == (own.question, own.problem_id)


def test_a_question_that_is_there_is_not_looked_up(tmp_path):
    row = first_release("taco", "train", "0", question="Negate.")
    (found,) = read_source(source_of(tmp_path, [row], lookup={"taco": "no/such/folder"}), seed=0)
    assert found.question == "Negate."


MISSES = {
    ("taco", "train", "4"): ("question_not_found", "has 4 rows"),
    ("taco", "train", "3"): ("question_not_found", "has no question"),
    ("apps", "test", "0"): ("question_not_found", "has no question"),
    ("taco", "train", "-1"): ("wrong_type", "'-1'"),
    ("taco", "train", "9" * 5000): ("wrong_type", "'9999"),
    ("leetcode", "train", "0"): ("question_elsewhere", "of leetcode"),
}


@pytest.mark.parametrize("place", MISSES, ids=lambda place: "-".join(place)[:30])
def test_a_row_without_a_match_is_dropped_by_reason_with_its_id(sets, tmp_path, place):
    (found,) = read_source(source_of(tmp_path, [first_release(*place)], lookup=sets), seed=0)
    reason, detail = MISSES[place]
    assert isinstance(found, Dropped)
    assert found.reason == reason
    assert detail in found.detail
    assert f"(id {'-'.join(place)[:80]})" in found.detail


def test_a_split_that_is_not_there_costs_its_rows_alone(sets, tmp_path):
    rows = [first_release("taco", split, "0") for split in ("train", "valid", "valid", "test")]
    source = source_of(tmp_path, rows, lookup=sets)
    check_source(source)
    found = list(read_source(source, seed=0))
    assert [isinstance(one, Candidate) for one in found] == [True, False, False, True]
    assert {(one.reason, "of split 'valid'" in one.detail) for one in found[1:3]} == {("question_not_found", True)}


def test_a_file_of_one_split_holds_no_questions_of_another(sets, tmp_path):
    rows = [first_release("apps", split, "0") for split in ("train", "test")]
    source = source_of(tmp_path, rows, lookup={"apps": f"{sets['apps']}/train.jsonl"})
    first, other = read_source(source, seed=0)
    assert first.question.startswith("Reverse.")
    assert (other.reason, "of split 'test'" in other.detail) == ("question_not_found", True)


def test_without_lookup_the_drop_says_what_to_set(tmp_path):
    (found,) = read_source(source_of(tmp_path, [second_release("taco", "train", "0")]), seed=0)
    assert (found.reason, "`lookup`" in found.detail) == ("question_elsewhere", True)


def test_the_check_before_a_run_reads_no_table_but_finds_a_split_that_is_not_there(sets, tmp_path):
    beyond = source_of(tmp_path, [first_release("taco", "train", "99")], lookup=sets)
    check_source(beyond)  # one row of the table is enough to know that it can be read
    assert domains_of(beyond) == {Domain.CODE}
    with pytest.raises(ConfigError, match="holds no data file of split 'valid'"):
        check_source(source_of(tmp_path, [first_release("taco", "valid", "0")], lookup=sets))


def test_a_second_curation_in_one_process_reads_a_table_that_has_changed(sets, tmp_path):
    source = source_of(tmp_path, [first_release("apps", "train", "0")], lookup=sets)
    cfg = CurateConfig(sources=(source,))
    questions = []
    for statement in ("Reverse.", "Turn around."):
        (Path(sets["apps"]) / "train.jsonl").write_text(json.dumps(taco(statement)) + "\n")
        (tmp_path / "bench").mkdir(exist_ok=True)
        workdir = tmp_path / statement
        curate(cfg, benchmarks=tmp_path / "bench", seed=0, workdir=workdir, telemetry=NullTelemetry())
        questions += [problem.question for problem in read_shards(workdir / "problems", Problem)]
    assert [question.partition("\n")[0] for question in questions] == ["Reverse.", "Turn around."]


def test_a_curation_depends_on_the_content_of_the_tables(sets, tmp_path):
    source = source_of(tmp_path, [first_release("taco", "train", "0")], lookup=sets)
    config = PipelineConfig.model_validate({"curate": {"sources": [source.model_dump()]}})
    assert {*sets.values(), source.path} == {*CurateJob.of(config, config.curate).files()}
