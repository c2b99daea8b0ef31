"""Count the benchmark problems that overlap with a model's training data, as the curation of its run found them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from klear_core.report.ancestry import ancestors
from klear_core.report.facts import Facts, ModelFacts, StageFacts

_LEAKS = "leaks"
"""Folder of a curation's artifact with every prompt that any rule matches with a benchmark question."""


def num_contaminated(facts: Facts, model: ModelFacts, benchmark: str) -> int | None:
    """Return the number of a benchmark's problems that overlap with a kept training prompt by any rule.

    None if some training data of the model was not compared with the benchmark. Prompts that the configured rules match
    were dropped, so only matches by the other rules count.
    """
    for warning in facts.score_warnings:
        if model.stage.name in warning.scored_by and benchmark in warning.benchmarks:
            return None
    questions: set[str] = set()
    for stage in stages_behind(facts, model.maker.name):
        questions |= kept_leaks(stage.folder).get(benchmark, frozenset())
    return len(questions)


@cache
def kept_leaks(artifact: Path) -> Mapping[str, frozenset[str]]:
    """Return the ids of questions with a match that was kept, by benchmark; empty for artifacts without leaks."""
    folder = artifact / _LEAKS
    if not folder.is_dir():
        return {}
    import pyarrow.dataset as ds

    # a shard without rows may have no columns
    shards = [file for file in sorted(folder.glob("*.parquet")) if ds.dataset(file).schema.names]
    found: dict[str, set[str]] = defaultdict(set)
    for file in shards:
        table = ds.dataset(file).to_table(columns=["benchmark", "question_id"], filter=~ds.field("is_dropped"))
        for row in table.to_pylist():
            found[row["benchmark"]].add(row["question_id"])
    return {benchmark: frozenset(ids) for benchmark, ids in found.items()}


def stages_behind(facts: Facts, maker: str) -> list[StageFacts]:
    """Return the stage that made a model and all stages of the run that it depends on."""
    by_fingerprint = {stage.manifest.fingerprint: stage for stage in facts.stages}
    ahead = [stage for stage in facts.stages if stage.name == maker]
    found: dict[str, StageFacts] = {}
    while ahead:
        stage = ahead.pop()
        found[stage.name] = stage
        inputs = [by_fingerprint.get(record.fingerprint) for record in stage.manifest.inputs]
        ahead += [other for other in inputs if other is not None and other.name not in found]
    return list(found.values())


def num_overlapping(model: Path, benchmarks: Iterable[str]) -> dict[str, int]:
    """Return the number of each benchmark's problems that overlap with a model's training data by any rule."""
    questions: dict[str, set[str]] = {benchmark: set() for benchmark in benchmarks}
    for ancestor in ancestors(model):
        leaks = kept_leaks(ancestor.folder)
        for benchmark in questions:
            questions[benchmark] |= leaks.get(benchmark, frozenset())
    return {benchmark: len(ids) for benchmark, ids in questions.items()}
