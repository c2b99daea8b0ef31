"""Given traces are read, kept apart from the benchmarks, and written as distillation writes its own."""

import json
from pathlib import Path

import pytest
from hub_server import REVISION, hub

from klear_core.artifacts.records import read_shards
from klear_core.config.curate import DecontaminateConfig
from klear_core.config.data import BenchmarkConfig, FileSource, HubRuntime, HubSource
from klear_core.config.data_jobs import BenchmarksRuntime
from klear_core.config.settings import YieldLimits
from klear_core.data.benchmarks import prepare_benchmarks
from klear_core.data.sources import describe_rows
from klear_core.distill.given_traces import take_traces
from klear_core.errors import DataError
from klear_core.metrics import NullTelemetry
from klear_core.types import Dropped, Outcome, TeacherTrace

SECRET = "How many positive integers less than one thousand are divisible by seven but not by eleven or by thirteen?"
NO_FLOOR = YieldLimits(stop_below=0, warn_below=0)


@pytest.fixture
def benchmarks(tmp_path: Path) -> Path:
    path = tmp_path / "secret.jsonl"
    path.write_text(json.dumps({"problem": SECRET, "answer": "118"}) + "\n")
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    source = BenchmarkConfig(name="secret", source=FileSource(path=str(path)))
    prepare_benchmarks((source,), seed=0, runtime=BenchmarksRuntime(), workdir=folder, telemetry=NullTelemetry())
    return folder


def chat(question: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path: Path, *rows: object) -> FileSource:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileSource(path=str(path), name="mine")


def take(
    source: FileSource, benchmarks: Path, workdir: Path, *, keep_truncated: bool = False, floor: YieldLimits = NO_FLOOR
):
    return take_traces(
        [source],
        DecontaminateConfig(),
        keep_truncated=keep_truncated,
        floors=(floor, floor),
        benchmarks=benchmarks,
        workdir=workdir,
        telemetry=NullTelemetry(),
    )


ROWS = (
    chat("1+1?", "<think>\nhm\n</think>\n\n2"),
    chat("1+1?", "<think>\noh\n</think>\n\n2"),
    chat("2+2?", "4"),
    chat("3+3?", "<think>on and on"),
    chat(SECRET, "<think>\nhm\n</think>\n\n118"),
    chat("4+4?", "<think>hm</think>"),
    {"messages": []},
)


def test_every_row_is_a_trace_or_counted_with_the_reason(tmp_path: Path, benchmarks: Path) -> None:
    summary = take(write(tmp_path / "rows.jsonl", *ROWS), benchmarks, tmp_path / "out")
    traces = list(read_shards(tmp_path / "out" / "traces", TeacherTrace))
    assert [(t.question, t.reasoning, t.answer, t.sample_idx) for t in traces] == [
        ("1+1?", "hm", "2", 0),
        ("1+1?", "oh", "2", 1),
        ("2+2?", "", "4", 0),
    ]
    assert {(t.source, t.verdict.outcome) for t in traces} == {("mine", Outcome.UNVERIFIABLE)}
    read, clean, whole = summary.ledger
    assert (read.num_in, read.dropped) == (7, {"not_single_turn": 1})
    assert (clean.num_in, clean.dropped) == (6, {"in_secret": 1})
    assert (whole.num_in, whole.dropped, whole.noted) == (
        5,
        {"truncated": 1, "no_answer": 1},
        {"without_reasoning": 1},
    )
    assert len(list(read_shards(tmp_path / "out" / "dropped", Dropped))) == 4
    assert summary.notes == ("1 of 3 given traces have no thinking: they teach to answer at once",)


def test_traces_that_ran_out_of_tokens_are_kept_by_the_setting_of_distillation(
    tmp_path: Path, benchmarks: Path
) -> None:
    take(write(tmp_path / "rows.jsonl", *ROWS), benchmarks, tmp_path / "out", keep_truncated=True)
    traces = list(read_shards(tmp_path / "out" / "traces", TeacherTrace))
    assert [t.reasoning for t in traces if t.finish_reason == "length"] == ["on and on"]


def test_a_second_attempt_leaves_no_shard_of_the_first(tmp_path: Path, benchmarks: Path) -> None:
    stale = tmp_path / "out" / "traces" / "00007.parquet"
    stale.parent.mkdir(parents=True)
    stale.write_text("half a file")
    take(write(tmp_path / "rows.jsonl", *ROWS), benchmarks, tmp_path / "out")
    assert not stale.exists()


def test_too_few_usable_rows_stop_the_stage(tmp_path: Path, benchmarks: Path) -> None:
    with pytest.raises(DataError, match=r"given traces are whole"):
        take(write(tmp_path / "rows.jsonl", *ROWS), benchmarks, tmp_path / "out", floor=YieldLimits(stop_below=0.7))
    with pytest.raises(DataError, match="no trace is left of 1 rows"):
        take(write(tmp_path / "rows.jsonl", ROWS[4]), benchmarks, tmp_path / "other")


def test_the_record_has_a_checksum_of_every_file_and_the_licence_of_the_card(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in "ab":
        write(folder / f"{name}.jsonl", *ROWS)
    (folder / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n")
    given = describe_rows([FileSource(path=str(folder))], origin="here", licence="")
    assert (given.origin, given.licence, len(given.files)) == ("here", "cc-by-4.0", 2)
    assert len({file.sha256 for file in given.files}) == 1
    assert describe_rows([FileSource(path=str(folder))], origin="here", licence="mit").licence == "mit"


def test_the_card_of_a_repository_comes_with_its_rows(tmp_path: Path) -> None:
    files = {"data/train.jsonl": json.dumps(ROWS[0]).encode(), "README.md": b"---\nlicense: mit\n---\n", "x.bin": b""}
    with hub("some/traces", files) as (endpoint, fetched):
        runtime = HubRuntime(cache_dir=str(tmp_path), endpoint=endpoint)
        source = HubSource(repo="some/traces", revision=REVISION, runtime=runtime)
        for _ in range(2):
            given = describe_rows([source], origin="there", licence="")
            assert (given.licence, [file.path for file in given.files]) == ("mit", ["some/traces/data/train.jsonl"])
    assert sorted(fetched) == ["README.md", "data/train.jsonl"]
    assert describe_rows([source], origin="there", licence="").licence == "mit"
