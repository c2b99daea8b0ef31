import json

import pytest

from klear_core.config.data import BenchmarkConfig, FileSource, ProceduralSource
from klear_core.data.benchmarks import check_benchmarks, prepare_benchmarks, read_benchmarks
from klear_core.data.procedural import is_held_out
from klear_core.errors import ConfigError, DataError
from klear_core.metrics import NullTelemetry
from klear_core.types import Difficulty


def benchmark(tmp_path, rows, **settings):
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return BenchmarkConfig(name="bench", source=FileSource(path=str(path)), **settings)


def row(i):
    return {"question": f"What is {i}+{i}?", "answer": f"#### {2 * i}"}


def prepare(benchmarks, workdir):
    return prepare_benchmarks(benchmarks, seed=0, workdir=workdir, telemetry=NullTelemetry())


def test_benchmarks_are_written_in_their_own_order_and_read_back_with_their_names(tmp_path):
    held_out = BenchmarkConfig(name="chains", source=ProceduralSource(split="heldout", num_problems=8))
    summary = prepare([benchmark(tmp_path, [row(3), row(1)], expected_rows=2), held_out], tmp_path / "out")
    found = list(read_benchmarks(tmp_path / "out"))
    assert [p.question for name, p in found if name == "bench"] == ["What is 3+3?", "What is 1+1?"]
    chains = [p for name, p in found if name == "chains"]
    assert all(is_held_out(p.question) for p in chains)
    assert {p.difficulty for p in chains} == {
        Difficulty.EASY,
        Difficulty.MEDIUM,
        Difficulty.HARD,
    }  # 2, 4 and 6, 8 operations of 10
    assert summary.counts == {"benchmarks": 2, "problems": 10}
    assert [(s.step, s.num_out) for s in summary.ledger] == [("read_bench", 2), ("read_chains", 8)]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([row(1), row(2)], {"expected_rows": 3}, "expected_rows is 3, but its source has 2 rows"),
        ([row(1), row(2), row(1)], {}, "comes twice"),
        ([row(1), {"question": "q", "answer": "none"}], {}, r"cannot be judged, no_reference: .*bench\.jsonl:2"),
    ],
)
def test_a_benchmark_that_is_not_whole_is_refused(tmp_path, rows, settings, message):
    with pytest.raises(DataError, match=message):
        prepare([benchmark(tmp_path, rows, **settings)], tmp_path / "out")


def test_two_benchmarks_of_one_name_are_refused(tmp_path):
    one = benchmark(tmp_path, [row(1)])
    with pytest.raises(ConfigError, match="two benchmarks are called 'bench'"):
        check_benchmarks([one, one])


def test_a_missing_benchmark_file_is_found_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        check_benchmarks([BenchmarkConfig(name="b", source=FileSource(path=str(tmp_path / "gone.jsonl")))])


def test_no_benchmark_is_no_error(tmp_path):
    assert prepare([], tmp_path / "out").counts == {"benchmarks": 0, "problems": 0}
    assert list(read_benchmarks(tmp_path / "out")) == []
