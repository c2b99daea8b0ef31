"""Tell whether two evaluations judged the answers to a benchmark by the same references."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from klear_core.artifacts.manifest import MANIFEST, InputRecord, read_manifest
from klear_core.artifacts.opened import store_of
from klear_core.artifacts.records import read_shards
from klear_core.code_tests import CodeReference, StoredTests
from klear_core.config.data_jobs import BenchmarksJob
from klear_core.types import Problem, Reference


def num_other_references(new: Path, old: Path, benchmark: str) -> int:
    """Return how many problems of a benchmark have different references in two evaluations' artifact folders.

    A problem's id tells its question alone. With a shared store, problems are fetched to this node. 0, too, if those of
    an evaluation are gone.
    """
    records = [_benchmarks_of(folder) for folder in (new, old)]
    # The same artifact has the same references, so neither is read.
    if records[0] is None or records[1] is None or records[0].fingerprint == records[1].fingerprint:
        return 0
    ours, theirs = _references(new, records[0], benchmark), _references(old, records[1], benchmark)
    # Problems of only one of the two are no matter here: `promotion` reports them as other problems.
    return sum(ours[problem_id] != theirs[problem_id] for problem_id in ours.keys() & theirs.keys())


def _benchmarks_of(evaluation: Path) -> InputRecord | None:
    if not (evaluation / MANIFEST).is_file():
        return None
    inputs = read_manifest(evaluation).inputs
    return next((record for record in inputs if record.role == BenchmarksJob.kind), None)


def _references(evaluation: Path, benchmarks: InputRecord, name: str) -> dict[str, bytes]:
    """Return a digest of each problem's reference; empty if the problems are gone."""
    found = store_of(evaluation).find(benchmarks.kind, benchmarks.fingerprint)
    if found is None or not (found.path / name).is_dir():
        return {}
    folder = found.path / name
    return {problem.problem_id: _digest(problem.reference) for problem in read_shards(folder, Problem)}


def _digest(reference: Reference) -> bytes:
    if isinstance(reference, CodeReference) and isinstance(reference.tests, StoredTests):
        # where the tests are stored is no part of what they are; their own digest is
        tests = replace(reference.tests, path="", offset=0)
        reference = replace(reference, tests=tests)
    return hashlib.sha256(repr(reference).encode("utf-8", "surrogatepass")).digest()
