"""Read a run's artifact folders into the records that its report is computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from klear_core.artifacts.manifest import Manifest, read_manifest
from klear_core.artifacts.records import read_shards
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import Stage
from klear_core.evaluate.compare.paired import PairedComparison
from klear_core.evaluate.compare.promotion import DECISION_FILE, Decision, read_decision
from klear_core.evaluate.compare.published import PublishedModel
from klear_core.metrics import METRICS_FILE, read_metrics
from klear_core.report.charts import Series
from klear_core.scores import SAMPLES_FOLDER, EvalReport, read_reports, visible
from klear_core.types import EvalSample


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFolder:
    """One planned stage of the run and its artifact folder, if it has one."""

    stage: Stage
    folder: Path | None
    """Artifact folder (holds `manifest.json`); None if the stage has no artifact."""
    was_reused: bool = False
    """Whether the artifact is from an earlier run with the same fingerprint."""
    trouble: str = ""
    """Error message if the stage failed; empty if it was never started."""
    workdir: Path | None = None
    """Work folder of a failed attempt, whose metrics are shown too."""
    num_gpus: int = 0
    """GPUs that this run held for the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedModels:
    """Two models of the run, by the stages that made them, and the difference of their scores on one benchmark."""

    before: str
    after: str
    scores: PairedComparison


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Names, time and commit by which a person identifies the run."""

    name: str
    profile: str
    """Folder name of the profile: `laptop`."""
    started_at: str
    """Start time, ISO 8601 with a time zone."""
    git_commit: str
    """Git commit of the code; empty if unknown."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Ids of the run in other systems, by system: `Prefect flow run`, `MLflow run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreWarning:
    """A warning about scores, and the stages that made them."""

    where: str
    text: str
    scored_by: tuple[str, ...] = ()
    """Names of these stages."""
    benchmarks: tuple[str, ...] = ()
    """Benchmarks of which it is not known whether they are in the training data."""
    questions_seen: Mapping[str, int] = field(default_factory=dict)
    """Number of questions in the training data, by benchmark, where they were looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportInputs:
    """Inputs for one run. `stages` are in pipeline order and include planned stages that never finished."""

    run: RunInfo
    config: PipelineConfig
    pipeline: tuple[Stage, ...]
    """All stages of the pipeline, in order: they name the models."""
    stages: tuple[StageFolder, ...]
    differences: tuple[ComparedModels, ...] = ()
    """Differences between consecutive evaluated models and from first to last, per benchmark and decoding."""
    score_warnings: tuple[ScoreWarning, ...] = ()
    """Warnings about scores, from the lineage of the models."""
    published: tuple[PublishedModel, ...] = ()
    """Published scores to put beside those of the run."""


# ---- facts ----
# Records that the report reads from a run's artifact folders. Everything shown is computed from them.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """An evaluated model: its scores by benchmark, and its first sampled and its greedy answers."""

    maker: Stage
    """The stage that made the model; the model is called by its label."""
    stage: Stage
    """The stage that scored the model."""
    tone: int
    """Number of its colour: its place among all models of the pipeline."""
    scores: tuple[EvalReport, ...]
    samples: tuple[EvalSample, ...]

    def score(self, benchmark: str) -> EvalReport | None:
        """Return the report on a benchmark; None if this model was not evaluated on it."""
        return next((s for s in self.scores if s.benchmark == benchmark), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """A finished stage, from its manifest and its metrics file."""

    stage: Stage
    folder: Path
    """Artifact folder."""
    manifest: Manifest
    was_reused: bool
    metrics: tuple[Series, ...]
    num_gpus: int = 0
    """GPUs that this run held for it."""

    @property
    def name(self) -> str:
        """Stage name, unique in the run."""
        return self.stage.name


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingStage:
    """A planned stage without an artifact; `trouble` is its error, empty if it was never started."""

    stage: Stage
    trouble: str
    metrics: tuple[Series, ...]
    """Metrics that the failed attempt logged until it stopped."""

    @property
    def name(self) -> str:
        """Stage name, unique in the run."""
        return self.stage.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts of a run. Stages and models are in pipeline order."""

    run: RunInfo
    config: PipelineConfig
    stages: tuple[StageFacts, ...]
    missing: tuple[MissingStage, ...]
    models: tuple[ModelFacts, ...]
    unscored_models: tuple[str, ...]
    """Labels of models whose evaluation is missing."""
    differences: tuple[ComparedModels, ...]
    score_warnings: tuple[ScoreWarning, ...] = ()
    published: tuple[PublishedModel, ...] = ()
    decision: Decision | None = None
    """The decision on the champion; None if none was asked for."""

    @property
    def num_compared(self) -> int:
        """Comparisons that p-values are corrected for: a pair of models on a benchmark, sampled and greedy as one."""
        return len({(d.before, d.after, d.scores.benchmark) for d in self.differences})

    def model(self, maker: str) -> ModelFacts:
        """Return the evaluated model that the stage `maker` made."""
        return next(model for model in self.models if model.maker.name == maker)

    @property
    def benchmarks(self) -> tuple[str, ...]:
        """Names of the scored benchmarks: those of the config in its order, then any others in the order found."""
        met = [s.benchmark for m in self.models for s in m.scores]
        configured = [b.name for b in self.config.benchmarks if b.name in met]
        return tuple(dict.fromkeys([*configured, *met]))

    @property
    def dependence(self) -> str:
        """Sentence on how intervals over other problems take the problems: as independent, or in clusters."""
        clusters = {s.benchmark: s.avg.num_clusters for model in self.models for s in model.scores}
        known = [f"{name} in {num} clusters" for name, num in clusters.items() if num]
        alone = [name for name, num in clusters.items() if not num]
        if not known:
            return "Problems are taken as independent: no contests, subjects or templates are known that some share."
        others = f"; those of {', '.join(alone)} are taken as independent" if alone else ""
        return f"Problems that share a contest, subject or template count together: {', '.join(known)}{others}."


# ---- read ----
# Read the facts of a run from its artifact folders.


def read_facts(inputs: ReportInputs) -> Facts:
    """Read every stage's folder. Raise ArtifactError with the file that is missing or cannot be read."""
    makers = {stage.name: stage for stage in inputs.pipeline if stage.job.makes_model}
    # Colours are for models that are scored, in order; taggers and teachers take none.
    scored = {stage.scored_model_stage for stage in inputs.pipeline if stage.job.scores_model}
    tones = [name for name in makers if name in scored]
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
                models.append(_model(stage, folder, makers, tones))
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
        num_gpus=stage.num_gpus,
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


def _model(stage: Stage, folder: Path, makers: Mapping[str, Stage], tones: Sequence[str]) -> ModelFacts:
    """Read a model's scores, first samples and greedy answers. No others are shown, and all would fill the memory."""
    samples = (s for s in read_shards(folder / SAMPLES_FOLDER, EvalSample) if s.sample_idx == 0)
    return ModelFacts(
        maker=makers[stage.scored_model_stage],
        stage=stage,
        tone=tones.index(stage.scored_model_stage),
        scores=read_reports(folder),
        samples=tuple(samples),
    )
