from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klear_core.artifacts.records import read_shard, read_shards, shard_name, write_shard
from klear_core.errors import ArtifactError
from klear_core.types import (
    AssertTests,
    CallCase,
    CallTests,
    CodeReference,
    CustomReference,
    Difficulty,
    Domain,
    MathReference,
    Problem,
    Reference,
    SftExample,
    StdinCase,
    StdinTests,
    UnverifiableReference,
    domain_of,
    problem_id_of,
)


def problem(question: str, reference: Reference) -> Problem:
    return Problem(
        problem_id=problem_id_of(question, domain_of(reference)),
        source="s",
        domain=domain_of(reference),
        question=question,
        reference=reference,
        difficulty=Difficulty.HARD,
    )


def test_records_come_back_as_they_went(tmp_path):
    problems = [
        problem("1+1", MathReference(answers=("2", "two"))),
        problem(
            "add", CodeReference(tests=CallTests(fn_name="f", cases=(CallCase(args_json="[1]", expected_json="2"),)))
        ),
    ]
    custom = CustomReference(judge="countdown", domain=Domain.MATH, value_json='{"target": 24}')
    problems.append(problem("24?", custom))
    assert write_shard(tmp_path / "a.parquet", problems) == 3
    assert read_shard(tmp_path / "a.parquet", Problem) == problems


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
TESTS = st.one_of(
    st.builds(
        StdinTests,
        cases=st.lists(st.builds(StdinCase, input=TEXTS, output=TEXTS), min_size=1, max_size=3).map(tuple),
    ),
    st.builds(AssertTests, programs=st.lists(TEXTS, min_size=1, max_size=3).map(tuple)),
)
REFERENCES = st.one_of(
    st.builds(MathReference, answers=st.lists(TEXTS, max_size=3).map(tuple)),
    st.builds(
        CodeReference,
        tests=TESTS,
        checker=TEXTS,
        time_limit_s=st.none() | st.floats(0.1, 9),
        is_order_free=st.booleans(),
    ),
    st.builds(UnverifiableReference, domain=st.sampled_from(Domain), why=TEXTS),
    st.builds(CustomReference, judge=TEXTS, domain=st.sampled_from(Domain), value_json=TEXTS),
)


@given(st.lists(st.builds(problem, TEXTS, REFERENCES), max_size=4))
def test_any_records_come_back_as_they_went(records):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.parquet"
        assert write_shard(path, records) == len(records)
        assert read_shard(path, Problem) == records
        assert read_shard(path, Problem, rows=range(len(records))[::2]) == records[::2]


def test_an_empty_shard_is_a_shard(tmp_path):
    write_shard(tmp_path / "a.parquet", [])
    assert list(read_shards(tmp_path, Problem)) == []


def test_shards_are_read_in_order_of_their_index(tmp_path):
    rows = [SftExample(problem_id=str(i), token_ids=(i, 2), loss_mask=(False, True)) for i in range(12)]
    for i in reversed(range(12)):
        write_shard(tmp_path / shard_name(i, 12), [rows[i]])
    assert list(read_shards(tmp_path, SftExample)) == rows


def test_a_damaged_shard_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    write_shard(path, [SftExample(problem_id="p", token_ids=(1,), loss_mask=(True,))])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ArtifactError, match=r"a\.parquet"):
        read_shard(path, SftExample)


def test_a_shard_of_another_record_is_refused_by_row(tmp_path):
    write_shard(tmp_path / "a.parquet", [SftExample(problem_id="p", token_ids=(1,), loss_mask=(True,))])
    with pytest.raises(ArtifactError, match=r"row 0: not a Problem"):
        read_shard(tmp_path / "a.parquet", Problem)


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="no Parquet shard"):
        list(read_shards(tmp_path, Problem))
