"""Read finished runs for a comparison, from the artifacts of their reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from pydantic import JsonValue

from klear_core.artifacts.manifest import Manifest, read_manifest
from klear_core.artifacts.model_files import is_same_model
from klear_core.artifacts.remote_paths import store_of
from klear_core.artifacts.run_history import RUNS, RunHistory, RunRecord
from klear_core.config.data_jobs import section_of, sections_used
from klear_core.config.settings import DifferentSetting, different_settings
from klear_core.errors import ArtifactError
from klear_core.evaluate.answers.stored import is_evaluation
from klear_core.evaluate.counts import CountsBy, count_stored
from klear_core.metrics import METRICS_FILE
from klear_core.report.charts import LineChart, Series, line_chart
from klear_core.report.run.build import RL_CHARTS, SCORE, SFT_CHARTS, ChartSpec, problems_note, recorded_inline_eval
from klear_core.report.run.facts import read_series
from klear_core.scores import NONE, EvalReport, duration, points, read_reports


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
        return count_stored(self.evaluation)

    @cached_property
    def reports(self) -> Mapping[str, EvalReport]:
        """Its stored scores by benchmark."""
        return {report.benchmark: report for report in read_reports(self.evaluation)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run, as its report's artifact names it."""

    label: str
    folder: Path
    """Artifact of the report."""
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
        stage = RunStage(
            name=record.role,
            folder=found.path,
            manifest=read_manifest(found.path),
            metrics=read_series(found.path / METRICS_FILE),
        )
        stages.append(stage)
    return ComparedRun(
        label=f"{config.get('name', 'run')}, seed {config.get('seed')}",
        folder=report,
        fingerprint=manifest.fingerprint,
        made=f"{manifest.created_at:%Y-%m-%d %H:%M}",
        config=config,
        stages=tuple(_in_order(stages)),
        models=tuple(_models(_in_order(stages))),
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


def settings_in_common(runs: Sequence[ComparedRun], *, absent: str) -> list[DifferentSetting]:
    """Return the settings that differ, of the whole run or of stages that all runs have.

    A config has values for all stages: those of an evaluation alone say nothing about training.
    """
    used = frozenset.intersection(*(run.sections for run in runs))
    found = different_settings([run.config for run in runs], absent=absent)
    return [setting for setting in found if section_of(setting.key) in used | {""}]


def named_by_settings(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Return runs of one profile with labels of the settings that differ, if these are few; others as they are.

    Runs whose labels would still be the same also have their number.
    """
    names = {str(run.config.get("name", "run")) for run in runs}
    different = settings_in_common(runs, absent=NONE)
    labels = [run.label for run in runs]
    if len(names) == 1 and 0 < len(different) <= _MAX_NAMED:
        keys = [".".join(setting.key.split(".")[-2:]) for setting in different]
        values = [[value.strip('"') for value in setting.values] for setting in different]
        labels = []
        for own in zip(*values, strict=True):
            said = ", ".join(f"{key} {value}" for key, value in zip(keys, own, strict=True))
            labels.append(f"{min(names)}, {said}")
    named = []
    for number, (run, label) in enumerate(zip(runs, labels, strict=True), start=1):
        named.append(replace(run, label=label if labels.count(label) == 1 else f"{number}: {label}"))
    return named


_MAX_NAMED = 3
"""More settings than these would be no label."""


def seed_groups(runs: Sequence[ComparedRun]) -> list[tuple[str, list[int]]]:
    """Return the groups of runs that differ in their seed alone, as a label and the runs' numbers."""
    groups: list[list[int]] = []
    for i, run in enumerate(runs):
        for group in groups:
            different = settings_in_common([runs[group[0]], run], absent=NONE)
            if {setting.key for setting in different} <= {"seed", "name"}:
                group.append(i)
                break
        else:
            groups.append([i])
    labelled = []
    for group in groups:
        seeds = {str(runs[i].config.get("seed")) for i in group}
        if len(seeds) > 1:
            parts = runs[group[0]].label.split(", ")
            labelled.append((", ".join(part for part in parts if not part.startswith("seed ")), group))
    return labelled


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


# ---- compared stages ----
# Compare the training curves and the times of the stages of several runs.


_CHARTS: dict[str, tuple[ChartSpec, ...]] = {"sft": SFT_CHARTS, "rl": RL_CHARTS}
"""Charts by the kind of the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """One stage's time in all runs."""

    stage: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCharts:
    """Curves of one training stage, with one line for each run."""

    stage: str
    charts: tuple[LineChart, ...]


def stage_charts(runs: Sequence[ComparedRun]) -> list[StageCharts]:
    """Return the curves of each training stage that a run has."""
    names = dict.fromkeys(stage.name for run in runs for stage in run.stages)
    found = []
    for name in names:
        stages = [(run.label, run.stage(name)) for run in runs]
        trained = [(label, stage) for label, stage in stages if stage and stage.manifest.kind in _CHARTS]
        if trained:
            found.append(StageCharts(stage=name, charts=tuple(_charts(trained))))
    return found


def _charts(stages: Sequence[tuple[str, RunStage]]) -> list[LineChart]:
    """Return the stage's charts with a line for each run; of a chart with several metrics only the first is shown.

    The score has the interval over other samples of its problems around it.
    """
    drawn = []
    for spec in _CHARTS[stages[0][1].manifest.kind]:
        metric, label = spec.metrics[0]
        found = [(run, _series(stage)) for run, stage in stages]
        lines = [(run, by_name[metric]) for run, by_name in found if metric in by_name]
        title = f"{spec.title}: {label}" if label else spec.title
        note, bands = spec.note, {}
        if spec is SCORE:
            note += _score_note(stages)
            low, high = (name for name, _ in spec.metrics[1:])
            bands = {run: (by_name[low], by_name[high]) for run, by_name in found if {low, high} <= by_name.keys()}
        chart = line_chart(title, lines, note=note, is_share=spec.is_share, bands=bands)
        if chart is not None:
            drawn.append(chart)
    return drawn


def _series(stage: RunStage) -> dict[str, Series]:
    """Return the stage's metrics by name without the stage's own."""
    return {series.name.partition("/")[2]: series for series in stage.metrics}


def _score_note(stages: Sequence[tuple[str, RunStage]]) -> str:
    """Say where the problems are from, once if the runs agree, and what the areas are."""
    notes = dict.fromkeys(problems_note(recorded_inline_eval(stage.manifest)) for _, stage in stages)
    return f"{''.join(notes)}; shaded: the interval over other samples of these problems"


def cost_rows(runs: Sequence[ComparedRun]) -> list[CostRow]:
    """Return each stage's time in each run, and the sums. An artifact that the first run has too shows no time."""
    names = dict.fromkeys(stage.name for run in runs for stage in run.stages)
    rows = []
    for name in names:
        stages = [run.stage(name) for run in runs]
        cells = [_cost(stage, stages[0], is_first=i == 0) for i, stage in enumerate(stages)]
        rows.append(CostRow(stage=name, cells=tuple(cells)))
    totals = []
    for run in runs:
        totals.append(duration(sum(stage.manifest.wall_s for stage in run.stages)))
    return [*rows, CostRow(stage="all stages", cells=tuple(totals)), *_per_point(runs)]


def _per_point(runs: Sequence[ComparedRun]) -> Iterator[CostRow]:
    """Yield each run's GPU-hours and their price where known, its gain, and what a point of it took."""
    records = [_record_of(run) for run in runs]
    gains = [_gain(run) for run in runs]
    hours = [record.gpu_hours if record else 0.0 for record in records]
    if any(hours):
        yield CostRow(stage="GPU-hours of new stages", cells=tuple(f"{h:,.1f}" if h else NONE for h in hours))
    prices = [record.price_per_gpu_hour if record else None for record in records]
    costs = [h * price if h and price is not None else None for h, price in zip(hours, prices, strict=True)]
    if any(costs):
        yield CostRow(stage="price of these", cells=tuple(NONE if c is None else f"{c:,.2f}" for c in costs))
    if not any(gains):
        return
    yield CostRow(stage="gain, first to last model", cells=tuple(NONE if g is None else points(g) for g in gains))
    seconds = [sum(stage.manifest.wall_s for stage in run.stages) for run in runs]
    tokens = [sum(stage.manifest.counts.get("sampled_tokens", 0) for stage in run.stages) for run in runs]
    amounts_of: dict[str, Sequence[float | None]] = {
        "GPU-hours": hours,
        "price": costs,
        "time": seconds,
        "tokens sampled by RL": tokens,
    }
    for what, amounts in amounts_of.items():
        cells = []
        for amount, gain in zip(amounts, gains, strict=True):
            is_known = amount and gain is not None and gain > 0
            cells.append(_amount(what, amount / (100 * gain)) if is_known and amount and gain else NONE)
        if any(cell != NONE for cell in cells):
            yield CostRow(stage=f"{what} per point", cells=tuple(cells))


def _amount(what: str, amount: float) -> str:
    if what == "time":
        return duration(amount)
    return f"{amount:,.0f}" if what.startswith("tokens") else f"{amount:,.2f}"


def _record_of(run: ComparedRun) -> RunRecord | None:
    """Return the record that the run kept of itself in its workspace; None if that is gone."""
    root = run.folder.parents[2]
    records = RunHistory(root, None).records() if (root / RUNS).is_dir() else []
    return next((one for one in records if any(stage.fingerprint == run.fingerprint for stage in one.stages)), None)


def _gain(run: ComparedRun) -> float | None:
    """Return the gain of the run's last model over its first, averaged over the benchmarks that both have."""
    if len(run.models) < 2:
        return None
    first, last = run.models[0].reports, run.models[-1].reports
    gains = [last[name].avg.value - first[name].avg.value for name in first.keys() & last.keys()]
    return fmean(sorted(gains)) if gains else None


def _cost(stage: RunStage | None, first: RunStage | None, *, is_first: bool) -> str:
    if stage is None:
        return NONE
    # Shared artifacts were made once; their time stands in the first run's column.
    is_shared = not is_first and first is not None and first.manifest.fingerprint == stage.manifest.fingerprint
    if is_shared:
        return "the same artifact"
    tries = f", attempt {stage.manifest.attempts}" if stage.manifest.attempts > 1 else ""
    return duration(stage.manifest.wall_s) + tries
