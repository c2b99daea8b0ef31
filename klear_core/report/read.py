"""Read the facts of a run from its artifact folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from klear_core.artifacts.manifest import read_manifest
from klear_core.artifacts.records import read_shards
from klear_core.config.stage import Stage
from klear_core.evaluate.decision import DECISION_FILE, read_decision
from klear_core.evaluate.suite import SAMPLES_FOLDER
from klear_core.metrics import METRICS_FILE, read_metrics
from klear_core.report.charts import Series
from klear_core.report.facts import Facts, MissingStage, ModelFacts, StageFacts
from klear_core.report.inputs import ReportInputs, StageFolder
from klear_core.report.text import visible
from klear_core.scores import read_reports
from klear_core.types import EvalSample


def read_facts(inputs: ReportInputs) -> Facts:
    """Read every stage's folder. Raise ArtifactError with the file that is missing or cannot be read."""
    makers = {stage.name: stage for stage in inputs.pipeline if stage.job.makes_model}
    stages, missing, models, unscored = [], [], [], []
    decision = None
    for planned in inputs.stages:
        stage, folder = planned.stage, planned.folder
        if folder is None:
            missing.append(_missing(planned))
            if stage.scored_model_stage:
                unscored.append(makers[stage.scored_model_stage].label)
        else:
            stages.append(_stage(planned, folder))
            if stage.scored_model_stage:
                models.append(_model(stage, folder, makers))
            if (folder / DECISION_FILE).is_file():
                decision = read_decision(folder)
    return Facts(
        run=inputs.run,
        config=inputs.config,
        stages=tuple(stages),
        missing=tuple(missing),
        models=tuple(models),
        unscored_models=tuple(unscored),
        differences=inputs.differences,
        score_warnings=inputs.score_warnings,
        published=inputs.published,
        decision=decision,
    )


def _stage(stage: StageFolder, folder: Path) -> StageFacts:
    return StageFacts(
        stage=stage.stage,
        folder=folder,
        manifest=read_manifest(folder),
        was_reused=stage.was_reused,
        metrics=read_series(folder / METRICS_FILE),
    )


def _missing(stage: StageFolder) -> MissingStage:
    metrics = read_series(stage.workdir / METRICS_FILE) if stage.workdir is not None else ()
    return MissingStage(stage=stage.stage, trouble=visible(stage.trouble), metrics=metrics)


def read_series(path: Path) -> tuple[Series, ...]:
    """Read a metrics file and turn its rows into one series per metric, in order of first appearance."""
    columns: dict[str, dict[int, float | None]] = {}
    for row in read_metrics(path):
        step = row.pop("step")
        assert step is not None, path
        for name, value in row.items():
            # A step may have several rows: scores of the curve are added after its own row.
            columns.setdefault(name, {})[int(step)] = value
    found = []
    for name, by_step in columns.items():
        steps = sorted(by_step)
        found.append(Series(name=name, steps=tuple(steps), values=tuple(by_step[t] for t in steps)))
    return tuple(found)


def _model(stage: Stage, folder: Path, makers: Mapping[str, Stage]) -> ModelFacts:
    """Read a model's scores, first samples and greedy answers. No others are shown, and all would fill the memory."""
    samples = (s for s in read_shards(folder / SAMPLES_FOLDER, EvalSample) if s.sample_idx == 0)
    return ModelFacts(
        maker=makers[stage.scored_model_stage],
        stage=stage,
        tone=list(makers).index(stage.scored_model_stage),
        scores=read_reports(folder),
        samples=tuple(samples),
    )
