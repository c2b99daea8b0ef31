"""`klear curate` does the curation stage alone on files, and says of every row what became of it."""

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from curations import Stopper

from flows.curate_files import config_of
from klear_core.data.curation.curate import curate

REPEATED = "Tom has 3 red apples and 4 green apples in his bag. How many apples does Tom have in his bag?"
LEAKED = "What is the sum of all integer bases b greater than nine for which seventeen divides ninety seven?"
ROWS = [
    {"question": REPEATED, "answer": "3 + 4 = 7\n#### 7"},
    {"question": "A car drives 60 miles in 2 hours. How fast does it drive?", "answer": "#### 30"},
    {"question": REPEATED.upper(), "answer": "#### 7"},
    {"question": LEAKED, "answer": "#### 70"},
    {"question": "What is missing here?", "answer": "nothing was worked out"},
]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Five training rows, of which two can stay, and a benchmark of one question."""
    train, benchmark = tmp_path / "train.jsonl", tmp_path / "aime.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    benchmark.write_text(json.dumps({"question": LEAKED, "answer": "#### 70"}) + "\n")
    return train, benchmark


def test_every_row_is_kept_or_dropped_with_its_place_and_reason(klear, files, tmp_path: Path):
    train, benchmark = files
    said = klear("curate", train, "--benchmark", benchmark, "--out", tmp_path / "out")
    assert said.status == 0, said.err
    kept = pq.read_table(tmp_path / "out/kept.parquet").to_pylist()
    dropped = pq.read_table(tmp_path / "out/dropped.parquet").to_pylist()
    assert sorted(row["row"].rpartition(":")[2] for row in kept) == ["1", "2"]
    told = {row["row"].rpartition(":")[2]: (row["step"], row["reason"]) for row in dropped}
    assert told == {
        "3": ("dedup", "repeated_question"),
        "4": ("decontaminate", "in_aime"),
        "5": ("read", "no_reference"),
    }
    by_row = {row["row"].rpartition(":")[2]: row for row in (*kept, *dropped)}
    assert by_row["3"]["matched_id"] == by_row["1"]["problem_id"]
    assert by_row["4"]["matched_id"] == "row 1"
    assert Counter(row["source"] for row in (*kept, *dropped)) == {"train": 5}
    page = (tmp_path / "out/report.html").read_text()
    assert "5 rows were read and 2 problems are kept" in page
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == [
        "dropped.parquet",
        "kept.parquet",
        "leaks.html",
        "report.html",
    ]


def test_a_run_that_was_stopped_is_continued_and_its_working_files_are_deleted(klear, files, tmp_path: Path):
    train, benchmark = files
    stopped, fresh = tmp_path / "stopped", tmp_path / "fresh"
    config = config_of([str(train)], [str(benchmark)], [])
    (stopped / ".work" / "benchmarks").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        curate(
            config.curate,
            benchmarks=stopped / ".work" / "benchmarks",
            seed=config.seed,
            workdir=stopped / ".work",
            telemetry=Stopper(stop_at=3),
        )
    for out in (stopped, fresh):
        assert klear("curate", train, "--benchmark", benchmark, "--out", out).status == 0
    made = [{path.name: path.read_bytes() for path in out.iterdir()} for out in (stopped, fresh)]
    assert made[0].keys() == made[1].keys() == {"kept.parquet", "dropped.parquet", "report.html", "leaks.html"}
    assert all(made[0][name] == made[1][name] for name in ("kept.parquet", "dropped.parquet", "leaks.html"))


def test_files_of_one_name_are_called_by_their_folders_too(klear, files, tmp_path: Path):
    train, benchmark = files
    copies = [tmp_path / "a" / "x" / "train.jsonl", tmp_path / "b" / "x" / "train.jsonl", tmp_path / "c" / "aime.jsonl"]
    for copy, original in zip(copies, (train, train, benchmark), strict=True):
        copy.parent.mkdir(parents=True)
        copy.write_bytes(original.read_bytes())
    words = ["--benchmark", benchmark, "--benchmark", copies[2], "--out", tmp_path / "out"]
    said = klear("curate", train, copies[0], copies[1], *words)
    assert said.status == 0, said.err
    dropped = pq.read_table(tmp_path / "out/dropped.parquet").to_pylist()
    assert {row["source"] for row in dropped} == {f"{tmp_path.name}/train", "a/x/train", "b/x/train"}
    assert {row["reason"] for row in dropped if row["step"] == "decontaminate"} == {f"in_{tmp_path.name}/aime"}


def test_square_brackets_in_rows_and_names_are_shown_as_they_are(klear, tmp_path: Path):
    ratings = [3] * 9 + ["[/INST]"]
    train, benchmark = tmp_path / "[b]train.jsonl", tmp_path / "[i]aime.jsonl"
    rows = [{"problem": f"{LEAKED[:-1]} {i}?", "answer": "1", "difficulty": r} for i, r in enumerate(ratings)]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    benchmark.write_text(json.dumps({"problem": rows[0]["problem"], "answer": "1"}) + "\n")
    rules = ["--set", 'curate.decontaminate.rules=["near"]', "--set", "curate.decontaminate.near_share=1"]
    said = klear("curate", train, "--benchmark", benchmark, "--out", tmp_path / "[u]out", *rules)
    assert said.status == 0, said.err
    assert "str '[/INST]'" in said.out
    assert "[b]train" in said.out
    assert "in [i]aime 1" in said.out
    assert "[u]out/kept.parquet" in said.out


def test_it_can_be_repeated_and_gives_the_same_bytes(klear, files, tmp_path: Path):
    def made() -> list[bytes]:
        assert klear("curate", files[0], "--out", tmp_path / "out").status == 0
        return [(tmp_path / "out" / name).read_bytes() for name in ("kept.parquet", "dropped.parquet", "report.html")]

    assert made() == made()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["no-such.jsonl", "--out", "out"], "no-such.jsonl: no such file"),
        (["", "--out", "out"], "'' is no path"),
        (["caf\udce9.jsonl", "--out", "out"], "'caf\\udce9.jsonl': "),
        (["train.jsonl", "--out", "."], "has other files (aime.jsonl, train.jsonl)"),
        (["train.jsonl", "--out", "out", "--set", "rl.num_steps=3"], "only curate.* settings and the seed"),
        (["train.jsonl", "--out", "out", "--set", "curate.dedup.neer=1"], "neer"),
        (["train.jsonl", "--benchmark", "none.jsonl", "--out", "out"], "none.jsonl: no such file"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(klear, files, monkeypatch, words, error):
    monkeypatch.chdir(files[0].parent)
    said = klear("curate", *words)
    assert said.status != 0
    assert error in said.err
    assert not (files[0].parent / "out" / "kept.parquet").exists()


def test_kept_problems_of_every_kind_can_be_curated_again(klear, tmp_path: Path):
    code = {"time_limit_s": 2, "memory_limit_mb": 64, "is_order_free": True, "checker": "def check(): ..."}
    tests = [
        {"type": "stdin", "cases": [{"input": "1 " * 9000, "output": "1"}]},
        {"type": "call", "fn_name": "f", "cases": [{"args": [[1, None]], "expected": None}]},
        {"type": "asserts", "code": ["assert f(1) == 2", "assert f(2) == 3"]},
    ]
    references = [
        {"kind": "math", "answers": ["1", "one"]},
        {"kind": "unverifiable", "domain": "code", "why": "no tests"},
        {"kind": "custom", "judge": "puzzle", "domain": "code", "value": {"target": 24, "hint": None}},
        *({"kind": "code", "tests": one, **code} for one in tests[:2]),
        {"kind": "code", "tests": tests[2], "time_limit_s": 2, "memory_limit_mb": 64},  # assertions have no checker
    ]
    rows = [{"question": f"Problem {i}, how?", "reference": reference} for i, reference in enumerate(references)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert klear("curate", tmp_path / "rows.jsonl", "--out", tmp_path / "once").status == 0
    said = klear("curate", tmp_path / "once" / "kept.parquet", "--out", tmp_path / "twice")
    assert said.status == 0, said.err
    once, twice = (pq.read_table(tmp_path / name / "kept.parquet").to_pylist() for name in ("once", "twice"))
    assert len(twice) == len(rows)
    assert [(row["problem_id"], json.loads(row["reference"])) for row in once] == [
        (row["problem_id"], json.loads(row["reference"])) for row in twice
    ]


def test_kept_problems_hold_all_of_their_tests_however_large(klear, tmp_path: Path):
    cases = [{"input": f"{i} " * 9000, "output": str(i)} for i in range(3)]
    tests = [{"type": "stdin", "cases": cases[: i + 1]} for i in range(3)]
    rows = [{"question": f"Sum {i} numbers.", "reference": {"kind": "code", "tests": tests[i]}} for i in range(3)]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = klear("curate", tmp_path / "code.jsonl", "--out", tmp_path / "out")
    assert said.status == 0, said.err
    table = pq.read_table(tmp_path / "out/kept.parquet").to_pylist()
    kept = {row["question"]: json.loads(row["reference"]) for row in table}
    assert [kept[f"Sum {i} numbers."]["tests"]["cases"] for i in range(3)] == [cases[: i + 1] for i in range(3)]
