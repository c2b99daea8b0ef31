"""Count the benchmark problems that overlap with a model's training data, as the curations behind it found them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from klear_core.artifacts.manifest import OUTSIDE_KINDS
from klear_core.artifacts.opened import store_of
from klear_core.report.ancestry import Ancestor, ancestors, pointed_artifact
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
        # The run has no stages behind a given model; if an earlier run made it, that run's curation counts.
        for leaks in _leaks_behind_given(stage.folder):
            questions |= leaks.get(benchmark, frozenset())
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
    # By fingerprint and not by stage name: only stages whose result the model was made from count.
    while ahead:
        stage = ahead.pop()
        found[stage.name] = stage
        inputs = [by_fingerprint.get(record.fingerprint) for record in stage.manifest.inputs]
        ahead += [other for other in inputs if other is not None and other.name not in found]
    return list(found.values())


def num_overlapping(model: Path, benchmarks: Iterable[str]) -> dict[str, int | None]:
    """Return the number of each benchmark's problems that overlap with a model's training data by any rule.

    None if some of the data behind the model, or its list of matches, is gone.
    """
    found: dict[str, int | None] = {}
    for benchmark in benchmarks:
        questions = _questions_behind(model, benchmark)
        found[benchmark] = None if questions is None else len(questions)
    return found


def _questions_behind(model: Path, benchmark: str) -> frozenset[str] | None:
    """Return the ids of a benchmark's questions with a kept match in any data behind a model; None if not known."""
    questions: set[str] = set()
    for leaks in _leaks_behind(model):
        if leaks is None:
            return None
        questions |= leaks.get(benchmark, frozenset())
    return frozenset(questions)


def _leaks_behind(model: Path) -> Iterator[Mapping[str, frozenset[str]] | None]:
    """Yield the kept matches of each artifact that a model is made from, those of earlier runs included.

    None stands for an artifact of which they are not known.
    """
    lineage = ancestors(model)
    found = {(ancestor.manifest.kind, ancestor.manifest.fingerprint) for ancestor in lineage}
    for ancestor in lineage:
        # `ancestors` leaves out artifacts without a manifest here: nothing is known of the data behind them.
        inputs = [record for record in ancestor.manifest.inputs if record.kind not in OUTSIDE_KINDS]
        if any((record.kind, record.fingerprint) not in found for record in inputs):
            yield None
        yield _leaks_of(ancestor, model)
        yield from _leaks_behind_given(ancestor.folder)


def _leaks_behind_given(artifact: Path) -> Iterator[Mapping[str, frozenset[str]]]:
    """Yield the kept matches behind a given model, as far as they are known; nothing for any other artifact.

    Whether its data was compared at all is no matter of these: the user may declare it (`exposures`).
    """
    pointed = pointed_artifact(artifact)
    for leaks in _leaks_behind(pointed) if pointed else ():
        if leaks is not None:
            yield leaks


def _leaks_of(ancestor: Ancestor, model: Path) -> Mapping[str, frozenset[str]] | None:
    """Return the kept matches of one artifact of the model's store; None if it has some that are gone."""
    own = ancestor.manifest
    if (ancestor.folder / _LEAKS).is_dir() or not any(file.path.startswith(f"{_LEAKS}/") for file in own.files):
        return kept_leaks(ancestor.folder)
    # With a shared store, this node may have the manifest alone: no folder does not mean no matches.
    fetched = store_of(model).find(own.kind, own.fingerprint)
    return None if fetched is None else kept_leaks(fetched.path)
