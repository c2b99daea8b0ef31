"""Large tests are in a file beside their shard; records in memory hold handles to them."""

import dataclasses
import json
import pickle
import shutil
import tracemalloc

import pytest

from klear_core.artifacts.records import (
    INLINE_BYTES,
    StoredTestsWriter,
    load_tests,
    read_shard,
    sizes_of_tests,
    whole_tables,
    write_shard,
)
from klear_core.data.candidates import Candidate
from klear_core.errors import ArtifactError
from klear_core.types import (
    AssertTests,
    CallCase,
    CallTests,
    CodeReference,
    Difficulty,
    Domain,
    Problem,
    StdinCase,
    StdinTests,
    StoredTests,
    problem_id_of,
)

LARGE = 40_000
"""Characters of a test that is stored."""


def stdin_tests(i: int, size: int = LARGE) -> StdinTests:
    return StdinTests(cases=(StdinCase(input=f"é{i}" * (size // 3), output=str(i)), StdinCase(input="", output="0")))


def problem(i: int, tests: StdinTests | CallTests | AssertTests | StoredTests) -> Problem:
    return Problem(
        problem_id=problem_id_of(str(i), Domain.CODE),
        source="s",
        domain=Domain.CODE,
        question=str(i),
        reference=CodeReference(tests=tests, time_limit_s=2.0),
        difficulty=Difficulty.HARD,
    )


def stored(record: Problem | Candidate) -> StoredTests:
    assert isinstance(record.reference, CodeReference)
    assert isinstance(record.reference.tests, StoredTests)
    return record.reference.tests


def whole(record: Problem) -> Problem:
    assert isinstance(record.reference, CodeReference)
    reference = dataclasses.replace(record.reference, tests=load_tests(record.reference))
    return dataclasses.replace(record, reference=reference)


def test_large_tests_come_back_as_they_went_and_small_ones_stay_in_the_record(tmp_path):
    calls = CallTests(fn_name="f", cases=(CallCase(args_json=json.dumps(["x" * LARGE]), expected_json="2"),))
    problems = [
        problem(0, stdin_tests(0)),
        problem(1, stdin_tests(1, size=9)),
        problem(2, calls),
        problem(3, AssertTests(programs=(f"assert f() == {'x' * LARGE!r}", "assert f()"))),
    ]
    write_shard(tmp_path / "a.parquet", problems)
    read = read_shard(tmp_path / "a.parquet", Problem)
    assert read[1] == problems[1]
    assert [whole(p) for p in read] == problems
    assert [stored(read[i]).kind for i in (0, 2, 3)] == ["stdin", "call", "asserts"]
    for before, after in zip(problems, read, strict=True):
        assert isinstance(before.reference, CodeReference)
        assert isinstance(after.reference, CodeReference)
        assert after.reference.num_tests == before.reference.num_tests
        assert after.reference.test_kind == before.reference.test_kind
    assert stored(read[0]).num_chars == sum(sizes_of_tests(problems[0].reference.tests))
    assert len(pickle.dumps(read[0])) < 1000


def test_a_shard_of_small_tests_has_no_other_file_and_holds_its_tests(tmp_path):
    import pyarrow.parquet as pq

    write_shard(tmp_path / "a.parquet", [problem(0, stdin_tests(0, size=INLINE_BYTES // 4))])
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]
    (text,) = pq.read_table(tmp_path / "a.parquet")["reference"].to_pylist()
    assert json.loads(text)["tests"]["cases"][1] == {"input": "", "output": "0"}


def test_shards_can_be_moved_with_their_tests(tmp_path):
    write_shard(tmp_path / "here" / "a.parquet", [problem(0, stdin_tests(0))])
    shutil.move(tmp_path / "here", tmp_path / "there")
    (read,) = read_shard(tmp_path / "there" / "a.parquet", Problem)
    assert whole(read) == problem(0, stdin_tests(0))


def test_candidates_are_written_and_read_like_problems(tmp_path):
    def candidate(i: int) -> Candidate:
        reference = CodeReference(tests=stdin_tests(i))
        return Candidate(source="s", domain=Domain.CODE, question=str(i), reference=reference, rating=None, row=f"r{i}")

    write_shard(tmp_path / "a.parquet", (candidate(i) for i in range(3)))
    for i, read in enumerate(read_shard(tmp_path / "a.parquet", Candidate)):
        assert (read.row, read.question) == (f"r{i}", str(i))
        assert load_tests(CodeReference(tests=stored(read))) == stdin_tests(i)


def test_handles_are_written_by_copying_their_bytes(tmp_path):
    write_shard(tmp_path / "one" / "a.parquet", [problem(i, stdin_tests(i)) for i in range(3)])
    read = read_shard(tmp_path / "one" / "a.parquet", Problem)
    write_shard(tmp_path / "two" / "b.parquet", [*reversed(read)])
    shutil.rmtree(tmp_path / "one")
    again = read_shard(tmp_path / "two" / "b.parquet", Problem)
    assert [whole(p) for p in again] == [problem(i, stdin_tests(i)) for i in (2, 1, 0)]
    assert {stored(p).digest for p in again} == {stored(p).digest for p in read}
    write_shard(tmp_path / "two" / "b.parquet", again[:2])  # its own tests are read before they are replaced
    assert [whole(p) for p in read_shard(tmp_path / "two" / "b.parquet", Problem)] == [whole_of(2), whole_of(1)]


def whole_of(i: int) -> Problem:
    return problem(i, stdin_tests(i))


def test_a_shard_written_again_leaves_no_file_of_the_first_attempt(tmp_path):
    (tmp_path / "a.tests.tmp").write_bytes(b"of a killed attempt")
    write_shard(tmp_path / "a.parquet", [problem(0, stdin_tests(0))])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet", "a.tests"]
    write_shard(tmp_path / "a.parquet", [problem(0, stdin_tests(0, size=9))])
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def test_a_shard_is_never_there_without_its_tests(tmp_path):
    def fails():
        yield problem(0, stdin_tests(0))
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        write_shard(tmp_path / "a.parquet", fails())
    assert not (tmp_path / "a.parquet").exists()
    assert not (tmp_path / "a.tests").exists()


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda file: file.unlink(), "cannot be read"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "cut short"),
        (lambda file: file.write_bytes(bytes([*file.read_bytes()[:-1], 0])), "altered"),
    ],
)
def test_a_missing_or_damaged_file_is_named(tmp_path, damage, what):
    write_shard(tmp_path / "a.parquet", [problem(0, stdin_tests(0))])
    (read,) = read_shard(tmp_path / "a.parquet", Problem)
    damage(tmp_path / "a.tests")
    with pytest.raises(ArtifactError, match=rf"a\.tests: tests at byte 0: .*{what}"):
        whole(read)
    with pytest.raises(ArtifactError, match=what):
        write_shard(tmp_path / "b.parquet", [read])


def test_a_handle_cannot_leave_the_folder_of_its_shard(tmp_path):
    import pyarrow.parquet as pq

    write_shard(tmp_path / "a.parquet", [problem(0, stdin_tests(0))])
    table = pq.read_table(tmp_path / "a.parquet").to_pylist()
    table[0]["reference"] = table[0]["reference"].replace("a.tests", "../a.tests")
    import pyarrow as pa

    pq.write_table(pa.Table.from_pylist(table), tmp_path / "a.parquet")
    with pytest.raises(ArtifactError, match="outside of its folder"):
        read_shard(tmp_path / "a.parquet", Problem)


def test_whole_tables_hold_all_tests(tmp_path):
    problems = [problem(0, stdin_tests(0)), problem(1, stdin_tests(1, size=9))]
    write_shard(tmp_path / "small.parquet", problems[1:])
    write_shard(tmp_path / "large.parquet", problems)
    (small,) = whole_tables(tmp_path / "small.parquet")
    (large,) = whole_tables(tmp_path / "large.parquet")
    assert large.schema == small.schema
    assert large["reference"][1] == small["reference"][0]
    assert len(json.loads(large["reference"][0].as_py())["tests"]["cases"][0]["input"]) > LARGE // 2


def test_stored_tests_can_be_read_before_the_file_is_closed(tmp_path):
    with StoredTestsWriter(tmp_path / "x.tests") as writer:
        for i in range(3):
            reference = writer.stored(CodeReference(tests=stdin_tests(i)))
            assert isinstance(reference, CodeReference)
            assert load_tests(reference) == stdin_tests(i)


def test_writing_and_reading_many_large_tests_takes_the_memory_of_one(tmp_path):
    size = 1_000_000
    tracemalloc.start()
    write_shard(tmp_path / "a.parquet", (problem(i, stdin_tests(i, size)) for i in range(30)))
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    problems = read_shard(tmp_path / "a.parquet", Problem)
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(problems) == 30
    assert written < 8 * size
    assert read < size
