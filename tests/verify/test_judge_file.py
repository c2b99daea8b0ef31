"""`judge_file`: rows in, verdicts out in order, rows that do not fit named by line."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from verify_builders import boxed, code_config, fenced

from klear_core.config.verify import MathConfig, VerifyConfig, VerifyRuntime
from klear_core.errors import ConfigError, DataError
from klear_core.evaluate.answers.judge_file import judge_file
from klear_core.types import Outcome

CFG = VerifyConfig(runtime=VerifyRuntime(math_workers=1, code_workers=1))
MATH_ROWS = [
    {"id": str(i), "response": boxed(str(i)), "reference": {"kind": "math", "answers": [str(i % 2 and i)]}}
    for i in range(4)
]
STDIN = {"kind": "code", "tests": {"type": "stdin", "cases": [{"input": "1 2", "output": "3"}]}}
CALL = {"kind": "code", "tests": {"type": "call", "fn_name": "add", "cases": [{"args": [1, 2], "expected": 3}]}}
ASSERTS = {"kind": "code", "tests": {"type": "asserts", "code": "assert add(1, 2) == 3"}}


def write_jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_rows_are_judged_in_order_and_counted(tmp_path: Path) -> None:
    summary = judge_file(write_jsonl(tmp_path / "a.jsonl", MATH_ROWS), CFG, out=tmp_path / "out.jsonl")
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["outcome"], row["score"]) for row in written] == [
        ("0", "scored", 1.0),
        ("1", "scored", 1.0),
        ("2", "scored", 0.0),
        ("3", "scored", 1.0),
    ]
    assert (summary.num_rows, summary.outcomes, summary.num_full_score, summary.mean_score) == (
        4,
        {Outcome.SCORED: 4},
        3,
        0.75,
    )


def test_an_outcome_that_is_not_the_models_doing_has_no_score(tmp_path: Path, sandbox_name: str) -> None:
    cannot_run = {"kind": "code", "tests": {"type": "asserts", "code": "assert f() == 1\nimport no_such_module"}}
    rows = [
        {"id": "no reference", "response": boxed("7"), "reference": {"kind": "math", "answers": ["\\frac{1"]}},
        {"id": "no answer", "response": "</think>", "reference": {"kind": "math", "answers": ["7"]}},
        {"id": "explodes", "response": boxed("9^{9^{9^{9}}}"), "reference": {"kind": "math", "answers": ["73"]}},
        {"id": "broken tests", "response": fenced("def f(): return 1"), "reference": cannot_run},
        {"id": "wrong", "response": boxed("8"), "reference": {"kind": "math", "answers": ["7"]}},
    ]
    cfg = VerifyConfig(math=MathConfig(cpu_s=0.5), runtime=VerifyRuntime(math_workers=1, code_workers=1))
    summary = judge_file(write_jsonl(tmp_path / "a.jsonl", rows), cfg, out=tmp_path / "out.jsonl")
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["outcome"], row["score"]) for row in written] == [
        ("no reference", "bad_reference", None),
        ("no answer", "no_answer", 0.0),
        ("explodes", "scored", 0.0),
        ("broken tests", "bad_reference", None),
        ("wrong", "scored", 0.0),
    ]
    assert summary.mean_score == 0.0
    judge_file(write_jsonl(tmp_path / "b.jsonl", rows[:2]), cfg, out=tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").column("score").to_pylist() == [None, 0.0]


def test_rows_that_do_not_fit_are_named_by_line_and_the_rest_is_judged(tmp_path: Path) -> None:
    rows = [
        MATH_ROWS[1],
        "{not json",
        "[]",
        {"id": "x"},
        {**MATH_ROWS[1], "more": 1},
        {**MATH_ROWS[1], "response": 7},
        {**MATH_ROWS[1], "reference": {"kind": "poetry"}},
        {**MATH_ROWS[1], "reference": {"kind": "math", "answers": []}},
        {**MATH_ROWS[1], "reference": {"kind": "code", "tests": {"type": "stdin", "cases": []}}},
    ]
    summary = judge_file(write_jsonl(tmp_path / "a.jsonl", rows), CFG)
    assert [bad.line for bad in summary.bad_rows] == [2, 3, 4, 5, 6, 7, 8, 9]
    assert summary.num_rows == 9 == len(summary.bad_rows) + sum(summary.outcomes.values())


def test_parquet_is_read_and_written(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(MATH_ROWS), tmp_path / "a.parquet")
    summary = judge_file(tmp_path / "a.parquet", CFG, out=tmp_path / "out.parquet")
    assert summary.outcomes == {Outcome.SCORED: 4}
    assert pq.read_table(tmp_path / "out.parquet").column("id").to_pylist() == ["0", "1", "2", "3"]


def test_compressed_lines_and_json_arrays_are_read_as_plain_lines_are(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", MATH_ROWS).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.json").write_text(json.dumps(MATH_ROWS, indent=1))
    for name in ("a.jsonl.gz", "a.json"):
        assert judge_file(tmp_path / name, CFG).outcomes == {Outcome.SCORED: 4}


def test_files_that_are_cut_short_of_another_kind_or_folders_are_errors(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(write_jsonl(tmp_path / "a.jsonl", MATH_ROWS).read_bytes())[:-12])
    with pytest.raises(DataError, match=r"cut.jsonl.gz: cannot be read beyond row"):
        judge_file(cut, CFG)
    (tmp_path / "a.xlsx").write_text("id,response,reference")
    with pytest.raises(ConfigError, match="unknown kind of file"):
        judge_file(tmp_path / "a.xlsx", CFG)
    with pytest.raises(DataError, match="a folder; `klear judge` takes one file"):
        judge_file(tmp_path, CFG)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        judge_file(tmp_path / "nowhere.jsonl", CFG)


def test_bare_programs_are_judged_without_a_response_around_them(tmp_path: Path, sandbox_name: str) -> None:
    rows = [
        {"id": 1, "response": "print(sum(map(int, input().split())))", "reference": STDIN},
        {"id": 2, "response": "def add(a, b): return a + b", "reference": CALL},
        {"id": 3, "response": "def add(a, b): return a - b", "reference": ASSERTS},
        {"id": 4, "response": "", "reference": ASSERTS},
    ]
    out = tmp_path / "out.jsonl"
    judge_file(write_jsonl(tmp_path / "a.jsonl", rows), code_config(), out=out, bare_code=True)
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["outcome"], row["score"]) for row in written] == [
        ("scored", 1.0),
        ("scored", 1.0),
        ("scored", 0.0),
        ("no_answer", 0.0),
    ]


def test_references_of_a_parquet_file_are_structs_with_the_keys_of_all_rows(tmp_path: Path) -> None:
    custom = {"id": "c", "response": boxed("1"), "reference": {"kind": "custom", "judge": "mine", "value": 1}}
    pq.write_table(pa.Table.from_pylist([*MATH_ROWS, custom]), tmp_path / "a.parquet")
    summary = judge_file(tmp_path / "a.parquet", CFG)
    assert summary.outcomes == {Outcome.SCORED: 4}
    (bad,) = summary.bad_rows
    assert (bad.line, "verify.judges has" in bad.reason) == (5, True)


def test_progress_is_told_of_each_verdict(tmp_path: Path) -> None:
    seen: list[int] = []
    judge_file(write_jsonl(tmp_path / "a.jsonl", MATH_ROWS), CFG, progress=lambda judged, read: seen.append(judged))
    assert seen == [1, 2, 3, 4]
