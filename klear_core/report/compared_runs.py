"""Read finished runs for a comparison, from the artifacts of their reports."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import JsonValue

from klear_core.artifacts.manifest import Manifest, read_manifest
from klear_core.artifacts.model_files import is_same_model
from klear_core.artifacts.opened import store_of
from klear_core.artifacts.records import read_shards
from klear_core.config.sections import section_of, sections_used
from klear_core.errors import ArtifactError
from klear_core.evaluate.counts import AnswerCounts
from klear_core.evaluate.generations import Decoding, is_evaluation
from klear_core.evaluate.suite import SAMPLES_FOLDER
from klear_core.metrics import METRICS_FILE
from klear_core.report.charts import Series
from klear_core.report.read import read_series
from klear_core.scores import EvalReport, read_reports
from klear_core.types import EvalSample

CountsBy = Mapping[tuple[str, Decoding], AnswerCounts]
"""Counts of answers by benchmark and decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStage:
    """One stage of a run and its artifact."""

    name: str
    folder: Path
    manifest: Manifest
    metrics: tuple[Series, ...]


@dataclass(frozen=True, kw_only=True)
class ScoredModel:
    """A model of a run, by the stage that made it, and its evaluation."""

    maker: str
    evaluation: Path

    @property
    def artifact(self) -> Path | None:
        """Artifact of the model; None if it was deleted."""
        models = [i for i in read_manifest(self.evaluation).inputs if i.role == "model"]
        folders = [self.evaluation.parents[1] / i.kind / i.fingerprint for i in models]
        return next((folder for folder in folders if folder.is_dir()), None)

    @cached_property
    def counts(self) -> CountsBy:
        """Counts of all its answers, which are read one by one and only once."""
        found: dict[tuple[str, Decoding], AnswerCounts] = defaultdict(AnswerCounts)
        for sample in read_shards(self.evaluation / SAMPLES_FOLDER, EvalSample):
            # Only counts are kept: all answers of all runs would not fit into memory.
            found[sample.benchmark, sample.decoding].add(sample.problem_id, sample.finish_reason, sample.verdict)
        return dict(found)

    @cached_property
    def reports(self) -> Mapping[str, EvalReport]:
        """Its stored scores by benchmark."""
        return {report.benchmark: report for report in read_reports(self.evaluation)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run, as its report's artifact names it."""

    label: str
    fingerprint: str
    """Fingerprint of the report."""
    made: str
    config: Mapping[str, JsonValue]
    stages: tuple[RunStage, ...]
    models: tuple[ScoredModel, ...]
    """The evaluated models, in pipeline order."""

    def model(self, maker: str) -> ScoredModel | None:
        """Return the evaluated model that a stage made; None if there is none."""
        return next((model for model in self.models if model.maker == maker), None)

    @property
    def sections(self) -> frozenset[str]:
        """Sections of the config that its stages used."""
        return sections_used((stage.name, stage.manifest.kind) for stage in self.stages)

    def stage(self, name: str) -> RunStage | None:
        """Return a stage; None if the run has none of that name."""
        return next((stage for stage in self.stages if stage.name == name), None)


def read_run(report: Path) -> ComparedRun:
    """Return the run whose report is in this artifact folder; ArtifactError names an artifact that is gone."""
    manifest = read_manifest(report)
    config = manifest.config.get("config")
    if not isinstance(config, dict):
        raise ArtifactError(f"{report}: a {manifest.kind} artifact is not the report of a run")
    store = store_of(report)
    stages = []
    for record in manifest.inputs:
        found = store.find(record.kind, record.fingerprint)
        if found is None:
            where = store.folder(record.kind, record.fingerprint)
            raise ArtifactError(f"{report}: the run's {record.role} ({where}) is gone")
        stages.append(_stage(record.role, found.path))
    return ComparedRun(
        label=f"{config.get('name', 'run')}, seed {config.get('seed')}",
        fingerprint=manifest.fingerprint,
        made=f"{manifest.created_at:%Y-%m-%d %H:%M}",
        config=config,
        stages=tuple(_in_order(stages)),
        models=tuple(_models(_in_order(stages))),
    )


def _stage(name: str, folder: Path) -> RunStage:
    return RunStage(
        name=name, folder=folder, manifest=read_manifest(folder), metrics=read_series(folder / METRICS_FILE)
    )


def _in_order(stages: Sequence[RunStage]) -> list[RunStage]:
    """Return the stages in an order in which each comes after its inputs; a manifest lists them by name instead."""
    inputs: dict[str, set[str]] = {}
    for stage in stages:
        inputs[stage.manifest.fingerprint] = {record.fingerprint for record in stage.manifest.inputs}

    def depth(fingerprint: str) -> int:
        return 1 + max((depth(other) for other in inputs[fingerprint] & inputs.keys()), default=0)

    return sorted(stages, key=lambda stage: depth(stage.manifest.fingerprint))


def _models(stages: Sequence[RunStage]) -> list[ScoredModel]:
    makers = {stage.manifest.fingerprint: stage.name for stage in stages}
    models = []
    for stage in stages:
        if not is_evaluation(stage.folder):
            continue
        scored = [i.fingerprint for i in stage.manifest.inputs if i.role == "model"]
        maker = makers.get(scored[0], stage.name) if scored else stage.name
        models.append(ScoredModel(maker=maker, evaluation=stage.folder))
    return models


def paired_by_content(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Name models of later runs as the first run names the same files, where it has no model of their own name.

    So `model` of an evaluation alone stands beside `rl` of the run that trained it.
    """
    first, *others = runs
    return [first, *(replace(run, models=tuple(_named_as_in(first, run))) for run in others)]


def _named_as_in(first: ComparedRun, run: ComparedRun) -> list[ScoredModel]:
    models = list(run.models)
    for i, model in enumerate(models):
        if first.model(model.maker):
            continue
        # A run must not get two models of one name.
        taken = [other.maker for other in models]
        same = (other.maker for other in first.models if other.maker not in taken and _is_same(model, other))
        maker = next(same, model.maker)
        models[i] = ScoredModel(maker=maker, evaluation=model.evaluation)
    return models


def _is_same(one: ScoredModel, other: ScoredModel) -> bool:
    """Return whether two models have the same files; False if the artifact of one is gone."""
    mine, theirs = one.artifact, other.artifact
    if mine is None or theirs is None:
        return False
    return is_same_model(read_manifest(mine), read_manifest(theirs))


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentSetting:
    """A setting that is not the same in all runs, with each run's value as JSON."""

    key: str
    values: tuple[str, ...]


def settings_in_common(runs: Sequence[ComparedRun], *, absent: str) -> list[DifferentSetting]:
    """Return the settings that differ, of the whole run or of stages that all runs have.

    A config has values for all stages: those of an evaluation alone say nothing about training.
    """
    used = frozenset.intersection(*(run.sections for run in runs))
    found = different_settings([run.config for run in runs], absent=absent)
    return [setting for setting in found if section_of(setting.key) in used | {""}]


def stages_of_some(runs: Sequence[ComparedRun]) -> str:
    """Name the stages that not all runs have, and the runs that have them; evaluations go with their models."""
    names = dict.fromkeys(stage.name for run in runs for stage in run.stages if not is_evaluation(stage.folder))
    stages_by_runs: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in names:
        having = tuple(run.label for run in runs if run.stage(name))
        if len(having) < len(runs):
            stages_by_runs[having].append(name)
    parts = [f"{', '.join(stages)} ({'; '.join(having)})" for having, stages in stages_by_runs.items()]
    return "; ".join(parts)


def different_settings(configs: Sequence[Mapping[str, JsonValue]], *, absent: str) -> list[DifferentSetting]:
    """Return every single setting that differs between the configs, by dotted key; workspaces are left out."""
    flat = []
    for config in configs:
        # Where artifacts are kept changes no result.
        others = {key: value for key, value in config.items() if key != "workspace"}
        flat.append(dict(_leaves_of(others, "")))
    keys = dict.fromkeys(key for leaves in flat for key in leaves)
    found = []
    for key in keys:
        values = tuple(leaves.get(key, absent) for leaves in flat)
        is_table = any(other.startswith(f"{key}.") for other in keys)  # in another run, whose keys are listed
        if len(set(values)) > 1 and not is_table:
            found.append(DifferentSetting(key=key, values=values))
    return found


def _leaves_of(value: JsonValue, key: str) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        prefix = f"{key}." if key else ""
        children = [(prefix + name, child) for name, child in value.items()]
    elif isinstance(value, list) and any(isinstance(child, dict) for child in value):
        children = [(f"{key}.{i}", child) for i, child in enumerate(value)]
    else:
        return [(key, json.dumps(value, ensure_ascii=False))]
    found: list[tuple[str, str]] = []
    for name, child in children:
        found += _leaves_of(child, name)
    return found
