"""Compare the training curves and the times of the stages of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from klear_core.report.charts import LineChart, Series, line_chart
from klear_core.report.compared_runs import ComparedRun, RunStage
from klear_core.report.curves import RL_CHARTS, SCORE, SFT_CHARTS, ChartSpec, problems_note, recorded_curve
from klear_core.report.text import NONE, duration

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
    """Return the stage's charts with a line for each run; of a chart with several metrics only the first is shown."""
    drawn = []
    for spec in _CHARTS[stages[0][1].manifest.kind]:
        metric, label = spec.metrics[0]
        lines: list[tuple[str, Series]] = []
        for run, stage in stages:
            lines += [(run, s) for s in stage.metrics if s.name.partition("/")[2] == metric]
        title = f"{spec.title}: {label}" if label else spec.title
        note = spec.note + (_score_note(stages) if spec is SCORE else "")
        chart = line_chart(title, lines, note=note, is_share=spec.is_share)
        if chart is not None:
            drawn.append(chart)
    return drawn


def _score_note(stages: Sequence[tuple[str, RunStage]]) -> str:
    """Say where the problems are from, once if the runs agree, and where the intervals are."""
    notes = dict.fromkeys(problems_note(recorded_curve(stage.manifest)) for _, stage in stages)
    return f"{''.join(notes)}; each run's report has the intervals"


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
    return [*rows, CostRow(stage="all stages", cells=tuple(totals))]


def _cost(stage: RunStage | None, first: RunStage | None, *, is_first: bool) -> str:
    if stage is None:
        return NONE
    # Shared artifacts were made once; their time stands in the first run's column.
    is_shared = not is_first and first is not None and first.manifest.fingerprint == stage.manifest.fingerprint
    if is_shared:
        return "the same artifact"
    tries = f", attempt {stage.manifest.attempts}" if stage.manifest.attempts > 1 else ""
    return duration(stage.manifest.wall_s) + tries
