"""Whether two evaluations asked the same problems by the same references."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from stored_evaluations import RIGHT, evaluation, problem, sample

from klear_core.artifacts.manifest import ArtifactRef, read_manifest
from klear_core.artifacts.object_store import ObjectStore
from klear_core.artifacts.records import write_shard
from klear_core.evaluate.compare.promotion import num_other_references
from klear_core.types import CodeReference, Domain, Problem, StdinCase, StdinTests


def program(number: int, output: str) -> Problem:
    """A problem whose tests are too large for their record."""
    tests = StdinTests(cases=(StdinCase(input="1 " * 20_000, output=output),))
    return replace(problem(number), domain=Domain.CODE, reference=CodeReference(tests=tests))


def asked(root: Path, seed: int, problems: list[Problem]) -> ArtifactRef:
    """Return an evaluation of these problems, in a workspace of its own."""
    ref = evaluation(root, [sample(1, 0, "", RIGHT)], seed=seed, corrected={seed: "other"})
    write_shard(root / "artifacts" / "benchmarks" / ("c" * 20) / "toy" / "00000-of-00001.parquet", problems)
    return ref


@pytest.mark.parametrize(("output", "num"), [("20000", 0), ("20001", 1)])
def test_large_tests_are_the_same_wherever_they_are_stored(tmp_path: Path, output: str, num: int) -> None:
    """Each has another place in its file, as a problem more comes before the one, and each file another folder."""
    new = asked(tmp_path / "new", 1, [program(2, "x"), program(1, output)])
    old = evaluation(tmp_path / "old", [sample(1, 0, "", RIGHT)], seed=1)
    place = tmp_path / "old" / "artifacts" / "benchmarks" / ("b" * 20) / "toy" / "00000-of-00001.parquet"
    write_shard(place, [program(1, "20000")])
    assert num_other_references(new.path, old.path, "toy") == num


def test_problems_that_are_gone_may_be_others(tmp_path: Path) -> None:
    new = asked(tmp_path / "new", 1, [problem(1, "7")])
    old = evaluation(tmp_path / "old", [sample(1, 0, "", RIGHT)], seed=1)
    assert num_other_references(new.path, old.path, "toy") == 1
    shutil.rmtree(tmp_path / "old" / "artifacts" / "benchmarks")
    assert num_other_references(new.path, old.path, "toy") is None


def test_problems_that_another_node_has_are_fetched_from_the_shared_store(tmp_path: Path) -> None:
    """A scheduled retraining may decide on a node that has fetched the champion's scores alone."""
    url = (tmp_path / "shared").as_uri()
    old = evaluation(tmp_path / "old", [sample(1, 0, "", RIGHT)], seed=1)
    first = ObjectStore(tmp_path / "old" / "artifacts", url)
    for own in (*read_manifest(old.path).inputs, old):
        first.find_intact(own.kind, own.fingerprint)  # seals it
    fetched = ObjectStore(tmp_path / "another" / "artifacts", url).find(old.kind, old.fingerprint)
    assert fetched is not None
    assert not (tmp_path / "another" / "artifacts" / "benchmarks").exists()
    new = evaluation(tmp_path / "new", [sample(1, 0, "", RIGHT)], seed=1, corrected={1: "7"})
    assert num_other_references(new.path, fetched.path, "toy") == 1
