"""Problems with large tests are curated and chosen for RL by handles: no stage before judging holds or reads the tests."""

import dataclasses
import json
import tracemalloc
from pathlib import Path

from klear_core.artifacts.records import StoredTestsWriter, load_tests, read_shards
from klear_core.config.curate import CurateConfig, CurateRuntime
from klear_core.config.data import BenchmarkConfig, FileSource
from klear_core.config.data_jobs import BenchmarksRuntime
from klear_core.config.rl import PromptFilterConfig
from klear_core.data.benchmarks import prepare_benchmarks, read_benchmarks
from klear_core.data.curation.curate import curate
from klear_core.data.curation.near_duplicates import marks_of
from klear_core.data.formats.references import code_reference_from_tests
from klear_core.metrics import NullTelemetry
from klear_core.rl.groups import choose_problems
from klear_core.types import CodeReference, Problem, StoredTests

NUM_TESTS = 20
CASE_CHARS = 10_000
WORDS = ["add", "sort", "count", "largest", "shortest", "paths", "cycles", "pairs", "grid", "tree", "string", "digits"]


def cases_of(i: int) -> dict[str, list[str]]:
    return {
        "inputs": [f"{i} {case} {'9' * CASE_CHARS}\n" for case in range(NUM_TESTS)],
        "outputs": [f"{i}\n" for _ in range(NUM_TESTS)],
    }


def row(i: int) -> dict[str, object]:
    """A row of KlearReasoner-CodeSub-15K, of 200 KB."""
    question = " ".join(WORDS[(i * 7 + j * (i + 1)) % len(WORDS)] for j in range(9)) + f" of {i}"
    return {
        "data_source": "coder1_longcot",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "code",
        "reward_model": {"ground_truth": json.dumps(cases_of(i)), "style": "rule"},
    }


def source_of(tmp_path: Path, num_rows: int) -> FileSource:
    (tmp_path / "code.json").write_text(json.dumps([row(i) for i in range(num_rows)]))
    return FileSource(path=str(tmp_path / "code.json"))


def curated(source: FileSource, folder: Path, *, rows_per_shard: int = 4096) -> list[Problem]:
    (folder / "bench").mkdir()
    cfg = CurateConfig(sources=(source,), runtime=CurateRuntime(rows_per_shard=rows_per_shard))
    curate(cfg, benchmarks=folder / "bench", seed=0, workdir=folder / "out", telemetry=NullTelemetry())
    return list(read_shards(folder / "out" / "problems", Problem))


def test_curated_problems_have_all_of_their_tests_in_files_beside_their_shards(tmp_path):
    problems = curated(source_of(tmp_path, 5), tmp_path, rows_per_shard=2)
    names = sorted(file.name for file in (tmp_path / "out" / "problems").iterdir())
    assert names == [f"{i:05d}-of-00003.{end}" for i in range(3) for end in ("parquet", "tests")]
    found = {}
    for problem in problems:
        assert isinstance(problem.reference, CodeReference)
        assert isinstance(problem.reference.tests, StoredTests)
        assert problem.reference.num_tests == NUM_TESTS
        found[int(problem.question.rsplit(" ", 1)[1])] = load_tests(problem.reference)
    assert found == {i: code_reference_from_tests(cases_of(i)).tests for i in range(5)}


def test_curation_holds_the_tests_of_a_few_rows_at_a_time(tmp_path):
    num_rows = 120
    source = source_of(tmp_path, num_rows)
    tracemalloc.start()
    try:
        problems = curated(source, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(problems) == num_rows
    assert peak < num_rows * NUM_TESTS * CASE_CHARS / 2


def test_rl_chooses_problems_without_their_tests(tmp_path):
    curated(source_of(tmp_path, 3), tmp_path)
    for file in (tmp_path / "out" / "problems").glob("*.tests"):
        file.unlink()
    chosen, step = choose_problems(tmp_path / "out", "code", PromptFilterConfig(min_tests=NUM_TESTS))
    assert (len(chosen), step.num_in) == (3, 3)


def test_near_duplicates_are_compared_by_stored_tests_as_by_tests_in_memory(tmp_path):
    reference = code_reference_from_tests(cases_of(1))
    calls = code_reference_from_tests(
        cases_of(1) | {"inputs": [[text] for text in cases_of(1)["inputs"]], "fn_name": "f"}
    )
    with StoredTestsWriter(tmp_path / "a.tests") as writer:
        for inline in (reference, calls):
            stored = writer.stored(inline)
            assert stored != inline
            assert marks_of("q", stored) == marks_of("q", inline)


def test_benchmarks_keep_large_tests_beside_their_problems(tmp_path):
    benchmark = BenchmarkConfig(name="big", source=source_of(tmp_path, 2))
    runtime = BenchmarksRuntime()
    prepare_benchmarks([benchmark], seed=0, runtime=runtime, workdir=tmp_path / "out", telemetry=NullTelemetry())
    for i, (_, problem) in enumerate(read_benchmarks(tmp_path / "out")):
        assert isinstance(problem.reference, CodeReference)
        whole = dataclasses.replace(problem.reference, tests=load_tests(problem.reference))
        assert whole == code_reference_from_tests(cases_of(i))
